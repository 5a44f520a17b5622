"""The small ops of a layer on a GPU: residual and RMSNorm, rotary embedding and store, SwiGLU.

In and out: as `llama.ops.norm`, `llama.ops.rope` and `llama.ops.swiglu`, which define them. Each
reads its rows once and writes once, where the torch bodies go over them up to ten times. They round
where the torch bodies round, so that in 16 bits nearly all results are the same bits; a sum may be
added in another order, and an exponential may differ in its last bit.

Shapes: T rows, E model dim, F ffn, H query heads, K kv heads, D head dim, P pages, S slots per
page.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

SILU_BLOCK = 1024  # numbers of a row per program
ROPE_HEADS = 8  # heads of a token per program


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


def rope_and_store(qkv: Tensor, freqs_cis: Tensor, kv_cache: Tensor, slots: Tensor) -> Tensor:
    """qkv (T, H + 2K, D), one layer's kv_cache (2, P, S, K, D), slots (T) -> queries (T, H, D).

    freqs_cis (T, D/2) is complex64. D is a power of two.
    """
    num_tokens, n, head_dim = qkv.shape
    n_kv_heads = kv_cache.shape[3]
    n_heads = n - 2 * n_kv_heads
    assert kv_cache.is_contiguous() and slots.is_contiguous(), (kv_cache.shape, slots.shape)
    assert freqs_cis.shape == (num_tokens, head_dim // 2), (freqs_cis.shape, qkv.shape)
    qkv, freqs = qkv.contiguous(), torch.view_as_real(freqs_cis.contiguous())
    queries = qkv.new_empty(num_tokens, n_heads, head_dim)
    if num_tokens:
        grid = num_tokens, -(-n // ROPE_HEADS)
        rope_kernel[grid](
            qkv, freqs, kv_cache, slots, queries, kv_cache.numel() // 2, H=n_heads, K=n_kv_heads,
            D=head_dim, HEADS=ROPE_HEADS, num_warps=rope_warps(head_dim),
        )  # fmt: skip
    return queries


def rope_warps(head_dim: int) -> int:
    """8 numbers per thread: 16 bytes at a time."""
    return min(8, max(1, ROPE_HEADS * head_dim // (8 * 32)))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rope_kernel(
    qkv, freqs, kv_cache, slots, queries, plane,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
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
    cache_at = (slot * K + head - H - is_value * K) * D + is_value * plane
    is_stored = is_there & (head >= H)[:, None]
    tl.store(kv_cache + cache_at[:, None] + dims[None, :], x, mask=is_stored)


def silu_mul(x: Tensor) -> Tensor:
    """x (..., 2F), the gate's columns first -> silu(gate) * up (..., F)."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    rows = out.numel() // width
    if rows:
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
