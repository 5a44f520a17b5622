"""The small ops of a layer on a GPU: residual and RMSNorm, rotary embedding and store, SwiGLU.

In and out: as `llama.ops.norm`, `llama.ops.rope` and `llama.ops.swiglu`, which define them. The
kernels round where the torch bodies round, so nearly all results in 16 bits are the same bits. A
sum may be added in another order, and an exponential may differ in its last bit. rope_kernel has
over 60 lines, as Triton passes each pointer and size as an argument of its own.

Shapes: T rows, E model dim, F FFN dim, H query heads, K KV heads, D head dim, P pages, S slots per
page, W elements of a row of the cache.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.kernels.cuda.launch import launcher, views_of
from llama.kernels.cuda.pdl import launch_dependents, pdl_options, wait_for_dependency
from llama.ops.kv_cache import MIN_SCALE

_MIN_SCALE = tl.constexpr(MIN_SCALE)
_ROUND = tl.constexpr(1.5 * 2**23)  # added to a float32 below 2**22, it leaves a whole number
SILU_BLOCK = 1024  # elements of a row per program
ROPE_HEADS = 8  # heads of a token per program


@launcher
def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a residual and normalize the sum.

    Args:
        x: (..., E).
        delta: (..., E), or None where there is nothing to add.
        weight: (E), the weight of RMSNorm.
        eps: What is added to the mean square.

    Returns:
        x + delta, or x, and its norm.
    """
    x = x.contiguous()
    width = x.shape[-1]
    if delta is None:
        total = change = x
    else:
        total = torch.empty_like(x)
        change = delta.contiguous()
    out = torch.empty_like(x)
    assert x.shape == change.shape, (x.shape, change.shape)
    assert weight.shape == (width,), (weight.shape, x.shape)
    assert weight.is_contiguous()
    rows = x.numel() // width
    if rows:
        block, warps = norm_block(width)
        norm_kernel[(rows,)](
            x,
            change,
            weight,
            total,
            out,
            eps,
            E=width,
            BLOCK=block,
            HAS_DELTA=delta is not None,
            num_warps=warps,
            **pdl_options(x.device),
        )
    return total, out


@functools.cache
def norm_block(width: int) -> tuple[int, int]:
    """Return the elements per program, a whole row, and the warps.

    A thread has 16 elements, if 16 warps suffice for that.
    """
    block = triton.next_power_of_2(width)
    warps = block // (16 * 32)
    return block, min(16, max(1, warps))


@triton.jit
def norm_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Compute one row: total = x + delta, if there is a delta, and out = the norm of that."""
    columns = tl.arange(0, BLOCK)
    is_column = columns < E
    row_at = tl.program_id(0).to(tl.int64) * E + columns
    factor = tl.load(weight + columns, mask=is_column, other=0.0)
    if PDL:
        launch_dependents()
        wait_for_dependency()
    row = tl.load(x + row_at, mask=is_column, other=0.0)
    if HAS_DELTA:
        change = tl.load(delta + row_at, mask=is_column, other=0.0)
        wide_total = row.to(tl.float32) + change.to(tl.float32)
        row = wide_total.to(row.dtype)
        tl.store(total + row_at, row, mask=is_column)
    tl.store(out + row_at, normed_row(row, factor, eps, E), mask=is_column)


@triton.jit
def normed_row(row: tl.tensor, factor: tl.tensor, eps: tl.tensor, E: tl.constexpr) -> tl.tensor:
    """Return the norm of a row of E elements, times the weight's elements, in the type of both."""
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)
    normed = (wide * scale).to(row.dtype)
    normed = normed.to(tl.float32)
    weighted = normed * factor.to(tl.float32)
    return weighted.to(row.dtype)


@launcher
def rope_and_store(qkv: Tensor, freqs_cis: Tensor, kv_cache: Tensor, slots: Tensor) -> Tensor:
    """Rotate queries and keys, and store keys and values in the KV cache.

    Args:
        qkv: (T, H + 2K, D). D is a power of two.
        freqs_cis: (T, D/2) complex64.
        kv_cache: One layer's (2, P, S, K, W).
        slots: (T), the slot of each token among all P * S.

    Returns:
        The rotated queries (T, H, D).
    """
    num_tokens, n, head_dim = qkv.shape
    _, _, page_size, n_kv_heads, row = kv_cache.shape
    n_heads = n - 2 * n_kv_heads
    assert kv_cache.is_contiguous(), kv_cache.shape
    assert slots.is_contiguous(), slots.shape
    assert freqs_cis.shape == (num_tokens, head_dim // 2), (freqs_cis.shape, qkv.shape)
    qkv = qkv.contiguous()
    freqs = torch.view_as_real(freqs_cis.contiguous())
    queries = qkv.new_empty(num_tokens, n_heads, head_dim)
    if num_tokens:
        rope_kernel[num_tokens, -(-n // ROPE_HEADS)](
            qkv,
            freqs,
            *views_of(kv_cache),
            slots,
            queries,
            kv_cache.numel() // 2,
            H=n_heads,
            K=n_kv_heads,
            D=head_dim,
            S=page_size,
            W=row,
            HEADS=ROPE_HEADS,
            num_warps=rope_warps(head_dim),
            **pdl_options(qkv.device),
        )
    return queries


def rope_warps(head_dim: int) -> int:
    """Return the warps with which a thread has 8 elements, 16 bytes that it loads at once."""
    warps = ROPE_HEADS * head_dim // (8 * 32)
    return min(8, max(1, warps))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rope_kernel(
    qkv: tl.tensor,
    freqs: tl.tensor,
    kv_cache: tl.tensor,
    kv_scales: tl.tensor,
    slots: tl.tensor,
    queries: tl.tensor,
    plane: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    W: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Rotate HEADS heads of one token, and store its keys and values in their slot.

    plane: Elements between a key and its value in the cache.
    """
    if PDL:
        launch_dependents()
        wait_for_dependency()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, D)
    is_head = (head < H + 2 * K)[:, None]
    qkv_head = token * (H + 2 * K) + head
    qkv_at = qkv_head[:, None] * D + dims[None, :]
    x = tl.load(qkv + qkv_at, mask=is_head, other=0.0)
    pairs = tl.reshape(x.to(tl.float32), (HEADS, D // 2, 2))  # neighbors are a pair
    a, b = tl.split(pairs)
    rotation = tl.load(freqs + token * D + dims)
    cos_sin = tl.reshape(rotation, (1, D // 2, 2))
    cos, sin = tl.split(cos_sin)
    rotated_pairs = tl.join(a * cos - b * sin, a * sin + b * cos)
    rotated = tl.reshape(rotated_pairs, (HEADS, D)).to(x.dtype)
    is_rotated = (head < H + K)[:, None]
    x = tl.where(is_rotated, rotated, x)
    query_head = token * H + head
    query_at = query_head[:, None] * D + dims[None, :]
    is_query = is_head & (head < H)[:, None]
    tl.store(queries + query_at, x, mask=is_query)
    # Keys are in the cache's first plane, values in its second.
    slot = tl.load(slots + token)
    is_value = (head >= H + K).to(tl.int64)
    kv_head = head - H - is_value * K
    page = slot // S * (S * K * W) + is_value * plane
    cache_at = page + (slot % S * K + kv_head) * D
    is_stored = (head >= H) & (head < H + 2 * K)
    if kv_scales is not None:
        wide = x.to(tl.float32)
        largest = tl.max(tl.abs(wide), 1)
        scale = tl.maximum(tl.div_rn(largest, 127.0), _MIN_SCALE)
        scale += tl.sum(wide * 0.0, 1)  # a NaN in the row, which a maximum hides
        bits = scale.to(tl.int32, bitcast=True)  # rounded to bf16, the upper 16 of them
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        scale_at = (page + S * K * D) // 2 + kv_head * S + slot % S
        tl.store(kv_scales + scale_at, bits.to(tl.int16), mask=is_stored)
        rounded_scale = (bits << 16).to(tl.float32, bitcast=True)
        scaled = tl.div_rn(wide, rounded_scale[:, None])
        x = (scaled + _ROUND - _ROUND).to(kv_cache.dtype.element_ty)
    tl.store(kv_cache + cache_at[:, None] + dims[None, :], x, mask=is_stored[:, None])


@launcher
def silu_mul(x: Tensor) -> Tensor:
    """Compute silu(gate) * up (..., F) from x (..., 2F), whose first F columns are the gate."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    rows = out.numel() // width
    if rows:
        silu_mul_kernel[rows, -(-width // SILU_BLOCK)](
            x, out, F=width, BLOCK=SILU_BLOCK, num_warps=4, **pdl_options(x.device)
        )
    return out


@triton.jit
def silu_mul_kernel(
    x: tl.tensor,
    out: tl.tensor,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Compute BLOCK columns of one row."""
    if PDL:
        launch_dependents()
        wait_for_dependency()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < F
    x_row = x + row * (2 * F)
    gate = tl.load(x_row + columns, mask=is_column, other=0.0)
    up = tl.load(x_row + F + columns, mask=is_column, other=0.0)
    tl.store(out + row * F + columns, gated_row(gate, up), mask=is_column)


@triton.jit
def gated_row(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """Return silu(gate) * up, both factors rounded to the type of up."""
    gate = gate.to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    rounded_silu = silu.to(up.dtype).to(tl.float32)
    product = rounded_silu * up.to(tl.float32)
    return product.to(up.dtype)
