"""What of a machine and its settings stops ranks, or slows them: shared memory, cores, names.

In: the environment's variables and what the system says of itself. Out: facts for `llama doctor`,
of which the problems say the remedy. It must not know models.
"""

import errno
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
_CONNECT_S = 5.0


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
    if "MASTER_ADDR" in environ:
        yield _rendezvous(environ["MASTER_ADDR"], environ)


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


def _rendezvous(address: str, environ: Mapping[str, str]) -> Fact:
    """MASTER_ADDR:MASTER_PORT. Under torchrun somebody must listen there; else it must be free.

    So it can be tried before a launch: MASTER_ADDR=host-0 MASTER_PORT=29500 llama doctor
    """
    port, launched, wrong = environ.get("MASTER_PORT", "29500"), "WORLD_SIZE" in environ, ""
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        return problem("rendezvous", f"MASTER_PORT={port!r} is not a port")
    try:
        socket.create_connection((address, int(port)), _CONNECT_S).close()
        if not launched:
            wrong = ": a process listens there already: stop it, or choose another --master_port"
    except socket.gaierror as e:
        wrong = f" does not resolve ({e.strerror})"
    except ConnectionRefusedError:
        if launched:
            wrong = ": nobody listens there: is machine 0 up, and MASTER_PORT the same everywhere?"
        elif bound := _bind_error(address, int(port)):
            wrong = f": it cannot be used: {bound}; choose another --master_port"
    except OSError as e:
        wrong = (
            f" cannot be reached ({e.strerror or e}): open that port in the firewall, or give the "
            "address that this machine reaches machine 0 by"
        )
    fine = ": reached" if launched else ": nobody listens, and no firewall answered for it"
    return Fact("rendezvous", f"{address}:{port}{wrong or fine}", problem=bool(wrong))


def _bind_error(address: str, port: int) -> str | None:
    """Why this machine cannot listen there; None if it can, or the address is another machine's."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((address, port))
        except OSError as e:
            return None if e.errno == errno.EADDRNOTAVAIL else e.strerror
    return None
