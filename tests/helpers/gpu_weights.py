"""Quantized matrices (64, 512) in the formats that files have, by name."""

import torch
from torch import Tensor

from helpers.rounding import product_bound
from llama.weights.bytes import BytesWeight, Fp8Weight
from llama.weights.coded import Coded
from llama.weights.nibbles import NibblesWeight

N, K = 64, 512
_draw = torch.Generator().manual_seed(0)


def _values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_draw)


def _codes(count: int) -> Tensor:
    return torch.randint(count, (N, K), dtype=torch.uint8, generator=_draw)


def _k_scales(groups: int) -> Tensor:
    """Return scales as the k-quants store them: six bits each, and a float16 for eight groups."""
    counts = torch.randint(1, 64, (N, groups // 8, 8), generator=_draw)
    return (counts * _values(N, groups // 8, 1).half().float()).flatten(1)


_PLAIN = _values(N, K).bfloat16()
FILES = {
    "a byte": BytesWeight.rounded(_PLAIN),
    "e4m3": Fp8Weight.rounded(_PLAIN),
    "four bits": NibblesWeight.rounded(_PLAIN),
    "Q4_K": Coded(_codes(16), torch.arange(16.0), _k_scales(K // 32), -_k_scales(K // 32)),
    "Q6_K": Coded(_codes(64), torch.arange(-32.0, 32), _k_scales(K // 16)),
    "groups of 128": Coded(_codes(16), torch.arange(-8.0, 8), _values(N, K // 128)),
    "blocks of e4m3": Coded(_codes(127), Fp8Weight.rounded(_PLAIN).table, _values(N, K // 128)),
}


def coded_bound(x: Tensor, file: Coded, *, few_rows: bool) -> Tensor:
    """Return the bound of the error of products in float32, in any order of the sum: (M, N).

    No term is larger than its parts: code times scale, and offset.

    Args:
        x: The rows (M, K).
        file: The matrix (N, K).
        few_rows: Whether the kernel of few rows computes them, which adds 1,024 to each code.
    """
    k = x.shape[1]

    def spread(of_groups: Tensor) -> Tensor:
        return of_groups.double().abs().repeat_interleave(k // of_groups.shape[1], 1)

    codes = file.table.double()[file.codes.long()].abs()
    parts = (codes + 1024 * few_rows) * spread(file.scale)
    if file.offset is not None:
        parts += spread(file.offset)
    return product_bound(x, parts)
