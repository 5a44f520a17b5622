"""What a process may use of its machine: which device and dtype, how much memory, how many threads.

It must not know models.
"""

import contextlib
import ctypes
import functools
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llama.checks import torchrun_number

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_OTHER_NAMES = {  # that users of torch, Hugging Face and vLLM type
    "bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16,
    "float32": torch.float32, "float": torch.float32,
}  # fmt: skip


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device to run on: `device`, or by default the first that exists of cuda, mps and cpu.
    Under torchrun each rank takes the GPU with the number LOCAL_RANK, and none takes mps, whose
    ranks could not exchange tensors. ValueError if it does not exist or cannot be used."""
    num_ranks = torchrun_number("WORLD_SIZE")
    if device is None:
        has_mps = num_ranks == 1 and torch.backends.mps.is_available()
        device = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = torch.device("meta")
    if chosen.type not in ("cuda", "mps", "cpu"):
        raise ValueError(f"device={device!r} is not a device: use 'cuda', 'mps' or 'cpu'")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device={device!r}, but torch finds no Apple GPU: use device='cpu'")
    if chosen.type == "mps" and num_ranks > 1:
        raise ValueError(
            f"device={device!r} works in one process only, and torchrun started {num_ranks}: "
            "use device='cpu', or start one process"
        )
    return _pick_gpu(chosen) if chosen.type == "cuda" else chosen


def _pick_gpu(device: torch.device) -> torch.device:
    """The GPU of this rank, with its number. Several ranks of a machine must not share one."""
    if not torch.cuda.is_available():
        raise ValueError(f"device='{device}', but torch finds no CUDA GPU: use device='cpu'")
    count, rank = torch.cuda.device_count(), torchrun_number("LOCAL_RANK")
    # Slurm, for example, shows each task one GPU of its own, which has the number 0 in every task.
    is_task = "CUDA_VISIBLE_DEVICES" in os.environ and "LLAMA_LAUNCHER" not in os.environ
    one_per_task = count == 1 and is_task
    num_local = torchrun_number("LOCAL_WORLD_SIZE")
    if device.index is not None and num_local > 1 and not one_per_task:
        raise ValueError(
            f"device='{device}' would put the {num_local} ranks of this machine on one GPU: "
            "use device='cuda', and each rank takes its own"
        )
    index = device.index
    if index is None:
        index = 0 if one_per_task else rank
    highest = index if one_per_task else max(index, num_local - 1)  # the same on every rank
    if highest >= count:
        raise ValueError(
            f"this machine needs GPU {highest}, but torch finds {count}, numbered from 0: start "
            "fewer ranks (--ranks; --nproc_per_node of torchrun), or name another device"
        )
    return torch.device("cuda", index)


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of the model; by default, or for "auto", bf16 if the device has it, else fp16."""
    if dtype is None or dtype == "auto":
        # From compute capability 8.0 (Ampere) on, CUDA GPUs multiply bf16 in hardware.
        lacks = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
        return torch.float16 if lacks else torch.bfloat16
    chosen = (DTYPES | _OTHER_NAMES).get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        names = ", ".join([*DTYPES, *_OTHER_NAMES, "auto"])
        raise ValueError(f"dtype={dtype!r}: give one of {names}, or None")
    return chosen


def dtype_name(dtype: torch.dtype) -> str:
    """One of DTYPES."""
    return next(name for name, value in DTYPES.items() if value is dtype)


def current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A block in which `device` is the current one, for kernels that are given no tensor."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on `device`, with what torch's allocator keeps.
    Host memory is divided among the machine's ranks, and bounded by control groups."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free = min(_available_memory(), _cgroup_headroom())
    return free // torchrun_number("LOCAL_WORLD_SIZE")


def _available_memory() -> int:
    """Bytes that the machine can still give: MemAvailable, or half of all memory off Linux."""
    words = _text(Path("/proc/meminfo")).split()
    if "MemAvailable:" in words:
        return int(words[words.index("MemAvailable:") + 1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def set_num_threads() -> None:
    """Divide the cores among the ranks of this machine; respect the CPU quota of a container. The
    user's choice is kept: OMP_NUM_THREADS, but not torchrun's own 1, or fewer threads by
    torch.set_num_threads. A process that is forked later has one thread."""
    _fork_to_one_thread()
    chosen, now = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()
    cores = available_cores()
    set_by_torchrun = chosen == "1" and now == 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if set_by_torchrun or (chosen is None and now > cores):
        torch.set_num_threads(cores)


@functools.cache
def _fork_to_one_thread() -> None:
    """A fork has none of OpenMP's threads, and would wait for them for ever."""
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))


def available_cores() -> int:
    """The number of cores for this rank: those of the machine over its ranks, at least 1."""
    return max(1, machine_cores() // torchrun_number("LOCAL_WORLD_SIZE"))


def machine_cores() -> int:
    """The cores that all ranks of this machine may use: by affinity, and control groups' quota."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(cores, _cgroup_cores())


# --- control groups: the limits of a container, a systemd unit or a batch job (cgroups(7)) ---

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")  # where systemd and containers have them mounted
_NO_LIMIT = 1 << 62


def cgroup_folders(controller: str) -> list[Path]:
    """Where this process's groups lie: for v1 and v2, from its own group up to the mounted root. A
    limit of any group on that way applies. In a container some of them may not be there."""
    folders = []
    for line in _text(_OWN_GROUPS).splitlines():  # "4:memory:/a/b" in v1, "0::/a/b" in v2
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _GROUPS / controller if controllers else _GROUPS
        own = root / path.lstrip("/")
        folders += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return folders


def _cgroup_headroom() -> int:
    """Bytes left under the tightest memory limit of this process's control groups."""
    headroom = _NO_LIMIT
    for folder in cgroup_folders("memory"):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        if not limit or not used or limit.strip() == "max":
            continue
        words = _text(folder / "memory.stat").split()
        stat = dict(zip(words[::2], words[1::2], strict=True))
        # The kernel drops cached pages of files before it refuses memory. v1 counts those of the
        # groups below apart, under "total_".
        cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        headroom = min(headroom, int(limit) - int(used) + cached)
    return max(0, headroom)


def _cgroup_cores() -> int:
    """The tightest CPU quota of this process's control groups, in cores, rounded up."""
    cores = _NO_LIMIT
    for folder in cgroup_folders("cpu"):
        # v2 has "200000 100000" in one file, for two cores; v1 has a file for each number.
        quota = (_text(folder / "cpu.max") or _text(folder / "cpu.cfs_quota_us")).split()
        period = quota[1:] or _text(folder / "cpu.cfs_period_us").split()
        if quota and quota[0] not in ("max", "-1"):
            cores = min(cores, -(-int(quota[0]) // int(period[0])))
    return cores


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not Linux, or not in such a group
        return ""


def pinned(x: np.ndarray, device: torch.device) -> Tensor:
    """In memory from which a GPU copies by itself; torch keeps it until that is done."""
    host = torch.from_numpy(x)
    return host.pin_memory() if device.type == "cuda" else host


_HUGE, _ADVICE = 2 << 20, 14  # bytes; MADV_HUGEPAGE of madvise(2)


def use_huge_pages(tensor: Tensor) -> Tensor:
    """Ask Linux for pages of 2 MiB under a tensor of host memory, before its first touch."""
    start = -(-tensor.data_ptr() // _HUGE) * _HUGE
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE
    if start < end and tensor.device.type == "cpu" and sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # a C library without madvise
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _ADVICE)
    return tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like torch.zeros, but host memory becomes resident only when written, in pages of 2 MiB:
    torch writes the zeros, which the system's fresh memory has already."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = use_huge_pages(torch.from_numpy(np.zeros(size + 63, np.uint8)))
    first = -raw.data_ptr() % 64  # where a cache line begins
    return raw[first : first + size].view(dtype).view(shape)
