"""Sums between the GPUs of one machine: each rank reads the memory of all others at once, and
larger ones are made by the switch between them.

In: a group's ranks on one machine. Out: an all-reduce for tensors of at most MOST_BYTES, or of
LARGEST where an NVSwitch adds up; None where these GPUs cannot do it, or did it wrongly when they
were tried beside nccl. torch's kernels over symmetric memory do the work. A decode step makes two
such sums a layer: of some kilobytes for a few rows, of a megabyte for 64.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from llama.ranks import torch_private
from llama.ranks.errors import RankError
from llama.ranks.torch_private import Sum

MOST_BYTES = 256 << 10  # beyond, each rank reads too much: size times what a ring does
LARGEST = 16 << 20  # beyond, nccl is as fast
_ALIGNED = 16  # bytes that the kernels move at once
_TRIED, _TRIED_LARGE = (64, 4096, 16_384), (1 << 17, 1 << 19)  # numbers
_DTYPES = (torch.bfloat16, torch.float32)  # torch's kernels have no others
_LIMIT_S = 30.0  # for all ranks to map each other's memory: it takes milliseconds


class OneShot:
    """One rank's end."""

    def __init__(self, buffer: Tensor, reduce: Sum, in_switch: Sum | None = None) -> None:
        self._buffer, self._reduce, self._in_switch = buffer, reduce, in_switch or reduce
        self.most = MOST_BYTES if in_switch is None else len(buffer)  # bytes

    @classmethod
    def join(
        cls, group: dist.ProcessGroup, control: dist.ProcessGroup, device: torch.device
    ) -> "OneShot | None":
        """One for this rank, or None on every rank. All ranks of the group call it.

        What can fail on one rank alone comes first, and the ranks agree on it before they map each
        other's memory, where each waits for all.
        """
        prepared = None
        with contextlib.suppress(Exception):  # of torch, the driver or the machine
            if _reaches_peers(device):
                prepared = torch_private.symmetric_buffer(LARGEST, device)
        if not _agree(control, prepared is not None) or prepared is None:
            return None
        buffer, meet = prepared
        made = _in_time(lambda: OneShot(buffer, *meet(group)), control, _LIMIT_S)
        is_made = _agree(control, made is not None)
        if not is_made or made is None or not made.self_test(group, control):
            return None
        has_switch = _agree(control, made.most > MOST_BYTES)
        if not has_switch or not made.self_test(group, control, _TRIED_LARGE):
            made.most = MOST_BYTES
        return made

    def self_test(
        self, group: dist.ProcessGroup, control: dist.ProcessGroup, counts: Sequence[int] = _TRIED
    ) -> bool:
        """Try it: on every rank the sums that the group's backend gives, and the same bits."""
        right, device = True, self._buffer.device
        draw = torch.Generator().manual_seed(dist.get_rank(group))
        for count in counts:
            for dtype in _DTYPES:
                whole = torch.randint(-8, 9, (count,), generator=draw).to(device, dtype)
                drawn = torch.randn(count, generator=draw).to(device, dtype)
                for x, is_exact in ((whole, True), (drawn, False)):
                    wanted, found = x.clone(), x.clone()
                    dist.all_reduce(wanted, group=group)
                    self.all_reduce(found)
                    close = torch.allclose(found.float(), wanted.float(), rtol=0.02, atol=0.05)
                    right &= torch.equal(found, wanted) if is_exact else close
                    right &= _is_same(found, control)
        return _agree(control, right)

    def supports(self, x: Tensor) -> bool:
        return (
            x.device == self._buffer.device
            and x.dtype in _DTYPES
            and 0 < x.nbytes <= self.most
            and x.nbytes % _ALIGNED == 0
            and x.is_contiguous()
        )

    def all_reduce(self, x: Tensor) -> None:
        """Sum over the ranks, in place. The kernel ends when all ranks have read the buffer."""
        reduce = self._reduce if x.nbytes <= MOST_BYTES else self._in_switch
        reduce(self._buffer.view(x.dtype)[: x.numel()], x.view(-1))


def _in_time(
    make: Callable[[], OneShot], control: dist.ProcessGroup, limit_s: float
) -> OneShot | None:
    """What `make` gives; None where it fails, on every rank or on some.

    A rank on which it failed may have left others inside it, where they wait for far longer: then
    RankError on those that have come out, and the job ends.
    """
    made, failure = None, "this one did"
    try:
        made = make()
    except Exception as error:  # of torch, the driver or the machine
        failure = f"this one failed with {type(error).__name__}: {error}"
    try:
        dist.barrier(control, async_op=True).wait(timedelta(seconds=limit_s))
    except RuntimeError as error:
        raise RankError(
            f"the GPUs of this machine could not map each other's memory within {limit_s:g} s, "
            f"which some ranks did and others not ({failure}): {str(error).splitlines()[0]}"
        ) from error
    return made


def _reaches_peers(device: torch.device) -> bool:
    """Whether this GPU can read the memory of the machine's other GPUs."""
    others = (i for i in range(torch.cuda.device_count()) if i != device.index)
    return all(torch.cuda.can_device_access_peer(device, i) for i in others)


def _agree(control: dist.ProcessGroup, holds: bool) -> bool:
    """Whether it holds on every rank."""
    least = torch.tensor([int(holds)])
    dist.all_reduce(least, dist.ReduceOp.MIN, group=control)
    return bool(least)


def _is_same(x: Tensor, control: dist.ProcessGroup) -> bool:
    """Whether all ranks hold the same bits."""
    bits = x.cpu().view(torch.uint8)
    everyone = [torch.empty_like(bits) for _ in range(dist.get_world_size(control))]
    dist.all_gather(everyone, bits, group=control)
    return all(torch.equal(other, bits) for other in everyone)
