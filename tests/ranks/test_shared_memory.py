"""Ranks that share memory, in separate processes: exact sums, and peers that fail or differ.

Peers also stop, or do not come. The ranks run programs/shared_ranks.py.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from helpers.forked import Ranks
from helpers.kernels import HAS_KERNELS
from programs import shared_ranks

pytestmark = pytest.mark.skipif(
    not HAS_KERNELS or not hasattr(os, "memfd_create"), reason="needs the kernels, and Linux"
)


@pytest.fixture
def start(tmp_path) -> Callable[..., Ranks]:
    numbers = itertools.count()

    def start(size: int, do: str, *args: Any) -> Ranks:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return Ranks(shared_ranks.main, folder, size, do, *args)

    return start


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_random_operations_are_their_definition_to_the_bit(size, start):
    """Random operations equal their definition bit for bit.

    They are float32 sums in the order of the ranks, gathers of equal and unequal tensors, and
    broadcasts, of 0 bytes to over 1 MB.
    """
    with start(size, "operations", 7 * size, 60) as ranks:
        found = ranks.results()
    assert len(set(found)) == 1 and len(found[0]) == 64, found


def test_two_ranks_sum_as_gloo_does(start):
    with start(2, "like_gloo") as ranks:
        assert ranks.results() == [None, None]


@pytest.mark.parametrize("size", [2, 4])
def test_messages_arrive_in_order(size, start):
    with start(size, "messages", size) as ranks:
        assert ranks.results() == [None] * size


def test_counts_begin_anew_after_four_billion(start):
    with start(3, "operations", 1, 40, True) as ranks, start(3, "messages", 1, True) as others:
        assert len(set(ranks.results())) == 1
        assert others.results() == [None] * 3


def test_ranks_that_are_stopped_and_continued_at_random_miss_nothing(start):
    """Ranks that are stopped and continued at random miss nothing.

    They are asleep or spinning, before or after their own part; ranks that wait for them are woken.
    """
    choose = random.Random(5)
    with start(3, "operations", 11, 80) as ranks:
        while not all(pipe.poll(0) for pipe in ranks.pipes):
            rank = choose.randrange(3)
            ranks.send_signal(rank, signal.SIGSTOP)
            time.sleep(choose.choice([0.0, 0.001, 0.02, 0.15]))
            ranks.send_signal(rank, signal.SIGCONT)
            time.sleep(choose.choice([0.0, 0.001, 0.02]))
        assert len(set(ranks.results())) == 1


def test_a_rank_that_does_not_come_is_named_when_the_limit_ends(start):
    """A rank that does not come is named when the limit ends.

    Two of four ranks are late: the others name both, by their world ranks.
    """
    with start(4, "absent", [1, 3], "sum", 3.0) as ranks:
        for rank in (0, 2):
            assert ranks.result(rank).startswith(
                "RankError: ranks 11, 13 did not reach all-reduce within 3 s (timed out)"
            )


@pytest.mark.parametrize("what", ["sum", "idle"])
def test_a_job_that_fails_is_seen_at_once(what, start):
    """A failed job is noticed at once, long before the limit, or where there is none."""
    with start(3, "absent", [0, 2], what, 600.0) as ranks:
        shared_ranks.wait_until(lambda: all((ranks.folder / f"ready-{r}").exists() for r in (0, 2)))
        time.sleep(0.3)  # rank 1 waits
        (ranks.folder / "ending").touch()
        assert ranks.result(1).startswith("RankError: another rank failed, while rank 11 waited in")


@pytest.mark.parametrize("do", ["all-reduce", "all-gather"])
def test_ranks_that_exchange_unlike_tensors_are_told_so(do, start):
    with start(2, "unlike", do) as ranks:
        for first, second in ranks.results():
            assert f"another rank exchanges other tensors than this one in {do}" in first
            assert "out of step" in second


def test_an_idle_rank_uses_no_core_and_has_no_limit(start):
    with start(2, "idle") as ranks:
        assert ranks.results()[1] < 0.5, "of the two seconds that it waited"


def test_a_message_wakes_a_sleeping_rank(start):
    """A message wakes a sleeping rank.

    By itself the rank would look only about 50 ms after the message, as each sleep lasts 100 ms.
    """
    with start(2, "woken") as ranks:
        assert ranks.results()[1] < 0.04


def test_an_interrupt_leaves_the_ranks_in_step_and_a_second_ends_the_wait(start):
    with start(2, "interrupted", 1) as ranks:
        summed = "[2.0, 2.0]"
        assert ranks.results() == [["KeyboardInterrupt ", summed, summed], [summed, summed]]
    with start(2, "interrupted", 2) as ranks:
        first, _, second, _ = ranks.result(0)
        assert first == "KeyboardInterrupt "
        assert second.startswith("RankError all-reduce: an earlier exchange was interrupted")


def test_nothing_is_left_when_the_memory_is_let_go(start):
    """Nothing is left when the memory is released.

    There is no file, descriptor or mapping; /dev/shm is not used at all.
    """
    with start(2, "leave_nothing") as ranks:
        for used, left in ranks.results():
            assert "mapping" in used
            assert not any("/dev/shm" in name for name in used)
            assert left == []


@pytest.mark.parametrize("lacking", ["_machine", "kernels", "_create", "_open"])
def test_where_one_rank_cannot_share_memory_none_does(lacking, start):
    where = 0 if lacking == "_create" else 1
    with start(2, "without", lacking, where) as ranks:
        assert ranks.results() == [True, True]
