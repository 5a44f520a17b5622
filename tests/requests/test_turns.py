"""Calls share the batch in turn: a small one does not wait for the end of a large one."""

import contextlib
from typing import Any

import pytest

from llama import SamplingParams
from llama.requests.turns import Turns

LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def engine(demo):
    return demo.llm_engine


def test_a_small_call_gets_the_next_free_place(engine):
    """A large call came first, with ten times as many sequences as the batch holds."""
    count = 10 * engine.core.scheduler.max_batch_size
    large = [engine.prepare("", [5, 6], SamplingParams(**LONG), index=i) for i in range(count)]
    small = engine.prepare("", [7], SamplingParams(max_tokens=4))
    with contextlib.closing(engine.stream(large)) as first:
        next(first)
        (output,) = engine.run([small])
        assert output.finished
        ended = [answer for request in large for answer in request.answers if answer.finish_reason]
        assert len(ended) <= 2 * engine.core.scheduler.max_batch_size
    assert not engine.has_unfinished_requests()
    engine.core.scheduler.check()


def test_calls_take_turns_in_the_order_of_their_arrival(engine):
    turns = Turns()
    calls = [
        [engine.prepare("", [5 + i], SamplingParams(n=n)) for n in counts]
        for i, counts in enumerate([(2, 1), (1,), (4,)])
    ]
    for call in calls:
        turns.add(call)
    assert [owner[0].answers[0].sequence.tokens for owner in turns.take(4).values()] == [
        [5], [6], [7], [5],
    ]  # fmt: skip
    turns.discard(calls[2][0])
    assert [owner[0] for owner in turns.take(9).values()] == [calls[0][1]]
    assert not turns.take(1)
