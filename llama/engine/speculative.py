"""Drafts: guesses of the next tokens of sequences, which one step verifies all at once.

In: sequences, and how long steps took. Out: a few ids for each, or none. A token is a function of
seed, position and logits, so a draft changes how many tokens a step gives, and no token: whatever
drafts, and however many (Daliri, Musco and Suresh, 2024, drafter-invariant speculative decoding).

What all drafters share is here: how likely each guess is, and what its row costs, is measured all
the time, and a row is added where it gives more tokens for its time than the step without it.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from llama.engine.sequence import Sequence
from llama.ranks.collectives import ModelParallel


class Drafter(Protocol):
    """Guesses what comes next."""

    def draft(self, sequences: list[Sequence], seconds: float) -> list[list[int]]:
        """For each sequence, ids that may come next, or none.

        seconds: what all steps of single tokens, with and without drafts, have taken so far.
        """


def told_by_rank_zero(parallel: ModelParallel, what: list) -> list:
    """Rank 0's list of whole numbers, or of lists of them, on every rank."""
    if parallel.size == 1:
        return what
    return json.loads(parallel.broadcast_bytes(json.dumps(what).encode()))


@dataclass
class StepCost:
    """Of steps of about so many sequences: seconds without drafts, of a pass that guesses, and what
    each draft adds."""

    plain: float = 0.0
    a_pass: float = 0.0
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


@dataclass
class Guess:
    """What was guessed of a sequence behind its first `num_known` tokens: ids, and the kind of
    each. rates: of each kind, how many are right of late."""

    seq: Sequence
    rates: list[float]
    num_known: int = 0
    ids: list[int] = field(default_factory=list)
    kinds: Seq[int] = ()


class Lengths:
    """How many guesses are worth their rows, from measured times and from what was right.

    rates: of each kind of guess, how many are right, of all sequences; at first, as usual.
    """

    def __init__(self, rates: Seq[float]) -> None:
        self.rates = [*rates]
        self._costs = defaultdict[int, StepCost](StepCost)  # by the digits of a number of sequences
        self._last = (StepCost(), 0)  # that of the step before, and its drafts
        self._seconds = 0.0

    def note(self, guess: Guess) -> int:
        """The tokens that came behind a guess, whether or not a step verified it, say how many of
        it were right."""
        came, num_right = guess.seq.tokens[guess.num_known :], 0
        for id, kind, token in zip(guess.ids, guess.kinds, came, strict=False):
            for rates, weight in (self.rates, 1 / 256), (guess.rates, 1 / 16):
                rates[kind] += ((id == token) - rates[kind]) * weight
            if id != token:
                break
            num_right += 1
        guess.num_known += len(came)
        return num_right

    def choose(self, rates: list[list[float]], seconds: float) -> list[int]:
        """How many for each sequence.

        rates: for each, of its next guesses, how likely one is where those before it are right.
        seconds: see `Drafter`, but without the passes that guess, one for all of the same depth.

        A guess is worth its row, and a depth its pass, where they give more tokens for the time
        than the step does without them (Dinkelbach, 1967).
        """
        cost, num_drafts = self._last
        if seconds > self._seconds:
            cost.note(seconds - self._seconds, num_drafts)
        num = len(rates)
        cost = self._costs[num.bit_length()]
        a_row, rate = cost.of_draft(num), cost.rate or num / (cost.plain or math.inf)
        lengths, chances, tokens, spent = [0] * num, [1.0] * num, float(num), cost.plain
        worthy = list(range(num)) if cost.plain else []
        while worthy := [i for i in worthy if len(rates[i]) > lengths[i]]:
            for i in worthy:
                chances[i] *= rates[i][lengths[i]]
            worthy = [i for i in worthy if chances[i] > rate * a_row]
            if sum(chances[i] - rate * a_row for i in worthy) <= rate * cost.a_pass:
                break
            for i in worthy:
                lengths[i], tokens = lengths[i] + 1, tokens + chances[i]
            spent += cost.a_pass + len(worthy) * a_row
        if cost.plain:
            cost.rate = tokens / spent
        self._last, self._seconds = (cost, sum(lengths)), seconds
        return lengths
