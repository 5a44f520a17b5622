"""The inputs of recorded decode steps: what the host schedules, and its copy on the device.

In: sequences with one new token each. Out: the tensors that `DecodeGraphs` records. Only what has
changed is copied to the device. What a step computes must not be known here.

Shapes: n rows of a step, R rows of the largest one, M pages of a row's table, S slots per page.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llama.common.allocation import pinned
from llama.engine.rows import Scheduled
from llama.ops.batch import Batch

_ROW_FIELDS = 5  # token, source, position, slot and length


@dataclass(frozen=True)
class DecodeStep:
    """A step of single tokens, as its sequences are when it is scheduled.

    Attributes:
        fields: (5, n) int64: token, source, position, slot and length of each row.
        pages: The pages of each row's sequence. Pages that are appended later do no harm.
    """

    fields: np.ndarray
    pages: list[Seq[int]]

    @classmethod
    def of(
        cls, tokens: Seq[int], sources: Seq[int], scheduled: Seq[Scheduled], page_size: int
    ) -> "DecodeStep":
        """Return the step of these items.

        Args:
            tokens: The token of each row; it is ignored where the row has a source.
            sources: The row of the previous step whose result is the token; -1 for none.
            scheduled: The items of the step, one per row.
            page_size: The slots of a page.
        """
        starts = np.array([item.start for item in scheduled], np.int64)
        last = [item.sequence.pages[item.start // page_size] for item in scheduled]
        fields = np.empty((_ROW_FIELDS, len(scheduled)), np.int64)
        fields[0] = tokens
        fields[1] = sources
        fields[2] = starts
        fields[3] = np.array(last, np.int64) * page_size + starts % page_size
        fields[4] = starts + 1
        return cls(fields, [item.sequence.pages for item in scheduled])

    @property
    def last_position(self) -> int:
        """The largest position of a row."""
        return int(self.fields[2].max())


class DecodeInputs:
    """The inputs of steps of all shapes, at fixed addresses.

    Each row has a token, the row of the previous step that gives its token, a position, a slot and
    a length. The page tables follow, one per row.

    All rows are copied to the device with each step. Of the tables only changes are copied, which
    is one page per row every S steps unless the rows move. Rows beyond the sequences compute token
    0 at position 0 of the null page.
    """

    def __init__(
        self, rows: int, width: int, *, page_size: int, null_page: int, device: torch.device
    ) -> None:
        self._rows = torch.zeros(_ROW_FIELDS, rows, dtype=torch.int64, device=device)
        self._table = torch.full((rows, width), null_page, device=device)
        self._arange = torch.arange(rows + 1, device=device)
        self.tensors = [self._rows, self._table, self._arange]
        self._page_size = page_size
        self._null_page = null_page
        # The fields of a row beyond the sequences, one below the other.
        null_slot = null_page * page_size
        self._unused_row = np.array([[0], [-1], [0], [null_slot], [1]], np.int64)
        self._shown: list[Seq[int]] = [()] * rows  # the pages in each row of the table
        self._num_shown = [0] * rows
        self.fill(DecodeStep.of((), (), (), page_size))

    def batch(self, rows: int, width: int) -> tuple[Tensor, Tensor, Batch]:
        """Return tokens, sources and the batch of the first rows, with tables of `width` pages."""
        tokens, sources, positions, slots, seq_lens = self._rows[:, :rows]
        starts = self._arange[: rows + 1]
        batch = Batch(
            positions,
            slots,
            self._table[:rows, :width],
            starts,
            seq_lens,
            starts[:-1],
            [1] * rows,
            [width * self._page_size] * rows,
        )
        return tokens, sources, batch

    def fill(self, step: DecodeStep) -> None:
        """Copy the inputs of a step to the device."""
        n = len(step.pages)
        rows = np.empty(self._rows.shape, np.int64)
        rows[:, :n] = step.fields
        rows[:, n:] = self._unused_row
        sent = pinned(rows, self._rows.device)
        self._rows.copy_(sent, non_blocking=True)
        self._update_tables(step.pages)

    def _update_tables(self, tables: list[Seq[int]]) -> None:
        """Copy the changed entries of the page tables to the device.

        A sequence's pages are the same array object as long as pages are only appended to it, so
        that a row with the same object needs its new pages only.
        """
        width = self._table.shape[1]
        indices: list[range] = []  # into the flattened table
        values: list[Seq[int]] = []
        for row, shown in enumerate(self._shown):
            pages: Seq[int] = tables[row] if row < len(tables) else ()
            is_same = shown is pages
            first = self._num_shown[row] if is_same else 0
            if is_same and first == len(pages):
                continue
            self._shown[row] = pages
            self._num_shown[row] = len(pages)
            new = pages[first:] or [self._null_page]
            start = row * width + first
            indices.append(range(start, start + len(new)))
            values.append(new)
        if indices:
            all_indices = np.concatenate(indices)
            all_values = np.concatenate(values)
            changes = np.array([all_indices, all_values], np.int64)
            device = self._table.device
            sent = pinned(changes, device).to(device, non_blocking=True)
            flat_table = self._table.view(-1)
            flat_table[sent[0]] = sent[1]
