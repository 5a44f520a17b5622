"""Kernels and CUDA graphs that a model uses on its GPU once they passed a check there.

selection.py is the entry: a rank's device, dtype and sizes in, its table of kernels and its
recorder of graphs out. The checks run in child processes: selfcheck.py tries kernels,
graph_check.py graphs. selfcheck_cache.py starts them and stores their results. This module imports
nothing, so that a child loads only what it tries.
"""
