"""Kinds of rows: what a step computes its tokens for, and which sequence gets the results.

A row is one token that a step computes. Every row fills the KV cache; a row of a kind has a result
as well:

- SAMPLE: the last known token of a sequence. The result is its next token.
- VERIFY: the last known token and the drafts after it. The results are the tokens that follow each
  of them; they count as far as the drafts were right.
- SCORE: a token of a prompt. The result is the log-probability of the known token after it.
- POOL: a token whose hidden state is a part of the vector of its prompt.
- HIDDEN: a token whose hidden states are wanted themselves, after some layers.

For example, a prompt of 5 tokens whose log-probabilities are wanted has SCORE rows 0 to 3 and the
SAMPLE row 4. A sequence with two drafts after its last token has three VERIFY rows.

A kind is one object with three methods. The scheduler asks `offsets` which rows of a step have the
kind, the runner gets their results from `compute`, and the scheduler gives each sequence its own
through `take`. A new kind is a class in this file and an entry of `PROMPT_KINDS`. Rows are kept
per kind and not per sequence: a list for each sequence nearly doubled the host's time for 256 of
them.

This file knows neither the model nor torch. `compute` gets tensors that it passes on to a
`RowComputer`, or whose methods it calls; `take` gets results on the host. `step.py` has the step,
which asks the kinds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from llama.engine.sequence import SequenceState, TopLogprobs

_Results = TypeVar("_Results")
Reader = Callable[[], _Results]  # waits until results are on the host, and returns them
HiddenStates = Any  # (R, E): a tensor, or what a recorded step gives in its place
CapturedStates = dict[int, Any]  # the number of a state, and its rows on the host: (R, E)


@dataclass(slots=True)
class Scheduled:
    """The tokens of one sequence that a step computes.

    They are `count` tokens from position `start` on, the first ones that are not computed yet.

    Attributes:
        drafts: Tokens after the known ones, which the step verifies. Afterwards those that were
            right.
    """

    sequence: SequenceState
    start: int
    count: int
    drafts: Sequence[int] = ()


@dataclass(slots=True)
class Rows:
    """The rows of one kind in a step.

    Attributes:
        items: The items of the step that have such rows, in the order of the step.
        offsets: The rows of each of these items, counted from its first token of the step.
    """

    items: list[Scheduled]
    offsets: list[range]

    @property
    def num_rows(self) -> int:
        """The number of rows of all items."""
        return sum(map(len, self.offsets))

    def pairs(self) -> Iterator[tuple[Scheduled, range]]:
        """Return each item with its offsets."""
        return zip(self.items, self.offsets, strict=True)


@dataclass(slots=True)
class Tokens:
    """Tokens, one per row, with log-probabilities where a sequence of the step asks for them.

    Attributes:
        ids: The tokens; -1 where no token could be chosen.
        logprobs: The log-probability of each token, or an empty list.
        tops: The most probable tokens of each row, the most probable first, or an empty list.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)


class RowComputer(Protocol):
    """The operations that a running step offers to the kinds of its rows."""

    def sample(self, hidden: HiddenStates) -> Reader[Tokens]:
        """Sample a token after each row of `Step.sampled`, from their hidden states."""

    def score(self, hidden: HiddenStates, ids: list[int], num_top: int) -> Reader[Tokens]:
        """Score known tokens, one per row, and the `num_top` most probable of each row."""

    def add_up(self, hidden: HiddenStates, counts: list[int]) -> Reader["np.ndarray"]:
        """Add up groups of so many neighbouring rows each: (R, E) -> (groups, E) float64."""

    def captured(self, rows: "Rows") -> Reader[CapturedStates]:
        """Copy the states that the rows of HIDDEN want to the host."""


class RowKind(ABC, Generic[_Results]):
    """One kind of result that a row can have.

    Attributes:
        is_read_at_once: Whether a step with such rows is read before the next one is scheduled,
            because what that one computes follows from the results.
    """

    is_read_at_once = False

    @abstractmethod
    def offsets(self, seq: SequenceState, start: int, count: int) -> range:
        """Return which of `count` tokens of a sequence from `start` on are rows of this kind.

        They are counted from `start`. `rows` asks only for sequences that want this kind.
        """

    @abstractmethod
    def compute(self, computer: RowComputer, hidden: HiddenStates, rows: Rows) -> Reader[_Results]:
        """Begin to compute the results of all rows of a step, from their hidden states."""

    @abstractmethod
    def take(self, item: Scheduled, results: _Results, part: range) -> None:
        """Give a sequence its results: those of the rows `part` among the rows of `compute`."""

    def rows(self, items: list[Scheduled]) -> Rows:
        """Return the rows of this kind among the items of a step.

        A kind that few sequences want leaves out the others here, before it looks at each one.
        """
        rows = Rows([], [])
        for item in items:
            offsets = self.offsets(item.sequence, item.start, item.count)
            if offsets:
                rows.items.append(item)
                rows.offsets.append(offsets)
        return rows

    def sampled(self, rows: Rows) -> list[Scheduled]:
        """Return an item per row after which a token is sampled, with the sequence as it is there.

        None is, by default.
        """
        return []

    def needs_all_rows(self, seq: SequenceState) -> bool:
        """Return whether a sequence needs rows that the prefix cache would leave out."""
        return False

    def distribute(self, rows: Rows, results: _Results, ended: Container[SequenceState]) -> None:
        """Give each sequence its results; those in `ended` want none any more."""
        first = 0
        for item, offsets in rows.pairs():
            end = first + len(offsets)
            if item.sequence not in ended:
                self.take(item, results, range(first, end))
            first = end


class _Sample(RowKind[Tokens]):
    """The next token of a sequence, sampled after the last of its known tokens."""

    def offsets(self, seq: SequenceState, start: int, count: int) -> range:
        is_last = start + count == seq.num_known < seq.spec.max_len
        return range(count - 1, count) if is_last else range(0)

    def rows(self, items: list[Scheduled]) -> Rows:
        # The same as `offsets` of each item, in a third of the time: nearly all rows are of
        # this kind, and nearly all of them are single tokens.
        rows = Rows([], [])
        for item in items:
            seq = item.sequence
            end = item.start + item.count
            if end == seq.num_known < seq.spec.max_len:
                last = item.count - 1
                offsets = range(last, item.count) if last else _FIRST_ROW
                rows.items.append(item)
                rows.offsets.append(offsets)
        return rows

    def compute(self, computer: RowComputer, hidden: HiddenStates, rows: Rows) -> Reader[Tokens]:
        return computer.sample(hidden)

    def take(self, item: Scheduled, results: Tokens, part: range) -> None:
        if item.sequence.num_pending:  # a pipeline waits for results, and has none pending
            item.sequence.num_pending -= 1
        _take_token(item.sequence, results, part.start)

    def sampled(self, rows: Rows) -> list[Scheduled]:
        return rows.items


class _Verify(RowKind[Tokens]):
    """The tokens after the last known token of a sequence and after each of its drafts.

    While a step of such rows is in flight, none of its sequences is scheduled, so that its tokens
    are never pending. Without a pipeline, nothing is scheduled then.
    """

    is_read_at_once = True

    def offsets(self, seq: SequenceState, start: int, count: int) -> range:
        return range(count)

    def compute(self, computer: RowComputer, hidden: HiddenStates, rows: Rows) -> Reader[Tokens]:
        return computer.sample(hidden)

    def take(self, item: Scheduled, results: Tokens, part: range) -> None:
        """Take the first token, and the one after each draft that was sampled itself.

        The tokens that the step computed after the last of these drafts are computed again.
        """
        seq = item.sequence
        drafts = item.drafts
        num_right = 0
        for row, draft in zip(part, drafts, strict=False):
            if results.ids[row] != draft:
                break
            num_right += 1
        seq.num_drafted += len(drafts)
        seq.num_accepted += num_right
        if seq.num_computed:  # else it was preempted, and all is computed again
            seq.num_computed -= len(drafts) - num_right
        item.drafts = drafts[:num_right]
        for row in part[: num_right + 1]:
            _take_token(seq, results, row)

    def sampled(self, rows: Rows) -> list[Scheduled]:
        found = []
        for item in rows.items:
            found.append(Scheduled(item.sequence, item.start, 1))
            for depth in range(1, len(item.drafts) + 1):
                seq = item.sequence.ahead(item.drafts[:depth])
                found.append(Scheduled(seq, item.start + depth, 1))
        return found


class _Score(RowKind[Tokens]):
    """The log-probability of each token of a prompt but the first.

    The next step is scheduled once they are read: which rows are left follows from how many
    log-probabilities the sequence has.
    """

    is_read_at_once = True

    def offsets(self, seq: SequenceState, start: int, count: int) -> range:
        next_position = len(seq.prompt_logprobs) - 1
        end_position = seq.num_prompt - 1
        first = max(next_position - start, 0)
        end = min(count, end_position - start)
        return range(first, end)

    def rows(self, items: list[Scheduled]) -> Rows:
        asking = [item for item in items if item.sequence.spec.prompt_logprobs is not None]
        return super().rows(asking)

    def compute(self, computer: RowComputer, hidden: HiddenStates, rows: Rows) -> Reader[Tokens]:
        ids = list[int]()
        num_top = 0
        for item, offsets in rows.pairs():
            seq = item.sequence
            next_position = item.start + 1
            ids += [seq.tokens[next_position + offset] for offset in offsets]
            num_top = max(num_top, seq.spec.prompt_logprobs or 0)
        return computer.score(hidden, ids, num_top)

    def take(self, item: Scheduled, results: Tokens, part: range) -> None:
        seq = item.sequence
        num_top = seq.spec.prompt_logprobs
        for row in part:
            is_image = len(seq.prompt_logprobs) in seq.spec.image_positions
            tops = [] if is_image else results.tops[row]
            seq.prompt_logprobs.append(0.0 if is_image else results.logprobs[row])
            seq.prompt_top_logprobs.append(tops[:num_top])

    def needs_all_rows(self, seq: SequenceState) -> bool:
        return seq.spec.prompt_logprobs is not None


class _Pool(RowKind["np.ndarray"]):
    """The vector of a prompt: the hidden state of one token, or the mean of several.

    Sums are in float64. States in bf16 or fp16 have so few bits that their sum is exact, as long as
    their exponents are not far apart: then it does not matter in which steps a prompt is computed.
    """

    def offsets(self, seq: SequenceState, start: int, count: int) -> range:
        pooling = seq.spec.pooling
        assert pooling is not None
        if pooling.kind == "mean":
            return range(max(pooling.skip - start, 0), count)
        position = 0 if pooling.kind == "first" else seq.num_prompt - 1
        first = position - start
        return range(first, first + 1) if 0 <= first < count else range(0)

    def rows(self, items: list[Scheduled]) -> Rows:
        return super().rows([item for item in items if item.sequence.spec.pooling is not None])

    def compute(
        self, computer: RowComputer, hidden: HiddenStates, rows: Rows
    ) -> Reader["np.ndarray"]:
        return computer.add_up(hidden, [len(offsets) for offsets in rows.offsets])

    def distribute(
        self, rows: Rows, results: "np.ndarray", ended: Container[SequenceState]
    ) -> None:
        """Give each sequence the sum of its rows, which is one row of the results."""
        for i, item in enumerate(rows.items):
            if item.sequence not in ended:
                self.take(item, results, range(i, i + 1))

    def take(self, item: Scheduled, results: "np.ndarray", part: range) -> None:
        """Add a sum to that of the steps before; a preempted sequence begins again."""
        seq = item.sequence
        pooling = seq.spec.pooling
        assert pooling is not None
        (row,) = part
        is_mean = pooling.kind == "mean"
        total = results[row]
        if is_mean and item.start > pooling.skip:
            assert seq.pooled is not None
            total = seq.pooled + total
        seq.pooled = total
        if is_mean and item.start + item.count < seq.num_prompt:
            return
        count = seq.num_prompt - pooling.skip if is_mean else 1
        seq.pooled = (total / count).astype(np.float32)
        if not np.isfinite(seq.pooled).all():
            seq.finish_reason = "error"

    def needs_all_rows(self, seq: SequenceState) -> bool:
        return seq.spec.pooling is not None and seq.spec.pooling.kind != "last"


class _Hidden(RowKind[CapturedStates]):
    """The hidden states of a prompt after some layers."""

    def offsets(self, seq: SequenceState, start: int, count: int) -> range:
        capture = seq.spec.capture
        assert capture is not None
        if not capture.last_only:
            return range(count)
        return range(count - 1, count) if start + count == seq.num_prompt else range(0)

    def rows(self, items: list[Scheduled]) -> Rows:
        return super().rows([item for item in items if item.sequence.spec.capture is not None])

    def compute(
        self, computer: RowComputer, hidden: HiddenStates, rows: Rows
    ) -> Reader[CapturedStates]:
        return computer.captured(rows)

    def take(self, item: Scheduled, results: CapturedStates, part: range) -> None:
        """Append the rows to those of the steps before; a preempted sequence begins again."""
        seq = item.sequence
        capture = seq.spec.capture
        assert capture is not None
        if item.start == 0:
            seq.captured = {}
        for layer in capture.layers:
            seq.captured.setdefault(layer, []).append(
                results[layer][part.start : part.start + len(part)]
            )

    def needs_all_rows(self, seq: SequenceState) -> bool:
        return seq.spec.capture is not None and not seq.spec.capture.last_only


_FIRST_ROW = range(1)
SAMPLE = _Sample()
VERIFY = _Verify()
SCORE = _Score()
POOL = _Pool()
HIDDEN = _Hidden()
PROMPT_KINDS: tuple[RowKind[Any], ...] = (SCORE, POOL, HIDDEN)  # results of prompts themselves


def _take_token(seq: SequenceState, tokens: Tokens, row: int) -> None:
    """Append a sampled token to a sequence; the id that stops it has a log-probability as well."""
    token = tokens.ids[row]
    num_top = seq.spec.logprobs
    if num_top is not None and token >= 0:
        tops = tokens.tops[row]
        seq.logprobs.append(tokens.logprobs[row])
        seq.top_logprobs.append(tops[:num_top])
    seq.append(token)
