"""The comparison of a GPU's kernels with the ops that define them, in this process.

In: the cases of what a rank computes, and names of kernels. Out: for each kernel why it must not be
used, or None, and the tiles of products. The right results are those of the torch bodies in
float64. Memory that a kernel should write is filled with NaN before.

A kernel that computes a wrong number, does not compile or does not fit is reported. One that
accesses an illegal address or hangs ends CUDA in its process; then an error names the remedy.
"""

import contextlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from llama.common.device import available_cores, current, free_unused
from llama.gpu.cases import Case, Cases, Op, Results
from llama.kernels.cuda.launch import Sizes, Tile, does_not_fit
from llama.kernels.cuda.table import table
from llama.ops.kernels import NO_KERNELS, KernelError, Kernels
from llama.ops.kv_cache import format_of

# The largest error of a row relative to its norm: a few times the rounding of the torch bodies.
_TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-8, torch.float32: 2**-18}
_CACHE_TOLERANCE = 2**-7  # added over a quantized cache, where rounding may end at the next number
_MIN_NORM = 1e-6
_MIN_CAPABILITY = (8, 0)
_LAUNCH_S = 60.0  # the limit of the GPU's work in one case; it takes milliseconds
_MAX_MESSAGE = 300  # characters of an error in a reason
_ENDED = (
    "the GPU's kernel {} has ended CUDA in this process: {}. Set LLAMA_GPU_KERNELS=none, or to a "
    "list of the other kernels"
)


class Checked(NamedTuple):
    """The result of a check.

    Attributes:
        reasons: For each kernel why it must not be used, None where it may be.
        tiles: The tile of each product, where a kernel multiplies.
    """

    reasons: dict[str, str | None]
    tiles: dict[Sizes, Tile]


def unsupported_reason(device: torch.device) -> str | None:
    """Return why no kernel can run on a device at all; None where they can be checked."""
    is_cuda = device.type == "cuda"
    if is_cuda and torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return "they need a GPU of compute capability 8.0"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if is_cuda and importlib.import_module("triton").knobs.runtime.interpret:
        return "TRITON_INTERPRET has them run on the CPU"
    return None


def check_kernels(cases: Cases, names: Sequence[str]) -> Checked:
    """Compare each kernel with its op.

    Raises:
        RuntimeError: A kernel has ended CUDA in this process.
    """
    result = Checked({}, {})
    with torch.inference_mode(), current(cases.device):
        for name in names:
            if cases.device.type == "cuda":
                _compile(cases, name)
            try:
                tiles = check_kernel(cases, name)
            except Exception as e:
                try:
                    _wait(cases.device)
                except RuntimeError:
                    raise RuntimeError(_ENDED.format(name, e)) from e
                kind = "" if isinstance(e, ArithmeticError) else f"{type(e).__name__}: "
                result.reasons[name] = kind + " ".join(str(e).split())[:_MAX_MESSAGE]
            else:
                result.reasons[name] = None
                result.tiles.update(tiles)
    free_unused(cases.device)
    return result


def check_kernel(cases: Cases, name: str) -> dict[Sizes, Tile]:
    """Compare a kernel with its op's torch body in its cases.

    Returns:
        The tile of each product: the first one that fits the GPU.

    Raises:
        ArithmeticError: The results differ.
        RuntimeError: The kernel did not run.
    """
    kernels = table({name}, {cases.dtype})
    tiles: dict[Sizes, Tile] = {}
    for case in getattr(cases, name)():
        if not cases.every and case.serves and case.serves[0] in tiles:
            continue
        try:
            _compare(case, kernels, cases.dtype)
        except (ArithmeticError, RuntimeError) as e:
            if case.tile and isinstance(e, KernelError) and does_not_fit(e):
                continue
            e.args = (f"{case.name}: {e}",)  # it keeps its type
            raise
        if case.tile:
            tiles.update(dict.fromkeys(case.serves, case.tile))
    return tiles


def _compile(cases: Cases, name: str) -> None:
    """Launch a kernel in each case from several threads, since a first launch compiles it.

    Triton's cache keeps what it compiled. What fails here is reported by the comparison.
    """
    kernels = table({name}, {cases.dtype})

    def launch(case: Case) -> None:
        with contextlib.suppress(Exception), torch.inference_mode(), current(cases.device):
            case.op(*case.inputs, kernels=kernels)

    with ThreadPoolExecutor(available_cores()) as threads, contextlib.suppress(Exception):
        served: tuple[Sizes, ...] = ()
        for case in getattr(cases, name)():
            if cases.every or case.tile is None or case.serves != served:
                threads.submit(launch, case)
            served = case.serves


def _wait(device: torch.device) -> None:
    """Wait for the device's work. RuntimeError: it has failed, or does not end."""
    if device.type != "cuda":
        return
    done = torch.cuda.Event()
    done.record()
    until = time.monotonic() + _LAUNCH_S
    while not done.query():
        if time.monotonic() > until:
            raise RuntimeError(f"a kernel did not end within {_LAUNCH_S:g} s")
        time.sleep(1e-4)


class _Poisoned(TorchFunctionMode):
    """Fills new memory of this thread with NaN, so that an element that is not written shows."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.empty_like, Tensor.new_empty) and made.is_floating_point():
            made.fill_(torch.nan)
        return made


def _compare(case: Case, kernels: Kernels, dtype: torch.dtype) -> None:
    """Compare the kernel's results with the right ones; ArithmeticError where they differ.

    Each row of floats may differ by rounding. Ids must be equal.
    """
    with _Poisoned():
        results = _results(case.op, case.inputs, kernels)
    _wait(results[0].device)
    tensors = [x for x in case.inputs if isinstance(x, Tensor)]
    is_rounded = any(format_of(x).name for x in tensors)
    tolerance = (case.tolerance or _TOLERANCES[dtype]) + _CACHE_TOLERANCE * is_rounded
    inputs = case.inputs
    if results[0].is_floating_point():
        inputs = [x.double() if _is_float(x) else x for x in inputs]
    right_results = _results(case.op, inputs)
    for i, (result, right) in enumerate(zip(results, right_results, strict=True)):
        if not result.is_floating_point():
            if not torch.equal(result, right):
                count = int((result != right).sum())
                raise ArithmeticError(f"{count} of {result.numel()} ids differ")
            continue
        norms = right.double().norm(dim=-1).clamp(min=_MIN_NORM)
        errors = (result.double() - right).norm(dim=-1) / norms
        error = float(errors.max())
        if not error <= tolerance:  # so written, the condition holds for NaN
            raise ArithmeticError(f"result {i} is off by {error:.2g} where {tolerance:.2g} may be")


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _results(op: Op, inputs: Sequence[Any], kernels: Kernels = NO_KERNELS) -> Results:
    results = op(*inputs, kernels=kernels)
    return results if isinstance(results, tuple) else (results,)
