"""Batch files: a file of requests in, a file of results out."""
