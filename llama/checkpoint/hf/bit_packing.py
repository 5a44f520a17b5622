"""Codes of a few bits that int32s hold.

In: int32s and the rows and columns that are wanted. Out: their codes, a byte each. Nothing is known
here of what codes stand for.

Shapes: N outputs (rows), K inputs (columns).
"""

import math
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


def int32s_of(wanted: slice, bits: int) -> tuple[slice, slice]:
    """Return the int32s that hold some fields, and where these are among the fields of those.

    The int32s hold whole fields: three of them are the fewest that hold whole fields of 3 bits.

    Args:
        wanted: The fields, with both ends given.
        bits: Bits per field.
    """
    divisor = math.gcd(bits, 32)
    units, within = covering(wanted, 32 // divisor)
    per_unit = bits // divisor
    return slice(units.start * per_unit, units.stop * per_unit), within


def unpack_int32(packed: Tensor, bits: int) -> Tensor:
    """Return the fields of int32s, the lowest bits first: (..., w) -> (..., w * 32 / bits).

    A field may begin in an int32 and end in the next one. The int32s must hold whole fields.
    """
    per_unit = bits // math.gcd(bits, 32)
    starts = torch.arange(0, 32 * per_unit, bits)
    shifts = (starts % 32).to(torch.int32)
    mask = (1 << bits) - 1
    if per_unit == 1:
        fields = packed.unsqueeze(-1) >> shifts & mask
        return fields.byte().flatten(-2)
    units = packed.unflatten(-1, (-1, per_unit))
    first = starts // 32
    bits_there = 32 - shifts
    mask_there: Tensor = (1 << bits_there.clamp(max=bits)) - 1
    begun: Tensor = units[..., first] >> shifts & mask_there
    ended: Tensor = units[..., (first + 1) % per_unit] << bits_there & mask & ~mask_there
    return (begun | ended).byte().flatten(-2)


@dataclass(frozen=True)
class PackedInRows:
    """Codes (N, K) of which each int32 holds several along K.

    Attributes:
        packed: (N, K * bits / 32) int32.
        bits: Bits per code.
    """

    packed: Tensor
    bits: int

    def fits(self, n: int, k: int) -> bool:
        """Return whether these are the codes of a matrix (n, k)."""
        shape = (n, k * self.bits // 32)
        return self.packed.dtype is torch.int32 and self.packed.shape == shape

    def read(self, rows: slice, columns: slice) -> Tensor:
        """Return some rows and columns: (n, k) uint8."""
        items, within = int32s_of(columns, self.bits)
        return unpack_int32(self.packed[rows, items], self.bits)[:, within]


@dataclass(frozen=True)
class PackedAcrossRows:
    """Codes (N, K) of which each int32 holds several along N.

    Attributes:
        packed: (K, N * bits / 32) int32.
        bits: Bits per code.
        order: The field of an int32, counted from the lowest bits, that holds each neighbour; None
            where they are in order.
        less: What was subtracted from each code, modulo 2**bits.
    """

    packed: Tensor
    bits: int
    order: Sequence[int] | None = None
    less: int = 0

    def fits(self, n: int, k: int) -> bool:
        """Return whether these are the codes of a matrix (n, k)."""
        shape = (k, n * self.bits // 32)
        return self.packed.dtype is torch.int32 and self.packed.shape == shape

    def read(self, rows: slice, columns: slice) -> Tensor:
        """Return some rows and columns: (n, k) uint8."""
        items, within = int32s_of(rows, self.bits)
        fields = unpack_int32(self.packed[columns, items], self.bits)
        if self.order is not None:
            by_int32 = fields.view(len(fields), -1, len(self.order))
            fields = by_int32[..., list(self.order)].flatten(1)
        mask = (1 << self.bits) - 1
        return fields[:, within].t() + self.less & mask
