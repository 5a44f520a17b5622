"""The tokens of one step as the ops read them: where each lies, and what it may attend to.

In: lengths and pages of sequences, as plain numbers. Out: a `Batch` of tensors on the model's
device. It knows nothing of requests, weights or scheduling.

Shapes: T tokens of the flat batch, B sequences, R rows that want logits, S slots per page, M pages
per sequence.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """The tokens of one step, sequence after sequence; those with a single new token come first.

    For sequences of 5, 7 and 2 tokens of which 1, 1 and 2 are new, with S = 4 and pages [3, 0],
    [5, 1] and [2]: positions [4, 6, 0, 1], slots [0, 6, 8, 9], page_table [[3, 0], [5, 1], [2, 0]],
    query_starts [0, 1, 2, 4], seq_lens [5, 7, 2], and logit_rows [0, 1, 3] when all three want a
    token. The tensors are int64 on the model's device. The two lists are on the host, so that an op
    that needs these lengths there does not wait for the device.
    """

    positions: Tensor  # (T) of each token in its sequence
    slots: Tensor  # (T) where its key and value go: page * S + offset
    page_table: Tensor  # (B, M), unused entries 0
    query_starts: Tensor  # (B + 1) first row of each sequence, then T
    seq_lens: Tensor  # (B) tokens in all, the new ones among them
    logit_rows: Tensor  # (R) rows of the batch whose next token is asked for
    query_lens_cpu: list[int]  # (B) new tokens
    seq_lens_cpu: list[int]  # (B)

    @cached_property
    def num_decodes(self) -> int:
        """How many sequences have a single new token: the first ones."""
        return bisect_right(self.query_lens_cpu, 1)

    @classmethod
    def pack(
        cls,
        tokens: Seq[int],
        starts: Seq[int],
        query_lens: Seq[int],
        pages: Seq[Seq[int]],
        page_size: int,
        logit_rows: Seq[int],
        device: torch.device,
    ) -> tuple[Tensor, "Batch"]:
        """The tokens (T) and the batch on `device`, sent there in one copy; on a CPU in none.

        starts, query_lens, pages: per sequence, the tokens computed so far, the number of new ones,
        and the pages that it holds. tokens may be empty, where the caller has them on the device.
        """
        first, lens = np.array(starts, np.int64), np.array(query_lens, np.int64)
        seq_lens = first + lens
        used = -(-seq_lens // page_size)
        b, t, width = len(lens), int(lens.sum()), int(used.max())
        assert b == len(first) == len(pages), (b, len(first), len(pages))
        assert (lens[: (lens == 1).sum()] == 1).all(), "single-token sequences come first"
        sizes = [len(tokens), t, t, b * width, b + 1, b, len(logit_rows)]
        pinned = device.type == "cuda"
        buffer = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=pinned)
        parts = (part.numpy() for part in buffer.split(sizes))
        ids, positions, slots, table, query_starts, lengths, rows = parts
        ids[:], lengths[:], rows[:] = tokens, seq_lens, logit_rows
        table.fill(0)
        for row, held, count in zip(table.reshape(b, width), pages, used.tolist(), strict=True):
            known = np.frombuffer(held, np.int64) if isinstance(held, array) else np.asarray(held)
            row[:count] = known[:count]
        query_starts[0] = 0
        lens.cumsum(out=query_starts[1:])
        positions[:] = np.arange(t) + np.repeat(first - query_starts[:-1], lens)
        page, offset = np.divmod(positions, page_size)
        slots[:] = table[np.repeat(np.arange(b) * width, lens) + page] * page_size + offset
        # A copy to mps must not be asynchronous: the buffer may be freed before it is read
        # (pytorch #189690).
        there, lists = buffer.to(device, non_blocking=pinned), (lens.tolist(), seq_lens.tolist())
        tokens_there, at, slots_there, pages_there, *rest = there.split(sizes)
        batch = cls(at, slots_there, pages_there.view(b, width), rest[0], rest[1], rest[2], *lists)
        return tokens_there, batch
