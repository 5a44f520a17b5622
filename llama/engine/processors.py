"""Logits processors: what changes logits before a draw, by what a sequence asks and what it had.

In: logits and sequences. Out: logits with logit_bias, bans and penalties. What a sequence had is
counted on the device, token by token as it is drawn, so that the host neither looks at every token
in every step nor must know the last one.

Shapes: B rows, one a sequence; P of them with penalties; V vocabulary; N rows of counts.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from llama.engine.sequence import SequenceState
from llama.ops.sample import SamplingRow, on_device_of

_IN_PROMPT = 1 << 30  # in a count: the prompt has the token; what is below counts the output's


class LogitsProcessors:
    """Of one engine: what its sequences ask for is looked at when one comes, goes, or moves."""

    def __init__(self) -> None:
        self.rows: list[SamplingRow | None] = []  # of the last step: how each is drawn,
        self.seeds: list[int] = []
        self.positions: list[int] = []
        self.logprobs: int | None = None  # and the most that one asks for
        self._sequences: list[SequenceState] = []
        self._banning: list[tuple[int, SequenceState]] = []  # those with long bad words,
        self._biasing: list[tuple[int, SequenceState]] = []  # with a bias or a ban,
        self._counting: list[tuple[int, SequenceState]] = []  # and with penalties;
        self._indices = self._at = self._one = torch.empty(0)  # they, their places, and a 1
        self._settings: tuple[Tensor, ...] = ()  # the penalties (P, 1) of each kind
        self._counts: Tensor | None = None  # (N, V) int32
        self._places: dict[SequenceState, int] = {}  # the row of it that a sequence has,
        self._known: list[int] = []  # and how many tokens of those with penalties are counted there
        self._short: list[bool] = []  # which of those with a bias were when it was sent
        self._cells: tuple[Tensor, Tensor, Tensor] | None = None  # rows, tokens, amounts

    def apply(self, logits: Tensor, sequences: Sequence[SequenceState]) -> Tensor:
        """Logits (B, V), left as they are -> with all that the sequences ask for: biases and bans,
        then the repetition penalty, then those for presence and frequency."""
        if self._sequences != sequences:
            self._begin(logits, [*sequences])
        self.positions = [seq.num_known for seq in sequences]
        logits = self._penalized(self._with_bias(logits))
        cells = [(row, t) for row, seq in self._banning for t in _ends_of_bad_words(seq)]
        if not cells:
            return logits
        rows, tokens = on_device_of(logits, np.array(cells)).unbind(1)
        return logits.index_put((rows, tokens), logits.new_tensor(-math.inf))

    def count(self, ids: Tensor) -> None:
        """ids (B): what the rows of the last `apply` got. Those that have ended do no harm."""
        if self._counting and self._counts is not None:
            drawn = ids[self._indices] if len(self._counting) < len(ids) else ids
            self._counts.index_put_((self._at, drawn.clamp(min=0)), self._one, accumulate=True)
            self._known = [n + 1 for n in self._known]

    def _begin(self, logits: Tensor, sequences: list[SequenceState]) -> None:
        asked = [(row, seq, seq.spec) for row, seq in enumerate(sequences)]
        self._sequences, self._short = sequences, []
        self.rows = [
            None if p.greedy else SamplingRow(p.temperature, p.min_p, p.top_k, p.top_p)
            for _, _, p in asked
        ]
        self.seeds = [seq.spec.seed for seq in sequences]
        counts = [p.logprobs for _, _, p in asked if p.logprobs is not None]
        self.logprobs = max(counts, default=None)
        self._banning = [(row, seq) for row, seq, p in asked if p.has_long_bad_words]
        self._biasing = [
            (row, seq) for row, seq, p in asked if p.logit_bias or p.min_tokens or p.bad_words
        ]
        self._cells = None
        self._find_places(logits, [(row, seq) for row, seq, p in asked if p.has_penalties])

    def _with_bias(self, logits: Tensor) -> Tensor:
        """Static until a sequence comes, goes, moves, or has its `min_tokens`."""
        short = [seq.spec.min_tokens > 0 and is_short(seq) for _, seq in self._biasing]
        if short != self._short:
            self._short, self._cells = short, None
            biased = zip(self._biasing, short, strict=True)
            amounts = [(row, *pair) for (row, seq), now in biased for pair in _bias(seq, now)]
            if amounts:
                cells = on_device_of(logits, np.array([pair[:2] for pair in amounts]))
                values = on_device_of(logits, [float(amount) for _, _, amount in amounts])
                self._cells = cells[:, 0], cells[:, 1], values
        if self._cells is None:
            return logits
        rows, tokens, values = self._cells
        return logits.index_put((rows, tokens), values, accumulate=True)

    def _penalized(self, logits: Tensor) -> Tensor:
        """A positive logit of a token that occurs is divided by its row's repetition penalty, a
        negative one multiplied; the output's tokens lose what presence and frequency cost."""
        if not self._counting:
            return logits
        self._refill()
        assert self._counts is not None
        is_whole = len(self._counting) == len(logits)
        counts, found = self._counts[self._at], logits if is_whole else logits[self._indices]
        repetition, presence, frequency = self._settings
        weaker = torch.where(found > 0, found / repetition, found * repetition)
        found = torch.where(counts > 0, weaker, found)
        counts &= _IN_PROMPT - 1
        found.addcmul_(presence, counts > 0, value=-1).addcmul_(frequency, counts, value=-1)
        return found if is_whole else logits.index_copy(0, self._indices, found)

    def _find_places(self, logits: Tensor, wanted: list[tuple[int, SequenceState]]) -> None:
        """One for each; of those that are not here the counts are forgotten."""
        counted = dict(zip((seq for _, seq in self._counting), self._known, strict=True))
        self._counting, live = wanted, {seq for _, seq in wanted}
        self._places = {seq: at for seq, at in self._places.items() if seq in live}
        self._known = []
        if not wanted:
            return
        if self._counts is None or len(self._counts) < len(live):
            rows = 1 << (len(live) - 1).bit_length()
            self._counts = logits.new_zeros(rows, logits.shape[1], dtype=torch.int32)
            self._places = {}
        free = iter({*range(len(self._counts))}.difference(self._places.values()))
        for _, seq in wanted:
            self._known.append(counted.get(seq, -1) if seq in self._places else -1)
            if seq not in self._places:
                self._places[seq] = next(free)
        self._indices = on_device_of(logits, [row for row, _ in wanted])
        self._at = on_device_of(logits, [self._places[seq] for _, seq in wanted])
        settings = [
            (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for p in (seq.spec for _, seq in wanted)
        ]
        sent = on_device_of(logits, np.array(settings, np.float32))
        self._settings, self._one = sent[:, None].unbind(2), self._counts.new_ones(())

    def _refill(self) -> None:
        """Count what is not counted yet: of a new sequence, and of one whose drafts were taken."""
        assert self._counts is not None
        now = [self.positions[row] for row, _ in self._counting]
        if now == self._known:
            return
        for (_, seq), position, known in zip(self._counting, now, self._known, strict=True):
            if position == known:
                continue
            row = self._counts[self._places[seq]].zero_()
            row[on_device_of(row, seq.tokens[: seq.num_prompt])] = _IN_PROMPT
            if seq.output:
                ids = on_device_of(row, seq.output)
                row.index_put_((ids,), self._one, accumulate=True)
        self._known = now


def is_short(seq: SequenceState) -> bool:
    """Whether it may not end yet."""
    return seq.num_known - seq.num_prompt < seq.spec.min_tokens


def _bias(seq: SequenceState, short: bool) -> Iterator[tuple[int, float]]:
    """logit_bias; and -inf for bad words of one token, and for stop ids before min_tokens."""
    yield from dict(seq.spec.logit_bias).items()
    for token in {word[0] for word in seq.spec.bad_words if len(word) == 1}:
        yield token, -math.inf
    for token in sorted(seq.spec.stop_ids) if short else ():
        yield token, -math.inf


def _ends_of_bad_words(seq: SequenceState) -> Iterator[int]:
    """The last ids of bad words whose other ids come before."""
    for *before, last in seq.spec.bad_words:
        if before and seq.tokens[-len(before) :] == before:
            yield last
