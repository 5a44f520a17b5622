"""Facts of the machine: its name, its read bandwidth and its FLOP/s in a matrix product.

In: a device and dtypes. Out: facts as JSON has them, and rates a second, each the best that was
seen. Nothing here knows of models.
"""

import functools
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from llama.common.allocation import use_huge_pages

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")
_MAX_RUNS = 5
_MAX_SECONDS = 1.0  # no run is added after this time
_ELEMENTS_CPU = 2**28  # float32: 1 GiB
_ELEMENTS_GPU = 2**30  # float32: 4 GiB
_LONG_ENOUGH = 0.05  # seconds of one product: a larger one would not be faster


def facts(device: torch.device) -> dict[str, Any]:
    cpu, flags = _cpu()
    return {
        "device": device.type,
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def gpu_state(device: torch.device) -> dict[str, str]:
    """Return the GPU's driver, clocks and power limit; empty where nvidia-smi is missing."""
    names = ["driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit", "ecc.mode.current"]
    command = ["nvidia-smi", "-i", str(device.index or 0), f"--query-gpu={','.join(names)}"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader"], capture_output=True, text=True, check=True,
            timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names, map(str.strip, done.stdout.split(",")), strict=False))


def _cpu() -> tuple[str, set[str]]:
    """Return the CPU's name and flags; without /proc, what Python reports."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor() or platform.machine(), set()
    lines = (line.partition(":") for line in path.read_text().splitlines())
    fields = {key.strip(): value.strip() for key, _, value in lines}
    return fields.get("model name", platform.machine()), set(fields.get("flags", "").split())


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a sum over far more memory than any cache has.

    The memory is in large pages, as weights are.
    """
    buffer = torch.empty(_ELEMENTS_CPU if device.type == "cpu" else _ELEMENTS_GPU, device=device)
    use_huge_pages(buffer)
    buffer.fill_(1)
    seconds = best_seconds(lambda: buffer.sum(), device)
    return buffer.numel() * buffer.itemsize / seconds


def matrix_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of square products, the second factor transposed as weights are."""
    best = 0.0
    for size in (512, 1024, 2048, 4096, 8192, 16384):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = best_seconds(functools.partial(F.linear, a, b), device)
        best = max(best, 2 * size**3 / seconds)
        if seconds > _LONG_ENOUGH:
            break
    return best


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of a few runs, after a warm-up."""
    work()
    best = math.inf
    until = time.perf_counter() + _MAX_SECONDS
    for _ in range(_MAX_RUNS):
        wait_for(device)
        began = time.perf_counter()
        work()
        wait_for(device)
        ended = time.perf_counter()
        best = min(best, ended - began)
        if ended > until:
            break
    return best


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work (a sync)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


NO_TRITON = "Triton is not installed"


def has_triton() -> bool:
    """Return whether Triton can be imported: on a CPU it comes with the extra `test` alone."""
    return find_spec("triton") is not None


def require_triton(command: str) -> None:
    """Raise ValueError where a command imitates the GPU's kernels and Triton is not installed."""
    if not has_triton():
        raise ValueError(
            f"the command {command} imitates a GPU's kernels, which need Triton, and it is not "
            "installed: pip install triton (Linux, x86-64)"
        )
