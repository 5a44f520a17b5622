"""Codes of a few bits that int32s hold.

In: int32s and the rows and columns that are wanted. Out: their codes, a byte each. Nothing is known
here of what codes stand for.

Shapes: N outputs (rows), K inputs (columns).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def covering(wanted: slice, per_item: int) -> tuple[slice, slice]:
    """Return the items that hold some fields, and where these are among the items' fields.

    Args:
        wanted: The fields, with both ends given.
        per_item: Fields per item.
    """
    first = wanted.start // per_item
    end = -(-wanted.stop // per_item)
    first_field = first * per_item
    return slice(first, end), slice(wanted.start - first_field, wanted.stop - first_field)


def unpack_int32(packed: Tensor, bits: int) -> Tensor:
    """Return the fields of int32s, the lowest bits first: (..., w) -> (..., w * 32 / bits)."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    mask = (1 << bits) - 1
    fields = packed.unsqueeze(-1) >> shifts & mask
    return fields.byte().flatten(-2)


@dataclass(frozen=True)
class PackedAcrossRows:
    """Codes (N, K) of which each int32 holds several along N.

    Attributes:
        packed: (K, N * bits / 32) int32.
        bits: Bits per code.
        order: The field of an int32, counted from the lowest bits, that holds each neighbour.
    """

    packed: Tensor
    bits: int
    order: Sequence[int]

    def fits(self, n: int, k: int) -> bool:
        """Return whether these are the codes of a matrix (n, k)."""
        shape = (k, n * self.bits // 32)
        return self.packed.dtype is torch.int32 and self.packed.shape == shape

    def read(self, rows: slice, columns: slice) -> Tensor:
        """Return some rows and columns: (n, k) uint8."""
        per_int32 = 32 // self.bits
        items, within = covering(rows, per_int32)
        fields = unpack_int32(self.packed[columns, items], self.bits)
        by_int32 = fields.view(len(fields), -1, per_int32)
        in_order = by_int32[..., list(self.order)].flatten(1)
        return in_order[:, within].t()
