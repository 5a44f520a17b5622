"""Rank 0 leads: of two cores, one learns about its sequences through messages alone.

The ranks are two threads with a queue between them; test_parallel.py has real processes.
"""

import queue
import random
import threading
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from helpers.scheduling import VOCAB, FakeEngine, engine, next_token, sequence
from helpers.waiting import wait_until
from llama.engine.core import EngineCore
from llama.engine.request import Capture, ImageSpan, Pooling, SequenceSpec
from llama.engine.sequence import SequenceState
from llama.ranks.parallel import Parallel, RankError
from llama.ranks.placement import Placement
from llama.requests.leader import MESSAGE, Follower, Leader, Message


@dataclass(frozen=True)
class Wire(Parallel):
    """Two ranks in one process: rank 0 broadcasts through a queue."""

    messages: "queue.Queue[bytes]" = field(default_factory=queue.Queue)

    def broadcast_bytes(self, data: bytes, *, is_idle: bool = False) -> bytes:
        if self.rank:
            return self.messages.get(timeout=30)
        self.messages.put(data)
        return data


ADAPTERS: Any = None  # these cores have none


class Ranks:
    """A core that leads, and a thread in which another one follows it."""

    def __init__(self, timeout_s: float = 600.0, **settings: int) -> None:
        messages: queue.Queue[bytes] = queue.Queue()
        here, there = (
            Wire(Placement(rank=rank, size=2), timeout_s=timeout_s, messages=messages)
            for rank in (0, 1)
        )
        self.core, self.messages = engine(**settings), messages
        self.follower = engine(**settings)
        # for the follower: the tokens of each sequence that advanced
        self.steps: list[list[int]] = []
        self.leader = Leader(self.core, ADAPTERS, here)
        self.following = Follower(self.follower, ADAPTERS, there)
        self.num_calls: list[int] = []
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self) -> None:
        try:
            self.num_calls.append(self.following.follow())
        except Exception as error:
            self.error = error

    def close(self) -> None:
        self.leader.close(77)
        self.thread.join(30)


def known(core: EngineCore) -> list[tuple[list[int], int, list[int], list[bytes]]]:
    """Return everything on which a rank's decisions depend."""
    return [
        (s.tokens, s.num_computed, list(s.pages), [s.spec.prefix_root, *s.page_hashes])
        for s in core.scheduler.live()
    ]


@pytest.mark.parametrize("ahead", [False, True])
def test_the_follower_holds_what_the_leader_holds_after_each_step(ahead: bool) -> None:
    """The follower has the leader's state after each step.

    Sequences come, rest, end and are aborted at random, on a cache so small that some lose places.
    Whatever rank 0 decides, the follower has the same tokens, counts, pages and hashes after the
    step, also where sequences have different prefix roots.
    """
    rng = random.Random(3)
    ranks = Ranks(num_pages=9, max_batch_size=3, budget=7, async_scheduling=ahead)
    ranks.thread.start()
    live: list[SequenceState] = []
    for _ in range(150):
        removed = [rng.choice(live)] if live and rng.random() < 0.2 else []
        added = []
        for _ in range(rng.choice((0, 0, 1, 2))):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
            root = rng.choice((b"", b"\xff" * 32))
            stops = frozenset({rng.randrange(40)})
            sender = rng.choice((b"", b"\xff", b"b"))
            count = rng.randrange(1, 14)
            added.append(sequence(prompt, count, stops, 0, root, sender))
        resting = [seq for seq in live + added if rng.random() < 0.3]
        ranks.leader.step(added, removed, resting)
        live = [seq for seq in live + added if not seq.finished]
        wanted = known(ranks.core)
        wait_until(lambda: ranks.following._num_steps == ranks.leader._num_steps)
        wait_until(lambda: known(ranks.follower) == wanted, "the follower differs")  # noqa: B023
        ranks.core.scheduler.check()
    assert ranks.core.scheduler.num_preemptions > 0, "nobody was preempted"
    assert ranks.error is None
    ranks.close()
    assert ranks.num_calls == [77] and not ranks.follower.has_unfinished()
    assert ranks.follower.scheduler.pool.num_free == 9


def test_a_message_carries_every_field() -> None:
    spec = SequenceSpec(
        (5, 128_255, 0), 131_072, seed=2**63 - 1, stop_ids=frozenset({128_001, 9}), call=3,
        prefix_root=bytes(range(256)), num_public=9, tenant=b"\xff" * 8, stays_in_memory=True,
        is_constrained=True, prediction=(7, 8),
        temperature=0.1, top_p=0.9, top_k=5, min_p=1e-9, repetition_penalty=1.5,
        presence_penalty=-0.5, frequency_penalty=0.25, logit_bias=((3, -100.0), (5, 1.5)),
        bad_words=((1,), (2, 3)), min_tokens=4, logprobs=0, prompt_logprobs=1,
        pooling=Pooling("mean", 3), capture=Capture((0, 2), True), adapter=b"\xff",
        sender=b"192.0.2.1", images=(ImageSpan(2, b"\xff" * 32, 1, 3),),
    )  # fmt: skip
    default = SequenceSpec((), 0)
    same = {f.name for f in fields(spec) if getattr(spec, f.name) == getattr(default, f.name)}
    assert not same, "the test leaves a field at its default"
    sent = MESSAGE.dump_json(Message(1, 2**40, 2**32 - 1, [(7, spec)], [3, 2]))
    found = MESSAGE.validate_json(sent)
    assert found == Message(1, 2**40, 2**32 - 1, [(7, spec)], [3, 2])
    ((_, copy),) = found.added
    assert [type(getattr(copy, f.name)) for f in fields(copy)] == [
        type(getattr(spec, f.name)) for f in fields(spec)
    ]


@pytest.mark.parametrize("fault", ["budget", "pages", "missed a step"])
def test_a_rank_that_would_compute_something_else_is_an_error_before_the_model_runs(fault) -> None:
    ranks = Ranks()
    if fault == "budget":
        ranks.follower.scheduler.token_budget = 4
    elif fault == "pages":
        ranks.follower.scheduler.pool.allocate()
    else:
        ranks.following._num_steps = 1
    ranks.thread.start()
    ranks.leader.step([sequence([1, 2, 3, 4, 5, 6], 3)], [])
    ranks.thread.join(30)
    assert isinstance(ranks.error, RankError)
    assert "rank 1 diverged from rank 0 at step 0" in str(ranks.error)
    follower: FakeEngine = ranks.follower
    assert not follower.runner.computed


def test_after_a_failed_step_the_ranks_do_not_meet_again(monkeypatch) -> None:
    ranks = Ranks()

    def fail(scheduled: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(ranks.core.runner, "start", fail)
    with pytest.raises(MemoryError):
        ranks.leader.step([sequence([1, 2], 3)], [])
    with pytest.raises(RankError, match="have stopped: no room"):
        ranks.leader.step([sequence([1, 2], 3)], [])
    sent = ranks.messages.qsize()
    ranks.leader.close(0)
    assert ranks.messages.qsize() == sent


def test_a_step_in_flight_is_read_by_the_first_step_that_is_led() -> None:
    """A step in flight is read by the first step that is led.

    Its sequence was aborted before rank 0 led, but both ranks still have to read it.
    """
    ranks = Ranks(async_scheduling=True)
    for core in (ranks.core, ranks.follower):
        seq = sequence([1, 2, 3], 5)
        core.step([seq])
        core.finish(seq, "abort")
        assert core.has_step_in_flight
    ranks.thread.start()
    late = sequence([4, 5], 2)
    added = [late]
    while not late.finished:
        ranks.leader.step(added, [])
        added = []
    ranks.close()
    assert ranks.error is None and ranks.num_calls == [77]
    assert late.output == [next_token([4, 5]), next_token([4, 5, next_token([4, 5])])]


def test_the_others_hear_from_rank_0_while_it_has_nothing_to_do() -> None:
    """The other ranks receive messages from rank 0 while it is idle.

    Each message restarts their timeout; the last one ends their work.
    """
    ranks = Ranks(timeout_s=0.04)
    messages = ranks.messages
    kinds = [MESSAGE.validate_json(messages.get(timeout=60)).kind for _ in range(3)]
    assert len(set(kinds)) == 1
    ranks.leader.close(5)
    while not messages.empty():
        last = MESSAGE.validate_json(messages.get())
    assert last.kind not in kinds and last.number == 5
