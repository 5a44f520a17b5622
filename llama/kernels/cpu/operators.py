"""The CPU's kernels for attention and for what stands between products, in bf16.

In: the arguments of the operators of `llama.ops`, which define what these compute. Out: the
result; None where a kernel does not take the tensors or the library does not run.

attention.cpp reads the pages of the KV cache in place. It is batch-invariant: a query gives the
same bytes alone as in any batch, in a prefill as in a decode step, on any number of threads. The
others are in elementwise.cpp.

Shapes: as in the operators' files.
"""

import torch
from torch import Tensor

from llama.kernels.cpu import native
from llama.kernels.cpu.constants import MAX_HEAD_DIM, KvFormat
from llama.ops.batch import Batch
from llama.ops.kv_cache import SCALED_DTYPE

_WITHOUT_AVX512 = ("avx2", "avx_vnni")  # names of instruction sets

CACHE_FORMATS = {
    torch.bfloat16: KvFormat.BF16.value,
    SCALED_DTYPE: KvFormat.INT8.value,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """Return normalized rows; see `llama.ops.norm.rms_norm`."""
    if not native.has_kernel(x, weight):
        return None
    x = x.contiguous()
    weight = weight.contiguous()
    width = x.shape[-1]
    num_rows = x.numel() // width
    out = torch.empty_like(x)
    native.call("rms_norm_bf16", x, weight, out, num_rows, width, float(eps))
    return out


def silu_mul(x: Tensor) -> Tensor | None:
    """Return silu(gate) * up; see `llama.ops.swiglu.silu_mul`."""
    if not native.has_kernel(x) or x.shape[-1] % 64:
        return None
    x = x.contiguous()
    width = x.shape[-1] // 2
    leading = x.shape[:-1]
    out = x.new_empty(*leading, width)
    num_rows = out.numel() // width
    native.call("silu_mul_bf16", x, out, num_rows, width)
    return out


def rope_and_store(
    qkv: Tensor, freqs_cis: Tensor, kv_cache: Tensor, slots: Tensor
) -> Tensor | None:
    """Rotate, store and return the queries; see `llama.ops.rope.rope_and_store`."""
    kv_format = _format_of(qkv, kv_cache)
    if kv_format is None:
        return None
    num_rows, n, head_dim = qkv.shape
    page_size, n_kv_heads = kv_cache.shape[2:4]
    n_heads = n - 2 * n_kv_heads
    queries = qkv.new_empty(num_rows, n_heads, head_dim)
    native.call(
        "rope_and_store_bf16",
        qkv.contiguous(),
        freqs_cis.contiguous(),
        kv_cache[0],
        slots.contiguous(),
        queries,
        num_rows,
        n_heads,
        n_kv_heads,
        head_dim,
        _pages_between(kv_cache),
        page_size,
        kv_format,
    )
    return queries


def paged_attention(
    queries: Tensor, kv_cache: Tensor, batch: Batch, is_causal: bool
) -> Tensor | None:
    """Return what each query attends to; see `llama.ops.attention.paged_attention`."""
    kv_format = _format_of(queries, kv_cache)
    if kv_format is None:
        return None
    page_table = batch.page_table.contiguous()
    assert max(batch.seq_lens_cpu) <= page_table.shape[1] * kv_cache.shape[2], (
        batch.seq_lens_cpu,
        page_table.shape,
        kv_cache.shape,
    )
    return _attend(
        queries.contiguous(),
        kv_cache,
        page_table,
        batch.query_starts.contiguous(),
        batch.seq_lens.contiguous(),
        kv_format,
        queries.shape[-1] ** -0.5,
        is_causal=is_causal,
    )


def attention(heads: Tensor, scale: float) -> Tensor | None:
    """Return what rows attend to; see `llama.ops.attention.attention`.

    Each head is a sequence of its own, whose keys are one page. PyTorch computes it where it is
    faster than attention.cpp: with AMX, and with AVX2 alone, where it takes 0.88 of the time.
    """
    if not native.has_kernel(heads) or "amx_bf16" in native.cpu_flags():
        return None
    if native.allowed_instruction_sets()[0].name in _WITHOUT_AVX512:
        return None
    _, n_heads, num_rows, head_dim = heads.shape
    if head_dim > MAX_HEAD_DIM:
        return None
    heads = heads.contiguous()
    out = _attend(
        heads[0].view(n_heads * num_rows, 1, head_dim),
        heads[1:, :, :, None],
        torch.arange(n_heads)[:, None],
        torch.arange(n_heads + 1) * num_rows,
        torch.full((n_heads,), num_rows),
        KvFormat.BF16.value,
        scale,
        is_causal=False,
    )
    return out.view(n_heads, num_rows, head_dim)


def _attend(
    queries: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    kv_format: int,
    scale: float,
    *,
    is_causal: bool,
) -> Tensor:
    """Return what queries (T, H, D) attend to in pages (2, P, S, K, W), all of them contiguous."""
    _, n_heads, head_dim = queries.shape
    page_size, n_kv_heads = kv_cache.shape[2:4]
    n, width = page_table.shape
    num_bytes = native.call(
        "attention_workspace",
        query_starts,
        seq_lens,
        n,
        n_heads,
        n_kv_heads,
        head_dim,
    )
    out = torch.empty_like(queries)
    workspace = torch.empty(num_bytes, dtype=torch.uint8)
    native.call(
        "paged_attention_bf16",
        queries,
        kv_cache[0],
        page_table,
        query_starts,
        seq_lens,
        out,
        workspace,
        n,
        n_heads,
        n_kv_heads,
        head_dim,
        _pages_between(kv_cache),
        page_size,
        width,
        kv_format,
        int(not is_causal),
        float(scale),
    )
    return out


def _format_of(heads: Tensor, kv_cache: Tensor) -> int | None:
    """Return the number of a cache's format in the CPU kernels.

    Args:
        heads: Heads (T, H, D).
        kv_cache: The cache.

    Returns:
        The number; None where the kernels do not take the cache or the heads.
    """
    if not native.has_kernel(heads):
        return None
    if heads.shape[-1] > MAX_HEAD_DIM:
        return None
    if kv_cache.device.type != "cpu":
        return None
    if not kv_cache[0].is_contiguous() or kv_cache.stride(0) % kv_cache[0, 0].numel():
        return None
    return CACHE_FORMATS.get(kv_cache.dtype)


def _pages_between(kv_cache: Tensor) -> int:
    """Return how many pages the values lie after the keys: (2, P, S, K, W) -> P or another."""
    return kv_cache.stride(0) // kv_cache[0, 0].numel()
