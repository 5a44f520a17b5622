"""The self-check of the GPU's kernels: a program, in a process that a wrong kernel may end.

    python -m llama.gpu.selfcheck '{"device": "cuda:0", "dtype": "bf16", ...}'

In: a job, as JSON. Out: for each kernel a line of JSON, see program.py, and the tiles that are
fastest. selfcheck_cache.py starts it, and sees to illegal accesses and hangs. The torch body in
float64 says what is right. Memory that a kernel should fill is filled with NaN before.
"""

import copy
import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llama.device import available_cores
from llama.gpu.cases import Case, Cases, Results
from llama.gpu.job import Choice, Job
from llama.gpu.program import run
from llama.ops.batch import ForwardContext
from llama.ops.kv_cache import format_of
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet, Sizes, Tile
from llama.weights import Weight

# What rounding may do to a row, relative to its length: a few times what the torch bodies do.
_TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-8, torch.float32: 2**-18}
_COLD_BYTES = 256 << 20  # of weights that take turns: more than a GPU's cache holds
_GAIN = 0.97  # of cuBLAS's time that a tile must stay below, to be worth it


def check_kernel(job: Job, name: str) -> list[Choice]:
    """An error if an op gives with its kernel something else than its torch body in any case; else
    the tiles that are to be used with it."""
    cases = Cases(job)
    kernels = KernelSet(frozenset({name}), frozenset({cases.dtype}))
    for case in getattr(cases, name)():
        try:
            _check_case(case, kernels, cases.dtype)
        except (ArithmeticError, RuntimeError) as e:
            e.args = (f"{case.what}: {e}",)  # of the same type: memory may be short only now
            raise
        del case  # before the next one is made: caches can be large
    has_tiles = name == "linear" and cases.device.type == "cuda"
    products = cases.products() if has_tiles else ()
    found = [(sizes, fastest_tile(cases, x, sizes, tiles)) for x, sizes, tiles in products]
    return [(sizes, tile) for sizes, tile in found if tile]


def compile_all(job: Job) -> None:
    """Have threads compile what the checks of the job's kernels will launch; on one core of a new
    machine that takes a minute. What does not compile, its own check will tell."""
    from triton import AsyncCompileMode, JITFunction

    cases, launch = Cases(job), JITFunction.run
    kernels = KernelSet(frozenset(job.names), frozenset({cases.dtype}))

    def compiled(kernel: Any, *args: Any, **options: Any) -> Any:
        return launch(kernel, *args, **options | {"warmup": True})

    JITFunction.run = compiled
    try:
        with (
            ThreadPoolExecutor(available_cores()) as threads,
            AsyncCompileMode(threads, ignore_errors=True),
        ):
            for case in itertools.chain.from_iterable(getattr(cases, x)() for x in job.names):
                case.op(*case.inputs, kernels=kernels)
    finally:
        JITFunction.run = launch


def _check_case(case: Case, kernels: KernelSet, dtype: torch.dtype) -> None:
    """ArithmeticError unless the kernel's results are right, row by row; ids must be equal."""
    torch.set_deterministic_debug_mode("warn")  # fills new memory with NaN
    try:
        found = _results(case.op, case.inputs, kernels)
    finally:
        torch.set_deterministic_debug_mode("default")
    if case.small is not None:
        right = _results(case.op, case.small, kernels)
    elif found[0].is_floating_point():
        floats = [isinstance(x, Tensor) and x.is_floating_point() for x in case.inputs]
        wide = [x.double() if i else x for x, i in zip(case.inputs, floats, strict=True)]
        right = _results(case.op, wide)
    else:
        right = _results(case.op, case.inputs)
    in_8_bits = any(isinstance(x, Tensor) and format_of(x).name for x in case.inputs)
    allowed = _TOLERANCES[dtype] + in_8_bits * 2**-7  # or a number falls to the next unit
    for i, (x, exact) in enumerate(zip(found, right, strict=True)):
        if not x.is_floating_point():
            if not torch.equal(x, exact):
                raise ArithmeticError(f"{int((x != exact).sum())} of {x.numel()} ids differ")
            continue
        lengths = exact.double().norm(dim=-1).clamp(min=1e-6)
        error = float(((x.double() - exact).norm(dim=-1) / lengths).max())
        if not error <= allowed:  # NaN is not
            raise ArithmeticError(f"result {i} is off by {error:.2g} where {allowed:.2g} may be")


def _results(
    op: Callable[..., Tensor | Results], inputs: Sequence[Any], kernels: KernelSet = TORCH_ONLY
) -> Results:
    results = op(*inputs, kernels=kernels)
    return results if isinstance(results, tuple) else (results,)


def fastest_tile(cases: Cases, weight: Weight, sizes: Sizes, tiles: Sequence[Tile]) -> Tile | None:
    """The tile with the least time for a product; None where cuBLAS is as fast.

    Each time is that of one product per weight, in a graph, so that the host's does not count.
    """
    from triton.testing import do_bench_cudagraph

    _, n, k, m = sizes
    x, copies = cases.normal(m, k), range(_COLD_BYTES // weight.nbytes)
    weights = [weight, *(copy.deepcopy(weight) for _ in copies)]

    def products(kernels: KernelSet) -> None:
        for weight in weights:
            weight.linear(x, cases.out_dtype(n), ForwardContext(kernels=kernels))

    own = KernelSet(frozenset({"linear"}), frozenset({cases.dtype}))
    ways = [own, *(replace(own, tiles={sizes: tile}) for tile in tiles)]
    times = [
        do_bench_cudagraph(partial(products, way), rep=1, return_mode="median") for way in ways
    ]
    best = min(range(len(times)), key=times.__getitem__)
    return tiles[best - 1] if best and times[best] < _GAIN * times[0] else None


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], check_kernel, compile_all))
