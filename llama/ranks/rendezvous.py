"""Torch's store as a rank sees it: who has come, who has not, who is silent, and why a job ends.

In: how to open the store, and what this rank says of itself. Out: the other ranks, in `Peers`, and
a cause to end the job. Each rank keeps one record in the store, and counts up in it (a beat) until
all have come; then the first rank of each machine goes on, where there are several, as a lost
machine or network gives no other sign for minutes. A thread talks to the store, since each call may
block for as long as the network likes; the watch, or whoever waits, asks `failure`. This file
imports no torch, and knows nothing of groups.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from llama.ranks.errors import NotMetError
from llama.ranks.peers import PeerInfo, Peers

_T = TypeVar("_T")

TICK_S = 0.5  # between two beats, and two looks of the watch at the clock
GRACE_S = 1.0  # for a cause to be known, an answer to come, torchrun to end the ranks
SILENCE_S = 3.0  # then a machine is given up; the job ends within 5 seconds of its death
POLL_S = 0.05  # between two looks while ranks are still to come
_CONNECT_S = 2.0
_REFUSALS = 3  # of torchrun's store, which listens before any rank is started


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def add(self, key: str, amount: int) -> int: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Rendezvous:
    """One per job, from `start` to `close`. Any thread may ask; only its own talks to the store."""

    def __init__(
        self, peers: Peers, world_size: int, open_store: Callable[["Rendezvous"], Store],
        address: str, limit_s: float,
    ) -> None:  # fmt: skip
        """open_store: it may use `wait_for_listener`. address: of the store, for messages.
        limit_s: for all ranks to come."""
        self.peers = peers
        self.has_met = threading.Event()
        self.own_state: Callable[[], dict[str, Any] | None] = lambda: None
        self.on_news: Callable[[], None] = lambda: None
        self._world_size = world_size
        self._open_store = open_store
        self._address = address
        self.limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._store: Store | None = None
        self._prefix = ""
        self._listens_to = [rank for rank in range(world_size) if rank != peers.own.rank]
        self._answered: float | None = None  # when the store did last
        self._unreachable = ""  # why nothing listens there, so far
        self._error = ""  # of the store
        self._error_at = 0.0
        self._cause = ""  # said by another machine
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llama-rendezvous", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def meet_unwatched(self) -> None:
        """Wait until all have come, where there is no watch. NotMetError where one does not."""
        self.start()
        while not self.has_met.wait(POLL_S):
            if failure := self.failure():
                raise NotMetError(failure[0])
        self.close()

    def close(self) -> None:
        """This machine's ranks are done, in order: silence is no failure from now on."""
        is_talking = self.has_met.is_set() and not self._is_done.is_set()
        self._is_done.set()
        self._thread.join(GRACE_S)
        if is_talking:
            self._in_time(lambda store: store.set(self._own_key, self._record(has_left=True)))

    def failure(self) -> tuple[str, bool] | None:
        """A cause to end the job, and whether another machine has said it already."""
        if self._cause:
            return self._cause, True
        now = time.monotonic()
        if self._error and now - self._error_at > GRACE_S:  # it may follow from another's end
            return self._describe_store(self._error), False
        if self._is_done.is_set() or self._error:
            return None
        if self._answered is not None and now - self._answered > SILENCE_S:
            return (
                f"torch's store at {self._address} does not answer: that machine, torchrun on it, "
                "or the network is gone"
            ), False
        if cause := self._describe_silent(now):
            return cause, False
        if not self.has_met.is_set() and now > self._deadline:
            return self.describe_missing(f"within {self.limit_s:g} s"), False
        return None

    def claim(self, cause: str) -> bool:
        """Tell the other machines. False if one of them was first, and has said its own cause."""
        if self._is_done.is_set() or self._answered is None:
            return True
        if time.monotonic() - self._answered > SILENCE_S / 2:
            return True  # nobody can be told
        first = self._in_time(lambda store: store.add(self._key("claims"), 1) == 1)
        if first is not False:
            self._in_time(lambda store: store.set(self._key("cause"), json.dumps(cause)))
        return first is not False

    def states(self) -> dict[int, dict[str, Any]]:
        """What the first ranks of the other machines did when they were last heard, but for those
        that are late: their silence is the cause, if it lasts."""
        heard = [self.peers.all[rank] for rank in self._listens_to]
        since = time.monotonic() - 3 * TICK_S
        return {peer.rank: peer.state for peer in heard if peer.state and peer.heard > since}

    def wait_for_listener(self, address: tuple[str, int], is_agents: bool) -> None:
        """Wait until something listens there: torch's own wait cannot be broken off.

        is_agents: torchrun's agent listens there, and has done so before it started any rank.
        """
        refusals = 0
        while time.monotonic() < self._deadline and not self._is_done.is_set():
            try:
                socket.create_connection(address, _CONNECT_S).close()
                return
            except OSError as error:
                self._unreachable = error.strerror or str(error)
                refusals += isinstance(error, ConnectionRefusedError)
            if is_agents and refusals == _REFUSALS:
                raise ConnectionRefusedError(f"{self._unreachable}: torchrun there has ended")
            time.sleep(4 * POLL_S)
        raise TimeoutError(self._unreachable)

    def _run(self) -> None:
        try:
            self._store = self._open_store(self)
            start = self._store.add(f"llama/starts/{self.peers.own.rank}", 1)
            self._prefix = f"llama/{start}"  # the same on all ranks, and not used before
            token = self._store.compare_set(self._key("token"), "", os.urandom(8).hex())
            self.peers.token = token.decode()
            self._talk(self._store)
        except Exception as error:  # torch's own have no common name; and none may be lost here
            self._error_at = time.monotonic()
            self._error = (str(error) or type(error).__name__).splitlines()[0]
            self.on_news()

    def _talk(self, store: Store) -> None:
        """Beat until all have come; on the first rank of one of several machines, until the end."""
        next_beat, every_key = 0.0, [self._key(rank) for rank in range(self._world_size)]
        while True:
            try:
                if time.monotonic() >= next_beat or store.check(every_key):
                    next_beat = time.monotonic() + TICK_S
                    self._beat(store)
                self._answered = time.monotonic()
            except RuntimeError:  # of torch: the connection is gone
                if not self.has_met.is_set():
                    raise  # afterwards `_answered` grows old
            if len(self.peers.all) + 1 == self._world_size and not self.has_met.is_set():
                self._listens_to = self._firsts_of_other_machines()
                if not self._listens_to:
                    self._is_done.set()
                self.has_met.set()
                self.on_news()
            if self._is_done.wait(TICK_S if self.has_met.is_set() else POLL_S):
                return

    def _beat(self, store: Store) -> None:
        """Say that this rank is there, and see who else is, and whether one has said a cause."""
        self.peers.own.beats += 1
        store.set(self._own_key, self._record())
        for rank in self._listens_to:
            if rank in self.peers.all or store.check([self._key(rank)]):
                self._take(json.loads(store.get(self._key(rank))))
        if store.check([self._key("cause")]):
            self._cause = json.loads(store.get(self._key("cause")))
            self.on_news()

    def _record(self, *, has_left: bool = False) -> str:
        own = self.peers.own
        return json.dumps([own.introduction(), own.beats, has_left, self.own_state()])

    def _take(self, record: list[Any]) -> None:
        """What another rank's record says."""
        introduction, beats, has_left, state = record
        peer = self.peers.all.get(introduction[0]) or PeerInfo(*introduction)
        if beats != peer.beats:
            peer.beats, peer.heard = beats, time.monotonic()
        peer.has_left |= has_left
        peer.state = state
        if peer.rank not in self.peers.all:  # now that it is whole: other threads look at it
            self.peers.add(peer)
            self.on_news()

    def _firsts_of_other_machines(self) -> list[int]:
        """What the first rank of a machine listens to; nothing on the other ranks."""
        if not self.peers.is_first:
            return []
        firsts: dict[str, int] = {}
        for rank, peer in sorted(self.peers.all.items()):
            firsts.setdefault(peer.machine, rank)
        return [rank for name, rank in firsts.items() if name != self.peers.own.machine]

    def _key(self, name: object) -> str:
        return f"{self._prefix}/{name}"

    @property
    def _own_key(self) -> str:
        return self._key(self.peers.own.rank)

    def _in_time(self, ask: Callable[[Store], _T]) -> _T | None:
        """What the store answers; None if it does not within a second."""
        answers: list[_T] = []
        store = self._store
        assert store is not None

        def run() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(ask(store))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(GRACE_S)
        return answers[0] if answers else None

    def _describe_silent(self, now: float) -> str:
        """The machine of a rank that is listened to and has not been heard for too long."""
        others = list(self.peers.all.values())
        for peer in others:
            is_heard = peer.rank in self._listens_to and peer.machine != self.peers.own.machine
            if is_heard and not peer.has_left and now - peer.heard > SILENCE_S:
                silent = sorted(p.rank for p in others if p.machine == peer.machine)
                ranks = ", ".join(map(str, silent))
                return (
                    f"{peer.host} (rank {ranks}) was not heard of for {SILENCE_S:g} s: the "
                    "machine, its processes or the network are gone, or stopped"
                )
        return ""

    def _describe_store(self, why: str) -> str:
        if "EADDRINUSE" in why:
            return (
                f"another process listens at {self._address}, where the ranks are to meet: "
                "`ss -ltnp` shows it; end it, or choose another MASTER_PORT (--master_port of "
                "torchrun; on one machine --standalone finds a free one)"
            )
        return (
            f"the ranks cannot meet at {self._address} ({why}): check that address and port "
            "(--master_addr and --master_port of torchrun), that torchrun runs on that machine, "
            f"and that no firewall drops the port; MASTER_ADDR and MASTER_PORT with `llama doctor` "
            "test it"
        )

    def describe_missing(self, when: str) -> str:
        if self._answered is None:
            return self._describe_store(self._unreachable or f"no answer {when}")
        came = {self.peers.own.rank: self.peers.own, **self.peers.all}
        hosts: dict[str, list[int]] = {}
        for rank, peer in came.items():
            hosts.setdefault(peer.host, []).append(rank)
        there = ", ".join(f"{_ranks(ranks)} on {host}" for host, ranks in hosts.items())
        missing = [rank for rank in range(self._world_size) if rank not in came]
        return (
            f"{self._locate(missing, came)} of {self._world_size} did not come to {self._address} "
            f"{when}; {there} did. Their own first message, or that of their torchrun, says why"
        )

    def _locate(self, missing: list[int], came: dict[int, PeerInfo]) -> str:
        """The missing ranks, with the machine where torchrun's variables tell it."""
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        per_machine = int(text) if text.isdecimal() and int(text) else self._world_size
        if per_machine >= self._world_size:
            return f"{_ranks(missing)} on {self.peers.own.host}" if text else _ranks(missing)
        hosts = {peer.rank // per_machine: peer.host for peer in came.values()}
        machines: dict[int, list[int]] = {}
        for rank in missing:
            machines.setdefault(rank // per_machine, []).append(rank)
        return ", ".join(
            f"{_ranks(ranks)} on {hosts.get(machine, f'machine {machine} (none of it came)')}"
            for machine, ranks in machines.items()
        )


def _ranks(ranks: Iterable[int]) -> str:
    return "rank " + ", ".join(map(str, sorted(ranks)))
