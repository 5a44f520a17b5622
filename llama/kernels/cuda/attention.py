"""Paged grouped-query attention on a GPU: split-KV decode, and prefill by blocks of queries.

In and out: as `llama.ops.attention.paged_attention`, which defines it. The G query heads that share
a KV head are rows of one matrix product, so keys and values are read once (grouped-query attention;
Ainslie et al., 2023). The softmax is online (FlashAttention; Dao et al., 2022).

Decode takes sequences with few queries, all of which are rows of one tile: one new token, or drafts
that are verified. The keys of the step are split among a fixed number of programs, and the partial
results of a sequence are merged (Flash-Decoding; Dao et al., 2023). Parts have about the same size
whatever sequence they belong to (Stream-K; Osama et al., 2023), so that no long sequence is left
when all others have ended. The size follows from the sum of all lengths, and the sums of a row thus
depend on its neighbours' lengths in their last bits.

In prefill a program finds its sequence by a binary search in query_starts, as in vLLM's unified
Triton attention. It has two loops: over the diagonal, and over the keys before it, without masks.
Lengths are read on the device alone, so that a CUDA graph can replay a step with other lengths.

Over 400 lines: the launchers and the kernels depend on the same layouts and tile sizes. The kernels
and their loop have over 60 lines, as Triton passes each pointer and size as an argument of its own.

Shapes: T tokens, B sequences, N sequences with few queries, Q the most queries of one, R their
queries, C parts of their keys, H query heads, K KV heads, D head dim, P pages, S slots per page,
M pages per sequence, G = H / K, W elements of a row of the cache, whose layout
llama/ops/kv_cache.py defines.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.kernels.cuda.launch import Tile, launcher, most_queries, views_of
from llama.kernels.cuda.pdl import launch_dependents, pdl_options, wait_for_dependency
from llama.ops.batch import Batch

_PROGRAMS = 1024  # approximate programs of a decode launch: eight for each of an H200's 132 SMs
# On an H100, one sequence of 2,048 tokens is faster in 32 parts of its keys than in 64, and one of
# 8,192 tokens equally fast. More are used only where 32 parts are too few programs.
_ENOUGH_PARTS = 32
_MAX_PARTS = 64  # parts of a single sequence
_FEW_PROGRAMS = 256
MERGED = 32  # parts that a program merges at once
LANES = 128  # sequences whose lengths a program reads at once
_MAX_OFFSET = 2**31  # elements of a layer's keys that offsets of 32 bits can address


@launcher
def paged_attention(queries: Tensor, kv_cache: Tensor, batch: Batch) -> Tensor:
    """Compute attention over the pages of a layer's KV cache.

    Args:
        queries: (T, H, D). D is a power of two, from 16 to 256.
        kv_cache: One layer's (2, P, S, K, W).
        batch: The sequences of the step; those with one query come first. In a step of sequences
            with few queries alone, `query_lens_cpu` may be upper bounds.

    Returns:
        (T, H, D). A sequence without tokens gets zeros.
    """
    page_table = batch.page_table
    assert kv_cache.is_contiguous() and page_table.stride(1) == 1, (kv_cache.shape, page_table)
    assert batch.query_starts.is_contiguous() and batch.seq_lens.is_contiguous()
    queries = queries.contiguous()
    out = torch.empty_like(queries)
    most = most_queries(queries.shape[1] // kv_cache.shape[3])
    counts = [*itertools.takewhile(lambda count: count <= most, batch.query_lens_cpu)]
    has_prefills = len(counts) < len(batch.seq_lens)
    num_rows = sum(counts) if has_prefills else len(queries)
    if num_rows:
        _launch_decode(queries, kv_cache, batch, out, num_rows, counts)
    if has_prefills:
        _launch_prefill(queries, kv_cache, batch, out, num_rows, len(counts))
    return out


def _launch_decode(
    queries: Tensor,
    kv_cache: Tensor,
    batch: Batch,
    out: Tensor,
    num_rows: int,
    counts: Sequence[int],
) -> None:
    """Write the first `num_rows` rows of `out`, of sequences with at most so many queries each."""
    _, n_heads, head_dim = queries.shape
    n_kv_heads = kv_cache.shape[3]
    most = max(counts)
    tile = decode_tile(n_heads // n_kv_heads, head_dim, most)
    wanted = num_parts(len(counts), n_kv_heads)
    max_parts = wanted + len(counts)  # each sequence's last part may be short
    rows = max_parts * most * n_heads
    workspace = torch.empty(
        rows * (head_dim + 1) + 2 * num_rows, dtype=torch.float32, device=out.device
    )
    partial, logsumexp, parts = workspace.split([rows * head_dim, rows, 2 * num_rows])
    parts = parts.view(torch.int32)
    decode_kernel[max_parts, n_kv_heads](
        queries,
        *views_of(kv_cache),
        batch.page_table,
        batch.query_starts,
        batch.seq_lens,
        out,
        partial,
        logsumexp,
        parts,
        _score_scale(head_dim),
        kv_cache.numel() // 2,
        batch.page_table.stride(0),
        len(counts),
        wanted,
        most,
        **_sizes(queries, kv_cache),
        ROWS=tile.rows,
        KEYS=tile.columns,
        LANES=LANES,
        IS_SINGLE=most == 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_options(queries.device),
    )
    merge_kernel[num_rows, n_heads](
        partial,
        logsumexp,
        parts,
        out,
        most,
        H=n_heads,
        D=head_dim,
        PARTS=MERGED,
        **pdl_options(queries.device),
    )


def _launch_prefill(
    queries: Tensor,
    kv_cache: Tensor,
    batch: Batch,
    out: Tensor,
    num_rows: int,
    num_decodes: int,
) -> None:
    """Write the other rows of `out`: those of the sequences after the first `num_decodes`."""
    num_tokens, n_heads, head_dim = queries.shape
    n_kv_heads = kv_cache.shape[3]
    num_prefills = len(batch.seq_lens) - num_decodes
    group = n_heads // n_kv_heads
    tile = prefill_tile(group, head_dim, has_wide_tiles(queries.device))
    block = tile.rows // group
    # The last block of each sequence may be short, see _find_block.
    num_blocks = (num_tokens - num_rows) // block + num_prefills
    prefill_kernel[num_blocks, n_kv_heads](
        queries,
        *views_of(kv_cache),
        batch.page_table,
        batch.query_starts,
        batch.seq_lens,
        out,
        _score_scale(head_dim),
        kv_cache.numel() // 2,
        batch.page_table.stride(0),
        num_decodes,
        num_prefills,
        **_sizes(queries, kv_cache),
        ROWS=tile.rows,
        KEYS=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _score_scale(head_dim: int) -> float:
    """Return the factor of scores whose softmax takes powers of 2 instead of e."""
    return float(head_dim**-0.5 * math.log2(math.e))


def _sizes(queries: Tensor, kv_cache: Tensor) -> dict[str, Any]:
    """Return the sizes that both kernels are compiled for."""
    _, n_heads, head_dim = queries.shape
    _, _, page_size, n_kv_heads, row = kv_cache.shape
    return {
        "H": n_heads,
        "K": n_kv_heads,
        "D": head_dim,
        "S": page_size,
        "W": row,
        "WIDE": kv_cache.numel() // 2 >= _MAX_OFFSET,
    }


def num_parts(num_sequences: int, n_kv_heads: int) -> int:
    """Return the number of parts of equal size that the keys of a step are split into.

    There is a program for each part and KV head, so that all multiprocessors have work. The number
    depends on the batch's shape alone, whatever the lengths.
    """
    groups = num_sequences * n_kv_heads
    of_each = min(_MAX_PARTS, max(_ENOUGH_PARTS, _FEW_PROGRAMS // groups))
    return max(1, min(num_sequences * of_each, _PROGRAMS // n_kv_heads))


def decode_variants(group: int) -> list[int]:
    """Return for each tile of the decode kernel the most queries of a sequence that fit into it."""
    largest = {}
    for count in range(1, most_queries(group) + 1):
        largest[_decode_rows(group, count)] = count
    return list(largest.values())


def _decode_rows(group: int, num_queries: int) -> int:
    """Return the rows of the decode kernel's tile for so many queries of a sequence."""
    rows: int = triton.next_power_of_2(group * num_queries)
    return max(16 if num_queries == 1 else 32, rows)


@functools.cache
def decode_tile(group: int, head_dim: int, num_queries: int) -> Tile:
    """Return the tile of the decode kernel.

    Args:
        group: G.
        head_dim: D.
        num_queries: The most queries of a sequence.
    """
    rows = _decode_rows(group, num_queries)
    keys = 64 if head_dim <= 128 else 32
    # With three stages, page numbers are read a block ahead of the keys that they lead to.
    stages = 3 if head_dim > 64 else 2
    return Tile(rows, keys, 4 if rows == 16 else 8, stages)


@functools.cache
def prefill_tile(group: int, head_dim: int, is_wide: bool) -> Tile:
    """Return the tile of the prefill kernel for G query heads per KV head.

    Args:
        group: G.
        head_dim: D.
        is_wide: Whether the device multiplies 64 rows and more at once (capability 9 and 10).
    """
    rows = max(128 if is_wide and head_dim <= 128 else 64, triton.next_power_of_2(group))
    keys = 64 if head_dim <= 128 else 32
    stages = 3 if is_wide else 2
    return Tile(rows, keys, 8, stages)


@functools.cache
def has_wide_tiles(device: torch.device) -> bool:
    """Return whether the device has the matrix products of capability 9 and 10.

    AMD's GPUs have capabilities of these numbers too, and 64 KiB of shared memory.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@triton.jit
def _load_scale(pointers: tl.tensor, is_valid: tl.tensor) -> tl.tensor:
    """Load bf16 scales, stored as int16, as float32: a bf16 is the upper half of a float32."""
    bits = tl.load(pointers, mask=is_valid, other=0).to(tl.int32)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _nothing_seen(ROWS: tl.constexpr, D: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the sums, the largest scores and the sums of weights of rows before the first key.

    The scores are finite: a row that sees nothing yet gives no NaN.
    """
    peak = tl.full([ROWS], -1.0e30, tl.float32)
    return tl.zeros([ROWS, D], tl.float32), peak, tl.zeros([ROWS], tl.float32)


@triton.jit
def _attend(
    q: tl.tensor,
    last_visible: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    sums: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    head: tl.tensor,
    kv_cache: tl.tensor,
    kv_scales: tl.tensor,
    plane: tl.tensor,
    table: tl.tensor,
    score_scale: tl.tensor,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    W: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
    IS_WHOLE: tl.constexpr = False,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend with rows q (ROWS, D) to positions [begin, end) of one sequence and KV head.

    last_visible (ROWS) is the last position that each row may see, None if each may see all, and
    head is the KV head. plane is the number of elements between a key and its value, table points
    to the pages of the sequence, and score_scale, which is positive, is the factor of scores for a
    softmax in powers of 2. IS_WHOLE: KEYS divides begin and end, so that no load has a mask.

    Returns:
        The weighted sums (ROWS, D), each row's largest score, and its sum of weights, all of them
        continued from `sums`, `peak` and `total`, which `_nothing_seen` begins.
    """
    dims = tl.arange(0, D)
    steps = tl.arange(0, KEYS)
    for start in range(begin, end, KEYS):
        position = start + steps
        is_valid = tl.full([KEYS], True, tl.int1) if IS_WHOLE else position < end
        page = tl.load(table + position // S, mask=is_valid, other=0)
        if not WIDE:
            page = page.to(tl.int32)  # offsets of 64 bits would take twice the registers
        page *= S * K * W
        row_at = page + (position % S * K + head) * D
        key_at = row_at[:, None] + dims[None, :]
        scale_at = (page + S * K * D) // 2 + head * S + position % S
        block = tl.load(kv_cache + key_at, mask=is_valid[:, None], other=0)
        scores = tl.dot(q, tl.trans(block.to(q.dtype)))
        if kv_scales is not None:
            scores *= _load_scale(kv_scales + scale_at, is_valid)[None, :]
        is_visible = is_valid[None, :]
        if last_visible is not None:
            is_visible &= position[None, :] <= last_visible[:, None]
        scores = tl.where(is_visible, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(scores * score_scale - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        block = tl.load(kv_cache + plane + key_at, mask=is_valid[:, None], other=0)
        if kv_scales is not None:
            weights *= _load_scale(kv_scales + plane // 2 + scale_at, is_valid)[None, :]
        sums = sums * fade[:, None] + tl.dot(weights.to(q.dtype), block.to(q.dtype))
        peak = new_peak
    return sums, peak, total


@triton.jit
def _num_blocks(
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    seq: tl.tensor,
    num_sequences: tl.tensor,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """Return the blocks of keys of sequences; 0 for one without queries."""
    is_there = seq < num_sequences
    start = tl.load(query_starts + seq, mask=is_there, other=0)
    end = tl.load(query_starts + seq + 1, mask=is_there, other=0)
    length = tl.load(seq_lens + seq, mask=is_there, other=0).to(tl.int32)
    # A sequence without tokens gets zeros, which its one part writes.
    return tl.where(end > start, tl.maximum(tl.cdiv(length, KEYS), 1), 0)


@triton.jit
def _find_part(
    part: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    num_sequences: tl.tensor,
    wanted: tl.tensor,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the sequence of a part of a step's keys, its first part, and the blocks of a part.

    Parts have at most 1 / wanted of all blocks, and belong to one sequence each. Therefore no table
    of parts is built or sent. After the last part, the sequence is `num_sequences`.
    """
    lanes = tl.arange(0, LANES)
    total = 0
    for first in range(0, num_sequences, LANES):
        total += tl.sum(_num_blocks(query_starts, seq_lens, first + lanes, num_sequences, KEYS), 0)
    size = tl.cdiv(total, wanted)
    seq = 0
    first_part = 0
    num_before = 0
    for first in range(0, num_sequences, LANES):
        blocks = _num_blocks(query_starts, seq_lens, first + lanes, num_sequences, KEYS)
        ends = num_before + tl.cumsum(tl.cdiv(blocks, size), 0)
        is_before = (ends <= part) & (first + lanes < num_sequences)
        seq += tl.sum(is_before.to(tl.int32), 0)
        first_part = tl.maximum(first_part, tl.max(tl.where(is_before, ends, 0), 0))
        num_before = tl.max(ends, 0)
    return seq, first_part, size


@triton.jit(
    do_not_specialize=["width", "num_sequences", "wanted", "most"],
    # Parts of a step's one buffer, which may begin anywhere: one variant serves all of them.
    do_not_specialize_on_alignment=["table", "query_starts", "seq_lens", "logsumexp", "parts"],
)
def decode_kernel(
    queries: tl.tensor,
    kv_cache: tl.tensor,
    kv_scales: tl.tensor,
    table: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    logsumexp: tl.tensor,
    parts: tl.tensor,
    score_scale: tl.tensor,
    plane: tl.tensor,
    width: tl.tensor,
    num_sequences: tl.tensor,
    wanted: tl.tensor,
    most: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    W: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Attend with the queries of one sequence and KV head to one part of its keys.

    The result of a sequence in one part goes to out (T, H, D). Otherwise it goes to partial
    (C, Q, H, D), and the base-2 logarithm of its weight to logsumexp (C, Q, H). parts (R, 2) says
    for each query where the first part's result is in (C * Q), and how many parts there are; Q is
    `most`. IS_SINGLE: no sequence has more than one query.
    """
    G: tl.constexpr = H // K
    if PDL:
        launch_dependents()
        wait_for_dependency()
    part = tl.program_id(0)
    head = tl.program_id(1)
    seq, first_part, size = _find_part(
        part, query_starts, seq_lens, num_sequences, wanted, KEYS, LANES
    )
    if seq >= num_sequences:
        return
    start = tl.load(query_starts + seq).to(tl.int32)
    count = tl.load(query_starts + seq + 1).to(tl.int32) - start
    length = tl.load(seq_lens + seq).to(tl.int32)
    blocks = tl.cdiv(length, KEYS)
    num_parts = tl.maximum(tl.cdiv(blocks, size), 1)
    part_size = tl.cdiv(blocks, num_parts) * KEYS
    begin = (part - first_part) * part_size
    end = tl.minimum(begin + part_size, length)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    if IS_SINGLE:
        query = rows * 0
        is_row = rows < G
        query_head = head * G + rows
    else:
        query = rows // G
        is_row = rows < count * G
        query_head = head * G + rows % G
    query_at = ((start + query) * H + query_head)[:, None] * D + dims[None, :]
    q = tl.load(queries + query_at, mask=is_row[:, None], other=0.0)
    last_visible = None if IS_SINGLE else length - count + query
    sums, peak, total = _nothing_seen(ROWS, D)
    sums, peak, total = _attend(
        q,
        last_visible,
        begin,
        end,
        sums,
        peak,
        total,
        head,
        kv_cache,
        kv_scales,
        plane,
        table + seq.to(tl.int64) * width,
        score_scale,
        K,
        D,
        S,
        W,
        KEYS,
        WIDE,
    )
    is_seen = total != 0  # also for NaN, which must reach the result
    total = tl.where(is_seen, total, 1.0)
    sums = sums / total[:, None]
    if num_parts == 1:
        tl.store(out + query_at, sums.to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        row = (part * most + query) * H + query_head
        weight = tl.where(is_seen, peak + tl.log2(total), -float("inf"))
        tl.store(logsumexp + row, weight, mask=is_row)
        tl.store(partial + row[:, None] * D + dims[None, :], sums, mask=is_row[:, None])
    if part == first_part:
        at = parts + (start + query) * 2
        tl.store(at, first_part * most + query, mask=is_row)
        tl.store(at + 1, num_parts, mask=is_row)


@triton.jit(
    do_not_specialize=["most"],
    do_not_specialize_on_alignment=["logsumexp", "parts"],
)
def merge_kernel(
    partial: tl.tensor,
    logsumexp: tl.tensor,
    parts: tl.tensor,
    out: tl.tensor,
    most: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Merge the parts of one query and head, PARTS at a time, to a row of out (T, H, D).

    partial, logsumexp and parts are as `decode_kernel` writes them.
    """
    if PDL:
        launch_dependents()
        wait_for_dependency()
    query = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(parts + 2 * query)
    num_parts = tl.load(parts + 2 * query + 1)
    if num_parts == 1:
        return
    dims = tl.arange(0, D)
    peak = -1.0e30  # finite: parts that see nothing give no NaN
    total = 0.0
    merged = tl.zeros([D], tl.float32)
    for begin in range(0, num_parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        row = (first + part * most) * H + head
        is_part = part < num_parts
        logs = tl.load(logsumexp + row, mask=is_part, other=-float("inf"))
        sums = tl.load(partial + row[:, None] * D + dims[None, :], mask=is_part[:, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(logs, 0))
        weights = tl.exp2(logs - new_peak)
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 0)
        merged = merged * fade + tl.sum(sums * weights[:, None], 0)
        peak = new_peak
    merged /= total
    tl.store(out + (query * H + head) * D + dims, merged.to(out.dtype.element_ty))


@triton.jit
def _find_block(
    block: tl.tensor,
    query_starts: tl.tensor,
    num_decodes: tl.tensor,
    num_prefills: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the sequence of a block of BLOCK queries, and the block's index in that sequence.

    Counted without decodes, sequence i has the blocks from query_starts // BLOCK + i on, of which
    the last may have nothing to do. Therefore no table of blocks is built or sent.
    """
    begin = tl.load(query_starts + num_decodes).to(tl.int32)
    low = 0
    high = num_prefills - 1
    while low < high:
        middle = (low + high + 1) // 2
        start = tl.load(query_starts + num_decodes + middle).to(tl.int32) - begin
        if start // BLOCK + middle <= block:
            low = middle
        else:
            high = middle - 1
    start = tl.load(query_starts + num_decodes + low).to(tl.int32) - begin
    return num_decodes + low, block - (start // BLOCK + low)


@triton.jit(
    do_not_specialize=["width", "num_decodes", "num_prefills"],
    do_not_specialize_on_alignment=["table", "query_starts", "seq_lens"],
)
def prefill_kernel(
    queries: tl.tensor,
    kv_cache: tl.tensor,
    kv_scales: tl.tensor,
    table: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    score_scale: tl.tensor,
    plane: tl.tensor,
    width: tl.tensor,
    num_decodes: tl.tensor,
    num_prefills: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    W: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Attend with a block of ROWS // G queries and one KV head to all keys that they see."""
    G: tl.constexpr = H // K
    BLOCK: tl.constexpr = ROWS // G
    # The last blocks see the most keys. They begin first, so that no long one is left at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    seq, index = _find_block(block, query_starts, num_decodes, num_prefills, BLOCK)
    start = tl.load(query_starts + seq)
    count = (tl.load(query_starts + seq + 1) - start).to(tl.int32)
    if index * BLOCK >= count:
        return
    length = tl.load(seq_lens + seq).to(tl.int32)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    query = index * BLOCK + rows // G  # index of each row's query among the sequence's new tokens
    is_row = (rows < BLOCK * G) & (query < count)
    past = length - count
    row_at = (query * H + head * G + rows % G) * D
    query_at = row_at[:, None] + dims[None, :]
    q = tl.load(queries + start * (H * D) + query_at, mask=is_row[:, None], other=0.0)
    # The blocks of keys up to the first query need no mask. The diagonal is first: if it is second,
    # ptxas makes each product of wgmma wait for the one before.
    whole = (past + index * BLOCK + 1) // KEYS * KEYS
    end = tl.minimum(length, past + (index + 1) * BLOCK)
    pages = table + seq.to(tl.int64) * width
    sums, peak, total = _nothing_seen(ROWS, D)
    for IS_WHOLE in tl.static_range(2):
        sums, peak, total = _attend(
            q,
            None if IS_WHOLE else past + query,
            0 if IS_WHOLE else whole,
            whole if IS_WHOLE else end,
            sums,
            peak,
            total,
            head,
            kv_cache,
            kv_scales,
            plane,
            pages,
            score_scale,
            K,
            D,
            S,
            W,
            KEYS,
            WIDE,
            IS_WHOLE,
        )
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out + start * (H * D) + query_at
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=is_row[:, None])
