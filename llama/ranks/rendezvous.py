"""Torch's store as a rank sees it: who has come, who has not, who is silent, and why a job ends.

Each rank keeps one record in the store: who it is, a count that goes up twice a second (a beat),
whether it has left in order, and where it is. One more record says why the job ends; the rank that
wrote it is the one that tells the user. A thread talks to the store, since each call may block for
as long as the network likes; the watch asks `failure`. This file imports no torch.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from llama.ranks import processes
from llama.ranks.launch import agent
from llama.ranks.peers import PeerInfo, Peers

TICK_S = 0.5  # between two beats, and two looks of the watch at the clock
GRACE_S = 1.0  # for the store to answer, a cause to be read, torchrun to end the ranks
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
        self, peers: Peers, world_size: int, open_store: Callable[["Rendezvous"], Any],
        address: str, limit_s: float,
    ) -> None:  # fmt: skip
        """open_store: it may use `wait_for_listener`. address: of the store, for messages.
        limit_s: for all ranks to come."""
        self.peers = peers
        self.limit_s = limit_s
        self.has_met = threading.Event()
        self.store: Any = None  # where they meet, once it is open; torch has no type for `clone`
        self.cause: tuple[str, float] | None = None  # that a rank has claimed, and its grace period
        self.own_state: Callable[[], dict[str, Any] | None] = lambda: None
        self.on_news: Callable[[], None] = lambda: None  # after each look at the store
        self.read_at = 0.0  # when the last whole look at the store began
        self._asked_at = self._awake_at = 0.0  # for a failure; and since when without a long pause
        self._world_size = world_size
        self._open_store = open_store
        self._address = address
        self._deadline = time.monotonic() + limit_s
        self._prefix = ""  # none before it talks to the store
        self._claim = ""  # of this rank, why the job ends
        self._first_claim = ""  # of all ranks
        self._unreachable = ""  # why nothing listens there, so far
        self._error = ""  # of the store
        self._error_at = 0.0
        self._has_left = False
        self._is_wanted = threading.Event()  # a look at the store, now
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llama-rendezvous", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """This rank is done, and says so; rank 0, which may hold the store, waits for readers."""
        if self.has_met.is_set():
            self._has_left, began = True, time.monotonic()
            self._wait(lambda: self.has_read_since(began))
            if self.peers.own.rank == 0:
                self._wait(lambda: all(peer.is_over for peer in self.peers.all.values()))
        self._is_done.set()
        self._is_wanted.set()
        self._thread.join(GRACE_S)

    def _wait(self, is_true: Callable[[], bool]) -> None:
        end = time.monotonic() + GRACE_S
        while not is_true() and not self._error and time.monotonic() < end:
            self._is_wanted.set()
            time.sleep(POLL_S / 5)

    def has_read_since(self, then: float) -> bool:
        """Whether all that the others said before `then` is known, or can no longer be."""
        self._is_wanted.set()
        return self.read_at > then or bool(self._error) or time.monotonic() - then > GRACE_S

    def failure(self) -> str:
        """A cause to end the job that this rank sees in the store, or "". Silence counts from when
        this process runs itself: a pause of the whole machine is nobody's fault."""
        now = time.monotonic()
        if now - self._asked_at > SILENCE_S / 2:
            self._awake_at = now
        self._asked_at = now
        if self._error:
            return self._describe_error(now)
        if self._is_done.is_set():
            return ""
        is_meeting = not self.has_met.is_set()
        is_silent = self.read_at and now - max(self.read_at, self._awake_at) > SILENCE_S
        if is_silent and (is_meeting or self.peers.are_spread):
            return self._describe_lost()
        if cause := self._describe_silent(now):
            return cause
        if is_meeting and now > self._deadline:
            return self.describe_missing(f"within {self.limit_s:g} s")
        return ""

    def claim(self, cause: str, grace_s: float) -> bool:
        """Whether this rank is to say why the job ends: it is the first that asks the store, or,
        where that does not answer, the first of each machine, or of each torchrun. grace_s: how
        long the others wait for torchrun to end them."""
        self._claim = json.dumps([self.peers.own.rank, cause, grace_s])
        self._is_wanted.set()
        first = self.peers.all.get(0)  # where the store is, if it is not torchrun's
        is_stopped = first is not None and first.stopped_s > 0
        end = time.monotonic() + (4 * POLL_S if is_stopped else SILENCE_S)
        while not self._first_claim and time.monotonic() < end:
            if not self._prefix or not self._thread.is_alive() or self._error:
                break
            time.sleep(POLL_S / 5)
        if self._first_claim:
            return self._first_claim == self._claim
        if self.read_at or not agent():
            return self.peers.is_first
        own, local = self.peers.own.rank, int(os.environ.get("LOCAL_RANK", "0"))
        return own == min(processes.ranks_started_by(agent()), default=own - local)

    def wait_for_listener(self, address: tuple[str, int], is_agents: bool) -> None:
        """Wait until something listens there; is_agents: torchrun's agent, before all ranks."""
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
            self.store = self._open_store(self)
            store: Store = self.store.clone()  # torch may wait in its own
            start = store.add(f"llama/starts/{self.peers.own.rank}", 1)
            self._prefix = f"llama/{start}"  # the same on all ranks, and not used before
            self._talk(store)
        except Exception as error:  # torch's own have no common name; and none may be lost here
            self._error_at = time.monotonic()
            self._error = (str(error) or type(error).__name__).splitlines()[0]
            self.on_news()

    def _talk(self, store: Store) -> None:
        """Beat twice a second, when asked to, and when the last one has come."""
        next_beat, every_key = 0.0, [self._key(rank) for rank in range(self._world_size)]
        while not self._is_done.is_set():
            began = time.monotonic()
            if self._claim and not self._first_claim:
                first = store.compare_set(self._key("cause"), "", self._claim)
                self._first_claim = first.decode()
            if began >= next_beat or (not self.has_met.is_set() and store.check(every_key)):
                next_beat = began + TICK_S
                self._beat(store)
                self.read_at = began
                if len(self.peers.all) + 1 == self._world_size:
                    self.has_met.set()
                self.on_news()
            if self._is_wanted.wait(TICK_S if self.has_met.is_set() else POLL_S):
                self._is_wanted.clear()
                next_beat = 0.0

    def _beat(self, store: Store) -> None:
        """Say that this rank is there, and see who else is, and whether one has said a cause."""
        own = self.peers.own
        own.beats += 1
        record = [own.introduction(), own.beats, self._has_left, self.own_state()]
        store.set(self._key(own.rank), json.dumps(record))
        for rank in range(self._world_size):
            if rank != own.rank and (rank in self.peers.all or store.check([self._key(rank)])):
                self._take(json.loads(store.get(self._key(rank))))
        if self.cause is None and store.check([self._key("cause")]):
            _, cause, grace_s = json.loads(store.get(self._key("cause")))
            self.cause = cause, grace_s

    def _take(self, record: list[Any]) -> None:
        """What another rank's record says."""
        introduction, beats, has_left, state = record
        peer = self.peers.all.get(introduction[0]) or PeerInfo(*introduction)
        peer.has_left, peer.state = has_left, state
        if beats != peer.beats:
            peer.beats, peer.heard = beats, time.monotonic()
        if peer.rank not in self.peers.all:  # now that it is whole: other threads look at it
            self.peers.add(peer)

    def _key(self, name: object) -> str:
        return f"{self._prefix}/{name}"

    def _describe_error(self, now: float) -> str:
        """What the store's error is to the job: nothing while it may follow from the end of a rank,
        and on one machine, where the ranks see each other without it."""
        if now - self._error_at < GRACE_S:
            return ""
        if not self.has_met.is_set():
            return self._describe_store(self._error)
        has_left = 0 in self.peers.all and self.peers.all[0].has_left  # with its store
        return self._describe_lost() if self.peers.are_spread and not has_left else ""

    def _describe_lost(self) -> str:
        return (
            f"torch's store at {self._address} does not answer: that machine, torchrun on it, "
            "or the network is gone"
        )

    def _describe_silent(self, now: float) -> str:
        """The machine whose ranks have all not been heard for too long."""
        machines: dict[str, list[PeerInfo]] = {}
        for _, peer in sorted(self.peers.all.items()):
            if peer.machine != self.peers.own.machine and not peer.has_left:
                machines.setdefault(peer.machine, []).append(peer)
        for there in machines.values():
            if all(now - max(peer.heard, self._awake_at) > SILENCE_S for peer in there):
                ranks = ", ".join(str(peer.rank) for peer in there)
                return (
                    f"{there[0].host} (rank {ranks}) was not heard of for {SILENCE_S:g} s: the "
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
        if not self.read_at:
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
