"""Processes of this machine: are they there, are they stopped, how did they end? How to end.

In: a process id. Out: a pidfd (pidfd_open(2)) that becomes readable when the process ends, and
words for its end. Elsewhere than on Linux there is none, and each rank is a machine of its own.
"""

import _thread
import contextlib
import ctypes
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from llama.ranks.errors import say

_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes): linux/pidfd.h, from Linux 6.15 on
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_AT = 60  # bytes into struct pidfd_info


def open_process(pid: int) -> int | None:
    """A pidfd of the process; None where there is none (any more), or no such call."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def has_ended(pid: int) -> bool:
    """Whether a process of this machine is gone, or a zombie that nobody has waited for."""
    return _stat(pid)[:1] in ([], ["Z"], ["X"])


def ranks_started_by(pid: int) -> set[int]:
    """The RANKs of a process's live children: none where it is a rank, or they cannot be read."""
    try:
        if _started_rank(pid) is not None:
            return set()
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        ranks = [_started_rank(child) for child in pids if _stat(child)[1:2] == [str(pid)]]
    except PermissionError:
        return set()
    return {rank for rank in ranks if rank is not None}


def _started_rank(pid: int) -> int | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):  # it is gone
        return None
    texts = [text.removeprefix(b"RANK=") for text in variables if text.startswith(b"RANK=")]
    return int(texts[0]) if texts and texts[0].isdigit() else None


def machine_id() -> str:
    """The same for two processes that see each other's ids and local sockets, else another one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])
    except OSError:
        return f"no /proc, process {os.getpid()}"


class KillTimer:
    """The kernel kills this process, even a stopped one, at the time set (timer_create(2))."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._id = ctypes.c_void_p()
        event = struct.pack("Pii48x", 0, signal.SIGKILL, 0)  # struct sigevent: send a signal
        if self._libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(self._id)):
            raise OSError(ctypes.get_errno(), "timer_create")

    def set(self, seconds: float) -> None:
        """So long from now; 0 turns it off."""
        timer = struct.pack("4l", 0, 0, int(seconds), int(seconds % 1 * 1e9))  # struct itimerspec
        self._libc.timer_settime(self._id, 0, timer, None)


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or a debugger holds it."""
    return _stat(pid)[:1] in (["T"], ["t"])


def is_suspended(pid: int) -> bool:
    """Whether SIGSTOP or Ctrl-Z holds it, and not a debugger, which lets it go on."""
    return _stat(pid)[:1] == ["T"]


def wait_status(pid: int, pidfd: int) -> int | None:
    """The status of an ended process, as wait(2) gives it to the parent; None where it is unknown.
    Until the parent has asked, /proc shows it (proc(5), `exit_code`); then its pidfd knows it."""
    fields = _stat(pid)
    if fields[:1] == ["Z"]:
        return int(fields[-1])
    info = bytearray(64)
    struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        import fcntl

        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except (ImportError, OSError):
        return None
    (mask,) = struct.unpack_from("Q", info)
    (status,) = struct.unpack_from("i", info, _EXIT_CODE_AT)
    return status if mask & _PIDFD_INFO_EXIT else None


def was_killed(status: int | None) -> bool:
    """Whether a signal ended it, so that it could not say anything."""
    return status is not None and status & 0x7F != 0


def was_terminated(status: int | None) -> bool:
    """Whether SIGTERM ended it, or a handler of SIGTERM that keeps to the shells' exit codes."""
    return status in (signal.SIGTERM, 128 + signal.SIGTERM << 8)


def describe_end(status: int | None) -> str:
    """What follows the name of the process: "was killed by SIGKILL ..."."""
    if status is None:
        return "ended without a word (killed, or out of memory: `dmesg` knows)"
    number = signal.SIGTERM if was_terminated(status) else status & 0x7F
    if number == signal.SIGKILL:
        return "was killed by SIGKILL (if nobody sent it, memory ran out: `dmesg` knows)"
    if number:
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit code {status >> 8} while the others were still working"


@contextlib.contextmanager
def or_exit(last_words: bytes, before: Sequence[Callable[[], None]]) -> Iterator[None]:
    """A block without which this process could stay for ever: if it raises, the process ends."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        with contextlib.suppress(BaseException):
            os.write(2, last_words)
            say(traceback.format_exc())
        with contextlib.suppress(BaseException):
            exit_now(1, before)
        os._exit(1)


def exit_now(code: int, before: Sequence[Callable[[], None]]) -> None:
    """os._exit: a thread has no other way to end a process whose main thread is in C++."""
    flushed = threading.Lock()

    def flush() -> None:
        for put_right in before:
            with contextlib.suppress(Exception):
                put_right()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        flushed.release()

    try:  # Thread.start waits for ever for a thread that finds no memory to begin
        flushed.acquire()
        _thread.start_new_thread(flush, ())
        flushed.acquire(timeout=0.5)  # the main thread may hold the lock of a stream
    finally:
        os._exit(code)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
