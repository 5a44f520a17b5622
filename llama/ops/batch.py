"""The tokens of one step as the operators read them: where each lies, and what it may attend to.

In: lengths and pages of sequences, as plain integers. Out: a `Batch` of tensors on the model's
device. Requests, weights and scheduling must not be known here.

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

from llama.common.allocation import pinned
from llama.ops.adapters import AdapterRows, ProductUpdates
from llama.ops.kernels import NO_KERNELS, Kernels


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """The context of the rows that a product multiplies, alongside their elements.

    It reaches every product of a model. What belongs to rows and must be known there, such as the
    adapter of each row, is a field of it.

    Attributes:
        kernels: The kernels that the operators on these rows may run.
        adapters: The rows that have LoRA adapters; None if none has one.
    """

    kernels: Kernels = NO_KERNELS
    adapters: AdapterRows | None = None

    def updates_of(self, names: Seq[str]) -> ProductUpdates | None:
        """Return the adapters' updates of a product; None where no row has one.

        Args:
            names: The names of the matrices that are multiplied as one.
        """
        if self.adapters is None or not names:
            return None
        return self.adapters.of(names[0], self.kernels)


DEFAULT_CONTEXT = ForwardContext()  # rows of which nothing is known: PyTorch computes them


@dataclass(frozen=True)
class NewImage:
    """An image that a step encodes before its rows are computed.

    Attributes:
        pixels: (r, T, T, 3) uint8, r tiles row by row.
        rows: The rows of tiles.
        columns: The columns of tiles.
        pages: The pages of the tokens that are seen together with the image's, (M).
        first: The place of its first token among these.
    """

    pixels: Tensor
    rows: int
    columns: int
    pages: Tensor
    first: int


@dataclass(frozen=True)
class CrossRows:
    """The rows of a step that see images.

    Attributes:
        rows: The rows (N) of the step, in the order of `batch`.
        batch: What they see. A sequence of it are rows that see the same tokens, and its page table
            has entries of `llama.vision.cross.plane_of`.
        new: The images that are encoded first.
    """

    rows: Tensor
    batch: "Batch"
    new: Seq[NewImage]


@dataclass(frozen=True)
class Batch(ForwardContext):
    """The tokens of one step, sequence after sequence; those with a single new token come first.

    For sequences of 5, 7 and 2 tokens of which 1, 1 and 2 are new, with S = 4 and pages [3, 0],
    [5, 1] and [2]: positions [4, 6, 0, 1], slots [0, 6, 8, 9], page_table [[3, 0], [5, 1], [2, 0]],
    query_starts [0, 1, 2, 4], seq_lens [5, 7, 2], and logit_rows [0, 1, 3] when all three want a
    token. The tensors are int64 on the model's device. The two lists are on the host, so that an
    operator that needs these lengths there does not wait for the device.

    Attributes:
        positions: (T) The position of each token in its sequence.
        slots: (T) Where the key and value of each token go: page * S + offset.
        page_table: (B, M) The pages of each sequence; unused entries are 0.
        query_starts: (B + 1) The first row of each sequence, then T.
        seq_lens: (B) The number of tokens of each sequence, new ones included.
        logit_rows: (R) The rows of the batch whose next token is asked for.
        query_lens_cpu: (B) The number of new tokens of each sequence; upper bounds in a recorded
            step, where a kernel for attention reads `query_starts`.
        seq_lens_cpu: (B) The elements of `seq_lens`, or upper bounds.
        wants_all: Whether `logit_rows` are all rows in order, so that none must be selected.
        cross: The rows that see images; None if none does.
    """

    positions: Tensor
    slots: Tensor
    page_table: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    logit_rows: Tensor
    query_lens_cpu: list[int]
    seq_lens_cpu: list[int]
    wants_all: bool = False
    cross: CrossRows | None = None

    def with_kernels(self, kernels: Kernels) -> "Batch":
        """Return this batch for a model that may run these kernels."""
        return self if self.kernels is kernels else replace(self, kernels=kernels)

    def with_adapters(self, adapters: AdapterRows) -> "Batch":
        """Return this batch with the adapters of its rows."""
        return replace(self, adapters=adapters)

    def with_cross(self, cross: CrossRows) -> "Batch":
        """Return this batch with what its rows see of images."""
        return replace(self, cross=cross)

    @cached_property
    def num_decodes(self) -> int:
        """Return how many sequences have a single new token: the first ones."""
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
        """Send a step to a device, in one copy; to a CPU in none.

        Args:
            tokens: The new tokens; none where the caller has them on the device.
            starts: The number of tokens of each sequence that were computed before.
            query_lens: The number of new tokens of each sequence.
            pages: The pages of each sequence.
            page_size: S.
            logit_rows: The rows of the batch whose next token is asked for.
            device: The device.

        Returns:
            The tokens (T), and the batch.
        """
        assert len(pages) == len(starts) == len(query_lens), (len(pages), starts, query_lens)
        assert set(query_lens[: query_lens.count(1)]) <= {1}, "single-token sequences come first"
        seq_lens = [*map(add, starts, query_lens)]
        used_pages = [-(-seq_len // page_size) for seq_len in seq_lens]
        b = len(seq_lens)
        t = sum(query_lens)
        width = max(used_pages)
        sizes = [len(tokens), t, t, b * width, b + 1, b, len(logit_rows)]
        # Plain Python is used, because code that is in no cache costs most in a step.
        packed = array("q", tokens)
        for first, end in zip(starts, seq_lens, strict=True):
            packed.extend(range(first, end))
        _append_slots(packed, starts, seq_lens, pages, page_size)
        for seq_pages, count in zip(pages, used_pages, strict=True):
            packed.extend(seq_pages[:count])
            packed.frombytes(bytes(8 * (width - count)))
        for part in (accumulate(query_lens, initial=0), seq_lens, logit_rows):
            packed.extend(part)
        parts = _send(packed, device).split_with_sizes(sizes)
        ids, positions, slots, table, query_starts, lengths, rows = parts
        batch = cls(
            positions=positions,
            slots=slots,
            page_table=table.view(b, width),
            query_starts=query_starts,
            seq_lens=lengths,
            logit_rows=rows,
            query_lens_cpu=[*query_lens],
            seq_lens_cpu=seq_lens,
            wants_all=[*logit_rows] == [*range(t)],
        )
        return ids, batch


def _append_slots(
    packed: "array[int]",
    starts: Seq[int],
    seq_lens: Seq[int],
    pages: Seq[Seq[int]],
    page_size: int,
) -> None:
    """Append the slots of the new tokens of all sequences."""
    for seq_pages, first, end in zip(pages, starts, seq_lens, strict=True):
        first_page = first // page_size
        end_page = -(-end // page_size)
        first_slots = [page * page_size for page in seq_pages[first_page:end_page]]
        slots = [slot for start in first_slots for slot in range(start, start + page_size)]
        offset = first % page_size
        packed.extend(slots[offset:][: end - first])


def _send(packed: "array[int]", device: torch.device) -> Tensor:
    """Return integers as a tensor on a device, without waiting for it."""
    buffer = pinned(np.frombuffer(packed, np.int64), device)
    # A copy to mps must not be asynchronous: the buffer may be freed before it is read
    # (pytorch #189690).
    return buffer.to(device, non_blocking=device.type == "cuda")
