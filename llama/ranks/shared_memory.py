"""Shared memory between the ranks of one machine: tensors on the CPU, and messages from rank 0.

In: a function that exchanges a few bytes, and one that tells whether the job fails. Out:
all-reduce, all-gather, broadcast and messages in microseconds. The kernels are in
kernels/cpu/shared_memory.cpp. It must not know torch.distributed, which serves ranks elsewhere.

The segment has no name in any file system (memfd_create(2)), so nothing of it outlives the
processes that have mapped it. It has a channel for tensors, followed by a channel for messages.
Each channel begins with 128 bytes per rank, the first of which are the sequence number of the
exchange that the rank has reached (uint32): the others wait for the rank with the lowest number.
"""

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llama.kernels.cpu import build, native
from llama.kernels.cpu.constants import MAX_RANKS, ChannelState, SumType
from llama.ranks.parallel import RankError
from llama.ranks.processes import machine_id

_SUM_TYPES = {
    torch.bfloat16: SumType.BF16.value,
    torch.float16: SumType.FP16.value,
    torch.float32: SumType.FP32.value,
}
_TENSOR_BYTES = 1 << 18  # size of a buffer; half of it and half of a peer's fit the L2 cache
_RING_BYTES = 1 << 16
_FRAME_BYTES = 1 << 14  # size of the largest piece of a message
_SPIN_NS = 50_000  # about the time of a wake-up; the peer may wait for this core
_CROWDED_SPIN_NS = 2_000  # used with more ranks than cores, as the awaited rank needs the core
_STATE = (
    "base",
    "rank",
    "ranks",
    "size",
    "spin_ns",
    "sequence",
    "buffer_index",
    "ticket",
    "completed",
    "stage",
    "offset",
    "awaited",
    "length",
    "has_more",
)
_FIELD = {name: i for i, name in enumerate(_STATE)}

Exchange = Callable[[bytes], list[bytes]]


class SharedMemory:
    """One rank's end of the segment.

    One thread at a time may use it for tensors, and one for messages.

    Args:
        memory: the mapped segment.
        rank: this rank in the group.
        names: the global ranks of the group, which errors name.
        timeout_s: maximum time of a wait for another rank, after which a `RankError` is raised.
        is_ending: tells whether another rank has failed, which also raises a `RankError`.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        names: list[int],
        timeout_s: float,
        is_ending: Callable[[], bool],
    ) -> None:
        self.rank = rank
        self.size = len(names)
        self.timeout_s = timeout_s
        self._names = names
        self._is_ending = is_ending
        self._start = ctypes.c_char.from_buffer(memory)  # a reference that keeps the mapping
        self.base = ctypes.addressof(self._start)
        self._tickets = itertools.count(1)
        self._tensors = self._channel(0, _TENSOR_BYTES)
        self._ring = self._channel(_channel_bytes(self.size)[0], _RING_BYTES)
        self._frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        self._frame_bytes = self._frame.numpy().data

    @classmethod
    def join(
        cls,
        rank: int,
        names: list[int],
        exchange: Exchange,
        timeout_s: float,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> "SharedMemory | None":
        """Map the segment of rank 0 on every rank.

        `exchange` sends the bytes of this rank, and returns those of all ranks in order. The other
        arguments are those of the class.

        Returns:
            this rank's end, or None on all ranks if one of them cannot map the segment.
        """
        machine = _machine()
        fd = _create(len(names)) if machine and rank == 0 else None
        rows = exchange(f"{machine}\n{os.getpid()}\n{fd}".encode())
        machines, pids, fds = zip(*(row.decode().split("\n") for row in rows), strict=True)
        joined = None
        if machine and set(machines) == {machine}:
            with contextlib.suppress(OSError):  # rank 0 has no segment, or is another user's
                memory = _open(f"/proc/{pids[0]}/fd/{fds[0]}", sum(_channel_bytes(len(names))))
                joined = cls(memory, rank, names, timeout_s, is_ending)
        have_joined = exchange(b"" if joined is None else b"1")
        if fd is not None:
            os.close(fd)
        return joined if all(have_joined) else None

    @staticmethod
    def can_sum(x: Tensor) -> bool:
        """Return whether `all_reduce` takes the dtype of this tensor."""
        return x.dtype in _SUM_TYPES

    def all_reduce(self, x: Tensor) -> None:
        """Sum over the ranks, in place, in float32 and in the order of the ranks."""
        self._run_inplace("shared_all_reduce", x, _SUM_TYPES[x.dtype])

    def all_gather(self, x: Tensor, widths: Sequence[int] = ()) -> Tensor:
        """Concatenate the tensors of all ranks along their last dimension.

        Args:
            x: (..., N); N may differ between ranks.
            widths: N of each rank, the same on every rank; empty if all have the same N.

        Returns:
            (..., the sum of all N).
        """
        x = x.contiguous()
        widths = widths or [x.shape[-1]] * self.size
        assert len(widths) == self.size and widths[self.rank] == x.shape[-1], (widths, x.shape)
        out = x.new_empty((*x.shape[:-1], sum(widths)))
        row_bytes = torch.tensor(widths, dtype=torch.int64) * x.element_size()
        args = (math.prod(x.shape[:-1]), row_bytes, next(self._tickets))
        self._run("shared_all_gather", self._tensors, x, out, *args)
        return out

    def broadcast(self, x: Tensor) -> None:
        """Replace `x` by rank 0's values, in place."""
        self._run_inplace("shared_broadcast", x)

    def _run_inplace(self, name: str, x: Tensor, *args: int) -> None:
        contiguous = x.contiguous()
        self._run(name, self._tensors, contiguous, x.nbytes, *args, next(self._tickets))
        if contiguous is not x:
            x.copy_(contiguous)

    def broadcast_bytes(self, data: bytes, *, is_idle: bool = False) -> bytes:
        """Return rank 0's bytes on every rank; `is_idle` waits for them without a limit."""
        if self.rank == 0:
            for start in range(0, max(1, len(data)), _FRAME_BYTES):
                part = data[start : start + _FRAME_BYTES]
                self._frame_bytes[: len(part)] = part
                has_more = int(start + _FRAME_BYTES < len(data))
                self._run("shared_send", self._ring, self._frame, len(part), has_more)
            return data
        parts: list[bytes] = []
        has_more = 1
        while has_more:
            self._run("shared_receive", self._ring, self._frame, has_limit=not is_idle)
            length, has_more = self._ring[_FIELD["length"] : _FIELD["has_more"] + 1].tolist()
            parts.append(bytes(self._frame_bytes[:length]))
            is_idle = False
        return b"".join(parts)

    def _channel(self, start: int, size: int) -> Tensor:
        """Return this rank's state of a channel; see Channel in the C++ file."""
        ranks = max(self.size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        is_crowded = ranks > len(os.sched_getaffinity(0))
        spin = _CROWDED_SPIN_NS if is_crowded else _SPIN_NS
        state = torch.zeros(len(_FIELD), dtype=torch.int64)
        state[:5] = torch.tensor([self.base + start, self.rank, self.size, size, spin])
        return state

    def _run(self, name: str, channel: Tensor, *args: Tensor | int, has_limit: bool = True) -> None:
        """Call a kernel until it is done; each call sleeps for up to 100 ms.

        An interrupt (Ctrl-C) during an exchange of tensors is raised after the exchange, as the
        ranks would be out of step otherwise; a second interrupt is raised at once. An interrupt
        while waiting for a message is raised at once, too.
        """
        code = native.call(name, channel, *args)
        if code == ChannelState.DONE:
            return
        limit = self.timeout_s if has_limit else math.inf
        began = time.monotonic()
        interrupt: KeyboardInterrupt | None = None
        while code != ChannelState.DONE:
            try:
                if code != ChannelState.PENDING:
                    raise RankError(_describe(code, name))
                code = native.call(name, channel, *args)
                if code == ChannelState.PENDING:
                    self._check(name, channel, time.monotonic() - began, limit)
            except KeyboardInterrupt as e:
                if interrupt is not None or name in ("shared_send", "shared_receive"):
                    raise
                interrupt = e
        if interrupt is not None:
            raise interrupt

    def _check(self, name: str, channel: Tensor, waited: float, limit: float) -> None:
        """Raise a RankError if waiting is in vain."""
        what = _describe(ChannelState.PENDING, name)
        if self._is_ending():
            raise RankError(
                f"another rank failed, while rank {self._names[self.rank]} waited in {what}: the "
                "message further up says why"
            )
        if waited > limit:
            others = [r for r in range(self.size) if r != self.rank]
            missing = [str(self._names[r]) for r in others if self._is_behind(channel, r)]
            raise RankError(
                f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} did not reach {what} "
                f"within {limit:g} s (timed out): stopped, slow, or making other calls than this "
                "rank"
            )

    def _is_behind(self, channel: Tensor, rank: int) -> bool:
        if channel is self._ring and self.rank != 0:
            return rank == 0
        slot = rank + 1 if channel is self._ring else rank
        return bool(native.call("shared_is_behind", channel, slot))


def _describe(code: int, name: str) -> str:
    """Describe what a kernel waits for, or why it has failed."""
    what = name.removeprefix("shared_").replace("_", "-")
    if code == ChannelState.PENDING:
        return {"send": "a message", "receive": "a message"}.get(what, what)
    if code == ChannelState.MISMATCH:
        return (
            f"another rank exchanges other tensors than this one in {what}: every rank of a group "
            "must make the same calls with the same arguments"
        )
    return f"{what}: an earlier exchange was interrupted, and the ranks are out of step"


def _machine() -> str:
    """Return a text that is the same on all ranks that can share memory; empty if none can.

    Each agent of torchrun (GROUP_RANK) counts as a machine: two agents on one machine serve to try
    out two machines.
    """
    if not hasattr(os, "memfd_create"):
        return ""
    # Without a compiler, `kernels` would warn about the slow CPU even if the model is on a GPU.
    shipped = (build.FOLDER / build.library_name(x) for x in build.INSTRUCTION_SETS)
    can_load = any(path.exists() for path in shipped) or build.find_compiler() is not None
    if not can_load or native.kernels() is None:
        return ""
    return "/".join([machine_id(), str(os.getuid()), os.environ.get("GROUP_RANK", "")])


def _channel_bytes(ranks: int) -> list[int]:
    return [
        native.call("shared_channel_bytes", ranks, _TENSOR_BYTES),
        native.call("shared_ring_bytes", ranks, _RING_BYTES),
    ]


def _create(ranks: int) -> int | None:
    """Return the file descriptor of a new segment.

    It is sealed, as access to a file that has been shortened would be a fault (SIGBUS).
    """
    import fcntl  # only Linux has it, and this module is imported everywhere

    if ranks > MAX_RANKS:
        return None
    with contextlib.suppress(OSError), contextlib.ExitStack() as failed:
        fd = os.memfd_create("llama-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        failed.callback(os.close, fd)
        os.ftruncate(fd, sum(_channel_bytes(ranks)))
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        failed.pop_all()
        return fd
    return None


def _open(path: str, size: int) -> mmap.mmap:
    """Map rank 0's segment; Linux allows this to processes of the same user."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
