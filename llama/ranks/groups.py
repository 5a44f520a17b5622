"""Makes and leaves the process groups of a job.

In: torchrun's variables (a single process needs none). Out: a `ModelParallel`. A model-parallel
group has consecutive ranks, so that it stays inside of one machine if possible. No other file
imports fairscale. It must not know the model.

The file has over 400 lines, as all ranks must make the same groups in the same order.
"""

import atexit
import contextlib
import functools
import io
import ipaddress
import os
import socket
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from llama.ranks.stage_link import StageGroups, StageLink
from llama.ranks.watch import LATER_S, Watch

_LARGE_SUM_ELEMENTS = 1 << 23  # float32; as many bytes as the sums of a step with 2,048 rows
_P2P_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
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
    model_parallel_size: int | None,
    device: torch.device,
    timeout_s: float,
    pipeline_parallel_size: int = 1,
) -> ModelParallel:
    """Join the process groups that torchrun's variables describe, or make groups of one process.

    On a GPU with several ranks, `device` becomes the current CUDA device of the calling thread.

    Args:
        model_parallel_size: Ranks that share each layer; by default, as many as there are ranks for
            each pipeline stage.
        device: The device whose tensors the groups exchange.
        timeout_s: The limit of each wait for another rank, in seconds.
        pipeline_parallel_size: Pipeline stages that divide the layers.

    Raises:
        ValueError: The sizes do not divide the number of processes, or differ between ranks.
        RankError: A rank did not arrive, or the ranks cannot reach each other.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else started_processes()
    stages = pipeline_parallel_size
    if not _divides(stages, world_size):
        raise FieldError.of(
            "pipeline_parallel_size",
            f"={stages!r} does not divide the {world_size} processes that were started: start a "
            "multiple of it (--ranks; --nproc_per_node of torchrun), or leave it out",
        )
    size = world_size // stages if model_parallel_size is None else model_parallel_size
    if not _divides(size, world_size // stages):
        each = f" for each of {stages} pipeline stages" if stages > 1 else ""
        raise FieldError.of(
            "model_parallel_size",
            f"={size!r} does not divide the {world_size // stages} processes that were started"
            f"{each}: start a multiple of it (--ranks; --nproc_per_node of torchrun), or leave it "
            "out",
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
        return _join(_Sizes(size, stages, world_size), device, timeout_s)


def _divides(size: object, count: int) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0 and count % size == 0


@dataclass(frozen=True)
class _Sizes:
    """The number of ranks in a model-parallel group, of pipeline stages, and of all ranks."""

    group: int
    stages: int
    world: int

    @property
    def copy(self) -> int:
        """The number of ranks that share a copy of the model."""
        return self.group * self.stages

    def pipeline_of(self, rank: int) -> range:
        """Return the ranks that have the index of `rank` in the groups of their stages."""
        first = rank - rank % self.copy + rank % self.group
        return range(first, first + self.copy, self.group)

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank. The first ranks of a copy are the last stage."""
        return self.stages - 1 - rank // self.group % self.stages


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
        with contextlib.redirect_stdout(io.StringIO()):  # fairscale prints to the user's stdout
            fs_init.initialize_model_parallel(1)


def _make_own_fairscale_groups(sizes: _Sizes, limit: timedelta) -> StageGroups | None:
    """Make those of fairscale's groups that this rank belongs to, and those of its stage.

    fairscale's own function makes all groups on all ranks, 17 for eight ranks, of which 16 have one
    rank. Each would be a communicator of nccl, which takes a tenth of a second.
    """
    rank = dist.get_rank()
    first = rank - rank % sizes.group
    alone = _new_group([rank], limit, "gloo")
    with_same_part = range(rank % sizes.copy, sizes.world, sizes.copy)
    pipeline = sizes.pipeline_of(rank)
    fs_init._MODEL_PARALLEL_GROUP = _new_group(range(first, first + sizes.group), limit)
    fs_init._DATA_PARALLEL_GROUP = (
        alone if sizes.copy == sizes.world else _new_group(with_same_part, limit)
    )
    fs_init._PIPELINE_PARALLEL_GROUP = alone if sizes.stages == 1 else _new_group(pipeline, limit)
    fs_init._PIPELINE_PARALLEL_RANKS = list(pipeline)
    if sizes.stages <= 2:  # a pair already
        return None
    group = fs_init.get_pipeline_parallel_group()
    new_group = functools.partial(_new_group, limit=limit)
    return StageGroups.of_pairs(group, sizes.stage_of(rank), new_group)


def _new_group(
    ranks: Sequence[int], limit: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a group of these ranks, which alone call it, once in a process."""
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=limit, backend=backend, use_local_synchronization=True
    )
    return group


def _join(sizes: _Sizes, device: torch.device, timeout_s: float) -> ModelParallel:
    """Meet the other ranks, and make the groups; raise a RankError if either fails."""
    watch = Watch.of_process() or _meet_all(sizes, timeout_s, _gpu_id(device))
    try:
        with watch.waiting("the making of the groups", timeout_s):
            return _make_groups(watch, sizes, device, timeout_s)
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


def _meet_all(sizes: _Sizes, timeout_s: float, gpu: str = "") -> Watch:
    """Wait until all ranks have arrived, and watch them from then on.

    Raises:
        RankError: a rank does not arrive.
        ValueError: the ranks differ in the size of their groups, or two have the same GPU.
    """
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    peers = Peers(rank, sizes.group, gpu, sizes.stages)
    limit = timedelta(seconds=timeout_s + LATER_S)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    first = rank - rank % sizes.copy
    open_store = functools.partial(_open_store, rank=rank, limit=limit)
    rendezvous = Rendezvous(peers, sizes.world, open_store, address, timeout_s)
    watch = Watch(peers, range(first, first + sizes.copy), rendezvous)
    watch.meet()
    if problem := _mismatch(peers.in_order, rank):
        watch.stop()
        raise ValueError(problem)
    return watch


def _mismatch(peers: list[PeerInfo], rank: int) -> str:
    """Return what the ranks that have arrived cannot agree on; an empty text for nothing."""
    own = next(peer for peer in peers if peer.rank == rank)
    other = next((peer for peer in peers if peer.sizes != own.sizes), None)
    if other is not None:
        low, high = sorted([own, other], key=lambda peer: peer.rank)
        name = "model_parallel_size" if own.stages == other.stages else "pipeline_parallel_size"
        values = [x.group_size if own.stages == other.stages else x.stages for x in (low, high)]
        return (
            f"{name} differs: it is {values[0]} on rank {low.rank}, and {values[1]} on rank "
            f"{high.rank} (this is rank {rank}). Give every rank the same"
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
    fd = _listener(host, port) if is_ours else None
    store: Store = TCPStore(
        host,
        port,
        is_master=is_ours,
        timeout=limit,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=fd,
    )
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if count != "0" and on_one_machine:
        store = PrefixStore(f"restart-{count}", store)
    return store


def _listener(host: str, port: int) -> int | None:
    """Return a listening socket for the store of rank 0, or None where torch shall open one.

    torch would listen for IPv6 and IPv4 in one socket. Its store asks for the name of each client
    before it serves the next request, and the address of a client of IPv4 in such a socket is in no
    hosts file: a DNS server that is slow or silent would keep all ranks from meeting.
    """
    if fd := os.environ.pop(STORE_FD, ""):
        return int(fd)
    try:
        address = ipaddress.IPv4Address(host)
        listener = socket.create_server((host if address.is_loopback else "", port))
    except (ValueError, OSError):  # a name; or a port in use, which torch shares or reports
        return None
    return listener.detach()


def _is_one_machine(control: dist.ProcessGroup, size: int) -> bool:
    """Return whether the ranks of a group of several are on one machine.

    They may lack shared memory nevertheless, as on a GH200.
    """
    if size == 1:
        return False
    machines = exchange(control, machine_id().encode(), _INTRODUCTION_BYTES)
    return len({*machines}) == 1


class _Lease:
    """The use of groups by a `ModelParallel` and its copies, which ends with the last of them."""


def _make_groups(
    watch: Watch, sizes: _Sizes, device: torch.device, timeout_s: float
) -> ModelParallel:
    """Make the groups of several ranks: fairscale's, and gloo's for agreement."""
    limit = timedelta(seconds=timeout_s + LATER_S)
    while watch.left_groups:  # not in a finalizer, which may run in the middle of torch's code
        dist.destroy_process_group(watch.left_groups.pop())
    gpu = device if device.type == "cuda" else None
    atexit.register(disconnect)  # a process that ends with its groups may end with SIGABRT
    group = _model_parallel_group(watch, sizes, gpu, limit)
    check_carries(dist.get_backend_config(group), device)
    torch_private.set_timeout(group, limit)
    if gpu:
        _first_sum(group, gpu)
    rank = dist.get_rank()
    # Every rank makes all of these, as torch counts groups to name them, and a later build in the
    # same processes must not find the addresses of an earlier group of the same name.
    with torch_private.without_splits():
        control = _own_of_gloo(sizes.copy, sizes.world, limit)
        # The same ranks as `group`, which may be on nccl, or as `control` without a pipeline.
        group_control = control
        if sizes.stages > 1:
            group_control = _own_of_gloo(sizes.group, sizes.world, limit)
        world = dist.new_group(timeout=limit, backend="gloo")
    one_shot = None
    shared = _share_memory(watch, group_control, limit)
    is_one_machine = _is_one_machine(group_control, sizes.group)
    if is_one_machine and gpu and dist.get_backend(group) == "nccl":
        one_shot = OneShot.join(group, group_control, device)
    message_ring = shared
    link = None
    if sizes.stages > 1:
        message_ring = _share_memory(watch, control, limit)
        link = _link_stages(watch.stage_groups, control, sizes, gpu)
    made = {id(x): x for x in (control, group_control, world)}
    lease = _Lease()
    weakref.finalize(lease, watch.left_groups.extend, list(made.values()))
    return ModelParallel(
        Placement(
            stage=sizes.stage_of(rank),
            stages=sizes.stages,
            rank=fs_init.get_model_parallel_rank(),
            size=sizes.group,
        ),
        data_rank=rank // sizes.copy,
        data_size=sizes.world // sizes.copy,
        timeout_s=timeout_s,
        group=group,
        control=control,
        world=world,
        shared=shared,
        message_ring=message_ring,
        link=link,
        one_shot=one_shot,
        store=watch.rendezvous.store,
        watch=watch,
        lease=lease,
    )


def _own_of_gloo(size: int, world_size: int, limit: timedelta) -> dist.ProcessGroup:
    """Divide all ranks into groups of neighbours on gloo, and return the group of this rank."""
    groups = [
        dist.new_group(list(range(first, first + size)), timeout=limit, backend="gloo")
        for first in range(0, world_size, size)
    ]
    own: dist.ProcessGroup = groups[dist.get_rank() // size]
    return own


def _share_memory(
    watch: Watch, control: dist.ProcessGroup, limit: timedelta
) -> SharedMemory | None:
    """Return the shared memory of a group on gloo; None for one rank, or if they cannot share."""
    names = dist.get_process_group_ranks(control)
    if len(names) == 1:
        return None
    exchange_all = functools.partial(exchange, control, max_bytes=_INTRODUCTION_BYTES)
    rank = names.index(dist.get_rank())
    limit_s = limit.total_seconds()
    return SharedMemory.join(rank, names, exchange_all, limit_s, lambda: watch.is_ending)


def _link_stages(
    groups: StageGroups | None,
    control: dist.ProcessGroup,
    sizes: _Sizes,
    gpu: torch.device | None,
) -> StageLink:
    """Connect a rank to those of the same index in the other stages of its copy of the model."""
    stage = sizes.stage_of(dist.get_rank())
    # Groups that the program has made itself may have other names on each rank.
    groups = groups or StageGroups.shared(fs_init.get_pipeline_parallel_group())
    link = StageLink(groups, control, stage, 2 * sizes.stages)
    if gpu and link.uses_nccl:
        # nccl connects two ranks at their first message, for which both must come.
        x = torch.zeros(1, device=gpu)
        messages = link.new_step()
        if stage:
            x = messages.expect_hidden((1,), x)()
        if stage + 1 < sizes.stages:
            messages.send_hidden(x)
        torch.cuda.synchronize(gpu)
    return link


def _model_parallel_group(
    watch: Watch, sizes: _Sizes, gpu: torch.device | None, limit: timedelta
) -> dist.ProcessGroup:
    """Return fairscale's group of this rank, which may exist already."""
    if not dist.is_initialized():
        os.environ.setdefault(_P2P_WARNING, "false")  # a pair of stages has one direction
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=watch.rendezvous.store,
            rank=int(os.environ["RANK"]),
            world_size=sizes.world,
            timeout=limit,
            device_id=gpu,
        )
    if not fs_init.model_parallel_is_initialized():
        watch.stage_groups = _make_own_fairscale_groups(sizes, limit)
    else:
        _check_fairscale_groups(sizes)
    group: dist.ProcessGroup = fs_init.get_model_parallel_group()
    return group


def _check_fairscale_groups(sizes: _Sizes) -> None:
    """Raise a ValueError if groups that exist already have other sizes."""
    joined = {
        "model_parallel_size": (sizes.group, fs_init.get_model_parallel_world_size()),
        "pipeline_parallel_size": (sizes.stages, len(fs_init.get_pipeline_parallel_ranks())),
    }
    for name, (asked, existing) in joined.items():
        if asked != existing:
            raise ValueError(
                f"{name}={asked}, but this process already joined groups of {existing}: use one "
                "size per process"
            )


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
