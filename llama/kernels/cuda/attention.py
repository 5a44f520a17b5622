"""Paged grouped-query attention on a GPU: split-KV decode, and prefill by blocks of queries.

In and out: as `llama.ops.attention.paged_attention`, which defines it. The G query heads that share
a KV head are rows of one matrix product, so keys and values are read once (grouped-query attention;
Ainslie et al., 2023). The softmax is online (FlashAttention; Dao et al., 2022). In decode the keys
of a sequence are split among programs, and their partial results are merged (Flash-Decoding; Dao et
al., 2023). In prefill a program finds its sequence by a binary search in query_starts, as in vLLM's
unified Triton attention. Lengths are read on the device alone, so that a CUDA graph can replay a
step with other lengths.

Over 400 lines: the launchers and the kernels depend on the same layouts and tile sizes. Two kernels
have over 60 lines, as Triton passes each pointer and size as an argument of its own.

Shapes: T tokens, B sequences, N sequences with one query, H query heads, K KV heads, D head dim,
P pages, S slots per page, M pages per sequence, G = H / K, W elements of a row of the cache, whose
layout llama/ops/kv_cache.py defines.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.kernels.cuda.launch import Tile, launcher, views_of
from llama.kernels.cuda.pdl import launch_dependents, pdl_options, wait_for_dependency
from llama.ops.batch import Batch

_PROGRAMS = 1024  # approximate programs of a decode launch: eight per processor of an H200's 132
_MAX_SPLITS = 64
# On an H100, one sequence of 2,048 tokens is faster in 32 parts of its keys than in 64, and one of
# 8,192 tokens equally fast. More are used only where 32 parts are too few programs.
_ENOUGH_SPLITS = 32
_FEW_PROGRAMS = 256
_MAX_OFFSET = 2**31  # elements of a layer's keys that offsets of 32 bits can address


@launcher
def paged_attention(queries: Tensor, kv_cache: Tensor, batch: Batch) -> Tensor:
    """Compute attention over the pages of a layer's KV cache.

    Args:
        queries: (T, H, D). D is a power of two, from 16 to 256.
        kv_cache: One layer's (2, P, S, K, W).
        batch: The sequences of the step; those with one query come first.

    Returns:
        (T, H, D). A sequence without tokens gets zeros.
    """
    page_table = batch.page_table
    assert kv_cache.is_contiguous() and page_table.stride(1) == 1, (kv_cache.shape, page_table)
    assert batch.query_starts.is_contiguous() and batch.seq_lens.is_contiguous()
    queries = queries.contiguous()
    out = torch.empty_like(queries)
    if batch.num_decodes:
        _launch_decode(queries, kv_cache, batch, out)
    if len(batch.seq_lens) > batch.num_decodes:
        _launch_prefill(queries, kv_cache, batch, out)
    return out


def _launch_decode(queries: Tensor, kv_cache: Tensor, batch: Batch, out: Tensor) -> None:
    """Write the rows of `out` of the sequences with one query."""
    _, n_heads, head_dim = queries.shape
    n_kv_heads = kv_cache.shape[3]
    num_decodes = batch.num_decodes
    splits = num_splits(num_decodes, n_kv_heads)
    tile = decode_tile(n_heads // n_kv_heads, head_dim)
    partial = logsumexp = out  # not used with one split
    if splits > 1:
        rows = num_decodes * n_heads * splits
        workspace = torch.empty(rows * (head_dim + 1), dtype=torch.float32, device=out.device)
        partial = workspace
        logsumexp = workspace[rows * head_dim :]
    decode_kernel[num_decodes, n_kv_heads, splits](
        queries,
        *views_of(kv_cache),
        batch.page_table,
        batch.seq_lens,
        out,
        partial,
        logsumexp,
        _score_scale(head_dim),
        kv_cache.numel() // 2,
        batch.page_table.stride(0),
        **_sizes(queries, kv_cache),
        ROWS=tile.rows,
        KEYS=tile.columns,
        SPLITS=splits,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_options(queries.device),
    )
    if splits > 1:
        merge_kernel[(num_decodes * n_heads,)](
            partial,
            logsumexp,
            out,
            D=head_dim,
            SPLITS=splits,
            **pdl_options(queries.device),
        )


def _launch_prefill(queries: Tensor, kv_cache: Tensor, batch: Batch, out: Tensor) -> None:
    """Write the rows of `out` of the sequences with several queries, or with none."""
    num_tokens, n_heads, head_dim = queries.shape
    n_kv_heads = kv_cache.shape[3]
    num_decodes = batch.num_decodes
    num_prefills = len(batch.seq_lens) - num_decodes
    group = n_heads // n_kv_heads
    tile = prefill_tile(group, head_dim, has_wide_tiles(queries.device))
    block = tile.rows // group
    # The last block of each sequence may be short, see _find_block.
    num_blocks = (num_tokens - num_decodes) // block + num_prefills
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


def num_splits(num_decodes: int, n_kv_heads: int) -> int:
    """Return the number of parts of each sequence's keys, one per program.

    With few sequences there are many parts, so that all processors have work. It is a power of two
    that depends on the batch's shape alone, whatever the lengths.
    """
    groups = num_decodes * n_kv_heads
    wanted = _PROGRAMS // groups
    if wanted > _ENOUGH_SPLITS:
        wanted = max(_ENOUGH_SPLITS, _FEW_PROGRAMS // groups)
    return min(_MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1))


def decode_variants(n_kv_heads: int) -> list[int]:
    """Return for each number of parts the largest num_decodes that gets it, most parts first."""
    largest: dict[int, int] = {}
    for num_decodes in range(1, _PROGRAMS // n_kv_heads + 1):
        largest[num_splits(num_decodes, n_kv_heads)] = num_decodes
    return list(largest.values())


@functools.cache
def decode_tile(group: int, head_dim: int) -> Tile:
    """Return the tile of the decode kernel for G query heads per KV head."""
    rows = max(16, triton.next_power_of_2(group))
    keys = 64 if head_dim <= 128 else 32
    # With three stages, page numbers are read a block ahead of the keys that they lead to.
    stages = 3 if head_dim > 64 else 2
    return Tile(rows, keys, 4, stages)


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
def _attend(
    q: tl.tensor,
    last_visible: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
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
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend with rows q (ROWS, D) to positions [begin, end) of one sequence and KV head.

    last_visible (ROWS) is the last position that each row may see, and head is the KV head. plane
    is the number of elements between a key and its value, table points to the pages of the
    sequence, and score_scale is the factor of scores for a softmax in powers of 2.

    Returns:
        The weighted sums (ROWS, D), each row's largest score, and its sum of weights.
    """
    peak = tl.full([ROWS], -1.0e30, tl.float32)  # finite: a row that sees nothing yet gives no NaN
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    dims = tl.arange(0, D)
    steps = tl.arange(0, KEYS)
    for start in range(begin, end, KEYS):
        position = start + steps
        is_valid = position < end
        page = tl.load(table + position // S, mask=is_valid, other=0)
        if not WIDE:
            page = page.to(tl.int32)  # offsets of 64 bits would take twice the registers
        page *= S * K * W
        row_at = page + (position % S * K + head) * D
        key_at = row_at[:, None] + dims[None, :]
        scale_at = (page + S * K * D) // 2 + head * S + position % S
        block = tl.load(kv_cache + key_at, mask=is_valid[:, None], other=0)
        scores = tl.dot(q, tl.trans(block.to(q.dtype))) * score_scale
        if kv_scales is not None:
            scores *= _load_scale(kv_scales + scale_at, is_valid)[None, :]
        is_visible = is_valid[None, :] & (position[None, :] <= last_visible[:, None])
        scores = tl.where(is_visible, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        block = tl.load(kv_cache + plane + key_at, mask=is_valid[:, None], other=0)
        if kv_scales is not None:
            weights *= _load_scale(kv_scales + plane // 2 + scale_at, is_valid)[None, :]
        sums = sums * fade[:, None] + tl.dot(weights.to(q.dtype), block.to(q.dtype))
        peak = new_peak
    return sums, peak, total


@triton.jit(
    do_not_specialize=["width"],
    # Parts of a step's one buffer, which may begin anywhere: one variant serves all of them.
    do_not_specialize_on_alignment=["table", "seq_lens"],
)
def decode_kernel(
    queries: tl.tensor,
    kv_cache: tl.tensor,
    kv_scales: tl.tensor,
    table: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    logsumexp: tl.tensor,
    score_scale: tl.tensor,
    plane: tl.tensor,
    width: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    W: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Attend with one sequence's query and one KV head to one of SPLITS parts of its keys.

    With one part the result goes to out (N, H, D). Otherwise it goes to partial (N, H, SPLITS, D),
    and the base-2 logarithm of its weight to logsumexp (N, H, SPLITS).
    """
    G: tl.constexpr = H // K
    if PDL:
        launch_dependents()
        wait_for_dependency()
    seq = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + seq).to(tl.int32)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    is_row = rows < G
    query_head = seq * H + head * G + rows  # index among all N * H
    query_at = query_head[:, None] * D + dims[None, :]
    q = tl.load(queries + query_at, mask=is_row[:, None], other=0.0)
    part_size = tl.cdiv(tl.cdiv(length, KEYS), SPLITS) * KEYS
    begin = split * part_size
    end = tl.minimum(begin + part_size, length)
    sums, peak, total = _attend(
        q,
        tl.full([ROWS], 0, tl.int32) + end,
        begin,
        end,
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
        ROWS,
        KEYS,
        WIDE,
    )
    total = tl.where(begin < end, total, 1.0)
    sums = sums / total[:, None]
    if SPLITS == 1:
        tl.store(out + query_at, sums.to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        part = query_head * SPLITS + split
        weight = tl.where(begin < end, peak + tl.log2(total), -float("inf"))
        tl.store(logsumexp + part, weight, mask=is_row)
        if begin < end:  # the merge does not read a part of weight 0
            tl.store(partial + part[:, None] * D + dims[None, :], sums, mask=is_row[:, None])


@triton.jit
def merge_kernel(
    partial: tl.tensor,
    logsumexp: tl.tensor,
    out: tl.tensor,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Merge partial (N * H, SPLITS, D) to out (N * H, D), weighted by logsumexp (N * H, SPLITS)."""
    if PDL:
        launch_dependents()
        wait_for_dependency()
    row = tl.program_id(0)
    dims = tl.arange(0, D)
    part = row * SPLITS + tl.arange(0, SPLITS)
    logs = tl.load(logsumexp + part)
    is_there = logs != -float("inf")  # also for NaN, which must reach the result
    peak = tl.max(logs, 0)
    finite_peak = tl.where(peak > -float("inf"), peak, 0.0)
    weights = tl.where(is_there, tl.exp2(logs - finite_peak), 0.0)
    total = tl.sum(weights, 0)
    partial_at = part[:, None] * D + dims[None, :]
    sums = tl.load(partial + partial_at, mask=is_there[:, None], other=0.0)
    merged = tl.sum(sums * weights[:, None], 0)
    merged /= tl.where(total > 0, total, 1.0)
    tl.store(out + row * D + dims, merged.to(out.dtype.element_ty))


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
    end = tl.minimum(length, past + (index + 1) * BLOCK)
    sums, _, total = _attend(
        q,
        past + query,
        0,
        end,
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
        ROWS,
        KEYS,
        WIDE,
    )
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out + start * (H * D) + query_at
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=is_row[:, None])
