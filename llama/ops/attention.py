"""Attention of a flat ragged batch over paged keys and values (Kwon et al., 2023, PagedAttention).

In: the queries of all sequences one after the other, and the pages that hold each one's past. Out:
one row per query. It knows nothing of requests or of who owns a page. bf16 on the CPU has a kernel,
attention.cpp, that reads the pages in place; a query gives the same bytes there alone as in any
batch, as part of a prefill as in a decode step, on any number of threads. bf16 and fp16 on a GPU
have kernels in triton/attention.py.

Example, with S = 4 slots per page: sequences of 5, 7 and 2 tokens, of which 1, 1 and 2 are new.
queries are (4, H, D): one row, one row, two rows; page_table is
[[3, 0], [5, 1], [2, 0]] (unused entries are 0); row 0 sees slots 12..15 and 0, row 1 slots 20..23
and 4..6, row 2 slot 8, row 3 slots 8 and 9.

Shapes: T tokens, B sequences, H query heads, K kv heads, D head dim, P pages, S slots per page,
M pages per sequence, G = H / K. W numbers of a row of the cache, which are those of kv_cache.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llama.ops.batch import Batch
from llama.ops.cpu import native
from llama.ops.kv_cache import format_of, native_format, suits_gpu

_GATHERED_BYTES = 1 << 29  # of keys and values that the torch body copies at once
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def paged_attention(queries: Tensor, kv_cache: Tensor, batch: Batch) -> Tensor:
    """queries (T, H, D), one layer's kv_cache (2, P, S, K, W) -> (T, H, D).

    Of the batch: its page table and its lengths, on the device and on the host, so that nothing
    here waits for the device. In the torch body, the sequences with one query go through one call,
    and each longer one has its own.
    """
    table, seq_lens, n = batch.page_table, batch.seq_lens, batch.num_decodes
    if batch.kernels.has("attention", queries) and suits_gpu(queries, kv_cache):
        from llama.ops.triton import attention

        return attention.paged_attention(queries, kv_cache, batch)
    kv_format = native_format(queries, kv_cache)
    if kv_format is not None:
        slots = table.shape[1] * kv_cache.shape[2]
        assert max(batch.seq_lens_cpu) <= slots, (batch.seq_lens_cpu, table.shape, kv_cache.shape)
        return _native(queries.contiguous(), kv_cache, batch, kv_format)
    out = torch.empty_like(queries)
    if n:
        num_pages = -(-max(batch.seq_lens_cpu[:n]) // kv_cache.shape[2])
        out[:n] = _decode(queries[:n], kv_cache, table[:n, :num_pages], seq_lens[:n])
    start = n
    for row in range(n, len(batch.query_lens_cpu)):
        end = start + batch.query_lens_cpu[row]
        out[start:end] = _prefill(queries[start:end], kv_cache, table[row], batch.seq_lens_cpu[row])
        start = end
    return out


def _native(queries: Tensor, kv_cache: Tensor, batch: Batch, kv_format: int) -> Tensor:
    _, n_heads, head_dim = queries.shape
    _, num_pages, page_size, n_kv_heads, _ = kv_cache.shape
    n, width = batch.page_table.shape
    query_starts, seq_lens = batch.query_starts.contiguous(), batch.seq_lens.contiguous()
    sizes = n, n_heads, n_kv_heads, head_dim
    num_bytes = native.call("attention_workspace", query_starts, seq_lens, *sizes)
    out, room = torch.empty_like(queries), torch.empty(num_bytes, dtype=torch.uint8)
    tensors = queries, kv_cache, batch.page_table.contiguous(), query_starts, seq_lens, out, room
    of_cache = num_pages, page_size, width, kv_format
    native.call("paged_attention_bf16", *tensors, *sizes, *of_cache, head_dim**-0.5)
    return out


def _decode(queries: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor) -> Tensor:
    """One query per sequence: the G heads that share a kv head are the rows of one small product.

    queries (N, H, D), page_table (N, M), seq_lens (N) -> (N, H, D). A few sequences at a time: one
    long one would otherwise have the pages of all others copied up to its length.
    """
    n, n_heads, head_dim = queries.shape
    page_bytes = kv_cache[0, 0, ..., 0].numel() * head_dim * queries.itemsize  # once unpacked
    at_once = max(1, _GATHERED_BYTES // (2 * page_table.shape[1] * page_bytes))
    if n > at_once:
        parts = (x.split(at_once) for x in (queries, page_table, seq_lens))
        return torch.cat([_decode(q, kv_cache, *rest) for q, *rest in zip(*parts, strict=True)])
    size, device = kv_cache.shape[2], queries.device
    slots = (page_table[..., None] * size + torch.arange(size, device=device)).flatten(1)
    attn_mask = torch.arange(slots.shape[1], device=device) < seq_lens[:, None]
    # Weight 0 times NaN is NaN, and who had a slot before may have left one: where a sequence has
    # no token, its first one is read again.
    slots = slots.where(attn_mask, slots[:, :1])
    # One after the other: torch gathers whole rows of a tensor fast, and parts of rows slowly.
    keys, values = (format_of(kv_cache).load(x, slots, queries.dtype) for x in kv_cache)
    n_kv_heads = keys.shape[2]
    grouped = queries.view(n, n_kv_heads, n_heads // n_kv_heads, head_dim)
    out = _sdpa(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=attn_mask[:, None, None]
    )
    return out.reshape(n, n_heads, head_dim)


def _prefill(queries: Tensor, kv_cache: Tensor, pages: Tensor, seq_len: int) -> Tensor:
    """The last `count` tokens of one sequence: each sees the past, and the chunk up to itself."""
    (count, n_heads, _), size = queries.shape, kv_cache.shape[2]
    slots = pages[: -(-seq_len // size), None] * size + torch.arange(size, device=pages.device)
    slots, group, attn_mask = slots.flatten()[:seq_len], n_heads // kv_cache.shape[3], None
    keys, values = (  # (L, H, D)
        format_of(kv_cache).load(x, slots, queries.dtype).repeat_interleave(group, 1)
        for x in kv_cache
    )
    if seq_len > count:
        positions = torch.arange(seq_len, device=queries.device)
        attn_mask = positions <= positions[-count:, None]
    heads = (x.transpose(0, 1)[None] for x in (queries, keys, values))
    out = _sdpa(*heads, attn_mask=attn_mask, is_causal=attn_mask is None)
    return out[0].transpose(0, 1)  # (count, H, D)


def _sdpa(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    if not queries.is_cuda:
        return F.scaled_dot_product_attention(queries, keys, values, **options)
    # Without cuDNN's, which takes 0.1 to 0.4 s to plan for each new shape; lengths make shapes.
    with sdpa_kernel(_BACKENDS):
        return F.scaled_dot_product_attention(queries, keys, values, **options)
