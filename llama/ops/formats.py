"""The blocks and formats of packed weights that code without kernels has to know.

In: numbers of rows. Out: numbers of blocks. Ranks divide a model in whole blocks, and a weight says
its format, whether or not a kernel runs. `llama.kernels.cpu.constants` compares these numbers with
those of the C++ kernels.
"""

from enum import IntEnum

N_BLOCK = 32  # rows of a weight that are packed together


class ElementFormat(IntEnum):
    """How the elements of a packed weight are stored, on a CPU and on a GPU."""

    BF16 = 0
    INT8 = 1
    FP8 = 2
    NIBBLES = 3
    SIX_BITS = 4


def num_blocks(n: int) -> int:
    """Return the number of blocks of a weight of n rows, the last of which may be padded."""
    return -(-n // N_BLOCK)
