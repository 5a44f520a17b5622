"""Rotary position embedding (Su et al., 2021) in Meta's layout: neighbours 2i, 2i + 1 are a pair.

In: positions and the rows of queries, keys and values. Out: the rotated rows, with keys and values
in their slots. Angles are made and applied in float32. `scale_frequencies` is Llama 3.1's RoPE
scaling, which extends the context from 8,192 to 131,072 tokens. bf16 on the CPU has a kernel, in
elementwise.cpp; bf16 and fp16 on a GPU in triton/elementwise.py.

Shapes: T tokens, H query heads, K kv heads, D head dim, P pages, S slots per page.
"""

import math

import torch
from torch import Tensor

from llama.ops.cpu import native
from llama.ops.kv_cache import format_of, native_format, suits_gpu
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet

_ORIGINAL_CONTEXT = 8192  # of Llama 3, before scaling
_LOW, _HIGH = 1.0, 4.0  # wavelengths over 8192/1 are divided, under 8192/4 kept, between: blended


def scale_frequencies(frequencies: Tensor, factor: float) -> Tensor:
    """(D/2) -> (D/2): divide the slow ones by `factor` (8 for Llama 3.1 and 3.3, 32 for 3.2)."""
    turns = _ORIGINAL_CONTEXT * frequencies / (2 * math.pi)  # turns within the original context
    keep = ((turns - _LOW) / (_HIGH - _LOW)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / factor)


def rope_frequencies(head_dim: int, theta: float, factor: float | None) -> Tensor:
    """(D/2) float32: by how much each pair of a head turns per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    return frequencies if factor is None else scale_frequencies(frequencies, factor)


def precompute_freqs_cis(head_dim: int, length: int, theta: float, factor: float | None) -> Tensor:
    """Complex unit numbers (length, D/2): row p rotates each pair of a head at position p."""
    frequencies = rope_frequencies(head_dim, theta, factor)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rope(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """x (T, H, D), freqs_cis (T, D/2) complex -> (T, H, D) in x's type."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2).type_as(x)


def rope_and_store(
    qkv: Tensor,
    freqs_cis: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    kernels: KernelSet = TORCH_ONLY,
) -> Tensor:
    """qkv (T, H + 2K, D), one layer's kv_cache (2, P, S, K, W), slots (T) -> queries (T, H, D).

    Queries and keys are rotated; keys and values are written to their slots, page * S + offset, in
    the format of the cache.
    """
    rows, n, head_dim = qkv.shape
    n_kv_heads = kv_cache.shape[3]
    n_heads = n - 2 * n_kv_heads
    if kernels.has("rope_and_store", qkv) and suits_gpu(qkv, kv_cache):
        from llama.ops.triton import elementwise

        return elementwise.rope_and_store(qkv, freqs_cis, kv_cache, slots)
    kv_format = native_format(qkv, kv_cache)
    if kv_format is not None:
        queries = qkv.new_empty(rows, n_heads, head_dim)
        tensors = qkv.contiguous(), freqs_cis.contiguous(), kv_cache, slots.contiguous(), queries
        sizes = rows, n_heads, n_kv_heads, head_dim, *kv_cache.shape[1:3]
        native.call("rope_and_store_bf16", *tensors, *sizes, kv_format)
        return queries
    q, k, v = qkv.split((n_heads, n_kv_heads, n_kv_heads), dim=1)
    for plane, x in zip(kv_cache, (apply_rope(k, freqs_cis), v), strict=True):
        format_of(kv_cache).store(plane, slots, x)
    return apply_rope(q, freqs_cis)
