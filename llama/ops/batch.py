"""The tokens of one step as the ops read them: where each lies, and what it may attend to.

In: lengths and pages of sequences, as plain numbers. Out: a `Batch` of tensors on the model's
device. It knows nothing of requests, weights or scheduling.

Shapes: T tokens of the flat batch, B sequences, R rows that want logits, S slots per page, M pages
per sequence.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import add

import numpy as np
import torch
from torch import Tensor

from llama.device import pinned
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """What a product may know of the rows that it multiplies, beside their elements.

    It reaches every product of a model. What belongs to rows and must be known there, such as the
    adapter of each row, is a field of it.

    Attributes:
        kernels: The Triton kernels that the operators on these rows may run.
    """

    kernels: KernelSet = TORCH_ONLY


DEFAULT_CONTEXT = ForwardContext()  # rows of which nothing is known: PyTorch computes them


@dataclass(frozen=True)
class Batch(ForwardContext):
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
    wants_all: bool = False  # logit_rows are all rows, in order: nothing is to be picked

    def with_kernels(self, kernels: KernelSet) -> "Batch":
        """Return this batch for a model that may run these kernels."""
        return self if self.kernels is kernels else replace(self, kernels=kernels)

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
        assert len(pages) == len(starts) == len(query_lens), (len(pages), starts, query_lens)
        assert set(query_lens[: query_lens.count(1)]) <= {1}, "single-token sequences come first"
        size, seq_lens = page_size, [*map(add, starts, query_lens)]
        used = [-(-n // size) for n in seq_lens]
        b, t, width = len(seq_lens), sum(query_lens), max(used)
        sizes = [len(tokens), t, t, b * width, b + 1, b, len(logit_rows)]
        numbers = array("q", tokens)  # plain Python: what is in no cache costs most in a step
        for first, end in zip(starts, seq_lens, strict=True):
            numbers.extend(range(first, end))
        for held, first, end in zip(pages, starts, seq_lens, strict=True):
            near = [page * size for page in held[first // size : -(-end // size)]]
            slots = [slot for page in near for slot in range(page, page + size)]
            numbers.extend(slots[first % size :][: end - first])
        for held, count in zip(pages, used, strict=True):
            numbers.extend(held[:count])
            numbers.frombytes(bytes(8 * (width - count)))
        for part in (accumulate(query_lens, initial=0), seq_lens, logit_rows):
            numbers.extend(part)
        buffer = pinned(np.frombuffer(numbers, np.int64), device)
        # A copy to mps must not be asynchronous: the buffer may be freed before it is read
        # (pytorch #189690).
        there = buffer.to(device, non_blocking=device.type == "cuda")
        ids, positions, places, table, query_starts, lengths, rows = there.split(sizes)
        parts = positions, places, table.view(b, width), query_starts, lengths, rows
        return ids, cls(*parts, [*query_lens], seq_lens, [*logit_rows] == [*range(t)])
