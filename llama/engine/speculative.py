"""Drafts: guesses of the next tokens of sequences, which one step verifies all at once.

In: sequences, and how long steps took. Out: a few ids for each, or none. A token is a function of
seed, position and logits, so a draft changes how many tokens a step gives, and no token: whatever
drafts, and however many (Daliri, Musco and Suresh, 2024, drafter-invariant speculative decoding).

Where the end of a text occurred before, what followed there is the guess (Saxena, 2023, prompt
look-up decoding). How likely each guess is, and what its row costs, is measured all the time, and a
row is added where it gives more tokens for its time than the step does without it.
"""

import json
import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from llama.checks import brief
from llama.engine.sequence import Sequence
from llama.ranks.collectives import ModelParallel

_PLACES = 16  # where a token occurred, the latest ones, that are compared
_LONGEST = 16  # tokens of them that are compared
_PREDICTED = 8  # a prediction begins as what follows a match of so many
_FORCED = 6  # of a constraint; 1 to 5 are matches of 1, 2, 4, 8 and 16 tokens
_FIRST_RATES = (0.0, 0.2, 0.35, 0.5, 0.7, 0.8, 0.9)  # of each kind, before any was seen


def check_speculate(speculate: str | None) -> None:
    """TypeError for what can name no drafter."""
    if speculate is not None and not (isinstance(speculate, str) and speculate):
        raise TypeError(f"speculate={brief(speculate)}: give 'lookup', a draft model, or None")


class Drafter(Protocol):
    """Guesses what comes next."""

    def draft(self, sequences: list[Sequence], seconds: float) -> list[list[int]]:
        """For each sequence, ids that may come next, or none.

        seconds: what all steps of single tokens, with and without drafts, have taken so far.
        """


class RankZeroDrafter:
    """Rank 0 drafts, by its clock, and tells the other ranks."""

    def __init__(self, drafter: Drafter, parallel: ModelParallel) -> None:
        self._drafter, self._parallel = drafter, parallel

    def draft(self, sequences: list[Sequence], seconds: float) -> list[list[int]]:
        drafts = self._drafter.draft(sequences, seconds) if self._parallel.rank == 0 else []
        return told_by_rank_zero(self._parallel, drafts)


def told_by_rank_zero(parallel: ModelParallel, what: list) -> list:
    """Rank 0's list of whole numbers, or of lists of them, on every rank."""
    return json.loads(parallel.broadcast_bytes(json.dumps(what).encode()))


class Lookup:
    """A text of ids that grows, and where its end occurred in it before.

    Each place has a link to the one before it with the same token. As long as the guess of the
    place that was found comes true, the next guess is what follows there.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.length = 0  # tokens before the source that are those at the end of the text
        self.source = -1  # the place of the token that is expected next; -1: there is none
        self._last: dict[int, int] = {}
        self._before: list[int] = []

    def extend(self, tokens: Seq[int]) -> None:
        """Append tokens, and find where their end occurred."""
        text, last, before = self.ids, self._last, self._before
        for token in tokens:
            if self.source >= 0 and text[self.source] == token:
                self.source, self.length = self.source + 1, self.length + 1
            else:
                self.source = -1
            before.append(last.get(token, -1))
            last[token] = len(text)
            text.append(token)
        if self.source < 0:
            self._find()

    def _find(self) -> None:
        """The longest match among the latest places of the last token."""
        text, end = self.ids, len(self.ids) - 1
        place, self.length = self._before[end], 0
        for _ in range(_PLACES):
            if place < 0 or self.length == _LONGEST:
                return
            length, most = 1, min(_LONGEST, place + 1)
            while length < most and text[place - length] == text[end - length]:
                length += 1
            if length > self.length:
                self.source, self.length = place + 1, length
            place = self._before[place]

    def expect(self, place: int) -> None:
        """The text goes on with the token of that place, as far as one can tell."""
        self.source, self.length = place, _PREDICTED

    def guess(self, most: int) -> list[int]:
        """What followed; where that reaches the end of the text, it repeats itself."""
        if self.source < 0:
            return []
        return (self.ids[self.source : self.source + most] * most)[:most]


def count_predicted(prediction: Seq[int], output: list[int]) -> int:
    """How many tokens of a prediction an output had where look-up expected them."""
    lookup, came = Lookup(), set[int]()
    lookup.extend(prediction)
    lookup.expect(0)
    for token in output:
        place = lookup.source
        if 0 <= place < len(prediction) and lookup.ids[place] == token:
            came.add(place)
        lookup.extend([token])
    return len(came)


@dataclass
class StepCost:
    """Of steps of about so many sequences: seconds without drafts, and what each draft adds."""

    plain: float = 0.0
    rate: float = 0.0  # tokens a second that the last step was to give
    products: float = 0.0  # sums of drafts x seconds that they added, and of drafts squared, in
    squares: float = 0.0  # which a step counts less with each one that comes after it

    def note(self, seconds: float, num_drafts: int) -> None:
        seconds = min(seconds, 3 * self.plain or seconds)  # another process may have taken the rest
        if not num_drafts:
            self.plain += (seconds - self.plain) * (0.1 if self.plain else 1)
            self.products, self.squares = 0.99 * self.products, 0.99 * self.squares
        else:
            self.plain = min(self.plain, seconds)
            self.products = 0.98 * self.products + num_drafts * (seconds - self.plain)
            self.squares = 0.98 * self.squares + num_drafts**2

    def of_draft(self, num_sequences: int) -> float:
        """Until it is known, or where that was long ago: 64 rows take twice the time of one."""
        weight = 16 * num_sequences
        return (self.products + weight * self.plain / 64) / (self.squares + weight)


class Counts:
    """Of each kind of guess, how many were tried of late, and how many of them were right."""

    def __init__(self, tried: float, right: Iterable[float], most: int) -> None:
        self.right, self.most = list(right), most
        self.tried = [tried] * len(self.right)

    def note(self, kind: int, is_right: bool) -> None:
        self.right[kind] += is_right
        self.tried[kind] += 1
        if self.tried[kind] > self.most:
            self.tried[kind] /= 2
            self.right[kind] /= 2


@dataclass
class _State:
    """What is known of one sequence. guess: of the step before, and the length of its match.

    num_idle: steps since it was worth a draft. The longer, the more of them are left out.
    """

    lookup: Lookup
    num_seen: int
    counts: Counts = field(default_factory=lambda: Counts(0, [0] * len(_FIRST_RATES), 64))
    guess: list[int] = field(default_factory=list)
    length: int = 0
    num_idle: int = 0
    num_left_out: int = 0

    def kind(self, depth: int) -> int:
        """Of the guess at that depth: each that is right makes the match longer."""
        return _FORCED if self.length < 0 else min(self.length + depth, _LONGEST).bit_length()


class Speculator:
    """Drafts of at most `most` ids, from what a sequence has and what its constraint forces."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._states: dict[Sequence, _State] = {}
        self._counts = Counts(8, [8 * rate for rate in _FIRST_RATES], 4096)
        self._costs: dict[int, StepCost] = {}  # by the binary digits of the number of sequences
        self._last = (StepCost(), 0)  # that of the step before, and its drafts
        self._seconds = 0.0

    def draft(self, sequences: list[Sequence], seconds: float) -> list[list[int]]:
        """See `Drafter`. A draft is worth its row where it is likelier to be right than the tokens
        that the step would give in the time of that row (Dinkelbach, 1967)."""
        cost, num_drafts = self._last
        if seconds > self._seconds:
            cost.note(seconds - self._seconds, num_drafts)
        cost = self._costs.setdefault(len(sequences).bit_length(), StepCost())
        of_draft, tokens = cost.of_draft(len(sequences)), float(len(sequences))
        bar = math.inf
        if cost.plain:
            bar = of_draft * (cost.rate or tokens / cost.plain)
        if len(self._states) > 2 * len(sequences) + 8:
            self._states = {seq: x for seq, x in self._states.items() if not seq.finished}
        drafts = []
        for seq in sequences:
            draft, worth = self._draft(seq, bar)
            drafts.append(draft)
            tokens += worth
        num_drafts = sum(map(len, drafts))
        if cost.plain:
            cost.rate = tokens / (cost.plain + num_drafts * of_draft)
        self._last, self._seconds = (cost, num_drafts), seconds
        return drafts

    def _draft(self, seq: Sequence, bar: float) -> tuple[list[int], float]:
        """A draft, and how many of its tokens will be right, as far as one can tell."""
        state = self._states.get(seq)
        if state is None:
            state = self._states[seq] = _State(Lookup(), seq.num_prompt)
            state.lookup.extend(seq.tokens[: seq.num_prompt])
            if seq.prediction:
                state.lookup.extend(seq.prediction)
                state.lookup.expect(seq.num_prompt)
        if state.num_left_out < min(state.num_idle // 8, 8) and seq.constraint is None:
            state.num_left_out += 1
            return [], 0.0
        state.num_left_out = 0
        self._take(state, seq.tokens[state.num_seen :])
        most = min(self._most, seq.max_len - len(seq.tokens) - 1)
        state.guess, state.length = state.lookup.guess(most), state.lookup.length
        if seq.constraint is not None:
            guess, is_forced = seq.constraint.draft(seq.output, state.guess)
            state.guess = guess[:most]
            state.length = -1 if is_forced else state.length
        every, own, depth, chance, worth = self._counts, state.counts, 0, 1.0, 0.0
        for depth in range(len(state.guess)):
            kind = state.kind(depth)
            rate = every.right[kind] / every.tried[kind]
            chance *= (own.right[kind] + 4 * rate) / (own.tried[kind] + 4)
            if chance <= bar:
                break
            worth += chance
        else:
            depth = len(state.guess)
        state.num_idle = 0 if depth else state.num_idle + 1
        return state.guess[:depth], worth

    def _take(self, state: _State, new: list[int]) -> None:
        """The new tokens of a sequence: they also say which guesses were right, whether or not a
        step verified them."""
        for depth, (guess, token) in enumerate(zip(state.guess, new, strict=False)):
            kind = state.kind(depth)
            self._counts.note(kind, guess == token)
            state.counts.note(kind, guess == token)
            if guess != token:
                break
        state.lookup.extend(new)
        state.num_seen += len(new)
