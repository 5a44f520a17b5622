"""The rounding of rows to e4m3 on a GPU: each row is read once, and its codes are written.

In and out: as `llama.ops.scaled.round_rows`, which defines it; the bits are the same. Quotients are
divisions, not products with an inverse, which would round some elements to another code. The
conversion to e4m3 needs a GPU of compute capability 8.9.

Shapes: M rows, K columns.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.kernels.cuda.launch import launcher
from llama.kernels.cuda.pdl import launch_dependents, pdl_options, wait_for_dependency

_E4M3 = torch.float8_e4m3fn
_MAX = tl.constexpr(torch.finfo(_E4M3).max)
_WARP_ELEMENTS = 32 * 16  # 16 elements per thread, two loads of 16 bytes
_MAX_WARPS = 16


@launcher
def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (M, K) and the scales (M, 1) of rows (M, K)."""
    x = x.contiguous()
    m, k = x.shape
    codes = torch.empty(m, k, dtype=_E4M3, device=x.device)
    scales = torch.empty(m, 1, dtype=torch.float32, device=x.device)
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


@functools.cache
def row_block(width: int) -> tuple[int, int]:
    """Return the elements per program, a whole row, and the warps."""
    block = triton.next_power_of_2(width)
    warps = block // _WARP_ELEMENTS
    return block, min(_MAX_WARPS, max(1, warps))


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
    # Magnitudes are in the order of their bits, NaN behind infinity: a maximum of floats hides it.
    magnitudes = wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitudes, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, _MAX)
    scale = tl.where(scale == 0, 1.0, scale)
    quotients = tl.div_rn(wide, scale)
    quotients = tl.clamp(quotients, -_MAX, _MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(codes + row * K + columns, quotients.to(codes.dtype.element_ty), mask=is_column)
    tl.store(scales + row, scale)
