"""Other machines of a job, seen through torch's store: are they there, and has one failed?

In: the store that torchrun's ranks met at. Out: the cause for which a job over several machines
must end. The first rank of each machine runs a thread that counts up in the store and reads the
others' counts. A machine whose count stands still, and a store that does not answer, are failures:
a lost network gives no other sign for minutes.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from llama.ranks.peers import Peers

_T = TypeVar("_T")

_BEAT_S = 0.5
SILENCE_S = 3.0  # then a machine is given up; the job ends within 5 seconds of its death
_SLOW_S = 1.5  # without an answer: the store is not asked anything more
_LEFT = b"left"


class Store(Protocol):
    """What is used of torch's stores. Each call may block for as long as the network likes."""

    def set(self, key: str, value: str) -> None: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def add(self, key: str, amount: int) -> int: ...


@dataclass
class Machine:
    """A machine of the job, by the lowest rank on it."""

    host: str
    ranks: list[int]
    count: bytes = b"0"
    changed: float = 0.0  # when its count did
    state: dict[str, Any] | None = None  # of its first rank, as `stalls.where` has it

    @property
    def has_left(self) -> bool:
        return self.count == _LEFT


class Heartbeat:
    """On the first rank of each machine. Made on all of them at the same time."""

    def __init__(self, store: Store, token: str, machines: list[Machine], own: int) -> None:
        """machines: in the same order everywhere; own: the index of this one."""
        self._store = store
        self._prefix = f"llama-watch/{token}"
        self._machines = machines
        self._own = own
        self._cause: str | None = None  # said by another machine
        self._answered = time.monotonic()
        self._done = threading.Event()
        self.own_state: Callable[[], dict[str, Any]] = dict  # set before `start`
        for machine in machines:
            machine.changed = self._answered
        store.set(self._key(own), "{}")
        if own == 0:
            store.set(self._key("cause"), "")
        self._thread = threading.Thread(target=self._run, name="llama-heartbeat", daemon=True)

    @classmethod
    def of(cls, peers: Peers, store: Store) -> "Heartbeat | None":
        """That of this rank: None on one machine, and on all but the first rank of each machine."""
        ranks: dict[str, list[int]] = {}
        hosts = {peer.machine: peer.host for peer in peers.all.values()}
        hosts[peers.machine] = peers.host
        machine_of = {peer.rank: peer.machine for peer in peers.all.values()}
        machine_of[peers.rank] = peers.machine
        for rank in sorted(machine_of):
            ranks.setdefault(machine_of[rank], []).append(rank)
        if len(ranks) == 1 or ranks[peers.machine][0] != peers.rank:
            return None
        machines = [Machine(hosts[name], ranks[name]) for name in ranks]
        return cls(store, peers.token, machines, list(ranks).index(peers.machine))

    def start(self) -> None:
        """After a barrier: no key is read before it is there."""
        self._thread.start()

    def failure(self) -> tuple[str, bool] | None:
        """A cause to end the job, and whether another machine has said it already."""
        if self._cause is not None:
            return self._cause, True
        now = time.monotonic()
        others = [m for i, m in enumerate(self._machines) if i != self._own and not m.has_left]
        if not others or self._done.is_set():
            return None
        if now - self._answered > SILENCE_S:
            first = self._machines[0].host
            return (
                f"torch's store on {first} does not answer: that machine, torchrun on it, or the "
                "network is gone",
                False,
            )
        for machine in others:
            if now - machine.changed > SILENCE_S:
                ranks = ", ".join(map(str, machine.ranks))
                return (
                    f"{machine.host} (rank {ranks}) was not heard of for {SILENCE_S:g} s: the "
                    "machine, its processes or the network are gone, or stopped",
                    False,
                )
        return None

    def states(self) -> dict[int, dict[str, Any]]:
        """What the first ranks of the other machines did half a second ago at most."""
        others = [m for i, m in enumerate(self._machines) if i != self._own]
        return {m.ranks[0]: m.state for m in others if m.state}

    def claim(self, cause: str) -> bool:
        """Tell the other machines. False if one of them was first, and has said its own cause."""
        if time.monotonic() - self._answered > _SLOW_S:
            return True  # nobody can be told
        first = self._in_time(lambda: self._store.add(self._key("claims"), 1) == 1)
        if first is not False:
            self._in_time(lambda: self._store.set(self._key("cause"), json.dumps(cause)))
        return first is not False

    def leave(self) -> None:
        """The ranks of this machine are done, in order: silence is no failure from now on."""
        self._done.set()
        self._thread.join(1.0)
        self._in_time(lambda: self._store.set(self._key(self._own), _LEFT.decode()))

    def _key(self, name: object) -> str:
        return f"{self._prefix}/{name}"

    def _run(self) -> None:
        count = 0
        keys = [self._key(name) for name in (*range(len(self._machines)), "cause")]
        while not self._done.wait(_BEAT_S):
            count += 1
            try:
                beat = json.dumps({"count": count, "state": self.own_state()})
                self._store.set(self._key(self._own), beat)
                *counts, cause = self._store.multi_get(keys)
            except RuntimeError:  # of torch: the connection is gone
                continue  # `_answered` grows old
            self._answered = time.monotonic()
            for machine, new in zip(self._machines, counts, strict=True):
                if new != machine.count:
                    machine.count, machine.changed = new, self._answered
                    if not machine.has_left:
                        machine.state = json.loads(new).get("state")
            if cause:
                self._cause = json.loads(cause)

    @staticmethod
    def _in_time(ask: Callable[[], _T]) -> _T | None:
        """What the store answers; None if it does not within a second."""
        answers: list[_T] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(ask())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(1.0)
        return answers[0] if answers else None
