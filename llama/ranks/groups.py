"""Makes and leaves the process groups of a job.

In: the sizes of the groups (world.py), and ranks that have met (meeting.py). Out: a
`ModelParallel`, or a `Parallel` for a single process. A model-parallel group has consecutive ranks,
so that it stays inside of one machine if possible. All ranks make the same groups in the same
order. No other file imports fairscale. It must not know the model.
"""

import atexit
import contextlib
import functools
import io
import os
import sys
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as fs_init

# torch.distributed exports it without declaring it, so type checkers look here.
from torch._C._distributed_c10d import HashStore

from llama.common.checks import FieldError
from llama.common.device import shares_gpu
from llama.kernels.cpu import native
from llama.ranks import torch_private
from llama.ranks.collectives import ModelParallel, exchange
from llama.ranks.meeting import meet_all
from llama.ranks.one_shot import OneShot
from llama.ranks.parallel import Parallel, RankError
from llama.ranks.placement import Placement
from llama.ranks.processes import machine_id
from llama.ranks.rendezvous import SILENCE_S
from llama.ranks.shared_memory import SharedMemory
from llama.ranks.stage_link import StageGroups, StageLink
from llama.ranks.watch import LATER_S, Watch
from llama.ranks.world import GroupSizes, check_interfaces, loopback_if_alone, started_processes

_LARGE_SUM_ELEMENTS = 1 << 23  # float32; as many bytes as the sums of a step with 2,048 rows
_P2P_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
_INTRODUCTION_BYTES = 512  # size of the messages with which ranks set up shared memory


def connect(
    model_parallel_size: int | None,
    device: torch.device,
    timeout_s: float,
    pipeline_parallel_size: int = 1,
    silence_s: float = SILENCE_S,
    *,
    allows_one_shot: bool = True,
) -> Parallel:
    """Join the process groups that torchrun's variables describe, or make groups of one process.

    On a GPU with several ranks, `device` becomes the current CUDA device of the calling thread.

    Args:
        model_parallel_size: Ranks that share each layer; by default, as many as there are ranks for
            each pipeline stage.
        device: The device whose tensors the groups exchange.
        timeout_s: The limit of each wait for another rank, in seconds.
        pipeline_parallel_size: Pipeline stages that divide the layers.
        silence_s: The silence after which the ranks of another machine are given up, in seconds.
        allows_one_shot: Whether GPUs of a machine may sum by one-shot kernels, see `OneShot`.

    Raises:
        ValueError: The sizes do not divide the number of processes, or differ between ranks.
        RankError: A rank did not arrive, or the ranks cannot reach each other.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else started_processes()
    sizes = GroupSizes.of(world_size, pipeline_parallel_size, model_parallel_size)
    if world_size == 1:
        _join_alone()
        return Parallel()
    check_interfaces(os.environ.get("GLOO_SOCKET_IFNAME"))
    with contextlib.suppress(ValueError):  # a wrong name in a variable: load_model raises it
        native.kernels()  # compiled now, as later the other ranks would wait with a limit
    if device.type == "cuda":
        # Kernels and collectives launch on the current device of their thread. torch sets it
        # neither for a process group (`device_id=` only binds the group) nor from a tensor in the
        # operators of symmetric memory. Meta's `build` sets it too, and scripts rely on that.
        torch.cuda.set_device(device)
    with loopback_if_alone():
        return _join(sizes, device, timeout_s, silence_s, allows_one_shot=allows_one_shot)


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


def _make_fairscale_groups(sizes: GroupSizes, limit: timedelta) -> StageGroups | None:
    """Make fairscale's groups, and those of the pipeline stage of this rank.

    fairscale makes all groups on all ranks: 17 for eight ranks, of which 16 have one rank. These
    are on gloo, where a group takes a millisecond; with nccl it would take a tenth of a second.
    """
    with torch_private.without_splits(), contextlib.redirect_stdout(io.StringIO()):
        fs_init.initialize_model_parallel(
            sizes.group,
            sizes.stages,
            pipeline_backend="gloo" if sizes.stages == 1 else None,
            ddp_backend="gloo" if sizes.copy == sizes.world else None,
        )
    pipeline = fs_init.get_pipeline_parallel_group()
    for group in (pipeline, fs_init.get_data_parallel_group()):
        torch_private.set_timeout(group, limit)
    if sizes.stages <= 2:  # a pair already
        return None
    new_group = functools.partial(_new_group, limit=limit)
    return StageGroups.of_pairs(pipeline, sizes.stage_of(dist.get_rank()), new_group)


def _new_group(ranks: Sequence[int], limit: timedelta) -> dist.ProcessGroup:
    """Make a group of these ranks, which alone call it, once in a process."""
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=limit, use_local_synchronization=True
    )
    return group


def _join(
    sizes: GroupSizes,
    device: torch.device,
    timeout_s: float,
    silence_s: float,
    *,
    allows_one_shot: bool = True,
) -> ModelParallel:
    """Meet the other ranks, and make the groups; raise a RankError if either fails."""
    watch = Watch.of_process() or meet_all(sizes, timeout_s, silence_s, _gpu_id(device))
    watch.rendezvous.silence_s = silence_s
    try:
        with watch.waiting("the making of the groups", timeout_s):
            return _make_groups(watch, sizes, device, timeout_s, allows_one_shot=allows_one_shot)
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

    nccl refuses that, unless it is asked not to. Groups that a program has made itself may be on
    gloo.
    """
    if device.type != "cuda" or dist.is_initialized() or shares_gpu():
        return ""
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", ""))  # torch before 2.4 has none


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
    watch: Watch,
    sizes: GroupSizes,
    device: torch.device,
    timeout_s: float,
    *,
    allows_one_shot: bool,
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
        one_shot = OneShot.join(group, group_control, device, is_allowed=allows_one_shot)
    message_ring = shared
    link = None
    if sizes.stages > 1:
        message_ring = _share_memory(watch, control, limit)
        link = _link_stages(watch.stage_groups, control, sizes, gpu, watch.collective)
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
        spans_machines=sizes.group > 1 and not is_one_machine,
        group=group,
        control=control,
        group_control=group_control,
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
    sizes: GroupSizes,
    gpu: torch.device | None,
    inside: contextlib.AbstractContextManager[None],
) -> StageLink:
    """Connect a rank to those of the same index in the other stages of its copy of the model."""
    stage = sizes.stage_of(dist.get_rank())
    # Groups that the program has made itself may have other names on each rank.
    groups = groups or StageGroups.shared(fs_init.get_pipeline_parallel_group())
    link = StageLink(groups, control, stage, 2 * sizes.stages, inside)
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
    watch: Watch, sizes: GroupSizes, gpu: torch.device | None, limit: timedelta
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
        watch.stage_groups = _make_fairscale_groups(sizes, limit)
    else:
        _check_fairscale_groups(sizes)
    group: dist.ProcessGroup = fs_init.get_model_parallel_group()
    return group


def _check_fairscale_groups(sizes: GroupSizes) -> None:
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
        raise FieldError.of(
            "device",
            f"='{device}', but this process joined process groups that carry other tensors "
            f"({backends}): choose a device of theirs, or call init_process_group with "
            f"'{'nccl' if device.type == 'cuda' else 'gloo'}'",
        )


def disconnect() -> None:
    """Leave the groups, so that torch does not report a leak when the process ends."""
    watch = Watch.of_process()
    if watch is not None:
        watch.stop()
    if dist.is_initialized():
        fs_init.destroy_model_parallel()
        dist.destroy_process_group()
