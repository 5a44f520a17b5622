"""A thread per rank that ends the whole job, with one message, when one rank cannot go on.

In: deaths of other ranks and of torchrun's agent, words of other ranks, signals, steps that do not
end. Out: one message that names rank, host and cause, and the end of this process. The main thread
cannot do this: while it waits for another rank inside gloo, no handler and no exception of Python's
runs. This file imports no torch: it gets what it needs of the groups as arguments.

Who speaks: the rank whose own exception it was, else the first to notice; the others end in
silence. Under torchrun they wait for its SIGTERM a moment, so that its summary, too, names as root
cause the rank that failed first. The file is longer than a file should be, as all that can end a
job is looked at by one thread, in one loop.
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
from llama.ranks.errors import say
from llama.ranks.heartbeat import Heartbeat, Store
from llama.ranks.peers import Peer, Peers
from llama.ranks.signals import SIGNALS
from llama.ranks.stalls import name_the_stalled, stack_of, where

_TICK_S = 0.5  # between two looks at the clock; all else wakes the thread
_LINGER_S = 1.0  # for torchrun to see who failed first, and to end the others itself
_UNWIND_S = 2.0  # for the rank that failed to leave its `finally` blocks
_NEWS_S = 1.0  # for the cause to be known, where an error may only follow from another rank's
_SIGNALS_S = 0.1  # torchrun sends a signal to all ranks of a machine in less time
_LEFT_S = 2.0  # in a step that a rank has left, before that is an error
_CAUSE_LENGTH = 1000  # of what is passed on: it fits a datagram in any encoding
_LIMIT_WORDS = "(the limit is timeout_s)"  # of a stall
_REPLY_S = 1.0  # for the others to say where they are, when a step does not end
_STOPPED_S = 4.0  # beyond a step's limit: a rank that is stopped, alone on its machine, is killed


class Watch:
    """One per process, from the making of the groups to their end. Any thread may call it."""

    def __init__(self, peers: Peers, group: range, remote: Heartbeat | None) -> None:
        """group: the ranks that this one makes steps with; the others are only in the same job."""
        self.peers = peers
        self.group = group
        self.remote = remote
        self.steps = 0
        self.before_end: list[Callable[[], None]] = []  # what must be put right, as a terminal
        self._busy: dict[int, tuple[str, float, float]] = {}  # thread: what, since when, limit
        self._limit_s = 0.0  # the longest of them so far
        self._lock = threading.RLock()
        self._is_known = threading.Event()  # the cause: this job ends
        self._deadline = float("inf")  # for the end of this process
        self._is_own = False  # this rank failed
        self._buries = False  # it sees to it that the others of this machine are gone, too
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
        # Of several machines, the first rank of each knows more than the others of its machine.
        is_alone = len(peers.local) == len(peers.all)
        self._kill_timer = None if is_alone else processes.KillTimer()
        self._asks_later_s = 0.0 if is_alone or remote is not None else 2 * _REPLY_S
        self._thread = threading.Thread(target=self._run, name="llama-watch", daemon=True)

    def start(self) -> None:
        SIGNALS.install()
        sys.excepthook = self._excepthook
        if self.remote is not None:
            self.remote.own_state = lambda: where(*self._place())
            self.remote.start()
        self._thread.start()

    def stop(self) -> None:
        """Tell the others that this rank leaves in order. Does not return while the job fails."""
        if self._is_known.is_set():
            if self._is_own:
                self._exit(1)
            self._thread.join()  # it ends the process: after the rank that failed
        self.peers.tell(kind="left")
        if self.remote is not None:
            self.remote.leave()
        self._stops = True
        self._wake()
        self._thread.join()
        if self._kill_timer is not None:
            self._kill_timer.set(0)
        SIGNALS.restore()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        self.peers.close()
        for fd in (self._wake_read, self._wake_write, *([self._agent] if self._agent else ())):
            os.close(fd)

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

    def fail(self, error: BaseException, place: str = "", *, has_trace: bool = True) -> None:
        """This rank has an error that ends the job. Say so, unless another rank is the cause.

        It returns, so that the caller's `finally` blocks run; the process ends soon, whatever they
        do. A RuntimeError may be what gloo raises when another rank is gone: wait for the news.
        """
        if isinstance(error, RuntimeError):
            self._hear_news()
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            what = f"sys.exit({error.code!r})"
        trace = "".join(traceback.format_exception(error)).rstrip() if has_trace else ""
        own = f"rank {self.peers.rank} on {self.peers.host} failed{place}: {what}"
        self._report(own, trace, is_own=True)

    def wait_for_news(self, error: RuntimeError) -> None:
        """Return where `error` is the cause. Where another rank is, this process ends here."""
        self._hear_news()
        if self._is_known.is_set():
            self._thread.join()
            raise error  # not reached: the thread has ended the process

    def _hear_news(self) -> None:
        patient = _NEWS_S if self.remote is None else 4 * _NEWS_S
        end = time.monotonic() + patient
        while time.monotonic() < end and not self._is_known.wait(0.05):
            if gone := self._left_early():
                self._report(gone.ended_early)

    def _report(self, cause: str, trace: str = "", *, is_own: bool = False) -> None:
        """The job fails: say why, if nobody has, and end soon."""
        with self._lock:
            if self._is_known.is_set():
                return
            self._is_known.set()
            speaks = self.peers.claim()
            if speaks and (self.remote is None or self.remote.claim(cause)):
                say(f"error: {cause}" + f"\n{trace}" * bool(trace))
            linger_s = _LINGER_S + _UNWIND_S * is_own
            self.peers.tell(kind="failed", cause=cause[:_CAUSE_LENGTH], linger_s=linger_s)
            self._is_own = is_own
            self._buries = speaks and not is_own
            self._deadline = time.monotonic() + (_UNWIND_S if is_own else self._linger(_LINGER_S))
        self._wake()

    def _follow(self, linger_s: float) -> None:
        """Another rank has said why the job fails: end in silence."""
        with self._lock:
            if not self._is_known.is_set():
                self._is_known.set()
                self._deadline = time.monotonic() + self._linger(linger_s)
        self._wake()

    def _linger(self, seconds: float) -> float:
        """How long to wait for torchrun to end this rank; by hand, there is nobody to wait for."""
        return seconds if self._agent is not None and not self._agent_is_gone else 0.0

    def _run(self) -> None:
        poll = select.poll()
        pidfds = [peer.pidfd for peer in self.peers.local]
        for fd in (self._wake_read, self.peers.socket.fileno(), SIGNALS.read_end, self._agent):
            if fd is not None and fd >= 0:
                poll.register(fd, select.POLLIN)
        for fd in pidfds:
            if fd is not None:
                poll.register(fd, select.POLLIN)
        while not self._stops:
            left = self._deadline - time.monotonic()
            ready = {fd for fd, _ in poll.poll(max(0.0, min(_TICK_S, left)) * 1000)}
            for fd in ready & {*pidfds, self._agent}:
                poll.unregister(fd)  # readable from now on
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
            if now - since > _LINGER_S:  # torchrun would have ended this rank, too
                self._report(cause)
        if self.remote is not None and (news := self.remote.failure()):
            cause, is_said = news
            if is_said:
                if _LIMIT_WORDS in cause and not self._is_known.is_set():
                    self.peers.tell(kind="where")
                    self._print_stacks()
                self.peers.tell(kind="failed", cause=cause, linger_s=_LINGER_S)
                self._follow(_LINGER_S)
            else:
                self._report(cause)
        self._check_steps(now)
        drain_since, drain_s = SIGNALS.stop_since, SIGNALS.drain_s
        if drain_since is not None and drain_s is not None and now - drain_since > drain_s:
            self._drained_too_long(drain_s)
        if now >= self._deadline:
            self._end()

    def _set_kill_timer(self) -> None:
        if self._kill_timer is not None and self._limit_s and not self._stops:
            self._kill_timer.set(self._limit_s + _STOPPED_S)

    def _heard(self, peer: Peer, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "left":
            peer.has_left = True
        elif kind == "failed":
            if self.remote is not None and not self._is_known.is_set():
                self.remote.claim(message["cause"])
            self._follow(float(message["linger_s"]))
        elif kind == "signalled":
            self._others_signalled = True
        elif kind == "where":
            self.peers.tell(kind="here", **self._print_stacks())
        elif kind == "here" and self._replies is not None:
            self._replies[peer.rank] = message

    def _ended(self, peer: Peer) -> None:
        """A process of this machine is gone. What it said before has been read."""
        if peer.has_left or self._is_known.is_set():
            return
        status = processes.wait_status(peer.pid, peer.pidfd or 0)
        cause = f"{peer.name} {processes.describe_end(status)}"
        if processes.was_terminated(status):
            self._terminated.append((time.monotonic(), cause))
        else:
            self._report(cause)

    def _agent_ended(self) -> None:
        if SIGNALS.stop_since is not None:  # a second signal ended it
            self._exit(1)
        status = processes.wait_status(self._agent_pid, self._agent or 0)
        what = f"torchrun (process {self._agent_pid}) on {self.peers.host}, which started these"
        self._agent_is_gone = True
        self._deadline = min(self._deadline, time.monotonic())
        self._report(f"{what} ranks, {processes.describe_end(status)}")

    def _signalled(self, number: int) -> None:
        if self._is_known.is_set():  # torchrun has seen who failed first
            self._deadline = time.monotonic()
            return
        order = SIGNALS.note()
        if order == 2 or SIGNALS.drain_s is None or not (self.steps or SIGNALS.has_begun):
            self._exit(128 + self._alone_with(number))
        if order == 1 and self.peers.rank == 0:
            say(
                f"{signal.Signals(number).name}: running requests have {SIGNALS.drain_s:g} s to "
                "finish, and no new ones start; a second signal ends them at once"
            )

    def _alone_with(self, number: int) -> int:
        """The signal, after a word where torchrun has not sent it to the other ranks, too."""
        self.peers.tell(kind="signalled")
        for _ in self._listening(_SIGNALS_S):
            self._others_signalled |= bool(self.peers.newly_gone())
            if self._others_signalled or not self.peers.local:
                break
        if not self._others_signalled and not self._is_known.is_set() and self.peers.claim():
            name = signal.Signals(number).name
            say(f"error: rank {self.peers.rank} on {self.peers.host} was ended by {name}")
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
        if not self._is_known.is_set() and self.peers.claim():
            say(f"error: {cause}")
            self.peers.tell(kind="failed", cause=cause, linger_s=0.0)  # who is late stays silent
        self._exit(1)

    def _check_steps(self, now: float) -> None:
        for what, since, limit_s in list(self._busy.values()):
            gone = self._left_early()
            if gone is not None and now - since > _LEFT_S:
                self._report(gone.ended_early)
            elif now - since > limit_s + self._asks_later_s and since != self._asked:
                self._asked = since
                self._find_the_stalled(what, limit_s)

    def _left_early(self) -> Peer | None:
        return next((p for r, p in self.peers.all.items() if r in self.group and p.has_left), None)

    def _find_the_stalled(self, what: str, limit_s: float) -> None:
        """Ask all ranks of this machine where they are, and name the one that is elsewhere.

        If all are in the same place, nobody is: one may be slow, and each wait has its own limit.
        """
        if self._is_known.is_set() or not self.peers.claim():
            return
        own = self._print_stacks()
        self._replies = {}
        self.peers.tell(kind="where")
        for _ in self._listening(_REPLY_S):
            if len(self._replies) == len(self.peers.local):
                break
        replies, self._replies = self._replies, None
        remote = self.remote.states() if self.remote is not None else {}
        name = name_the_stalled(self.peers, self.group, own, replies, remote)
        if name is None:
            self.peers.unclaim()
            return
        self._report(f"{name}: the others waited {limit_s:g} s in {what} {_LIMIT_WORDS}")
        self.peers.kill({peer.rank for peer in self.peers.local} - replies.keys())

    def _print_stacks(self) -> dict[str, Any]:
        """Where this rank is, for a person and for the rank that asked."""
        thread, what, _ = self._place()
        main = threading.main_thread().ident
        heading = f"--- rank {self.peers.rank} on {self.peers.host}, {self.steps} steps begun, "
        say(heading + f"now in {what or 'no step'}:\n" + stack_of(thread or main))
        return where(thread, what, self.steps)

    def _place(self) -> tuple[int | None, str, int]:
        """The thread that waits for others, in what ("": in nothing), and the steps begun."""
        thread, (what, *_) = next(iter(list(self._busy.items())), (None, ("",)))
        return thread, what, self.steps

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """The script of this rank ends with an exception: print it, or nothing if all was said."""
        if issubclass(kind, KeyboardInterrupt) and not self._is_known.is_set():
            if self.peers.claim():
                self._hook(kind, error, trace)
            return
        self.fail(error)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")

    def _end(self) -> None:
        """The end of this process; before it, where that is this rank's part, of the others."""
        if self._buries:
            end = time.monotonic() + _LINGER_S
            while time.monotonic() < end and not all(p.is_gone for p in self.peers.local):
                time.sleep(0.02)
                self.peers.newly_gone()
            self.peers.kill(self.peers.all)
        self._exit(1)

    def _exit(self, code: int) -> None:
        processes.exit_now(code, self.before_end)


_watch: Watch | None = None  # of this process: its groups, too, are its own and no object's


def start_watch(
    rank: int, group: range, exchange: Callable[[bytes], list[bytes]], store: Store
) -> Watch:
    """The watch of this process, made on all ranks at the same time. A second call finds the first.

    exchange: from this rank's bytes to those of all ranks. store: torch's, for other machines, and
    used by nothing else, as torch may wait in its own.
    """
    global _watch
    if _watch is None:
        peers = Peers(rank)
        peers.meet(exchange(peers.introduction()))
        remote = Heartbeat.of(peers, store)
        exchange(b"")  # every key is in the store
        _watch = Watch(peers, group, remote)
        _watch.start()
    return _watch


def stop_watch() -> None:
    """Leave in order. If the job fails, this does not return: the process ends here."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def current_watch() -> Watch | None:
    return _watch
