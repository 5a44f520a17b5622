"""What of a machine and its settings stops ranks, or slows them: shared memory, cores, names.

In: the environment's variables and what the system says of itself. Out: facts for `llama doctor`,
of which the problems say the remedy. It must not know models, and does not import torch.
"""

import errno
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_MIB = 2**20
_MIN_SHM = 64 * _MIB  # Docker's default, of which nothing is in use
_MIN_SHM_GPUS = 512 * _MIB  # NCCL takes some MiB for each pair of GPUs of a machine
_CONNECT_S = 5.0


class Fact(NamedTuple):
    """One line of the report."""

    name: str
    text: str
    problem: bool = False


def environment_facts(environ: Mapping[str, str], *, gpus: int = 0) -> Iterator[Fact]:
    """The facts of this machine, for the ranks that `environ`'s variables describe."""
    num_local = _number(environ, "LOCAL_WORLD_SIZE")
    machines = _number(environ, "WORLD_SIZE") // max(1, num_local)
    if environ.get("WORLD_SIZE") is None or environ.get("LOCAL_WORLD_SIZE") is None:
        machines = 1
    yield from _shared_memory(Path("/dev/shm"), num_local, gpus)
    yield from _host_name(environ, machines)
    yield from _interfaces(environ)
    yield from _rendezvous(environ)


def thread_facts(environ: Mapping[str, str], cores: int) -> Iterator[Fact]:
    """`cores`: what the processes of this machine may use, by affinity and CPU quota together."""
    num_local = _number(environ, "LOCAL_WORLD_SIZE")
    installed = os.cpu_count() or 1
    if cores == 1 and installed > 1:
        yield Fact(
            "cores",
            f"the quota or affinity of this process is one core of {installed}: raise the CPU "
            "limit of the container or job, as every thread of every rank shares that core",
            problem=True,
        )
    elif cores < num_local:
        yield Fact(
            "cores",
            f"{num_local} ranks share {cores} cores: a rank that waits for a core holds up all "
            "others; start no more ranks than cores",
            problem=True,
        )
    chosen = environ.get("OMP_NUM_THREADS")
    if chosen is None:
        return
    if not chosen.isdecimal() or not int(chosen):
        yield Fact("threads", f"OMP_NUM_THREADS={chosen!r} is not a number from 1 on", problem=True)
    elif int(chosen) > 1 and int(chosen) * num_local > cores:
        yield Fact(
            "threads",
            f"OMP_NUM_THREADS={chosen} for {num_local} rank{'s' * (num_local > 1)} on {cores} "
            f"cores: threads wait for one another; unset it, or give {max(1, cores // num_local)}",
            problem=True,
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


def _host_name(environ: Mapping[str, str], machines: int) -> Iterator[Fact]:
    """gloo listens on the address of the host's name, unless an interface is named."""
    name = socket.gethostname()
    remedy = "set GLOO_SOCKET_IFNAME to the interface that the machines share, or mend /etc/hosts"
    matters = machines > 1 and "GLOO_SOCKET_IFNAME" not in environ
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError as e:
        text = f"{name} does not resolve ({e.strerror or e})"
        yield Fact("host", f"{text}: {remedy}" if matters else text, problem=matters)
        return
    text = f"{name} resolves to {', '.join(found)}"
    local = all(address.startswith(("127.", "::1")) for address in found)
    if matters and local:
        text += f", which no other machine can reach: {remedy}"
    yield Fact("host", text, problem=matters and local)


def _interfaces(environ: Mapping[str, str]) -> Iterator[Fact]:
    names = environ.get("GLOO_SOCKET_IFNAME")
    if names is None:
        return
    present = [name for _, name in socket.if_nameindex()]
    missing = [name for name in names.split(",") if name not in present]
    text = f"GLOO_SOCKET_IFNAME={names}"
    if missing:
        text += f" names no interface of this machine, which has {', '.join(present)}"
    yield Fact("interface", text, problem=bool(missing))


def _rendezvous(environ: Mapping[str, str]) -> Iterator[Fact]:
    """MASTER_ADDR:MASTER_PORT. Under torchrun somebody must listen there; else it must be free.

    So it can be tried before a launch: MASTER_ADDR=host-0 MASTER_PORT=29500 llama doctor
    """
    address, text = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "29500")
    if address is None:
        return
    where, launched = f"{address}:{text}", "WORLD_SIZE" in environ
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        yield Fact("rendezvous", f"MASTER_PORT={text!r} is not a port", problem=True)
        return
    try:
        socket.create_connection((address, int(text)), _CONNECT_S).close()
    except socket.gaierror as e:
        yield Fact("rendezvous", f"{address} does not resolve ({e.strerror})", problem=True)
    except ConnectionRefusedError:
        say = "nobody listens, and no firewall answered for it"
        if launched:
            say = "nobody listens there: is machine 0 up, and MASTER_PORT the same everywhere?"
        elif bound := _bind_error(address, int(text)):
            say = f"it cannot be used: {bound}; choose another --master_port"
        yield Fact("rendezvous", f"{where}: {say}", problem=launched or say.startswith("it cannot"))
    except OSError as e:
        yield Fact(
            "rendezvous",
            f"{where} cannot be reached ({e.strerror or e}): open that port in the firewall, or "
            "give the address that this machine reaches machine 0 by",
            problem=True,
        )
    else:
        taken = "a process listens there already: stop it, or choose another --master_port"
        said = "reached" if launched else taken
        yield Fact("rendezvous", f"{where}: {said}", problem=not launched)


def _bind_error(address: str, port: int) -> str | None:
    """Why this machine cannot listen there; None if it can, or the address is another machine's."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((address, port))
        except OSError as e:
            return None if e.errno == errno.EADDRNOTAVAIL else e.strerror
    return None
