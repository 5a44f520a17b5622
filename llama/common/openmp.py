"""The time that OpenMP's threads spin before they sleep: long where they are alone, else brief.

At the end of a parallel region the threads wait for one another and for the next region. libgomp,
GNU's runtime, which torch brings along on Linux, spins there 300,000 times (14 ms on a Xeon at 3
GHz). On a quiet machine that is fastest: a step of torch's ops has hundreds of regions, and a
thread that sleeps takes 50 microseconds to wake. Next to other busy processes the system suspends a
thread now and then, and those that spin take the core that it waits for. The CPU kernels have few
regions, with a short wait of their own inside (kernels/cpu/team.h). Between regions the time
matters to them too, above all for small models. scripts/bench/README.md has the measurements.

In: what the user has set in the environment, and how long tasks wait for a core (Linux's pressure
stall information, Documentation/accounting/psi.rst). Out: nothing; results do not change.
"""

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path

import torch

from llama.common.device import cgroup_folders

# The variables with which a user says how to wait: then nothing is changed.
_USER_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_RUNTIMES = ("libgomp", "libiomp", "libomp")  # GNU's, Intel's and LLVM's
_MAX_TEAM = 64  # threads that may be made to sleep; each has a stack, little of which is touched
_THREAD_ELEMENTS = 32768  # the fewest elements that torch gives a thread
_POLL_S = 0.25  # the time between two looks at the pressure
# Parts of the time in which a task waited for a core.
_CROWDED = 0.3
_CALM = 0.1


class ShortSpin:
    """A switch: while it is on, this process's OpenMP threads soon sleep when they wait.

    libgomp has no call for this, but a rule (config/linux/wait.h): where it has made more threads
    than there are CPUs, they spin 1,000 times only (47 microseconds). So a thread runs one region
    of its own, and then sleeps with its team until the switch is turned off: its team ends with it.
    """

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL(None)
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def turn_on(self) -> None:
        """Make the threads sleep soon.

        Nothing happens where that would take a team of more than 64 threads, as it would for 2
        threads on 128 CPUs.
        """
        # CPUs as libgomp counts them: those that the process may run on, whatever its quota.
        num_cpus = len(os.sched_getaffinity(0))
        size = idle_team_size(torch.get_num_threads(), num_cpus)
        if self._thread is not None or size > _MAX_TEAM:
            return
        is_ready = threading.Event()
        self._thread = threading.Thread(
            target=self._sleep, args=(size, is_ready), name="idle OpenMP team", daemon=True
        )
        self._thread.start()
        is_ready.wait()

    def turn_off(self) -> None:
        """Let the threads spin again as libgomp does by default."""
        if self._thread is not None:
            self._end.set()
            self._thread.join()
            self._end.clear()
            self._thread = None

    def _sleep(self, size: int, is_ready: threading.Event) -> None:
        torch.get_num_threads()  # torch sets this thread's number at its first use; then it stays
        self._runtime.omp_set_num_threads(size)  # it holds for regions that this thread begins
        torch.ones(size * _THREAD_ELEMENTS).sum()
        is_ready.set()
        self._end.wait()


class SpinController:
    """Turns short spins on where tasks wait for cores, and off where they do not."""

    def __init__(self, pressure_file: Path, spin: ShortSpin) -> None:
        self.spin = spin
        self._file = pressure_file
        self._polled_at = time.monotonic()
        self._total_us = self._read()

    @classmethod
    def for_this_process(cls) -> "SpinController | None":
        """Return a controller, or None where there is nothing to adapt.

        That is so with another runtime than libgomp, on a system that does not report the pressure,
        and where a variable of the environment says how to wait.
        """
        if any(os.environ.get(name) for name in _USER_VARIABLES):
            return None
        if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
            return None
        file = pressure_file()
        return None if file is None else cls(file, ShortSpin())

    def poll(self) -> None:
        """Adapt the spins to how long tasks have waited; at most every 0.25 s it does something.

        The thread that runs the model calls it in each step.
        """
        now = time.monotonic()
        elapsed = now - self._polled_at
        if elapsed < _POLL_S or torch.get_num_threads() == 1:
            return
        total_us = self._read()
        waited = (total_us - self._total_us) / 1e6 / elapsed
        self._polled_at = now
        self._total_us = total_us
        if waited > _CROWDED:
            self.spin.turn_on()
        elif waited < _CALM:
            self.spin.turn_off()

    def _read(self) -> int:
        """Return the microseconds in which some task has waited; 0 if the file has gone."""
        try:
            return int(self._file.read_text().split("total=")[1].split()[0])
        except (OSError, IndexError, ValueError):
            return 0


def share_runtime() -> None:
    """Let libraries that are loaded from now on find the functions of torch's OpenMP runtime.

    On x86-64 torch loads the runtime for all libraries, on ARM for its own alone.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {fields[5] for fields in (line.split(maxsplit=5) for line in lines) if fields[5:]}
    for path in paths:
        if Path(path).name.startswith(_RUNTIMES):
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)


def pressure_file() -> Path | None:
    """Return the file in which Linux reports how long tasks waited for cores.

    It counts the tasks of this control group, or else all; None if the system has no such file.
    """
    groups = [folder / "cpu.pressure" for folder in cgroup_folders("cpu")]
    for path in (*groups, Path("/proc/pressure/cpu")):
        with contextlib.suppress(OSError):
            path.read_text()
            return path
    return None


def idle_team_size(threads: int, cpus: int) -> int:
    """Return the smallest team that, alongside one of `threads`, makes more threads than CPUs.

    libgomp counts the process's first thread, and of each team all but the thread that began it:
    threads + size - 1.
    """
    return max(2, cpus - threads + 2)
