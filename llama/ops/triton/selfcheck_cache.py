"""Which kernels a GPU may use: checked once in processes of their own, then read from a file.

In: a job. Out: for each of its kernels whether it passed, or why it did not. A wrong kernel can
hang or end its process, so this one runs none: a child checks all of them, and where that does not
go well, children check them one by one, each within a limit. The result lies as JSON in the folder
of the CPU kernels, under a name that follows from everything that it depends on: GPU, driver,
torch, Triton and the C compiler that it needs, the sources of the kernels and of the ops that
define them, type and sizes.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from llama.device import DTYPES
from llama.ops.cpu import native
from llama.ops.triton.kernels import NAMES, KernelSet, Tile
from llama.ops.triton.selfcheck import Job

PROGRAM = ("-m", "llama.ops.triton.selfcheck")  # what follows Python's name in a child
ALL_S = 180.0  # for a child to check all kernels: load torch, compile, compare, time products
ONE_S = 90.0  # for a child to check one
_SOURCES = Path(__file__).parent


@dataclass(frozen=True)
class CheckResult:
    """Why each kernel that was checked must not be used, None where it may, and chosen tiles.

    is_final: a later check would say the same; not so where memory was short or no child ran.
    """

    reasons: dict[str, str | None] = field(default_factory=dict)
    tiles: dict[tuple[int, int, int], Tile] = field(default_factory=dict)
    is_final: bool = True

    @property
    def passed(self) -> list[str]:
        return [name for name, reason in self.reasons.items() if reason is None]

    @property
    def failed(self) -> dict[str, str]:
        return {name: reason for name, reason in self.reasons.items() if reason is not None}

    def kernels(self, dtype: str, names: Sequence[str]) -> KernelSet:
        """Those of `names` that passed."""
        passed = frozenset(names) & set(self.passed)
        return KernelSet(passed, frozenset({DTYPES[dtype]}), self.tiles)


def not_for(device: torch.device) -> str | None:
    """Why no kernel can run on a device at all; None where they can be checked."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "they need a GPU of compute capability 8.0"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def names_for(dtype: str) -> tuple[str, ...]:
    """The kernels that there are for a type: products of float32 stay with torch."""
    return ("sample",) if dtype == "fp32" else NAMES


def load_or_check(job: Job, program: Sequence[str] = PROGRAM) -> CheckResult:
    """What the file says of the job's kernels, or what a check finds now; then it is written.

    Processes that want it at once let one check. Never raises for what a kernel does.
    """
    key = _key(job)
    try:
        folder = native.cache_folder()
        native.make_private(folder)
    except OSError as e:
        warnings.warn(
            f"the GPU's kernels are checked again in every process, as the result cannot be kept: "
            f"{e}. Set XDG_CACHE_HOME to a folder that only you can write.",
            stacklevel=2,
        )
        return check(job, program)
    path = folder / f"gpu-{hashlib.sha256(_bytes(key)).hexdigest()[:16]}.json"
    if (known := _read(path, key)) is not None:
        return known
    with _locked(path.with_suffix(".lock"), ALL_S + len(job.names) * ONE_S):
        if (known := _read(path, key)) is not None:
            return known  # somebody has checked them meanwhile
        result = check(job, program)
        if result.is_final:
            with contextlib.suppress(OSError):  # a full disk: checked again next time
                _write(path, key, result)
        return result


def known_results() -> list[tuple[dict[str, Any], CheckResult]]:
    """All that this user's files hold, each with what it depends on."""
    found = []
    for path in sorted(native.cache_folder().glob("gpu-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            key = json.loads(path.read_bytes())["key"]
            if (result := _read(path, key)) is not None:
                found.append((key, result))
    return found


def is_current(key: dict[str, Any], device: torch.device) -> bool:
    """Whether a file with this key holds for what is installed now."""
    return all(key.get(name) == value for name, value in _versions(device).items())


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _key(job: Job) -> dict[str, Any]:
    """Everything that the result depends on."""
    key = json.loads(job.to_json())
    del key["device"]
    return key | _versions(torch.device(job.device))


def _versions(device: torch.device) -> dict[str, str]:
    import triton

    return {
        "gpu": gpu_name(device),
        "driver": _driver(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "",
        "source": _source_hash(),
    }


def _driver(device: torch.device) -> str:
    """The driver's own words on Linux; elsewhere torch has nothing finer than CUDA's version."""
    if device.type != "cuda":
        return ""
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return str(torch.version.cuda)


def _source_hash() -> str:
    """Of the kernels, and of the ops, whose torch bodies define them."""
    digest = hashlib.sha256()
    for path in sorted([*_SOURCES.glob("*.py"), *_SOURCES.parent.glob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _read(path: Path, key: dict[str, Any]) -> CheckResult | None:
    """A whole result of this key; None where there is none, or what lies there is damaged."""
    try:
        values = json.loads(path.read_bytes())
        reasons, tiles = values["reasons"], _tiles(values["tiles"])
        is_whole = values["key"] == key and set(reasons) == set(key["names"])
        is_whole &= all(reason is None or isinstance(reason, str) for reason in reasons.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return CheckResult(reasons, tiles) if is_whole else None


def _tiles(choices: Any) -> dict[tuple[int, int, int], Tile]:
    return {(int(n), int(k), int(m)): Tile(*tile) for n, k, m, tile in choices}


def _write(path: Path, key: dict[str, Any], result: CheckResult) -> None:
    """All of the file or nothing, whoever reads meanwhile."""
    tiles = [(*product, tile) for product, tile in result.tiles.items()]
    values = {"key": key, "reasons": result.reasons, "tiles": tiles}
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="result-", delete=False) as file:
        file.write(_bytes(values))
    os.replace(file.name, path)


@contextlib.contextmanager
def _locked(path: Path, limit_s: float) -> Iterator[None]:
    """Hold a lock, which ends with its holder; who has waited for too long goes on without, as
    does who is on a file system that has none."""
    import fcntl  # Linux has it; this module is imported everywhere

    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path, "w"))
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.1)
        yield


def check(job: Job, program: Sequence[str] = PROGRAM) -> CheckResult:
    """Check the job's kernels in a child. If any fails there, or the child does not end well, each
    is checked in a child of its own: what one kernel breaks is not another's fault."""
    print(f"llama: checking the kernels of {job.device}, once on this machine ...", file=sys.stderr)
    together = _run(job, program, ALL_S)
    if not together.failed or not together.is_final or len(job.names) == 1:
        return together
    alone = [_run(replace(job, names=(name,)), program, ONE_S) for name in job.names]
    return CheckResult(
        {name: reason for x in alone for name, reason in x.reasons.items()},
        {product: tile for x in alone for product, tile in x.tiles.items()},
        all(x.is_final for x in alone),
    )


def _run(job: Job, program: Sequence[str], limit_s: float) -> CheckResult:
    """What a child says, or how it ended."""
    paths = [str(_SOURCES.parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",  # a folder named llama in the current one must not hide this package
    }
    command = [sys.executable, *program, job.to_json()]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return _all_out(job, f"the check did not end within {limit_s:g} s")
        finally:
            _end(child)
        out.seek(0), err.seek(0)
        said, errors = out.read(), err.read().decode(errors="replace").strip().splitlines()
    if code < 0:
        return _all_out(job, f"the check was ended by {signal.Signals(-code).name}")
    if code:  # the child itself cannot run
        text = f"the check ended with exit code {code}: {''.join(errors[-1:])[:300]}"
        return _all_out(job, text, is_final=False)
    values = json.loads(said)
    return CheckResult(values["reasons"], _tiles(values["tiles"]), values["is_final"])


def _all_out(job: Job, reason: str, *, is_final: bool = True) -> CheckResult:
    return CheckResult(dict.fromkeys(job.names, reason), {}, is_final)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Kill the child, if it lives, and the compilers that it has started."""
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it; it is left then
        child.wait(10)
