"""A thread per rank that ends the whole job, with one message, when one rank cannot go on.

In: deaths of other ranks and of torchrun's agent, words of other ranks, signals, steps that do not
end. Out: one message that names rank, host and cause, and the end of this process. The main thread
cannot do this: while it waits for another rank inside gloo, no handler and no exception of Python's
runs. This file imports no torch: it gets what it needs of the groups as arguments.

It starts before any rank is known, and learns of them as they come:

    meeting --all have come--> running --stop()--> over
       | a cause                  | a cause
       v                          v
    the reporter: NotMetError  ending: the reporter says why  --grace period--> exit code 1
    the others: as in `ending`

A cause is what this rank sees (`_report`), or what another has reported (`_follow`). The reporter
is the rank whose own exception it was, else the first to notice; the others end in silence. Under
torchrun they wait for its SIGTERM a moment, so that its summary, too, names as root cause the rank
that failed first. The file is longer than a file should be, as all that can end a job is looked at
by one thread, in one loop.
"""

import contextlib
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
from llama.ranks.peers import PeerInfo, Peers
from llama.ranks.rendezvous import GRACE_S, POLL_S, TICK_S, Rendezvous
from llama.ranks.signals import SIGNALS
from llama.ranks.stalls import find_stalled_rank, rank_state, stack_of

LATER_S = 5.0  # a collective, or the kernel, gives up later than the watch, which can say why
_UNWIND_S = 2.0  # for the rank that failed to leave its `finally` blocks; for others to follow it
_SIGNAL_S = 0.1  # torchrun sends a signal to all ranks of a machine in less time
_NOTE_S = 10.0  # then a person is told what is waited for
_CAUSE_LENGTH = 1000  # of what is passed on: it fits a datagram in any encoding
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
        self._busy: dict[int, tuple[str, float, float]] = {}  # thread: what, since when, limit
        self._limit_s = 0.0  # the longest of them so far
        self._lock = threading.RLock()
        self._is_meeting = True
        self._not_met = ""  # the cause, on the rank that raises it
        self._is_known = threading.Event()  # the cause: this job ends
        self._deadline = float("inf")  # for the end of this process
        self._is_own = False  # this rank failed
        self._kills_survivors = False  # it sees to it that the others of this machine are gone, too
        self._replies: dict[int, dict[str, Any]] | None = None
        self._asked = 0.0  # the beginning of the wait for which all were asked where they are
        self._terminated: list[tuple[float, str]] = []  # ended by SIGTERM: torchrun's?
        self._others_signalled = False
        self._stops = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._agent_pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._agent = processes.open_process(self._agent_pid) if self._agent_pid > 1 else None
        self._agent_is_gone = False
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
        """Begin, and wait until all ranks have come.

        NotMetError on one rank of each machine where one does not come; the others just end.
        """
        SIGNALS.install()
        sys.excepthook = self._excepthook
        self.rendezvous.start()
        self.start()
        try:
            while not self.rendezvous.has_met.wait(POLL_S) and not self._not_met:
                pass
            with self._lock:
                self._is_meeting = False
                if self._not_met:
                    raise NotMetError(self._not_met)
        except BaseException:
            self.stop()
            raise
        if self._is_spread:
            self._kill_timer = processes.KillTimer()

    def stop(self) -> None:
        """Tell the others that this rank leaves in order. Does not return while the job fails."""
        if self._is_known.is_set() and not self._not_met:
            if self._is_own:
                self._exit(1)
            self.join()  # it ends the process: after the rank that failed
        if self.rendezvous.has_met.is_set():
            self.peers.tell(kind="left")
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
        for fd in (self._wake_read, self._wake_write, *([self._agent] if self._agent else ())):
            os.close(fd)

    @property
    def _is_spread(self) -> bool:
        """Whether the job has other machines: their first ranks know more than the rest."""
        return len(self.peers.local) < len(self.peers.all)

    def has_left(self, rank: int) -> bool:
        """Whether another rank has left in order, or is gone."""
        return self.peers.all[rank].has_left or self.peers.all[rank].is_gone

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
        """This rank has an error that ends the job. Say so, unless another rank is the cause.

        It returns, so that the caller's `finally` blocks run; the process ends soon, whatever they
        do. A RuntimeError may be what gloo raises when another rank is gone: wait for the cause.
        """
        if isinstance(error, RuntimeError):
            self._wait_for_cause()
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            what = f"sys.exit({error.code!r})"
        trace = "".join(traceback.format_exception(error)).rstrip() if has_trace else ""
        own = f"{self.peers.own.name} failed{during}: {what}"
        self._report(own, trace, is_own=True)

    def wait_for_cause(self, error: RuntimeError) -> None:
        """Return where `error` is the cause. Where another rank is, this process ends here."""
        self._wait_for_cause()
        if self._is_known.is_set():
            self.join()
            raise error  # not reached: the thread has ended the process

    def _wait_for_cause(self) -> None:
        end = time.monotonic() + GRACE_S * (4 if self._is_spread else 1)
        while time.monotonic() < end and not self._is_known.wait(POLL_S):
            if cause := self._left_early():
                self._report(cause)

    def _report(self, cause: str, trace: str = "", *, is_own: bool = False) -> None:
        """The job fails: say why, if nobody has, and end soon."""
        with self._lock:
            if self._is_known.is_set():
                return
            self._is_known.set()
            reports = self.peers.elect_reporter()
            is_first = reports and self.rendezvous.claim(cause)
            grace_s = GRACE_S + _UNWIND_S * is_own
            self.peers.tell(kind="failed", cause=cause[:_CAUSE_LENGTH], grace_s=grace_s)
            if reports and self._is_meeting:
                self._not_met, self._stops = cause, True  # `meet` raises it
                return
            if is_first:
                say(f"error: {cause}" + f"\n{trace}" * bool(trace))
            self._is_own = is_own
            self._kills_survivors = reports and not is_own
            self._deadline = time.monotonic() + (_UNWIND_S if is_own else self._grace(GRACE_S))
        self._wake()

    def _follow(self, grace_s: float) -> None:
        """Another rank has said why the job fails: end in silence."""
        with self._lock:
            if not self._is_known.is_set():
                self._is_known.set()
                self._deadline = time.monotonic() + self._grace(grace_s)
        self._wake()

    def _grace(self, seconds: float) -> float:
        """How long to wait for torchrun to end this rank; by hand, there is nobody to wait for."""
        return seconds if self._agent is not None and not self._agent_is_gone else 0.0

    def run(self) -> None:
        while not self._stops:
            poll = select.poll()
            fds = [peer.pidfd for peer in self.peers.local if not peer.is_gone]
            fds += [self._wake_read, self.peers.socket.fileno(), SIGNALS.read_end]
            for fd in (*fds, None if self._agent_is_gone else self._agent):
                if fd is not None and fd >= 0:
                    poll.register(fd, select.POLLIN)
            left = self._deadline - time.monotonic()
            ready = {fd for fd, _ in poll.poll(max(0.0, min(TICK_S, left)) * 1000)}
            if self._wake_read in ready:
                os.read(self._wake_read, 64)
            self._look(ready)

    def _look(self, ready: set[int]) -> None:
        """One round: what came, who is gone, what takes too long."""
        self._set_kill_timer()
        for peer, message in self.peers.read():
            self._heard(peer, message)
        for peer in self.peers.newly_gone():
            self._ended(peer)
        for number in SIGNALS.read():
            self._signalled(number)
        if self._agent in ready:
            self._agent_ended()
        now = time.monotonic()
        for since, cause in self._terminated:
            if now - since > GRACE_S:  # torchrun would have ended this rank, too
                self._report(cause)
        if failure := self.rendezvous.failure():
            self._heard_of_machines(*failure)
        if self._is_meeting and now > self._note_at:
            self._note_who_is_missing()
        self._check_steps(now)
        drain_since, drain_s = SIGNALS.stop_since, SIGNALS.drain_s
        if drain_since is not None and drain_s is not None and now - drain_since > drain_s:
            self._drained_too_long(drain_s)
        if now >= self._deadline:
            self._end()

    def _heard_of_machines(self, cause: str, is_said: bool) -> None:
        """What the store tells, or that it tells nothing."""
        if not is_said or self._is_meeting:
            self._report(cause)
            return
        if _LIMIT_WORDS in cause and not self._is_known.is_set():
            self.peers.tell(kind="where")
            self._print_stacks()
        self.peers.tell(kind="failed", cause=cause, grace_s=GRACE_S)
        self._follow(GRACE_S)

    def _note_who_is_missing(self) -> None:
        self._note_at = float("inf")
        if self.peers.is_first:
            so_far = self.rendezvous.describe_missing(f"in {_NOTE_S:g} s")
            say(f"llama: {so_far}; waiting up to {self.rendezvous.limit_s:g} s (timeout_s)")

    def _set_kill_timer(self) -> None:
        if self._kill_timer is not None and self._limit_s and not self._stops:
            self._kill_timer.set(self._limit_s + LATER_S)

    def _heard(self, peer: PeerInfo, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "left":
            peer.has_left = True
        elif kind == "failed":
            if not self._is_known.is_set():
                self.rendezvous.claim(message["cause"])
            self._follow(float(message["grace_s"]))
        elif kind == "signalled":
            self._others_signalled = True
        elif kind == "where":
            self.peers.tell(kind="here", **self._print_stacks())
        elif kind == "here" and self._replies is not None:
            self._replies[peer.rank] = message

    def _ended(self, peer: PeerInfo) -> None:
        """A process of this machine is gone. What it said before has been read."""
        if peer.has_left or self._is_known.is_set():
            return
        status = processes.wait_status(peer.pid, peer.pidfd or 0)
        cause = f"{peer.name} {processes.describe_end(status)}"
        cause += ", before all ranks had met" * self._is_meeting
        if processes.was_terminated(status):
            self._terminated.append((time.monotonic(), cause))
        else:
            self._report(cause)

    def _agent_ended(self) -> None:
        if SIGNALS.stop_since is not None:  # a second signal ended it
            self._exit(1)
        status = processes.wait_status(self._agent_pid, self._agent or 0)
        agent = f"torchrun (process {self._agent_pid}) on {self.peers.own.host}"
        self._agent_is_gone = True
        self._report(f"{agent}, which started these ranks, {processes.describe_end(status)}")
        if not self._not_met:
            self._deadline = min(self._deadline, time.monotonic())

    def _signalled(self, number: int) -> None:
        if self._is_known.is_set():  # torchrun has seen who failed first
            self._deadline = time.monotonic()
            return
        order = SIGNALS.note()
        if order == 2 or SIGNALS.drain_s is None or not (self.steps or SIGNALS.has_begun):
            self._exit(128 + self._alone_with(number))
        if order == 1 and self.peers.own.rank == 0:
            say(
                f"{signal.Signals(number).name}: running requests have {SIGNALS.drain_s:g} s to "
                "finish, and no new ones start; a second signal ends them at once"
            )

    def _alone_with(self, number: int) -> int:
        """The signal, after a word where torchrun has not sent it to the other ranks, too."""
        self.peers.tell(kind="signalled")
        for _ in self._listening(_SIGNAL_S):
            self._others_signalled |= bool(self.peers.newly_gone())
            if self._others_signalled or not self.peers.local:
                break
        is_alone = self.peers.all and not self._others_signalled and not self._is_known.is_set()
        if is_alone and self.peers.elect_reporter():
            say(f"error: {self.peers.own.name} was ended by {signal.Signals(number).name}")
        return number

    def _listening(self, seconds: float) -> Iterator[None]:
        """Hear what the others say, for so long; each turn is one look."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            select.select([self.peers.socket], [], [], min(0.1, seconds))
            for peer, message in self.peers.read():
                self._heard(peer, message)
            yield

    def _drained_too_long(self, drain_s: float) -> None:
        cause = f"the requests did not finish within {drain_s:g} s: they were ended"
        if not self._is_known.is_set() and self.peers.elect_reporter():
            say(f"error: {cause}")
            self.peers.tell(kind="failed", cause=cause, grace_s=0.0)  # who is late stays silent
        self._exit(1)

    def _check_steps(self, now: float) -> None:
        # Of several machines, the first rank of each asks: it knows more than the others there.
        asks_later_s = 2 * GRACE_S if self._is_spread and not self.peers.is_first else 0.0
        for what, since, limit_s in list(self._busy.values()):
            cause = self._left_early()
            if cause and now - since > _UNWIND_S:
                self._report(cause)
            elif now - since > limit_s + asks_later_s and since != self._asked:
                self._asked = since
                self._find_stalled(what, limit_s)

    def _left_early(self) -> str:
        """What to say where a rank of the group has left in order, else nothing."""
        for rank in self.group:
            peer = self.peers.all.get(rank)
            if peer is not None and peer.has_left:
                return f"the script of {peer.name} ended while the others were still working"
        return ""

    def _find_stalled(self, what: str, limit_s: float) -> None:
        """Ask all ranks of this machine where they are, and name the one that is elsewhere.

        If all are in the same place, nobody is: one may be slow, and each wait has its own limit.
        """
        if self._is_known.is_set() or not self.peers.elect_reporter():
            return
        own = self._print_stacks()
        self._replies = {}
        self.peers.tell(kind="where")
        for _ in self._listening(GRACE_S):
            if len(self._replies) == len(self.peers.local):
                break
        replies, self._replies = self._replies, None
        name = find_stalled_rank(self.peers, self.group, own, replies, self.rendezvous.states())
        if name is None:
            self.peers.resign()
            return
        self._report(f"{name}: the others waited {limit_s:g} s in {what} {_LIMIT_WORDS}")
        self.peers.kill({peer.rank for peer in self.peers.local} - replies.keys())

    def _print_stacks(self) -> dict[str, Any]:
        """Where this rank is, for a person and for the rank that asked."""
        thread, what, _ = self._current_wait()
        main = threading.main_thread().ident
        heading = f"--- {self.peers.own.name}, {self.steps} steps begun, "
        say(heading + f"now in {what or 'no step'}:\n" + stack_of(thread or main))
        return rank_state(thread, what, self.steps)

    def _current_wait(self) -> tuple[int | None, str, int]:
        """The thread that waits for others, in what ("": in nothing), and the steps begun."""
        thread, (what, *_) = next(iter(list(self._busy.items())), (None, ("",)))
        return thread, what, self.steps

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """The script of this rank ends with an exception: print it, or nothing if all was said."""
        if issubclass(kind, KeyboardInterrupt) and not self._is_known.is_set():
            if self.peers.elect_reporter():
                self._hook(kind, error, trace)
            return
        self.fail(error)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")

    def _end(self) -> None:
        """The end of this process; before it, where that is this rank's part, of the others."""
        if self._kills_survivors:
            end = time.monotonic() + GRACE_S
            while time.monotonic() < end and not all(p.is_gone for p in self.peers.local):
                time.sleep(0.02)
                self.peers.newly_gone()
            self.peers.kill(self.peers.all)
        self._exit(1)

    def _exit(self, code: int) -> None:
        processes.exit_now(code, self.before_end)
