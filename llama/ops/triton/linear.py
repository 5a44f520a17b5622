"""A few rows times a weight on a GPU, where that beats the library that torch calls.

In: x (..., K) of at most 16 rows, or of at most 64 with a quantized weight, and a weight (N, K).
Out: (..., N). Each program streams its rows of the weight past the few rows of x. Which tile is
fastest, and whether the library is faster, depends on the GPU, the format, N, K and M. The
self-check times the `candidates`, and a model's `KernelSet` holds the fastest. Where it has none,
torch multiplies with what `plain` writes.

`product_kernel` has over 60 lines, as Triton passes each pointer and size as an argument of its
own.

Shapes: M rows, in any leading dimensions; N outputs, K inputs; G groups of K / G inputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.ops.cpu.constants import ElementFormat
from llama.ops.triton.kernels import Blocks, Tile, launcher
from llama.ops.triton.pdl import launch_dependents, pdl_options, prefetch, wait_for_dependency

BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # numbers of rows M, each with a tile of its own
_NIBBLES = tl.constexpr(ElementFormat.NIBBLES.value)
_FP8 = tl.constexpr(ElementFormat.FP8.value)
_MIN_DOT_ROWS = 16  # the fewest rows that a matrix unit multiplies at once
_BLOCK_ROWS = 32  # rows of a block of a quantized weight
_PREFETCHED_PARTS = tl.constexpr(2)  # iterations whose weights are prefetched
_LINE = tl.constexpr(64)  # elements of 16 bits in a line of the L2 cache
_PLAIN_COLUMNS = 128  # columns per program of `plain`
_TILES = (
    Tile(4, 1024, 4, 4, False),
    Tile(8, 512, 4, 4, False),
    Tile(16, 256, 4, 4, False),
    Tile(4, 512, 4, 6, False),
    Tile(32, 256, 4, 4),
    Tile(64, 128, 4, 4),
    Tile(16, 256, 4, 5),
    Tile(32, 128, 4, 6),
)
# The tiles of quantized weights; the registers of the last one suffice for 64 rows of x.
_QUANTIZED_TILES = (
    Tile(32, 256, 4, 4, False),
    Tile(32, 512, 8, 4, False),
    Tile(32, 128, 4, 4),
)


def candidates(kind: int, n: int, k: int, m: int) -> list[Tile]:
    """Return the tiles for M rows times a weight (N, K); none where M is too large.

    kind: The weight's `ElementFormat`, 0 for a plain weight.
    """
    max_rows = BUCKETS[-1] if kind else _MIN_DOT_ROWS
    if not 1 <= m <= max_rows or n < 1:
        return []
    tiles = _QUANTIZED_TILES if kind else _TILES
    return [x for x in tiles if k % x.columns == 0 and (x.uses_dot or m == 1)]


@launcher
def run(x: Tensor, weight: Tensor | Blocks, tile: Tile, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply x (..., K) by a weight (N, K).

    Args:
        x: At most 64 rows, 1 if the tile does not use matrix units.
        weight: A quantized weight, or a plain one of the dtype of x.
        tile: One of `candidates` for these sizes.
        dtype: That of the result, by default that of x. float32 gives the sums before rounding.

    Returns:
        (..., N).
    """
    n, k = weight.shape
    x = x.contiguous()
    m = x.numel() // k
    max_rows = BUCKETS[-1] if tile.uses_dot else 1
    assert x.shape[-1] == k, (x.shape, weight.shape)
    assert 1 <= m <= max_rows and k % tile.columns == 0, (m, k, tile)
    out = torch.empty(*x.shape[:-1], n, dtype=dtype or x.dtype, device=x.device)
    batch = max(_MIN_DOT_ROWS, triton.next_power_of_2(m)) if tile.uses_dot else 1
    product_kernel[(-(-n // tile.rows),)](
        x,
        out,
        m,
        n,
        *arguments(weight),
        K=k,
        BATCH=batch,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **pdl_options(x.device),
    )
    return out


@launcher
def plain(weight: Blocks, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return rows [first, end) of a quantized weight as plain elements (end - first, K).

    The bounds are multiples of 32, or the end is that of the weight.
    """
    k = weight.shape[1]
    blocks = -(-(end - first) // _BLOCK_ROWS)
    out = torch.empty(blocks * _BLOCK_ROWS, k, dtype=dtype, device=weight.values.device)
    plain_kernel[blocks, k // _PLAIN_COLUMNS](
        out, first // _BLOCK_ROWS, *arguments(weight), K=k, COLUMNS=_PLAIN_COLUMNS
    )
    return out[: end - first]


def arguments(weight: Tensor | Blocks) -> list[Any]:
    """Return `weight`, `scales`, `outer_scales`, KIND, FIRST, GROUP and PARTS of a kernel."""
    if isinstance(weight, Tensor):
        assert weight.is_contiguous(), weight.shape
        return [weight, None, None, 0, 0, 0, 0]
    values = weight.values
    if weight.kind != ElementFormat.NIBBLES:
        values = values.view(torch.int16)  # a word has two elements of a row
    outer_scales = None
    if weight.scales.dtype is torch.uint8:  # the same memory holds float16 and bytes
        outer_scales = weight.scales.view(torch.float16)
    constants = [weight.kind, weight.first, weight.group, weight.per_group]
    return [values, weight.scales, outer_scales, *constants]


@triton.jit
def _load_scales(
    scales: tl.tensor,
    outer_scales: tl.tensor,
    block: tl.tensor,
    group: tl.tensor,
    part: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Load the scales of some groups for the 32 rows of a block: (groups, 32) float32.

    part: 0 for scales, 1 for offsets.
    """
    row = part * 32 + tl.arange(0, 32)[None, :]
    if outer_scales is None:
        scale_at = (block * GROUPS + group)[:, None] * (PARTS * 32)
        loaded = tl.load(scales + scale_at + row)
        loaded = loaded.to(tl.float32)
    else:
        # Eight groups share 320 bytes per part: a float16 per row, then a signed byte per group.
        eight = block * (GROUPS // 8) + group // 8
        eight_at = eight[:, None] * (PARTS * 320)
        byte_at = PARTS * 64 + group % 8 * (PARTS * 32)
        scale_at = eight_at + byte_at[:, None] + row
        outer = tl.load(outer_scales + eight_at // 2 + row).to(tl.float32)
        inner = tl.load(scales + scale_at) ^ 128
        loaded = (inner.to(tl.float32) - 128) * outer
    return loaded


@triton.jit
def _load_elements(
    weight: tl.tensor,
    scales: tl.tensor,
    outer_scales: tl.tensor,
    block: tl.tensor,
    begin: tl.tensor,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Load the 32 rows of a block of a quantized weight, from a column on: (COLUMNS, 32) float32.

    A word of a row has 8 elements of four bits, or 2 bytes; the words of 32 rows lie together.
    """
    PER_WORD: tl.constexpr = 8 if KIND == _NIBBLES else 2
    RUN: tl.constexpr = min(GROUP, COLUMNS)  # columns that share a scale
    block = block.to(tl.int64)
    word = begin // PER_WORD + tl.arange(0, COLUMNS // PER_WORD)
    # No other program reads this part of the weight: the cache is for x.
    packed = tl.load(
        weight + block * (K // PER_WORD * 32) + word[:, None] * 32 + tl.arange(0, 32)[None, :],
        eviction_policy="evict_first",
    )[:, None, :].to(tl.int32)
    index = tl.arange(0, PER_WORD)[None, :, None]
    if KIND == _NIBBLES:
        shift = index % 2 * 16 + index // 2 * 4
        codes = packed >> shift & 15
    else:
        codes = packed << 24 - 8 * index >> 24
    if KIND == _FP8:
        # As the upper bits of a float16, the bits of e4m3 are 2**-8 times the number.
        halves = (codes & 127) << 7 | (codes & 128) << 8
        codes = halves.to(tl.int16).to(tl.float16, bitcast=True)
    elements = tl.reshape(codes.to(tl.float32) + FIRST, (COLUMNS // RUN, RUN, 32))
    group = begin // GROUP + tl.arange(0, COLUMNS // RUN)
    GROUPS: tl.constexpr = K // GROUP
    group_scales = _load_scales(scales, outer_scales, block, group, 0, GROUPS, PARTS)
    elements *= group_scales[:, None, :]
    if PARTS == 2:
        group_offsets = _load_scales(scales, outer_scales, block, group, 1, GROUPS, PARTS)
        elements += group_offsets[:, None, :]
    return tl.reshape(elements, (COLUMNS, 32))


@triton.jit(do_not_specialize=["m"])
def product_kernel(
    x: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    outer_scales: tl.tensor,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Compute ROWS columns of out (M, N).

    BATCH rows of x are multiplied by matrix units, those beyond M as zeros. A single row is
    multiplied without them.
    """
    first = tl.program_id(0) * ROWS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    x_rows = tl.arange(0, BATCH)
    is_row = first + rows < n
    is_x_row = x_rows < m
    first_row = weight + first.to(tl.int64) * K
    if PDL:
        launch_dependents()
        if not KIND:
            LINES: tl.constexpr = min(K, COLUMNS * _PREFETCHED_PARTS) // _LINE
            line_at = tl.arange(0, LINES) * _LINE
            near_row = tl.minimum(rows, n - 1 - first)  # rows of the last program may end before
            prefetch(first_row + near_row[:, None] * K + line_at[None, :])
        wait_for_dependency()
    sums = tl.zeros([COLUMNS if BATCH == 1 else BATCH, ROWS], tl.float32)
    for begin in tl.range(0, K, COLUMNS, num_stages=STAGES):
        if KIND:
            part = _load_elements(
                weight,
                scales,
                outer_scales,
                tl.program_id(0),
                begin,
                KIND,
                FIRST,
                GROUP,
                PARTS,
                K,
                COLUMNS,
            ).to(x.dtype.element_ty)
        else:
            part = tl.trans(
                tl.load(
                    first_row + rows[:, None] * K + (begin + columns)[None, :],
                    mask=is_row[:, None],
                    other=0.0,
                    eviction_policy="evict_first",
                )
            )
        if BATCH == 1:
            x_part = tl.load(x + begin + columns)
            sums += part.to(tl.float32) * x_part.to(tl.float32)[:, None]
        else:
            x_part = tl.load(
                x + x_rows[:, None] * K + (begin + columns)[None, :],
                mask=is_x_row[:, None],
                other=0.0,
            )
            sums = tl.dot(x_part, part, sums)
    if BATCH == 1:
        sums = tl.sum(sums, 0)[None, :]
    out_at = x_rows[:, None] * n + (first + rows)[None, :]
    is_out = is_x_row[:, None] & is_row[None, :]
    tl.store(out + out_at, sums.to(out.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["first"])
def plain_kernel(
    out: tl.tensor,
    first: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    outer_scales: tl.tensor,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write COLUMNS columns of a block of rows to out (..., K).

    first: The block whose rows are the first of out.
    """
    block = tl.program_id(0)
    begin = tl.program_id(1) * COLUMNS
    elements = _load_elements(
        weight,
        scales,
        outer_scales,
        first + block,
        begin,
        KIND,
        FIRST,
        GROUP,
        PARTS,
        K,
        COLUMNS,
    )
    rows = block.to(tl.int64) * 32 + tl.arange(0, 32)
    columns = begin + tl.arange(0, COLUMNS)
    out_at = out + rows[None, :] * K + columns[:, None]
    tl.store(out_at, elements.to(out.dtype.element_ty))
