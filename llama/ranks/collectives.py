"""What the ranks of a group do together: sum, gather, broadcast, agree, compare.

In: the process groups and the shared memory that groups.py made. Out: a `ModelParallel`. Only
tensors of a fixed layout cross ranks: never pickles. It must not know how the groups came to be,
nor what part of a model a rank holds: that is its `Placement`.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from llama.ranks.errors import RankError
from llama.ranks.one_shot import OneShot
from llama.ranks.placement import WHOLE, Placement
from llama.ranks.shared_memory import SharedMemory
from llama.ranks.watch import Watch

_MESSAGE_BYTES = 2048  # of an error's text that reach the other ranks
_FRAME_BYTES = 512  # of a message's first part: most messages need no second
_LENGTH_BYTES = 8
_NOT_WATCHED = contextlib.nullcontext()


@dataclass(frozen=True)
class ModelParallel:
    """One rank among its peers; the default is a process alone, which needs no groups.

    `placement` says what the rank holds of a model; everything else is for communication.
    """

    placement: Placement = WHOLE
    data_rank: int = 0
    data_size: int = 1
    timeout_s: float = 600.0  # the longest wait for another rank
    group: dist.ProcessGroup | None = None  # the model-parallel group, on the device's backend
    control: dist.ProcessGroup | None = None  # the same ranks on gloo: agreement, in host memory
    world: dist.ProcessGroup | None = None  # every rank, on gloo
    shared: SharedMemory | None = None  # of the group, where its ranks are on one machine
    one_shot: OneShot | None = None  # sums of its GPUs, where they can do it
    store: dist.Store | None = None  # where the ranks met
    watch: Watch | None = None  # ends the job where a rank cannot go on; not for a process alone

    @property
    def rank(self) -> int:
        """This rank within its model-parallel group."""
        return self.placement.rank

    @property
    def size(self) -> int:
        """The number of ranks in the model-parallel group."""
        return self.placement.size

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides what the ranks of one model copy do."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether this rank holds a whole copy of the model by itself."""
        return self.size == 1

    @property
    def global_rank(self) -> int:
        """This rank among all ranks of the job."""
        return self.data_rank * self.size + self.rank

    def step(self) -> contextlib.AbstractContextManager[None]:
        """A block that the ranks run together. If it raises, or does not end, the job ends. The
        exception is raised, so that `finally` blocks run; the process ends 2 seconds later."""
        return self.watch.step(self.timeout_s) if self.watch else _NOT_WATCHED

    def ranks_alive(self) -> list[bool]:
        """Of each rank, as rank 0 sees it. The watch sees those of other machines as well."""
        others = range(1, self.size)
        return [True, *(self.watch is None or self.watch.can_go_on(rank) for rank in others)]

    def shares_memory_of(self, x: Tensor) -> bool:
        """Whether `x` is where all ranks of the group read it: on the CPU of one machine."""
        return self.shared is not None and x.is_cpu

    @property
    def is_on_nccl(self) -> bool:
        """Whether the group's tensors go through nccl, whose collectives a CUDA graph can hold."""
        return self.group is not None and dist.get_backend(self.group) == "nccl"

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks of the group, in place."""
        if self.size == 1:
            return x
        if self.shared is not None and x.is_cpu and self.shared.can_sum(x):
            self.shared.all_reduce(x)
        elif self.one_shot is not None and self.one_shot.supports(x):
            self.one_shot.all_reduce(x)
        else:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """(..., N) on each rank -> (..., N * size), in the order of the ranks."""
        if self.size == 1:
            return x
        if self.shared is not None and x.is_cpu:
            return self.shared.all_gather(x)
        parts = x.new_empty(self.size * len(x), *x.shape[1:])
        # Its name from torch 2.13 on, or the one before.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(parts, x.contiguous(), group=self.group)
        return parts.unflatten(0, (self.size, -1)).movedim(0, -2).flatten(-2)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values, in place, so that what was decided once is the same everywhere."""
        if self.size == 1:
            return x
        if self.shared is not None and x.is_cpu:
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
        """Rank 0's bytes, on every rank of the group, from one thread of each. is_idle: rank 0 may
        be silent for any time, and ranks in shared memory sleep; gloo's wait has its limit."""
        if self.control is None or self.size == 1:
            return data
        if self.shared is None:
            return _broadcast_bytes(self.control, data)
        return self.shared.broadcast_bytes(data, is_idle=is_idle)

    @contextlib.contextmanager
    def agree(self, what: str, *, world: bool = False) -> Iterator[list[object]]:
        """Run the block on every rank of the group or world. If it raises on one, it raises on all:
        the exception on its own rank, and `RankError` on the rest. What the block appends to the
        list it gets (anything with an exact repr) must be the same on every rank: else each gets a
        ValueError that names `what`, and the first text that differs. Every rank must come here,
        within `timeout_s`."""
        must_match: list[object] = []
        error: Exception | None = None
        try:
            yield must_match
        except Exception as e:
            error = e
        group = self.world if world else self.control
        if group is not None:
            with self.watch.waiting(what, self.timeout_s) if self.watch else _NOT_WATCHED:
                _compare(group, what, must_match, error)
        if error is not None:
            raise error


def exchange(group: dist.ProcessGroup, data: bytes, most: int) -> list[bytes]:
    """The bytes of each rank of the group, at most so many, in order. Zeros at the end are lost."""
    assert len(data) <= most, (len(data), most)
    mine = torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [row.numpy().tobytes().rstrip(b"\0") for row in everyone]


def _broadcast_bytes(group: dist.ProcessGroup, data: bytes) -> bytes:
    """The first rank's bytes, on all of a gloo group: [length, up to 504 bytes], then the rest."""
    if dist.get_rank(group):
        data = b""
    room = _FRAME_BYTES - _LENGTH_BYTES
    start = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
    frame = bytearray(start.ljust(_FRAME_BYTES, b"\0"))
    source = dist.get_global_rank(group, 0)
    dist.broadcast(torch.frombuffer(frame, dtype=torch.uint8), src=source, group=group)
    length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
    rest = bytearray(data[room:] or max(0, length - room))
    if rest:
        dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), src=source, group=group)
    return bytes(frame[_LENGTH_BYTES : _LENGTH_BYTES + length] + rest)


def _compare(
    group: dist.ProcessGroup, what: str, must_match: list[object], error: Exception | None
) -> None:
    """Exchange (failed?, sha256 of must_match, the error or the texts); raise for a peer's."""
    texts = "\n".join(each for each in must_match if isinstance(each, str))
    message = f"{type(error).__name__}: {error}" if error else texts
    text = message.encode(errors="backslashreplace")[:_MESSAGE_BYTES]  # a path may not be UTF-8
    digest = hashlib.sha256(repr(must_match).encode()).digest()
    head = (b"no" if error else b"ok") + digest
    rows = exchange(group, head + text, len(head) + _MESSAGE_BYTES)
    if error is not None:
        return  # the caller raises its own
    names = dist.get_process_group_ranks(group)
    told = [row[len(head) :].decode(errors="replace") for row in rows]
    for name, row, message in zip(names, rows, told, strict=True):
        if row.startswith(b"no"):
            raise RankError(f"rank {name} failed: {message}")
    for name, row, message in zip(names, rows, told, strict=True):
        if row[: len(head)] != rows[0][: len(head)]:
            pairs = zip(told[0].split("\n"), message.split("\n"), strict=False)
            differing = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
            first, other = (f" ({text})" if text else "" for text in differing)
            raise ValueError(
                f"{what} differ between rank {names[0]}{first} and rank {name}{other} of one job "
                f"(this is rank {dist.get_rank()}). Every rank of a group must make the same calls "
                "with the same arguments: read the input on one rank, or from the same file."
            )
