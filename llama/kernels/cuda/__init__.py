"""Triton kernels for NVIDIA GPUs of capability 8.0 and up; each op's torch body defines it."""
