"""Drafting without a model: what is looked up in a text, and how many tokens are drafted.

Steps that verify drafts are in test_graphs.py and test_scheduler.py; models that speculate are in
tests/test_speculation.py.
"""

import itertools
import random

import pytest

from helpers.drafts import Drafts
from helpers.sequences import state_of
from llama.options.speculation.draft_model import ModelDrafter, SequenceDraft
from llama.options.speculation.drafter import Drafter
from llama.options.speculation.lookup import Speculator
from llama.options.speculation.texts import Lookup
from llama.ranks.parallel import Parallel


def longest_match(text: list[int]) -> int:
    """Return the length of the longest suffix, at most 16 tokens, that also occurs earlier."""
    return max((common_suffix(text[:end], text) for end in range(len(text))), default=0)


def common_suffix(left: list[int], right: list[int]) -> int:
    pairs = zip(reversed(left), reversed(right), strict=False)
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], itertools.islice(pairs, 16))
    return sum(1 for _ in equal)


@pytest.mark.parametrize("vocab", [2, 9, 3000])
def test_look_up_finds_where_the_end_of_a_text_occurred(vocab):
    rng = random.Random(vocab)
    lookup, text, num_longest = Lookup(), list[int](), 0
    for _ in range(150):
        new = [rng.randrange(vocab) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3 and len(text) > 9:
            at = rng.randrange(len(text) - 8)
            new = text[at : at + 8]
        text += new
        lookup.extend(new)
        draft = lookup.draft(5)
        length = min(lookup.length, 16) if lookup.source >= 0 else 0
        assert length <= longest_match(text) and bool(length) == (text[-1] in text[:-1])
        num_longest += length == longest_match(text)
        if length:
            source = lookup.source
            assert text[source - length : source] == text[-length:] and len(draft) == 5
            followed = text[source:] + draft
            assert draft == followed[:5]
    assert num_longest > 140 or vocab < 3000  # no token of the largest vocabulary occurs often


def drafted(costs: float, batch: int, repeats: float) -> list[int]:
    """Return how many tokens a Speculator drafts in the first, second and third 100 steps.

    One more row adds the given share to the cost of a step; the given share of the texts repeats
    earlier text, and the rest is new.
    """
    rng, speculator, seconds, counts = (
        random.Random(1),
        Speculator(7, Parallel()),
        0.0,
        list[int](),
    )
    sequences = [state_of([*range(50)] * 2, 10**6) for _ in range(batch)]
    while len(counts) < 300:
        drafts = speculator.draft(sequences, seconds)
        counts.append(sum(map(len, drafts)))
        seconds += 0.01 * (1 + costs * (batch + counts[-1]))
        for seq, draft in zip(sequences, drafts, strict=True):
            for draft_id in [*draft, -1]:
                position = len(seq.tokens)
                seq.tokens.append(position % 50 if rng.random() < repeats else 60 + position)
                if seq.tokens[-1] != draft_id:
                    break
    return [sum(counts[i : i + 100]) for i in (0, 100, 200)]


def test_a_draft_is_as_long_as_it_pays(monkeypatch):
    """A draft is as long as it pays, when drafting itself takes no time.

    Where rows are nearly free, a repetitive text gets the longest drafts and a less repetitive one
    gets some; where a row costs a whole step, no text gets any.
    """
    monkeypatch.setattr("llama.options.speculation.drafter.time.perf_counter", float)
    assert drafted(0.01, 1, repeats=1.0)[2] > 650 and drafted(0.01, 8, repeats=1.0)[2] > 5000
    assert drafted(0.01, 1, repeats=0.6)[2] > 100 and drafted(10.0, 1, repeats=0.6)[2] < 60
    assert max(drafted(1.0, 32, repeats=0.3)) < 50
    drafter = Drafts("", {})
    # the duration of a step is unknown
    assert drafter.choose([[0.9] * 3, [0.001] * 3], 0.0) == [0, 0]
    assert drafter.choose([[0.9] * 3, [0.001] * 3], 0.01) == [3, 0]


class Passes(ModelDrafter):
    """A draft model that is not loaded, whose forward pass takes a given number of seconds."""

    def __init__(self, seconds: float) -> None:
        Drafter.__init__(self, 4, Parallel(), [0.7] * 4)
        self._num_idle, self._reserve = 0, lambda seq, count: count
        self.seconds = seconds

    def _sample_drafts(self, states: list[SequenceDraft], lengths: list[int]) -> None:
        for state, length in zip(states, lengths, strict=True):
            state.ids = [0] * length
        if any(lengths):
            self._last_cost.pass_seconds = self.seconds


def asked_drafts(pass_cost: float, chance: float, batch: int = 1) -> list[int]:
    """Return how many tokens a draft model is asked for in the first and the second 300 steps.

    Its pass costs the given share of a step, and a row a hundredth; the given share of drafts is
    right.
    """
    rng, drafter, seconds, counts = random.Random(1), Passes(0.01 * pass_cost), 0.0, list[int]()
    sequences = [state_of([0] * 9, 10**6) for _ in range(batch)]
    states = [drafter._begin(seq) for seq in sequences]
    while len(counts) < 600:
        drafts = drafter._draft(states, seconds)
        counts.append(sum(map(len, drafts)))
        seconds += 0.01 * (1 + 0.01 * counts[-1])
        for seq, draft in zip(sequences, drafts, strict=True):
            right = next((i for i in range(len(draft)) if rng.random() > chance), len(draft))
            seq.tokens += [0] * right + [1]
    return [sum(counts[:300]), sum(counts[300:])]


def test_a_draft_model_is_asked_for_as_much_as_pays():
    """A draft model is used as far as it pays.

    A cheap and mostly right one drafts for nearly all steps; an expensive or mostly wrong one for
    nearly none, but it is tried again.
    """
    assert asked_drafts(0.1, 0.95)[1] > 1100 and asked_drafts(0.1, 0.95, batch=8)[1] > 8 * 1000
    assert 250 < asked_drafts(0.2, 0.6)[1] < 900
    for pass_cost, chance in [(1.2, 0.95), (0.3, 0.1)]:
        assert 0 < asked_drafts(pass_cost, chance)[1] < 40


def test_what_has_ended_is_forgotten():
    """Finished sequences are forgotten, although outputs keep them for as long as their reader
    likes.
    """
    speculator, ended = Speculator(7, Parallel()), []
    for i in range(100):
        seq = state_of([i] * 9, 50)
        speculator.draft([seq], 0.01 * i)
        seq.finish_reason = "stop"
        ended.append(seq)
    assert len(speculator._states) < 20


def test_texts_of_others_are_those_of_the_same_root():
    """Finished sequences are searched only for sequences with the same prefix root.

    Roots may be as many as clients like: what is stored of them is bounded, and those that were
    used last are kept.
    """
    text = list(range(40))
    speculator = Speculator(7, Parallel(), is_shared=True)
    speculator.choose = lambda rates, *_: [len(x) for x in rates]  # type: ignore[method-assign]

    def drafted(root: bytes, count: int = 9) -> list[list[int]]:
        seq = state_of(text[:count], 50, prefix_root=root)
        drafts = speculator.draft([seq], 0.0)
        seq.finish_reason = "stop"
        return drafts

    first = state_of(text, 50, prefix_root=b"a")
    speculator.draft([first], 0.0)
    first.finish_reason = "stop"
    assert drafted(b"b") == drafted(b"") == [[]]
    assert drafted(b"a") == [text[9:16]]
    for i in range(1000):
        assert drafted(b"%d" % i) == [[]]
        drafted(b"a", len(text))
    assert drafted(b"a") == [text[9:16]]
    ended = speculator._ended_texts
    assert ended is not None and len(ended._by_root) <= 256
    for i in range(9):
        long = state_of([i] * 60_000, 60_002, prefix_root=b"long %d" % i)
        speculator.draft([long], 0.0)
        long.finish_reason = "stop"
    speculator.draft([state_of(text[:9], 50)], 0.0)
    kept = {root: len(texts[0].ids) for root, texts in ended._by_root.items()}
    assert sum(kept.values()) < 300_000 and kept[b"long 8"] == 60_001 and b"a" not in kept
