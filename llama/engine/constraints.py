"""Token masks: exclude from the logits the tokens that a constraint does not allow.

In: sequences with a `Constraint`; if a step verifies drafts, one for each row. Out: logits in which
every excluded token is -inf.

Constraints run in a thread while the model computes the step. With async scheduling they run at
once instead: the next step of the model is under way by then, and the host has nothing else to do.

Shapes: B rows; C of them constrained; V vocabulary; W = ceil(V / 32) integers of a row's bits.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from llama.engine.sequence import SequenceState
from llama.ops.sample import on_device_of

# For each value of 8 bits, 8 bytes that are 1 where a bit is clear. The device gets bits, which are
# an eighth of the bytes to send.
_OCTETS = np.arange(256, dtype=np.uint8)
_EXCLUDED = np.unpackbits(~_OCTETS, bitorder="little").view(np.int64)
TokenMask = Callable[[Tensor], Tensor]  # logits (B, V) -> a copy with -inf for excluded tokens


def _mask_logits(rows: list[int], bits: Callable[[], np.ndarray], logits: Tensor) -> Tensor:
    """Return a copy of logits (B, V) with -inf for what the bits (C, W) of `rows` exclude."""
    n_vocab = logits.shape[1]
    octets = bits().view(np.uint8)
    octet_indices = on_device_of(logits, octets).int()
    table = on_device_of(logits, _EXCLUDED)
    excluded = table[octet_indices].view(torch.bool)
    excluded = excluded[:, :n_vocab]
    indices = on_device_of(logits, rows)
    masked = logits[indices].masked_fill_(excluded, -math.inf)
    return logits.index_copy(0, indices, masked)


class TokenMasks:
    """Makes the token masks of one step after the other, for `n_vocab` tokens."""

    def __init__(self, n_vocab: int) -> None:
        self._row_size = -(-n_vocab // 32)  # W
        self._pool: ThreadPoolExecutor | None = None  # made when it is first needed

    def start(
        self, sequences: Sequence[SequenceState], *, at_once: bool = False
    ) -> TokenMask | None:
        """Start to compute the tokens that the sequences allow next.

        Args:
            sequences: The sequence of each row.
            at_once: Whether the mask itself computes them, rather than a thread.

        Returns:
            The mask, or None if nothing constrains the rows on this rank. Only rank 0 may have the
            constraints; the other ranks then receive its ids.
        """
        rows = [row for row, seq in enumerate(sequences) if seq.constraint is not None]
        if not rows:
            return None
        constrained = [sequences[row] for row in rows]
        if at_once:
            fill = partial(self._fill, constrained)
            return partial(_mask_logits, rows, fill)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="llama-constraints")
        future = self._pool.submit(self._fill, constrained)
        return partial(_mask_logits, rows, future.result)

    def _fill(self, constrained: list[SequenceState]) -> np.ndarray:
        """Return the bits of the tokens that each row allows, (C, W) int32.

        Consecutive rows with the same constraint are those of one sequence, each with one draft
        more than the row before it. They are computed together.
        """
        num_rows = len(constrained)
        shape = (num_rows, self._row_size)
        bits = np.empty(shape, np.int32)
        first = 0
        last = num_rows - 1
        for row, seq in enumerate(constrained):
            end = row + 1
            if row < last and constrained[end].constraint is seq.constraint:
                continue
            _fill_rows(constrained[first], seq, bits[first:end])
            first = end
        return bits


def find_failure(seq: SequenceState, n_vocab: int) -> None:
    """Let the constraint of a sequence that got no token find out why, in its `failure`.

    A stage of a pipeline that does not sample has never asked it for the tokens that it allows.
    """
    _fill_rows(seq, seq, np.empty((1, -(-n_vocab // 32)), np.int32))


def _fill_rows(first: SequenceState, last: SequenceState, bits: np.ndarray) -> None:
    """Set the bits of the rows of one sequence, given it without drafts and with all of them.

    A constraint that fails allows no token: a fault in it ends its own sequence only, and not the
    step of the others.
    """
    try:
        constraint = last.constraint
        assert constraint is not None
        num_known = len(first.tokens)
        drafts = last.tokens[num_known:]
        constraint.fill_allowed(first.tokens, last.num_prompt, drafts, bits)
    except Exception:
        bits.fill(0)
