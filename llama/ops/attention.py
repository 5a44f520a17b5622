"""Attention of a flat ragged batch over paged keys and values (Kwon et al., 2023, PagedAttention).

In: the queries of all sequences one after the other, and the pages that hold each one's past. Out:
one row a query. It knows nothing of requests or of who owns a page. bf16 on the CPU has a kernel,
attention.cpp, that reads the pages in place; a query gives the same bytes there alone as in any
batch, as part of a prefill as in a decode step, on any number of threads.

Example, with S = 4 slots a page: sequences of 5, 7 and 2 tokens, the first two with one new token,
the last with two. queries are (4, H, D): one row, one row, two rows; page_table is
[[3, 0], [5, 1], [2, 0]] (unused entries are 0); row 0 sees slots 12..15 and 0, row 1 slots 20..23
and 4..6, row 2 slot 8, row 3 slots 8 and 9.

Shapes: T tokens, B sequences, H query heads, K kv heads, D head dim, P pages, S slots a page,
M pages a sequence, G = H / K.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.ops.cpu import native

# As in attention.cpp: keys, and rows, that are worked on together, and the largest D.
_CHUNK, _BLOCK, _MAX_DIM = 256, 56, 256
_START_WORDS = 3  # int64 that attention.cpp keeps of a sequence


def paged_attention(
    queries: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seen: Tensor,
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
) -> Tensor:
    """queries (T, H, D), one layer's kv_cache (2, P, S, K, D) -> (T, H, D).

    page_table (B, M); seen (N, M * S) is true where one of the N leading single-token sequences may
    look; query_lens and seq_lens (B) are on the host, so that nothing here waits for the device.
    The sequences with one query come first and go through one call; each longer one has its own.
    """
    fits = queries.shape[-1] <= _MAX_DIM and kv_cache.is_contiguous()
    if fits and native.has_kernel(queries, kv_cache):
        return _native(queries.contiguous(), kv_cache, page_table, query_lens, seq_lens)
    out = torch.empty_like(queries)
    n = seen.shape[0]
    if n:
        out[:n] = _decode(queries[:n], kv_cache, page_table[:n], seen)
    start = n
    for row in range(n, len(query_lens)):
        end = start + query_lens[row]
        out[start:end] = _prefill(queries[start:end], kv_cache, page_table[row], seq_lens[row])
        start = end
    return out


def _native(
    queries: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
) -> Tensor:
    _, n_heads, head_dim = queries.shape
    _, num_pages, page_size, n_kv_heads, _ = kv_cache.shape
    n, width = page_table.shape
    assert max(seq_lens) <= width * page_size, (seq_lens, page_table.shape, page_size)
    most = _BLOCK * n_kv_heads // n_heads  # queries whose rows are one block: split by chunks
    lens = zip(query_lens, seq_lens, strict=True)
    parts = sum(q * -(-length // _CHUNK) for q, length in lens if q <= most)
    out = torch.empty_like(queries)
    native.call(
        "paged_attention_bf16",
        queries,
        kv_cache,
        page_table.contiguous(),
        torch.tensor((query_lens, seq_lens)),
        out,
        torch.empty(n + 1, _START_WORDS, dtype=torch.int64),
        torch.empty(parts * n_heads * (head_dim + 2)),
        n,
        num_pages,
        page_size,
        width,
        n_heads,
        n_kv_heads,
        head_dim,
        head_dim**-0.5,
    )
    return out


def _decode(queries: Tensor, kv_cache: Tensor, page_table: Tensor, seen: Tensor) -> Tensor:
    """One query a sequence: the G heads that share a kv head are the rows of one small product."""
    n, n_heads, head_dim = queries.shape
    width = seen.shape[1] // kv_cache.shape[2]
    keys, values = kv_cache[:, page_table[:, :width]].flatten(2, 3)  # 2 x (N, L, K, D)
    n_kv_heads = keys.shape[2]
    grouped = queries.view(n, n_kv_heads, n_heads // n_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=seen[:, None, None]
    )
    return out.reshape(n, n_heads, head_dim)


def _prefill(queries: Tensor, kv_cache: Tensor, pages: Tensor, seq_len: int) -> Tensor:
    """The last `count` tokens of one sequence: each sees the past, and the chunk up to itself."""
    count, n_heads, _ = queries.shape
    num_pages = -(-seq_len // kv_cache.shape[2])
    keys, values = kv_cache[:, pages[:num_pages]].flatten(1, 2)[:, :seq_len]  # 2 x (L, K, D)
    groups = n_heads // keys.shape[1]
    mask = None
    if seq_len > count:
        positions = torch.arange(seq_len, device=queries.device)
        mask = positions <= positions[-count:, None]
    out = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.repeat_interleave(groups, 1).transpose(0, 1)[None],
        values.repeat_interleave(groups, 1).transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
    )
    return out[0].transpose(0, 1)  # (count, H, D)
