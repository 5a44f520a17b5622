"""Calls share the batch in turn: a small call does not wait for the end of a large one."""

import contextlib
from typing import Any

import pytest

from llama import SamplingParams
from llama.requests.turns import Turns

LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def engine(demo):
    return demo.llm_engine


def test_a_small_call_waits_for_no_sequence_of_a_large_one(engine):
    """A small call waits for no sequence of a large one.

    A large call came first, with twice as many sequences as the batch holds. The small one ends
    before any of them, and the preempted sequences still get their usual results.
    """
    count = 2 * engine.core.scheduler.max_batch_size
    large = [engine.prepare("", [5, 6], SamplingParams(**LONG), index=i) for i in range(count)]
    small = engine.prepare("", [7], SamplingParams(max_tokens=4))
    with contextlib.closing(engine.stream(large)) as first:
        next(first)
        (output,) = engine.run([small])
        assert output.finished
        assert not any(answer.finish_reason for request in large for answer in request.answers)
        *_, last = first
    outputs = {tuple(answer.sequence.output) for request in large for answer in request.answers}
    assert last.finished and len(outputs) == 1, "all have the same prompt"
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
    numbers = [request.answers[0].sequence.call for call in calls for request in call]
    assert numbers == [1, 1, 2, 3]
    assert not turns.take_new(9, {1}), "the others have none that wait"
    assert not turns.take_new(0, set())
    assert [owner[0] for owner in turns.take_new(9, {2}).values()] == [calls[0][1]]
    assert not turns.take(1)
