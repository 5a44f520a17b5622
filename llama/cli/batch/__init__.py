"""Batch jobs: the input is a file of requests, the output a file of results."""
