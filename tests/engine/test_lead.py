"""Rank 0 leads: two cores, one of which hears of its sequences by messages alone.

The ranks are two threads with a queue between them; test_parallel.py has real ones.
"""

import os
import queue
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import pytest

from helpers.scheduling import VOCAB, FakeEngine, engine, sequence
from llama.engine.core import EngineCore
from llama.engine.lead import FollowingCore, LeadingCore, Message
from llama.engine.sequence import Sequence, TokenParams
from llama.ranks import ModelParallel, RankError


@dataclass(frozen=True)
class Wire(ModelParallel):
    """Two ranks in one process: what rank 0 broadcasts goes through a queue."""

    messages: "queue.Queue[bytes]" = field(default_factory=queue.Queue)

    def broadcast_bytes(self, data: bytes, *, is_idle: bool = False) -> bytes:
        if self.rank:
            return self.messages.get(timeout=30)
        self.messages.put(data)
        return data


class Ranks:
    """A leading core, and a thread that follows it."""

    def __init__(self, timeout_s: float = 600.0, **settings: int) -> None:
        messages: queue.Queue[bytes] = queue.Queue()
        here, there = (
            Wire(rank=rank, size=2, timeout_s=timeout_s, messages=messages) for rank in (0, 1)
        )
        self.follower = engine(**settings)
        self.steps: list[list[int]] = []  # of the follower: the tokens of each sequence that moved
        self.leader = LeadingCore(engine(**settings), here)
        self.following = FollowingCore(self.follower, there)
        self.last_word: list[int] = []
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self) -> None:
        try:
            self.last_word.append(self.following.follow())
        except Exception as error:
            self.error = error

    def close(self) -> None:
        self.leader.close(77)
        self.thread.join(30)


def known(core: EngineCore) -> list[tuple[list[int], int, list[int]]]:
    """All that a rank decides by."""
    return [(s.tokens, s.num_computed, list(s.pages)) for s in core.scheduler.live()]


@pytest.mark.parametrize("ahead", [False, True])
def test_the_follower_holds_what_the_leader_holds_after_each_step(ahead: bool) -> None:
    """Sequences come, end and are aborted at random, on a cache so small that some are preempted.
    Whatever rank 0 decides, the follower has the same tokens, counts and pages after the step."""
    rng = random.Random(3)
    ranks = Ranks(num_pages=9, max_batch_size=3, budget=7, runs_ahead=ahead)
    ranks.thread.start()
    live: list[Sequence] = []
    for _ in range(150):
        for _ in range(rng.choice((0, 0, 1, 2))):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
            live.append(sequence(prompt, rng.randrange(1, 14), frozenset({rng.randrange(40)})))
            ranks.leader.add(live[-1])
        if live and rng.random() < 0.2:
            ranks.leader.finish(rng.choice(live), "abort")
        ranks.leader.step()
        live = [seq for seq in live if not seq.finished]
        wanted = known(ranks.leader)
        wait_until(lambda: ranks.following._num_steps == ranks.leader._num_steps)
        wait_until(lambda: known(ranks.follower) == wanted, "the follower differs")  # noqa: B023
        ranks.leader.scheduler.check()
    assert ranks.leader.scheduler.num_preemptions > 0, "nobody was preempted"
    assert ranks.error is None
    ranks.close()
    assert ranks.last_word == [77] and not ranks.follower.has_unfinished()
    assert ranks.follower.scheduler.pool.num_free == 9


def wait_until(is_true: Callable[[], bool], what: str = "") -> None:
    """The follower works at its own pace; a limit, so that a difference is seen."""
    event = threading.Event()
    for _ in range(3000):
        if is_true():
            return
        event.wait(0.01)
    raise AssertionError(what)


def test_a_message_carries_every_field() -> None:
    params = TokenParams(
        temperature=0.1, top_p=0.9, top_k=5, min_p=1e-9, repetition_penalty=1.5,
        presence_penalty=-0.5, frequency_penalty=0.25, logit_bias=((3, -100.0), (5, 1.5)),
        bad_words=((1,), (2, 3)), min_tokens=4, logprobs=0, prompt_logprobs=None,
    )  # fmt: skip
    defaults = TokenParams()
    same = {f.name for f in fields(params) if getattr(params, f.name) == getattr(defaults, f.name)}
    assert same == {"prompt_logprobs"}, "the test leaves a field at its default"
    seq = Sequence([5, 128_255, 0], params, 131_072, 2**63 - 1, frozenset({128_001, 9}))
    found = Message.unpack(Message(1, 2**40, 2**32 - 1, [(7, seq)], [3, 2]).pack())
    assert (found.kind, found.step, found.checksum, found.gone) == (1, 2**40, 2**32 - 1, [3, 2])
    ((serial, copy),) = found.came
    assert (serial, copy.tokens, copy.params) == (7, seq.tokens, params)
    assert (copy.max_len, copy.seed, copy.stop_ids) == (seq.max_len, seq.seed, seq.stop_ids)


@pytest.mark.parametrize("stray", ["budget", "pages", "missed a step"])
def test_a_rank_that_would_compute_something_else_is_an_error_before_the_model_runs(stray) -> None:
    ranks = Ranks()
    if stray == "budget":
        ranks.follower.scheduler.token_budget = 4
    elif stray == "pages":
        ranks.follower.scheduler.pool.allocate()
    else:
        ranks.following._num_steps = 1
    ranks.thread.start()
    ranks.leader.add(sequence([1, 2, 3, 4, 5, 6], 3))
    ranks.leader.step()
    ranks.thread.join(30)
    assert isinstance(ranks.error, RankError)
    assert "rank 1 strays from rank 0 at step 0" in str(ranks.error)
    follower: FakeEngine = ranks.follower
    assert not follower.runner.computed


def test_after_a_failed_step_the_ranks_do_not_meet_again(monkeypatch) -> None:
    ranks = Ranks()

    def fail(scheduled: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(ranks.leader.runner, "start", fail)
    ranks.leader.add(sequence([1, 2], 3))
    with pytest.raises(MemoryError):
        ranks.leader.step()
    ranks.leader.add(sequence([1, 2], 3))
    with pytest.raises(RankError, match="have stopped: no room"):
        ranks.leader.step()
    sent = ranks.leader._parallel.messages.qsize()  # type: ignore[attr-defined]
    ranks.leader.close(0)
    assert ranks.leader._parallel.messages.qsize() == sent  # type: ignore[attr-defined]


def test_an_interrupt_takes_effect_after_the_step(monkeypatch) -> None:
    """Ctrl-C in the middle of a step on rank 0 alone would leave the other ranks waiting in it."""
    ranks = Ranks()
    ranks.thread.start()
    start, seq = ranks.leader.runner.start, sequence([1, 2, 3], 4)

    def interrupted(scheduled):
        os.kill(os.getpid(), signal.SIGINT)
        return start(scheduled)

    monkeypatch.setattr(ranks.leader.runner, "start", interrupted)
    ranks.leader.add(seq)
    with pytest.raises(KeyboardInterrupt):
        ranks.leader.step()
    assert seq.num_output == 1, "the step was not finished"
    ranks.leader.restart([seq])
    monkeypatch.undo()
    while not seq.finished:
        ranks.leader.step()
    late = sequence([4], 2)
    ranks.leader.restart([late])  # it had not come to the core yet
    while not late.finished:
        ranks.leader.step()
    ranks.close()
    assert ranks.error is None and ranks.last_word


def test_the_others_hear_from_rank_0_while_it_has_nothing_to_do() -> None:
    """Each message restarts their timeout; the last one ends their work."""
    ranks = Ranks(timeout_s=0.04)
    messages = ranks.leader._parallel.messages  # type: ignore[attr-defined]
    kinds = [Message.unpack(messages.get(timeout=60)).kind for _ in range(3)]
    assert len(set(kinds)) == 1
    ranks.leader.close(5)
    while not messages.empty():
        last = Message.unpack(messages.get())
    assert last.kind not in kinds and last.step == 5
