"""The inputs of recorded decode steps: what the host schedules, and its copy on the device.

In: single tokens, among them drafts. Out: the tensors that `DecodeGraphs` records. Only what has
changed is copied to the device. What a step computes must not be known here.

Neighbouring tokens of one sequence are a group, which attention computes at once. To attention a
group is a sequence, whose last tokens it has.

Shapes: n rows of a step, m groups, R rows of the largest step, M pages of a group's table, S slots
per page.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llama.common.allocation import pinned
from llama.engine.rows import Scheduled
from llama.ops.adapters import AdapterRows, AdapterTable
from llama.ops.batch import Batch

_ROW_FIELDS = 5  # token, source, position, slot, and the number of the adapter


@dataclass(frozen=True)
class DecodeStep:
    """A step of single tokens, as its sequences are when it is scheduled.

    Attributes:
        fields: (5, n) int64: token, source, position, slot and adapter of each row.
        ends: (m) int64: the row after the last of each group.
        pages: The pages of each group's sequence. Pages that are appended later do no harm.
    """

    fields: np.ndarray
    ends: np.ndarray
    pages: list[Seq[int]]

    @classmethod
    def of(
        cls,
        tokens: Seq[int],
        sources: Seq[int],
        scheduled: Seq[Scheduled],
        page_size: int,
        most: int = 1,
        adapters: Seq[int] | int = -1,
    ) -> "DecodeStep":
        """Return the step of these items.

        Args:
            tokens: The token of each row; it is ignored where the row has a source.
            sources: The row of the previous step whose result is the token; -1 for none.
            scheduled: The items of the step, one per row.
            page_size: The slots of a page.
            most: The maximum number of rows of a group.
            adapters: The number of each row's adapter, or of all; -1 for none.
        """
        starts = np.array([item.start for item in scheduled], np.int64)
        last = [item.sequence.pages[item.start // page_size] for item in scheduled]
        fields = np.empty((_ROW_FIELDS, len(scheduled)), np.int64)
        fields[0] = tokens
        fields[1] = sources
        fields[2] = starts
        fields[3] = np.array(last, np.int64) * page_size + starts % page_size
        fields[4] = adapters
        pages: list[Seq[int]] = [item.sequence.pages for item in scheduled]
        if most == 1:
            return cls(fields, np.arange(1, len(pages) + 1), pages)
        return cls(fields, *_groups(pages, starts.tolist(), most))

    @property
    def last_position(self) -> int:
        """The largest position of a row."""
        return int(self.fields[2].max())

    @property
    def has_adapters(self) -> bool:
        """Whether a row has an adapter."""
        return bool((self.fields[4] >= 0).any())

    def lengths(self) -> np.ndarray:
        """Return the tokens of each group's sequence up to its last row: (m)."""
        lengths: np.ndarray = self.fields[2][self.ends - 1] + 1
        return lengths


def _groups(
    pages: list[Seq[int]], starts: list[int], most: int
) -> tuple[np.ndarray, list[Seq[int]]]:
    """Return the ends and the pages of the groups of at most `most` rows.

    Args:
        pages: The pages of each row's sequence: the same object for the rows of one sequence.
        starts: The position of each row.
        most: The maximum number of rows of a group.
    """
    ends: list[int] = []
    found: list[Seq[int]] = []
    first = 0  # the first row of the last group
    for row, start in enumerate(starts):
        is_next = found and found[-1] is pages[row] and start == starts[row - 1] + 1
        if is_next and row - first < most:
            ends[-1] = row + 1
        else:
            first = row
            ends.append(row + 1)
            found.append(pages[row])
    return np.array(ends, np.int64), found


class DecodeInputs:
    """The inputs of steps of all shapes, at fixed addresses.

    Each row has a token, the row of the previous step that gives its token, a position, a slot and
    the number of its adapter. Each group has a length, a first row and a page table. There is room
    for as many groups as rows.

    All but the tables is copied to the device with each step. Of the tables only changes are
    copied, which is one page per group every S steps unless the groups move. Rows beyond the
    sequences compute token 0 at position 0 of the null page, each as a group; the groups beyond
    these have no rows.

    Args:
        rows: R.
        width: M.
        most: The maximum number of rows of a group.
        page_size: S.
        null_page: The page of unused rows.
        device: The device of the tensors.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        most: int,
        page_size: int,
        null_page: int,
        device: torch.device,
    ) -> None:
        self._most = most
        self._max_rows = rows
        # The fields of the rows, the groups' lengths, and their first rows with the end of the last
        sizes = [_ROW_FIELDS * rows, rows, rows + 1]
        self._fields = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        row_fields, self._lengths, self._starts = self._fields.split(sizes)
        self._rows = row_fields.view(_ROW_FIELDS, rows)
        self._table = torch.full((rows, width), null_page, device=device)
        self._arange = torch.arange(rows, device=device)
        self.tensors = [self._fields, self._table, self._arange]
        self._page_size = page_size
        self._null_page = null_page
        # The fields of a row beyond the sequences, one below the other.
        null_slot = null_page * page_size
        self._unused_row = np.array([[0], [-1], [0], [null_slot], [-1]], np.int64)
        self._shown: list[Seq[int]] = [()] * rows  # the pages in each row of the table
        self._num_shown = [0] * rows
        self.fill(DecodeStep.of((), (), (), page_size), rows)

    def batch(
        self, rows: int, width: int, table: AdapterTable | None = None
    ) -> tuple[Tensor, Tensor, Batch]:
        """Return tokens, sources and the batch of the first rows.

        Args:
            rows: The number of rows.
            width: The pages of each table.
            table: The adapters that the rows may have; None where no row has one.
        """
        tokens, sources, positions, slots, adapters = self._rows[:, :rows]
        batch = Batch(
            positions,
            slots,
            self._table[:rows, :width],
            self._starts[: rows + 1],
            self._lengths[:rows],
            self._arange[:rows],
            [self._most] * rows,
            [width * self._page_size] * rows,
            adapters=None if table is None else AdapterRows((), adapters, table),
        )
        return tokens, sources, batch

    def fill(self, step: DecodeStep, rows: int) -> None:
        """Copy the inputs of a step of at most `rows` rows to the device."""
        n = step.fields.shape[1]
        m = len(step.ends)
        num_unused = rows - n
        num_fields = _ROW_FIELDS * self._max_rows
        host = np.zeros(num_fields + 2 * self._max_rows + 1, np.int64)
        fields = host[:num_fields].reshape(_ROW_FIELDS, -1)
        fields[:, :n] = step.fields
        fields[:, n:] = self._unused_row
        lengths = host[num_fields : num_fields + self._max_rows]
        starts = host[num_fields + self._max_rows :]
        lengths[:m] = step.lengths()
        lengths[m : m + num_unused] = 1
        starts[1 : m + 1] = step.ends
        starts[m + 1 : m + 1 + num_unused] = np.arange(n + 1, rows + 1)
        starts[m + 1 + num_unused :] = rows
        sent = pinned(host, self._fields.device)
        self._fields.copy_(sent, non_blocking=True)
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
