"""Four bits a weight: codes of up to 16 numbers, in words of 8 k, and a scale or more a group. Or
six: whole numbers that follow one another, up to 64 of them (Q6_K, Q5_K, Q5_0), in words of 16 k.

In: a `Coded` of such a table, whose numbers are taken in bf16 (only nf4's are not such); or bf16
rounded at load in groups of 32: offset + scale * code, with a small squared error (pack.cpp).
"""

from typing import Self

import torch
from torch import Tensor

from llama.ops.cpu import native
from llama.ops.cpu.constants import N_BLOCK, ElementFormat
from llama.weights.blocks import INFINITY
from llama.weights.bytes import BytesWeight
from llama.weights.coded import Coded
from llama.weights.groups import EIGHT, GroupedWeight

_GROUP = 32  # of a matrix that is rounded, as in pack.cpp


class NibblesWeight(GroupedWeight):
    """values: (N/32, K/8, 32) int32."""

    kind = ElementFormat.NIBBLES.value
    layout = (torch.int32, 8, (N_BLOCK,))
    in_files, pack_codes = ("int", 4), "pack_nibbles"

    @classmethod
    def num_bytes(cls, n: int, k: int) -> int:
        return n * k // 2 + _scales_of_rounded(n, k, "meta").nbytes

    @classmethod
    def fits(cls, plain: Tensor) -> bool:
        return super().fits(plain) and plain.shape[1] % _GROUP == 0 and native.kernels() is not None

    @classmethod
    def pack(cls, plain: Tensor) -> Self:
        n, k = plain.shape
        values, scales = cls.empty(n, k), _scales_of_rounded(n, k)
        threads = torch.get_num_threads()
        largest = native.call("pack_int4", plain, values, scales, n, k, threads)
        held = cls((n, k), values, scales, torch.arange(16.0))
        held.is_finite, held.has_empty_row = largest % 2**16 < INFINITY, largest >= 2**16
        return held

    @classmethod
    def rounded(cls, plain: Tensor) -> Coded:
        """Without the offsets of `pack`, which files have no room for: of ten scales of a group, in
        bf16, the one with the least squared error."""
        x = plain.float().unflatten(1, (-1, _GROUP))
        largest = x.gather(2, x.abs().argmax(2, keepdim=True))
        scale, least = torch.ones_like(largest), torch.full_like(largest, torch.inf)
        for i in range(10):
            unit = (largest / (-7.5 - 0.25 * i)).bfloat16().float()
            unit.masked_fill_(unit == 0, 1)
            error = _symmetric(x, unit).mul_(unit).sub_(x).square_().sum(2, keepdim=True)
            better = error < least
            scale, least = torch.where(better, unit, scale), torch.where(better, error, least)
        codes = _symmetric(x, scale).add_(8).byte()
        return Coded(codes.flatten(1), torch.arange(-8.0, 8), scale[..., 0])

    @classmethod
    def can_hold(cls, table: Tensor) -> bool:
        return len(table) <= 16

    def numbers(self, ids: Tensor) -> Tensor:
        words = self.values[ids // N_BLOCK, :, ids % N_BLOCK]
        places = torch.arange(8, dtype=torch.int32, device=words.device)
        codes = (words[..., None] >> places % 2 * 16 + places // 2 * 4 & 15).flatten(-2)
        return self.table[codes] if self.first is None else codes.float() + self.first


class SixBitsWeight(GroupedWeight):
    """values: (N/32, K/16, 3, 32) int32; the first of the numbers is table[0]."""

    kind = ElementFormat.SIX_BITS.value
    layout = (torch.int32, 16, (3, N_BLOCK))
    pack_codes = "pack_six_bits"

    @classmethod
    def can_hold(cls, table: Tensor) -> bool:
        return len(table) <= 64 and BytesWeight.can_hold(table)

    def numbers(self, ids: Tensor) -> Tensor:
        words = self.values[ids // N_BLOCK, :, :, ids % N_BLOCK]
        shifts, masks = torch.tensor(((12, 8, 4), (0xF000F, 0xF000F0, 0xF000F00))).int()
        fourth = (words >> shifts & masks).sum(-1, keepdim=True, dtype=torch.int32)
        pairs = torch.cat([words, fourth], -1)[..., None] >> torch.tensor((0, 16, 6, 22))
        return (pairs & 63).flatten(-3) + self.table[0]


def _symmetric(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round_().clamp_(-8, 7)


def _scales_of_rounded(n: int, k: int, device: str = "cpu") -> Tensor:
    """Room for a scale and an offset a group: 10 bits each where there are eights of groups."""
    blocks, groups = n // N_BLOCK, k // _GROUP
    if groups % 8:
        return torch.empty(blocks, groups, 2, N_BLOCK, dtype=torch.float16, device=device)
    return torch.empty(blocks, groups // 8, 2 * EIGHT, dtype=torch.uint8, device=device)
