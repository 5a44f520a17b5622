"""Ranks that share memory, in separate processes: exact sums, and peers that fail or differ.

Peers also stop, or do not come. The ranks run programs/shared_ranks.py.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.kernels import HAS_KERNELS
from helpers.launch import PROGRAMS, REPO, environment
from helpers.waiting import wait_until

pytestmark = pytest.mark.skipif(
    not HAS_KERNELS or not hasattr(os, "memfd_create"), reason="needs the kernels, and Linux"
)

LIMIT_S = 240.0  # distinguishes a hang from a slow end

# Calls that end well: the number of ranks, a function of the program, its arguments. The same ranks
# make all of them, so that torch is imported seven times; those that take part in most come first.
CALLS: dict[str, list[Any]] = {
    "random, 7": [7, "operations", 49, 60],
    "random, 4": [4, "operations", 28, 60],
    "messages, 4": [4, "messages", 4],
    "random, 3": [3, "operations", 21, 60],
    "random, anew": [3, "operations", 1, 40, True],
    "messages, anew": [3, "messages", 1, True],
    "random, 2": [2, "operations", 14, 60],
    "messages, 2": [2, "messages", 2],
    "gloo": [2, "like_gloo"],
    "unlike all-reduce": [2, "unlike", "all-reduce"],
    "unlike all-gather": [2, "unlike", "all-gather"],
    "idle": [2, "idle"],
    "woken": [2, "woken"],
    "left": [2, "leave_nothing"],
    "without _machine": [2, "without", "_machine", 1],
    "without kernels": [2, "without", "kernels", 1],
    "without _create": [2, "without", "_create", 0],
    "without _open": [2, "without", "_open", 1],
}


class Ranks:
    """Processes that make these calls; all are gone at the end of the block."""

    def __init__(self, folder: Path, *calls: list[Any]) -> None:
        program = [sys.executable, str(PROGRAMS / "shared_ranks.py"), str(folder)]
        path = os.pathsep.join([str(REPO), str(REPO / "tests")])
        self.processes = [
            subprocess.Popen(
                [*program, str(rank), json.dumps(calls)],
                env=environment(PYTHONPATH=path), stdout=subprocess.PIPE, text=True,
            )
            for rank in range(max(call[0] for call in calls))
        ]  # fmt: skip

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with process:  # waits until it is gone, and closes its pipe
                process.kill()

    def results(self, rank: int) -> list[Any]:
        """Wait until this rank has ended, and return the results of its calls."""
        process = self.processes[rank]
        lines, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        return [json.loads(line) for line in lines.splitlines()]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list[Any]]:
    """The results of each of `CALLS`, one for each rank that takes part."""
    with Ranks(tmp_path_factory.mktemp("ranks"), *CALLS.values()) as ranks:
        found = [iter(ranks.results(rank)) for rank in range(7)]
    return {name: [next(rank) for rank in found[: call[0]]] for name, call in CALLS.items()}


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_random_operations_are_their_definition_to_the_bit(size, results):
    """Random operations equal their definition bit for bit.

    They are float32 sums in the order of the ranks, gathers of equal and unequal tensors, and
    broadcasts, of 0 bytes to over 1 MB.
    """
    found = results[f"random, {size}"]
    assert len(set(found)) == 1 and len(found[0]) == 64, found


def test_two_ranks_sum_as_gloo_does(results):
    assert results["gloo"] == [None, None]


@pytest.mark.parametrize("size", [2, 4])
def test_messages_arrive_in_order(size, results):
    assert results[f"messages, {size}"] == [None] * size


def test_counts_begin_anew_after_four_billion(results):
    assert len(set(results["random, anew"])) == 1
    assert results["messages, anew"] == [None] * 3


def test_ranks_that_are_stopped_and_continued_at_random_miss_nothing(tmp_path):
    """Ranks that are stopped and continued at random miss nothing.

    They are asleep or spinning, before or after their own part; ranks that wait for them are woken.
    """
    choose = random.Random(5)
    with Ranks(tmp_path, [3, "operations", 11, 80]) as ranks:
        wait_until((tmp_path / "0" / "1-0").exists)  # the ranks meet
        while None in [process.poll() for process in ranks.processes]:
            process = choose.choice(ranks.processes)
            process.send_signal(signal.SIGSTOP)
            time.sleep(choose.choice([0.0, 0.001, 0.02, 0.15]))
            process.send_signal(signal.SIGCONT)
            time.sleep(choose.choice([0.0, 0.001, 0.02]))
        assert len({ranks.results(rank)[0] for rank in range(3)}) == 1


def test_a_rank_that_does_not_come_is_named_when_the_limit_ends(tmp_path):
    """A rank that does not come is named when the limit ends.

    Two of four ranks are late: the others name both, by their world ranks.
    """
    with Ranks(tmp_path, [4, "absent", [1, 3], "sum", 3.0]) as ranks:
        for rank in (0, 2):
            (found,) = ranks.results(rank)
            assert found.startswith(
                "RankError: ranks 11, 13 did not reach all-reduce within 3 s (timed out)"
            )


@pytest.mark.parametrize("what", ["sum", "idle"])
def test_a_job_that_fails_is_seen_at_once(what, tmp_path):
    """A failed job is noticed at once, long before the limit, or where there is none."""
    with Ranks(tmp_path, [3, "absent", [0, 2], what, 600.0]) as ranks:
        own = tmp_path / "0"
        wait_until(lambda: all((own / f"ready-{rank}").exists() for rank in (0, 2)))
        time.sleep(0.3)  # rank 1 waits
        (own / "ending").touch()
        (found,) = ranks.results(1)
        assert found.startswith("RankError: another rank failed, while rank 11 waited in")


@pytest.mark.parametrize("do", ["all-reduce", "all-gather"])
def test_ranks_that_exchange_unlike_tensors_are_told_so(do, results):
    for first, second in results[f"unlike {do}"]:
        assert f"another rank exchanges other tensors than this one in {do}" in first
        assert "out of step" in second


def test_an_idle_rank_uses_no_core_and_has_no_limit(results):
    assert results["idle"][1] < 0.5, "of the two seconds that it waited"


def test_a_message_wakes_a_sleeping_rank(results):
    """A message wakes a sleeping rank.

    By itself the rank would look only about 50 ms after the message, as each sleep lasts 100 ms.
    """
    assert results["woken"][1] < 0.04


def test_an_interrupt_leaves_the_ranks_in_step_and_a_second_ends_the_wait(tmp_path):
    once, twice = tmp_path / "once", tmp_path / "twice"
    once.mkdir()
    with Ranks(once, [2, "interrupted", 1]) as ranks:
        summed = "[2.0, 2.0]"
        assert ranks.results(0) == [["KeyboardInterrupt ", summed, summed]]
        assert ranks.results(1) == [[summed, summed]]
    twice.mkdir()
    with Ranks(twice, [2, "interrupted", 2]) as ranks:
        ((first, _, second, _),) = ranks.results(0)
        assert first == "KeyboardInterrupt "
        assert second.startswith("RankError all-reduce: an earlier exchange was interrupted")


def test_nothing_is_left_when_the_memory_is_let_go(results):
    """Nothing is left when the memory is released.

    There is no file, descriptor or mapping; /dev/shm is not used at all.
    """
    for used, left in results["left"]:
        assert "mapping" in used
        assert not any("/dev/shm" in name for name in used)
        assert left == []


@pytest.mark.parametrize("lacking", ["_machine", "kernels", "_create", "_open"])
def test_where_one_rank_cannot_share_memory_none_does(lacking, results):
    assert results[f"without {lacking}"] == [True, True]
