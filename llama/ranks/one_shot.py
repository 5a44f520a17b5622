"""One-shot all-reduce between the GPUs of one machine.

Each rank reads the memory of all other ranks at once, and an NVSwitch computes larger sums. In: the
ranks of a group on one machine. Out: an all-reduce for tensors of up to MAX_BYTES, or of up to
MAX_SWITCH_BYTES with an NVSwitch, as far as it is faster than nccl; None if these GPUs cannot do
it, or if the self-test against nccl fails. torch's kernels over symmetric memory compute the sums.
A decode step needs two sums per layer, of a few kilobytes for a few rows and of a megabyte for 64.
It must not know the model.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from llama.ranks import torch_private
from llama.ranks.parallel import RankError
from llama.ranks.torch_private import Sum

MAX_BYTES = 256 << 10  # each rank reads `size` times as much as with a ring; nccl wins beyond this
MAX_SWITCH_BYTES = 16 << 20  # nccl is as fast beyond this
_ALIGNMENT = 16  # bytes that the kernels load at once
_TEST_ELEMENTS = (64, 4096, 16_384)
_LARGE_TEST_ELEMENTS = (1 << 17, 1 << 19)
_DTYPES = (torch.bfloat16, torch.float32)  # the dtypes of torch's kernels
_TIMED_BYTES = (8 << 10, 64 << 10, MAX_BYTES, 1 << 20, 4 << 20, MAX_SWITCH_BYTES)
_TIMED_CALLS = 20
_LIMIT_S = 30.0  # time for all ranks to map each other's memory, which takes milliseconds


class OneShot:
    """One rank of the all-reduce.

    Args:
        buffer: symmetric memory of this rank.
        reduce: the sum in one kernel launch.
        in_switch: the sum by an NVSwitch, if there is one.
    """

    def __init__(self, buffer: Tensor, reduce: Sum, in_switch: Sum | None = None) -> None:
        self._buffer = buffer
        self._reduce = reduce
        self._in_switch = in_switch or reduce
        self._one_shot_bytes = MAX_BYTES  # up to this size without the switch
        self.max_bytes = MAX_BYTES if in_switch is None else len(buffer)

    @classmethod
    def join(
        cls,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        device: torch.device,
        *,
        is_allowed: bool = True,
    ) -> "OneShot | None":
        """Return this rank's end, or None on every rank. All ranks of the group must call it.

        The steps that may fail on one rank alone come first, and the ranks agree on the result
        before they map each other's memory, where each rank waits for all.

        Args:
            group: The group on the device's backend.
            control: The same ranks on gloo.
            device: The GPU of this rank.
            is_allowed: Whether this rank may have it.
        """
        prepared = None
        with contextlib.suppress(Exception):  # errors of torch, the driver or the machine
            if is_allowed and _reaches_peers(device):
                prepared = torch_private.symmetric_buffer(MAX_SWITCH_BYTES, device)
        if not _agree(control, prepared is not None) or prepared is None:
            return None
        buffer, map_buffer = prepared
        one_shot = _in_time(lambda: OneShot(buffer, *map_buffer(group)), control, _LIMIT_S)
        is_joined = _agree(control, one_shot is not None)
        if not is_joined or one_shot is None or not one_shot.self_test(group, control):
            return None
        has_switch = _agree(control, one_shot.max_bytes > MAX_BYTES)
        if not has_switch or not one_shot.self_test(group, control, _LARGE_TEST_ELEMENTS):
            one_shot.max_bytes = MAX_BYTES
            one_shot._in_switch = one_shot._reduce
        one_shot.choose_limits(group, control)
        return one_shot if one_shot.max_bytes else None

    def self_test(
        self,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        counts: Sequence[int] = _TEST_ELEMENTS,
    ) -> bool:
        """Return whether the sums are those of the group's backend, and the same on every rank.

        Args:
            group: the group on the device's backend.
            control: the same ranks on gloo.
            counts: the numbers of elements to test.
        """
        is_correct = True
        device = self._buffer.device
        generator = torch.Generator().manual_seed(dist.get_rank(group))
        for count in counts:
            for dtype in _DTYPES:
                integers = torch.randint(-8, 9, (count,), generator=generator).to(device, dtype)
                floats = torch.randn(count, generator=generator).to(device, dtype)
                for x in (integers, floats):
                    expected = x.clone()
                    dist.all_reduce(expected, group=group)
                    result = x.clone()
                    self.all_reduce(result)
                    if x is integers:  # their sums are exact in any order
                        is_correct &= torch.equal(result, expected)
                    else:
                        is_correct &= torch.allclose(
                            result.float(), expected.float(), rtol=0.02, atol=0.05
                        )
                    is_correct &= _is_same(result, control)
        return _agree(control, is_correct)

    def choose_limits(self, group: dist.ProcessGroup, control: dist.ProcessGroup) -> None:
        """Time the sums of a few sizes, and use each way up to the size where another is faster.

        Args:
            group: the group on the device's backend.
            control: the same ranks on gloo, which must choose the same.
        """
        one_shot_bytes = 0
        max_bytes = 0
        for num_bytes in _TIMED_BYTES:
            if num_bytes > self.max_bytes:
                break
            own = self._buffer[:num_bytes].view(torch.bfloat16)
            x = torch.zeros_like(own)
            library_s = _seconds(functools.partial(dist.all_reduce, x, group=group))
            one_shot_s = math.inf
            if num_bytes <= MAX_BYTES:
                one_shot_s = _seconds(functools.partial(self._reduce, own, x))
            switch_s = math.inf
            if self._in_switch is not self._reduce:
                switch_s = _seconds(functools.partial(self._in_switch, own, x))
            if not _agree(control, min(one_shot_s, switch_s) < library_s):
                break
            max_bytes = num_bytes
            if _agree(control, one_shot_s <= switch_s):
                one_shot_bytes = num_bytes
        self._one_shot_bytes = one_shot_bytes
        self.max_bytes = max_bytes

    def supports(self, x: Tensor) -> bool:
        """Return whether `all_reduce` takes this tensor."""
        return (
            x.device == self._buffer.device
            and x.dtype in _DTYPES
            and 0 < x.nbytes <= self.max_bytes
            and x.nbytes % _ALIGNMENT == 0
            and x.is_contiguous()
        )

    def all_reduce(self, x: Tensor) -> None:
        """Sum over the ranks, in place. The kernel ends when all ranks have read the buffer."""
        reduce = self._reduce if x.nbytes <= self._one_shot_bytes else self._in_switch
        reduce(self._buffer.view(x.dtype)[: x.numel()], x.view(-1))


def _in_time(
    make: Callable[[], OneShot], control: dist.ProcessGroup, limit_s: float
) -> OneShot | None:
    """Return the result of `make`, or None if it fails on this rank.

    A rank on which it fails may leave others inside of it, where they wait far longer. Then the
    ranks that have left it raise a RankError, and the job ends.
    """
    one_shot = None
    outcome = "this one did"
    try:
        one_shot = make()
    except Exception as error:  # an error of torch, the driver or the machine
        outcome = f"this one failed with {type(error).__name__}: {error}"
    try:
        dist.barrier(control, async_op=True).wait(timedelta(seconds=limit_s))
    except RuntimeError as error:
        raise RankError(
            f"the GPUs of this machine could not map each other's memory within {limit_s:g} s, "
            f"which some ranks did and others not ({outcome}): {str(error).splitlines()[0]}"
        ) from error
    return one_shot


def _seconds(run: Callable[[], object]) -> float:
    """Return the time of a call on the current GPU, after a few that are not counted."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        run()
    begin.record()
    for _ in range(_TIMED_CALLS):
        run()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000 / _TIMED_CALLS


def _reaches_peers(device: torch.device) -> bool:
    """Return whether this GPU can read the memory of the machine's other GPUs."""
    others = (i for i in range(torch.cuda.device_count()) if i != device.index)
    return all(torch.cuda.can_device_access_peer(device, i) for i in others)


def _agree(control: dist.ProcessGroup, holds: bool) -> bool:
    """Return whether a condition holds on every rank."""
    minimum = torch.tensor([int(holds)])
    dist.all_reduce(minimum, dist.ReduceOp.MIN, group=control)
    return bool(minimum)


def _is_same(x: Tensor, control: dist.ProcessGroup) -> bool:
    """Return whether all ranks have the same bits."""
    bits = x.cpu().view(torch.uint8)
    of_all_ranks = [torch.empty_like(bits) for _ in range(dist.get_world_size(control))]
    dist.all_gather(of_all_ranks, bits, group=control)
    return all(torch.equal(other, bits) for other in of_all_ranks)
