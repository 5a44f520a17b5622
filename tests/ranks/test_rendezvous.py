"""Ranks of several machines meet at a store and learn of one another, here in one process."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from helpers.waiting import wait_until
from llama.ranks import processes
from llama.ranks import rendezvous as rendezvous_module
from llama.ranks.peers import Peers
from llama.ranks.rendezvous import Rendezvous

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peers have sockets of Linux alone")


SILENCE_S = 1.5  # a thread of a busy machine may pause for one second


class DictStore:
    """A dict with those methods of torch's stores that a Rendezvous uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.delay_s = 0.0

    def clone(self) -> "DictStore":
        return self

    def set(self, key: str, value: str) -> None:
        time.sleep(self.delay_s)
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return int(self.values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.lock:
            return self.values.setdefault(key, desired.encode())


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous_module, "TICK_S", 0.05)


@contextmanager
def ranks_of(store: DictStore, machines: list[str], limit_s: float = 20.0) -> Iterator[list]:
    """Return a Rendezvous for each rank, not yet started; a machine is a name."""
    with ExitStack() as stack:
        found = []
        for rank, machine in enumerate(machines):
            peers = Peers(rank)
            peers.own.machine = peers.own.host = machine
            meeting = Rendezvous(
                peers, len(machines), lambda _: store, "store:1", limit_s, SILENCE_S
            )
            found.append(meeting)
            stack.callback(peers.close)
            stack.callback(found[-1].close)
        yield found


def test_a_rank_is_whole_when_others_are_told_of_it():
    """A rank is fully recorded before others learn of it.

    A past fault: it was visible before its time of arrival was recorded, and then counted as
    silent.
    """
    failures = []
    with ranks_of(DictStore(), ["a", "a", "b"]) as found:
        for one in found:
            one.on_news = lambda one=one: failures.append(one.failure())
            one.start()
        assert all(one.has_met.wait(60) for one in found)
    assert failures and not any(failures)


def test_ranks_hear_where_the_others_are_and_why_one_ends_until_they_leave():
    store = DictStore()
    with ranks_of(store, ["a", "a", "b"]) as (zero, one, two):
        zero.own_state = lambda: {"activity": "a step", "in_collective": True, "steps": 3}
        for each in (zero, one, two):
            each.start()
        wait_until(lambda: two.has_met.is_set() and two.peers.all[0].state)
        assert two.peers.all[0].state == {"activity": "a step", "in_collective": True, "steps": 3}
        assert one.claim("rank 1 on a failed", 3.0) and not two.claim("another cause", 1.0)
        wait_until(lambda: two.cause)
        assert two.cause == (1, "rank 1 on a failed", 3.0)
        one.close()
        wait_until(lambda: two.peers.all[1].has_left)
        # the store is gone: the first rank of each machine reports it
        zero._error = one._error = "gone"
        assert zero.claim("rank 2 on b failed", 3.0) and not one.claim("rank 2 on b failed", 3.0)


def test_what_is_silent_is_named():
    """Silence is reported with its origin.

    A machine stops reporting, a store does not answer, or a rank does not come.
    """
    store = DictStore()
    with ranks_of(store, ["a", "b", "b"]) as found:
        for each in found:
            each.start()
        assert all(each.has_met.wait(60) for each in found)
        found[1]._is_done.set()  # simulates its end
        end = time.monotonic() + 1.5 * SILENCE_S
        while time.monotonic() < end:
            assert not found[0].failure(), "its machine is there"
            time.sleep(0.05)
        found[2]._is_done.set()
        time.sleep(1.5 * SILENCE_S)
        assert not found[0].failure(), "rank 0 did not look itself: it may have been stopped"
        wait_until(found[0].failure)
        assert found[0].failure().startswith("b (rank 1, 2) did not respond for 1.5 s: ")
        store.delay_s = 2 * SILENCE_S
        wait_until(lambda: "torch's store at store:1 does not answer" in found[0].failure())
        assert "answer: rank 0 on a, its launcher, that machine" in found[2]._describe_lost()
        store.delay_s = 0.0
    with ranks_of(DictStore(), ["a", "b"], limit_s=0.3) as (zero, one):
        zero.start()
        one._thread = threading.Thread()  # it never comes
        one._thread.start()
        wait_until(zero.failure)
        assert zero.failure().startswith("rank 1 of 2 did not arrive at store:1 within 0.3 s; ")


def test_the_first_claim_does_not_wait_for_a_store_whose_rank_is_stopped(monkeypatch):
    """The first claim does not wait for a store whose rank is stopped.

    Without torchrun, rank 0 has the store. A wait for it would delay the reason for the job's end.
    """
    monkeypatch.setattr(rendezvous_module, "STOPPED_S", 20.0)
    store = DictStore()
    with ranks_of(store, ["a", "a"]) as found:
        for one in found:
            one.start()
        assert all(one.has_met.wait(60) for one in found)
        found[1].peers.all[0].stopped_s = 3.1
        with store.lock:  # so that it does not answer
            began = time.monotonic()
            found[1].claim("rank 0 was stopped", 0.0)
            assert time.monotonic() - began < 10


def test_one_rank_says_why_where_there_is_no_store(monkeypatch):
    """One rank reports the reason where there is no store.

    It is the lowest running rank of those that one process has started, as rank 0 may be gone
    before it has made the store.
    """
    monkeypatch.delenv("LLAMA_LAUNCHER", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    started = dict.fromkeys((1, 2), os.getpid())
    monkeypatch.setattr(processes, "ranks_started_by", lambda pid: started)
    store = DictStore()
    monkeypatch.setattr(store, "add", lambda *_: 1 / 0)
    with ranks_of(store, ["a", "a", "a"]) as found:
        for one in found:
            one.peers.look_for_awaited()
            one.start()
        assert [one.claim("rank 0 has ended", 0.0) for one in found[1:]] == [True, False]
