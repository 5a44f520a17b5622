"""Compilers at work while other tests run: most tests keep one core busy, and machines have more.

In: the names of the fixtures that the collected tests use. Out: futures of what these will ask for.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from helpers.kernels import BODIES, EMULATED_AMX, HAS_KERNELS
from helpers.launch import REPO, environment
from llama.ops.cpu import native

_pool = ThreadPoolExecutor(1, thread_name_prefix="ahead")
_begun: dict[str, Future] = {}
_temporary = tempfile.TemporaryDirectory(prefix="llama-tests-")


def begin(fixtures: Collection[str]) -> None:
    """Start what tests with these fixtures will wait for."""
    if "kernels" in fixtures and HAS_KERNELS:
        for name, body in BODIES.items():
            if native.cpu_flags() >= body.needs:
                _begun[name] = _pool.submit(library, name)
    if "compiled" in fixtures:
        _begun["compiled"] = _pool.submit(compiled_for_gpus)
    if "dry_run" in fixtures:
        _begun["gpu_check"] = _pool.submit(dry_gpu_check)
    if "wheel" in fixtures and HAS_KERNELS:
        _begun["wheel"] = _pool.submit(built_wheel)


def library_of(name: str) -> ctypes.CDLL:
    """A body of the CPU's kernels by its name."""
    return _begun[name].result() if name in _begun else library(name)


def gpu_kernels() -> list[str]:
    """What programs/compiled_kernels.py prints."""
    return _begun["compiled"].result() if "compiled" in _begun else compiled_for_gpus()


def wheel() -> Path:
    """A wheel of this tree."""
    return _begun["wheel"].result() if "wheel" in _begun else built_wheel()


def gpu_check() -> tuple[list[str], Path, subprocess.CompletedProcess]:
    """scripts/gpu_check.py, dry: its command, its folder and how it ended."""
    return _begun["gpu_check"].result() if "gpu_check" in _begun else dry_gpu_check()


def library(name: str) -> ctypes.CDLL:
    """Compiled once in the user's cache, or for this session where a header stands for AMX's."""
    body = BODIES[name]  # the header is not in the name that the cache goes by
    folder = Path(_temporary.name) if body is EMULATED_AMX else native.cache_folder()
    return native.load(folder, body)


def compiled_for_gpus() -> list[str]:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(REPO), "TRITON_CACHE_DIR": f"{_temporary.name}/triton"}
    program = REPO / "tests" / "programs" / "compiled_kernels.py"
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True,
        timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def built_wheel() -> Path:
    source, out = Path(_temporary.name, "source"), Path(_temporary.name, "wheel")
    skipped = shutil.ignore_patterns(".*", "__pycache__", "tests", "bench", "build", "*.egg-info")
    shutil.copytree(REPO, source, ignore=skipped)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *options, "-w", out, source], check=True, timeout=400)
    (path,) = out.glob("llama-*.whl")
    return path


def dry_gpu_check() -> tuple[list[str], Path, subprocess.CompletedProcess]:
    out = Path(_temporary.name, "gpu_check")
    command = [sys.executable, str(REPO / "scripts" / "gpu_check.py"), "--dry", "--minutes", "9"]
    command += ["--out", str(out)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=400, check=False
    )
    return command, out, done
