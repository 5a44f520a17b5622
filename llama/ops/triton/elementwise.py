"""The small ops of a layer on a GPU: residual and RMSNorm, rotary embedding and store, SwiGLU.

In and out: as `llama.ops.norm`, `llama.ops.rope` and `llama.ops.swiglu`, which define them. They
round where the torch bodies round, so that in 16 bits nearly all results are the same bits; a sum
may be added in another order, and an exponential may differ in its last bit.

Shapes: T rows, E model dim, F ffn, H query heads, K kv heads, D head dim, P pages, S slots per
page.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.ops.kv_cache import LEAST_UNIT, views_of
from llama.ops.triton.kernels import launcher

_LEAST_UNIT = tl.constexpr(LEAST_UNIT)
_WHOLE = tl.constexpr(1.5 * 2**23)  # added to a float32 of up to 22 bits, it leaves a whole number
SILU_BLOCK = 1024  # numbers of a row per program
ROPE_HEADS = 8  # heads of a token per program


@launcher
def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and delta (..., E), weight (E) -> x + delta, and its norm; or x and its norm."""
    x, width = x.contiguous(), x.shape[-1]
    total, change = (x, x) if delta is None else (torch.empty_like(x), delta.contiguous())
    out = torch.empty_like(x)
    assert x.shape == change.shape, (x.shape, change.shape)
    assert weight.shape == (width,) and weight.is_contiguous(), (weight.shape, x.shape)
    if rows := x.numel() // width:
        block, warps = norm_block(width)
        norm_kernel[(rows,)](
            x, change, weight, total, out, eps, E=width, BLOCK=block, HAS_DELTA=delta is not None,
            num_warps=warps,
        )  # fmt: skip
    return total, out


@functools.cache
def norm_block(width: int) -> tuple[int, int]:
    """Numbers per program: a whole row. And warps: 16 numbers per thread, if 16 warps can."""
    block = triton.next_power_of_2(width)
    return block, min(16, max(1, block // (16 * 32)))


@triton.jit
def norm_kernel(
    x, delta, weight, total, out, eps,
    E: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr,
):  # fmt: skip
    """One row: total = x + delta, if there is one, and out = the norm of that."""
    columns = tl.arange(0, BLOCK)
    is_there = columns < E
    at = tl.program_id(0).to(tl.int64) * E + columns
    row = tl.load(x + at, mask=is_there, other=0.0)
    if HAS_DELTA:
        change = tl.load(delta + at, mask=is_there, other=0.0)
        row = (row.to(tl.float32) + change.to(tl.float32)).to(row.dtype)
        tl.store(total + at, row, mask=is_there)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)
    normed = (wide * scale).to(row.dtype).to(tl.float32)
    factor = tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + at, (normed * factor).to(row.dtype), mask=is_there)


@launcher
def rope_and_store(qkv: Tensor, freqs_cis: Tensor, kv_cache: Tensor, slots: Tensor) -> Tensor:
    """qkv (T, H + 2K, D), one layer's kv_cache (2, P, S, K, W), slots (T) -> queries (T, H, D).

    freqs_cis (T, D/2) is complex64. D is a power of two.
    """
    num_tokens, n, head_dim = qkv.shape
    _, _, page_size, n_kv_heads, row = kv_cache.shape
    n_heads = n - 2 * n_kv_heads
    assert kv_cache.is_contiguous() and slots.is_contiguous(), (kv_cache.shape, slots.shape)
    assert freqs_cis.shape == (num_tokens, head_dim // 2), (freqs_cis.shape, qkv.shape)
    qkv, freqs = qkv.contiguous(), torch.view_as_real(freqs_cis.contiguous())
    queries = qkv.new_empty(num_tokens, n_heads, head_dim)
    if num_tokens:
        grid = num_tokens, -(-n // ROPE_HEADS)
        rope_kernel[grid](
            qkv, freqs, *views_of(kv_cache), slots, queries, kv_cache.numel() // 2,
            H=n_heads, K=n_kv_heads, D=head_dim, S=page_size, W=row, HEADS=ROPE_HEADS,
            num_warps=rope_warps(head_dim),
        )  # fmt: skip
    return queries


def rope_warps(head_dim: int) -> int:
    return min(8, max(1, ROPE_HEADS * head_dim // (8 * 32)))  # 8 numbers a thread: 16 bytes at once


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rope_kernel(
    qkv, freqs, kv_cache, units, slots, queries, plane,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, S: tl.constexpr, W: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token: queries and keys are rotated, keys and values go to their slot."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, D)
    is_there = (head < H + 2 * K)[:, None]
    qkv_at = (token * (H + 2 * K) + head)[:, None] * D + dims[None, :]
    x = tl.load(qkv + qkv_at, mask=is_there, other=0.0)
    a, b = tl.split(tl.reshape(x.to(tl.float32), (HEADS, D // 2, 2)))  # neighbours are a pair
    turn = tl.load(freqs + token * D + dims)
    cos, sin = tl.split(tl.reshape(turn, (1, D // 2, 2)))
    turned = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (HEADS, D))
    x = tl.where((head < H + K)[:, None], turned.to(x.dtype), x)
    query_at = (token * H + head)[:, None] * D + dims[None, :]
    tl.store(queries + query_at, x, mask=is_there & (head < H)[:, None])
    # Keys are in the cache's first plane, values in its second.
    slot = tl.load(slots + token)
    is_value = (head >= H + K).to(tl.int64)
    own, page = head - H - is_value * K, slot // S * (S * K * W) + is_value * plane
    cache_at = page + (slot % S * K + own) * D
    is_stored = (head >= H) & (head < H + 2 * K)
    if units is not None:
        wide = x.to(tl.float32)
        unit = tl.maximum(tl.div_rn(tl.max(tl.abs(wide), 1), 127.0), _LEAST_UNIT)
        unit += tl.sum(wide * 0.0, 1)  # NaN where there is one, which a maximum hides
        bits = unit.to(tl.int32, bitcast=True)  # rounded to the upper 16 of them
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        unit_at = (page + S * K * D) // 2 + own * S + slot % S
        tl.store(units + unit_at, bits.to(tl.int16), mask=is_stored)
        counted = tl.div_rn(wide, (bits << 16).to(tl.float32, bitcast=True)[:, None])
        x = (counted + _WHOLE - _WHOLE).to(kv_cache.dtype.element_ty)
    tl.store(kv_cache + cache_at[:, None] + dims[None, :], x, mask=is_stored[:, None])


@launcher
def silu_mul(x: Tensor) -> Tensor:
    """x (..., 2F), the gate's columns first -> silu(gate) * up (..., F)."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    if rows := out.numel() // width:
        grid = rows, -(-width // SILU_BLOCK)
        silu_mul_kernel[grid](x, out, F=width, BLOCK=SILU_BLOCK, num_warps=4)
    return out


@triton.jit
def silu_mul_kernel(x, out, F: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < F
    gate = tl.load(x + row * (2 * F) + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * F) + F + columns, mask=is_there, other=0.0)
    opened = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    tl.store(out + row * F + columns, (opened * up.to(tl.float32)).to(up.dtype), mask=is_there)
