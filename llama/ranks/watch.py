"""A thread in each rank that ends the whole job, with one message, when a rank fails.

In: ends of other ranks and of torchrun, the records in torch's store, signals, and steps that do
not end. Out: one message that names rank, host and cause, and the end of this process. The main
thread may be inside gloo, where neither handlers nor exceptions of Python run. This file must not
import torch.

The watch starts before any other rank is known, and learns of the ranks as they arrive:

    meeting --all have arrived--> running --stop()--> over
       | a cause                     | a cause
       v                             v
    speaker: NotMetError          ending: the speaker reports  --grace period--> exit code 1
    others: as in `ending`

A cause is what this rank observes (`_report`), or what another rank has claimed in the store
(`_follow`). If several ranks observe the same, the first to claim it is the speaker, and the others
end silently. Under torchrun they wait a moment for its SIGTERM, so that its summary also names the
rank that failed first as the root cause. The end of a process counts only after the store has been
read again, as that rank may have claimed a cause, or left in order. A rank that is stopped while
this one runs is given up after 3 s: Ctrl-Z of a whole job ends nothing, nor does a debugger of an
idle rank. A machine whose ranks are all stopped is given up by the others, as it is silent; its
ranks end when they continue.

The file has more than 400 lines, as the states and their transitions must be read together.
"""

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from llama.ranks import processes
from llama.ranks.errors import NotMetError, say
from llama.ranks.launch import LAUNCHER
from llama.ranks.peers import PeerInfo, Peers
from llama.ranks.rendezvous import GRACE_S, POLL_S, STOPPED_S, TICK_S, Rendezvous
from llama.ranks.signals import SIGNALS
from llama.ranks.stalls import Inside, find_left_early, find_stalled_rank

LATER_S = 5.0  # collectives time out later than the watch, which names the cause
_UNWIND_S = 2.0  # time for a failed rank to run its `finally` blocks, and for others to follow
_NOTE_S = 10.0  # time after which the user is informed which ranks are missing
_TIMED_OUT = "(the limit is timeout_s)"  # part of the message about a stall


@dataclass(frozen=True)
class _Wait:
    """A block that waits for other ranks: what it does, since when, and its limit."""

    what: str
    since: float
    limit_s: float


class Watch(threading.Thread):
    """The watch of one process, from `meet` to `stop`. Any thread may call it.

    Attributes:
        peers: this rank and the others.
        group: the ranks that make steps with this one; the others only belong to the same job.
        rendezvous: the records of the ranks in the store.
        steps: the number of steps begun.
        collective: its `with` block encloses each wait for the tensors or bytes of other ranks.
        before_end: functions that are called before the process ends, such as one that restores the
            terminal.
        left_groups: process groups of models that no longer exist; the next build destroys them.
        stage_groups: the groups between pipeline stages, which all models of the process use; None
            for two stages, and where a program made the groups.
    """

    def __init__(self, peers: Peers, group: range, rendezvous: Rendezvous) -> None:
        super().__init__(name="llama-watch", daemon=True)
        self.peers = peers
        self.group = group
        self.rendezvous = rendezvous
        self.steps = 0
        self.collective = Inside()
        self.before_end: list[Callable[[], None]] = []
        self.left_groups: list[Any] = []
        self.stage_groups: Any = None
        self._waits: dict[int, _Wait] = {}  # key: thread
        self._lock = threading.RLock()
        self._not_met = ""  # the cause, on the rank that raises it
        self._is_known = threading.Event()  # the cause is known, so the job ends
        self._deadline = float("inf")  # when this process ends
        self._looked_at = time.monotonic()
        last_message = f"llama: {peers.own.name} ends at once: out of memory, or a bug\n"
        self._last_message = last_message.encode()  # made now, as memory may be lacking later
        self._is_own = False  # this rank has failed
        self._kills_survivors = False  # this rank ends the other processes of the machine
        self._stops = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._hook = sys.excepthook
        self._began = time.monotonic()
        self._has_noted = False
        rendezvous.own_state = self._state
        rendezvous.on_news = self._wake

    @staticmethod
    def of_process() -> "Watch | None":
        """Return the watch of this process; it is one of the threads, so a fork has none."""
        return next((t for t in threading.enumerate() if isinstance(t, Watch)), None)

    def meet(self) -> None:
        """Wait until all ranks have arrived.

        Raises:
            NotMetError: on one rank of each machine; the other ranks end silently.
        """
        SIGNALS.install()
        sys.excepthook = self._excepthook
        self.rendezvous.start()
        self.start()
        try:
            while not self.rendezvous.has_met.wait(POLL_S) and not self._not_met:
                pass
            with self._lock:  # `_report` may be about to set the cause
                if self._not_met:
                    self.peers.outlive(GRACE_S)  # others may read the cause in this rank's store
                    raise NotMetError(self._not_met)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Publish that this rank leaves in order; does not return while the job fails."""
        if self._is_known.is_set() and not self._not_met:
            if self._is_own:
                self._deadline = 0.0  # the `finally` blocks have run
                self._wake()
            self.join()  # the watch ends the process, after the rank that failed
        self.rendezvous.close()
        self._stops = True
        self._wake()
        self.join()
        SIGNALS.restore()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        self.peers.close()
        self.rendezvous.on_news = lambda: None
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)

    def can_go_on(self, rank: int) -> bool:
        """Return whether another rank can go on: it has neither left nor stopped."""
        peer = self.peers.all[rank]
        return not peer.is_over and peer.stopped_s < GRACE_S

    @property
    def _is_meeting(self) -> bool:
        return not self.rendezvous.has_met.is_set()

    @property
    def is_ending(self) -> bool:
        """Whether the job fails and its message is printed; nothing else shall be printed."""
        return self._is_known.is_set()

    @contextlib.contextmanager
    def step(self, limit_s: float) -> Iterator[None]:
        """Run a block together with all ranks of the group; an error in it ends the job."""
        self.steps += 1
        try:
            with self.waiting("a step", limit_s):
                yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.fail(error, " in a step")
            raise

    @contextlib.contextmanager
    def waiting(self, what: str, limit_s: float) -> Iterator[None]:
        """Run a block that waits for other ranks; the job ends if it takes longer than the limit.

        Args:
            what: what the block does, for messages.
            limit_s: the limit in seconds.
        """
        thread = threading.get_ident()
        self._waits[thread] = _Wait(what, time.monotonic(), limit_s)
        try:
            yield
        finally:
            self._waits.pop(thread, None)

    def fail(self, error: BaseException, during: str = "", *, has_trace: bool = True) -> None:
        """End the job for an error of this rank, and report it unless another rank is the cause.

        This returns, so that the `finally` blocks of the caller run; the process ends soon,
        whatever they do. Without memory for a message it ends at once, and the others notice that.

        Args:
            error: the error.
            during: what the rank was doing, for the message, such as " in a step".
            has_trace: whether to print the traceback.
        """
        with processes.or_exit(self._last_message, self.before_end):
            if isinstance(error, RuntimeError):  # gloo's error if another rank has ended
                self.wait_for_cause()
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, SystemExit):
                message = f"sys.exit({error.code!r})"
            trace = "".join(traceback.format_exception(error)).rstrip() if has_trace else ""
            self._report(f"{self.peers.own.name} failed{during}: {message}", trace, is_own=True)

    def wait_for_cause(self) -> None:
        """Wait until another rank is known as the cause of an error, or none seems to be.

        The error may say that a connection is broken: a machine that is silent as well is down.
        """
        self.rendezvous.silence_s = min(self.rendezvous.silence_s, STOPPED_S)
        end = time.monotonic() + GRACE_S + self.rendezvous.silence_s * self.peers.are_spread
        while time.monotonic() < end and not self._is_known.wait(POLL_S):
            if cause := find_left_early(self.peers, self.group):
                self._report(cause)

    def _report(self, cause: str, trace: str = "", *, is_own: bool = False) -> None:
        """Let the job fail: report the cause, unless another rank has, and end soon."""
        with self._lock:
            if self._is_known.is_set():
                return
            speaks = self.rendezvous.claim(cause, GRACE_S + _UNWIND_S * is_own)
            if speaks and self._is_meeting:
                self._not_met = cause  # `meet` raises it
                self._stops = True
                self.peers.kill(stopped_only=True)
            elif speaks:
                say(f"error: {cause}\n{trace}" if trace else f"error: {cause}")
            elif self.rendezvous.cause is not None:
                speaker, first_cause, _ = self.rendezvous.cause
                self._repeat(speaker, first_cause)
            self._is_own = is_own
            self._kills_survivors = speaks and not is_own
            self._end_after(cause, _UNWIND_S if is_own else self._grace(GRACE_S))

    def _follow(self, speaker: int, cause: str, grace_s: float) -> None:
        """End, as another rank reports why the job fails."""
        with self._lock:
            if not self._is_known.is_set():
                self._repeat(speaker, cause)
                self._end_after(cause, self._grace(grace_s))

    def _repeat(self, speaker: int, cause: str) -> None:
        """Repeat the cause in one line if the log of this machine has no report of it.

        Otherwise torchrun's summary would stand alone there, and its root cause is a rank that only
        followed.
        """
        peer = self.peers.all.get(speaker)
        if peer is not None and peer.machine != self.peers.own.machine and self.peers.is_first:
            say(f"llama: ended by {peer.name}, whose log has more: {cause}")

    def _end_after(self, cause: str, seconds: float) -> None:
        if _TIMED_OUT in cause:  # show the user where this rank is
            _, wait = self._current_wait()
            activity = wait.what if wait is not None else "no step"
            say(f"--- {self.peers.own.name}, {self.steps} steps begun, now in {activity}:")
            with contextlib.suppress(OSError):
                faulthandler.dump_traceback(2)
        self._deadline = time.monotonic() + seconds
        self._is_known.set()
        self._wake()

    @property
    def _has_torchrun(self) -> bool:
        return self.peers.launcher == os.getppid() and LAUNCHER not in os.environ

    def _grace(self, seconds: float) -> float:
        """Return how long to wait until torchrun ends this rank, or others have read its store."""
        holds_store = self.peers.own.rank == 0 and self.peers.are_spread
        return seconds if self._has_torchrun or holds_store else 0.0

    def run(self) -> None:
        """Watch until `stop`; the thread runs this."""
        with processes.or_exit(self._last_message, self.before_end):
            while not self._stops:
                poll = select.poll()
                fds = [peer.pidfd for peer in self.peers.local if peer.gone_at is None]
                for fd in (*fds, self._wake_read, SIGNALS.read_end):
                    if fd is not None and fd >= 0:
                        poll.register(fd, select.POLLIN)
                remaining = min(TICK_S, self._deadline - time.monotonic())
                if self._wake_read in dict(poll.poll(max(0.0, remaining) * 1000)):
                    os.read(self._wake_read, 64)
                self._look()

    def _look(self) -> None:
        """Check once for ended ranks, claimed causes, signals, and waits that take too long."""
        if self._is_meeting:
            self.peers.look_for_awaited()
        self.peers.note_ends()
        if self.rendezvous.cause is not None:
            self._follow(*self.rendezvous.cause)
        now = time.monotonic()
        # A round that took longer than a tick means that this process was stopped itself.
        self.peers.note_stops(min(now - self._looked_at, TICK_S))
        self._looked_at = now
        if not self._is_known.is_set() and (cause := next(self._causes(now), "")):
            self._report(cause)
        for number in SIGNALS.read():
            self._signalled(number)
        if self._is_meeting and not self._has_noted and now - self._began > _NOTE_S:
            self._has_noted = True
            if self.peers.is_first:
                so_far = self.rendezvous.describe_missing(f"in {_NOTE_S:g} s")
                say(f"llama: {so_far}; waiting up to {self.rendezvous.limit_s:g} s (timeout_s)")
        if now >= self._deadline:
            self._end()

    def _causes(self, now: float) -> Iterator[str]:
        """Yield the causes to end the job that this rank observes, the most specific one first."""
        if self.peers.launcher not in (0, os.getppid()):
            if SIGNALS.stop_since is not None:  # a second signal ended the launcher
                self._exit(1)
            name = "llama --ranks" if LAUNCHER in os.environ else "torchrun"
            process = f"{name} (process {self.peers.launcher}) on {self.peers.own.host}"
            yield f"{process}, which started these ranks, {processes.describe_end(None)}"
        for peer in self.peers.local:
            if not peer.has_left and peer.gone_at is not None:
                yield from self._describe_end(peer, peer.gone_at)
            if peer.stopped_s > STOPPED_S:
                cause = f"{peer.name} was stopped (by SIGSTOP or Ctrl-Z) for {STOPPED_S:g} s"
                yield cause + self._so_early
        if failure := self.rendezvous.failure():
            yield failure
        if self._is_meeting and now - self._began > GRACE_S:
            yield from self._describe_absent()
        yield from self._overdue(now)
        if SIGNALS.is_time_over:
            yield f"the requests did not finish within {SIGNALS.drain_s:g} s: they were ended"

    def _describe_end(self, peer: PeerInfo, gone_at: float) -> Iterator[str]:
        """Yield the cause if a process of this machine has ended without claiming one.

        Nothing is yielded until that is certain.
        """
        is_killed = processes.was_killed(peer.status) and not processes.was_terminated(peer.status)
        # Without a signal the rank may have claimed a cause, and SIGTERM may be on its way to here.
        if is_killed or time.monotonic() - gone_at > GRACE_S:
            yield f"{peer.name} {processes.describe_end(peer.status)}{self._so_early}"

    def _describe_absent(self) -> Iterator[str]:
        """Yield the cause if a rank of this launcher ended before this one could observe it."""
        own = self.peers.own
        if not self.peers.sees_started:
            return
        started = {own.rank, *self.peers.all, *self.peers.awaited}
        first = own.rank - int(os.environ.get("LOCAL_RANK", "0"))
        for rank in range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
            if rank not in started:
                yield f"rank {rank} on {own.host} ended before all ranks had met: it did not arrive"

    @property
    def _so_early(self) -> str:
        return ", before all ranks had met" if self._is_meeting else ""

    def _signalled(self, number: int) -> None:
        if self._is_known.is_set():  # torchrun has noticed which rank failed first
            self._deadline = time.monotonic()
            return
        order = SIGNALS.note()
        is_idle = not (self.steps or SIGNALS.has_begun)
        if order == 2 or SIGNALS.drain_s is None or is_idle:
            self._exit(0 if is_idle and SIGNALS.is_server else 128 + number)
        if order == 1 and self.peers.own.rank == 0:
            say(
                f"{signal.Signals(number).name}: running requests have {SIGNALS.drain_s:g} s to "
                "finish, and no new ones start; a second signal ends them at once"
            )

    def _overdue(self, now: float) -> Iterator[str]:
        """Yield the cause of each block that waits too long for other ranks."""
        for wait in list(self._waits.values()):
            cause = find_left_early(self.peers, self.group)
            overdue = wait.since + wait.limit_s
            if cause and now - wait.since > _UNWIND_S:
                yield cause
            elif now > overdue:
                name = find_stalled_rank(
                    self.peers, self.group, self._state(), overdue, self.rendezvous.read_at
                )
                if name:
                    limit = f"{wait.limit_s:g} s in {wait.what} {_TIMED_OUT}"
                    yield f"{name}: the others waited {limit}"

    def _state(self) -> dict[str, Any]:
        """Return the state of this rank, which others compare when a wait has reached its limit."""
        thread, wait = self._current_wait()
        activity = wait.what if wait is not None else ""
        is_inside = thread in self.collective
        return {"activity": activity, "in_collective": is_inside, "steps": self.steps}

    def _current_wait(self) -> tuple[int | None, _Wait | None]:
        """Return a thread that waits for other ranks, and its wait, if there is one."""
        for thread, wait in list(self._waits.items()):
            return thread, wait
        return None, None

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Report an exception that ends the script of this rank, unless a cause is reported."""
        if issubclass(kind, KeyboardInterrupt) and not self._is_known.is_set():
            if self.peers.is_first:
                self._hook(kind, error, trace)
            return
        self.fail(error)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")

    def _end(self) -> None:
        """End this process, and before it the others of this machine if that is its task.

        Without torchrun rank 0 may hold the store, so it waits until the others have read it;
        those of other machines have had the grace period for that.
        """
        if self._kills_survivors:
            self.peers.outlive(_UNWIND_S)
            self.peers.kill()
        elif self.peers.own.rank == 0 and not self._has_torchrun:
            self.peers.outlive(GRACE_S)
        self._exit(1)

    def _exit(self, code: int) -> None:
        processes.exit_now(code, self.before_end)
