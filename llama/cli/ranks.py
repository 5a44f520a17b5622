"""The end of a command, alone and under torchrun: one message from rank 0, and one exit code.

The input is the function that does the work; the output is its exit code, once the process groups
are destroyed. A mistake of the user is one line on stderr; a traceback is a bug of this package.
"""

import argparse
import codecs
import contextlib
import io
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator

from llama.api import (
    DRAIN_S,
    LAUNCHER,
    SIGNALS,
    NotMetError,
    RankError,
    Watch,
    address_space_limit,
    launch,
)
from llama.cli.flags import HelpWanted, UsageError, usage_errors
from llama.common.checks import FieldError, number

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
USAGE = 2

_WAIT_S = 5.0  # torchrun ends the other ranks within a second after rank 0 has ended.
_WATCHED_WAIT_S = 2.0  # the same if ranks watch each other: rank 0 then has the same error by now
_POLL_S = 0.05
# Errors of the dynamic linker, of PyTorch's allocator, of system calls, and of Python's threads.
_NO_ADDRESS_SPACE = re.compile(
    "failed to map segment|can't allocate memory|cannot allocate memory|can't start new thread",
    re.IGNORECASE,
)


def global_rank() -> int:
    """Return the rank of this process among all that torchrun started; 0 for a single process."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return 0
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def say(line: str) -> None:
    """Write a line to stderr, on rank 0 only. It is no error if nobody reads stderr any more."""
    if global_rank() == 0:
        with contextlib.suppress(OSError):
            _write_line(line)


def _write_line(line: str) -> None:
    """Write a line to stderr in one call, so that lines of other ranks and threads do not mix.

    print() makes two calls where PYTHONUNBUFFERED is set.
    """
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def start_ranks(options: argparse.Namespace) -> int | None:
    """Run this command line in the number of processes that --ranks gives.

    Returns:
        The exit code; None if this process is to do the work, alone or as a rank, or if it starts
        replicas, each of which starts its own ranks.

    Raises:
        UsageError: --ranks is given under torchrun, or with a server.
    """
    count = getattr(options, "ranks", 1)
    if count == 1 or getattr(options, "replicas", 1) > 1 or LAUNCHER in os.environ:
        return None
    world_size = os.environ.get("WORLD_SIZE")
    if world_size:
        raise UsageError(
            f"--ranks {count} starts ranks, but torchrun has already started some "
            f"(WORLD_SIZE={world_size}): leave out --ranks and LLAMA_RANKS, or unset WORLD_SIZE"
        )
    for name in ("url", "resident", "background"):
        if getattr(options, name, None):
            raise UsageError(f"--{name} needs only one process: leave out --ranks and LLAMA_RANKS")
    return launch(sys.orig_argv[1:], count)


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Show a warning as one line, without the line of code that gave it."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


@_short_warnings()
def run(work: Callable[[], int | None], error_code: int = 1) -> int:
    """Do the work, leave the process groups, and return the exit code.

    Args:
        work: Returns an exit code, or None for 0.
        error_code: The exit code after an error.

    Returns:
        0, `error_code`, `USAGE` after a UsageError, or `INTERRUPTED` after Ctrl-C.
    """
    try:
        return _run(work)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # The reader has got what it wanted: `llama complete | head -c 10`.
        # Python flushes stdout once more at its end, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError, RankError) as e:
        return _fail(e, USAGE if isinstance(e, UsageError) else error_code)
    except Exception as e:
        lost = _lost_connection(e) or _exceeded_limit(e)
        watch = Watch.of_process()
        if watch is not None:  # After a bug, or without memory or a connection, all ranks end.
            watch.fail(lost or e, has_trace=lost is None)
        if lost is None:
            raise
        return _fail(lost, error_code)
    finally:
        # Groups exist only if a model was loaded. A process that exits without leaving its groups
        # may abort.
        groups = sys.modules.get("llama.ranks.groups")
        if groups:
            groups.disconnect()


def _run(work: Callable[[], int | None]) -> int:
    _open_closed_files()
    _use_utf8()
    try:
        code = work() or 0
    except HelpWanted as e:
        code = 0
        if global_rank() == 0:
            print(e, end="")
    sys.stdout.flush()
    if code:
        _let_rank_0_end()
    return code


def _open_closed_files() -> None:
    """Open the standard files that a shell has closed.

    Otherwise the next file that is opened would take their number, and receive their output.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _use_utf8() -> None:
    """Read and write UTF-8 where the locale is C and Python's UTF-8 mode is off.

    Prompts and answers could not be read and written in ASCII.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name == "ascii":
            stream.reconfigure(encoding="utf-8")


def _fail(error: Exception, code: int) -> int:
    """Print an error once for all ranks, and return the exit code.

    Rank 0 has the same error or a RankError, and ends the job.
    """
    rank = global_rank()
    watch = Watch.of_process()
    if not isinstance(error, NotMetError):  # That error is raised on the one rank that reports it.
        _let_rank_0_end()
        if watch is not None:
            if rank and not watch.peers.all[0].is_over:
                watch.fail(error, has_trace=False)  # Rank 0 does not know of the error.
            if rank or watch.is_ending:
                return code
    origin = f"rank {rank}: " if rank else ""
    _write_line(f"{origin}error: {_words(error)}")
    return code


def _words(error: Exception) -> str:
    """Return the text of an error; for one of the system, the file and what is wrong with it."""
    if not isinstance(error, OSError) or isinstance(error, FieldError) or not error.strerror:
        return str(error)
    file = "" if error.filename is None else f"{error.filename}: "
    return f"{file}{error.strerror[:1].lower()}{error.strerror[1:]}"


def _let_rank_0_end() -> None:
    """Wait for rank 0 to end first.

    torchrun ends all ranks when one of them fails, so the rank that prints must be the first.
    """
    if not global_rank():
        return
    watch = Watch.of_process()
    if watch is None:
        time.sleep(_WAIT_S)
        return
    end = time.monotonic() + _WATCHED_WAIT_S
    while time.monotonic() < end and not (watch.peers.all[0].is_over or watch.is_ending):
        time.sleep(_POLL_S)


def finish_on_signal(drain_s: float | None = None) -> None:
    """Let SIGTERM and Ctrl-C allow ranks to finish what they run.

    Args:
        drain_s: Seconds that this may take; by default LLAMA_DRAIN_S, or 20.
    """
    given = (os.environ.get("LLAMA_DRAIN_S") or DRAIN_S) if drain_s is None else drain_s
    with contextlib.suppress(ValueError):
        given = float(given)
    with usage_errors({"LLAMA_DRAIN_S"}):
        SIGNALS.drain_s = number("LLAMA_DRAIN_S", given, 0, 10**6)


def _lost_connection(error: Exception) -> RuntimeError | None:
    """Return a one-line error in place of torch's error of its store or of a socket.

    Returns:
        The error without torch's stack; None if `error` is another one.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(error, distributed.DistError):
        return None
    address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    reason = str(error).partition("\n")[0]
    return RuntimeError(
        f"a connection between the ranks, which met at {address}, is lost ({reason}): another "
        "rank, its machine, its torchrun or the network is gone; the first error message of the "
        "other machines says more"
    )


def _exceeded_limit(error: Exception) -> RuntimeError | None:
    """Return a one-line error in place of one that `ulimit -v` causes; None for other errors."""
    limit = address_space_limit()
    if limit is None:
        return None
    message = str(error).partition("\n")[0]
    if not isinstance(error, MemoryError) and not _NO_ADDRESS_SPACE.search(str(error)):
        return None
    return RuntimeError(
        f"the {limit >> 10:,} KiB of address space that `ulimit -v` allows are used up "
        f"({type(error).__name__}: {message}): raise the limit, or set it to unlimited"
    )


def check_one_group(groups: int, reason: str, remedy: str) -> None:
    """Check that there is one model-parallel group.

    Args:
        groups: Number of groups.
        reason: Why a command cannot use several groups.
        remedy: What to do, other than leaving out model_parallel_size.

    Raises:
        ValueError: There are several groups.
    """
    if groups > 1:
        raise ValueError(
            f"{reason}, and there are {groups} model-parallel groups: leave out "
            f"model_parallel_size, {remedy}"
        )
