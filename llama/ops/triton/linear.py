"""A few rows times a weight on a GPU, where that beats the library that torch calls.

In: x (..., K) of at most 16 rows, and a plain weight (N, K). Out: (..., N). Each program reads its
rows of the weight once, whole, and streams them past the few rows of x: such a product is bound by
memory. Which tile is fastest, and whether the library's is faster than all, depends on the GPU and
on N, K and M. So `candidates` are timed there once, and a model's `KernelSet` holds the winners;
where there is none, `llama.ops.linear` leaves the product to torch.

Shapes: M rows, in any leading dimensions; N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.ops.triton.kernels import Tile

MAX_ROWS = 16  # the fewest that a matrix unit multiplies at once
BUCKETS = (1, 2, 4, 8, 16)  # of M: one choice for each


_DOT_TILES = (
    Tile(32, 256, 4, 4, True),
    Tile(64, 128, 4, 4, True),
    Tile(16, 256, 4, 5, True),
    Tile(32, 128, 4, 6, True),
)
_VECTOR_TILES = (
    Tile(4, 1024, 4, 4, False),
    Tile(8, 512, 4, 4, False),
    Tile(16, 256, 4, 4, False),
    Tile(4, 512, 4, 6, False),
)


def candidates(n: int, k: int, m: int) -> list[Tile]:
    """Tiles that can multiply M rows by a weight (N, K); none where M is too large."""
    if not 1 <= m <= MAX_ROWS or n < 1:
        return []
    tiles = _VECTOR_TILES + _DOT_TILES if m == 1 else _DOT_TILES
    return [tile for tile in tiles if k % tile.columns == 0]


def run(x: Tensor, weight: Tensor, tile: Tile, dtype: torch.dtype | None = None) -> Tensor:
    """x (..., K), weight (N, K) of the same type -> (..., N) in `dtype`, by default x's.

    float32 gives the sums before rounding. tile: one of `candidates` for these sizes.
    """
    (n, k), x = weight.shape, x.contiguous()
    m = x.numel() // k
    assert x.shape[-1] == k and weight.is_contiguous(), (x.shape, weight.shape)
    assert 1 <= m <= (MAX_ROWS if tile.uses_dot else 1) and k % tile.columns == 0, (m, k, tile)
    out = torch.empty(*x.shape[:-1], n, dtype=dtype or x.dtype, device=x.device)
    kernel = dot_kernel if tile.uses_dot else vector_kernel
    kernel[(-(-n // tile.rows),)](
        x, weight, out, m, n, K=k, ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["m"])
def dot_kernel(
    x, weight, out, m, n,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS columns of out (M, N): 16 rows of x at a time, those beyond M as zeros."""
    first = tl.program_id(0) * ROWS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    x_rows = tl.arange(0, 16)
    is_row = first + rows < n
    is_x_row = x_rows < m
    weight += first.to(tl.int64) * K
    sums = tl.zeros([16, ROWS], tl.float32)
    for at in tl.range(0, K, COLUMNS, num_stages=STAGES):
        # No other program reads this part of the weight: the cache is for x.
        part = tl.load(
            weight + rows[:, None] * K + (at + columns)[None, :], mask=is_row[:, None], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        some = tl.load(
            x + x_rows[:, None] * K + (at + columns)[None, :], mask=is_x_row[:, None], other=0.0
        )
        sums = tl.dot(some, tl.trans(part), sums)
    out_at = x_rows[:, None] * n + (first + rows)[None, :]
    tl.store(out + out_at, sums.to(out.dtype.element_ty), mask=is_x_row[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["m"])
def vector_kernel(
    x, weight, out, m, n,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS numbers of out (1, N), by plain multiplication."""
    first = tl.program_id(0) * ROWS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_row = first + rows < n
    weight += first.to(tl.int64) * K
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, K, COLUMNS, num_stages=STAGES):
        part = tl.load(
            weight + rows[:, None] * K + (at + columns)[None, :], mask=is_row[:, None], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        some = tl.load(x + at + columns)
        sums += part.to(tl.float32) * some.to(tl.float32)[None, :]
    tl.store(out + first + rows, tl.sum(sums, 1).to(out.dtype.element_ty), mask=is_row)
