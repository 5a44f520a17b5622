"""The names of torch that are used here without being public: all of them, in one place.

torch promises nothing about these. A test asks whether each is there in the torch that is
installed, and each function says what happens in a torch that lacks it.
"""

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Sum = Callable[[Tensor, Tensor], Any]  # (own part of a symmetric buffer, x) -> sums into x


def register_fake_backend() -> bool:
    """Make torch know the backend "fake". Without it: False, and a process alone takes gloo."""
    try:
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    except ImportError:
        return False
    return True


def default_store() -> dist.Store:
    """Where the ranks met whose groups the program made itself. Without it: RuntimeError."""
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    if get is None:
        raise RuntimeError(
            f"torch {torch.__version__} does not show the store of process groups that a program "
            "made itself: leave out init_process_group, as Llama.build makes them"
        )
    return get()


def set_timeout(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Of a group that fairscale made, which passes none on. Without it: torch's own limit stays,
    of 10 minutes with nccl and 30 with gloo; the watch ends a step that is stuck before that."""
    set_it = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if set_it is not None:
        set_it(limit, group)


def symmetric_buffer(
    num_bytes: int, device: torch.device
) -> tuple[Tensor, Callable[[dist.ProcessGroup], tuple[Sum, Sum | None]]]:
    """Memory that other GPUs of the machine can map, and what maps it on all ranks of a group:
    that gives (part of the buffer, x) -> the sum over the ranks into `x`, in one launch, and the
    same by the switch between the GPUs, None without one. Without these names: ImportError or
    AttributeError, before any rank waits for another."""
    symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    ops, meet = torch.ops.symm_mem, symmetric.rendezvous
    at_once, added_up = ops.one_shot_all_reduce_copy_out, ops.multimem_all_reduce_

    def join(group: dist.ProcessGroup) -> tuple[Sum, Sum | None]:
        handle, name = meet(buffer, group), group.group_name

        def small(own: Tensor, x: Tensor) -> None:
            at_once(own, x, "sum", name, x)

        def large(own: Tensor, x: Tensor) -> None:
            x.copy_(added_up(own.copy_(x), "sum", name))

        return small, large if handle.multicast_ptr else None

    buffer = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    return buffer, join
