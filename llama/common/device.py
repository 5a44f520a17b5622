"""The part of a machine that a process may use.

In: the choices of the user, and what torch and the operating system report. Out: the device, the
dtype, free memory, and the number of threads. It must not know models.
"""

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import torch

from llama.common.checks import FieldError, torchrun_number, whole_number

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ROOT = Path("/")  # the parent of /dev, /proc and /sys
_NVIDIA = "0x10de"  # the vendor in a PCI id
_DISPLAY = "0x03"  # the class of GPUs
_ALIASES = {  # names that torch, Hugging Face and vLLM use
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the device to run on; the default is the first available one of cuda, mps and cpu.

    Under torchrun each rank takes the GPU with the index LOCAL_RANK. No rank takes mps, as ranks
    could not exchange tensors there.

    Raises:
        ValueError: the device does not exist or cannot be used; or none is asked for, and torch
            cannot use the NVIDIA GPU of this machine. A large model would run on the CPU instead,
            a hundred times as slowly.
    """
    num_ranks = torchrun_number("WORLD_SIZE")
    if device is None:
        has_mps = num_ranks == 1 and torch.backends.mps.is_available()
        device = "mps" if has_mps else "cpu"
        if torch.cuda.is_available():
            device = "cuda"
        elif (reason := _unusable_gpu()) is not None:
            raise ValueError(
                f"this machine has an NVIDIA GPU, but torch cannot use it: {reason}. Install a "
                "driver and a torch with CUDA that fit each other (`llama doctor` tests them), "
                "give a container its GPUs, or choose the CPU: device='cpu'"
            )
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = torch.device("meta")
    if chosen.type not in ("cuda", "mps", "cpu"):
        text = f"={device!r} is not a device: use 'cuda', 'mps' or 'cpu'"
        raise FieldError.of("device", text)
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise FieldError.of(
            "device", f"={device!r}, but torch finds no Apple GPU: use device='cpu'"
        )
    if chosen.type == "mps" and num_ranks > 1:
        raise FieldError.of(
            "device",
            f"={device!r} works in one process only, and torchrun started {num_ranks}: "
            "use device='cpu', or start one process",
        )
    return _pick_gpu(chosen) if chosen.type == "cuda" else chosen


def _unusable_gpu() -> str | None:
    """Return why torch does not find the NVIDIA GPU of this machine; None where there is none.

    That is so with a driver that is too old for the CUDA that torch was built with. A GPU that is
    hidden from this process on purpose does not count.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    is_hidden |= os.environ.get("NVIDIA_VISIBLE_DEVICES") in ("none", "void")
    if is_hidden or not _has_nvidia_gpu():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return f"torch {torch.__version__} with CUDA {torch.version.cuda} finds none"


def _has_nvidia_gpu() -> bool:
    """Return whether the kernel shows an NVIDIA GPU: with its driver, or on the PCI bus without."""
    has_driver = any(_ROOT.glob("dev/nvidia[0-9]*")) or any(_ROOT.glob("proc/driver/nvidia/gpus/*"))
    return has_driver or any(map(_is_nvidia_gpu, _ROOT.glob("sys/bus/pci/devices/*")))


def _is_nvidia_gpu(device: Path) -> bool:
    """Return whether a device of the PCI bus is an NVIDIA GPU that no virtual machine has."""
    try:
        kind = (device / "vendor").read_text().strip(), (device / "class").read_text()[:4]
        return kind == (_NVIDIA, _DISPLAY) and (device / "driver").resolve().name != "vfio-pci"
    except OSError:
        return False


def shares_gpu() -> bool:
    """Return whether ranks of this machine may share a GPU, for tests: LLAMA_SHARE_GPU=1."""
    return os.environ.get("LLAMA_SHARE_GPU") == "1"


def _ranks_on_gpu() -> int:
    """Return how many ranks of this machine the GPU of this one has."""
    if not shares_gpu():
        return 1
    return -(-torchrun_number("LOCAL_WORLD_SIZE") // torch.cuda.device_count())


def _pick_gpu(device: torch.device) -> torch.device:
    """Return the GPU of this rank with its index; the ranks of a machine must not share a GPU."""
    if not torch.cuda.is_available():
        raise FieldError.of("device", f"='{device}', but torch finds no CUDA GPU: use device='cpu'")
    count = torch.cuda.device_count()
    rank = torchrun_number("LOCAL_RANK")
    if shares_gpu():
        return torch.device("cuda", rank % count if device.index is None else device.index)
    # Slurm, for example, shows each task one GPU of its own, which has the index 0 in every task.
    is_task = "CUDA_VISIBLE_DEVICES" in os.environ and "LLAMA_LAUNCHER" not in os.environ
    one_per_task = count == 1 and is_task
    num_local = torchrun_number("LOCAL_WORLD_SIZE")
    if device.index is not None and num_local > 1 and not one_per_task:
        raise FieldError.of(
            "device",
            f"='{device}' would put the {num_local} ranks of this machine on one GPU: "
            "use device='cuda', and each rank takes its own",
        )
    index = device.index
    if index is None:
        index = 0 if one_per_task else rank
    max_index = index if one_per_task else max(index, num_local - 1)  # the same on every rank
    if max_index >= count:
        raise ValueError(
            f"this machine needs GPU {max_index}, but torch finds {count}, numbered from 0: start "
            "fewer ranks (--ranks; --nproc_per_node of torchrun), or name another device"
        )
    return torch.device("cuda", index)


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype of the model.

    The default, and "auto", is bf16 if the device supports it, else fp16.

    Raises:
        ValueError: There is no such dtype, or the device lacks it.
    """
    if dtype is None or dtype == "auto":
        return torch.bfloat16 if missing_bf16(device) is None else torch.float16
    chosen = (DTYPES | _ALIASES).get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        names = ", ".join([*DTYPES, *_ALIASES, "auto"])
        raise FieldError.of("dtype", f"={dtype!r}: give one of {names}, or None")
    if chosen is torch.bfloat16 and (reason := missing_bf16(device)) is not None:
        raise FieldError.of("dtype", f"={dtype!r}, but {reason}: use dtype='fp16', or leave it out")
    return chosen


def missing_bf16(device: torch.device) -> str | None:
    """Return why a device cannot multiply in bf16; None where it can.

    CUDA GPUs multiply bf16 in hardware from compute capability 8.0 (Ampere) on. torch emulates it
    on older ones, slowly, and some of its operators refuse it there.
    """
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 8:
        return None
    return f"this GPU has no bf16 (compute capability {major}.{minor}, where bf16 needs 8.0)"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in DTYPES."""
    return next(name for name, value in DTYPES.items() if value is dtype)


def current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make `device` the current device in a block, for kernels that take no tensor."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def nccl_version() -> tuple[int, ...] | None:
    """Return the version of NCCL that torch calls, such as (2, 30, 7); None where it has none."""
    try:
        found: tuple[int, ...] = torch.cuda.nccl.version()[:3]
    except AttributeError:  # a torch without CUDA
        return None
    return found


def part_of_machine(shares: Sequence[int] = ()) -> Fraction:
    """Return the part of the cores and of the memory of its machine that this rank may use.

    Args:
        shares: The relative share of each rank of a model-parallel group; empty: they are equal.
    """
    num_local = torchrun_number("LOCAL_WORLD_SIZE")
    if not shares:
        return Fraction(1, num_local)
    rank = torchrun_number("RANK")
    first = rank - torchrun_number("LOCAL_RANK")
    local_shares = [shares[i % len(shares)] for i in range(first, first + num_local)]
    return Fraction(shares[rank % len(shares)], sum(local_shares))


def free_bytes(device: torch.device, shares: Sequence[int] = ()) -> int:
    """Return the number of bytes that this process can still allocate on `device`.

    Memory that torch's allocator keeps counts as free. Host memory is divided among the ranks of
    the machine, and limited by control groups and by the address space of a process (ulimit -v).
    The memory of a GPU that ranks share is divided, too.

    Args:
        device: The device.
        shares: As for `part_of_machine`.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free_gpu_bytes(device) + kept
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free = min(_available_memory(), _cgroup_headroom())
    return min(int(free // _num_servers() * part_of_machine(shares)), _address_space_left())


def free_gpu_bytes(device: torch.device) -> int:
    """Return this process's part of the bytes of a GPU that its driver counts as free."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free // _ranks_on_gpu()


def free_unused(device: torch.device) -> None:
    """Return to a GPU's driver the memory of models that this process no longer uses.

    A `Llama` that was dropped is part of reference cycles, which Python collects some time later.
    What torch's allocator keeps is for this process alone, and the driver does not count it as
    free. Nothing is done where the process has no GPU memory.
    """
    if device.type == "cuda" and torch.cuda.memory_reserved(device):
        gc.collect()
        torch.cuda.empty_cache()


def _address_space_left() -> int:
    """Return the bytes that this process can still map, under the limit that `ulimit -v` sets."""
    import resource  # absent on Windows; this module is imported everywhere

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _text(Path("/proc/self/statm")).split()
    if limit == resource.RLIM_INFINITY or not pages:
        return _NO_LIMIT
    return max(0, limit - int(pages[0]) * resource.getpagesize())


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Run `work` on a GPU, and return the most bytes that it had allocated at once."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


def _available_memory() -> int:
    """Return the available bytes of the machine: MemAvailable, or without Linux half of all."""
    entries = _text(Path("/proc/meminfo")).split()
    if "MemAvailable:" in entries:
        return int(entries[entries.index("MemAvailable:") + 1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def set_num_threads(shares: Sequence[int] = ()) -> None:
    """Set torch's number of threads to the cores that this rank may use.

    A choice of the user stays: OMP_NUM_THREADS, unless torchrun has set it to 1, or a smaller
    number by torch.set_num_threads. Processes that are forked later have one thread.

    Args:
        shares: As for `part_of_machine`.
    """
    _fork_to_one_thread()
    chosen = os.environ.get("OMP_NUM_THREADS")
    num_threads = torch.get_num_threads()
    cores = available_cores(shares)
    set_by_torchrun = chosen == "1" and num_threads == 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if set_by_torchrun or (chosen is None and num_threads > cores):
        torch.set_num_threads(cores)


@functools.cache
def _fork_to_one_thread() -> None:
    """Let forked processes use one thread: they would wait forever for OpenMP's other threads."""
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))


def available_cores(shares: Sequence[int] = ()) -> int:
    """Return the number of cores for this rank: its share of the machine's, at least 1.

    Args:
        shares: As for `part_of_machine`.
    """
    return max(1, int(machine_cores() * part_of_machine(shares)))


def machine_cores() -> int:
    """Return the number of cores for all ranks of this server on this machine.

    Both the CPU affinity, which is that of the server, and the quota of the control groups, which
    all servers share, limit it.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(cores, max(1, _cgroup_cores() // _num_servers()))


def _num_servers() -> int:
    """Return the number of servers that share this machine: see `llama serve --replicas`."""
    text = os.environ.get("LLAMA_LOCAL_SERVERS", "1")
    return whole_number("LLAMA_LOCAL_SERVERS", int(text) if text.isdecimal() else text, 1, 1024)


# --- control groups: the limits of a container, a systemd unit or a batch job (cgroups(7)) ---

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")  # the mount point in systemd and containers
_NO_LIMIT = 1 << 62


def cgroup_folders(controller: str) -> list[Path]:
    """Return the folders of this process's control groups, for v1 and v2.

    They begin with the process's own group and end at the mounted root; the limits of all of them
    apply. In a container some of the folders may not exist.
    """
    folders: list[Path] = []
    for line in _text(_OWN_GROUPS).splitlines():  # "4:memory:/a/b" in v1, "0::/a/b" in v2
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _GROUPS / controller if controllers else _GROUPS
        own = root / path.lstrip("/")
        folders += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return folders


def _cgroup_headroom() -> int:
    """Return the bytes left under the lowest memory limit of this process's control groups."""
    headroom = _NO_LIMIT
    for folder in cgroup_folders("memory"):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        if not limit or not used or limit.strip() == "max":
            continue
        entries = _text(folder / "memory.stat").split()
        stat = dict(zip(entries[::2], entries[1::2], strict=True))
        # The kernel drops cached pages of files before it refuses memory. Only the "total_" counts
        # of v1 include the groups below.
        cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        headroom = min(headroom, int(limit) - int(used) + cached)
    return max(0, headroom)


def _cgroup_cores() -> int:
    """Return the lowest CPU quota of this process's control groups, in cores, rounded up."""
    cores = _NO_LIMIT
    for folder in cgroup_folders("cpu"):
        # For two cores v2 has "200000 100000" in one file; v1 has one file per number.
        quota = (_text(folder / "cpu.max") or _text(folder / "cpu.cfs_quota_us")).split()
        period = quota[1:] or _text(folder / "cpu.cfs_period_us").split()
        if quota and quota[0] not in ("max", "-1"):
            cores = min(cores, -(-int(quota[0]) // int(period[0])))
    return cores


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not Linux, or no such group
        return ""
