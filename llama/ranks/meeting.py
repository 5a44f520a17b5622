"""Ranks meet at torch's store: who has come, who has not, and who was here and is gone again.

In: how to reach the store, and what this rank says of itself. Out: the store, and what each rank
said; or one error that names the ranks which came and those which did not. Until the ranks have
met there is no watch, and torch's own waits look at nothing but the clock. So a thread talks to the
store, and the caller looks meanwhile: at torchrun's agent, at the ranks of this machine that have
come, at the beats of the others, and at the clock. This file imports no torch.
"""

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from llama.ranks import processes
from llama.ranks.errors import NotMetError, say

_T = TypeVar("_T")

_LOOK_S = 0.05  # between two looks of the caller, and two questions to the store
_BEAT_S = 0.5  # between two signs of life of a rank that waits for others
_SILENCE_S = 3.5  # without a sign, a rank of another machine or the store is given up
_NOTE_S = 10.0  # then a person is told what is waited for
_NEWS_S = 0.5  # for the cause to be known, where the store's error may only follow from it
_LINGER_S = 1.0  # for the rank that speaks, and for torchrun to end this one
_CONNECT_S = 2.0
_REFUSALS = 3  # of torchrun's store, which listens before any rank is started


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass
class _Guest:
    """A rank that has come, and is on this machine where it has a pidfd."""

    rank: int
    host: str
    pid: int
    machine: str
    launcher: int  # process id of its torchrun; 0: none
    count: int = 0  # of its signs of life
    changed: float = 0.0  # when the count did
    pidfd: int | None = None
    is_gone: bool = False


class Meeting:
    """One per call of `connect`; used by the main thread, from beginning to end."""

    def __init__(self, rank: int, world_size: int, place: str, limit_s: float) -> None:
        """place: the store's address and port, for messages; limit_s: of all waits together."""
        self._rank = rank
        self._world_size = world_size
        self._place = place
        self._limit_s = limit_s
        self._host = socket.gethostname()
        self._machine = processes.machine_id()
        self._guests: dict[int, _Guest] = {}
        self._came: dict[int, bytes] = {}  # what they said in this exchange
        self._began = time.monotonic()
        self._deadline = self._began + limit_s
        self._late_cause: str | None = None  # said at the deadline, if it is known by then
        self._answered: float | None = None  # when the store did last
        self._unreachable = ""  # why it cannot be reached, so far
        self._has_noted = False
        self._agent_pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._agent = processes.open_process(self._agent_pid) if self._agent_pid > 1 else None

    def close(self) -> None:
        for fd in (self._agent, *(guest.pidfd for guest in self._guests.values())):
            if fd is not None:
                os.close(fd)

    def open(self, make: Callable[[], _T], address: tuple[str, int] | None, is_agents: bool) -> _T:
        """The store that `make` gives, once something listens at `address` (None: this rank does).

        is_agents: torchrun's agent listens there, and has done so before it started any rank.
        """

        def reach() -> _T:
            if address is not None:
                self._knock(address, is_agents)
            return make()

        return self._watched(reach)

    def exchange(self, store: Store, name: str, own: bytes) -> list[bytes]:
        """The bytes of each rank. `name` is the same on all ranks, and has not been used before."""
        self._came.clear()
        for guest in self._guests.values():
            guest.changed = time.monotonic()
        return self._watched(lambda: self._ask(store, name, own))

    def _knock(self, address: tuple[str, int], is_agents: bool) -> None:
        """Wait until something listens: torch's own wait cannot be broken off."""
        refusals = 0
        while time.monotonic() < self._deadline:
            try:
                socket.create_connection(address, _CONNECT_S).close()
                return
            except OSError as error:
                self._unreachable = error.strerror or str(error)
                refusals += isinstance(error, ConnectionRefusedError)
            if is_agents and refusals == _REFUSALS:
                raise ConnectionRefusedError(f"{self._unreachable}: torchrun there has ended")
            time.sleep(0.2)
        raise TimeoutError(self._unreachable)

    def _ask(self, store: Store, name: str, own: bytes) -> list[bytes]:
        """In a thread: say who is here, again and again, until all have come."""
        keys = [f"llama-meeting/{name}/{rank}" for rank in range(self._world_size)]
        count, next_beat = 0, 0.0
        while True:
            now = time.monotonic()
            if now >= next_beat:
                count, next_beat = count + 1, now + _BEAT_S
                own_record = [
                    self._host,
                    os.getpid(),
                    self._machine,
                    self._agent_pid,
                    own.hex(),
                    count,
                ]
                store.set(keys[self._rank], json.dumps(own_record))
                for rank, key in enumerate(keys):
                    if store.check([key]):
                        self._came[rank] = self._meet(rank, json.loads(store.get(key)))
            elif store.check(keys):
                next_beat = 0.0
            self._answered = time.monotonic()
            if len(self._came) == self._world_size:
                return [self._came[rank] for rank in range(self._world_size)]
            time.sleep(0 if next_beat == 0.0 else _LOOK_S)

    def _meet(self, rank: int, record: list[Any]) -> bytes:
        """What a rank said; it is looked after from now on."""
        host, pid, machine, launcher, payload, count = record
        guest = self._guests.get(rank)
        if guest is None:
            guest = _Guest(rank, host, pid, machine, launcher)
            if machine == self._machine and rank != self._rank:
                guest.pidfd = processes.open_process(pid)
            self._guests[rank] = guest
        if count != guest.count:
            guest.count, guest.changed = count, time.monotonic()
        return bytes.fromhex(payload)

    def _watched(self, work: Callable[[], _T]) -> _T:
        """The result of the work, which another thread does, while this one looks around."""
        results: list[_T] = []
        errors: list[Exception] = []
        done = threading.Event()

        def run() -> None:
            try:
                results.append(work())
            except Exception as error:
                errors.append(error)
            done.set()

        threading.Thread(target=run, name="llama-meeting", daemon=True).start()
        while not done.wait(_LOOK_S):
            self._look()
        if not errors:
            return results[0]
        if not isinstance(errors[0], (OSError, RuntimeError)):
            raise errors[0]
        end = time.monotonic() + _NEWS_S
        while time.monotonic() < end:
            self._look()
            time.sleep(_LOOK_S)
        self._fail(self._describe_store(str(errors[0]).splitlines()[0] or type(errors[0]).__name__))

    def _look(self) -> None:
        """Is somebody gone, or too late? Then this rank ends, and one of each machine says why."""
        now = time.monotonic()
        if self._agent is not None and _has_ended(self._agent):
            status = processes.wait_status(self._agent_pid, self._agent)
            self._fail(
                f"torchrun (process {self._agent_pid}) on {self._host}, which started these ranks, "
                f"{processes.describe_end(status)}"
            )
        for guest in list(self._guests.values()):
            if guest.machine == self._machine and not guest.is_gone:
                if _has_ended(guest.pidfd) if guest.pidfd else not _is_there(guest.pid):
                    guest.is_gone = True
                    self._lose(guest)
            elif guest.machine != self._machine and now - guest.changed > _SILENCE_S:
                self._fail(
                    f"rank {guest.rank} on {guest.host} came, and was not heard of for "
                    f"{_SILENCE_S:g} s: the machine, the process or the network is gone"
                )
        if self._answered is not None and now - self._answered > _SILENCE_S:
            self._fail(self._describe_store(f"no answer for {_SILENCE_S:g} s"))
        if now > self._deadline:
            self._fail(self._late_cause or self._describe_missing(f"within {self._limit_s:g} s"))
        if now - self._began > _NOTE_S and not self._has_noted:
            self._has_noted = True
            if self._speaks():
                so_far = self._describe_missing(f"in {_NOTE_S:g} s")
                say(f"llama: {so_far}; waiting up to {self._limit_s:g} s (timeout_s)")

    def _lose(self, guest: _Guest) -> None:
        """A rank of this machine has ended. After a SIGTERM, torchrun will end this one as well."""
        status = processes.wait_status(guest.pid, guest.pidfd or 0)
        cause = f"rank {guest.rank} on {guest.host} {processes.describe_end(status)}"
        cause += ", before all ranks had met"
        if not processes.was_terminated(status):
            self._fail(cause)
        self._late_cause = self._late_cause or cause
        self._deadline = min(self._deadline, time.monotonic() + _LINGER_S)

    def _fail(self, cause: str) -> NoReturn:
        """NotMetError on the rank that speaks for its torchrun; the others end in silence."""
        if self._speaks():
            raise NotMetError(cause)
        time.sleep(_LINGER_S)
        processes.exit_now(1, ())
        raise AssertionError("the process has ended")

    def _speaks(self) -> bool:
        """Whether this is the first of the ranks of its torchrun that have come and are there."""
        own = (self._machine, self._agent_pid)
        guests = list(self._guests.values())
        here = [g.rank for g in guests if (g.machine, g.launcher) == own and not g.is_gone]
        if not here:
            return not self._agent_pid or os.environ.get("LOCAL_RANK") == "0"
        return self._rank == min(here)

    def _describe_store(self, why: str) -> str:
        if "EADDRINUSE" in why:
            return (
                f"another process listens at {self._place}, where the ranks are to meet: "
                "`ss -ltnp` shows it; end it, or choose another MASTER_PORT (--master_port of "
                "torchrun; on one machine --standalone finds a free one)"
            )
        return (
            f"the ranks cannot meet at {self._place} ({why}): check that address and port "
            "(--master_addr and --master_port of torchrun), that torchrun runs on that machine, "
            f"and that no firewall drops the port; MASTER_ADDR and MASTER_PORT with `llama doctor` "
            "test it"
        )

    def _describe_missing(self, when: str) -> str:
        if self._answered is None:
            return self._describe_store(self._unreachable or f"no answer {when}")
        hosts: dict[str, list[int]] = {}
        for rank in list(self._came):
            hosts.setdefault(self._guests[rank].host, []).append(rank)
        came = ", ".join(f"{_ranks(ranks)} on {host}" for host, ranks in hosts.items())
        missing = [rank for rank in range(self._world_size) if rank not in self._came]
        return (
            f"{self._locate(missing)} of {self._world_size} did not come to {self._place} {when}; "
            f"{came} did. Their own first message, or that of their torchrun, says why"
        )

    def _locate(self, missing: list[int]) -> str:
        """The missing ranks, with the machine where torchrun's variables tell it."""
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        per_machine = int(text) if text.isdecimal() and int(text) else self._world_size
        if per_machine >= self._world_size:
            return f"{_ranks(missing)} on {self._host}" if text else _ranks(missing)
        hosts = {guest.rank // per_machine: guest.host for guest in self._guests.values()}
        machines: dict[int, list[int]] = {}
        for rank in missing:
            machines.setdefault(rank // per_machine, []).append(rank)
        return ", ".join(
            f"{_ranks(ranks)} on {hosts.get(machine, f'machine {machine} (none of it came)')}"
            for machine, ranks in machines.items()
        )


def _ranks(ranks: Iterable[int]) -> str:
    return "rank " + ", ".join(map(str, sorted(ranks)))


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        pass
    return True


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
