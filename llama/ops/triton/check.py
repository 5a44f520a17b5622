"""The self-check of the GPU's kernels: a program, run in a process of its own by children.py.

    python -m llama.ops.triton.check '{"device": "cuda:0", "dtype": "bf16", ...}'

In: a job, as JSON. Out: a line of JSON at the start, and one per kernel as soon as it is known,
with the reason why it must not be used, or null; lines between say that it goes on. An illegal
access or a hang in a kernel ends or holds up this process alone. After an error that leaves the
device unusable it exits with LOST.

Each op runs with its kernel and without. The torch body in float64 says what is right, and the one
in the model's type how far rounding leads from it; a kernel may be a few times as far. Memory that
a kernel should fill is filled with NaN before.
"""

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from llama.device import DTYPES
from llama.ops.triton.cases import CASES, Case, Place, Sizes
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet
from llama.ops.triton.tiles import check_and_time

LOST = 3  # exit code: the device cannot be used any more in this process
_FACTOR = 3  # times as far from what is right as the torch body
_FLOORS = {torch.bfloat16: 2**-6, torch.float16: 2**-8, torch.float32: 2**-19}  # always allowed


@dataclass(frozen=True)
class Job:
    """What to check: kernels by name, at a model's sizes, in one type, on one device."""

    device: str
    dtype: str  # one of llama.device.DTYPES
    sizes: Sizes
    names: tuple[str, ...]
    in_use: tuple[str, ...] = ()  # kernels that run while something else is checked

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        values = json.loads(text)
        sizes = values["sizes"]
        sizes = Sizes(**sizes | {"lengths": tuple(sizes["lengths"])})
        names, in_use = tuple(values["names"]), tuple(values["in_use"])
        return cls(**values | {"sizes": sizes, "names": names, "in_use": in_use})


def main(arguments: Sequence[str]) -> int:
    """Check the job's kernels one after the other; 0, or LOST."""
    job = Job.from_json(arguments[0])
    device = torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    say(started=True)
    for name in job.names:
        extra: dict[str, Any] = {}
        try:
            if name == "linear":
                extra["tiles"] = check_and_time(job.sizes, _place(job), _goes_on)
            else:
                check_kernel(name, job)
            reason = None
        except Exception as e:  # whatever it is: this kernel is not used
            reason = words_of(e)
            extra["is_final"] = not _is_out_of_memory(e)
        is_lost = not _is_usable(device)
        say(kernel=name, reason=reason or ("the device is lost after it" if is_lost else None),
             **extra)  # fmt: skip
        if is_lost:
            return LOST
    return 0


def check_kernel(name: str, job: Job) -> None:
    """Raises unless the op gives with its kernel what its torch body gives, in all its cases."""
    dtype = DTYPES[job.dtype]
    if name not in CASES:
        raise NotImplementedError("there is no check for it")
    kernels = KernelSet(frozenset({name}), frozenset({dtype}))
    for case in CASES[name](job.sizes, _place(job)):
        try:
            compare(_poisoned(case, kernels), *_expected(case), dtype)
            _goes_on()
        except Exception as e:
            raise RuntimeError(f"{case.what}: {words_of(e)}") from e
        del case  # before the next one is made: caches can be large


def _place(job: Job) -> Place:
    device = torch.device(job.device)
    return Place(device, DTYPES[job.dtype], torch.Generator(device).manual_seed(0))


def _poisoned(case: Case, kernels: KernelSet) -> list[Tensor]:
    """What the op gives with its kernel, where all new memory holds NaN first."""
    inputs = _copies(case.inputs) if case.reference is None else list(case.inputs)
    torch.set_deterministic_debug_mode("warn")  # fills new memory
    try:
        return _results(case, inputs, kernels)
    finally:
        torch.set_deterministic_debug_mode("default")


def _expected(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """What the torch body gives in float64, and in the model's type."""
    inputs = case.inputs if case.reference is None else case.reference
    rounded = _results(case, _copies(inputs))
    if inputs[0].dtype is torch.float32:  # logits, whose ids are to be equal
        return rounded, rounded
    return _results(case, [x.double() if _is_float(x) else x for x in _copies(inputs)]), rounded


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in inputs]


def _results(case: Case, inputs: Sequence[Any], kernels: KernelSet = TORCH_ONLY) -> list[Tensor]:
    """What the op returns, and the tensors that it may have written to."""
    returned = case.op(*inputs, kernels=kernels)
    results = list(returned) if isinstance(returned, tuple) else [returned]
    if case.reference is None:
        results += [x for x in inputs if _is_float(x)]
    return results


def compare(
    found: Sequence[Tensor], right: Sequence[Tensor], body: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """ArithmeticError unless `found` is as near to `right` as the torch body, row by row."""
    for i, (x, exact, rounded) in enumerate(zip(found, right, body, strict=True)):
        if not x.is_floating_point():
            if not torch.equal(x, exact):
                raise ArithmeticError(f"{int((x != exact).sum())} of {x.numel()} ids differ")
            continue
        error = _row_error(x, exact)
        allowed = max(_FACTOR * _row_error(rounded, exact), _FLOORS[dtype])
        if not error <= allowed:  # NaN is not
            raise ArithmeticError(f"result {i} is off by {error:.2g} where {allowed:.2g} may be")


def _row_error(x: Tensor, exact: Tensor) -> float:
    """The largest error of a row, relative to that row's length; NaN in both counts as equal."""
    exact = exact.double()
    difference = (x.double() - exact).masked_fill_(x.isnan() & exact.isnan(), 0)
    difference.masked_fill_(x.double() == exact, 0)  # infinities
    lengths = exact.nan_to_num(0, 0, 0).norm(dim=-1).clamp(min=1e-6)
    return float((difference.norm(dim=-1) / lengths).max())


def _is_out_of_memory(e: BaseException | None) -> bool:
    """Whether a later try may come to another result."""
    return e is not None and (
        isinstance(e, torch.OutOfMemoryError) or _is_out_of_memory(e.__cause__)
    )


def _is_usable(device: torch.device) -> bool:
    """False after an illegal access: every later call fails too."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def words_of(e: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(e).split())[:300]
    is_own = isinstance(e, ArithmeticError | NotImplementedError) or type(e) is RuntimeError
    return text if is_own and text else f"{type(e).__name__}: {text}"


def _goes_on() -> None:
    """Tell whoever waits that nothing hangs."""
    say(goes_on=True)


def say(**record: Any) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
