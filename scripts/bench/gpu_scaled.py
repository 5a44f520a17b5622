"""The section `scaled` of `scripts/gpu_check.py`: products in e4m3, and what rounds their rows.

In: a section. Out: microseconds of the matrices of an 8B's layer by rows: plain in bf16, by
PyTorch's product of e4m3 with fast sums and with exact ones, and by each tile of the kernel for few
rows; and of norm, SwiGLU and rounding as one kernel and as two. Weights are read cold.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_run import Section
from bench.gpu_steps import device_seconds
from bench.machine import NO_TRITON, has_triton
from llama.ops.scaled import ScaledRows, round_rows

LIMITS = {"scaled": 120}  # seconds of the section
_SHAPES = {"wqkv": (6144, 4096), "wo": (4096, 4096), "w13": (28672, 4096), "w2": (4096, 14336)}
_ROWS = (1, 4, 16, 31, 32, 64, 128, 256, 512, 2048)
_COLD_BYTES = 256 << 20  # more than a GPU's cache holds


def scaled(at: Section) -> None:
    """Time products of rows in e4m3, and what rounds the rows."""
    if not has_triton():
        at.say("scaled", NO_TRITON)
        return
    for name, shape in list(_SHAPES.items())[: at.size(4, 1)]:
        n, k = (at.size(size, 256) for size in shape)
        copies = at.size(_COLD_BYTES // (n * k) + 1, 1)
        plain = [torch.randn(n, k, device=at.device, dtype=at.dtype) for _ in range(copies)]
        weights = [round_rows(weight) for weight in plain]
        for m in _ROWS[:: at.size(1, 4)]:
            x = torch.randn(m, k, device=at.device, dtype=at.dtype)
            _say_products(at, f"{name}, {m} rows", x, plain, weights)
    _say_rounding(at)


def _say_products(
    at: Section, what: str, x: Tensor, plain: list[Tensor], weights: list[ScaledRows]
) -> None:
    from llama.kernels.cuda import scaled as kernels

    rows = round_rows(x)
    n, k = weights[0].codes.shape
    ways: dict[str, Callable[[Any], Tensor]] = {}
    if not at.dry:
        ways["fast sums"] = partial(_library, rows, is_fast=True)
        ways["exact sums"] = partial(_library, rows, is_fast=False)
    if len(x) < kernels.MIN_LIBRARY_ROWS:
        for tile in kernels.candidates(n, k):
            ways[str(tuple(tile[:4]))] = partial(_few_rows, rows, tile, at.dtype)
    _say(at, f"{what}, plain", [partial(F.linear, x, weight) for weight in plain])
    for way, call in ways.items():
        _say(at, f"{what}, {way}", [partial(call, weight) for weight in weights])


def _library(rows: ScaledRows, weight: ScaledRows, *, is_fast: bool) -> Tensor:
    out: Tensor = torch._scaled_mm(
        rows.codes, weight.codes.t(), scale_a=rows.scales,
        scale_b=weight.scales.t().contiguous(), out_dtype=torch.bfloat16, use_fast_accum=is_fast,
    )  # fmt: skip
    return out


def _few_rows(rows: ScaledRows, tile: Any, dtype: torch.dtype, weight: ScaledRows) -> Tensor:
    from llama.kernels.cuda import scaled as kernels

    return kernels.few_rows(rows, weight, tile, dtype)


def _say_rounding(at: Section) -> None:
    """Report norm and SwiGLU with rounding: by one kernel, and by two."""
    from llama.kernels.cuda import elementwise
    from llama.kernels.cuda import scaled as kernels

    width, ffn = at.size(4096, 64), at.size(14336, 96)
    weight = torch.ones(width, device=at.device, dtype=at.dtype)
    for m in (1, 64, 256, 2048)[: at.size(4, 1)]:
        x = torch.randn(m, width, device=at.device, dtype=at.dtype)
        gated = torch.randn(m, 2 * ffn, device=at.device, dtype=at.dtype)

        def norm_then_round(x: Tensor = x) -> None:
            kernels.round_rows(elementwise.add_norm(x, x, weight, 1e-5)[1])

        def gate_then_round(gated: Tensor = gated) -> None:
            kernels.round_rows(elementwise.silu_mul(gated))

        _say(at, f"norm, {m} rows, one kernel", [partial(kernels.round_norm, x, x, weight, 1e-5)])
        _say(at, f"norm, {m} rows, two kernels", [norm_then_round])
        _say(at, f"SwiGLU, {m} rows, one kernel", [partial(kernels.round_silu_mul, gated)])
        _say(at, f"SwiGLU, {m} rows, two kernels", [gate_then_round])


def _say(at: Section, what: str, calls: list[Callable[[], Any]]) -> None:
    try:
        at.say(what, device_seconds(at, calls) * 1e6, "us")
    except Exception as e:  # what this GPU refuses costs its own figure only
        at.say(what, f"{type(e).__name__}: {e}"[:200])
