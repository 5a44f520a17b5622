"""The tokens that constrained sequences may get next, found in a thread while the model runs; or
at once, where steps overlap: the model's next step has begun then, and nothing else is to do.

In: sequences with a `Constraint`; where a step verifies drafts, one for each row. Out: logits in
which every other token is -inf. Shapes: B rows; C of them constrained; V vocabulary.
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

# Of each value of 8 bits: 8 bytes, 1 where a bit is clear. A GPU is sent bits, not bytes.
_EXCLUDED = np.unpackbits(~np.arange(256, dtype=np.uint8), bitorder="little").view(np.int64)
TokenMask = Callable[[Tensor], Tensor]  # logits (B, V) -> a copy, -inf for what rows exclude


def _masked(rows: list[int], bits: Callable[[], np.ndarray], logits: Tensor) -> Tensor:
    octets = on_device_of(logits, bits().view(np.uint8)).int()
    excluded = on_device_of(logits, _EXCLUDED)[octets].view(torch.bool)[:, : logits.shape[1]]
    there = on_device_of(logits, rows)
    return logits.index_copy(0, there, logits[there].masked_fill_(excluded, -math.inf))


class TokenMasks:
    """Asks constraints, one step after the other. `n_vocab` is V."""

    def __init__(self, n_vocab: int) -> None:
        self._words = -(-n_vocab // 32)
        self._pool: ThreadPoolExecutor | None = None  # made for the first that needs it

    def start(
        self, sequences: Sequence[SequenceState], *, at_once: bool = False
    ) -> TokenMask | None:
        """Start to find what the sequences may get next; None where nothing constrains them here:
        a rank that follows has no constraint, and takes rank 0's ids."""
        rows = [row for row, seq in enumerate(sequences) if seq.constraint is not None]
        if not rows:
            return None
        asked = [sequences[row] for row in rows]
        if at_once:
            return partial(_masked, rows, partial(self._fill, asked))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="llama-constraints")
        return partial(_masked, rows, self._pool.submit(self._fill, asked).result)

    def _fill(self, asked: list[SequenceState]) -> np.ndarray:
        """(C, words) int32. A constraint that fails allows nothing: only its own sequence ends."""
        bits, at, last = np.empty((len(asked), self._words), np.int32), 0, len(asked) - 1
        for end, seq in enumerate(asked):
            if end < last and asked[end + 1].constraint is seq.constraint:
                continue  # one sequence has several rows, each with a draft more
            tokens, known = asked[at].tokens, seq.num_prompt
            try:
                assert seq.constraint is not None
                drafts = seq.tokens[len(tokens) :]
                seq.constraint.fill_allowed(tokens, known, drafts, bits[at : end + 1])
            except Exception:  # a bug in it must not end the step of the others
                bits[at : end + 1].fill(0)
            at = end + 1
        return bits
