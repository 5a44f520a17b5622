"""How long OpenMP's threads spin before they sleep: long where they are alone, else briefly.

At the end of a parallel region the threads wait for one another and for the next region. libgomp,
GNU's runtime, which torch brings along on Linux, spins there 300,000 times (14 ms on a Xeon at 3
GHz). On a quiet machine that is fastest: a step of torch's ops has hundreds of regions, and a
sleeper takes 50 microseconds to wake. Beside other busy processes the system puts a thread aside
now and then, and those that spin take the core that it waits for. The CPU kernels have few regions,
with a short wait of their own inside (ops/cpu/team.h); between regions this matters to them too,
above all for small models. scripts/bench/README.md has what was measured.

In: what the user has set in the environment, and how often tasks wait for a core (Linux's pressure
stall information, Documentation/accounting/psi.rst). Out: nothing; results do not change.
"""

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path

import torch

from llama.device import cgroup_folders

_CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # the user's word counts
_MOST = 64  # threads that may be made to sleep; each has a stack, of which little is touched
_GRAIN = 32768  # numbers: torch gives a thread at least as many
_EVERY_S = 0.25  # between two looks at the pressure
_CROWDED, _CALM = 0.3, 0.1  # shares of the time in which a task waited for a core


class ShortSpin:
    """While they are on, this process's OpenMP threads sleep soon when they wait.

    libgomp has no call for this, but a rule (config/linux/wait.h): where it has made more threads
    than there are CPUs, they spin 1,000 times only (47 microseconds). So a thread runs one region
    of its own and then sleeps with its team, until they are turned off: its team ends with it.
    """

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL(None)
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def turn_on(self) -> None:
        """Nothing, if they are on; or where the team would be of more than 64 threads, as for 2
        threads on 128 CPUs."""
        # CPUs as libgomp counts them: those that the process may run on, whatever its quota.
        size = idle_team_size(torch.get_num_threads(), len(os.sched_getaffinity(0)))
        if self._thread is not None or size > _MOST:
            return
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._sleep, args=(size, ready), name="idle OpenMP team", daemon=True
        )
        self._thread.start()
        ready.wait()

    def turn_off(self) -> None:
        if self._thread is not None:
            self._end.set()
            self._thread.join()
            self._end.clear()
            self._thread = None

    def _sleep(self, size: int, ready: threading.Event) -> None:
        torch.get_num_threads()  # torch sets this thread's number at its first use; then it stays
        self._runtime.omp_set_num_threads(size)  # of regions that this thread begins
        torch.ones(size * _GRAIN).sum()
        ready.set()
        self._end.wait()


class SpinController:
    """Turns short spins on where tasks wait for cores, and off where they do not."""

    def __init__(self, pressure_file: Path, spin: ShortSpin) -> None:
        self.spin = spin
        self._file = pressure_file
        self._at, self._total_us = time.monotonic(), self._read()

    @classmethod
    def for_this_process(cls) -> "SpinController | None":
        """None where there is nothing to adapt: another runtime than libgomp, a system that does
        not tell the pressure, or a variable of the environment that says how to wait."""
        if any(os.environ.get(name) for name in _CHOSEN):
            return None
        if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
            return None
        file = pressure_file()
        return None if file is None else cls(file, ShortSpin())

    def poll(self) -> None:
        """In each step, by the thread that runs the model. At most every 0.25 s: how much has a
        task waited since the last look?"""
        now = time.monotonic()
        if now - self._at < _EVERY_S or torch.get_num_threads() == 1:
            return
        total_us = self._read()
        share = (total_us - self._total_us) / 1e6 / (now - self._at)
        self._at, self._total_us = now, total_us
        if share > _CROWDED:
            self.spin.turn_on()
        elif share < _CALM:
            self.spin.turn_off()

    def _read(self) -> int:
        """Microseconds in which some task has waited; 0 if the file has gone."""
        try:
            return int(self._file.read_text().split("total=")[1].split()[0])
        except (OSError, IndexError, ValueError):
            return 0


def pressure_file() -> Path | None:
    """Where Linux tells how long tasks waited for cores: those of this control group, or all."""
    groups = [folder / "cpu.pressure" for folder in cgroup_folders("cpu")]
    for path in (*groups, Path("/proc/pressure/cpu")):
        with contextlib.suppress(OSError):
            path.read_text()
            return path
    return None


def idle_team_size(threads: int, cpus: int) -> int:
    """The least team that, beside one of `threads`, makes more threads than CPUs.

    libgomp counts the process's first thread, and of each team all but the thread that began it:
    threads + size - 1.
    """
    return max(2, cpus - threads + 2)
