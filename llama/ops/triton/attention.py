"""Paged grouped-query attention on a GPU: split-KV decode, and prefill by blocks of queries.

In and out: as `llama.ops.attention.paged_attention`, which defines it. The G query heads that share
a kv head are rows of one product, so that keys and values are read once (Ainslie et al., 2023);
softmax is online (FlashAttention; Dao et al., 2022). In decode the keys of a sequence are divided
among programs and their results merged (Flash-Decoding; Dao et al., 2023). In prefill a program
finds its sequence by a binary search over query_starts, as in vLLM's unified Triton attention.
Lengths are read on the device alone, so that a CUDA graph can replay a step with others.

Shapes: T tokens, B sequences, N of them with one query, H query heads, K kv heads, D head dim,
P pages, S slots per page, M pages per sequence, G = H / K. W numbers of a row of the cache, which
are those of llama/ops/kv_cache.py.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.ops.batch import Batch
from llama.ops.kv_cache import views_of
from llama.ops.triton.kernels import Tile, launcher

_PROGRAMS = 1024  # of a decode launch, about: eight for each of the 132 processors of an H200
_MAX_SPLITS = 64
_MAX_OFFSET = 2**31  # numbers in a layer's plane of the cache, for offsets of 32 bits


@launcher
def paged_attention(queries: Tensor, kv_cache: Tensor, batch: Batch) -> Tensor:
    """queries (T, H, D), one layer's kv_cache (2, P, S, K, W) -> (T, H, D).

    D is a power of two, from 16 to 256. A sequence without tokens gets zeros.
    """
    num_tokens, n_heads, head_dim = queries.shape
    n_kv_heads, num_decodes = kv_cache.shape[3], batch.num_decodes
    page_table, query_starts, seq_lens = batch.page_table, batch.query_starts, batch.seq_lens
    assert kv_cache.is_contiguous() and page_table.stride(1) == 1, (kv_cache.shape, page_table)
    assert query_starts.is_contiguous() and seq_lens.is_contiguous()
    queries = queries.contiguous()
    out = torch.empty_like(queries)
    width, group = page_table.stride(0), n_heads // n_kv_heads
    plane, cache = kv_cache.numel() // 2, views_of(kv_cache)
    scale = head_dim**-0.5 * math.log2(math.e)  # for powers of 2
    sizes = {
        "H": n_heads, "K": n_kv_heads, "D": head_dim, "S": kv_cache.shape[2],
        "W": kv_cache.shape[4], "WIDE": plane >= _MAX_OFFSET,
    }  # fmt: skip
    if num_decodes:
        splits = num_splits(num_decodes, n_kv_heads)
        tile = decode_tile(group, head_dim)
        parts = (out, out)  # not used
        if splits > 1:
            rows = num_decodes * n_heads * splits
            partial = torch.empty(rows * (head_dim + 1), dtype=torch.float32, device=out.device)
            parts = partial, partial[rows * head_dim :]
        decode_kernel[num_decodes, n_kv_heads, splits](
            queries, *cache, page_table, seq_lens, out, *parts, scale, plane, width,
            **sizes, ROWS=tile.rows, KEYS=tile.columns, SPLITS=splits,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(num_decodes * n_heads,)](*parts, out, D=head_dim, SPLITS=splits)
    num_prefills = len(seq_lens) - num_decodes
    if num_prefills:
        tile = prefill_tile(group, head_dim, has_wide_tiles(queries.device))
        block = tile.rows // group
        # The last block of each sequence may be short: see _find_block.
        num_blocks = (num_tokens - num_decodes) // block + num_prefills
        prefill_kernel[num_blocks, n_kv_heads](
            queries, *cache, page_table, query_starts, seq_lens, out, scale, plane, width,
            num_decodes, num_prefills, **sizes, ROWS=tile.rows, KEYS=tile.columns,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def num_splits(num_decodes: int, n_kv_heads: int) -> int:
    """Parts of each sequence's keys: enough programs for the device where there are few sequences.

    A power of two that depends on the batch's shape alone, whatever the lengths.
    """
    wanted = max(1, _PROGRAMS // (num_decodes * n_kv_heads))
    return min(_MAX_SPLITS, 1 << (wanted.bit_length() - 1))


def decode_variants(n_kv_heads: int) -> list[int]:
    """Of each number of parts, the largest num_decodes that gets it, the fewest parts last."""
    most = num_splits(1, n_kv_heads)
    return [_PROGRAMS // ((most >> i) * n_kv_heads) for i in range(most.bit_length())]


@functools.cache
def decode_tile(group: int, head_dim: int) -> Tile:
    rows = max(16, triton.next_power_of_2(group))
    # With three stages, page numbers are read a block ahead of the keys that they lead to.
    return Tile(rows, 64 if head_dim <= 128 else 32, 4, 3 if head_dim > 64 else 2)


@functools.cache
def prefill_tile(group: int, head_dim: int, is_wide: bool) -> Tile:
    """is_wide: whether the device has the products of 64 rows and more of capability 9 and 10."""
    rows = max(128 if is_wide and head_dim <= 128 else 64, triton.next_power_of_2(group))
    return Tile(rows, 64 if head_dim <= 128 else 32, 8, 3 if is_wide else 2)


@functools.cache
def has_wide_tiles(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@triton.jit
def _unit(at, is_there):
    """float32 of the upper 16 bits."""
    bits = tl.load(at, mask=is_there, other=0).to(tl.int32)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _attend(
    q, sees, first, last, head, kv_cache, units, plane, table, scale,
    K: tl.constexpr, D: tl.constexpr, S: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows q (ROWS, D) over positions [first, last) of the sequence whose pages `table` lists.

    sees (ROWS): the last position that each row may see. head: of the keys and values. Returns the
    weighted sums (ROWS, D), each row's largest score, and its sum of weights.
    """
    peak = tl.full([ROWS], -1.0e30, tl.float32)  # finite: a row that sees nothing yet gives no NaN
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    dims = tl.arange(0, D)
    steps = tl.arange(0, KEYS)
    for at in range(first, last, KEYS):
        position = at + steps
        is_there = position < last
        page = tl.load(table + position // S, mask=is_there, other=0)
        if not WIDE:
            page = page.to(tl.int32)  # offsets of 64 bits would take twice the registers
        page *= S * K * W
        at = (page + (position % S * K + head) * D)[:, None] + dims[None, :]
        unit_at = (page + S * K * D) // 2 + head * S + position % S
        block = tl.load(kv_cache + at, mask=is_there[:, None], other=0)
        scores = tl.dot(q, tl.trans(block.to(q.dtype))) * scale
        if units is not None:
            scores *= _unit(units + unit_at, is_there)[None, :]
        can_see = is_there[None, :] & (position[None, :] <= sees[:, None])
        scores = tl.where(can_see, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        block = tl.load(kv_cache + plane + at, mask=is_there[:, None], other=0)
        if units is not None:
            weights *= _unit(units + plane // 2 + unit_at, is_there)[None, :]
        sums = sums * fade[:, None] + tl.dot(weights.to(q.dtype), block.to(q.dtype))
        peak = new_peak
    return sums, peak, total


@triton.jit(
    do_not_specialize=["width"],
    # Parts of a step's one buffer, which may begin anywhere: one variant for all of them.
    do_not_specialize_on_alignment=["table", "seq_lens"],
)
def decode_kernel(
    queries, kv_cache, units, table, seq_lens, out, partial, logsumexp, scale, plane, width,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, S: tl.constexpr, W: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One sequence's one query and one kv head, over one of SPLITS parts of its keys.

    With one part the result goes to out (N, H, D); else to partial (N, H, SPLITS, D), with the
    logarithm of its weight in logsumexp (N, H, SPLITS), base 2.
    """
    G: tl.constexpr = H // K
    seq, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + seq).to(tl.int32)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    is_real = rows < G
    own_head = seq * H + head * G + rows  # among all N * H
    q_at = own_head[:, None] * D + dims[None, :]
    q = tl.load(queries + q_at, mask=is_real[:, None], other=0.0)
    part = tl.cdiv(tl.cdiv(length, KEYS), SPLITS) * KEYS
    first = split * part
    last = tl.minimum(first + part, length)
    sums, peak, total = _attend(
        q, tl.full([ROWS], 0, tl.int32) + last, first, last, head, kv_cache, units, plane,
        table + seq.to(tl.int64) * width, scale, K, D, S, W, ROWS, KEYS, WIDE,
    )  # fmt: skip
    total = tl.where(first < last, total, 1.0)
    sums = sums / total[:, None]
    if SPLITS == 1:
        tl.store(out + q_at, sums.to(out.dtype.element_ty), mask=is_real[:, None])
    else:
        own_part = own_head * SPLITS + split
        weight = tl.where(first < last, peak + tl.log2(total), -float("inf"))
        tl.store(logsumexp + own_part, weight, mask=is_real)
        if first < last:  # the merge reads no part of weight 0
            tl.store(partial + own_part[:, None] * D + dims[None, :], sums, mask=is_real[:, None])


@triton.jit
def merge_kernel(partial, logsumexp, out, D: tl.constexpr, SPLITS: tl.constexpr):
    """partial (N * H, SPLITS, D) and logsumexp (N * H, SPLITS) -> out (N * H, D)."""
    row = tl.program_id(0)
    dims = tl.arange(0, D)
    own_part = row * SPLITS + tl.arange(0, SPLITS)
    logs = tl.load(logsumexp + own_part)
    is_there = logs != -float("inf")  # a NaN is there, and the result is one
    peak = tl.max(logs, 0)
    weights = tl.where(is_there, tl.exp2(logs - tl.where(peak > -float("inf"), peak, 0.0)), 0.0)
    total = tl.sum(weights, 0)
    at = own_part[:, None] * D + dims[None, :]
    sums = tl.load(partial + at, mask=is_there[:, None], other=0.0)
    merged = tl.sum(sums * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * D + dims, merged.to(out.dtype.element_ty))


@triton.jit
def _find_block(block, query_starts, num_decodes, num_prefills, BLOCK: tl.constexpr):
    """The sequence of a block of BLOCK queries, and the block's place in that sequence: i of those
    with several queries has the blocks from query_starts // BLOCK + i on, counted without decodes,
    of which the last may have nothing to do. So no table of blocks is made or sent."""
    low = 0
    high = num_prefills - 1
    while low < high:
        middle = (low + high + 1) // 2
        start = tl.load(query_starts + num_decodes + middle).to(tl.int32) - num_decodes
        if start // BLOCK + middle <= block:
            low = middle
        else:
            high = middle - 1
    start = tl.load(query_starts + num_decodes + low).to(tl.int32) - num_decodes
    return num_decodes + low, block - (start // BLOCK + low)


@triton.jit(
    do_not_specialize=["width", "num_decodes", "num_prefills"],
    do_not_specialize_on_alignment=["table", "query_starts", "seq_lens"],
)
def prefill_kernel(
    queries, kv_cache, units, table, query_starts, seq_lens, out, scale, plane, width,
    num_decodes, num_prefills,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, S: tl.constexpr, W: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A block of ROWS // G queries of one sequence, and one kv head, over all keys they see."""
    G: tl.constexpr = H // K
    BLOCK: tl.constexpr = ROWS // G
    # The last blocks see the most keys: they begin first, so that no long one is left at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    seq, place = _find_block(block, query_starts, num_decodes, num_prefills, BLOCK)
    start = tl.load(query_starts + seq)
    count = (tl.load(query_starts + seq + 1) - start).to(tl.int32)
    if place * BLOCK >= count:
        return
    length = tl.load(seq_lens + seq).to(tl.int32)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    query = place * BLOCK + rows // G  # of each row, in its sequence's new tokens
    is_real = (rows < BLOCK * G) & (query < count)
    past = length - count
    q_at = ((query * H + head * G + rows % G) * D)[:, None] + dims[None, :]
    q = tl.load(queries + start * (H * D) + q_at, mask=is_real[:, None], other=0.0)
    last = tl.minimum(length, past + (place + 1) * BLOCK)
    sums, _, total = _attend(
        q, past + query, 0, last, head, kv_cache, units, plane,
        table + seq.to(tl.int64) * width, scale, K, D, S, W, ROWS, KEYS, WIDE,
    )  # fmt: skip
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    at = out + start * (H * D) + q_at
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_real[:, None])
