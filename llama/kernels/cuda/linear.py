"""A few rows times a plain weight on a GPU, where that beats the library that torch calls.

In: x (..., K) of at most 16 rows, and a plain weight (N, K). Out: (..., N). Each program streams
its rows of the weight past the few rows of x. tiles.py says which of the `candidates` a product
uses; where it uses none, torch's library multiplies. quantized.py has the kernels for
quantized weights.

Shapes: M rows, in any leading dimensions; N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.kernels.cuda.launch import Tile, launcher
from llama.kernels.cuda.pdl import launch_dependents, pdl_options, prefetch, wait_for_dependency

BUCKETS = (1, 2, 4, 8, 16)  # numbers of rows M, each with a tile of its own
_MIN_DOT_ROWS = 16  # the fewest rows that a matrix unit multiplies at once
_PREFETCHED_PARTS = tl.constexpr(2)  # iterations whose weights are prefetched
_LINE = tl.constexpr(64)  # elements of 16 bits in a line of the L2 cache
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


def candidates(n: int, k: int, m: int) -> list[Tile]:
    """Return the tiles for M rows times a plain weight (N, K); none where M is too large."""
    if not 1 <= m <= BUCKETS[-1] or n < 1:
        return []
    return [x for x in _TILES if k % x.columns == 0 and (x.uses_dot or m == 1)]


@launcher
def run(x: Tensor, weight: Tensor, tile: Tile, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply x (..., K) by a weight (N, K).

    Args:
        x: At most 16 rows, 1 if the tile does not use matrix units.
        weight: A weight of the dtype of x.
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
    assert weight.is_contiguous(), weight.shape
    out = torch.empty(*x.shape[:-1], n, dtype=dtype or x.dtype, device=x.device)
    product_kernel[(-(-n // tile.rows),)](
        x,
        out,
        m,
        n,
        weight,
        K=k,
        BATCH=_MIN_DOT_ROWS if tile.uses_dot else 1,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **pdl_options(x.device),
    )
    return out


@triton.jit(do_not_specialize=["m"])
def product_kernel(
    x: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    weight: tl.tensor,
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
        LINES: tl.constexpr = min(K, COLUMNS * _PREFETCHED_PARTS) // _LINE
        line_at = tl.arange(0, LINES) * _LINE
        near_row = tl.minimum(rows, n - 1 - first)  # rows of the last program may end before
        prefetch(first_row + near_row[:, None] * K + line_at[None, :])
        wait_for_dependency()
    sums = tl.zeros([COLUMNS if BATCH == 1 else BATCH, ROWS], tl.float32)
    for begin in tl.range(0, K, COLUMNS, num_stages=STAGES):
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
