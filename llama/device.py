"""What a process may use of its machine: which device and type, how much memory, how many threads.

In: what the user asked for, and what the system and torchrun say. Out: a torch.device, a dtype,
bytes, a number of threads; and host memory in large pages. It knows nothing of models.
"""

import contextlib
import ctypes
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,  # weights; all else is bf16
}


def pick_device(device: str | torch.device | None) -> torch.device:
    """`device`, or cuda, else mps, else cpu; under torchrun, the GPU that LOCAL_RANK names."""
    if device is None:
        kinds = [("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())]
        device = next((name for name, there in kinds if there), "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as e:
        raise ValueError(f"device={device!r} is not a device: use 'cuda', 'mps' or 'cpu'") from e
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={device!r}, but torch sees no CUDA GPU: use device='cpu'")
        if chosen.index is None:
            chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if chosen.index >= torch.cuda.device_count():
            raise ValueError(
                f"this process wants GPU {chosen.index}, but there are "
                f"{torch.cuda.device_count()}: start fewer processes with --nproc_per_node"
            )
    return chosen


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The type of the weights; by default bf16 where the device has it, else fp16."""
    if dtype is None:
        lacks = device.type == "cuda" and not torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        return torch.float16 if lacks else torch.bfloat16
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise ValueError(f"dtype={dtype!r}: give one of {', '.join(DTYPES)}, or None")
    if chosen is torch.int8 and device.type != "cpu":
        raise ValueError(f"dtype='int8' is for device='cpu', not {device.type}: use 'bf16'")
    return chosen


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still take on `device`; host memory is shared by local ranks."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free = min(_available_memory(), _cgroup_headroom())
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _available_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return (
            next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10
        )
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_headroom() -> int:
    """What a container's own limit leaves; no limit is as good as a very large one."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        stat = Path("/sys/fs/cgroup/memory.stat").read_text().split()
    except (OSError, ValueError):
        return 1 << 62
    if limit == "max":
        return 1 << 62
    cached = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
    return int(limit) - used + cached  # the page cache gives way


_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: "200000 100000" is two cores' time


def set_num_threads() -> None:
    """Divide the cores among the ranks of this machine, and use no more than a container's share.

    What the user chose stays: OMP_NUM_THREADS, or fewer by torch.set_num_threads. torchrun sets
    OMP_NUM_THREADS=1 where it is unset; that does not count as the user's choice.
    """
    chosen, now, share = (
        os.environ.get("OMP_NUM_THREADS"),
        torch.get_num_threads(),
        available_cores(),
    )
    torchruns = chosen == "1" and now == 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if torchruns or (chosen is None and now > share):
        torch.set_num_threads(share)


def available_cores() -> int:
    """This rank's share of the cores that the machine's ranks may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min(cores, _quota()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _quota() -> int:
    """Cores whose time a container may use; very many where there is no limit."""
    try:
        limit, period = _QUOTA.read_text().split()
        return -(-int(limit) // int(period))
    except (OSError, ValueError):  # "max", or not in such a container
        return 1 << 30


_HUGE = 2 << 20  # bytes of a huge page
_MADV_HUGEPAGE = 14


def use_huge_pages(tensor: Tensor) -> None:
    """Ask Linux for pages of 2 MiB under a tensor of host memory that nobody has touched yet."""
    if tensor.device.type != "cpu" or sys.platform != "linux":
        return
    start = -(-tensor.data_ptr() // _HUGE) * _HUGE
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE
    if start < end:
        with contextlib.suppress(AttributeError):  # a C library without madvise
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like torch.zeros, but host memory becomes resident only when written, in pages of 2 MiB.

    torch writes the zeros; the system's fresh memory has them already.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + 63, np.uint8))
    use_huge_pages(raw)
    first = -raw.data_ptr() % 64  # where a cache line begins
    return raw[first : first + size].view(dtype).view(shape)
