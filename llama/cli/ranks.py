"""How a command ends, alone and under torchrun: one message from rank 0, and one exit code.

In: the function that does the work. Out: its exit code, once the process groups are destroyed. A
mistake of the user's is one line on stderr; a traceback is a bug of ours.
"""

import argparse
import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator

from llama.checks import number
from llama.cli.flags import HelpWanted, UsageError
from llama.ranks.errors import NotMetError, RankError
from llama.ranks.launch import LAUNCHER, launch
from llama.ranks.signals import DRAIN_S, SIGNALS
from llama.ranks.watch import Watch

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
USAGE = 2

_WAIT_S = 5.0  # torchrun ends the other ranks within a second of rank 0's end
_WATCHED_WAIT_S = 2.0  # the same where ranks see each other: rank 0 has the same error by now


def global_rank() -> int:
    """This process among all that torchrun started; 0 for a process alone."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return 0
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def say(line: str) -> None:
    """Write a line to stderr, on rank 0 alone; whoever read it may be gone."""
    if global_rank() == 0:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def start_ranks(options: argparse.Namespace) -> int | None:
    """With --ranks: run this command line in so many processes, to their exit code. None: this one
    is alone, or a rank. UsageError beside torchrun, or with a server."""
    count = getattr(options, "ranks", 1)
    if count == 1 or LAUNCHER in os.environ:
        return None
    if size := os.environ.get("WORLD_SIZE"):
        words = f"--ranks {count} starts ranks, and by WORLD_SIZE={size} torchrun has started some"
        raise UsageError(f"{words}: leave out --ranks and LLAMA_RANKS, or unset WORLD_SIZE")
    for name in ("url", "resident", "background"):
        if getattr(options, name, None):
            raise UsageError(f"with --{name} one process is enough: leave out --ranks, LLAMA_RANKS")
    return launch(sys.orig_argv[1:], count)


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """A warning is one line for the user, without the line of code that gave it."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


@_short_warnings()
def run(work: Callable[[], int | None], error_code: int = 1) -> int:
    """Do the work and leave the process groups. The exit code: 0, `error_code`, 2 or 130."""
    try:
        _open_closed_files()
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
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader has what it wanted: `llama complete | head -c 10`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again
        return 0
    except (OSError, ValueError, RankError) as e:
        return _fail(e, USAGE if isinstance(e, UsageError) else error_code)
    except Exception as e:
        lost = _lost_connection(e)
        watch = Watch.of_process()
        if watch is not None:  # a bug of ours, or no memory, or no connection: all ranks end
            watch.fail(lost or e, has_trace=lost is None)
        if lost is None:
            raise
        return _fail(lost, error_code)
    finally:  # leave the groups, if a model was loaded: a process that only exits may abort instead
        if groups := sys.modules.get("llama.ranks.groups"):
            groups.disconnect()


def _open_closed_files() -> None:
    """Standard files that a shell has closed: what is opened next must not take their place."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _fail(error: Exception, code: int) -> int:
    """Print the error once: rank 0 has the same one or a RankError, and ends the job."""
    rank, watch = global_rank(), Watch.of_process()
    if not isinstance(error, NotMetError):  # raised on the one rank that is to say it
        _let_rank_0_end()
        if watch is not None:
            if rank and not watch.peers.all[0].is_over:
                watch.fail(error, has_trace=False)  # rank 0 knows nothing of it
            if rank or watch.is_ending:
                return code
    origin = f"rank {rank}: " if rank else ""
    print(f"{origin}error: {error}", file=sys.stderr, flush=True)
    return code


def _let_rank_0_end() -> None:
    """torchrun ends all ranks when one fails: the one that prints must be the first."""
    if not global_rank():
        return
    watch = Watch.of_process()
    if watch is None:
        time.sleep(_WAIT_S)
        return
    end = time.monotonic() + _WATCHED_WAIT_S
    while time.monotonic() < end and not (watch.peers.all[0].is_over or watch.is_ending):
        time.sleep(0.05)


def finish_on_signal(drain_s: float | None = None) -> None:
    """SIGTERM or Ctrl-C lets ranks finish what they run, in drain_s (LLAMA_DRAIN_S, else 20)."""
    given = (os.environ.get("LLAMA_DRAIN_S") or DRAIN_S) if drain_s is None else drain_s
    with contextlib.suppress(ValueError):
        given = float(given)
    SIGNALS.drain_s = number("LLAMA_DRAIN_S", given, 0, 10**6)


def _lost_connection(error: Exception) -> RuntimeError | None:
    """For torch's error of its store or a socket, one line without its stack; None for another."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(error, distributed.DistError):
        return None
    place = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    return RuntimeError(
        f"a connection between the ranks, which met at {place}, is lost "
        f"({str(error).partition(chr(10))[0]}): another rank, its machine, its torchrun or the "
        "network is gone; the first message of the other machines says more"
    )


def check_one_group(groups: int, why: str, remedy: str) -> None:
    """ValueError where a command that is for one model-parallel group has several."""
    if groups > 1:
        words = f"there are {groups} model-parallel groups: leave model_parallel_size out"
        raise ValueError(f"{why}, and {words}, {remedy}")
