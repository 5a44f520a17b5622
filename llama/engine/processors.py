"""Logits processors: what changes logits before a draw, by what a sequence asks and what it had.

In: logits and sequences. Out: logits with logit_bias, bans and penalties. What a sequence had is
counted on the device, token by token as it is drawn, so that the host neither looks at every token
in every step nor must know the last one. No text, no model, no draw.

Shapes: B rows, one a sequence; P of them with penalties; V vocabulary; N rows of counts.
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from llama.engine.sequence import Sequence
from llama.ops.sample import on_device_of

_IN_PROMPT = 1 << 30  # in a count: the prompt has the token; what is below counts the output's


class LogitsProcessors:
    """Those of one engine, which keeps what it knows of its sequences from step to step."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None  # (N, V) int32
        self._places: dict[Sequence, int] = {}  # the row of it that a sequence has,
        self._known: dict[Sequence, int] = {}  # and how many of its tokens are counted there
        self._counting: list[tuple[int, Sequence]] = []  # rows of the last step with penalties;
        self._rows = self._at = self._settings = torch.empty(0)  # they, their places and penalties
        self._biased: list[tuple[int, Sequence, bool]] = []  # rows of the last step with a bias,
        self._cells: tuple[Tensor, Tensor, Tensor] | None = None  # rows, tokens, amounts

    def apply(self, logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
        """Logits (B, V), left as they are -> with all that the sequences ask for: biases and bans,
        then the repetition penalty, then those for presence and frequency."""
        logits = self._penalized(self._with_bias(logits, sequences), sequences)
        cells = [(row, t) for row, seq in enumerate(sequences) for t in _ends_of_bad_words(seq)]
        if not cells:
            return logits
        rows, tokens = on_device_of(logits, np.array(cells)).unbind(1)
        return logits.index_put((rows, tokens), logits.new_tensor(-math.inf))

    def count(self, ids: Tensor) -> None:
        """ids (B): what the rows of the last `apply` got. Those that have ended do no harm."""
        if self._counting and self._counts is not None:
            drawn = ids[self._rows].clamp(min=0)
            one = self._counts.new_ones(())
            self._counts.index_put_((self._at, drawn), one, accumulate=True)
            for _, seq in self._counting:
                self._known[seq] += 1

    def _with_bias(self, logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
        """Static until a sequence comes, goes, moves, or has its `min_tokens`."""
        biased = [
            (row, seq, is_short(seq))
            for row, seq in enumerate(sequences)
            if seq.params.logit_bias or seq.params.min_tokens or seq.params.bad_words
        ]
        if biased != self._biased:
            self._biased, self._cells = biased, None
            amounts = [(row, *pair) for row, seq, short in biased for pair in _bias(seq, short)]
            if amounts:
                cells = on_device_of(logits, np.array([pair[:2] for pair in amounts]))
                values = on_device_of(logits, [float(amount) for _, _, amount in amounts])
                self._cells = cells[:, 0], cells[:, 1], values
        if self._cells is None:
            return logits
        rows, tokens, values = self._cells
        return logits.index_put((rows, tokens), values, accumulate=True)

    def _penalized(self, logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
        """A positive logit of a token that occurs is divided by its row's repetition penalty, a
        negative one multiplied; the output's tokens lose what presence and frequency cost."""
        wanted = [(row, seq) for row, seq in enumerate(sequences) if seq.params.has_penalties]
        if wanted != self._counting:
            self._begin(logits, wanted)
        if not wanted:
            return logits
        self._refill()
        assert self._counts is not None
        counts, found = self._counts[self._at], logits[self._rows]
        repetition, presence, frequency = self._settings[:, :, None]
        weaker = torch.where(found > 0, found / repetition, found * repetition)
        found = torch.where(counts > 0, weaker, found)
        counts &= _IN_PROMPT - 1
        found -= presence * (counts > 0) + frequency * counts
        return logits.index_copy(0, self._rows, found)

    def _begin(self, logits: Tensor, wanted: list[tuple[int, Sequence]]) -> None:
        """Find a place for each; of those that are not here the counts are forgotten."""
        self._counting, live = wanted, {seq for _, seq in wanted}
        self._places = {seq: at for seq, at in self._places.items() if seq in live}
        self._known = {seq: self._known[seq] for seq in self._places}
        if not wanted:
            return
        if self._counts is None or len(self._counts) < len(live):
            rows = 1 << (len(live) - 1).bit_length()
            self._counts = logits.new_zeros(rows, logits.shape[1], dtype=torch.int32)
            self._places, self._known = {}, {}
        free = iter({*range(len(self._counts))}.difference(self._places.values()))
        for _, seq in wanted:
            if seq not in self._places:
                self._places[seq], self._known[seq] = next(free), -1
        self._rows = on_device_of(logits, [row for row, _ in wanted])
        self._at = on_device_of(logits, [self._places[seq] for _, seq in wanted])
        settings = [
            (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for p in (seq.params for _, seq in wanted)
        ]
        self._settings = on_device_of(logits, np.array(settings, np.float32)).t()

    def _refill(self) -> None:
        """Count what is not counted yet: of a new sequence, and of one whose drafts were taken."""
        assert self._counts is not None
        for _, seq in self._counting:
            if self._known[seq] == seq.num_known:
                continue
            row = self._counts[self._places[seq]].zero_()
            row[on_device_of(row, seq.tokens[: seq.num_prompt])] = _IN_PROMPT
            if seq.output:
                ids = on_device_of(row, seq.output)
                row.index_put_((ids,), row.new_ones(()), accumulate=True)
            self._known[seq] = seq.num_known


def is_short(seq: Sequence) -> bool:
    """Whether it may not end yet."""
    return seq.num_known - seq.num_prompt < seq.params.min_tokens


def _bias(seq: Sequence, short: bool) -> Iterator[tuple[int, float]]:
    """logit_bias; and -inf for bad words of one token, and for stop ids before min_tokens."""
    yield from dict(seq.params.logit_bias).items()
    for token in {word[0] for word in seq.params.bad_words if len(word) == 1}:
        yield token, -math.inf
    for token in sorted(seq.stop_ids) if short else ():
        yield token, -math.inf


def _ends_of_bad_words(seq: Sequence) -> Iterator[int]:
    """The last ids of bad words whose other ids come before."""
    for *before, last in seq.params.bad_words:
        if before and seq.tokens[-len(before) :] == before:
            yield last
