"""Four or six bits per weight, in words of several columns, with scales for groups of columns.

In: a `Coded`, or bf16 that is rounded at load. Out: a weight. Four bits are codes of up to 16
elements, in words of 8 columns; elements are taken in bf16, which is exact for all tables but
that of nf4. Six bits are up to 64 consecutive integers (Q6_K, Q5_K, Q5_0), in words of 16 columns.
bf16 is rounded in groups of 32 to offset + scale * code, with a small squared error (pack.cpp).
Files must not be known here.
"""

from typing import Self

import torch
from torch import Tensor

from llama.kernels.cpu import native
from llama.ops.formats import N_BLOCK, ElementFormat, num_blocks
from llama.weights.blocks import Layout
from llama.weights.bytes import BytesWeight
from llama.weights.coded import Coded
from llama.weights.fragments import nibbles_in_fragments, rows_of_nibbles
from llama.weights.groups import GroupedWeight
from llama.weights.scales import EIGHT

_GROUP = 32  # columns per group of a matrix that is rounded, as in pack.cpp
_NUM_CANDIDATES = 10  # scales that are tried for a group


class NibblesWeight(GroupedWeight):
    """A matrix of four-bit codes whose `values` are (N/32, K/8, 32) int32."""

    kind = ElementFormat.NIBBLES.value
    layout = Layout(
        dtype=torch.int32,
        columns=8,
        tail=(N_BLOCK,),
    )
    in_files = ("int", 4)
    pack_codes = "pack_nibbles"

    @classmethod
    def num_bytes(cls, n: int, k: int) -> int:
        """Return the bytes of a matrix (N, K) that was rounded at load."""
        scales = _empty_scales(n, k, "meta")
        return num_blocks(n) * N_BLOCK * k // 2 + scales.nbytes

    @classmethod
    def fits(cls, plain: Tensor) -> bool:
        """Return whether a matrix can be cut into blocks and groups, and the CPU kernels run."""
        if not super().fits(plain):
            return False
        has_groups = plain.shape[1] % _GROUP == 0
        return has_groups and native.kernels() is not None

    @classmethod
    def pack(cls, plain: Tensor) -> Self:
        """Return a bf16 matrix, rounded to this format."""
        n, k = plain.shape
        table = torch.arange(16.0)
        values = cls.empty(n, k)
        scales = _empty_scales(n, k)
        threads = torch.get_num_threads()
        result = native.call("pack_int4", plain, values, scales, n, k, threads)
        weight = cls((n, k), values, scales, table)
        weight.set_flags(result)
        return weight

    @classmethod
    def rounded(cls, plain: Tensor) -> Coded:
        """Return the codes and scales of a bf16 matrix, without the offsets that `pack` has.

        The layouts of files have no offsets. Of ten scales of a group, in bf16, the one with the
        smallest squared error is taken.
        """
        x = plain.float()
        x = torch.unflatten(x, 1, (-1, _GROUP))
        largest_index = x.abs().argmax(2, keepdim=True)
        largest = x.gather(2, largest_index)
        scale = torch.ones_like(largest)
        min_error = torch.full_like(largest, torch.inf)
        for i in range(_NUM_CANDIDATES):
            code_of_largest = -7.5 - 0.25 * i
            candidate = largest / code_of_largest
            candidate = candidate.bfloat16().float()
            candidate.masked_fill_(candidate == 0, 1)
            difference = _symmetric(x, candidate)
            difference *= candidate
            difference -= x
            error = difference.square_().sum(2, keepdim=True)
            is_better = error < min_error
            scale = torch.where(is_better, candidate, scale)
            min_error = torch.where(is_better, error, min_error)
        codes = _symmetric(x, scale)
        codes = codes.add_(8).byte()
        return Coded(
            codes=codes.flatten(1),
            table=torch.arange(-8.0, 8),
            scale=scale[..., 0],
        )

    @classmethod
    def can_hold(cls, table: Tensor) -> bool:
        """Return whether four bits can number the entries of a table."""
        return len(table) <= 16

    @classmethod
    def reordered(cls, values: Tensor) -> Tensor:
        """Return values in fragment order, in the same shape."""
        return nibbles_in_fragments(values)

    def elements(self, ids: Tensor) -> Tensor:
        """Return rows (..., K) of elements in float32, before they are scaled."""
        codes = self._codes(ids)
        if self.first is None:
            return self.table[codes]
        return codes.float() + self.first

    def _codes(self, ids: Tensor) -> Tensor:
        """Return the codes (..., K) of rows, in int32."""
        if self.is_fragmented:
            return rows_of_nibbles(self.values, ids)
        block = ids // N_BLOCK
        row = ids % N_BLOCK
        packed = self.values[block, :, row]
        columns = torch.arange(8, dtype=torch.int32, device=packed.device)
        # Even columns lie in the lower half of a word, odd ones in the upper half.
        half = columns % 2
        shifts = half * 16 + columns // 2 * 4
        codes = packed[..., None] >> shifts
        return (codes & 15).flatten(-2)


class SixBitsWeight(GroupedWeight):
    """A matrix of six-bit codes whose `values` are (N/32, K/16, 3, 32) int32.

    The element of code 0 is table[0].
    """

    kind = ElementFormat.SIX_BITS.value
    layout = Layout(
        dtype=torch.int32,
        columns=16,
        tail=(3, N_BLOCK),
    )
    pack_codes = "pack_six_bits"

    @classmethod
    def can_hold(cls, table: Tensor) -> bool:
        """Return whether a table has at most 64 consecutive integers."""
        return len(table) <= 64 and BytesWeight.can_hold(table)

    def elements(self, ids: Tensor) -> Tensor:
        """Return rows (..., K) of elements in float32, before they are scaled."""
        block = ids // N_BLOCK
        row = ids % N_BLOCK
        packed = self.values[block, :, :, row]
        shifts = torch.tensor((12, 8, 4)).int()
        masks = torch.tensor((0xF000F, 0xF000F0, 0xF000F00)).int()
        # The bits that each of three words has left over are those of a fourth word.
        pieces = (packed >> shifts) & masks
        fourth = pieces.sum(-1, keepdim=True, dtype=torch.int32)
        integers = torch.cat([packed, fourth], -1)
        code_shifts = torch.tensor((0, 16, 6, 22))
        codes = integers[..., None] >> code_shifts
        codes = (codes & 63).flatten(-3)
        return codes + self.table[0]


def _symmetric(x: Tensor, scale: Tensor) -> Tensor:
    """Return x in units of the scale, rounded to integers from -8 to 7."""
    codes = x / scale
    return codes.round_().clamp_(-8, 7)


def _empty_scales(n: int, k: int, device: str = "cpu") -> Tensor:
    """Return memory for a scale and an offset per group of a matrix that is rounded.

    They take 10 bits each where the number of groups is a multiple of 8.
    """
    blocks = num_blocks(n)
    groups = k // _GROUP
    if groups % 8:
        halves_shape = (blocks, groups, 2, N_BLOCK)
        return torch.empty(halves_shape, dtype=torch.float16, device=device)
    eights_shape = (blocks, groups // 8, 2 * EIGHT)
    return torch.empty(eights_shape, dtype=torch.uint8, device=device)
