"""One file per format of matrices; choice.py chooses between them.

This module imports nothing, so that `llama.weights.plain` does not load all other formats.
"""
