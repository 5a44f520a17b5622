"""Process groups, and what ranks do together: reduce, gather, broadcast, agree.

In: torchrun's variables (none are needed for one process). Out: a `ModelParallel`, the handle by
which a rank reduces, gathers and agrees with its peers. Only this file, one_shot.py and
rendezvous.py import torch.distributed, and this one alone fairscale.

WORLD_SIZE = data parallel x model parallel; a model-parallel group is consecutive ranks, so that it
stays inside one machine where it can. Only tensors of a fixed layout cross ranks: never pickles.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib
import io
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as fs_init
from torch import Tensor

from llama.ranks.errors import RankError
from llama.ranks.machines import check_interfaces, warn_if_groups_span
from llama.ranks.one_shot import OneShot
from llama.ranks.rendezvous import LATER_S, errors_of_groups, meet_all
from llama.ranks.shared_memory import SharedMemory
from llama.ranks.watch import Watch, current_watch, stop_watch

_MESSAGE_BYTES = 2048  # of an error's text that reach the other ranks
_MEETING_BYTES = 512  # what a rank says of itself when ranks meet
_FRAME_BYTES = 512  # of a message's first part: most messages need no second
_LENGTH_BYTES = 8
_NOT_WATCHED = contextlib.nullcontext()


@dataclass(frozen=True)
class ModelParallel:
    """One rank's place among its peers; the default is a process alone, which needs no groups."""

    rank: int = 0
    size: int = 1
    data_rank: int = 0
    data_size: int = 1
    timeout_s: float = 600.0  # the longest wait for another rank
    group: dist.ProcessGroup | None = None  # the model-parallel group, on the device's backend
    control: dist.ProcessGroup | None = None  # the same ranks on gloo: agreement, in host memory
    world: dist.ProcessGroup | None = None  # every rank, on gloo
    shared: SharedMemory | None = None  # of the group, where its ranks are on one machine
    one_shot: OneShot | None = None  # small sums of its GPUs, where they can do it
    watch: Watch | None = None  # ends the job where a rank cannot go on; not for a process alone

    @property
    def global_rank(self) -> int:
        return self.data_rank * self.size + self.rank

    def step(self) -> contextlib.AbstractContextManager[None]:
        """A block that the ranks run together. If it raises, or does not end, the job ends.

        The exception is raised, so that `finally` blocks run; the process ends 2 seconds later.
        """
        return self.watch.step(self.timeout_s) if self.watch else _NOT_WATCHED

    def shares_memory_of(self, x: Tensor) -> bool:
        """Whether `x` is where all ranks of the group read it: on the CPU of one machine."""
        return self.shared is not None and _is_on_cpu(x)

    @property
    def is_on_nccl(self) -> bool:
        """Whether the group's tensors go through nccl, whose collectives a CUDA graph can hold."""
        return self.group is not None and dist.get_backend(self.group) == "nccl"

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks of the group, in place."""
        if self.size == 1:
            return x
        if self.shared is not None and _is_on_cpu(x) and self.shared.can_sum(x):
            self.shared.all_reduce(x)
        elif self.one_shot is not None and self.one_shot.takes(x):
            self.one_shot.all_reduce(x)
        else:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """(..., N) on each rank -> (..., N * size), in the order of the ranks."""
        if self.size == 1:
            return x
        if self.shared is not None and _is_on_cpu(x):
            return self.shared.all_gather(x)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values, in place, so that what was decided once is the same everywhere."""
        if self.size == 1:
            return x
        if self.shared is not None and _is_on_cpu(x):
            self.shared.broadcast(x)
        else:
            dist.broadcast(x, src=self.data_rank * self.size, group=self.group)
        return x

    def all_reduce_min(self, value: int) -> int:
        """The smallest `value` of all ranks of the world."""
        if self.world is None:
            return value
        x = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(x, dist.ReduceOp.MIN, group=self.world)
        return int(x)

    def broadcast_bytes(self, data: bytes, *, is_idle: bool = False) -> bytes:
        """Rank 0's bytes, on every rank of the group. One thread per rank may call it at a time.

        is_idle: rank 0 may leave the others without a message for any time. In shared memory they
        then sleep for as long as all processes live; over gloo the wait has its limit.
        """
        if self.control is None or self.size == 1:
            return data
        if self.shared is None:
            return _broadcast_bytes(self.control, data)
        return self.shared.broadcast_bytes(data, timeout_s=None if is_idle else self.timeout_s)

    @contextlib.contextmanager
    def agree(self, what: str, *, world: bool = False) -> Iterator[list[object]]:
        """Run the block on every rank of the group or world. If it raises on one, it raises on all.

        An exception in the block is raised again on its own rank, and as `RankError` on the rest.
        What the block appends to the list it gets (anything with an exact repr) must be the same on
        every rank: else each rank gets a ValueError that names `what`. Every rank must come here;
        the wait for one that does not ends after the timeout given to `connect`.
        """
        must_match: list[object] = []
        error: Exception | None = None
        try:
            yield must_match
        except Exception as e:
            error = e
        group = self.world if world else self.control
        if group is not None:
            with self.watch.waiting(what, self.timeout_s) if self.watch else _NOT_WATCHED:
                _compare(group, self._exchange(group), what, must_match, error)
        if error is not None:
            raise error

    def _exchange(self, group: dist.ProcessGroup) -> Callable[[bytes], list[bytes]]:
        """How the ranks of the group or the world compare: bytes, equally many on each."""
        is_same = group is self.control or self.data_size == 1
        if self.shared is not None and is_same:
            return self.shared.exchange
        return functools.partial(_exchange, group)


def _is_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


class SharedCounter:
    """Numbers from 0 on, each given once: by it, the first ranks of the replicas share work out."""

    def __init__(self, parallel: ModelParallel, name: str) -> None:
        self._parallel = parallel
        self._name = name
        self._next = 0  # of a process alone

    def take(self, count: int) -> int:
        """The first of `count` numbers in a row that nobody else gets."""
        first, self._next = self._next, self._next + count
        if self._parallel.world is None:
            return first
        # The store that torchrun's ranks met at; torch has no public name for it.
        store = dist.distributed_c10d._get_default_store()
        return store.add(self._name, count) - count


def _exchange(group: dist.ProcessGroup, data: bytes) -> list[bytes]:
    """The bytes of each rank of the group, equally many on each."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [bytes(row.tolist()) for row in everyone]


def _broadcast_bytes(group: dist.ProcessGroup, data: bytes) -> bytes:
    """The bytes of the first rank of a gloo group, on all of its ranks.

    A message of up to 504 bytes is one broadcast: [length, message, zeros].
    """
    source, is_source = dist.get_global_rank(group, 0), dist.get_rank(group) == 0
    frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
    room = _FRAME_BYTES - _LENGTH_BYTES
    if is_source:
        start = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
        frame[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
    dist.broadcast(frame, src=source, group=group)
    packed = frame.numpy().tobytes()
    length = int.from_bytes(packed[:_LENGTH_BYTES], "little")
    if length <= room:
        return packed[_LENGTH_BYTES : _LENGTH_BYTES + length]
    rest = torch.zeros(length - room, dtype=torch.uint8)
    if is_source:
        rest = torch.frombuffer(bytearray(data[room:]), dtype=torch.uint8)
    dist.broadcast(rest, src=source, group=group)
    return packed[_LENGTH_BYTES:] + rest.numpy().tobytes()


def _compare(
    group: dist.ProcessGroup,
    exchange: Callable[[bytes], list[bytes]],
    what: str,
    must_match: object,
    error: Exception | None,
) -> None:
    """Exchange (failed?, sha256 of must_match, message); raise where a peer failed or differs."""
    message = f"{type(error).__name__}: {error}" if error else ""
    text = message.encode(errors="backslashreplace")[:_MESSAGE_BYTES]  # a path may not be UTF-8
    digest = hashlib.sha256(repr(must_match).encode()).digest()
    packed = bytes([error is not None]) + digest + text
    rows = exchange(packed.ljust(1 + len(digest) + _MESSAGE_BYTES, b"\0"))
    if error is not None:
        return  # the caller raises its own
    for rank, row in enumerate(rows):
        if row[0]:
            message = row[1 + len(digest) :].rstrip(b"\0").decode(errors="replace")
            raise RankError(f"rank {dist.get_global_rank(group, rank)} failed: {message}")
    ours = dist.get_rank(group)
    for rank, row in enumerate(rows):
        if row[: 1 + len(digest)] != rows[0][: 1 + len(digest)]:
            raise ValueError(
                f"{what} differ between rank {dist.get_global_rank(group, 0)} and rank "
                f"{dist.get_global_rank(group, rank)} of one model-parallel group (this is rank "
                f"{dist.get_global_rank(group, ours)}). Every rank of a group must make the same "
                "calls with the same arguments: read the input on one rank, or from the same file."
            )


def started_processes() -> int:
    """How many processes torchrun's variables describe: 1 where there are none.

    ValueError for a WORLD_SIZE without the variables that belong to it: torch says then that
    "environment variable RANK expected, but not set".
    """
    text = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if text != "1" and missing:
        raise ValueError(
            f"WORLD_SIZE={text} needs {', '.join(missing)} beside it: launch with torchrun, or "
            "unset WORLD_SIZE for one process"
        )
    return int(text)


def connect(
    model_parallel_size: int | None, device: torch.device, timeout_s: float
) -> ModelParallel:
    """Join the process groups that torchrun's variables describe; alone, make groups of one.

    The size defaults to the world size. `timeout_s` (seconds) bounds every wait for another rank.
    Raises ValueError where the size does not divide the world, or differs from an earlier one.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else started_processes()
    size = world_size if model_parallel_size is None else model_parallel_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world_size % size:
        raise ValueError(
            f"model_parallel_size={size!r} does not divide the {world_size} processes that were "
            f"started: launch with torchrun --nproc_per_node a multiple of it, or leave it out"
        )
    if world_size == 1:
        _join_alone()
        return ModelParallel()
    check_interfaces()
    warn_if_groups_span(size, world_size)
    with _loopback_if_alone():
        return _join(size, world_size, device, timeout_s)


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
    """The groups that scripts for Meta's build find, of this one process, with no port or thread.

    torch's backend "fake" answers each collective at once, as if all ranks sent the same. Of one
    rank that is the truth. gloo would listen on four ports and start a dozen threads.
    """
    if not dist.is_initialized():
        atexit.register(disconnect)
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    if not fs_init.model_parallel_is_initialized():
        _make_fairscale_groups(1)


def _make_fairscale_groups(size: int) -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # fairscale prints; stdout is the user's
        fs_init.initialize_model_parallel(size)


def _join(size: int, world_size: int, device: torch.device, timeout_s: float) -> ModelParallel:
    """Wait for the other ranks, and make the groups."""
    store = meet_all(size, world_size, timeout_s)
    with errors_of_groups(timeout_s):
        return _make_groups(store, size, world_size, device, timeout_s)


def _make_groups(
    store: dist.Store, size: int, world_size: int, device: torch.device, timeout_s: float
) -> ModelParallel:
    """The groups of a world of several ranks: fairscale's, and gloo's beside them for agreement."""
    limit = timedelta(seconds=timeout_s + LATER_S)
    atexit.register(disconnect)  # or a process whose groups are left can end with SIGABRT
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        rank = int(os.environ["RANK"])
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=limit,
            device_id=device if device.type == "cuda" else None,
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
    # fairscale passes no timeout on to its groups, and torch gives no public way to set one later.
    dist.distributed_c10d._set_pg_timeout(limit, group)
    if device.type == "cuda":
        _first_sum(group, device)
    data_rank, data_size = dist.get_rank() // size, world_size // size
    controls = [
        dist.new_group(list(range(i * size, (i + 1) * size)), timeout=limit, backend="gloo")
        for i in range(data_size)
    ]
    world = dist.new_group(timeout=limit, backend="gloo")
    control, rank = controls[data_rank], fs_init.get_model_parallel_rank()
    shared = None
    if size > 1:
        names = dist.get_process_group_ranks(control)
        meet = functools.partial(_meet, control)
        shared = SharedMemory.join(rank, names, meet, limit.total_seconds())
    one_shot = None
    if device.type == "cuda" and shared is not None and dist.get_backend(group) == "nccl":
        one_shot = OneShot.join(group, control, device)
    return ModelParallel(
        rank=rank,
        size=size,
        data_rank=data_rank,
        data_size=data_size,
        timeout_s=timeout_s,
        group=group,
        control=control,
        world=world,
        shared=shared,
        one_shot=one_shot,
        watch=current_watch(),
    )


def _first_sum(group: dist.ProcessGroup, device: torch.device) -> None:
    """nccl makes a group's buffers, up to a GiB, at its first call: now, as memory is measured
    after it."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def check_carries(backends: str, device: torch.device) -> None:
    """ValueError where a group with these backends, as "cpu:gloo,cuda:nccl", cannot exchange
    tensors of `device`: the program may have made the groups before this runtime came."""
    if device.type not in {part.split(":")[0] for part in backends.split(",")}:
        raise ValueError(
            f"device='{device}', but this process joined process groups that carry other tensors "
            f"({backends}): choose a device of theirs, or init_process_group with "
            f"'{'nccl' if device.type == 'cuda' else 'gloo'}'"
        )


def _meet(group: dist.ProcessGroup, own: bytes) -> list[bytes]:
    """What each rank says of itself, without zeros at the end, in the order of the ranks."""
    assert len(own) <= _MEETING_BYTES, "an introduction is short"
    return [row.rstrip(b"\0") for row in _exchange(group, own.ljust(_MEETING_BYTES, b"\0"))]


def disconnect() -> None:
    """Leave the groups, so that torch does not complain of a leak when the process ends."""
    stop_watch()
    if dist.is_initialized():
        fs_init.destroy_model_parallel()
        dist.destroy_process_group()
