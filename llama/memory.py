"""How much memory is free, and how many sequences fit it: bytes in, sizes or an error out."""

import os
from pathlib import Path

import torch

_SHARE = 0.9  # of what is free: activations and the allocator's slack need the rest
DEFAULT_SEQ_LEN, DEFAULT_BATCH_SIZE = 8192, 32  # what is aimed at where the user says nothing


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


def fit(
    *,
    free: int,
    weights: int,
    per_token: int,
    longest: int,
    max_seq_len: int | None,
    max_batch_size: int | None,
) -> tuple[int, int]:
    """(max_seq_len, max_batch_size), chosen where None, for keys and values beside the weights.

    All sizes are bytes, of one rank; `per_token` is what one token's keys and values take, and
    `longest` the model's own limit in tokens. ValueError if what was asked for does not fit: it
    says what would.
    """
    room = int(free * _SHARE) - weights
    seq_len = max_seq_len or min(longest, DEFAULT_SEQ_LEN)
    if max_seq_len is None:
        while seq_len > 256 and seq_len * per_token * (max_batch_size or 1) > room:
            seq_len //= 2
    fits = max(room, 0) // (seq_len * per_token)
    batch_size = max_batch_size or max(1, min(DEFAULT_BATCH_SIZE, fits))
    if batch_size > fits:
        raise ValueError(
            f"the weights take {_gib(weights)} and the keys and values of max_batch_size="
            f"{batch_size} x max_seq_len={seq_len} take {_gib(batch_size * seq_len * per_token)}, "
            f"but {_gib(free)} are free on each rank's device: {_advice(room, per_token, seq_len)}"
        )
    return seq_len, batch_size


def _advice(room: int, per_token: int, seq_len: int) -> str:
    tokens = max(room, 0) // per_token
    if tokens >= seq_len:
        return f"max_batch_size={tokens // seq_len} would fit"
    if tokens >= 64:
        return f"max_batch_size=1 with max_seq_len={tokens // 64 * 64} would fit"
    return "use more ranks, a smaller dtype, or a device with more memory"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
