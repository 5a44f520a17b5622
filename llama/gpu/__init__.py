"""Kernels that a model uses on its GPU once they agreed with the operators that define them.

selection.py is the entry: a rank's device, dtype and sizes in, its table of kernels and its
recorder of graphs out. check.py compares kernels, on the inputs of cases.py.
"""
