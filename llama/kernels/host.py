"""The kernels of this machine's CPU, whichever kind it is.

Out: the table for models on the CPU. Each kernel finds out by itself whether its library runs here,
when it is first called, so that this compiles nothing. Models must not be known here.
"""

from llama.kernels.cpu import table
from llama.ops.kernels import Kernels


def host_kernels() -> Kernels:
    """Return the kernels of models on the CPU."""
    return table.KERNELS
