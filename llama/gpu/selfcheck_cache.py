"""Starts the checks of a GPU's kernels and graphs, once on a machine, and stores the results.

In: a `Job`. Out: for each of its kernels whether it passed, or the reason why it did not. A wrong
kernel can hang or end its process, so child processes run them, and all of it ends before ranks
that wait give up. Results are JSON files in the folder of the CPU kernels, each with a name that is
made of all that the result depends on. This module must not know what a check computes.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from llama.common.device import is_closed_to_others
from llama.gpu.job import JOB, RESULT, CheckResult, Job
from llama.gpu.program import PARENT
from llama.kernels.cpu import native

PROGRAM = ("-m", "llama.gpu.selfcheck")  # the arguments of Python in a child
LIMIT_S = 480.0  # the limit of a whole check; the other ranks wait for 600
CHILD_S = 300.0  # the limit of a child, which loads torch, compiles, compares and times
_LOGGER = logging.getLogger(__name__)
_END_S = 10.0  # the time that a killed child has to end
_MIN_CAPABILITY = (8, 0)
_CLOSED = (
    "this process has opened the GPU, whose compute mode EXCLUSIVE_PROCESS keeps the check out: "
    "run `nvidia-smi -c DEFAULT`"
)
_MAX_MESSAGE = 300  # characters of a child's last line in a reason
_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("engine", "gpu", "kernels", "model", "ops", "options", "ranks", "weights")
# The sources that a result depends on.
_SOURCES = (
    "common/**/*.py",
    "checkpoint/__init__.py",
    "checkpoint/packing.py",
    *(f"{name}/**/*.py" for name in _FOLDERS),
)

_Key = dict[str, Any]  # all that a result depends on: the job's fields, and versions


@dataclass(frozen=True)
class _Stored:
    """The contents of a file."""

    key: _Key
    result: CheckResult


class StoredResult(NamedTuple):
    """A result of this user's files.

    Attributes:
        key: What the result depends on: the job's fields, and versions.
        result: The result.
        is_current: Whether it holds for what is installed now.
    """

    key: _Key
    result: CheckResult
    is_current: bool


_STORED = TypeAdapter(_Stored)


def unsupported_reason(device: torch.device) -> str | None:
    """Return why no kernel can run on a device at all; None where they can be checked."""
    is_cuda = device.type == "cuda"
    if is_cuda and torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return "they need a GPU of compute capability 8.0"
    triton = _triton()
    if triton is None:
        return "Triton is not installed"
    if is_cuda and triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET has them run on the CPU"
    return None


def _triton() -> ModuleType | None:
    """Import Triton late, as it takes long; None without it, when graphs are checked alone."""
    return importlib.import_module("triton") if importlib.util.find_spec("triton") else None


def load_or_check(job: Job, program: Sequence[str] = PROGRAM) -> CheckResult:
    """Return the stored result of a job, or check it now and store the result.

    Of processes that want it at once, one checks and the others wait. It returns within LIMIT_S,
    whatever kernels do.

    Args:
        job: The kernels to check.
        program: The arguments of Python for a child, which gets the job as one more.
    """
    deadline = time.monotonic() + LIMIT_S
    job_fields = JOB.dump_python(job, mode="json", exclude={"device"})
    key = {**job_fields, **_versions(job.device)}
    try:
        folder = native.cache_folder()
        native.make_private(folder)
    except OSError as e:
        warnings.warn(
            "the GPU's kernels are checked again in every process, as the result cannot be stored: "
            f"{e}. Set XDG_CACHE_HOME to a folder that only you can write.",
            stacklevel=2,
        )
        return check(job, program, deadline)
    key_text = json.dumps(key, sort_keys=True)
    digest = hashlib.sha256(key_text.encode()).hexdigest()
    path = folder / f"gpu-{digest[:16]}.json"
    with native.locked(path.with_suffix(".lock"), LIMIT_S):
        stored = _read(path)
        if stored is not None and stored.key == key and _is_complete(stored.result, job):
            return stored.result
        device = torch.device(job.device)
        if device.type == "cuda" and is_closed_to_others(device):
            return _dropped(job.names, _CLOSED, is_final=False)
        result = check(job, program, deadline)
        if result.is_final:
            with contextlib.suppress(OSError):  # on a full disk it is checked again next time
                _write(path, _Stored(key, result))
        return result


def _is_complete(result: CheckResult, job: Job) -> bool:
    return result.reasons.keys() == {*job.names}


def results_for(device: torch.device) -> list[StoredResult]:
    """Return the results that this user's files have for such a GPU."""
    versions = _versions(str(device))
    results = []
    for path in sorted(native.cache_folder().glob("gpu-*.json")):
        stored = _read(path)
        if stored is not None and stored.key.get("gpu") == versions["gpu"]:
            is_current = stored.key.items() >= versions.items()
            results.append(StoredResult(stored.key, stored.result, is_current))
    return results


def _versions(device: str) -> dict[str, str]:
    """Return what a result depends on beside the job."""
    is_cuda = torch.device(device).type == "cuda"
    triton = _triton()
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return {
        "gpu": torch.cuda.get_device_name(device) if is_cuda else device,
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": triton.__version__ if triton else "",
        "interpreter": str(bool(triton and triton.knobs.runtime.interpret)),
        "compiler": compiler or "",
        "source": _source_hash(),
    }


def _driver() -> str:
    """Return the driver's version on Linux; without it torch has CUDA's or ROCm's version alone."""
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return str(torch.version.cuda or torch.version.hip)


def _source_hash() -> str:
    """Return a hash of the kernels, of the ops that define them, and of the steps of graphs."""
    digest = hashlib.sha256()
    paths = [path for pattern in _SOURCES for path in _PACKAGE.glob(pattern)]
    for path in sorted(paths):
        name = path.relative_to(_PACKAGE)
        digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path) -> _Stored | None:
    """Return the contents of a file; None if there is none of this user, or it is damaged."""
    with contextlib.suppress(OSError, ValueError), native.open_private(path) as file:
        return _STORED.validate_json(file.read())
    return None


def _write(path: Path, stored: _Stored) -> None:
    """Write a file at once, so that no reader sees a part of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="result-", delete=False) as file:
        file.write(_STORED.dump_json(stored))
    os.replace(file.name, path)


def check(job: Job, program: Sequence[str], deadline: float) -> CheckResult:
    """Check the job's kernels in child processes, until the deadline of time.monotonic().

    A kernel is dropped only if it fails as the first of its child: what another kernel broke before
    it is not its fault.
    """
    _LOGGER.warning("llama: checking the kernels of %s, once on this machine ...", job.device)
    result = CheckResult()
    while True:
        unchecked = tuple(name for name in job.names if name not in result.reasons)
        if not unchecked:
            return result
        reported = _run_child(replace(job, names=unchecked), program, deadline)
        if reported.passed:
            reported = CheckResult(dict.fromkeys(reported.passed), reported.tiles)
        result |= reported


def _run_child(job: Job, program: Sequence[str], deadline: float) -> CheckResult:
    """Return what a child reports of the job's first kernels, at least of one, or how it ended."""
    limit_s = min(CHILD_S, deadline - time.monotonic())
    if limit_s <= 0:
        return _dropped(job.names, "there was no time left to check it", is_final=False)
    command = [sys.executable, *program, JOB.dump_json(job).decode()]
    ended = _run(command, limit_s)
    reported = CheckResult()
    for line in ended.lines:
        with contextlib.suppress(ValueError):  # the child was killed while it wrote
            reported |= RESULT.validate_json(line)
    if reported.reasons:
        return _with_compiler_message(reported, ended.errors)
    first = job.names[:1]
    if ended.code is None:
        reason = f"the check did not end within {limit_s:g} s"
        return _dropped(first, reason, is_final=limit_s == CHILD_S)
    if ended.code < 0:
        name = signal.Signals(-ended.code).name
        # Linux sends SIGKILL where the machine is out of memory, which may not be so later.
        is_final = name != "SIGKILL"
        return _dropped(first, f"the check was ended by {name}", is_final=is_final)
    # The child itself cannot run, so no kernel would do better in another one.
    last_error = ended.errors[-1] if ended.errors else ""
    reason = f"the check ended with exit code {ended.code}: {last_error[:_MAX_MESSAGE]}"
    return _dropped(job.names, reason, is_final=False)


def _with_compiler_message(result: CheckResult, errors: list[str]) -> CheckResult:
    """Return a result that says why the C compiler failed.

    Triton lets the compiler write its message to the child's stderr, and raises an error without.
    """
    message = next((line for line in errors if "error: " in line), None)
    if message is None:
        return result
    reasons = dict(result.reasons)
    for name, reason in result.failed.items():
        if reason.startswith("CalledProcessError"):
            reasons[name] = f"Triton's C compiler failed: {message.strip()[:_MAX_MESSAGE]}"
    return replace(result, reasons=reasons)


class _Ended(NamedTuple):
    """How a child ended: its exit code, None if it was killed at its limit, and its output."""

    code: int | None
    lines: list[bytes]
    errors: list[str]


def _run(command: list[str], limit_s: float) -> _Ended:
    """Run a child in a session of its own, which ends with it."""
    paths = [str(_PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",  # a folder named llama in the current one must not hide this package
        PARENT: str(os.getpid()),
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
        out.seek(0)
        err.seek(0)
        errors = err.read().decode(errors="replace").strip().splitlines()
        return _Ended(code, out.readlines(), errors)


def _dropped(names: Sequence[str], reason: str, *, is_final: bool = True) -> CheckResult:
    return CheckResult(dict.fromkeys(names, reason), is_final=is_final)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Kill the child, if it is alive, and the compilers that it has started."""
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a child that the driver holds is left
        child.wait(_END_S)
