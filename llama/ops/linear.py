"""Rows times a weight: x (M, K), weight -> (M, N), bf16 with float32 sums.

A weight is (N, K) as in the checkpoint, or packed by `pack` into panels (N/32, K/2, 32, 2) in the
same memory, or by `pack_int8` at half the size. `best_layout` packs where that is faster: on x86-64
CPUs with AVX2, AVX-512 or avx512_bf16 (all three were run) and no AMX. With AMX, and on other
devices, weights stay as they are and torch does the product. The kernels are in linear.cpp: a row
of x gives the same bytes alone as in any batch, on any number of threads.

Shapes: M rows, N outputs, K inputs, T token ids.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.ops import native

PANEL = 32  # rows of a weight that are packed together
_SCRATCH_ROWS = 64 * PANEL  # of a weight that are packed at a time


class Int8Weight(NamedTuple):
    """weight[n, k] is values[n // 32, k // 2, n % 32, k % 2] * scales[n], within half a scale."""

    values: Tensor  # (N/32, K/2, 32, 2) int8
    scales: Tensor  # (N) float32


def fits(weight: Tensor) -> bool:
    """Whether a weight can be packed: (N, K) bf16 in one piece, N a multiple of 32, K even."""
    return (
        weight.dim() == 2
        and weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and weight.numel() > 0
        and weight.storage_offset() % 2 == 0  # pairs of numbers are moved as one
        and weight.shape[0] % PANEL == 0
        and weight.shape[1] % 2 == 0
    )


def best_layout(weight: Tensor) -> Tensor:
    """`weight`, packed in place where this machine's fastest product wants it so."""
    if not fits(weight) or "amx_bf16" in native.cpu_flags() or native.kernels() is None:
        return weight
    return pack(weight)


def pack(weight: Tensor) -> Tensor:
    """(N, K) -> (N/32, K/2, 32, 2): the same bytes in the same memory, in another order.

    `weight` itself must not be used after this. Takes memory for 2,048 rows besides.
    """
    assert fits(weight), (weight.shape, weight.dtype, weight.device)
    n, k = weight.shape
    for part in weight.split(_SCRATCH_ROWS):
        pairs = part.view(torch.int32).view(-1, PANEL, k // 2)
        turned = pairs.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        part.view(torch.int32).copy_(turned.view_as(pairs).view(-1, k // 2))
    return weight.view(n // PANEL, k // 2, PANEL, 2)


def unpack(weight: Tensor) -> Tensor:
    """A packed weight -> a copy of it as it was, (N, K)."""
    panels, pairs = weight.shape[:2]
    return weight.transpose(1, 2).reshape(panels * PANEL, pairs * 2)


def rows(ids: Tensor, weight: Tensor) -> Tensor:
    """Row number ids[t] of a weight, packed or not, as an embedding tied to the output: (T, K)."""
    if weight.dim() == 2:
        return F.embedding(ids, weight)
    pairs = weight.view(torch.int32)[ids // PANEL, :, ids % PANEL]  # (T, K/2, 1)
    return pairs.view(torch.bfloat16).flatten(1)


def pack_int8(weight: Tensor) -> Int8Weight:
    """(N, K) bf16 -> int8 with a scale a row: the largest of the row becomes 127."""
    assert fits(weight), (weight.shape, weight.dtype, weight.device)
    n, k = weight.shape
    values = torch.empty(n // PANEL, k // 2, PANEL, 2, dtype=torch.int8)
    native.use_huge_pages(values)
    scales = torch.empty(n)
    whole = (weight.view(-1, PANEL, k), values, scales.view(-1, PANEL))
    parts = zip(*(t.split(_SCRATCH_ROWS // PANEL) for t in whole), strict=True)
    for part, into, scale in parts:
        wide = part.float()
        scale.copy_(wide.abs().amax(-1) / 127)
        nonzero = scale.masked_fill(scale == 0, 1)
        whole_numbers = (wide / nonzero[:, :, None]).round()
        into.copy_(whole_numbers.unflatten(2, (-1, 2)).transpose(1, 2))
    return Int8Weight(values, scales)


def unpack_int8(weight: Int8Weight) -> Tensor:
    """(N, K) float32: what the packed numbers stand for."""
    return unpack(weight.values) * weight.scales[:, None]


def linear(x: Tensor, weight: Tensor | Int8Weight) -> Tensor:
    """x (M, K), weight (N, K) in any layout -> (M, N) in x's type; packed ones want bf16 rows."""
    if isinstance(weight, Tensor) and weight.dim() == 2:
        return F.linear(x, weight)
    assert x.dtype is torch.bfloat16, x.dtype
    packed = weight.values if isinstance(weight, Int8Weight) else weight
    n, k = packed.shape[0] * PANEL, packed.shape[1] * 2
    if native.kernels() is None:
        plain = unpack_int8(weight) if isinstance(weight, Int8Weight) else unpack(weight)
        return F.linear(x.to(plain.dtype), plain).bfloat16()
    x = x.contiguous()
    m = x.shape[0]
    assert x.shape == (m, k), (x.shape, n, k)
    out = torch.empty(m, n, dtype=torch.bfloat16)
    turned = torch.empty(m * k)  # x in the kernel's own order
    if isinstance(weight, Int8Weight):
        native.call("linear_int8", x, weight.values, weight.scales, out, turned, m, n, k)
    else:
        native.call("linear_bf16", x, weight, out, turned, m, n, k)
    return out
