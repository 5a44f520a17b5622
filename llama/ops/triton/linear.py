"""A few rows times a weight on a GPU, where that beats the library that torch calls.

In: x (..., K) of at most 16 rows, or 64 times a quantized weight, and a weight (N, K). Out:
(..., N). Each program streams its rows of the weight past the few rows of x. Which tile is fastest,
and whether the library's is, depends on the GPU, the format, N, K and M: `candidates` are timed
there once, and a model's `KernelSet` holds the winners; else torch does it, of what `plain` writes.

Shapes: M rows, in any leading dimensions; N outputs, K inputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.ops.cpu.constants import ElementFormat
from llama.ops.triton.kernels import Blocks, Tile, launcher

BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # of M: one choice for each
_NIBBLES = tl.constexpr(ElementFormat.NIBBLES.value)
_FP8 = tl.constexpr(ElementFormat.FP8.value)
_LEAST_DOT = 16  # the fewest rows that a matrix unit multiplies at once
_TILES = (
    Tile(4, 1024, 4, 4, False), Tile(8, 512, 4, 4, False), Tile(16, 256, 4, 4, False),
    Tile(4, 512, 4, 6, False),
    Tile(32, 256, 4, 4), Tile(64, 128, 4, 4), Tile(16, 256, 4, 5), Tile(32, 128, 4, 6),
)  # fmt: skip
_BLOCK_TILES = (  # of quantized weights; the last one has room for 64 rows of x
    Tile(32, 256, 4, 4, False), Tile(32, 512, 8, 4, False), Tile(32, 128, 4, 4),
)  # fmt: skip


def candidates(kind: int, n: int, k: int, m: int) -> list[Tile]:
    """Tiles for M rows times a weight (N, K) of a kind, 0 if plain; none where M is too large."""
    if not 1 <= m <= (BUCKETS[-1] if kind else _LEAST_DOT) or n < 1:
        return []
    tiles = _BLOCK_TILES if kind else _TILES
    return [x for x in tiles if k % x.columns == 0 and (x.uses_dot or m == 1)]


@launcher
def run(x: Tensor, weight: Tensor | Blocks, tile: Tile, dtype: torch.dtype | None = None) -> Tensor:
    """x (..., K), weight (N, K), plain ones of the same type -> (..., N) in `dtype` or that of x.

    float32 gives the sums before rounding. tile: one of `candidates` for these sizes.
    """
    (n, k), x = weight.shape, x.contiguous()
    m = x.numel() // k
    assert x.shape[-1] == k, (x.shape, weight.shape)
    assert 1 <= m <= (BUCKETS[-1] if tile.uses_dot else 1) and k % tile.columns == 0, (m, k, tile)
    out = torch.empty(*x.shape[:-1], n, dtype=dtype or x.dtype, device=x.device)
    batch = max(_LEAST_DOT, triton.next_power_of_2(m)) if tile.uses_dot else 1
    product_kernel[(-(-n // tile.rows),)](
        x, out, m, n, *arguments(weight), K=k, BATCH=batch, ROWS=tile.rows,
        COLUMNS=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out


@launcher
def plain(weight: Blocks, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Rows of a quantized weight, from a multiple of 32 on: (end - first, K)."""
    k = weight.shape[1]
    out = torch.empty(end - first, k, dtype=dtype, device=weight.values.device)
    grid = (end - first) // 32, k // 128
    plain_kernel[grid](out, first // 32, *arguments(weight), K=k, COLUMNS=128)
    return out


def arguments(weight: Tensor | Blocks) -> list[Any]:
    """`weight`, `scales`, `units`, KIND, FIRST, GROUP and PARTS of a kernel."""
    if isinstance(weight, Tensor):
        assert weight.is_contiguous(), weight.shape
        return [weight, None, None, 0, 0, 0, 0]
    values, scales, _, kind, *constants = weight
    words = values if kind == ElementFormat.NIBBLES else values.view(torch.int16)
    if scales.dtype is torch.uint8:
        return [words, scales, scales.view(torch.float16), kind, *constants]
    return [words, scales, None, kind, *constants]


@triton.jit
def _scales(scales, units, block, group, part, GROUPS: tl.constexpr, PARTS: tl.constexpr):
    """Of groups (G): (G, 32), of each row of a block. part: 0, or 1 for offsets."""
    place = part * 32 + tl.arange(0, 32)[None, :]
    if units is None:
        found = tl.load(scales + (block * GROUPS + group)[:, None] * (PARTS * 32) + place)
        found = found.to(tl.float32)
    else:
        eight = (block * (GROUPS // 8) + group // 8)[:, None] * (PARTS * 320)  # bytes
        at = eight + (PARTS * 64 + group % 8 * (PARTS * 32))[:, None] + place
        unit = tl.load(units + eight // 2 + place).to(tl.float32)
        found = ((tl.load(scales + at) ^ 128).to(tl.float32) - 128) * unit  # of signed bytes
    return found


@triton.jit
def _numbers(
    weight, scales, units, block, at,
    KIND: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The 32 rows of a block of a quantized weight, from column `at` on: (COLUMNS, 32) float32.

    A word of a row has 8 numbers of four bits, or 2 bytes; the words of 32 rows lie together.
    """
    EACH: tl.constexpr = 8 if KIND == _NIBBLES else 2
    RUN: tl.constexpr = min(GROUP, COLUMNS)  # columns that share a scale
    block = block.to(tl.int64)
    words = at // EACH + tl.arange(0, COLUMNS // EACH)
    # No other program reads this part of the weight: the cache is for x.
    held = tl.load(
        weight + block * (K // EACH * 32) + words[:, None] * 32 + tl.arange(0, 32)[None, :],
        eviction_policy="evict_first",
    )[:, None, :].to(tl.int32)  # fmt: skip
    place = tl.arange(0, EACH)[None, :, None]
    if KIND == _NIBBLES:
        codes = held >> place % 2 * 16 + place // 2 * 4 & 15
    else:
        codes = held << 24 - 8 * place >> 24
    if KIND == _FP8:
        codes = ((codes & 127) << 7 | (codes & 128) << 8).to(tl.int16).to(tl.float16, bitcast=True)
    numbers = tl.reshape(codes.to(tl.float32) + FIRST, (COLUMNS // RUN, RUN, 32))
    group = at // GROUP + tl.arange(0, COLUMNS // RUN)
    numbers *= _scales(scales, units, block, group, 0, K // GROUP, PARTS)[:, None, :]
    if PARTS == 2:
        numbers += _scales(scales, units, block, group, 1, K // GROUP, PARTS)[:, None, :]
    return tl.reshape(numbers, (COLUMNS, 32))


@triton.jit(do_not_specialize=["m"])
def product_kernel(
    x, out, m, n, weight, scales, units,
    KIND: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    K: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS columns of out (M, N): BATCH rows of x at a time, those beyond M as zeros; a single row
    by plain multiplication."""
    first = tl.program_id(0) * ROWS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    x_rows = tl.arange(0, BATCH)
    is_row = first + rows < n
    is_x_row = x_rows < m
    own = weight + first.to(tl.int64) * K
    sums = tl.zeros([COLUMNS if BATCH == 1 else BATCH, ROWS], tl.float32)
    for at in tl.range(0, K, COLUMNS, num_stages=STAGES):
        if KIND:
            part = _numbers(
                weight, scales, units, tl.program_id(0), at, KIND, FIRST, GROUP, PARTS, K, COLUMNS
            ).to(x.dtype.element_ty)
        else:
            part = tl.trans(
                tl.load(
                    own + rows[:, None] * K + (at + columns)[None, :], mask=is_row[:, None],
                    other=0.0, eviction_policy="evict_first",
                )
            )  # fmt: skip
        if BATCH == 1:
            some = tl.load(x + at + columns)
            sums += part.to(tl.float32) * some.to(tl.float32)[:, None]
        else:
            some = tl.load(
                x + x_rows[:, None] * K + (at + columns)[None, :], mask=is_x_row[:, None], other=0.0
            )
            sums = tl.dot(some, part, sums)
    if BATCH == 1:
        sums = tl.sum(sums, 0)[None, :]
    out_at = x_rows[:, None] * n + (first + rows)[None, :]
    tl.store(out + out_at, sums.to(out.dtype.element_ty), mask=is_x_row[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["first"])
def plain_kernel(
    out, first, weight, scales, units,
    KIND: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of rows, the first of which is block `first`, and COLUMNS columns: out (..., K)."""
    block, at = tl.program_id(0), tl.program_id(1) * COLUMNS
    numbers = _numbers(
        weight, scales, units, first + block, at, KIND, FIRST, GROUP, PARTS, K, COLUMNS
    )
    rows = block.to(tl.int64) * 32 + tl.arange(0, 32)
    columns = at + tl.arange(0, COLUMNS)
    tl.store(out + rows[None, :] * K + columns[:, None], numbers.to(out.dtype.element_ty))
