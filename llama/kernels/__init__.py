"""Kernels that replace operators where they give the same results: a folder for each kind.

A folder has a function `table`, which fills `llama.ops.kernels.Kernels`. This module imports
nothing, so that one kind of kernels does not load another.
"""
