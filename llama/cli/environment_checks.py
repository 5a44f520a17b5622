"""What of a machine and its settings stops ranks, or slows them: shared memory, cores, names.

In: the environment's variables and what the system says of itself. Out: facts for `llama doctor`,
of which the problems say the remedy. It must not know models.
"""

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from llama.ranks.groups import check_interfaces

_MIB = 2**20
_MIN_SHM = 64 * _MIB  # Docker's default, of which nothing is in use
_MIN_SHM_GPUS = 512 * _MIB  # NCCL takes some MiB for each pair of GPUs of a machine


class Fact(NamedTuple):
    """One line of the report."""

    name: str
    text: str
    problem: bool = False


def problem(name: str, text: str) -> Fact:
    """What must be mended; the text has the remedy."""
    return Fact(name, text, True)


def environment_facts(environ: Mapping[str, str], *, gpus: int = 0) -> Iterator[Fact]:
    """The facts of this machine, for the ranks that `environ`'s variables describe."""
    num_local = _number(environ, "LOCAL_WORLD_SIZE")
    is_launched = {"WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= environ.keys()
    is_several = is_launched and _number(environ, "WORLD_SIZE") >= 2 * max(1, num_local)
    yield from _shared_memory(Path("/dev/shm"), num_local, gpus)
    yield _host_name(matters=is_several and "GLOO_SOCKET_IFNAME" not in environ)
    try:
        check_interfaces(environ.get("GLOO_SOCKET_IFNAME"))
    except ValueError as e:
        yield problem("interface", str(e))


def thread_facts(environ: Mapping[str, str], cores: int) -> Iterator[Fact]:
    """`cores`: what the processes of this machine may use, by affinity and CPU quota together."""
    num_local = _number(environ, "LOCAL_WORLD_SIZE")
    installed = os.cpu_count() or 1
    if cores == 1 and installed > 1:
        yield problem(
            "cores",
            f"the quota or affinity of this process is one core of {installed}: raise the CPU "
            "limit of the container or job, as every thread of every rank shares that core",
        )
    elif cores < num_local:
        yield problem(
            "cores",
            f"{num_local} ranks share {cores} cores: a rank that waits for a core holds up all "
            "others; start no more ranks than cores",
        )
    chosen = environ.get("OMP_NUM_THREADS", "1")
    if not chosen.isdecimal() or not int(chosen):
        yield problem("threads", f"OMP_NUM_THREADS={chosen!r} is not a number from 1 on")
    elif int(chosen) > 1 and int(chosen) * num_local > cores:
        yield problem(
            "threads",
            f"OMP_NUM_THREADS={chosen} for {num_local} rank{'s' * (num_local > 1)} on {cores} "
            f"cores: threads wait for one another; unset it, or give {max(1, cores // num_local)}",
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "1")
    return int(text) if text.isdecimal() else 1  # `started_processes` tells of a wrong one


def _shared_memory(folder: Path, num_local: int, gpus: int) -> Iterator[Fact]:
    """Ranks of one machine exchange tensors here, and so do NCCL's."""
    if not folder.is_dir():
        return
    needed = _MIN_SHM_GPUS if gpus > 1 and num_local > 1 else _MIN_SHM
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {free / _MIB:,.0f} MiB free"
    if free < needed:
        text += (
            f", and ranks of one machine want {needed // _MIB}: docker run --shm-size 1g, in "
            "Kubernetes an emptyDir with medium Memory there, else mount -o remount,size=1g "
            f"{folder}"
        )
    yield Fact("shm", text, problem=free < needed)


def _host_name(*, matters: bool) -> Fact:
    """gloo listens on the address of the host's name, unless an interface is named."""
    name = socket.gethostname()
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
        text = f"{name} resolves to {', '.join(found)}"
        is_wrong = all(address.startswith(("127.", "::1")) for address in found)
        wrong = ", which no other machine can reach"
    except OSError as e:
        text, is_wrong, wrong = f"{name} does not resolve ({e.strerror or e})", True, ""
    if not (matters and is_wrong):
        return Fact("host", text)
    return problem(
        "host",
        f"{text}{wrong}: set GLOO_SOCKET_IFNAME to the interface that the machines share, or "
        "mend /etc/hosts",
    )
