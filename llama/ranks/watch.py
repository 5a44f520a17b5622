"""A thread per rank that ends the whole job, with one message, when one rank cannot go on.

In: deaths of other ranks and of torchrun, what torch's store tells, signals, steps that do not end.
Out: one message that names rank, host and cause, and the end of this process. The main thread may
be inside gloo, where no handler and no exception of Python's runs. This file imports no torch.

It starts before any rank is known, and learns of them as they come:

    meeting --all have come--> running --stop()--> over
       | a cause                  | a cause
       v                          v
    the speaker: NotMetError   ending: the speaker says why  --grace period--> exit code 1
    the others: as in `ending`

A cause is what this rank sees (`_report`), or what another has claimed in the store (`_follow`).
Several may see the same: the first to claim it is the speaker, and the others end in silence. Under
torchrun they wait for its SIGTERM a moment, so that its summary, too, names as root cause the rank
that failed first. An end of a process counts when the store was read after it, as that rank may
have said why, or that it leaves. A rank that is stopped while this one runs is given up after the
limit of silence: Ctrl-Z of a whole job ends nothing, nor does a debugger of an idle rank.
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
from types import TracebackType
from typing import Any

from llama.ranks import processes
from llama.ranks.errors import NotMetError, say
from llama.ranks.launch import LAUNCHER, agent
from llama.ranks.peers import PeerInfo, Peers
from llama.ranks.rendezvous import GRACE_S, POLL_S, SILENCE_S, TICK_S, Rendezvous
from llama.ranks.signals import SIGNALS
from llama.ranks.stalls import find_left_early, find_stalled_rank, rank_state

LATER_S = 5.0  # a collective, or the kernel, gives up later than the watch, which can say why
_UNWIND_S = 2.0  # for the rank that failed to leave its `finally` blocks; for others to follow it
_NOTE_S = 10.0  # then a person is told what is waited for
_LIMIT_WORDS = "(the limit is timeout_s)"  # of a stall


class Watch(threading.Thread):
    """One per process, from `meet` to `stop`. Any thread may call it."""

    def __init__(self, peers: Peers, group: range, rendezvous: Rendezvous) -> None:
        """group: the ranks that this one makes steps with; the others are only in the same job."""
        super().__init__(name="llama-watch", daemon=True)
        self.peers = peers
        self.group = group
        self.rendezvous = rendezvous
        self.steps = 0
        self.before_end: list[Callable[[], None]] = []  # what must be put right, as a terminal
        self.left_groups: list[Any] = []  # of models that are gone: the next build destroys them
        self._busy: dict[int, tuple[str, float, float]] = {}  # thread: what, since when, limit
        self._limit_s = 0.0  # the longest of them so far
        self._lock = threading.RLock()
        self._not_met = ""  # the cause, on the rank that raises it
        self._is_known = threading.Event()  # the cause: this job ends
        self._deadline = float("inf")  # for the end of this process
        self._looked_at = time.monotonic()
        last_words = f"llama: {peers.own.name} ends at once, for want of memory or by a bug\n"
        self._last_words = last_words.encode()  # no memory is needed for them
        self._is_own = False  # this rank failed
        self._kills_survivors = False  # it sees to it that the others of this machine are gone, too
        self._stops = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._agent = agent()
        self._all_there_at = time.monotonic()  # while they meet: the processes torchrun started
        self._hook = sys.excepthook
        self._note_at = time.monotonic() + _NOTE_S
        self._kill_timer: processes.KillTimer | None = None
        rendezvous.own_state = lambda: rank_state(*self._current_wait())
        rendezvous.on_news = self._wake

    @staticmethod
    def of_process() -> "Watch | None":
        """The watch of this process: one of its threads, so that a fork has none."""
        return next((t for t in threading.enumerate() if isinstance(t, Watch)), None)

    def meet(self) -> None:
        """Wait until all have come. NotMetError on one rank of each machine; others just end."""
        SIGNALS.install()
        sys.excepthook = self._excepthook
        self.rendezvous.start()
        self.start()
        try:
            while not self.rendezvous.has_met.wait(POLL_S) and not self._not_met:
                pass
            with self._lock:  # `_report` may be about to say why not
                if self._not_met:
                    self.peers.outlive(GRACE_S)  # this rank may hold the store: they read it there
                    raise NotMetError(self._not_met)
        except BaseException:
            self.stop()
            raise
        if self.peers.are_spread and sys.platform == "linux":
            self._kill_timer = processes.KillTimer()

    def stop(self) -> None:
        """Tell the others that this rank leaves in order. Does not return while the job fails."""
        if self._is_known.is_set() and not self._not_met:
            if self._is_own:
                self._deadline = 0.0  # its `finally` blocks are left
                self._wake()
            self.join()  # it ends the process: after the rank that failed
        self.rendezvous.close()
        self._stops = True
        self._wake()
        self.join()
        if self._kill_timer is not None:
            self._kill_timer.set(0)
        SIGNALS.restore()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        self.peers.close()
        self.rendezvous.on_news = lambda: None
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)

    def can_go_on(self, rank: int) -> bool:
        """Whether another rank can go on: it has not left, and is not stopped."""
        peer = self.peers.all[rank]
        return not peer.is_over and peer.stopped_s < GRACE_S

    @property
    def _is_meeting(self) -> bool:
        return not self.rendezvous.has_met.is_set()

    @property
    def is_ending(self) -> bool:
        """Whether the job fails, and its one message is said: nothing else is to be printed."""
        return self._is_known.is_set()

    @contextlib.contextmanager
    def step(self, limit_s: float) -> Iterator[None]:
        """A block that all ranks of the group run together: an error in it ends the job."""
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
        """A block that waits for other ranks: if it lasts longer, the job ends."""
        thread = threading.get_ident()
        self._busy[thread] = (what, time.monotonic(), limit_s)
        if limit_s > self._limit_s:
            self._limit_s = limit_s
            self._set_kill_timer()
        try:
            yield
        finally:
            self._busy.pop(thread, None)

    def fail(self, error: BaseException, during: str = "", *, has_trace: bool = True) -> None:
        """This rank has an error that ends the job. Say so, unless another rank is the cause. It
        returns, so that the caller's `finally` blocks run; the process ends soon, whatever they do;
        at once, where memory is out, so that it cannot even say why: the others see its end."""
        with processes.or_exit(self._last_words, self.before_end):
            if isinstance(error, RuntimeError):  # gloo's, where another rank may be gone
                self.wait_for_cause()
            what = f"{type(error).__name__}: {error}"
            if isinstance(error, SystemExit):
                what = f"sys.exit({error.code!r})"
            trace = "".join(traceback.format_exception(error)).rstrip() if has_trace else ""
            own = f"{self.peers.own.name} failed{during}: {what}"
            self._report(own, trace, is_own=True)

    def wait_for_cause(self) -> None:
        """Return where no other rank is the cause of an error, else when it is known."""
        end = time.monotonic() + GRACE_S + SILENCE_S * self.peers.are_spread
        while time.monotonic() < end and not self._is_known.wait(POLL_S):
            if cause := find_left_early(self.peers, self.group):
                self._report(cause)

    def _report(self, cause: str, trace: str = "", *, is_own: bool = False) -> None:
        """The job fails: say why, if nobody has, and end soon."""
        with self._lock:
            if self._is_known.is_set():
                return
            speaks = self.rendezvous.claim(cause, GRACE_S + _UNWIND_S * is_own)
            if speaks and self._is_meeting:
                self._not_met, self._stops = cause, True  # `meet` raises it
            elif speaks:
                say(f"error: {cause}" + f"\n{trace}" * bool(trace))
            self._is_own, self._kills_survivors = is_own, speaks and not is_own
            self._end_after(cause, _UNWIND_S if is_own else self._grace(GRACE_S))

    def _follow(self, cause: str, grace_s: float) -> None:
        """Another rank says why the job fails: end in silence."""
        with self._lock:
            if not self._is_known.is_set():
                self._end_after(cause, self._grace(grace_s))

    def _end_after(self, cause: str, seconds: float) -> None:
        if _LIMIT_WORDS in cause:  # where this rank is, for a person
            _, what, steps = self._current_wait()
            say(f"--- {self.peers.own.name}, {steps} steps begun, now in {what or 'no step'}:")
            with contextlib.suppress(OSError):
                faulthandler.dump_traceback(2)
        self._deadline = time.monotonic() + seconds
        self._is_known.set()
        self._wake()

    @property
    def _has_torchrun(self) -> bool:
        return self._agent == os.getppid() and LAUNCHER not in os.environ

    def _grace(self, seconds: float) -> float:
        """How long to wait for torchrun to end this rank; by hand, there is nobody to wait for."""
        return seconds if self._has_torchrun else 0.0

    def run(self) -> None:
        with processes.or_exit(self._last_words, self.before_end):
            while not self._stops:
                poll = select.poll()
                fds = [peer.pidfd for peer in self.peers.local if peer.gone_at is None]
                for fd in (*fds, self._wake_read, SIGNALS.read_end):
                    if fd is not None and fd >= 0:
                        poll.register(fd, select.POLLIN)
                left = min(TICK_S, self._deadline - time.monotonic())
                if self._wake_read in dict(poll.poll(max(0.0, left) * 1000)):
                    os.read(self._wake_read, 64)
                self._look()

    def _look(self) -> None:
        """One round: what came, who is gone, what takes too long."""
        self._set_kill_timer()
        self.peers.note_ends()
        if self.rendezvous.cause is not None:
            self._follow(*self.rendezvous.cause)
        now = time.monotonic()
        self.peers.note_stops(min(now - self._looked_at, TICK_S))  # more: it was stopped itself
        self._looked_at = now
        if not self._is_known.is_set() and (cause := next(self._causes(now), "")):
            self._report(cause)
        for number in SIGNALS.read():
            self._signalled(number)
        if self._is_meeting and now > self._note_at:
            self._note_at = float("inf")
            if self.peers.is_first:
                so_far = self.rendezvous.describe_missing(f"in {_NOTE_S:g} s")
                say(f"llama: {so_far}; waiting up to {self.rendezvous.limit_s:g} s (timeout_s)")
        if now >= self._deadline:
            self._end()

    def _causes(self, now: float) -> Iterator[str]:
        """What this rank sees that ends the job, the most telling first."""
        if self._agent not in (0, os.getppid()):
            if SIGNALS.stop_since is not None:  # a second signal ended it
                self._exit(1)
            name = "llama --ranks" if LAUNCHER in os.environ else "torchrun"
            agent = f"{name} (process {self._agent}) on {self.peers.own.host}"
            yield f"{agent}, which started these ranks, {processes.describe_end(None)}"
        for peer in self.peers.local:
            if not peer.has_left and peer.gone_at is not None:
                yield from self._describe_end(peer, peer.gone_at)
            if peer.stopped_s > SILENCE_S:
                yield f"{peer.name} was stopped (by SIGSTOP or Ctrl-Z) for {SILENCE_S:g} s"
        if failure := self.rendezvous.failure():
            yield failure
        if self._is_meeting and self._agent:
            yield from self._never_comes(now)
        yield from self._overdue(now)
        if SIGNALS.is_time_over:
            yield f"the requests did not finish within {SIGNALS.drain_s:g} s: they were ended"

    def _describe_end(self, peer: PeerInfo, gone_at: float) -> Iterator[str]:
        """A process of this machine is gone, and has not said why: nothing, until that is sure."""
        status = processes.wait_status(peer.pid, peer.pidfd or 0)
        if processes.was_terminated(status) or (status == 0 and SIGNALS.is_server):
            is_sure = time.monotonic() - gone_at > GRACE_S  # or SIGTERM is about to end this one
        else:
            is_sure = processes.was_killed(status) or self.rendezvous.has_read_since(gone_at)
        if is_sure:
            cause = f"{peer.name} {processes.describe_end(status)}"
            yield cause + ", before all ranks had met" * self._is_meeting

    def _never_comes(self, now: float) -> Iterator[str]:
        """A rank of this torchrun that has not come, and whose process is gone. Had it failed,
        torchrun would end this one, too: nothing, until that is sure."""
        own, started = self.peers.own, processes.ranks_started_by(self._agent)
        first = own.rank - int(os.environ.get("LOCAL_RANK", "0"))
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        absent = set(range(first, first + size)) - started - self.peers.all.keys()
        if not absent or own.rank not in started or len(started) == size:
            self._all_there_at = now
        elif now - self._all_there_at > GRACE_S:
            name = f"rank {min(absent)} on {own.host}"
            yield f"{name} ended before all ranks had met: it did not come"

    def _set_kill_timer(self) -> None:
        if self._kill_timer is not None and self._limit_s and not self._stops:
            self._kill_timer.set(self._limit_s + LATER_S)

    def _signalled(self, number: int) -> None:
        if self._is_known.is_set():  # torchrun has seen who failed first
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
        """Why a block that waits for other ranks takes too long."""
        for what, since, limit_s in list(self._busy.values()):
            cause = find_left_early(self.peers, self.group)
            if cause and now - since > _UNWIND_S:
                yield cause
            elif now - since > limit_s:
                here = self.peers, self.group, rank_state(*self._current_wait())
                if name := find_stalled_rank(*here, since + limit_s, self.rendezvous.read_at):
                    yield f"{name}: the others waited {limit_s:g} s in {what} {_LIMIT_WORDS}"

    def _current_wait(self) -> tuple[int | None, str, int]:
        """The thread that waits for others, in what ("": in nothing), and the steps begun."""
        thread, (what, *_) = next(iter(list(self._busy.items())), (None, ("",)))
        return thread, what, self.steps

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """The script of this rank ends with an exception: print it, or nothing if all was said."""
        if issubclass(kind, KeyboardInterrupt) and not self._is_known.is_set():
            if self.peers.is_first:
                self._hook(kind, error, trace)
            return
        self.fail(error)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")

    def _end(self) -> None:
        """The end of this process; before it, where that is this rank's part, of the others. By
        hand, rank 0 may hold the store: it stays for as long as they may read the cause there."""
        if self._kills_survivors:
            self.peers.outlive(_UNWIND_S)
            self.peers.kill()
        elif self.peers.own.rank == 0 and not self._has_torchrun:
            self.peers.outlive(GRACE_S)
        self._exit(1)

    def _exit(self, code: int) -> None:
        processes.exit_now(code, self.before_end)
