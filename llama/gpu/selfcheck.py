"""The self-check of the GPU's kernels: a program, in a process that a wrong kernel may end.

    python -m llama.gpu.selfcheck '{"device": "cuda:0", "dtype": "bf16", ...}'

In: a `Job` as JSON. Out: for each kernel a line of JSON, see program.py, with the fastest tiles of
products. selfcheck_cache.py starts the program, and handles illegal accesses and hangs. The right
results are those of the torch bodies in float64. Memory that a kernel should write is filled with
NaN before.
"""

import copy
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llama.common.device import available_cores
from llama.gpu.cases import Case, Cases, Op, Results
from llama.gpu.job import Choice, Job
from llama.gpu.program import run
from llama.kernels.cuda.launch import Sizes, Tile, does_not_fit
from llama.kernels.cuda.table import table
from llama.ops.batch import ForwardContext
from llama.ops.kernels import NO_KERNELS, KernelError, Kernels
from llama.ops.kv_cache import format_of
from llama.weights.weight import Weight

# The largest error of a row relative to its norm: a few times the rounding of the torch bodies.
_TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-8, torch.float32: 2**-18}
_CACHE_TOLERANCE = 2**-7  # added over a quantized cache, where rounding may end at the next number
_MIN_NORM = 1e-6
_COLD_BYTES = 256 << 20  # bytes of weights that are used in turn: more than a GPU's cache has
# Copies of one weight that are used in turn. Where these fit in the cache, so do the weights of the
# model in a step.
_MAX_COPIES = 64
_MIN_SPEEDUP = 0.97  # a tile must stay below this part of cuBLAS's time


def check_kernel(job: Job, name: str) -> list[Choice]:
    """Compare a kernel with its op's torch body in all cases.

    Tiles of products that do not fit the GPU are left out.

    Returns:
        The tiles that are to be used with it.

    Raises:
        ArithmeticError: The results differ.
        RuntimeError: The kernel did not run.
    """
    cases = Cases(job)
    kernels = table({name}, {cases.dtype})
    for case in getattr(cases, name)():
        try:
            _check_case(case, kernels, cases.dtype)
        except (ArithmeticError, RuntimeError) as e:
            if case.is_optional and isinstance(e, KernelError) and does_not_fit(e):
                continue
            e.args = (f"{case.name}: {e}",)  # it keeps its type: memory may be short only now
            raise
        del case  # before the next one is made, as caches can be large
    if name != "linear" or cases.device.type != "cuda":
        return []
    choices = []
    for weight, sizes, tiles in cases.products():
        tile = fastest_tile(cases, weight, sizes, tiles)
        if tile is not None:
            choices.append((sizes, tile))
    return choices


def compile_all(job: Job) -> None:
    """Compile in threads all that the checks of the job's kernels will launch.

    On one core of a new machine that takes a minute. What does not compile is left to its check.
    """
    from triton import AsyncCompileMode, JITFunction

    cases = Cases(job)
    kernels = table(job.names, {cases.dtype})
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
        return launch(kernel, *args, **options | {"warmup": True})

    JITFunction.run = compile_only
    try:
        with (
            ThreadPoolExecutor(available_cores()) as threads,
            AsyncCompileMode(threads, ignore_errors=True),
        ):
            for name in job.names:
                for case in getattr(cases, name)():
                    case.op(*case.inputs, kernels=kernels)
    finally:
        JITFunction.run = launch


def _check_case(case: Case, kernels: Kernels, dtype: torch.dtype) -> None:
    """Compare the kernel's results with the right ones; ArithmeticError where they differ.

    Each row of floats may differ by rounding. Ids must be equal.
    """
    torch.set_deterministic_debug_mode("warn")  # it fills new memory with NaN
    try:
        results = _results(case.op, case.inputs, kernels)
    finally:
        torch.set_deterministic_debug_mode("default")
    tolerance = case.tolerance or _TOLERANCES[dtype]
    tensors = [x for x in case.inputs if isinstance(x, Tensor)]
    if any(format_of(x).name for x in tensors):
        tolerance += _CACHE_TOLERANCE
    has_floats = results[0].is_floating_point()
    right_results = _right_results(case, kernels, has_floats=has_floats)
    for i, (result, right) in enumerate(zip(results, right_results, strict=True)):
        if not result.is_floating_point():
            if not torch.equal(result, right):
                count = int((result != right).sum())
                raise ArithmeticError(f"{count} of {result.numel()} ids differ")
            continue
        norms = right.double().norm(dim=-1)
        differences = (result.double() - right).norm(dim=-1)
        errors = differences / norms.clamp(min=_MIN_NORM)
        error = float(errors.max())
        if not error <= tolerance:  # so written, the condition holds for NaN
            raise ArithmeticError(f"result {i} is off by {error:.2g} where {tolerance:.2g} may be")


def _right_results(case: Case, kernels: Kernels, *, has_floats: bool) -> Results:
    """Return the right results: those of the kernel on `small`, or those of the torch body.

    has_floats: Whether the results are floats, which the torch body then computes in float64.
    """
    if case.small is not None:
        return _results(case.op, case.small, kernels)
    if not has_floats:
        return _results(case.op, case.inputs)
    wide = [_widened(x) for x in case.inputs]
    return _results(case.op, wide)


def _widened(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def _results(op: Op, inputs: Sequence[Any], kernels: Kernels = NO_KERNELS) -> Results:
    results = op(*inputs, kernels=kernels)
    return results if isinstance(results, tuple) else (results,)


def fastest_tile(cases: Cases, weight: Weight, sizes: Sizes, tiles: Sequence[Tile]) -> Tile | None:
    """Return the fastest tile for a product, or None where cuBLAS is about as fast.

    Each time is that of one product per weight in a CUDA graph, so that the host's work does not
    count. A tile that does not fit the GPU takes forever.
    """
    from triton.testing import do_bench_cudagraph

    _, n, k, m = sizes
    x = cases.normal(m, k)
    out_dtype = cases.out_dtype(n)
    num_copies = min(_MAX_COPIES, _COLD_BYTES // weight.nbytes)
    weights = [weight, *(copy.deepcopy(weight) for _ in range(num_copies))]

    def multiply_all(kernels: Kernels) -> None:
        context = ForwardContext(kernels=kernels)
        for weight in weights:
            weight.linear(x, out_dtype, context)

    def seconds(kernels: Kernels) -> float:
        run = partial(multiply_all, kernels)
        try:
            run()  # outside a capture, which the error would end
        except KernelError as e:
            if does_not_fit(e):
                return math.inf
            raise
        return float(do_bench_cudagraph(run, rep=1, return_mode="median"))

    library_time = seconds(table({"linear"}, {cases.dtype}))
    times = []
    for tile in tiles:
        kernels = table({"linear"}, {cases.dtype}, {sizes: tile})
        times.append(seconds(kernels))
    best = min(range(len(times)), key=times.__getitem__)
    return tiles[best] if times[best] < _MIN_SPEEDUP * library_time else None


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], check_kernel, compile_all))
