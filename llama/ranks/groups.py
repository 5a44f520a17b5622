"""Makes and leaves the process groups of a job.

In: torchrun's variables (a single process needs none). Out: a `ModelParallel`. A model-parallel
group has consecutive ranks, so that it stays inside of one machine if possible. No other file
imports fairscale. It must not know the model.
"""

import atexit
import contextlib
import functools
import io
import os
import socket
import sys
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as fs_init

# torch.distributed exports these two without declaring it, so type checkers look here.
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from llama.checks import FieldError, torchrun_number
from llama.ranks import torch_private
from llama.ranks.collectives import ModelParallel, exchange
from llama.ranks.errors import RankError
from llama.ranks.launch import STORE_FD
from llama.ranks.one_shot import OneShot
from llama.ranks.peers import PeerInfo, Peers
from llama.ranks.placement import Placement
from llama.ranks.processes import machine_id
from llama.ranks.rendezvous import Rendezvous
from llama.ranks.shared_memory import SharedMemory
from llama.ranks.watch import LATER_S, Watch

_LARGE_SUM_ELEMENTS = 1 << 23  # float32; as many bytes as the sums of a step with 2,048 rows
_INTRODUCTION_BYTES = 512  # size of the messages with which ranks set up shared memory


def started_processes() -> int:
    """Return the number of processes that torchrun's variables describe; 1 without variables.

    Raises:
        ValueError: names a variable that is missing or wrong.
    """
    size = torchrun_number("WORLD_SIZE")
    if size == 1:
        return 1
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={size} also needs {', '.join(missing)}: launch with torchrun, or "
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
        RankError: A rank did not arrive, or the ranks cannot reach each other.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else started_processes()
    size = world_size if model_parallel_size is None else model_parallel_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world_size % size:
        raise FieldError.of(
            "model_parallel_size",
            f"={size!r} does not divide the {world_size} processes that were started: start a "
            "multiple of it (--ranks; --nproc_per_node of torchrun), or leave it out",
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
    """Raise a ValueError for an unknown interface in GLOO_SOCKET_IFNAME.

    gloo's own error names no remedy.
    """
    present = [name for _, name in socket.if_nameindex()]
    if names is not None and not set(names.split(",")) <= set(present):
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={names} names no interface of this machine, which has "
            f"{', '.join(present)}: name the one that the machines share, or unset it"
        )


@contextlib.contextmanager
def _loopback_if_alone() -> Iterator[None]:
    """Keep gloo off the network in the block, if all ranks are on this machine."""
    name = "GLOO_SOCKET_IFNAME"  # without it, gloo listens on the address of the host's name
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
    """Make the groups of a single process, which scripts for Meta's build expect.

    torch's backend "fake" behaves as if all ranks sent the same; gloo would need four ports and a
    dozen threads.
    """
    if not dist.is_initialized():
        atexit.register(disconnect)
        backend = "fake" if torch_private.register_fake_backend() else "gloo"
        excepthook = sys.excepthook
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        sys.excepthook = excepthook  # torch's hook would begin each traceback line with "[rank0]:".
    if not fs_init.model_parallel_is_initialized():
        _make_fairscale_groups(1)


def _make_fairscale_groups(size: int) -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # fairscale prints to the user's stdout
        fs_init.initialize_model_parallel(size)


def _make_own_fairscale_groups(size: int, limit: timedelta) -> None:
    """Make those of fairscale's groups that this rank belongs to.

    fairscale's own function makes all groups on all ranks, 17 for eight ranks, of which 16 have one
    rank. Each would be a communicator of nccl, which takes a tenth of a second.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    first = rank - rank % size
    alone = _new_group([rank], limit, "gloo")
    with_same_part = range(rank % size, world_size, size)
    fs_init._MODEL_PARALLEL_GROUP = _new_group(range(first, first + size), limit)
    fs_init._DATA_PARALLEL_GROUP = (
        alone if size == world_size else _new_group(with_same_part, limit)
    )
    fs_init._PIPELINE_PARALLEL_GROUP = alone
    fs_init._PIPELINE_PARALLEL_RANKS = [rank]


def _new_group(
    ranks: Sequence[int], limit: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a group of these ranks, which alone call it, once in a process."""
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=limit, backend=backend, use_local_synchronization=True
    )
    return group


def _join(size: int, world_size: int, device: torch.device, timeout_s: float) -> ModelParallel:
    """Meet the other ranks, and make the groups; raise a RankError if either fails."""
    watch = Watch.of_process() or _meet_all(size, world_size, timeout_s, _gpu_id(device))
    try:
        with watch.waiting("the making of the groups", timeout_s):
            return _make_groups(watch, size, world_size, device, timeout_s)
    except RankError:
        raise
    except RuntimeError as error:
        watch.wait_for_cause()
        if watch.is_ending:  # the error is a consequence of the end of another rank
            watch.join()  # the watch ends this process
        raise RankError(
            f"the ranks have met, but cannot reach each other ({str(error).splitlines()[0]}): open "
            "the ports that the kernel hands out (net.ipv4.ip_local_port_range) between the "
            "machines, or name the interface that they share by GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME"
        ) from error


def _gpu_id(device: torch.device) -> str:
    """Return what identifies this rank's GPU on its machine; empty where ranks may share one.

    nccl refuses that. Groups that a program has made itself may be on gloo.
    """
    if device.type != "cuda" or dist.is_initialized():
        return ""
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", ""))  # torch before 2.4 has none


def _meet_all(size: int, world_size: int, timeout_s: float, gpu: str = "") -> Watch:
    """Wait until all ranks have arrived, and watch them from then on.

    Raises:
        RankError: a rank does not arrive.
        ValueError: the ranks differ in the size of their groups, or two have the same GPU.
    """
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    peers = Peers(rank, size, gpu)
    limit = timedelta(seconds=timeout_s + LATER_S)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    first = rank - rank % size
    open_store = functools.partial(_open_store, rank=rank, limit=limit)
    rendezvous = Rendezvous(peers, world_size, open_store, address, timeout_s)
    watch = Watch(peers, range(first, first + size), rendezvous)
    watch.meet()
    if problem := _mismatch(peers.in_order, rank):
        watch.stop()
        raise ValueError(problem)
    return watch


def _mismatch(peers: list[PeerInfo], rank: int) -> str:
    """Return what the ranks that have arrived cannot agree on; an empty text for nothing."""
    own = next(peer for peer in peers if peer.rank == rank)
    other = next((peer for peer in peers if peer.group_size != own.group_size), None)
    if other is not None:
        low, high = sorted([own, other], key=lambda peer: peer.rank)
        return (
            f"model_parallel_size differs: it is {low.group_size} on rank {low.rank}, and "
            f"{high.group_size} on rank {high.rank} (this is rank {rank}). Give every rank the same"
        )
    rank_of: dict[str, int] = {}
    for peer in peers:
        if peer.gpu and rank_of.setdefault(peer.gpu, peer.rank) != peer.rank:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            return (
                f"ranks {rank_of[peer.gpu]} and {peer.rank} have the same GPU, which nccl refuses "
                f"(CUDA_VISIBLE_DEVICES={visible} on rank {rank}): show the ranks of a machine all "
                "of its GPUs, of which each takes its own, or show each rank another one"
            )
    return ""


def _open_store(rendezvous: Rendezvous, rank: int, limit: timedelta) -> Store:
    """Return the store where the ranks meet.

    It is the store of groups that the program has made, else the one that torchrun's variables
    name: torchrun's own, or that of rank 0. With --max-restarts torchrun keeps its store, which
    then has the addresses of ranks that have ended (pytorch issue 135712), so each start uses keys
    of its own. This works on one machine only, as agents of several machines count their restarts
    separately.
    """
    if dist.is_initialized():
        return torch_private.default_store()
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_ours = rank == 0 and not is_agents
    if not is_ours:
        rendezvous.wait_for_listener((host, port), is_agents)
    fd = os.environ.pop(STORE_FD, "") if is_ours else ""
    store: Store = TCPStore(
        host,
        port,
        is_master=is_ours,
        timeout=limit,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=int(fd) if fd else None,
    )
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if count != "0" and on_one_machine:
        store = PrefixStore(f"restart-{count}", store)
    return store


def _make_groups(
    watch: Watch, size: int, world_size: int, device: torch.device, timeout_s: float
) -> ModelParallel:
    """Make the groups of several ranks: fairscale's, and gloo's for agreement."""
    limit = timedelta(seconds=timeout_s + LATER_S)
    while watch.left_groups:  # not in a finalizer, which may run in the middle of torch's code
        dist.destroy_process_group(watch.left_groups.pop())
    gpu = device if device.type == "cuda" else None
    atexit.register(disconnect)  # a process that ends with its groups may end with SIGABRT
    group = _model_parallel_group(watch, size, world_size, gpu, limit)
    check_carries(dist.get_backend_config(group), device)
    torch_private.set_timeout(group, limit)
    if gpu:
        _first_sum(group, gpu)
    data_rank = dist.get_rank() // size
    data_size = world_size // size
    # Every rank makes all of these, as torch counts groups to name them, and a later build in the
    # same processes must not find the addresses of an earlier group of the same name.
    with torch_private.without_splits():
        controls = [
            dist.new_group(list(range(i * size, (i + 1) * size)), timeout=limit, backend="gloo")
            for i in range(data_size)
        ]
        world = dist.new_group(timeout=limit, backend="gloo")
    control = controls[data_rank]
    rank = fs_init.get_model_parallel_rank()
    shared = None
    one_shot = None
    if size > 1:
        names = dist.get_process_group_ranks(control)
        exchange_all = functools.partial(exchange, control, max_bytes=_INTRODUCTION_BYTES)
        limit_s = limit.total_seconds()
        shared = SharedMemory.join(rank, names, exchange_all, limit_s, lambda: watch.is_ending)
        # Ranks of one machine may lack shared memory, as on a GH200.
        is_one_machine = len({*exchange_all(machine_id().encode())}) == 1
        if is_one_machine and gpu and dist.get_backend(group) == "nccl":
            one_shot = OneShot.join(group, control, device)
    parallel = ModelParallel(
        Placement(rank=rank, size=size),
        data_rank,
        data_size,
        timeout_s,
        group=group,
        control=control,
        world=world,
        shared=shared,
        one_shot=one_shot,
        store=watch.rendezvous.store,
        watch=watch,
    )
    weakref.finalize(parallel, watch.left_groups.extend, [control, world])
    return parallel


def _model_parallel_group(
    watch: Watch, size: int, world_size: int, gpu: torch.device | None, limit: timedelta
) -> dist.ProcessGroup:
    """Return fairscale's group of this rank, which may exist already."""
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=watch.rendezvous.store,
            rank=int(os.environ["RANK"]),
            world_size=world_size,
            timeout=limit,
            device_id=gpu,
        )
    if not fs_init.model_parallel_is_initialized():
        _make_own_fairscale_groups(size, limit)
    elif fs_init.get_model_parallel_world_size() != size:
        raise ValueError(
            f"model_parallel_size={size}, but this process already joined groups of "
            f"{fs_init.get_model_parallel_world_size()}: use one size per process"
        )
    group: dist.ProcessGroup = fs_init.get_model_parallel_group()
    return group


def _first_sum(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let nccl allocate the buffers of a group, up to a GiB, before memory is measured."""
    for count in (1, _LARGE_SUM_ELEMENTS):
        dist.all_reduce(torch.zeros(count, device=device), group=group)


def check_carries(backends: str, device: torch.device) -> None:
    """Raise a ValueError if groups with these backends cannot exchange tensors of the device."""
    if device.type not in {part.split(":")[0] for part in backends.split(",")}:
        raise ValueError(
            f"device='{device}', but this process joined process groups that carry other tensors "
            f"({backends}): choose a device of theirs, or call init_process_group with "
            f"'{'nccl' if device.type == 'cuda' else 'gloo'}'"
        )


def disconnect() -> None:
    """Leave the groups, so that torch does not report a leak when the process ends."""
    watch = Watch.of_process()
    if watch is not None:
        watch.stop()
    if dist.is_initialized():
        fs_init.destroy_model_parallel()
        dist.destroy_process_group()
