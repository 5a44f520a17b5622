"""How long OpenMP's threads spin before they sleep: briefly, as other processes need the cores too.

At the end of a parallel region the threads wait for one another and for the next region. libgomp,
GNU's runtime, which torch brings along on Linux, spins there 300,000 times (14 ms on a Xeon at 3
GHz); libomp, LLVM's and Intel's, 200 ms. Where the system has put one thread aside, the others
so take the core that it waits for. Measured: beside two busy processes a step of the 1B shape took
1,350 ms, and with brief spins 170 to 240.

In: what the user has set in the environment. Out: nothing; results do not change.
"""

import ctypes
import functools
import os
import threading

import torch

_CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # the user's word counts
_MOST = 64  # threads that may be made to sleep; each has a stack, of which little is touched
_GRAIN = 32768  # numbers: torch gives a thread at least as many
_BLOCK_MS = 1


@functools.cache
def wait_briefly() -> threading.Thread | None:
    """Let this process's OpenMP threads sleep soon when they wait; once per process.

    libgomp has no call for this, but a rule (config/linux/wait.h): where it has made more threads
    than there are CPUs, they spin 1,000 times only (47 microseconds). So a thread runs one region
    of its own and then sleeps for good, with its team: the thread returned. None where that is not
    done: for one thread, which waits for nobody; with libomp, which has a call; where a variable of
    the environment says how to wait; and where the team would be of more than 64 threads, as for 2
    threads on 128 CPUs.
    """
    if torch.get_num_threads() == 1 or any(os.environ.get(name) for name in _CHOSEN):
        return None
    runtime = ctypes.CDLL(None)
    if hasattr(runtime, "kmp_set_blocktime"):
        runtime.kmp_set_blocktime(_BLOCK_MS)  # of regions that this thread begins
        return None
    size = idle_team_size(torch.get_num_threads(), _cpus())
    if size > _MOST or not hasattr(runtime, "GOMP_parallel"):
        return None
    ready = threading.Event()
    team = threading.Thread(
        target=_sleep, args=(runtime, size, ready), name="idle OpenMP team", daemon=True
    )
    team.start()
    ready.wait()
    return team


def idle_team_size(threads: int, cpus: int) -> int:
    """The least team that, beside one of `threads`, makes more threads than CPUs.

    libgomp counts the process's first thread, and of each team all but the thread that began it:
    threads + size - 1.
    """
    return max(2, cpus - threads + 2)


def _cpus() -> int:
    """As libgomp counts them: those that the process may run on, whatever its quota."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _sleep(runtime: ctypes.CDLL, size: int, ready: threading.Event) -> None:
    torch.get_num_threads()  # torch sets this thread's number at its first use; then it stays
    runtime.omp_set_num_threads(size)  # of regions that this thread begins
    torch.ones(size * _GRAIN).sum()
    ready.set()
    threading.Event().wait()
