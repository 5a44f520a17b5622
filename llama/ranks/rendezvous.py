"""Torch's store as a rank sees it: which ranks have arrived or are silent, and why a job ends.

Each rank keeps one record in the store: its introduction, a heartbeat count that grows twice a
second, whether it has left in order, and its state. One more record has the cause for which the job
ends; the rank that has written it reports the cause to the user. A thread accesses the store, as
each call may block for any time; the watch asks `failure`. This file must not import torch.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from llama.ranks.peers import PeerInfo, Peers

TICK_S = 0.5  # interval of heartbeats, and of the rounds of the watch
GRACE_S = 1.0  # time for the store to answer, for ranks to read a cause, for torchrun to end ranks
SILENCE_S = 30.0  # the default of the argument silence_s
STOPPED_S = 3.0  # time after which a stopped rank of this machine is given up
POLL_S = 0.05  # interval of checks until all ranks have arrived
_CONNECT_S = 2.0
MAX_REFUSALS = 3  # refused connections to torchrun's store, which listens before any rank starts


class Store(Protocol):
    """The methods of torch's stores that are used here."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return a value; wait until it exists."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return the sum."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Store a value if the key has the expected value; return the value of the key."""
        ...


class Rendezvous:
    """The meeting of the ranks of a job, and their heartbeats from `start` to `close`.

    Any thread may call it; only its own thread accesses the store.

    Attributes:
        peers: this rank and the others.
        limit_s: time limit for all ranks to arrive.
        silence_s: silence after which another machine, or the store, is given up. A shorter one
            would end jobs whose network loses packets, as TCP sends them again after seconds.
        has_met: set when all ranks have arrived.
        store: torch's store, once it is open. (torch's stubs lack `clone`.)
        cause: the rank that has claimed why the job ends, its message, and its grace period in
            seconds.
        own_state: returns the state of this rank, for its record.
        on_news: called after each read of the store.
        read_at: when the last complete read of the store began.
    """

    def __init__(
        self,
        peers: Peers,
        world_size: int,
        open_store: Callable[["Rendezvous"], Any],
        address: str,
        limit_s: float,
        silence_s: float,
    ) -> None:
        """Prepare the meeting.

        Args:
            peers: this rank, without others.
            world_size: the number of ranks.
            open_store: returns the store; it may call `wait_for_listener`.
            address: the address of the store, for messages.
            limit_s: time limit for all ranks to arrive.
            silence_s: silence after which another machine is given up.
        """
        self.peers = peers
        self.limit_s = limit_s
        self.silence_s = silence_s
        self.has_met = threading.Event()
        self.store: Any = None
        self.cause: tuple[int, str, float] | None = None
        self.own_state: Callable[[], dict[str, Any] | None] = lambda: None
        self.on_news: Callable[[], None] = lambda: None
        self.read_at = 0.0
        self._asked_at = 0.0  # when `failure` was last called
        self._awake_at = 0.0  # since when `failure` has been called without a long pause
        self._world_size = world_size
        self._open_store = open_store
        self._address = address
        self._deadline = time.monotonic() + limit_s
        self._prefix = ""  # prefix of the keys; empty until the store is open
        self._claim = ""  # this rank's claim of why the job ends
        self._first_claim = ""  # the first claim of all ranks
        self._unreachable = ""  # why the store could not be reached so far
        self._error = ""  # the error of the store
        self._error_at = 0.0
        self._has_left = False
        self._is_wanted = threading.Event()  # the thread shall read the store now
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llama-rendezvous", daemon=True)

    def start(self) -> None:
        """Start the thread that accesses the store."""
        self._thread.start()

    def close(self) -> None:
        """Publish that this rank leaves; rank 0, which may hold the store, waits for readers."""
        if self.has_met.is_set():
            self._has_left = True
            began = time.monotonic()
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
        """Return whether all records from before `then` have been read, or never can be."""
        self._is_wanted.set()
        return self.read_at > then or bool(self._error) or time.monotonic() - then > GRACE_S

    def failure(self) -> str:
        """Return a cause to end the job that follows from the store, or an empty text.

        Silence counts from the time since this process has run itself, as a pause of the whole
        machine is no failure.
        """
        now = time.monotonic()
        if now - self._asked_at > self.silence_s / 2:
            self._awake_at = now
        self._asked_at = now
        if self._error:
            return self._describe_error(now)
        if self._is_done.is_set():
            return ""
        is_meeting = not self.has_met.is_set()
        is_silent = self.read_at and now - max(self.read_at, self._awake_at) > self.silence_s
        if is_silent and (is_meeting or self.peers.are_spread):
            return self._describe_lost()
        if cause := self._describe_silent(now):
            return cause
        if is_meeting and now > self._deadline:
            return self.describe_missing(f"within {self.limit_s:g} s")
        return ""

    def claim(self, cause: str, grace_s: float) -> bool:
        """Claim the cause for which the job ends; return whether this rank shall report it.

        The first rank that asks the store shall. If the store does not answer, it is the first rank
        of each machine.

        Args:
            cause: the message.
            grace_s: how long the other ranks wait for torchrun to end them.
        """
        self._claim = json.dumps([self.peers.own.rank, cause, grace_s])
        self._is_wanted.set()
        first = self.peers.all.get(0)  # the rank with the store, unless torchrun has it
        is_stopped = first is not None and first.stopped_s > 0
        end = time.monotonic() + (4 * POLL_S if is_stopped else STOPPED_S)
        while not self._first_claim and time.monotonic() < end:
            if not self._prefix or not self._thread.is_alive() or self._error:
                break
            time.sleep(POLL_S / 5)
        if self._first_claim:
            return self._first_claim == self._claim
        return self.peers.is_first

    def wait_for_listener(self, address: tuple[str, int], is_agents: bool) -> None:
        """Wait until a process listens at the address of the store.

        Args:
            address: host and port.
            is_agents: whether torchrun's agent has the store, so that it listens before all ranks.

        Raises:
            ConnectionRefusedError: torchrun has ended.
            TimeoutError: nothing listens there in time.
        """
        refusals = 0
        while time.monotonic() < self._deadline and not self._is_done.is_set():
            try:
                socket.create_connection(address, _CONNECT_S).close()
                return
            except OSError as error:
                self._unreachable = error.strerror or str(error)
                refusals += isinstance(error, ConnectionRefusedError)
            if is_agents and refusals == MAX_REFUSALS:
                raise ConnectionRefusedError(f"{self._unreachable}: torchrun there has ended")
            time.sleep(4 * POLL_S)
        raise TimeoutError(self._unreachable)

    def _run(self) -> None:
        try:
            self.store = self._open_store(self)
            store: Store = self.store.clone()  # torch itself may block in the original
            start = store.add(f"llama/starts/{self.peers.own.rank}", 1)
            self._prefix = f"llama/{start}"  # the same on all ranks, and never used before
            self._exchange(store)
        except Exception as error:  # torch's errors have no common class, and none may be lost
            self._error_at = time.monotonic()
            self._error = (str(error) or type(error).__name__).splitlines()[0]
            self.on_news()

    def _exchange(self, store: Store) -> None:
        """Exchange records twice a second, when wanted, and when the last rank has arrived."""
        next_beat = 0.0
        all_keys = [self._key(rank) for rank in range(self._world_size)]
        while not self._is_done.is_set():
            began = time.monotonic()
            if self._claim and not self._first_claim:
                first = store.compare_set(self._key("cause"), "", self._claim).decode()
                if first != self._claim:
                    self.cause = tuple(json.loads(first))
                self._first_claim = first
            if began >= next_beat or (not self.has_met.is_set() and store.check(all_keys)):
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
        """Write the record of this rank, and read those of the others and a claimed cause."""
        own = self.peers.own
        own.beats += 1
        record = [own.introduction(), own.beats, self._has_left, self.own_state()]
        store.set(self._key(own.rank), json.dumps(record))
        for rank in range(self._world_size):
            if rank != own.rank and (rank in self.peers.all or store.check([self._key(rank)])):
                self._read(json.loads(store.get(self._key(rank))))
        if self.cause is None and store.check([self._key("cause")]):
            self.cause = tuple(json.loads(store.get(self._key("cause"))))

    def _read(self, record: list[Any]) -> None:
        """Store what another rank's record has."""
        introduction, beats, has_left, state = record
        peer = self.peers.all.get(introduction[0]) or PeerInfo(*introduction)
        peer.has_left = has_left
        peer.state = state
        if beats != peer.beats:
            peer.beats = beats
            peer.heard = time.monotonic()
        if peer.rank not in self.peers.all:  # it is complete only now, and other threads read it
            self.peers.add(peer)

    def _key(self, name: object) -> str:
        return f"{self._prefix}/{name}"

    def _describe_error(self, now: float) -> str:
        """Return the cause that follows from an error of the store, or an empty text.

        An error is no cause while it may be a consequence of the end of a rank, nor on a single
        machine, where the ranks observe each other without the store.
        """
        if now - self._error_at < GRACE_S:
            return ""
        if not self.has_met.is_set():
            return self._describe_store(self._error)
        has_left = 0 in self.peers.all and self.peers.all[0].has_left  # its store ends with it
        return self._describe_lost() if self.peers.are_spread and not has_left else ""

    def _describe_lost(self) -> str:
        holder = self.peers.all.get(0)  # or its launcher
        suspects = "torchrun there" if holder is None else f"{holder.name}, its launcher"
        return (
            f"torch's store at {self._address} does not answer: {suspects}, that machine or the "
            "network is down, or stopped"
        )

    def _describe_silent(self, now: float) -> str:
        """Return a message that names a machine whose ranks are all silent, or an empty text."""
        machines: dict[str, list[PeerInfo]] = {}
        for _, peer in sorted(self.peers.all.items()):
            if peer.machine != self.peers.own.machine and not peer.has_left:
                machines.setdefault(peer.machine, []).append(peer)
        for peers in machines.values():
            if all(now - max(peer.heard, self._awake_at) > self.silence_s for peer in peers):
                ranks = ", ".join(f"{peer.rank}{peer.stage_name}" for peer in peers)
                return (
                    f"{peers[0].host} (rank {ranks}) did not respond for {self.silence_s:g} s: "
                    "the machine, its processes or the network are down, or stopped"
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
        """Describe which ranks have not arrived `when`, such as "within 600 s"."""
        if not self.read_at:
            return self._describe_store(self._unreachable or f"no answer {when}")
        arrived = {self.peers.own.rank: self.peers.own, **self.peers.all}
        hosts: dict[str, list[int]] = {}
        for rank, peer in arrived.items():
            hosts.setdefault(peer.host, []).append(rank)
        present = ", ".join(f"{_ranks(ranks)} on {host}" for host, ranks in hosts.items())
        missing = [rank for rank in range(self._world_size) if rank not in arrived]
        return (
            f"{self._locate(missing, arrived)} of {self._world_size} did not arrive at "
            f"{self._address} {when}; {present} did. The first message of a missing rank, or of "
            "its torchrun, names the cause"
        )

    def _locate(self, missing: list[int], arrived: dict[int, PeerInfo]) -> str:
        """Name the missing ranks, with their machines if torchrun's variables tell them."""
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        per_machine = int(text) if text.isdecimal() and int(text) else self._world_size
        if per_machine >= self._world_size:
            return f"{_ranks(missing)} on {self.peers.own.host}" if text else _ranks(missing)
        hosts = {peer.rank // per_machine: peer.host for peer in arrived.values()}
        machines: dict[int, list[int]] = {}
        for rank in missing:
            machines.setdefault(rank // per_machine, []).append(rank)
        return ", ".join(
            f"{_ranks(ranks)} on {hosts.get(machine, f'machine {machine} (no rank arrived)')}"
            for machine, ranks in machines.items()
        )


def _ranks(ranks: Iterable[int]) -> str:
    return "rank " + ", ".join(map(str, sorted(ranks)))
