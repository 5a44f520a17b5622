"""One byte a weight, in blocks as bf16 has them: whole numbers from -128 to 127, or e4m3.

In: a `Coded` of such numbers, or bf16 that is rounded at load, with a scale a row. The largest
number of a row then becomes 127, or 448; int8 is off by at most half of the row's scale.
"""

from typing import Self

import torch
from torch import Tensor

from llama.ops.cpu import native
from llama.ops.cpu.constants import N_BLOCK, ElementFormat
from llama.weights.blocks import in_blocks, workspace
from llama.weights.coded import Coded
from llama.weights.groups import GroupedWeight, pack_extras, pack_scales

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
_ROWS = 4096  # that are rounded at once


class BytesWeight(GroupedWeight):
    """values: (N/32, K/2, 32, 2) int8."""

    kind = ElementFormat.INT8.value
    layout = (torch.int8, 2, (N_BLOCK, 2))
    in_files = "int", 8
    unit = 1.0  # of the scales

    @classmethod
    def num_bytes(cls, n: int, k: int) -> int:
        return n * k + 4 * n

    @classmethod
    def can_hold(cls, table: Tensor) -> bool:
        first, count = float(table[0]), len(table)
        in_range = first.is_integer() and -128 <= first <= 128 - count
        return in_range and torch.equal(table, first + torch.arange(count))

    @classmethod
    def of(cls, coded: Coded) -> Self:
        codes, values = coded.codes.contiguous(), cls.empty(*coded.shape)
        if native.kernels() is None or codes.shape[1] % 8:
            values.view(torch.uint8).copy_(in_blocks(codes))
        else:
            native.call("pack_bytes", codes, values.view(torch.uint8), *codes.shape)
        values.view(torch.uint8).add_(int(coded.table[0]) % 256)
        held = cls(coded.shape, values, pack_scales(coded, cls.unit), **pack_extras(coded))
        scale = coded.scale
        held.is_finite, held.has_empty_row = bool(scale.isfinite().all()), not scale.all()
        return held

    @classmethod
    def rounded(cls, plain: Tensor) -> Coded:
        """The same numbers as those of `pack`."""
        scale, units = _units(plain, 127)
        codes = (plain.float() / units).round() + 128
        return Coded(codes.byte(), torch.arange(-128.0, 128), scale)

    @classmethod
    def pack(cls, plain: Tensor) -> Self:
        n, k = plain.shape
        if native.kernels() is None or cls is Fp8Weight:  # which torch rounds
            return cls.of(cls.rounded(plain))
        values, scales = cls.empty(n, k), torch.empty(n // N_BLOCK, 1, 1, N_BLOCK)
        room = workspace("pack_workspace", k, torch.get_num_threads())
        native.call("pack_rows", plain, values, scales, room, n, k)
        held = cls((n, k), values, scales)
        held.is_finite, held.has_empty_row = bool(scales.isfinite().all()), not scales.all()
        return held

    def numbers(self, ids: Tensor) -> Tensor:
        return self.packed_rows(ids).float()


class Fp8Weight(BytesWeight):
    """values: (N/32, K/2, 32, 2) e4m3. The kernels take 2^-8 of them, so the scales are larger."""

    kind = ElementFormat.FP8.value
    layout = (E4M3.dtype, 2, (N_BLOCK, 2))
    in_files = "float", 8
    unit = 2**-8

    @classmethod
    def can_hold(cls, table: Tensor) -> bool:
        return torch.equal(table.nan_to_num(), E4M3.float().nan_to_num())

    @classmethod
    def rounded(cls, plain: Tensor) -> Coded:
        scale, units = _units(plain, 448)
        pieces = zip(plain.split(_ROWS), units.split(_ROWS), strict=True)
        codes = torch.cat([(rows / unit).to(E4M3.dtype) for rows, unit in pieces])
        return Coded(codes.view(torch.uint8), E4M3.float(), scale)

    def numbers(self, ids: Tensor) -> Tensor:
        return super().numbers(ids) * self.unit


def _units(plain: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """(N, K) -> the scale of each row (N, 1), by which its largest number becomes `largest`; and
    what to divide by, where it is 0 too."""
    scale = plain.abs().amax(1, keepdim=True).float() / largest
    return scale, scale.masked_fill(scale == 0, 1)
