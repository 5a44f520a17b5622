"""Drafts: guesses of the next tokens of sequences, which one step verifies all at once.

In: sequences, and how long steps took. Out: a few ids for each, or none. A token is a function of
seed, position and logits, so a draft changes how many tokens a step gives, and no token: whatever
drafts, and however many (Daliri, Musco and Suresh, 2024, drafter-invariant speculative decoding).
"""

import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter, mul
from typing import Any

from llama.engine.sequence import SequenceState
from llama.ranks.collectives import ModelParallel


@dataclass
class StepCost:
    """Of steps of about so many sequences: seconds without drafts, of a pass that guesses, and what
    each draft adds."""

    plain: float = 0.0
    a_pass: float = 0.0
    products: float = 0.0  # sums of drafts x seconds that they added, and of drafts squared, in
    squares: float = 0.0  # which a step counts less with each one that comes after it

    def note(self, seconds: float, num_drafts: int) -> None:
        seconds = min(seconds, 3 * self.plain or seconds)  # another process may have taken the rest
        if num_drafts:
            self.plain = min(self.plain, seconds)
        else:
            self.plain += (seconds - self.plain) * (0.1 if self.plain else 1)
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

    seq: SequenceState
    rates: list[float]
    num_known: int = 0
    ids: list[int] = field(default_factory=list)
    kinds: Sequence[int] = ()


class Drafter(ABC):
    """Guesses what comes next: of a sequence at most `most` tokens. How likely each guess is, and
    what its row costs, is measured all the time; those are made that are worth their rows.

    rates: of each kind of guess, how many are right, of all sequences; at first, as usual. With
    several ranks, rank 0 chooses, by its clock, and tells the others.
    """

    def __init__(self, most: int, parallel: ModelParallel, rates: Sequence[float]) -> None:
        self.most, self.parallel, self.rates = most, parallel, [*rates]
        self._guesses: dict[SequenceState, Any] = {}  # a `Guess` of each
        self._costs = defaultdict[int, StepCost](StepCost)  # by the digits of a number of sequences
        self._last = (StepCost(), 0)  # that of what `choose` saw last, and its drafts
        self._seconds = self._spent = 0.0  # of steps without drafting, when `choose` saw them last;
        # and of drafting

    def draft(self, sequences: list[SequenceState], seconds: float) -> list[list[int]]:
        """For each sequence, ids that may come next, or none.

        seconds: what all steps of single tokens, with and without drafts, have taken so far.
        """
        began = time.perf_counter()
        guesses = [self._guesses.get(seq) or self._begin(seq) for seq in sequences]
        drafts = self._draft(guesses, seconds - self._spent)
        self._spent += time.perf_counter() - began
        return drafts

    @abstractmethod
    def _begin(self, seq: SequenceState) -> Any:
        """Put a new sequence among the guesses, and forget those that have ended."""

    @abstractmethod
    def _draft(self, guesses: list[Any], seconds: float) -> list[list[int]]:
        """As `draft`; seconds: without those of drafting."""

    def told_by_rank_zero(self, what: list) -> list:
        """Rank 0's list of whole numbers, or of lists of them, on every rank."""
        if self.parallel.is_alone:
            return what
        return json.loads(self.parallel.broadcast_bytes(json.dumps(what).encode()))

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

    def choose(self, rates: list[list[float]], seconds: float, least: int = 0) -> list[int]:
        """How many for each sequence, the likeliest first, as long as one gives more tokens for its
        time than the step does without it; and as many passes as give the most.

        rates: for each, of its next guesses, how likely one is where those before it are right.
        seconds: see `_draft`. least: so many are tried, whatever they cost.
        """
        cost, num_drafts = self._last
        if seconds > self._seconds:
            cost.note(seconds - self._seconds, num_drafts)
        num = len(rates)
        cost = self._costs[num.bit_length()]
        a_row, best, lengths = cost.of_draft(num), (0.0, 1.0), [0] * num
        chances = (enumerate(accumulate(each, mul)) for each in rates)
        ranked = [(chance, depth, i) for i, each in enumerate(chances) for depth, chance in each]
        ranked.sort(key=itemgetter(0), reverse=True)
        deepest = max(map(len, rates))
        for passes in range(least if cost.a_pass else deepest, deepest + 1):
            tokens, spent, counts = float(num), cost.plain + passes * cost.a_pass, [0] * num
            for chance, depth, i in ranked:
                if depth < least or (depth < passes and chance * spent > tokens * a_row):
                    tokens, spent, counts[i] = tokens + chance, spent + a_row, counts[i] + 1
            if tokens * best[1] > best[0] * spent:
                best, lengths = (tokens, spent), counts
        self._last, self._seconds = (cost, sum(lengths)), seconds
        return lengths
