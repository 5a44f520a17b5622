"""Slow token masks of one sender delay others by a bounded time in each step, and end in the end.

A clock that the masks themselves move stands for processor time.
"""

from typing import Any

import numpy as np
import pytest

from helpers.sequences import state_of
from llama import Llama, SamplingParams
from llama.engine.sequence import SequenceState
from llama.requests.grammar import Matcher
from llama.requests.mask_budget import MaskBudget
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
    """A budget, the sequences of two senders, and steps that only make masks."""

    def __init__(self, **limits: float) -> None:
        self.clock = Clock()
        self.budget = MaskBudget(**limits, clock=self.clock)
        self.live: list[SequenceState] = []
        self.spent = 0.0

    def add(self, sender: bytes, count: int, mask_s: float | None) -> list[SequenceState]:
        """Add a request of so many answers, which are constrained where their masks take time."""
        answers = []
        for _ in range(count):
            rule = None if mask_s is None else Slow(self.clock, mask_s)
            seq = state_of([1], 999, constraint=rule, sender=sender)
            self.live.append(seq)
            answers.append(_Answer(seq))
        self.budget.watch([_request(answers)])
        return [answer.sequence for answer in answers]

    def step(self) -> set[SequenceState]:
        """Make the masks of a step, and return the sequences that were part of it."""
        resting = self.budget.resting(self.live)
        ran = set(self.live) - set(resting)
        before = self.clock.now
        for seq in self.live:
            if seq in ran:
                seq.num_computed = 1
                if seq.constraint is not None:
                    bits = np.zeros((1, 4), np.int32)
                    seq.constraint.fill_allowed(seq.tokens, 1, [], bits)
        self.spent = self.clock.now - before
        return ran


class _Answer:
    def __init__(self, sequence: SequenceState) -> None:
        self.sequence = sequence


def _request(answers: list[Any]) -> Any:
    class Made:
        pass

    made = Made()
    made.answers = answers  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("mask_s", [0.011, 0.2, 3.0])
def test_slow_masks_take_the_budget_of_a_step_on_average(mask_s):
    """However slow its masks are, a sender gets the budget of each step, and all have turns.

    A sequence that is not constrained is part of each step.
    """
    trial = Trial(step_s=0.05, request_s=1e6)
    slow = trial.add(b"a", 32, mask_s)
    (small,) = trial.add(b"b", 1, None)
    num_steps = 4000
    counts = dict.fromkeys(slow, 0)
    for _ in range(num_steps):
        ran = trial.step()
        assert small in ran
        for seq in ran & counts.keys():
            counts[seq] += 1
    num_masks = sum(counts.values())
    assert num_masks * mask_s == pytest.approx(0.05 * num_steps, rel=0.1, abs=33 * mask_s)
    assert max(counts.values()) - min(counts.values()) <= 2


def test_quick_masks_never_wait():
    trial = Trial(step_s=0.05)
    quick = trial.add(b"a", 32, 0.0002)
    trial.add(b"b", 1, None)
    assert len(trial.step() & set(quick)) == 11, "what nothing is known of counts as slow"
    trial.add(b"a", 8, 1.0)
    assert sum(set(quick) <= trial.step() for _ in range(20)) >= 18


def test_each_sender_has_a_budget_of_its_own():
    """The masks of one sender cost others no turn; new requests of a slow one pay no debts."""
    trial = Trial(step_s=0.05)
    trial.add(b"a", 8, 1.0)
    quick = set(trial.add(b"b", 8, 0.001))
    trial.step()
    for number in range(50):
        if number % 10 == 0:
            trial.live = [seq for seq in trial.live if seq in quick]  # they are aborted
            late = trial.add(b"a", 8, 1.0)
        ran = trial.step()
        assert quick <= ran
        assert ran.isdisjoint(late), "a new request has paid the debts"


def test_who_is_alone_owes_nothing():
    """Without others a sender's masks go on, a few in each step. Only the last step is owed."""
    trial = Trial(step_s=0.05)
    slow = trial.add(b"a", 8, 1.0)
    ran = [len(trial.step()) for _ in range(20)]
    assert min(ran) == 1 and sum(ran[5:]) == 15
    trial.add(b"b", 1, None)
    num_steps = next(n for n in range(99) if not trial.step().isdisjoint(slow))
    assert 18 <= num_steps <= 20


@pytest.mark.parametrize(("mask_s", "num_masks"), [(0.5, 7), (0.02, 151)])
def test_a_request_ends_once_its_slow_masks_have_taken_too_long(mask_s, num_masks):
    trial = Trial(step_s=9.0, request_s=3.0)
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
    trial = Trial(step_s=9.0, request_s=3.0)
    (seq,) = trial.add(b"a", 1, 0.004)
    for _ in range(2000):
        trial.step()
    assert trial.clock.now > 7 and seq.constraint is not None and seq.constraint.failure is None


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
    engine.mask_budget = MaskBudget(step_s=0.25, clock=masks)
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
    assert spent <= 0.25 * num_steps + 2.0, "more masks than the budget has"
    assert not slow.finished
    engine.wait_until(lambda: slow.finished)
    for request, output in ((slow, wanted), (small, wanted_small)):
        found = engine.take_output(request)
        assert [x.token_ids for x in found.outputs] == [x.token_ids for x in output.outputs]
    assert engine.core.scheduler.pool.num_free == engine.core.scheduler.pool.num_pages


@pytest.mark.parametrize("grammar", SLOW.values(), ids=SLOW.keys())
def test_a_format_that_is_too_slow_ends_with_an_error_that_names_it(demo, masks, grammar):
    llama = Llama(demo.model, demo.tokenizer)
    engine = llama.llm_engine
    engine.mask_budget = MaskBudget(step_s=0.25, request_s=1.0, clock=masks)
    slow = _constrained(llama, grammar, 4)
    small = engine.prepare("", "One day", FREE)
    outputs = engine.run([slow, small])
    assert outputs[0].error_field == "structured_output"
    assert "100 ms each" in str(outputs[0].error) and "simpler format" in str(outputs[0].error)
    assert outputs[1].error is None and outputs[1].usage.completion_tokens == 6
