"""Attention of a flat ragged batch over paged keys and values (Kwon et al., 2023, PagedAttention).

In: the queries of all sequences, one sequence after the other, and the pages with their keys and
values. Out: one row per query. Requests, the owners of pages and kernels must not be known here.

Example, with S = 4 slots per page: sequences of 5, 7 and 2 tokens, of which 1, 1 and 2 are new.
queries are (4, H, D): one row, one row, two rows; page_table is
[[3, 0], [5, 1], [2, 0]] (unused entries are 0); row 0 sees slots 12..15 and 0, row 1 slots 20..23
and 4..6, row 2 slot 8, row 3 slots 8 and 9.

Shapes: T tokens, B sequences, H query heads, K kv heads, D head dim, P pages, S slots per page,
M pages per sequence, G = H / K, W elements of a row of the cache, see kv_cache.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llama.ops.batch import Batch
from llama.ops.kernels import Kernels
from llama.ops.kv_cache import format_of

_GATHERED_BYTES = 1 << 29  # bytes of keys and values that the PyTorch body copies at once
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def paged_attention(
    queries: Tensor, kv_cache: Tensor, batch: Batch, *, is_causal: bool = True
) -> Tensor:
    """Return what each query attends to.

    Nothing here waits for the device, because the batch has its lengths on the host too. In the
    PyTorch body, the sequences with one query share one call, and each longer one has its own.

    Args:
        queries: (T, H, D).
        kv_cache: The cache of one layer (2, P, S, K, W).
        batch: The batch, of which the page table and the lengths are read.
        is_causal: Whether a query attends to the tokens up to its own; else it attends to its whole
            sequence.

    Returns:
        (T, H, D).
    """
    attended: Tensor | None = batch.kernels.run(
        "paged_attention", queries, kv_cache, batch, is_causal
    )
    if attended is not None:
        return attended
    page_table = batch.page_table
    page_size = kv_cache.shape[2]
    if sum(batch.query_lens_cpu) != len(queries):
        return _recorded(queries, kv_cache, batch)
    out = torch.empty_like(queries)
    n = batch.num_decodes
    if n:
        num_pages = -(-max(batch.seq_lens_cpu[:n]) // page_size)
        table = page_table[:n, :num_pages]
        out[:n] = _decode(queries[:n], kv_cache, table, batch.seq_lens[:n])
    start = n
    for row in range(n, len(batch.query_lens_cpu)):
        end = start + batch.query_lens_cpu[row]
        seq_len = batch.seq_lens_cpu[row]
        pages = page_table[row]
        out[start:end] = _prefill(queries[start:end], kv_cache, pages, seq_len, is_causal)
        start = end
    return out


def attention(heads: Tensor, scale: float, kernels: Kernels) -> Tensor:
    """Return what rows attend to among all of them, without a mask.

    Args:
        heads: The queries, keys and values (3, H, T, D).
        scale: The factor of the scores.
        kernels: The kernels that may run.

    Returns:
        (H, T, D).
    """
    attended: Tensor | None = kernels.run("attention", heads, scale)
    if attended is not None:
        return attended
    queries, keys, values = heads[:, None]
    return _sdpa(queries, keys, values, scale=scale)[0]


def _recorded(queries: Tensor, kv_cache: Tensor, batch: Batch) -> Tensor:
    """Return what the queries of a recorded step attend to, whose lengths the host has not."""
    starts = batch.query_starts
    rows = torch.arange(len(queries), device=queries.device)
    sequences = torch.searchsorted(starts, rows, right=True) - 1
    num_later = starts[sequences + 1] - 1 - rows  # queries of the same sequence
    num_pages = -(-max(batch.seq_lens_cpu) // kv_cache.shape[2])
    table = batch.page_table[sequences, :num_pages]
    return _decode(queries, kv_cache, table, batch.seq_lens[sequences] - num_later)


def _decode(
    queries: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """Return what one query per sequence attends to.

    The G heads that share a kv head are the rows of one small product. A few sequences are computed
    at a time: otherwise the pages of all would be copied up to the length of the longest.

    Args:
        queries: (N, H, D).
        kv_cache: The cache of one layer (2, P, S, K, W).
        page_table: (N, M).
        seq_lens: (N).

    Returns:
        (N, H, D).
    """
    n, n_heads, head_dim = queries.shape
    rows_per_page = kv_cache[0, 0, ..., 0].numel()
    page_bytes = rows_per_page * head_dim * queries.itemsize  # bytes of a dequantized page
    seq_bytes = 2 * page_table.shape[1] * page_bytes
    max_seqs = max(1, _GATHERED_BYTES // seq_bytes)
    if n > max_seqs:
        parts = zip(
            torch.split(queries, max_seqs),
            torch.split(page_table, max_seqs),
            torch.split(seq_lens, max_seqs),
            strict=True,
        )
        return torch.cat([_decode(q, kv_cache, table, lens) for q, table, lens in parts])
    page_size = kv_cache.shape[2]
    device = queries.device
    offsets = torch.arange(page_size, device=device)
    slots = page_table[..., None] * page_size + offsets
    slots = slots.flatten(1)
    positions = torch.arange(slots.shape[1], device=device)
    attn_mask = positions < seq_lens[:, None]
    # Weight 0 times NaN is NaN, and an earlier owner of a slot may have left one: where a sequence
    # has no token, its first one is read again.
    slots = slots.where(attn_mask, slots[:, :1])
    # Keys and values one after the other: PyTorch gathers whole rows of a tensor fast, and parts of
    # rows slowly.
    keys, values = (format_of(kv_cache).load(x, slots, queries.dtype) for x in kv_cache)
    n_kv_heads = keys.shape[2]
    out = _sdpa(
        queries.view(n, n_kv_heads, n_heads // n_kv_heads, head_dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=attn_mask[:, None, None],
    )
    return out.reshape(n, n_heads, head_dim)


def _prefill(
    queries: Tensor, kv_cache: Tensor, pages: Tensor, seq_len: int, is_causal: bool
) -> Tensor:
    """Return what the last tokens of one sequence attend to.

    Args:
        queries: The last tokens (C, H, D).
        kv_cache: The cache of one layer (2, P, S, K, W).
        pages: The pages of the sequence (M).
        seq_len: Its length L.
        is_causal: Whether these are the tokens up to themselves; else they are all.

    Returns:
        (C, H, D).
    """
    count, n_heads, _ = queries.shape
    page_size = kv_cache.shape[2]
    group = n_heads // kv_cache.shape[3]
    num_pages = -(-seq_len // page_size)
    offsets = torch.arange(page_size, device=pages.device)
    slots = pages[:num_pages, None] * page_size + offsets
    slots = slots.flatten()[:seq_len]
    keys, values = (  # (L, H, D)
        format_of(kv_cache).load(x, slots, queries.dtype).repeat_interleave(group, 1)
        for x in kv_cache
    )
    attn_mask = None
    if is_causal and seq_len > count:
        positions = torch.arange(seq_len, device=queries.device)
        attn_mask = positions <= positions[-count:, None]
    out = _sdpa(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=attn_mask,
        is_causal=is_causal and attn_mask is None,
    )
    return out[0].transpose(0, 1)


def _sdpa(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Return PyTorch's attention, computed without cuDNN.

    cuDNN takes 0.1 to 0.4 s to plan for each new shape, and every length is a shape.
    """
    if not queries.is_cuda:
        return F.scaled_dot_product_attention(queries, keys, values, **options)
    with sdpa_kernel(_BACKENDS):
        return F.scaled_dot_product_attention(queries, keys, values, **options)
