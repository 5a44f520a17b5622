"""The devices of each replica: its GPUs, or its cores of the CPU.

In: the number of replicas and of their ranks, and what this machine has. Out: a `Share` for each
replica. torch is asked in a process of its own, so that the process that starts replicas stays
small and has one thread.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llama.cli.flags import UsageError

# The variable that tells a server how many of them share this machine; see `llama.common.device`.
NUM_SERVERS = "LLAMA_LOCAL_SERVERS"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# A driver of GPUs makes one of these files: NVIDIA's, AMD's, that of WSL.
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
_COUNT_S = 120.0  # time limit of importing torch from a cold disk
_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Share:
    """The part of the machine that one replica may use.

    Attributes:
        variables: Environment variables of the replica.
        cores: The numbers of its CPUs; None for all.
    """

    variables: dict[str, str] = field(default_factory=dict)
    cores: frozenset[int] | None = None


def shares(num_replicas: int, num_ranks: int, device: str | None) -> list[Share]:
    """Return the share of each replica.

    Args:
        num_replicas: Number of replicas.
        num_ranks: Ranks of each replica, which take a GPU each.
        device: The flag --device.

    Raises:
        UsageError: There are too few GPUs, or the device names one of them.
    """
    machine = {NUM_SERVERS: str(num_replicas)}
    num_gpus = _num_gpus() if device is None or device.startswith("cuda") else 0
    if not num_gpus:
        return [Share(machine, cores) for cores in _divide_cores(num_replicas)]
    if device not in (None, "cuda"):
        raise UsageError(
            f"--device {device} would put all replicas on one GPU: leave it out, and each replica "
            "takes GPUs of its own"
        )
    if num_replicas * num_ranks > num_gpus:
        raise UsageError(
            f"--replicas {num_replicas} with {num_ranks} rank{'s' * (num_ranks > 1)} each need "
            f"{num_replicas * num_ranks} GPUs, and torch finds {num_gpus}: give fewer replicas or "
            "ranks (--ranks)"
        )
    names = _gpu_names(num_gpus)
    return [
        Share(machine | {_VISIBLE: ",".join(names[i * num_ranks : (i + 1) * num_ranks])})
        for i in range(num_replicas)
    ]


def _num_gpus() -> int:
    """Return the number of GPUs that torch finds here."""
    if not any(map(os.path.exists, _DRIVER_FILES)):
        return 0
    command = [sys.executable, "-P", "-c", _COUNT_GPUS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_S, check=False)
    return int(done.stdout) if done.stdout.strip().isdecimal() else 0


def _gpu_names(num_gpus: int) -> list[str]:
    """Return the names of the GPUs that this process may use: their indices, or what is set."""
    visible = os.environ.get(_VISIBLE)
    if visible is None:
        return [str(i) for i in range(num_gpus)]
    return [name.strip() for name in visible.split(",")][:num_gpus]


def _divide_cores(num_replicas: int) -> Sequence[frozenset[int] | None]:
    """Return the cores of each replica, those of one NUMA node together."""
    if not hasattr(os, "sched_getaffinity"):
        return [None] * num_replicas
    cores = sorted(os.sched_getaffinity(0), key=_position)
    if num_replicas > len(cores):
        return [frozenset([cores[i % len(cores)]]) for i in range(num_replicas)]
    ends = [i * len(cores) // num_replicas for i in range(num_replicas + 1)]
    return [frozenset(cores[ends[i] : ends[i + 1]]) for i in range(num_replicas)]


def _position(cpu: int) -> tuple[int, int, int]:
    """Return the NUMA node of a CPU, the first CPU of its core, and the CPU itself."""
    siblings = []
    with contextlib.suppress(OSError):
        siblings = parse_cpus((_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text())
    return (_node_of(cpu), min(siblings, default=cpu), cpu)


def _node_of(cpu: int) -> int:
    for folder in (_CPUS / f"cpu{cpu}").glob("node[0-9]*"):
        return int(folder.name.removeprefix("node"))
    return 0


def num_nodes() -> int:
    """Return the number of NUMA nodes of this machine, which have memory of their own."""
    return max(1, len(list(_NODES.glob("node[0-9]*"))))


def parse_cpus(text: str) -> list[int]:
    """Return the CPUs of a list of the kernel, such as "0-3,8"."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus
