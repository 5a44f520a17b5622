"""What programs for other runtimes expect: vLLM's classes, FastChat's worker, hosts' functions."""
