"""The tokens that constrained sequences may get next, found in a thread while the model runs.

In: sequences with a `Constraint`; where a step verifies drafts, one for each row. Out: logits in
which every other token is -inf. Shapes: B rows; C of them constrained; V vocabulary.
"""

import math
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from llama.engine.sequence import Sequence
from llama.ops.sample import on_device_of

# Of each value of 8 bits: 8 bytes, 1 where a bit is clear. A GPU is sent bits, not bytes.
_EXCLUDED = np.unpackbits(~np.arange(256, dtype=np.uint8), bitorder="little").view(np.int64)


class TokenMask:
    """What one step's constrained rows may choose from."""

    def __init__(self, rows: list[int], bits: "Future[np.ndarray]") -> None:
        self._rows = rows
        self._bits = bits

    def apply(self, logits: Tensor) -> Tensor:
        """logits (B, V) -> a copy, -inf for the tokens that their row's constraint excludes."""
        octets = on_device_of(logits, self._bits.result().view(np.uint8)).int()
        excluded = on_device_of(logits, _EXCLUDED)[octets].view(torch.bool)
        rows = on_device_of(logits, self._rows)
        excluded = excluded[:, : logits.shape[1]]
        return logits.index_copy(0, rows, logits[rows].masked_fill_(excluded, -math.inf))


class TokenMasks:
    """Asks constraints, one step after the other. `n_vocab` is V."""

    def __init__(self, n_vocab: int) -> None:
        self._words = -(-n_vocab // 32)
        self._pool: ThreadPoolExecutor | None = None  # made for the first that needs it

    def start(self, sequences: Seq[Sequence]) -> TokenMask | None:
        """Start to find what the sequences may get next; None where nothing constrains them here:
        a rank that follows has no constraint, and takes rank 0's ids."""
        rows = [row for row, seq in enumerate(sequences) if seq.constraint is not None]
        if not rows:
            return None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="llama-constraints")
        asked = []
        for constraint, group in groupby(
            (sequences[row] for row in rows), attrgetter("constraint")
        ):
            first, *ahead = group  # the rows of one sequence
            drafts = ahead[-1].tokens[len(first.tokens) :] if ahead else []
            asked.append((constraint, first.output, drafts))
        return TokenMask(rows, self._pool.submit(self._fill, asked, len(rows)))

    def _fill(self, asked: list, num_rows: int) -> np.ndarray:
        """(C, words) int32. A constraint that fails allows nothing: only its own sequence ends."""
        bits, end = np.zeros((num_rows, self._words), np.int32), 0
        for constraint, output, drafts in asked:
            end += 1 + len(drafts)
            rows = bits[end - 1 - len(drafts) : end]
            try:
                constraint.fill_allowed(output, drafts, rows)
            except Exception:  # a bug in it must not end the step of the others
                rows.fill(0)
        return bits
