"""Which kernels a GPU may use: measured once in a process of its own, then read from a stamp.

In: a device, a type and a model's sizes. Out: for each kernel whether it passed, or why it did not.
The first build on a GPU has the kernels checked, see children.py. The result lies as JSON in the
folder of the CPU kernels, under a name that follows from everything that it depends on: GPU,
driver, torch, Triton and the C compiler that it needs, the sources of the kernels and of the ops
that define them, type and sizes.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from llama.ops.cpu import native
from llama.ops.triton import children, kernels, tiles
from llama.ops.triton.check import Job
from llama.ops.triton.children import Verdict
from llama.ops.triton.kernels import KernelSet

OTHERS = ("graph",)  # what a stamp may hold besides kernels
_SOURCES = Path(__file__).parent
_ORDER = ("attention", "add_norm", "rope_and_store", "silu_mul", "sample", "linear")


def not_for(device: torch.device) -> str | None:
    """Why no kernel can run on a device at all; None where they can be checked."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "they need a GPU of compute capability 8.0"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def names_for(dtype: str) -> tuple[str, ...]:
    """The kernels that there are for a type: products of float32 stay with torch."""
    return ("sample",) if dtype == "fp32" else _ORDER


def settle(job: Job, command: Sequence[str] = ()) -> Verdict:
    """What the stamp says of the job's kernels, or what children find now; then it is written.

    Processes that want it at once let one measure. Never raises for what a kernel does. command: of
    the children, see `children.measure`; names that are no kernels' are those of OTHERS.
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
        return children.measure(job, command)
    path = folder / f"gpu-{hashlib.sha256(_bytes(key)).hexdigest()[:16]}.json"
    verdict = _read(path, key)
    if verdict is not None:
        return verdict
    with _locked(path.with_suffix(".lock")):
        verdict = _read(path, key)  # somebody has measured it meanwhile
        if verdict is None:
            verdict = children.measure(job, command)
            if verdict.is_final:
                with contextlib.suppress(OSError):  # a full disk: measured again next time
                    _write(path, key, verdict)
    return verdict


def kernel_set(dtype: torch.dtype, verdict: Verdict, names: Sequence[str]) -> KernelSet:
    """Those of `names` that passed."""
    chosen = frozenset(names) & set(verdict.passed) & set(kernels.NAMES)
    table = tiles.table(verdict.tiles) if "linear" in chosen else {}
    return KernelSet(chosen, frozenset({dtype}), table)


def stamps() -> list[tuple[dict[str, Any], Verdict]]:
    """All stamps of this user, each with what it depends on."""
    found = []
    for path in sorted(native.cache_folder().glob("gpu-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            key = json.loads(path.read_bytes())["key"]
            verdict = _read(path, key)
            if verdict is not None:
                found.append((key, verdict))
    return found


def _key(job: Job) -> dict[str, Any]:
    """Everything that the result depends on."""
    device = torch.device(job.device)
    key = json.loads(job.to_json())
    del key["device"]
    return key | _versions(device)


def is_current(key: dict[str, Any], device: torch.device) -> bool:
    """Whether a stamp with this key holds for what is installed now."""
    return all(key.get(name) == value for name, value in _versions(device).items())


def _versions(device: torch.device) -> dict[str, str]:
    return {
        "gpu": gpu_name(device),
        "driver": _driver(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "",
        "source": _source_hash(),
    }


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _driver(device: torch.device) -> str:
    """The driver's own words on Linux; elsewhere torch has nothing finer than CUDA's version."""
    if device.type != "cuda":
        return ""
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return str(torch.version.cuda)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _source_hash() -> str:
    """Of the kernels, and of the ops, whose torch bodies define them."""
    digest = hashlib.sha256()
    for path in sorted([*_SOURCES.glob("*.py"), *_SOURCES.parent.glob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _read(path: Path, key: dict[str, Any]) -> Verdict | None:
    """A whole stamp of this key; None where there is none, or what lies there is damaged."""
    try:
        values = json.loads(path.read_bytes())
        reasons = values["reasons"]
        choices = [
            (int(n), int(k), int(m), None if tile is None else tuple(map(int, tile)))
            for n, k, m, tile in values["tiles"]
        ]
        is_whole = (
            values["key"] == key
            and set(key["names"]) <= set(reasons) <= {*kernels.NAMES, *OTHERS}
            and all(reason is None or isinstance(reason, str) for reason in reasons.values())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Verdict(reasons, choices) if is_whole else None


def _write(path: Path, key: dict[str, Any], verdict: Verdict) -> None:
    """All of the stamp or nothing, whoever reads meanwhile."""
    values = {"key": key, "reasons": verdict.reasons, "tiles": verdict.tiles}
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="stamp-", delete=False) as file:
        file.write(_bytes(values))
    os.replace(file.name, path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock, which ends with its holder; who has waited for too long goes on without."""
    import fcntl  # Linux has it; this module is imported everywhere

    deadline = time.monotonic() + (children.MAX_CHILDREN + 1) * children.LIMIT_S
    with open(path, "w") as file:
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        yield
