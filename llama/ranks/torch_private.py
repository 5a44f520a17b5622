"""All uses of names of torch that are not public.

torch gives no guarantee for them. A test checks that the installed torch has each of them, and each
function documents what happens with a torch that lacks its names.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

# (this rank's part of a symmetric buffer, x) -> None; x is replaced by the sum over the ranks.
Sum = Callable[[Tensor, Tensor], Any]


def register_fake_backend() -> bool:
    """Register the backend "fake" with torch.

    Returns:
        False if torch lacks it; a single process then uses gloo.
    """
    try:
        # The import registers the backend.
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
    except ImportError:
        return False
    return True


def default_store() -> Store:
    """Return the store of process groups that the program has made itself.

    Raises:
        RuntimeError: torch lacks the name.
    """
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    if get is None:
        raise RuntimeError(
            f"torch {torch.__version__} does not show the store of process groups that a program "
            "made itself: leave out init_process_group, as Llama.build makes them"
        )
    store: Store = get()
    return store


def set_timeout(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Set the timeout of a group that fairscale has made, as fairscale passes none on.

    If torch lacks the name, its own limit stays, which is 10 minutes with nccl and 30 with gloo;
    the watch ends a stuck step before that.
    """
    set_it = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if set_it is not None:
        set_it(limit, group)


@contextlib.contextmanager
def without_splits() -> Iterator[None]:
    """Keep torch from splitting nccl's communicator for the groups that the block makes on gloo.

    Where the default group is bound to a GPU, ranks outside of a new group split its communicator,
    and those inside of a gloo group do not: each waits for others (pytorch #145376). If torch lacks
    the attribute, groups are not bound.
    """
    default = dist.distributed_c10d.GroupMember.WORLD
    device = getattr(default, "bound_device_id", None)
    if default is None or device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def symmetric_buffer(
    num_bytes: int, device: torch.device
) -> tuple[Tensor, Callable[[dist.ProcessGroup], tuple[Sum, Sum | None]]]:
    """Allocate memory that other GPUs of the machine can map.

    Returns:
        the buffer, and a function that maps it on all ranks of a group. The function returns a sum
        in one kernel launch, and a sum by the switch between the GPUs (None without a switch).

    x is copied into the buffer by a kernel of its own, whose end orders its writes before the sum.
    In torch's kernel that does both (one_shot_all_reduce_copy_out), threads that have copied are
    not waited for before the peers are told to read.

    Raises:
        ImportError, AttributeError: torch lacks the names; before any rank waits for another.
    """
    symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    rendezvous = symmetric.rendezvous
    one_shot = torch.ops.symm_mem.one_shot_all_reduce_out
    multimem = torch.ops.symm_mem.multimem_all_reduce_

    def join(group: dist.ProcessGroup) -> tuple[Sum, Sum | None]:
        handle = rendezvous(buffer, group)
        name = group.group_name

        def small(own: Tensor, x: Tensor) -> None:
            one_shot(own.copy_(x), "sum", name, x)

        def large(own: Tensor, x: Tensor) -> None:
            x.copy_(multimem(own.copy_(x), "sum", name))

        return small, large if handle.multicast_ptr else None

    buffer = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    return buffer, join
