"""How many threads a process on the CPU uses: its share of the cores that it was given.

In: what the system and torchrun say. Out: torch's number of threads, set where nobody chose it.
"""

import os
from pathlib import Path

import torch

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: "200000 100000" is two cores' time


def settle_threads() -> None:
    """Divide the cores among the ranks of this machine, and use no more than a container's share.

    What the user chose stays: OMP_NUM_THREADS, or fewer by torch.set_num_threads. torchrun gives
    every rank OMP_NUM_THREADS=1 where the user gave none, which is nobody's choice.
    """
    chosen, now, share = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads(), own_cores()
    torchruns = chosen == "1" and now == 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if torchruns or (chosen is None and now > share):
        torch.set_num_threads(share)


def own_cores() -> int:
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
