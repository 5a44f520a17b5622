"""A process beside a rank that kills it once it is stopped and no other rank can.

`processes.Watchdog` runs this file as a program if ranks are on other machines, which give up a
machine whose ranks are all silent, but cannot kill them. In: the rank's process id, its name, and
the limit in seconds; on stdin, the process ids of the other ranks of this machine, in a line at
each change. Out: SIGKILL to the rank, and a message. It ends with its rank, at the end of stdin. It
has a session of its own, so that Ctrl-Z does not stop it as well. Time counts only while it runs: a
machine that is suspended as a whole goes on.

It starts within milliseconds and imports nothing of this package.
"""

import os
import select
import signal
import sys
import time

_TICK_S = 0.5  # interval of the looks at the rank


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def watch(pid: int, name: str, limit_s: float) -> None:
    """Kill the parent process if it is stopped for too long, and nobody else will.

    Args:
        pid: The process id of the parent, a rank.
        name: The name of the rank, for the message.
        limit_s: How long the rank may be stopped.
    """
    others: list[int] = []  # the other ranks of this machine
    stopped_s = 0.0
    looked_at = time.monotonic()
    while os.getppid() == pid:
        if select.select([0], [], [], _TICK_S)[0]:
            lines = os.read(0, 1 << 16).decode().splitlines()
            if not lines:
                return
            others = [int(other) for other in lines[-1].split()]
        now = time.monotonic()
        # A round that took longer than a tick means that this process was stopped itself.
        elapsed = min(now - looked_at, _TICK_S)
        looked_at = now
        stopped_s = stopped_s + elapsed if _state(pid) == "T" else 0.0
        if stopped_s > limit_s and all(_state(other) in ("", "T", "Z", "X") for other in others):
            os.kill(pid, signal.SIGKILL)
            _say(
                f"{name} was stopped (by SIGSTOP or Ctrl-Z) for {limit_s:g} s and was killed: a "
                "job of several machines cannot pause"
            )
            return


def _state(pid: int) -> str:
    return (stat(pid) or [""])[0]


def _say(message: str) -> None:
    """Write a message to stderr, unless nobody reads it and the write would wait."""
    if select.select([], [2], [], 0)[1]:
        os.write(2, f"llama: {message}\n".encode())


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
