"""The interfaces that programs for other runtimes expect.

These are vLLM's classes, FastChat's model worker, and the functions that model hosts call.
"""
