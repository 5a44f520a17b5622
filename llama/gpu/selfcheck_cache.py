"""Which kernels a GPU may use: checked once in processes of their own, then read from a file.

In: a job. Out: for each of its kernels whether it passed, or why it did not. A wrong kernel can
hang or end its process, so children run them, and all ends before ranks that wait give up. The
result lies as JSON in the folder of the CPU kernels, under a name made of all it depends on.
"""

import contextlib
import hashlib
import importlib.util
import json
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
from typing import Any

import torch
from pydantic import TypeAdapter

from llama.gpu.job import JOB, RESULT, CheckResult, Job
from llama.gpu.program import PARENT
from llama.ops.cpu import native

PROGRAM = ("-m", "llama.gpu.selfcheck")  # what follows Python's name in a child
LIMIT_S = 480.0  # for all of a check; the other ranks wait for 600
CHILD_S = 300.0  # for a child: load torch, compile, compare, time products
_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("engine", "gpu", "model", "ops", "ranks", "weights")
_USED = ("checks.py", "device.py", *(f"{name}/**/*.py" for name in _FOLDERS))  # by a check


@dataclass(frozen=True)
class _Kept:
    """A file: everything that a result depends on, and the result."""

    key: dict[str, Any]
    result: CheckResult


_KEPT = TypeAdapter(_Kept)


def not_for(device: torch.device) -> str | None:
    """Why no kernel can run on a device at all; None where they can be checked."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "they need a GPU of compute capability 8.0"
    if (triton := _triton()) is None:
        return "Triton is not installed"
    if device.type == "cuda" and triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET has them run on the CPU"
    return None


def _triton() -> ModuleType | None:
    """It is imported late, as it takes long; graphs are checked without it, too."""
    return importlib.import_module("triton") if importlib.util.find_spec("triton") else None


def load_or_check(job: Job, program: Sequence[str] = PROGRAM) -> CheckResult:
    """What the file says of the job's kernels, or what a check finds now; then it is written.
    Processes that want it at once let one check. It returns within LIMIT_S, whatever kernels do."""
    deadline = time.monotonic() + LIMIT_S
    key = {**JOB.dump_python(job, mode="json", exclude={"device"}), **_versions(job.device)}
    try:
        folder = native.cache_folder()
        native.make_private(folder)
    except OSError as e:
        warnings.warn(
            f"the GPU's kernels are checked again in every process, as the result cannot be kept: "
            f"{e}. Set XDG_CACHE_HOME to a folder that only you can write.",
            stacklevel=2,
        )
        return check(job, program, deadline)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"gpu-{name}.json"
    with native.locked(path.with_suffix(".lock"), LIMIT_S):
        kept = _read(path)
        if kept is not None and kept.key == key and kept.result.reasons.keys() == {*job.names}:
            return kept.result
        result = check(job, program, deadline)
        if result.is_final:
            with contextlib.suppress(OSError):  # a full disk: checked again next time
                _write(path, _Kept(key, result))
        return result


def results_for(device: torch.device) -> list[tuple[dict[str, Any], CheckResult, bool]]:
    """All that this user's files hold of such a GPU: what each result depends on, the result, and
    whether it holds for what is installed now."""
    now = _versions(str(device))
    kept = filter(None, map(_read, sorted(native.cache_folder().glob("gpu-*.json"))))
    own = [x for x in kept if x.key.get("gpu") == now["gpu"]]
    return [(x.key, x.result, x.key.items() >= now.items()) for x in own]


def _versions(device: str) -> dict[str, str]:
    """What a result depends on beside the job."""
    is_cuda, triton = torch.device(device).type == "cuda", _triton()
    return {
        "gpu": torch.cuda.get_device_name(device) if is_cuda else device,
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": triton.__version__ if triton else "",
        "interpreter": str(bool(triton and triton.knobs.runtime.interpret)),
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "",
        "source": _source_hash(),
    }


def _driver() -> str:
    """The driver's own words on Linux; elsewhere torch has nothing finer than CUDA's version."""
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return str(torch.version.cuda)


def _source_hash() -> str:
    """Of the kernels, the ops that define them, and the steps that are tried as graphs."""
    digest = hashlib.sha256()
    for path in sorted(path for place in _USED for path in _PACKAGE.glob(place)):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path) -> _Kept | None:
    """None where there is no file, or what lies there is damaged."""
    with contextlib.suppress(OSError, ValueError):
        return _KEPT.validate_json(path.read_bytes())
    return None


def _write(path: Path, kept: _Kept) -> None:
    """All of the file or nothing, whoever reads meanwhile."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="result-", delete=False) as file:
        file.write(_KEPT.dump_json(kept))
    os.replace(file.name, path)


def check(job: Job, program: Sequence[str], deadline: float) -> CheckResult:
    """Check the job's kernels in children, until the deadline of time.monotonic(). A kernel is out
    where it fails as the first of its child: what another breaks before it is not its fault."""
    print(f"llama: checking the kernels of {job.device}, once on this machine ...", file=sys.stderr)
    found = CheckResult()
    while left := tuple(name for name in job.names if name not in found.reasons):
        said = _run(replace(job, names=left), program, deadline)
        if said.passed:
            said = CheckResult(dict.fromkeys(said.passed), said.tiles)
        found |= said
    return found


def _run(job: Job, program: Sequence[str], deadline: float) -> CheckResult:
    """What a child says of the job's first kernels, or how it ended; at least of one."""
    limit_s = min(CHILD_S, deadline - time.monotonic())
    if limit_s <= 0:
        return _out(job.names, "there was no time left to check it", is_final=False)
    paths = [str(_PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",  # a folder named llama in the current one must not hide this package
        PARENT: str(os.getpid()),
    }
    command = [sys.executable, *program, JOB.dump_json(job).decode()]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
        out.seek(0), err.seek(0)
        lines, errors = out.readlines(), err.read().decode(errors="replace").strip().splitlines()
    said = CheckResult()
    for line in lines:
        with contextlib.suppress(ValueError):  # it was ended while it wrote
            said |= RESULT.validate_json(line)
    if said.reasons:
        return said
    if code is None:
        is_final = limit_s == CHILD_S
        return _out(job.names[:1], f"the check did not end within {limit_s:g} s", is_final=is_final)
    if code < 0:
        return _out(job.names[:1], f"the check was ended by {signal.Signals(-code).name}")
    text = f"the check ended with exit code {code}: {''.join(errors[-1:])[:300]}"
    return _out(job.names, text, is_final=False)  # the child itself cannot run


def _out(names: Sequence[str], reason: str, *, is_final: bool = True) -> CheckResult:
    return CheckResult(dict.fromkeys(names, reason), is_final=is_final)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Kill the child, if it lives, and the compilers that it has started."""
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it; it is left then
        child.wait(10)
