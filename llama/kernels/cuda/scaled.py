"""Rows in e4m3 on a GPU: rounded alone, with the norm or with SwiGLU, and their products.

In and out: as `llama.ops.scaled`, which defines them. Rounding gives the bits of the definition, of
the norm and of SwiGLU as `elementwise.py` computes them: quotients are divisions, not products with
an inverse, which would round some elements to another code. Both the conversion to e4m3 and the
products need a GPU of compute capability 8.9.

- `round_rows_kernel`, `round_norm_kernel` and `round_silu_mul_kernel` round one row each.
- `few_scaled_rows_kernel` multiplies fewer than 32 rows: it streams the rows of the weight, which
  has codes in rows, past the rows of x, and the matrix units multiply the codes as they are.
- PyTorch's library multiplies more rows.

Shapes: M rows; N outputs, K inputs; E model dim, F FFN dim. In kernels ROWS rows of the weight per
program, and BATCH rows of x, those beyond M as others of them.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.kernels.cuda.elementwise import gated_row, normed_row
from llama.kernels.cuda.launch import Tile, launcher
from llama.kernels.cuda.pdl import launch_dependents, pdl_options, prefetch, wait_for_dependency
from llama.ops.scaled import ScaledRows

MIN_LIBRARY_ROWS = 32  # the fewest rows that PyTorch's library multiplies
MAX_GATED = 16_384  # the most columns F that one program rounds after SwiGLU
_E4M3 = torch.float8_e4m3fn
_MAX = tl.constexpr(torch.finfo(_E4M3).max)
_WARP_ELEMENTS = 32 * 16  # 16 elements per thread, two loads of 16 bytes
_MAX_WARPS = 16
_MIN_BATCH = 8  # the fewest rows of x that a matrix unit multiplies at once
_PREFETCHED_PARTS = tl.constexpr(2)  # iterations whose weights are prefetched
_LINE = tl.constexpr(128)  # bytes in a line of the L2 cache
_LARGE_N = 16_384  # enough programs of 32 rows
_TILES = (Tile(16, 512, 1, 4), Tile(32, 256, 2, 4))


@launcher
def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (M, K) and the scales (M, 1) of rows (M, K)."""
    x = x.contiguous()
    m, k = x.shape
    codes, scales = _new_rows(m, k, x.device)
    if codes.numel():
        block, warps = row_block(k)
        round_rows_kernel[(m,)](
            x,
            codes,
            scales,
            K=k,
            BLOCK=block,
            num_warps=warps,
            **pdl_options(x.device),
        )
    return codes, scales


@launcher
def round_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + delta, or x, and the codes and scales of its norm.

    Args:
        x: (M, E).
        delta: (M, E), or None where there is nothing to add.
        weight: (E), the weight of RMSNorm.
        eps: What is added to the mean square.
    """
    x = x.contiguous()
    m, width = x.shape
    total = x if delta is None else torch.empty_like(x)
    change = x if delta is None else delta.contiguous()
    codes, scales = _new_rows(m, width, x.device)
    assert x.shape == change.shape, (x.shape, change.shape)
    assert weight.shape == (width,) and weight.is_contiguous(), (weight.shape, x.shape)
    if m:
        block, warps = row_block(width)
        round_norm_kernel[(m,)](
            x,
            change,
            weight,
            total,
            codes,
            scales,
            eps,
            E=width,
            BLOCK=block,
            HAS_DELTA=delta is not None,
            num_warps=warps,
            **pdl_options(x.device),
        )
    return total, codes, scales


@launcher
def round_silu_mul(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (M, F) and scales of silu(gate) * up of rows (M, 2F), the gate first."""
    x = x.contiguous()
    m, columns = x.shape
    width = columns // 2
    assert width <= MAX_GATED, x.shape
    codes, scales = _new_rows(m, width, x.device)
    if codes.numel():
        block, warps = row_block(width)
        round_silu_mul_kernel[(m,)](
            x, codes, scales, F=width, BLOCK=block, num_warps=warps, **pdl_options(x.device)
        )
    return codes, scales


@functools.cache
def row_block(width: int) -> tuple[int, int]:
    """Return the elements per program, a whole row, and the warps."""
    block = triton.next_power_of_2(width)
    warps = block // _WARP_ELEMENTS
    return block, min(_MAX_WARPS, max(1, warps))


def _new_rows(m: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for codes (M, K) and scales (M, 1)."""
    codes = torch.empty(m, k, dtype=_E4M3, device=device)
    return codes, torch.empty(m, 1, dtype=torch.float32, device=device)


def candidates(n: int, k: int) -> list[Tile]:
    """Return the tiles of `few_scaled_rows_kernel` for a weight (N, K), the first choice first.

    No GPU has timed them: they are ordered by the number of programs and of instructions.
    """
    tiles = [tile for tile in _TILES if k % tile.columns == 0]
    return sorted(tiles, key=lambda tile: n >= _LARGE_N and tile.rows != 32)


@launcher
def few_rows(x: ScaledRows, weight: ScaledRows, tile: Tile, dtype: torch.dtype) -> Tensor:
    """Multiply fewer than 32 rows in e4m3 by a weight.

    Args:
        x: The rows.
        weight: The weight, of N rows.
        tile: One of `candidates`.
        dtype: The type of the result.

    Returns:
        (M, N).
    """
    n, k = weight.codes.shape
    m = len(x.codes)
    assert x.codes.shape == (m, k), (x.codes.shape, weight.codes.shape)
    assert 1 <= m < MIN_LIBRARY_ROWS and k % tile.columns == 0, (m, k, tile)
    assert x.codes.is_contiguous() and weight.codes.is_contiguous()
    out = torch.empty(m, n, dtype=dtype, device=x.codes.device)
    few_scaled_rows_kernel[(-(-n // tile.rows),)](
        x.codes,
        x.scales,
        weight.codes,
        weight.scales,
        out,
        m,
        n,
        K=k,
        BATCH=max(_MIN_BATCH, triton.next_power_of_2(m)),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **pdl_options(out.device),
    )
    return out


@launcher
def library(x: ScaledRows, weight: ScaledRows) -> Tensor:
    """Return the product (M, N) in bf16 by PyTorch's library.

    Its sums are of the fast kind (FP8 "fast accumulation": about 14 bits on Hopper).

    Args:
        x: The rows.
        weight: The weight, whose N and K are multiples of 16.
    """
    out: Tensor = torch._scaled_mm(
        x.codes,
        weight.codes.t(),
        scale_a=x.scales,
        scale_b=weight.scales.t().contiguous(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out


@triton.jit
def _store_rounded(
    row: tl.tensor,
    codes: tl.tensor,
    scale_at: tl.tensor,
    code_at: tl.tensor,
    is_column: tl.tensor,
) -> None:
    """Round a row in float32, and store its codes and its scale."""
    # Magnitudes are in the order of their bits, NaN after infinity: a maximum of floats hides it.
    magnitudes = row.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitudes, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, _MAX)
    scale = tl.where(scale == 0, 1.0, scale)
    quotients = tl.div_rn(row, scale)
    quotients = tl.clamp(quotients, -_MAX, _MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(codes + code_at, quotients.to(codes.dtype.element_ty), mask=is_column)
    tl.store(scale_at, scale)


@triton.jit
def round_rows_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Round one row."""
    columns = tl.arange(0, BLOCK)
    is_column = columns < K
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        launch_dependents()
        wait_for_dependency()
    wide = tl.load(x + row * K + columns, mask=is_column, other=0.0).to(tl.float32)
    _store_rounded(wide, codes, scales + row, row * K + columns, is_column)


@triton.jit
def round_norm_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    eps: tl.tensor,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Compute one row: total = x + delta, if there is a delta, and the rounded norm of that."""
    columns = tl.arange(0, BLOCK)
    is_column = columns < E
    row_index = tl.program_id(0).to(tl.int64)
    row_at = row_index * E + columns
    factor = tl.load(weight + columns, mask=is_column, other=0.0)
    if PDL:
        launch_dependents()
        wait_for_dependency()
    row = tl.load(x + row_at, mask=is_column, other=0.0)
    if HAS_DELTA:
        change = tl.load(delta + row_at, mask=is_column, other=0.0)
        wide_total = row.to(tl.float32) + change.to(tl.float32)
        row = wide_total.to(row.dtype)
        tl.store(total + row_at, row, mask=is_column)
    weighted = normed_row(row, factor, eps, E)
    _store_rounded(weighted.to(tl.float32), codes, scales + row_index, row_at, is_column)


@triton.jit
def round_silu_mul_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Compute silu(gate) * up of one row, and round it."""
    if PDL:
        launch_dependents()
        wait_for_dependency()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < F
    x_row = x + row * (2 * F)
    gate = tl.load(x_row + columns, mask=is_column, other=0.0)
    up = tl.load(x_row + F + columns, mask=is_column, other=0.0)
    product = gated_row(gate, up).to(tl.float32)
    _store_rounded(product, codes, scales + row, row * F + columns, is_column)


@triton.jit(do_not_specialize=["m"])
def few_scaled_rows_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    K: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Compute ROWS columns of out (M, N) for at most BATCH rows of x."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    x_rows = tl.arange(0, BATCH)
    row = tl.minimum(rows, n - 1).to(tl.int64)
    if PDL:
        launch_dependents()
        LINES: tl.constexpr = min(K, COLUMNS * _PREFETCHED_PARTS) // _LINE
        line_at = tl.arange(0, LINES) * _LINE
        prefetch(weight + row[:, None] * K + line_at[None, :])
        wait_for_dependency()
    x_row = tl.minimum(x_rows, m - 1)
    weight_at = weight + row[:, None] * K + columns[None, :]
    x_at = x + x_row[:, None] * K + columns[None, :]
    sums = tl.zeros([ROWS, BATCH], tl.float32)
    for begin in tl.range(0, K, COLUMNS, num_stages=STAGES):
        # No other program reads this part of the weight: the cache is for x.
        part = tl.load(weight_at + begin, eviction_policy="evict_first")
        x_part = tl.load(x_at + begin)
        # Sums of one iteration are added in float32: the matrix units of Hopper keep fewer bits.
        sums = tl.dot(part, tl.trans(x_part), sums, max_num_imprecise_acc=COLUMNS)
    scale = tl.load(scales + row)
    x_scale = tl.load(x_scales + x_row)
    total = sums * x_scale[None, :] * scale[:, None]
    out_at = x_rows[None, :] * n + rows[:, None]
    is_out = (x_rows < m)[None, :] & (rows < n)[:, None]
    tl.store(out + out_at, total.to(out.dtype.element_ty), mask=is_out)
