"""Logits processors: change logits before sampling as each sequence asks, given its tokens.

In: logits and sequences. Out: logits with biases, bans and penalties applied.

The tokens that penalties depend on are counted on the device as they are sampled. So the host need
not go through all tokens in every step, nor know the latest one.

Shapes: B rows, one per sequence; P of them with penalties; V vocabulary; N slots of counts.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from llama.engine.sequence import SequenceState
from llama.ops.sample import SamplingRow, on_device_of

_IN_PROMPT = 1 << 30  # the bit of a count for tokens of the prompt; lower bits count the output
_Rows = list[tuple[int, SequenceState]]


class LogitsProcessors:
    """The logits processors of one engine.

    What the sequences ask for is looked at only when a sequence comes, goes or changes its row.

    Attributes:
        rows: How each row of the last step is sampled; None if greedily.
        seeds: The seed of each row.
        positions: The position of each row's next token.
        logprobs: The largest number of most probable tokens that a row asks for, or None if no row
            asks for log-probabilities.
    """

    def __init__(self) -> None:
        self.rows: list[SamplingRow | None] = []
        self.seeds: list[int] = []
        self.positions: list[int] = []
        self.logprobs: int | None = None
        self._sequences: list[SequenceState] = []
        self._banning: _Rows = []  # rows with bad words of several tokens
        # Rows with a bias or a ban: whether each was below `min_tokens` when the amounts were sent
        # to the device, and the rows, tokens and values of these amounts.
        self._biasing: _Rows = []
        self._below_min: list[bool] = []
        self._biases: tuple[Tensor, Tensor, Tensor] | None = None
        # Rows with penalties: how many tokens of each are counted, the slot of counts that each
        # sequence has, and on the device the rows (P), the slots (P) and the penalties (P, 1).
        self._penalized: _Rows = []
        self._num_counted: list[int] = []
        self._slots: dict[SequenceState, int] = {}
        self._penalized_rows = torch.empty(0)
        self._penalized_slots = torch.empty(0)
        self._penalties: tuple[Tensor, ...] = ()
        self._counts: Tensor | None = None  # (N, V) int32
        self._one = torch.empty(0)  # the amount that a sampled token adds to its count

    def apply(self, logits: Tensor, sequences: Sequence[SequenceState]) -> Tensor:
        """Apply biases and bans, then the repetition, presence and frequency penalties.

        Args:
            logits: (B, V), which are not changed.
            sequences: The sequence of each row.

        Returns:
            The processed logits, or `logits` if no sequence asks for any change.
        """
        if self._sequences != sequences:
            self._begin(logits, [*sequences])
        self.positions = [seq.num_known for seq in sequences]
        biased = self._apply_biases(logits)
        processed = self._apply_penalties(biased)
        banned = list[tuple[int, int]]()
        for row, seq in self._banning:
            for token in _ends_of_bad_sequences(seq):
                banned.append((row, token))
        if not banned:
            return processed
        cells = on_device_of(processed, np.array(banned))
        rows, tokens = cells.unbind(1)
        ban = processed.new_full((), -math.inf)  # a copy from the host would wait for the device
        return processed.index_put((rows, tokens), ban)

    def count(self, ids: Tensor) -> None:
        """Count the tokens (B) that the rows of the last `apply` got.

        A row without a token has the id -1, and its sequence ends. It counts as id 0.
        """
        if not self._penalized or self._counts is None:
            return
        sampled = ids
        if len(self._penalized) < len(ids):
            sampled = ids[self._penalized_rows]
        indices = (self._penalized_slots, sampled.clamp(min=0))
        self._counts.index_put_(indices, self._one, accumulate=True)
        self._num_counted = [count + 1 for count in self._num_counted]

    def _begin(self, logits: Tensor, sequences: list[SequenceState]) -> None:
        """Look at what the sequences of new rows ask for."""
        self._sequences = sequences
        self._below_min = []
        self._biases = None
        self.rows = [_sampling_row(seq) for seq in sequences]
        self.seeds = [seq.spec.seed for seq in sequences]
        self.logprobs = None
        self._banning = []
        self._biasing = []
        penalized: _Rows = []
        for row, seq in enumerate(sequences):
            spec = seq.spec
            if spec.logprobs is not None:
                self.logprobs = max(self.logprobs or 0, spec.logprobs)
            if spec.has_long_bad_words:
                self._banning.append((row, seq))
            if spec.logit_bias or spec.min_tokens or spec.bad_words:
                self._biasing.append((row, seq))
            if spec.has_penalties:
                penalized.append((row, seq))
        self._assign_slots(logits, penalized)

    def _apply_biases(self, logits: Tensor) -> Tensor:
        """Add the biases, which are sent to the device only when they change.

        That is when a sequence comes, goes, changes its row or reaches its `min_tokens`.
        """
        below_min = [
            seq.spec.min_tokens > 0 and is_below_min_tokens(seq) for _, seq in self._biasing
        ]
        if below_min != self._below_min:
            self._below_min = below_min
            self._send_biases(logits)
        if self._biases is None:
            return logits
        rows, tokens, values = self._biases
        return logits.index_put((rows, tokens), values, accumulate=True)

    def _send_biases(self, logits: Tensor) -> None:
        """Send rows, tokens and values of all biases to the device of the logits."""
        self._biases = None
        cells = list[tuple[int, int]]()
        amounts = list[float]()
        for (row, seq), is_below in zip(self._biasing, self._below_min, strict=True):
            for token, amount in _token_biases(seq, is_below):
                cells.append((row, token))
                amounts.append(float(amount))
        if cells:
            indices = on_device_of(logits, np.array(cells))
            values = on_device_of(logits, amounts)
            rows, tokens = indices.unbind(1)
            self._biases = (rows, tokens, values)

    def _apply_penalties(self, logits: Tensor) -> Tensor:
        """Penalize tokens that occur.

        The repetition penalty of a row divides positive logits and multiplies negative ones, for
        tokens of the prompt and the output. The presence and frequency penalties are subtracted
        from the logits of output tokens.
        """
        if not self._penalized:
            return logits
        self._recount()
        assert self._counts is not None
        counts = self._counts[self._penalized_slots]
        has_all_rows = len(self._penalized) == len(logits)
        values = logits if has_all_rows else logits[self._penalized_rows]
        repetition, presence, frequency = self._penalties
        divided = values / repetition
        multiplied = values * repetition
        repeated = torch.where(values > 0, divided, multiplied)
        values = torch.where(counts > 0, repeated, values)
        counts &= _IN_PROMPT - 1
        values.addcmul_(presence, counts > 0, value=-1)
        values.addcmul_(frequency, counts, value=-1)
        if has_all_rows:
            return values
        return logits.index_copy(0, self._penalized_rows, values)

    def _assign_slots(self, logits: Tensor, penalized: _Rows) -> None:
        """Give each sequence with penalties a slot of counts; the slots of others become free."""
        previous = [seq for _, seq in self._penalized]
        counted = dict(zip(previous, self._num_counted, strict=True))
        live = {seq for _, seq in penalized}
        self._penalized = penalized
        for ended in self._slots.keys() - live:
            del self._slots[ended]
        self._num_counted = []
        if not penalized:
            return
        if self._counts is None or len(self._counts) < len(live):
            max_slot = len(live) - 1
            num_slots = 1 << max_slot.bit_length()
            num_tokens = logits.shape[1]
            self._counts = logits.new_zeros(num_slots, num_tokens, dtype=torch.int32)
            self._slots = {}
        num_slots = len(self._counts)
        slots = set(range(num_slots))
        free = iter(slots.difference(self._slots.values()))
        for _, seq in penalized:
            if seq in self._slots:
                self._num_counted.append(counted.get(seq, -1))
            else:
                self._num_counted.append(-1)
                self._slots[seq] = next(free)
        rows = [row for row, _ in penalized]
        penalized_slots = [self._slots[seq] for _, seq in penalized]
        penalties = [_penalties(seq) for _, seq in penalized]
        self._penalized_rows = on_device_of(logits, rows)
        self._penalized_slots = on_device_of(logits, penalized_slots)
        table = np.array(penalties, np.float32)
        sent = on_device_of(logits, table)
        self._penalties = sent[:, None].unbind(2)
        self._one = self._counts.new_ones(())

    def _recount(self) -> None:
        """Count all tokens of new sequences, and of those whose drafts were accepted."""
        assert self._counts is not None
        positions = [self.positions[row] for row, _ in self._penalized]
        if positions == self._num_counted:
            return
        counted = zip(self._penalized, positions, self._num_counted, strict=True)
        for (_, seq), position, num_counted in counted:
            if position == num_counted:
                continue
            slot = self._slots[seq]
            counts = self._counts[slot].zero_()
            prompt_ids = [x for x in seq.tokens[: seq.num_prompt] if x < counts.shape[-1]]
            prompt = on_device_of(counts, prompt_ids)
            counts[prompt] = _IN_PROMPT
            if seq.output:
                output = on_device_of(counts, seq.output)
                counts.index_put_((output,), self._one, accumulate=True)
        self._num_counted = positions


def is_below_min_tokens(seq: SequenceState) -> bool:
    """Return whether the output is shorter than `min_tokens`, so that it may not end yet."""
    return seq.num_known - seq.num_prompt < seq.spec.min_tokens


def _sampling_row(seq: SequenceState) -> SamplingRow | None:
    """Return how a row is sampled, or None if greedily."""
    spec = seq.spec
    if spec.greedy:
        return None
    return SamplingRow(spec.temperature, spec.min_p, spec.top_k, spec.top_p)


def _penalties(seq: SequenceState) -> tuple[float, float, float]:
    """Return the penalties of a sequence, in the order of `LogitsProcessors._penalties`."""
    spec = seq.spec
    return spec.repetition_penalty, spec.presence_penalty, spec.frequency_penalty


def _token_biases(seq: SequenceState, is_below_min: bool) -> Iterator[tuple[int, float]]:
    """Yield tokens and the amounts to add to their logits.

    They are those of `logit_bias`, and -inf for bad words of one token, and for stop ids before
    `min_tokens`.
    """
    yield from dict(seq.spec.logit_bias).items()
    spec = seq.spec
    single_tokens = set[int]()
    for word in spec.bad_words:
        if len(word) == 1:
            single_tokens.update(word)
    for token in single_tokens:
        yield token, -math.inf
    if is_below_min:
        for token in sorted(spec.stop_ids):
            yield token, -math.inf


def _ends_of_bad_sequences(seq: SequenceState) -> Iterator[int]:
    """Yield the last id of each bad word whose other ids are the latest tokens."""
    for *before, last in seq.spec.bad_words:
        num_before = len(before)
        if before and seq.tokens[-num_before:] == before:
            yield last
