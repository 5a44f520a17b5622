"""Drafts: proposed next tokens of sequences, which one step of the model verifies together.

In: sequences, and the time that steps took. Out: a few token ids for each sequence, or none.

Speculative decoding is lossless here, for greedy decoding and for sampling. A token is a function
of seed, position and logits, so drafts change how many tokens a step yields, but no token (Daliri,
Musco and Suresh, 2024, drafter-invariant speculative decoding). A drafter need not know the model
that verifies its drafts.
"""

import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter, mul
from typing import Any, TypeVar

from llama.engine.hooks import StepHook
from llama.engine.sequence import SequenceState
from llama.ranks.parallel import Parallel

_List = TypeVar("_List", bound=list[Any])


@dataclass
class StepCost:
    """The measured cost of steps with about the same number of sequences.

    Attributes:
        plain_seconds: The duration of a step without drafts.
        pass_seconds: The duration of one pass of the draft model; 0 until it is measured, and if
            there is no draft model.
        products: The decaying sum of drafts x seconds that the drafts of a step added.
        squares: The decaying sum of the squared number of drafts of a step.
    """

    plain_seconds: float = 0.0
    pass_seconds: float = 0.0
    products: float = 0.0
    squares: float = 0.0

    def note(self, seconds: float, num_drafts: int) -> None:
        """Update the cost by a step of this duration that verified this many drafts."""
        # A far longer step was interrupted, for example by another process.
        seconds = min(seconds, 3 * self.plain_seconds or seconds)
        if num_drafts:
            self.plain_seconds = min(self.plain_seconds, seconds)
        else:
            weight = 0.1 if self.plain_seconds else 1
            self.plain_seconds += (seconds - self.plain_seconds) * weight
        self.products = 0.98 * self.products + num_drafts * (seconds - self.plain_seconds)
        self.squares = 0.98 * self.squares + num_drafts**2

    def draft_seconds(self, num_sequences: int) -> float:
        """Return the seconds that one draft adds to a step.

        This is a least-squares fit. It is pulled towards the prior that 64 rows double the duration
        of a step, which dominates while there are few or only old measurements.
        """
        weight = 16 * num_sequences
        prior = weight * self.plain_seconds / 64
        return (self.products + prior) / (self.squares + weight)


@dataclass
class DraftState:
    """The latest draft of one sequence, and how often its drafts were right.

    Attributes:
        rates: The recent share of right tokens, for each kind of draft token.
        num_known: The number of tokens of the sequence that the draft follows.
        ids: The draft.
        kinds: The kind of each token of the draft, an index of `rates`.
    """

    seq: SequenceState
    rates: list[float]
    num_known: int = 0
    ids: list[int] = field(default_factory=list)
    kinds: Sequence[int] = ()


@dataclass
class _Plan:
    """The number of drafts of each sequence in a step, and what the step then yields and costs.

    Attributes:
        tokens: The expected number of tokens of the step.
        seconds: The expected duration of the step and the passes of the draft model.
    """

    lengths: list[int]
    tokens: float
    seconds: float


class Drafter(StepHook, ABC):
    """A source of drafts of at most `max_drafts` tokens per sequence and step.

    It is a hook of the core that it drafts for, so that it can see hidden states, for one
    (Li et al., 2024, EAGLE).

    It measures how often drafts are right and what a row of a step costs, and proposes the drafts
    whose expected gain is above their cost. With several ranks, rank 0 decides by its clock, and
    the other ranks receive its decisions.

    Attributes:
        rates: The share of right tokens over all sequences, for each kind of draft token. It begins
            with typical values, and new sequences begin with it.
    """

    def __init__(self, max_drafts: int, parallel: Parallel, rates: Sequence[float]) -> None:
        self.max_drafts = max_drafts
        self.parallel = parallel
        self.rates = [*rates]
        self._states: dict[SequenceState, Any] = {}  # a `DraftState` per sequence
        # Keyed by the bit length of the number of sequences.
        self._costs = defaultdict[int, StepCost](StepCost)
        # The cost that the latest call of `choose` used, the number of drafts it chose, and the
        # duration of all steps until then.
        self._last_cost = StepCost()
        self._last_num_drafts = 0
        self._last_seconds = 0.0
        self._drafting_seconds = 0.0

    def draft(self, sequences: list[SequenceState], seconds: float) -> list[list[int]]:
        """Return token ids that may come next, or none, for each sequence.

        Args:
            sequences: The sequences of a decode step.
            seconds: The duration so far of all decode steps, with and without drafts, including the
                time spent on drafting.
        """
        start = time.perf_counter()
        states = [self._states.get(seq) or self._begin(seq) for seq in sequences]
        drafts = self._draft(states, seconds - self._drafting_seconds)
        self._drafting_seconds += time.perf_counter() - start
        return drafts

    def close(self) -> None:
        """Forget all sequences."""
        self._states.clear()

    @abstractmethod
    def _begin(self, seq: SequenceState) -> Any:
        """Return the state of a new sequence, store it, and drop those of finished sequences."""

    @abstractmethod
    def _draft(self, states: list[Any], seconds: float) -> list[list[int]]:
        """Return a draft per state; `seconds` is that of `draft` without the time for drafting."""

    def from_rank_zero(self, values: _List) -> _List:
        """Return rank 0's list, of integers or of lists of integers, on every rank."""
        if self.parallel.is_alone:
            return values
        message = json.dumps(values).encode()
        received: _List = json.loads(self.parallel.broadcast_bytes(message))
        return received

    def note(self, state: DraftState) -> int:
        """Update the rates by the tokens that followed a draft, whether or not a step verified it.

        Returns:
            The number of draft tokens that were right.
        """
        new_tokens = state.seq.tokens[state.num_known :]
        num_right = 0
        for draft_id, kind, token in zip(state.ids, state.kinds, new_tokens, strict=False):
            is_right = draft_id == token
            self.rates[kind] += (is_right - self.rates[kind]) / 256
            state.rates[kind] += (is_right - state.rates[kind]) / 16
            if not is_right:
                break
            num_right += 1
        state.num_known += len(new_tokens)
        return num_right

    def choose(self, rates: list[list[float]], seconds: float, min_drafts: int = 0) -> list[int]:
        """Return how many drafts each sequence gets, so that the step yields most per second.

        Every number of passes of the draft model is tried with the drafts that are worth their rows
        in it.

        Args:
            rates: For each sequence, the probability that each token of its draft is right if the
                tokens before it are.
            seconds: See `_draft`.
            min_drafts: The number of drafts that each sequence gets at any cost, as far as it has
                them.
        """
        if seconds > self._last_seconds:
            self._last_cost.note(seconds - self._last_seconds, self._last_num_drafts)
        num_sequences = len(rates)
        cost = self._costs[num_sequences.bit_length()]
        draft_seconds = cost.draft_seconds(num_sequences)
        ranked = _ranked(rates)
        max_passes = max(map(len, rates))
        # If passes cost nothing, as without a draft model, more of them are never worse.
        min_passes = min_drafts if cost.pass_seconds else max_passes
        best = _Plan([0] * num_sequences, tokens=0.0, seconds=1.0)
        for num_passes in range(min_passes, max_passes + 1):
            step_seconds = cost.plain_seconds + num_passes * cost.pass_seconds
            plan = _Plan([0] * num_sequences, float(num_sequences), step_seconds)
            _add_drafts(plan, ranked, draft_seconds, min_drafts, num_passes)
            if plan.tokens * best.seconds > best.tokens * plan.seconds:
                best = plan
        self._last_cost = cost
        self._last_num_drafts = sum(best.lengths)
        self._last_seconds = seconds
        return best.lengths


def _ranked(rates: list[list[float]]) -> list[tuple[float, int, int]]:
    """Return (probability, depth, sequence) of all draft tokens, the most probable first.

    A draft token counts only if all tokens before it are right, so that its probability is the
    product of the rates up to its depth.
    """
    ranked = [
        (probability, depth, index)
        for index, sequence_rates in enumerate(rates)
        for depth, probability in enumerate(accumulate(sequence_rates, mul))
    ]
    ranked.sort(key=itemgetter(0), reverse=True)
    return ranked


def _add_drafts(
    plan: _Plan,
    ranked: list[tuple[float, int, int]],
    draft_seconds: float,
    min_drafts: int,
    max_drafts: int,
) -> None:
    """Add to a plan the draft tokens that raise its expected tokens per second.

    A draft token raises the rate of the step if its own rate, `probability / draft_seconds`, is
    higher. The most probable come first, so that the tokens before one in its draft are added
    earlier.
    """
    tokens = plan.tokens
    seconds = plan.seconds
    lengths = plan.lengths
    for probability, depth, index in ranked:
        is_worth_it = depth < max_drafts and probability * seconds > tokens * draft_seconds
        if depth < min_drafts or is_worth_it:
            tokens += probability
            seconds += draft_seconds
            lengths[index] += 1
    plan.tokens = tokens
    plan.seconds = seconds
