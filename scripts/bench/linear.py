"""Compare our linear kernels with torch's, shape by shape.

In: the benchmark's flags and numbers of rows. Out: a table of times per shape and kernel, and one
JSON line. All kernels of a shape take turns, so that a busy moment of the machine meets them alike,
and each call reads a weight that was last read too long ago to be in a cache.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.report import Column
from bench.run import Bench, Row, whole
from llama.model.cost import weight_shapes
from llama.weights.choice import QUANTIZED, bytes_of, packed

_COLD_BYTES = 2**28  # bytes of weights that are read before one is read again
_COLUMNS: list[Column] = [
    ("kernel", "kernel", ""), ("weight", "weight", ""), ("N", "n", ""), ("K", "k", ""),
    ("M", "m", ""), ("ms", "ms", ".3f"), ("least", "ms_min", ".3f"), ("GB/s", "gb_per_s", ".1f"),
    ("GFLOP/s", "gflop_per_s", ".1f"), ("to ours", "to_ours", ".2f"), ("to bf16", "to_bf16", ".2f"),
]  # fmt: skip
Kernel = Callable[[Tensor], Tensor]  # x (M, K) -> (M, N), with a weight of its own


def linear(rows: tuple[int, ...] = (1, 8, 32, 512), repeats: int = 20, **flags: Any) -> None:
    """Time the linear layers of a model, plain and quantized, and torch's kernels, by rows (M).

    Milliseconds are the median and the minimum of `repeats`; "to ours" divides medians by our
    kernel's with the same weight type, "to bf16" by that of bf16. GB/s counts the weight's bytes.
    """
    bench = Bench(**flags)
    if bench.vs or bench.device_used.type != "cpu":
        raise ValueError(
            "linear compares kernels of this process on a CPU: leave out vs and device"
        )
    if not _has_onednn_bf16():
        print("oneDNN packed bf16 is left out: oneDNN has no bf16 on this CPU", file=sys.stderr)
    sizes = [whole("rows", m) for m in rows]
    whole("repeats", repeats)
    found: list[Row] = []
    for (weight, (n, k)), m in itertools.product(weight_shapes(bench.args).items(), sizes):
        print(f"... {weight} M={m}", file=sys.stderr, flush=True)
        found += [{"weight": weight, **row} for row in measure(m, n, k, repeats)]
    bench.report(_COLUMNS, found, None)


def measure(m: int, n: int, k: int, repeats: int) -> list[Row]:
    """Return a row per kernel, each timed `repeats` times after a warm-up."""
    copies = max(1, _COLD_BYTES // (n * k))
    x = torch.randn(m, k).bfloat16()
    calls_of = {name: [make(m, n, k) for _ in range(copies)] for name, make in kernels().items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls_of}
    for i in range(repeats + 1):
        for name, calls in calls_of.items():
            call = calls[i % copies]
            began = time.perf_counter()
            call(x)
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return [
        {
            "kernel": name, "m": m, "n": n, "k": k,
            "ms": median * 1e3, "ms_min": min(seconds[name][1:]) * 1e3,
            "gb_per_s": bytes_of((n, k), torch.bfloat16, _quantized(name)) / median / 1e9,
            "gflop_per_s": 2 * m * n * k / median / 1e9,
            "to_ours": median / medians[f"ours {name.split()[-1]}"],
            "to_bf16": median / medians["ours bf16"],
        }
        for name, median in medians.items()
    ]  # fmt: skip


def _weight(n: int, k: int) -> Tensor:
    return torch.randn(n, 1).bfloat16() * torch.randn(k).bfloat16()


def _quantized(kernel: str) -> str | None:
    name = kernel.split()[-1]
    return name if name in QUANTIZED else None


def _ours(name: str) -> Callable[[int, int, int], Kernel]:
    return lambda m, n, k: packed(_weight(n, k), _quantized(name)).linear


def _torch_linear(m: int, n: int, k: int) -> Kernel:
    weight = _weight(n, k)
    return lambda x: F.linear(x, weight)


def _onednn_packed(m: int, n: int, k: int) -> Kernel:
    """Return oneDNN's product with the weight reordered once, as torch's Inductor uses it."""
    weight = torch.ops.mkldnn._reorder_linear_weight(_weight(n, k), m)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _torch_int8(m: int, n: int, k: int) -> Kernel:
    """Return torch's product of bf16 rows with int8 weights and one scale per row."""
    values = (_weight(n, k).float() * 32).clamp(-127, 127).to(torch.int8)
    scales = torch.ones(n, dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, values, scales)


def _has_onednn_bf16() -> bool:
    """Return whether oneDNN takes bf16 here; on CPUs with AVX2 alone it does not."""
    has_bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return has_bf16


def kernels() -> dict[str, Callable[[int, int, int], Kernel]]:
    """Return the kernels that this machine has, by name: each makes the product of (m, n, k)."""
    found: dict[str, Callable[[int, int, int], Kernel]] = {
        "ours bf16": _ours("bf16"),
        "F.linear bf16": _torch_linear,
        "oneDNN packed bf16": _onednn_packed,
        "int8pack_mm int8": _torch_int8,
        **{f"ours {name}": _ours(name) for name in QUANTIZED},
    }
    if not _has_onednn_bf16():
        del found["oneDNN packed bf16"]
    return found
