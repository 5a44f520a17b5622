"""Slow token masks take at most half of the time from others, and end in the end.

A clock that the masks themselves move stands for processor time, and for time.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from helpers.sequences import state_of
from llama import Llama, SamplingParams
from llama.engine.sequence import SequenceState
from llama.requests import mask_budget
from llama.requests.grammar import Matcher
from llama.requests.mask_budget import MaskBudget
from llama.requests.port import Group
from llama.requests.request import Request

FREE = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
# Rules by which a text has ever more readings, and one of many parts that may all be left out.
SLOW = {
    "ambiguous": "start: e\ne: e e e | e e | /[a-zA-Z ,.]/",
    "optional": "start: " + "x? " * 40 + "\nx: /[a-zA-Z ,.]+/",
}


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A constraint that allows everything, and takes some time for each mask."""

    failure = None

    def __init__(self, clock: Clock, mask_s: float) -> None:
        self.clock, self.mask_s = clock, mask_s

    def fill_allowed(
        self, tokens: list[int], first: int, drafts: list[int], bits: np.ndarray
    ) -> None:
        bits.fill(-1)
        self.clock.now += self.mask_s * len(bits)

    def draft(self, output: list[int], draft: list[int]) -> tuple[list[int], bool]:
        self.clock.now += self.mask_s
        return draft, False


class Trial:
    """A budget, the sequences of some senders, and steps that take 10 ms alongside their masks."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.budget = MaskBudget(self.clock, self.clock)
        self.live: list[SequenceState] = []

    def add(
        self, sender: bytes, count: int, mask_s: float | None, call: int = 0
    ) -> list[SequenceState]:
        """Add a request of so many answers, which are constrained where their masks take time."""
        answers = []
        for _ in range(count):
            rule = None if mask_s is None else Slow(self.clock, mask_s)
            seq = state_of([1], 999, constraint=rule, sender=sender, call=call)
            self.live.append(seq)
            answers.append(seq)
        self.budget.watch([Group(answers)])
        return answers

    def step(self) -> set[SequenceState]:
        """Make the masks of a step, and return the sequences that were part of it."""
        ran = set(self.live) - set(self.budget.resting(self.live))
        for seq in ran:
            if seq.constraint is not None:
                seq.constraint.fill_allowed(seq.tokens, 1, [], np.zeros((1, 4), np.int32))
        self.clock.now += 0.01
        return ran

    def counts(self, num_steps: int) -> Counter[SequenceState]:
        """Return of how many steps each sequence was part."""
        counts: Counter[SequenceState] = Counter()
        for _ in range(num_steps):
            counts.update(self.step())
        return counts


@pytest.mark.parametrize("mask_s", [0.011, 0.2, 3.0])
def test_slow_masks_take_half_of_the_time(mask_s, monkeypatch):
    """However slow its masks are, a sender gets half of the time, and all its answers have turns.

    A sequence that is not constrained is part of each step.
    """
    monkeypatch.setattr(mask_budget, "_REQUEST_S", 1e6)
    trial = Trial()
    slow = trial.add(b"a", 32, mask_s)
    (small,) = trial.add(b"b", 1, None)
    num_steps = 4000
    counts = trial.counts(num_steps)
    assert counts[small] == num_steps
    turns = [counts[seq] for seq in slow]
    longest = max(0.25 * 0.01 * num_steps, 33 * mask_s)  # what a step of 10 ms rounds up, and debts
    assert sum(turns) * mask_s == pytest.approx(0.01 * num_steps, abs=longest)
    assert max(turns) - min(turns) <= 2


def test_quick_masks_never_wait():
    trial = Trial()
    quick = trial.add(b"a", 32, 0.0002)
    trial.add(b"b", 1, None)
    assert len(trial.step() & set(quick)) == 11, "what nothing is known of counts as slow"
    trial.add(b"a", 8, 1.0)
    trial.step()
    assert all(set(quick) <= trial.step() for _ in range(20))


def test_slow_masks_take_turns_by_sender_and_then_by_request():
    trial = Trial()
    many = [trial.add(b"a", 9, 0.06, call=call) for call in range(4)]
    (one,) = trial.add(b"b", 1, 0.06, call=7)
    trial.add(b"c", 1, None)
    trial.step()
    counts = trial.counts(2000)
    by_call = [sum(counts[seq] for seq in answers) for answers in many]
    assert sum(by_call) == pytest.approx(counts[one], abs=2) and counts[one] > 50
    assert max(by_call) - min(by_call) <= 1


def test_new_requests_wait_as_long_as_the_old_ones_would():
    """Who leaves and comes again has no more of the time."""
    trial = Trial()
    trial.add(b"b", 1, None)
    num_masks = 0
    for number in range(2000):
        if number % 10 == 0:
            del trial.live[1:]  # they are aborted
            trial.add(b"a", 8, 1.0)
        num_masks += len(trial.step()) - 1
    assert num_masks == pytest.approx(20, abs=8)


def test_some_run_in_each_step_where_all_are_slow():
    trial = Trial()
    slow = trial.add(b"a", 8, 1.0)
    assert sum(len(trial.step()) == 1 for _ in range(20)) >= 19
    (small,) = trial.add(b"b", 1, None)
    assert sum(small in trial.step() for _ in range(90)) == 90
    assert sum(bool(trial.step() & set(slow)) for _ in range(200)) == 2


@pytest.mark.parametrize(("mask_s", "num_masks"), [(5.0, 7), (0.2, 151)])
def test_a_request_ends_once_its_slow_masks_have_taken_too_long(mask_s, num_masks):
    trial = Trial()
    (seq,) = trial.add(b"a", 1, mask_s)
    made = 0
    while seq.constraint is not None and seq.constraint.failure is None:
        trial.step()
        made += 1
    assert made == pytest.approx(num_masks + 1, abs=1)
    assert seq.constraint is not None and f"{1000 * mask_s:.0f} ms each" in str(
        seq.constraint.failure
    )
    bits = np.ones((2, 4), np.int32)
    seq.constraint.fill_allowed(seq.tokens, 1, [5], bits)
    assert not bits.any()


def test_quick_masks_may_take_as_long_as_they_like_in_all():
    trial = Trial()
    (seq,) = trial.add(b"a", 1, 0.004)
    trial.counts(20_000)
    assert trial.clock.now > 70 and seq.constraint is not None and seq.constraint.failure is None


@pytest.fixture
def masks(monkeypatch) -> Clock:
    """Let each mask of a grammar take 0.1 s of a clock, and each draft of one."""
    clock = Clock()
    fill, draft = Matcher.fill_allowed, Matcher.draft

    def slow_fill(self: Matcher, tokens: Any, first: int, drafts: Any, bits: Any) -> None:
        clock.now += 0.1 * len(bits)
        fill(self, tokens, first, drafts, bits)

    def slow_draft(self: Matcher, output: Any, prediction: Any) -> Any:
        clock.now += 0.1
        return draft(self, output, prediction)

    monkeypatch.setattr(Matcher, "fill_allowed", slow_fill)
    monkeypatch.setattr(Matcher, "draft", slow_draft)
    return clock


def _constrained(llama: Llama, grammar: str, n: int) -> Request:
    params = SamplingParams(max_tokens=6, n=n, seed=3, structured_output={"grammar": grammar})
    return llama.llm_engine.prepare("", "Once", params)


@pytest.mark.parametrize("grammar", SLOW.values(), ids=SLOW.keys())
@pytest.mark.parametrize("sender", [b"a", b"b"])
def test_a_small_request_is_done_beside_slow_masks(demo, masks, grammar, sender):
    """A small request gets a token in each step, in which few masks of the others are made.

    The answers of both are what they are without a budget.
    """
    llama = Llama(demo.model, demo.tokenizer)
    engine = llama.llm_engine
    wanted = engine.run([_constrained(llama, grammar, 16)])[0]
    wanted_small = engine.run([engine.prepare("", "One day", FREE)])[0]
    engine.port.mask_budget = MaskBudget(masks, masks)
    slow, small = _constrained(llama, grammar, 16), engine.prepare("", "One day", FREE)
    slow.set_sender(b"a")
    small.set_sender(sender)
    slow.request_id = "slow"
    engine.submit([slow])
    engine.step()
    engine.submit([small])
    before = masks.now
    num_steps = engine.core.stats.steps
    engine.wait_until(lambda: small.finished)
    num_steps = engine.core.stats.steps - num_steps
    assert num_steps <= 7, "it was left out of steps"
    spent = masks.now - before
    assert spent <= 0.4, "more masks than have their turn"
    assert not slow.finished
    engine.wait_until(lambda: slow.finished)
    for request, output in ((slow, wanted), (small, wanted_small)):
        found = engine.take_output(request)
        assert [x.token_ids for x in found.outputs] == [x.token_ids for x in output.outputs]
    assert engine.core.scheduler.pool.num_free == engine.core.scheduler.pool.num_pages


@pytest.mark.parametrize("grammar", SLOW.values(), ids=SLOW.keys())
def test_a_format_that_is_too_slow_ends_with_an_error_that_names_it(
    demo, masks, grammar, monkeypatch
):
    llama = Llama(demo.model, demo.tokenizer)
    engine = llama.llm_engine
    monkeypatch.setattr(mask_budget, "_REQUEST_S", 1.0)
    engine.port.mask_budget = MaskBudget(masks, masks)
    slow = _constrained(llama, grammar, 4)
    small = engine.prepare("", "One day", FREE)
    outputs = engine.run([slow, small])
    assert outputs[0].error_field == "structured_output"
    assert "100 ms each" in str(outputs[0].error) and "simpler format" in str(outputs[0].error)
    assert outputs[1].error is None and outputs[1].usage.completion_tokens == 6
