"""Process groups: from torchrun's variables to groups that are made, and back.

In: the variables (none are needed for one process). Out: a `ModelParallel` of collectives.py. A
model-parallel group is consecutive ranks, so that it stays inside one machine where it can. This
file alone imports fairscale.
"""

import atexit
import contextlib
import functools
import io
import os
import socket
import weakref
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as fs_init

from llama.checks import torchrun_number
from llama.ranks import torch_private
from llama.ranks.collectives import ModelParallel, exchange
from llama.ranks.errors import RankError
from llama.ranks.launch import STORE_FD
from llama.ranks.one_shot import OneShot
from llama.ranks.peers import Peers
from llama.ranks.placement import Placement
from llama.ranks.processes import machine_id
from llama.ranks.rendezvous import Rendezvous
from llama.ranks.shared_memory import SharedMemory
from llama.ranks.watch import LATER_S, Watch

_MANY = 1 << 23  # float32 numbers: as many bytes as a step's sums have, of 2,048 rows
_INTRODUCTION_BYTES = 512  # what a rank says of itself when ranks share memory


def started_processes() -> int:
    """The processes that torchrun's variables describe, or 1. ValueError names one that is missing
    or wrong."""
    size = torchrun_number("WORLD_SIZE")
    if size == 1:
        return 1
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={size} needs {', '.join(missing)} beside it: launch with torchrun, or "
            "unset WORLD_SIZE for one process"
        )
    local_size = torchrun_number("LOCAL_WORLD_SIZE", size + 1)
    torchrun_number("LOCAL_RANK", local_size if "LOCAL_WORLD_SIZE" in os.environ else size)
    torchrun_number("RANK", size)
    torchrun_number("MASTER_PORT", 2**16)
    return size


def connect(
    model_parallel_size: int | None, device: torch.device, timeout_s: float
) -> ModelParallel:
    """Join the process groups that torchrun's variables describe, or make groups of one process.

    On a GPU with several ranks, `device` becomes the current CUDA device of the calling thread.

    Args:
        model_parallel_size: Ranks that share one copy of the model; all of them by default.
        device: The device whose tensors the groups exchange.
        timeout_s: The limit of each wait for another rank, in seconds.

    Raises:
        ValueError: The size does not divide the number of processes, or differs between ranks.
        RankError: A rank did not come, or the ranks cannot reach each other.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else started_processes()
    size = world_size if model_parallel_size is None else model_parallel_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world_size % size:
        raise ValueError(
            f"model_parallel_size={size!r} does not divide the {world_size} processes that were "
            "started: start a multiple of it (--ranks; --nproc_per_node of torchrun), or leave it "
            "out"
        )
    if world_size == 1:
        _join_alone()
        return ModelParallel()
    check_interfaces(os.environ.get("GLOO_SOCKET_IFNAME"))
    if device.type == "cuda":
        # Kernels and collectives launch on the current device of their thread. torch sets it
        # neither for a process group (`device_id=` only binds the group) nor from a tensor in the
        # operators of symmetric memory. Meta's `build` sets it too, and scripts rely on that.
        torch.cuda.set_device(device)
    with _loopback_if_alone():
        return _join(size, world_size, device, timeout_s)


def check_interfaces(names: str | None) -> None:
    """ValueError where GLOO_SOCKET_IFNAME names none: gloo's own error has no remedy."""
    present = [name for _, name in socket.if_nameindex()]
    if names is not None and not set(names.split(",")) <= set(present):
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={names} names no interface of this machine, which has "
            f"{', '.join(present)}: name the one that the machines share, or unset it"
        )


@contextlib.contextmanager
def _loopback_if_alone() -> Iterator[None]:
    """While groups are made: keep gloo off the network where all ranks are on this machine."""
    name = "GLOO_SOCKET_IFNAME"  # gloo would listen on whatever the host's name stands for
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    loopback = next((i for _, i in socket.if_nameindex() if i.startswith("lo")), None)
    if not alone or loopback is None or name in os.environ:
        yield
        return
    os.environ[name] = loopback
    try:
        yield
    finally:
        del os.environ[name]


def _join_alone() -> None:
    """The groups that scripts for Meta's build find, of one process: torch's backend "fake" answers
    as if all ranks sent the same. gloo would take four ports and a dozen threads."""
    if not dist.is_initialized():
        atexit.register(disconnect)
        backend = "fake" if torch_private.register_fake_backend() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not fs_init.model_parallel_is_initialized():
        _make_fairscale_groups(1)


def _make_fairscale_groups(size: int) -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # fairscale prints; stdout is the user's
        fs_init.initialize_model_parallel(size)


def _join(size: int, world_size: int, device: torch.device, timeout_s: float) -> ModelParallel:
    """Meet the other ranks, and make the groups; RankError where they do not come, or connect."""
    watch = Watch.of_process() or _meet_all(size, world_size, timeout_s)
    try:
        with watch.waiting("the making of the groups", timeout_s):
            return _make_groups(watch, size, world_size, device, timeout_s)
    except RankError:
        raise
    except RuntimeError as error:
        watch.wait_for_cause()
        if watch.is_ending:  # it followed from the end of another rank
            watch.join()  # it ends this process
        raise RankError(
            f"the ranks have met, but cannot reach each other ({str(error).splitlines()[0]}): open "
            "the ports that the kernel hands out (net.ipv4.ip_local_port_range) between the "
            "machines, or name the interface that they share by GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME"
        ) from error


def _meet_all(size: int, world_size: int, timeout_s: float) -> Watch:
    """Wait until all ranks have come, and watch them from then on. RankError where one does not
    come, ValueError where they differ in the size of their groups."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    peers, limit = Peers(rank, size), timedelta(seconds=timeout_s + LATER_S)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    first = rank - rank % size
    open_store = functools.partial(_open_store, rank=rank, limit=limit)
    rendezvous = Rendezvous(peers, world_size, open_store, address, timeout_s)
    watch = Watch(peers, range(first, first + size), rendezvous)
    watch.meet()
    other = next((p for p in peers.all.values() if p.group_size != size), None)
    if other is None:
        return watch
    watch.stop()
    low, high = sorted([peers.own, other], key=lambda peer: peer.rank)
    raise ValueError(
        f"model_parallel_size differs: it is {low.group_size} on rank {low.rank}, and "
        f"{high.group_size} on rank {high.rank} (this is rank {rank}). Give every rank the same"
    )


def _open_store(rendezvous: Rendezvous, rank: int, limit: timedelta) -> dist.Store:
    """The store of groups that the program made, else the one that torchrun's variables name:
    torchrun's own, or that of rank 0. With --max-restarts torchrun keeps its store, in which are
    the addresses of ranks that have ended (pytorch issue 135712). So each start has names of its
    own. Agents of several machines count their restarts each for itself."""
    if dist.is_initialized():
        return torch_private.default_store()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_ours = rank == 0 and not is_agents
    if not is_ours:
        rendezvous.wait_for_listener((host, port), is_agents)
    fd = os.environ.pop(STORE_FD, "") if is_ours else ""
    store: dist.Store = dist.TCPStore(
        host, port, is_master=is_ours, timeout=limit, wait_for_workers=False, multi_tenant=True,
        master_listen_fd=int(fd) if fd else None,
    )  # fmt: skip
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if count != "0" and on_one_machine:
        store = dist.PrefixStore(f"restart-{count}", store)
    return store


def _make_groups(
    watch: Watch, size: int, world_size: int, device: torch.device, timeout_s: float
) -> ModelParallel:
    """The groups of a world of several ranks: fairscale's, and gloo's beside them for agreement."""
    limit = timedelta(seconds=timeout_s + LATER_S)
    while watch.left_groups:  # a collector of garbage may run in the middle of torch's code
        dist.destroy_process_group(watch.left_groups.pop())
    store, gpu = watch.rendezvous.store, device if device.type == "cuda" else None
    atexit.register(disconnect)  # or a process whose groups are left can end with SIGABRT
    if not dist.is_initialized():
        backend, rank = "nccl" if gpu else "gloo", int(os.environ["RANK"])
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=gpu
        )
    if not fs_init.model_parallel_is_initialized():
        _make_fairscale_groups(size)
    elif fs_init.get_model_parallel_world_size() != size:
        raise ValueError(
            f"model_parallel_size={size}, but this process already joined groups of "
            f"{fs_init.get_model_parallel_world_size()}: use one size a process"
        )
    group = fs_init.get_model_parallel_group()
    check_carries(dist.get_backend_config(group), device)
    torch_private.set_timeout(group, limit)
    if gpu:
        _first_sum(group, gpu)
    data_rank, data_size = dist.get_rank() // size, world_size // size
    controls = [
        dist.new_group(list(range(i * size, (i + 1) * size)), timeout=limit, backend="gloo")
        for i in range(data_size)
    ]
    world = dist.new_group(timeout=limit, backend="gloo")
    control, rank = controls[data_rank], fs_init.get_model_parallel_rank()
    shared, one_shot = None, None
    if size > 1:
        names = dist.get_process_group_ranks(control)
        meet = functools.partial(exchange, control, most=_INTRODUCTION_BYTES)
        limit_s = limit.total_seconds()
        shared = SharedMemory.join(rank, names, meet, limit_s, lambda: watch.is_ending)
        is_one_machine = len({*meet(machine_id().encode())}) == 1  # a GH200's shares no memory
        if is_one_machine and gpu and dist.get_backend(group) == "nccl":
            one_shot = OneShot.join(group, control, device)
    parallel = ModelParallel(
        Placement(rank=rank, size=size), data_rank, data_size, timeout_s, group, control, world,
        shared, one_shot, store, watch,
    )  # fmt: skip
    weakref.finalize(parallel, watch.left_groups.extend, [control, world])
    return parallel


def _first_sum(group: dist.ProcessGroup, device: torch.device) -> None:
    """nccl makes a group's buffers, up to a GiB, at its first sums: before memory is measured."""
    for count in (1, _MANY):
        dist.all_reduce(torch.zeros(count, device=device), group=group)


def check_carries(backends: str, device: torch.device) -> None:
    """ValueError where groups with these backends cannot exchange tensors of the device."""
    if device.type not in {part.split(":")[0] for part in backends.split(",")}:
        raise ValueError(
            f"device='{device}', but this process joined process groups that carry other tensors "
            f"({backends}): choose a device of theirs, or init_process_group with "
            f"'{'nccl' if device.type == 'cuda' else 'gloo'}'"
        )


def disconnect() -> None:
    """Leave the groups, so that torch does not complain of a leak when the process ends."""
    watch = Watch.of_process()
    if watch is not None:
        watch.stop()
    if dist.is_initialized():
        fs_init.destroy_model_parallel()
        dist.destroy_process_group()
