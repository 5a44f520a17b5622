"""What ranks of several machines do together: shared memory inside each, gloo between them.

In: the ranks of a group by machine, this machine's shared memory, and a gloo group of the first
ranks. Out: the collectives of `SharedMemory`, for tensors on the CPU and messages. Each machine
sends once what it has in common, where gloo alone would send as often as it has ranks.

An all-reduce adds up inside each machine, in float32 and in the order of its ranks, and rounds to
the tensor's type. The machines' sums, where they are small, are then gathered, and added in float32
in the order of the machines: half the way of gloo's own all-reduce, which goes round twice. Large
ones are gloo's to add, in an order of its own. The first rank of a machine copies the result to its
other ranks. So all ranks hold the same bits: all first ranks add the same numbers in one order, or
have what gloo made once.
"""

from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from llama.ranks.shared_memory import Exchange, SharedMemory

_FRAME_BYTES = 512  # of a message's first part: most messages need no second
_LENGTH_BYTES = 8
_GATHERED_BYTES = 1 << 16  # of a sum: beyond, gloo's own all-reduce takes half the time


class Hierarchy:
    """One rank's end. One thread of a rank at a time may use it.

    An interrupt (Ctrl-C) can come between the parts of an exchange; the ranks are out of step then.
    """

    def __init__(
        self,
        rank: int,
        machines: list[list[int]],
        memory: SharedMemory | None,
        across: dist.ProcessGroup | None,
    ) -> None:
        """machines: the group's ranks on each, that of rank 0 first, as `SharedMemory.join` has
        them. memory: None for a rank that is alone on its machine. across: None for a rank that is
        not the first of its machine."""
        self.machines = machines
        self.rank, self.size = rank, sum(map(len, machines))
        self._memory, self._across = memory, across
        self._order = list(chain.from_iterable(machines))
        self._is_in_order = self._order == sorted(self._order)

    @property
    def shares_memory(self) -> bool:
        """Whether any machine has several ranks."""
        return len(self.machines) < self.size

    def can_sum(self, x: Tensor) -> bool:
        return SharedMemory.can_sum(x)

    def all_reduce(self, x: Tensor) -> None:
        """Sum over the ranks, in place."""
        whole = x.contiguous()
        if self._memory is not None:
            self._memory.all_reduce(whole)
        if self._across is not None and whole.numel():
            self._add_across(whole)
        if self._memory is not None:
            self._memory.broadcast(whole)
        if whole is not x:
            x.copy_(whole)

    def all_gather(self, x: Tensor) -> Tensor:
        """(..., N) on each rank -> (..., N * size), in the order of the ranks."""
        own = x.contiguous() if self._memory is None else self._memory.all_gather(x)
        out = x.new_empty((*x.shape[:-1], x.shape[-1] * self.size))
        if self._across is not None and out.numel():
            out = self._gather_across(own, x.shape[-1])
        if self._memory is not None:
            self._memory.broadcast(out)
        return out

    def broadcast(self, x: Tensor) -> None:
        """Rank 0's values, in place."""
        whole = x.contiguous()
        if self._across is not None and whole.numel():
            dist.broadcast(whole, src=_first(self._across), group=self._across)
        if self._memory is not None:
            self._memory.broadcast(whole)
        if whole is not x:
            x.copy_(whole)

    def broadcast_bytes(self, data: bytes, *, timeout_s: float | None) -> bytes:
        """Rank 0's bytes on every rank. timeout_s: as in shared memory; gloo has its own limit."""
        if self._across is not None and self.rank:
            data = broadcast_bytes(self._across, data)
        if self._memory is not None:
            data = self._memory.broadcast_bytes(data, timeout_s=timeout_s)
        if self._across is not None and not self.rank:  # after its own machine, which wakes at once
            broadcast_bytes(self._across, data)
        return data

    def _add_across(self, x: Tensor) -> None:
        """The sum of the machines' tensors, in place."""
        if x.nbytes > _GATHERED_BYTES:
            dist.all_reduce(x, group=self._across)
            return
        parts = x.new_empty((len(self.machines), x.numel()))
        dist.all_gather_into_tensor(parts, x.view(1, -1), group=self._across)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        x.copy_(total.view(x.shape))

    def _gather_across(self, own: Tensor, width: int) -> Tensor:
        """Each machine's (..., width * its ranks) -> (..., width * size), in the ranks' order."""
        widths = [width * len(machine) for machine in self.machines]
        padded = torch.nn.functional.pad(own, (0, max(widths) - own.shape[-1]))
        parts = [torch.empty_like(padded) for _ in self.machines]
        dist.all_gather(parts, padded, group=self._across)
        rows = [part[..., :n] for part, n in zip(parts, widths, strict=True)]
        whole = torch.cat(rows, dim=-1)
        if self._is_in_order:
            return whole
        places = sorted(range(self.size), key=self._order.__getitem__)
        return whole.unflatten(-1, (self.size, width))[..., places, :].flatten(-2)


def share_memory(
    control: dist.ProcessGroup, exchange: Exchange, limit: timedelta
) -> tuple[SharedMemory | None, Hierarchy | None]:
    """A group's shared memory where all of its ranks are on one machine, else a hierarchy: on every
    rank of the group alike.

    control: all ranks of the group, on gloo; each makes this call. limit: of a wait for another.
    """
    names, rank = dist.get_process_group_ranks(control), dist.get_rank(control)
    memory, machines = SharedMemory.join(rank, names, exchange, limit.total_seconds())
    if len(machines) == 1:
        return memory, None
    is_first = any(rank == ranks[0] for ranks in machines)
    across = None
    if is_first:  # the rest of the world makes no such call: it may be divided in another way
        firsts = [names[ranks[0]] for ranks in machines]
        across = dist.new_group(
            firsts, timeout=limit, backend="gloo", use_local_synchronization=True
        )
    return None, Hierarchy(rank, machines, memory, across)


def broadcast_bytes(group: dist.ProcessGroup, data: bytes) -> bytes:
    """The bytes of the first rank of a gloo group, on all of its ranks.

    A message of up to 504 bytes is one broadcast: [length, message, zeros].
    """
    source, is_source = _first(group), dist.get_rank(group) == 0
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


def _first(group: dist.ProcessGroup) -> int:
    """The first rank of a group, by its number in the world."""
    return dist.get_global_rank(group, 0)
