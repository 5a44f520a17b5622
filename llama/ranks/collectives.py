"""Collectives of the ranks of a group: sum, gather, broadcast, agreement and comparison.

In: the process groups and the shared memory that groups.py has made. Out: a `ModelParallel`. Ranks
exchange tensors of a fixed layout only, never pickles. It must not know how the groups were made,
nor which part of a model a rank holds: that is its `Placement`.

The world ranks of a job are those of fairscale: of D copies of the model, P pipeline stages and T
ranks in each model-parallel group, rank (d P + p) T + t, where p counts from the last stage
(`placement.stage_of`).
"""

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from llama.ranks.one_shot import OneShot
from llama.ranks.parallel import SAME_CALLS, Parallel, RankError
from llama.ranks.shared_memory import SharedMemory
from llama.ranks.watch import Watch

_MESSAGE_BYTES = 2048  # length of an error message that other ranks receive
_FRAME_BYTES = 512  # size of the first part of a message; most messages have one part only
_LENGTH_BYTES = 8
_NOT_WATCHED = contextlib.nullcontext()


@dataclass(frozen=True)
class ModelParallel(Parallel):
    """One rank among its peers: `Parallel` over process groups and shared memory.

    Attributes:
        group: the model-parallel group, on the device's backend.
        control: all ranks of this copy of the model on gloo, for agreement in host memory.
        group_control: the ranks of `group` on gloo.
        world: all ranks, on gloo.
        shared: the shared memory of the group, if its ranks are on one machine.
        message_ring: the shared memory of all ranks of this copy, if they are on one machine. It is
            `shared` itself without a pipeline.
        one_shot: the one-shot sums of the group's GPUs, if they support it.
        store: torch's store, where the ranks have met.
        watch: ends the job if a rank fails; None in a single process.
        lease: the object whose end says that the groups are not used any more. Copies share it.
    """

    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    group_control: dist.ProcessGroup | None = None
    world: dist.ProcessGroup | None = None
    shared: SharedMemory | None = None
    message_ring: SharedMemory | None = None
    one_shot: OneShot | None = None
    store: Store | None = None
    watch: Watch | None = None
    lease: object = None

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Let the watch end the job if the block raises or does not end."""
        return self.watch.step(self.timeout_s) if self.watch else _NOT_WATCHED

    def ranks_alive(self) -> list[bool]:
        """Return what the watch has observed; without one, all are alive."""
        others = range(1, self.num_ranks)
        return [True, *(self.watch is None or self.watch.can_go_on(rank) for rank in others)]

    @functools.cached_property
    def _inside(self) -> contextlib.AbstractContextManager[None]:
        """A context that shows the watch that this rank waits in a collective."""
        return self.watch.collective if self.watch else _NOT_WATCHED

    def shares_memory_of(self, x: Tensor) -> bool:
        """Return whether `x` is on the CPU, and the group on one machine."""
        return self.shared is not None and x.is_cpu

    @property
    def is_on_nccl(self) -> bool:
        """Whether the backend of the group is nccl."""
        return self.group is not None and dist.get_backend(self.group) == "nccl"

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum in shared memory, by the one-shot kernel, or by the group's backend."""
        if self.size == 1:
            return x
        with self._inside:
            if self.shared is not None and x.is_cpu and self.shared.can_sum(x):
                self.shared.all_reduce(x)
            elif self.one_shot is not None and self.one_shot.supports(x):
                self.one_shot.all_reduce(x)
            else:
                dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor, widths: Sequence[int] = ()) -> Tensor:
        """Gather in shared memory, or by the group's backend, which takes one size."""
        if self.size == 1:
            return x
        if self.shared is not None and x.is_cpu:
            with self._inside:
                return self.shared.all_gather(x, widths)
        is_even = len(set(widths)) <= 1
        if not is_even:  # nccl and gloo gather tensors of one size
            x = F.pad(x, (0, max(widths) - x.shape[-1]))
        parts = x.new_empty(self.size * len(x), *x.shape[1:])
        # torch 2.13 has renamed all_gather_into_tensor to all_gather_single.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._inside:
            gather(parts, x.contiguous(), group=self.group)
        parts = parts.view(self.size, *x.shape)
        if is_even:
            return parts.movedim(0, -2).flatten(-2)
        return torch.cat([part[..., :n] for part, n in zip(parts, widths, strict=True)], -1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Broadcast in shared memory, or by the group's backend."""
        if self.size == 1:
            return x
        with self._inside:
            if self.shared is not None and x.is_cpu:
                self.shared.broadcast(x)
            else:
                dist.broadcast(x, src=self.first_of_group, group=self.group)
        return x

    def all_hold(self, condition: bool) -> bool:
        """Agree within the group, by gloo."""
        if self.size == 1:
            return condition
        x = torch.tensor([int(condition)])
        with self._inside:
            dist.all_reduce(x, dist.ReduceOp.MIN, group=self.group_control)
        return bool(x)

    def all_reduce_min(self, value: int) -> int:
        """Return the smallest `value` of all ranks, by gloo."""
        if self.world is None:
            return value
        x = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(x, dist.ReduceOp.MIN, group=self.world)
        return int(x)

    def lowest(self, values: Sequence[int]) -> list[int]:
        """Return the smallest number at each place, by gloo."""
        if self.control is None or self.is_alone:
            return list(values)
        x = torch.tensor(values, dtype=torch.int64)
        with self._inside:
            dist.all_reduce(x, dist.ReduceOp.MIN, group=self.control)
        numbers: list[int] = x.tolist()
        return numbers

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Return the whole numbers of each rank, by gloo."""
        if self.world is None:
            return [list(values)]
        x = torch.tensor(values, dtype=torch.int64)
        rows = [torch.empty_like(x) for _ in range(dist.get_world_size(self.world))]
        dist.all_gather(rows, x, group=self.world)
        return [row.tolist() for row in rows]

    def gather_replicas(self, values: Sequence[float]) -> list[list[float]]:
        """Return the numbers of each leader, by gloo."""
        if self.world is None:
            return [list(values)]
        x = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(x) for _ in range(dist.get_world_size(self.world))]
        dist.all_gather(rows, x, group=self.world)
        return [row.tolist() for row in rows[:: self.num_ranks]]

    def broadcast_bytes(self, data: bytes, *, is_idle: bool = False) -> bytes:
        """Send the leader's bytes through the message ring, or by gloo."""
        if self.control is None or self.is_alone:
            return data
        with self._inside:
            if self.message_ring is None:
                return _broadcast_bytes(self.control, data)
            return self.message_ring.broadcast_bytes(data, is_idle=is_idle)

    @contextlib.contextmanager
    def agree(
        self, what: str, *, world: bool = False, remedy: str = SAME_CALLS
    ) -> Iterator[list[object]]:
        """Compare digests and errors, by gloo."""
        must_match: list[object] = []
        error: Exception | None = None
        try:
            yield must_match
        except Exception as e:
            error = e
        group = self.world if world else self.control
        if group is not None:
            waiting = self.watch.waiting(what, self.timeout_s) if self.watch else _NOT_WATCHED
            with waiting, self._inside:
                _compare(group, what, must_match, error, remedy)
        if error is not None:
            raise error


def exchange(group: dist.ProcessGroup, data: bytes, max_bytes: int) -> list[bytes]:
    """Return the bytes of each rank of the group; zeros at their end are lost.

    Args:
        group: the ranks.
        data: the bytes of this rank.
        max_bytes: maximum number of bytes; the same on every rank.
    """
    assert len(data) <= max_bytes, (len(data), max_bytes)
    row = torch.frombuffer(bytearray(data.ljust(max_bytes, b"\0")), dtype=torch.uint8)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return [row.numpy().tobytes().rstrip(b"\0") for row in rows]


def _broadcast_bytes(group: dist.ProcessGroup, data: bytes) -> bytes:
    """Return the first rank's bytes on all ranks of a gloo group.

    The first part has the length and up to 504 bytes, and a second part the remaining ones.
    """
    if dist.get_rank(group):
        data = b""
    capacity = _FRAME_BYTES - _LENGTH_BYTES
    start = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:capacity]
    frame = bytearray(start.ljust(_FRAME_BYTES, b"\0"))
    source = dist.get_global_rank(group, 0)
    dist.broadcast(torch.frombuffer(frame, dtype=torch.uint8), src=source, group=group)
    length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
    rest = bytearray(data[capacity:] or max(0, length - capacity))
    if rest:
        dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), src=source, group=group)
    return bytes(frame[_LENGTH_BYTES : _LENGTH_BYTES + length] + rest)


def _compare(
    group: dist.ProcessGroup,
    what: str,
    must_match: list[object],
    error: Exception | None,
    remedy: str,
) -> None:
    """Exchange (failed?, sha256 of must_match, the error or the texts) with the other ranks.

    Raises:
        RankError: another rank has an error.
        ValueError: the lists differ.
    """
    texts = "\n".join(value for value in must_match if isinstance(value, str))
    message = f"{type(error).__name__}: {error}" if error else texts
    text = message.encode(errors="backslashreplace")[:_MESSAGE_BYTES]  # a path may not be UTF-8
    digest = hashlib.sha256(repr(must_match).encode()).digest()
    head = (b"no" if error else b"ok") + digest
    rows = exchange(group, head + text, len(head) + _MESSAGE_BYTES)
    if error is not None:
        return  # the caller raises the error of this rank
    names = dist.get_process_group_ranks(group)
    messages = [row[len(head) :].decode(errors="replace") for row in rows]
    for name, row, message in zip(names, rows, messages, strict=True):
        if row.startswith(b"no"):
            raise RankError(f"rank {name} failed: {message}")
    for name, row, message in zip(names, rows, messages, strict=True):
        if row[: len(head)] != rows[0][: len(head)]:
            first, other = _first_difference(messages[0], message)
            raise ValueError(
                f"{what} differ between rank {names[0]}{first} and rank {name}{other} of one job "
                f"(this is rank {dist.get_rank()}). {remedy}"
            )


def _first_difference(first: str, other: str) -> tuple[str, str]:
    """Return the first lines that differ, each in parentheses; empty texts if none does."""
    for lines in zip(first.split("\n"), other.split("\n"), strict=False):
        if lines[0] != lines[1]:
            return (f" ({lines[0]})" if lines[0] else "", f" ({lines[1]})" if lines[1] else "")
    return "", ""
