"""Processes of this machine: whether they run, are stopped or have ended, and how to end one.

In: a process id. Out: a pidfd (pidfd_open(2)) that becomes readable when the process ends, and a
description of its end. Without Linux there are no pidfds, and each rank counts as a machine of its
own. It must not know what ranks compute.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from llama.ranks.errors import say


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def open_process(pid: int) -> int | None:
    """Return a pidfd of a process, or None if the process has ended or the system has no pidfds."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    return stat(pid)[:1] in ([], ["Z"], ["X"])


def ranks_started_by(pid: int) -> dict[int, int]:
    """Return the running children of a process by their RANK variables.

    There are none if the process is a rank itself, or if the variables cannot be read.
    """
    try:
        if _started_rank(pid) is not None:
            return {}
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        children = [child for child in pids if stat(child)[1:2] == [str(pid)]]
        ranks = [(_started_rank(child), child) for child in children]
    except PermissionError:
        return {}
    return {rank: child for rank, child in ranks if rank is not None}


def _started_rank(pid: int) -> int | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return None
    texts = [text.removeprefix(b"RANK=") for text in variables if text.startswith(b"RANK=")]
    return int(texts[0]) if texts and texts[0].isdigit() else None


def machine_id() -> str:
    """Return a text that identifies the machine.

    It is the same for two processes that see each other's process ids and local sockets.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
        return " ".join([boot, *namespaces])
    except OSError:
        return f"no /proc, process {os.getpid()}"


def address_space_limit() -> int | None:
    """Return the bytes that this process may map, if `ulimit -v` limits them."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or by a debugger."""
    return stat(pid)[:1] in (["T"], ["t"])


def is_suspended(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP or Ctrl-Z.

    A process that a debugger has stopped does not count, as the debugger will continue it.
    """
    return stat(pid)[:1] == ["T"]


def wait_status(pid: int) -> int | None:
    """Return the wait status of an ended process (wait(2)), or None if it is unknown.

    /proc shows it until the parent has waited for the process (proc(5), `exit_code`).
    """
    fields = stat(pid)
    return int(fields[-1]) if fields[:1] == ["Z"] else None


def child_status(pid: int) -> int | None:
    """Return the wait status of a child that has ended, or None if it is running.

    The child stays a zombie until its parent ends, so that its siblings can read `wait_status`.
    """
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        ended, status = os.waitpid(pid, os.WNOHANG)
        return status if ended else None
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status << 8 if result.si_code == os.CLD_EXITED else result.si_status


def was_killed(status: int | None) -> bool:
    """Return whether a signal ended the process, so that it could not report anything."""
    return status is not None and status & 0x7F != 0


def was_terminated(status: int | None) -> bool:
    """Return whether SIGTERM ended the process, or a handler that exits with 128 + SIGTERM."""
    return status in (signal.SIGTERM, 128 + signal.SIGTERM << 8)


def describe_end(status: int | None) -> str:
    """Describe the end of a process: the text after its name, such as "was killed by SIGKILL"."""
    if status is None:
        return "exited without an error message (killed, or out of memory: check `dmesg`)"
    number = signal.SIGTERM if was_terminated(status) else status & 0x7F
    if number == signal.SIGKILL:
        return "was killed by SIGKILL (if nobody sent it, memory ran out: check `dmesg`)"
    if number:
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit code {status >> 8} while the others were still working"


@contextlib.contextmanager
def or_exit(last_message: bytes, before: Sequence[Callable[[], None]]) -> Iterator[None]:
    """End the process if the block raises, as the process might hang forever without the block.

    Args:
        last_message: a text that is written to stderr first.
        before: functions that are called before the end; see `exit_now`.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        with contextlib.suppress(BaseException):
            os.write(2, last_message)
            say(traceback.format_exc())
        with contextlib.suppress(BaseException):
            exit_now(1, before)
        os._exit(1)


def exit_now(code: int, before: Sequence[Callable[[], None]]) -> None:
    """End the process from any thread, by os._exit.

    A thread has no other way to end a process whose main thread is inside C++.

    Args:
        code: the exit code.
        before: functions that are called first, such as one that restores the terminal.
    """
    flushed = threading.Lock()

    def flush() -> None:
        for restore in before:
            with contextlib.suppress(Exception):
                restore()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        flushed.release()

    try:  # Thread.start would wait forever for a thread that has no memory to begin
        flushed.acquire()
        _thread.start_new_thread(flush, ())
        flushed.acquire(timeout=0.5)  # limited, as the main thread may hold the lock of a stream
    finally:
        os._exit(code)
