"""The ranks that one launcher has started on this machine, until they have met.

In: torchrun's variables, and what /proc reports of the launcher's children. Out: the cause to end
the job when the launcher ends, or when a rank ends or stops before it can be observed otherwise.
`watched_start` watches while a rank imports its libraries, which can take many seconds on a busy
machine; from the meeting on the watch of the job (`watch`) does. This file must not import torch.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator

from llama.ranks import processes
from llama.ranks.errors import say
from llama.ranks.launch import LAUNCHER, agent
from llama.ranks.rendezvous import GRACE_S, MAX_REFUSALS, SILENCE_S, TICK_S


class Siblings:
    """The ranks that the launcher of this rank has started on this machine, this one included.

    Attributes:
        launcher: The process id of torchrun or of `llama --ranks`; 0 without one.
    """

    def __init__(self) -> None:
        self.launcher = agent()
        self._own = int(os.environ.get("RANK", "0"))
        first = self._own - int(os.environ.get("LOCAL_RANK", "0"))
        self._expected = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._host = socket.gethostname()
        # The process of each rank. Launchers start them in order, so lower ones are known at once.
        self._started = processes.ranks_started_by(self.launcher) if self.launcher else {}
        self._gone_at: dict[int, float] = {}  # when a rank of them was first seen to have ended
        self._stopped_s: dict[int, float] = {}  # how long each has been stopped while this one ran
        self._complete_at = time.monotonic()  # when all of them last existed
        self._looked_at = time.monotonic()

    @property
    def is_orphaned(self) -> bool:
        """Whether the launcher has ended."""
        return self.launcher not in (0, os.getppid())

    @property
    def end_of_launcher(self) -> str:
        """The cause that follows from the end of the launcher."""
        name = "llama --ranks" if LAUNCHER in os.environ else "torchrun"
        process = f"{name} (process {self.launcher}) on {self._host}"
        return f"{process}, which started these ranks, {processes.describe_end(None)}"

    def causes(self, arrived: Collection[int] = ()) -> Iterator[str]:
        """Yield the causes to end the job that the siblings are, before all ranks have met.

        If a rank had failed, the launcher would end this one, too. Nothing is yielded until it is
        certain.

        Args:
            arrived: The ranks that are known otherwise, so that their end is noticed.
        """
        if not self.launcher:
            return
        now = time.monotonic()
        # A round that took longer than a tick means that this process was stopped itself.
        elapsed = min(now - self._looked_at, TICK_S)
        self._looked_at = now
        running = processes.ranks_started_by(self.launcher)
        self._started |= running
        for rank in self._started.keys() - running.keys():
            self._gone_at.setdefault(rank, now)
        absent = set(self._expected) - running.keys() - set(arrived)
        if not absent or self._own not in running:
            self._complete_at = now
        elif now - self._complete_at > GRACE_S:
            yield f"{self._name(min(absent))} ended before all ranks had met: it did not arrive"
        for rank, pid in running.items():
            is_stopped = processes.is_suspended(pid)
            self._stopped_s[rank] = self._stopped_s.get(rank, 0) + elapsed if is_stopped else 0
            if self._stopped_s[rank] > SILENCE_S:
                yield (
                    f"{self._name(rank)} was stopped (by SIGSTOP or Ctrl-Z) for {SILENCE_S:g} s, "
                    "before all ranks had met"
                )

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reports a cause: the lowest one that can.

        A rank that has just ended has reported it, and the launcher is about to end this one.
        """
        now = time.monotonic()
        for rank, pid in self._started.items():
            has_left = now - self._gone_at.get(rank, now) > GRACE_S
            if rank < self._own and not has_left and not processes.is_stopped(pid):
                return False
        return True

    def kill_stopped(self) -> None:
        """Send SIGKILL to stopped ranks: they would not answer SIGTERM, and torchrun waits 30 s."""
        for rank, pid in self._started.items():
            if self._stopped_s.get(rank) and processes.is_suspended(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._host}"


class _AgentStore:
    """The store of torchrun's agent, which listens before any rank starts.

    It tells that torchrun ended before this rank looked at its parent for the first time.
    """

    def __init__(self) -> None:
        self._is_unknown = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._refusals = 0

    def is_gone(self) -> bool:
        """Return whether nothing listens there; it is asked until it has answered once."""
        if self._is_unknown:
            try:
                address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                socket.create_connection(address, TICK_S).close()
                self._is_unknown = False
            except ConnectionRefusedError:
                self._refusals += 1
            except (OSError, ValueError, KeyError):  # the meeting of the ranks reports it
                self._is_unknown = False
        return self._refusals >= MAX_REFUSALS


@contextlib.contextmanager
def watched_start() -> Iterator[None]:
    """Watch the launcher and its ranks while the block runs; end this process when one has ended.

    The block may hold back signals and exceptions, as imports do. Nothing is watched without a
    launcher, nor in a process that a rank has started.
    """
    siblings = Siblings()
    if not siblings.launcher or processes.is_rank(siblings.launcher):
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(target=_watch, args=(siblings, is_over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _watch(siblings: Siblings, is_over: threading.Event) -> None:
    store = _AgentStore()
    while not is_over.wait(TICK_S):
        if siblings.is_orphaned or store.is_gone():
            if siblings.is_first:
                say(f"error: {siblings.end_of_launcher}")
            else:
                time.sleep(GRACE_S)  # whoever ends first may make a launcher end the others
            processes.exit_now(1, ())
        cause = next(siblings.causes(), "")
        # The first rank ends the job: the launcher ends the others after its message.
        if cause and siblings.is_first:
            say(f"error: {cause}")
            siblings.kill_stopped()
            processes.exit_now(1, ())
