"""Shared memory between the ranks of one machine: tensors on the CPU, and messages from rank 0.

In: a way to exchange a few bytes once, to meet, and one to ask whether the job fails. Out:
all-reduce, all-gather, broadcast and messages in microseconds. The kernels are in
ops/cpu/shared_memory.cpp. It knows nothing of torch.distributed, which serves ranks elsewhere.

The segment has no name in any file system (memfd_create(2)): nothing of it outlives the processes
that have mapped it. It holds, in this order, channels for tensors and for messages. At the start of
each channel, 128 bytes per rank begin with the sequence number of the exchange that it has come to
(uint32): the rank with the lowest is the one that the others wait for.
"""

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from llama.ops.cpu import build, native
from llama.ops.cpu.constants import MAX_RANKS, ChannelState, SumType
from llama.ranks.errors import RankError
from llama.ranks.processes import machine_id

_SUM_TYPES = {
    torch.bfloat16: SumType.BF16.value,
    torch.float16: SumType.FP16.value,
    torch.float32: SumType.FP32.value,
}
_TENSOR_BYTES = 1 << 18  # of a buffer: half of it and its peer's fit the second cache
_RING_BYTES = 1 << 16
_FRAME_BYTES = 1 << 14  # the longest piece of a message
_SPIN_NS = 50_000  # about what a wake-up takes; the peer may wait for this very core
_CROWDED_SPIN_NS = 2_000  # more ranks than cores: the one that is waited for needs the core
_STATE = (
    "base", "rank", "ranks", "size", "spin_ns", "sequence", "half", "ticket", "completed", "stage",
    "offset", "awaited", "length", "more",
)  # fmt: skip
_FIELD = {name: i for i, name in enumerate(_STATE)}

Exchange = Callable[[bytes], list[bytes]]


class SharedMemory:
    """One rank's end of the segment. One thread at a time may use it for tensors, another for
    messages. names: the ranks as errors name them. timeout_s: of each wait for another rank; a
    `RankError` ends it then, or where `is_ending` says that one of them has failed."""

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        names: list[int],
        timeout_s: float,
        is_ending: Callable[[], bool],
    ) -> None:
        self.rank, self.size = rank, len(names)
        self.timeout_s = timeout_s
        self._names = names
        self._is_ending = is_ending
        self._start = ctypes.c_char.from_buffer(memory)  # it keeps the mapping
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
        """Meet the other ranks: one for each, or None on all, where one cannot map the first's
        memory. exchange: this rank's bytes -> those of all ranks, in order."""
        machine = _machine()
        fd = _create(len(names)) if machine and rank == 0 else None
        met = exchange(f"{machine}\n{os.getpid()}\n{fd}".encode())
        machines, pids, fds = zip(*(row.decode().split("\n") for row in met), strict=True)
        joined = None
        if machine and set(machines) == {machine}:
            with contextlib.suppress(OSError):  # rank 0 has none, or it is another user's
                memory = _open(f"/proc/{pids[0]}/fd/{fds[0]}", sum(_channel_bytes(len(names))))
                joined = cls(memory, rank, names, timeout_s, is_ending)
        have_joined = exchange(b"" if joined is None else b"1")
        if fd is not None:
            os.close(fd)
        return joined if all(have_joined) else None

    @staticmethod
    def can_sum(x: Tensor) -> bool:
        return x.dtype in _SUM_TYPES

    def all_reduce(self, x: Tensor) -> None:
        """Sum over the ranks, in place: in float32 and in the order of the ranks."""
        self._in_place("shared_all_reduce", x, _SUM_TYPES[x.dtype])

    def all_gather(self, x: Tensor) -> Tensor:
        """(..., N) on each rank -> (..., N * size), in the order of the ranks."""
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], x.shape[-1] * self.size))
        args = (x.nbytes, x.shape[-1] * x.element_size(), next(self._tickets))
        self._run("shared_all_gather", self._tensors, x, out, *args)
        return out

    def broadcast(self, x: Tensor) -> None:
        """Rank 0's values, in place."""
        self._in_place("shared_broadcast", x)

    def _in_place(self, name: str, x: Tensor, *more: int) -> None:
        whole = x.contiguous()
        self._run(name, self._tensors, whole, whole.nbytes, *more, next(self._tickets))
        if whole is not x:
            x.copy_(whole)

    def broadcast_bytes(self, data: bytes, *, is_idle: bool = False) -> bytes:
        """Rank 0's bytes on every rank. is_idle: wait for the first of them without a limit."""
        if self.rank == 0:
            for start in range(0, max(1, len(data)), _FRAME_BYTES):
                part = data[start : start + _FRAME_BYTES]
                self._frame_bytes[: len(part)] = part
                has_more = int(start + _FRAME_BYTES < len(data))
                self._run("shared_send", self._ring, self._frame, len(part), has_more)
            return data
        parts, has_more = [], 1
        while has_more:
            self._run("shared_receive", self._ring, self._frame, has_limit=not is_idle)
            length, has_more = self._ring[_FIELD["length"] : _FIELD["more"] + 1].tolist()
            parts.append(bytes(self._frame_bytes[:length]))
            is_idle = False
        return b"".join(parts)

    def _channel(self, start: int, size: int) -> Tensor:
        """This rank's state of a channel; see Channel in the C++ file."""
        ranks = max(self.size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        is_crowded = ranks > len(os.sched_getaffinity(0))
        spin = _CROWDED_SPIN_NS if is_crowded else _SPIN_NS
        state = torch.zeros(len(_FIELD), dtype=torch.int64)
        state[:5] = torch.tensor([self.base + start, self.rank, self.size, size, spin])
        return state

    def _run(self, name: str, channel: Tensor, *args: Tensor | int, has_limit: bool = True) -> None:
        """Call until done. Each call sleeps for up to 100 ms.

        An interrupt (Ctrl-C) of an exchange of tensors is raised after it, as the ranks would be
        out of step; a second one at once. While no message has come, nothing is under way.
        """
        code = native.call(name, channel, *args)
        if code == ChannelState.DONE:
            return
        limit = self.timeout_s if has_limit else math.inf
        began, interrupt = time.monotonic(), None
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
        """RankError where what is waited for will not come."""
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
                f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} did not come to {what} "
                f"within {limit:g} s (timed out): stopped, slow, or making other calls than this "
                "rank"
            )

    def _is_behind(self, channel: Tensor, rank: int) -> bool:
        if channel is self._ring and self.rank != 0:
            return rank == 0
        slot = rank + 1 if channel is self._ring else rank
        return bool(native.call("shared_is_behind", channel, slot))


def _describe(code: int, name: str) -> str:
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
    """The same on all ranks that share memory, empty where none can. An agent of torchrun
    (GROUP_RANK) stands for a machine: whoever starts two tries two machines out."""
    if not hasattr(os, "memfd_create"):
        return ""
    # Without a compiler, `kernels` would warn of slow CPUs, also where the model is on a GPU.
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
    """The file descriptor of a new segment. Sealed: a smaller file would be a fault (SIGBUS)."""
    import fcntl  # Linux has it; this module is imported everywhere

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
    """Map rank 0's segment; Linux allows it to the processes of the same user."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
