"""The order in which a GPU's kernels read a quantized weight: that of the matrix units' fragments.

In: the values of a weight in blocks of 32 rows, as the CPU packs them. Out: the same bytes, or
nibbles, in another order within each block; and rows of elements from there. In fragment order the
16 bytes that a thread loads at once are those that it multiplies.

A fragment is 16 rows and 32 columns of bytes, or 64 columns of nibbles. It has 512 bytes: four
words of 32 bits for each of 32 threads. Thread t has rows t / 4 and t / 4 + 8, and of each 16
columns four, its quad, as the matrix units take them: columns 8 h + 2 (t % 4) + j, where h and j
are 0 or 1. Its word w has

- of bytes, two columns of the quad, h = w % 2, in 16 columns w / 2: byte 2 j + r is column j of
  row r;
- of nibbles, the whole quad in 16 columns w: nibble 4 j + 2 h + r, from the lowest bits on, is
  column j of half h of row r. So a mask takes two columns of a row, one in each half of a word.

The fragments of 16 rows lie one after another, and after them those of the other 16 rows of a
block.

The names of dimensions are: block, tile (16 rows), fragment, thread row (8), quad (4), the index of
16 columns in a fragment, high (h) and low (j), and row half.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from llama.ops.formats import N_BLOCK

_CHUNK_BYTES = 1 << 26  # bytes that are put into another order at a time
_PAIR_MASK = 0x000F000F  # the lowest nibble of each half of a word


def bytes_in_fragments(values: Tensor) -> Tensor:
    """Return values (N/32, K/2, 32, 2) of one byte in fragment order, in the same shape."""

    def reorder(blocks: Tensor) -> Tensor:
        # block, fragment, 16 columns, high, quad, tile, row half, thread row, low
        split = blocks.unflatten(1, (-1, 2, 2, 4)).unflatten(5, (2, 2, 8))
        ordered: Tensor = split.permute(0, 5, 1, 7, 4, 2, 3, 8, 6)
        return ordered.reshape(blocks.shape)

    return _in_chunks(values, reorder)


def nibbles_in_fragments(values: Tensor) -> Tensor:
    """Return values (N/32, K/8, 32) of eight nibbles in fragment order, in the same shape."""

    def reorder(blocks: Tensor) -> Tensor:
        # block, fragment, 16 columns, high, tile, row half, thread row
        split = blocks.unflatten(1, (-1, 4, 2)).unflatten(4, (2, 2, 8))
        quads = []
        for quad in range(4):
            packed = torch.zeros_like(split[:, :, :, 0, :, 0])
            for high in range(2):
                for row_half in range(2):
                    source = split[:, :, :, high, :, row_half]
                    pair = source >> 4 * quad & _PAIR_MASK
                    packed |= pair << 4 * (2 * high + row_half)
            quads.append(packed)
        # block, fragment, 16 columns, tile, thread row, quad
        joined = torch.stack(quads, -1)
        return joined.permute(0, 3, 1, 4, 5, 2).reshape(blocks.shape)

    return _in_chunks(values, reorder)


def rows_of_bytes(values: Tensor, ids: Tensor) -> Tensor:
    """Return rows (..., K) of values of one byte in fragment order.

    Args:
        values: As `bytes_in_fragments` returns them.
        ids: The indices (...) of the rows.
    """
    # block, tile, fragment, thread row, quad, 16 columns, high, low, row half
    split = values.flatten(1).unflatten(1, (2, -1, 8, 4, 2, 2, 2, 2))
    block, tile, row_half, thread_row = _indices(ids)
    rows = split.view(torch.uint8)[block, tile, :, thread_row, :, :, :, :, row_half]
    # ..., fragment, 16 columns, high, quad, low
    in_order: Tensor = rows.movedim(-4, -2).flatten(-5)
    return in_order.view(values.dtype)


def rows_of_nibbles(values: Tensor, ids: Tensor) -> Tensor:
    """Return the codes (..., K) of rows of nibbles in fragment order, in int32.

    Args:
        values: As `nibbles_in_fragments` returns them.
        ids: The indices (...) of the rows.
    """
    # block, tile, fragment, thread row, quad, 16 columns
    split = values.flatten(1).unflatten(1, (2, -1, 8, 4, 4))
    block, tile, row_half, thread_row = _indices(ids)
    packed = split[block, tile, :, thread_row].transpose(-1, -2)  # ..., fragment, 16 columns, quad
    # high, low
    shifts = torch.tensor(((0, 16), (8, 24)), dtype=torch.int32, device=values.device)
    row_shift = (4 * row_half).int()[..., None, None, None, None, None]
    codes: Tensor = packed[..., None, None] >> (shifts + row_shift) & 15
    return codes.transpose(-3, -2).flatten(-5)


def _indices(ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the block, tile, row half and thread row of each row."""
    row = ids % N_BLOCK
    return ids // N_BLOCK, row // 16, row // 8 % 2, row % 8


def _in_chunks(values: Tensor, reorder: Callable[[Tensor], Tensor]) -> Tensor:
    """Return blocks in another order; few at a time, as that takes memory of their size."""
    out = torch.empty_like(values, memory_format=torch.contiguous_format)
    bytes_per_block = values[0].nbytes
    chunk = max(_CHUNK_BYTES // bytes_per_block, 1)
    for source, target in zip(values.split(chunk), out.split(chunk), strict=True):
        target.copy_(reorder(source))
    return out
