"""The inputs of recorded steps: what the host schedules, and its copy on the device.

In: single tokens, among them drafts, and after them tokens of prompts. Out: the tensors that
`StepGraphs` records. Only what has changed is copied to the device. What a step computes must not
be known here.

Neighbouring tokens of one sequence are a group, which attention computes at once. To attention a
group is a sequence, whose last tokens it has. The tokens of a prompt are a group of any size.

Shapes: n rows of a step, m groups, r results, R rows of the largest step, M pages of a group's
table, S slots per page.
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
from llama.options.graphs.shapes import PROMPT_GROUPS

_ROW_FIELDS = 5  # token, source, position, slot, and the number of the adapter


@dataclass(frozen=True)
class PreparedStep:
    """A step of single tokens and of prompts, as its sequences are when it is scheduled.

    Attributes:
        fields: (5, n) int64: token, source, position, slot and adapter of each row.
        ends: (m) int64: the row after the last of each group.
        pages: The pages of each group's sequence. Pages that are appended later do no harm.
        num_prompts: How many of the groups, which are the last ones, are prompts.
        results: (r) The rows that have results; None for all of them.
    """

    fields: np.ndarray
    ends: np.ndarray
    pages: list[Seq[int]]
    num_prompts: int = 0
    results: Seq[int] | None = None

    @classmethod
    def of(
        cls,
        tokens: Seq[int],
        sources: Seq[int],
        scheduled: Seq[Scheduled],
        page_size: int,
        most: int = 1,
        adapters: Seq[int] | int = -1,
    ) -> "PreparedStep":
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

    @classmethod
    def with_prompts(
        cls,
        tokens: Seq[int],
        sources: Seq[int],
        items: Seq[Scheduled],
        page_size: int,
        results: Seq[int],
        adapters: Seq[int] | int = -1,
    ) -> "PreparedStep":
        """Return the step of items with any number of tokens, of which single ones come first.

        Args:
            tokens: The token of each row, as in `of`.
            sources: As in `of`.
            items: The items of the step, each of which is a group.
            page_size: The slots of a page.
            results: The rows that have results.
            adapters: As in `of`.
        """
        counts = [item.count for item in items]
        positions = [np.arange(item.start, item.start + item.count) for item in items]
        pages: list[Seq[int]] = [item.sequence.pages for item in items]
        slots = []
        for held, at in zip(pages, positions, strict=True):
            slots.append(np.array(held, np.int64)[at // page_size] * page_size + at % page_size)
        fields = np.empty((_ROW_FIELDS, len(tokens)), np.int64)
        fields[0] = tokens
        fields[1] = sources
        fields[2] = np.concatenate(positions)
        fields[3] = np.concatenate(slots)
        fields[4] = adapters
        num_prompts = len(counts) - counts.count(1)
        return cls(fields, np.cumsum(counts), pages, num_prompts, results)

    @property
    def num_single(self) -> int:
        """The rows before those of prompts."""
        num_rows: int = self.fields.shape[1]
        if self.num_prompts:
            first = len(self.ends) - self.num_prompts
            num_rows = self.ends[first - 1].item() if first else 0
        return num_rows

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


class StepInputs:
    """The inputs of steps of all shapes, at fixed addresses.

    Each row has a token, the row of the previous step that gives its token, a position, a slot and
    the number of its adapter. Each group has a length, a first row and a page table. There is room
    for as many groups as rows.

    All but the tables is copied to the device with each step. Of the tables only changes are
    copied, which is one page per group every S steps unless the groups move. Rows beyond the
    sequences compute token 0 at position 0 of the null page: each as a group, or after prompts all
    as one. The groups beyond these have no rows.

    Args:
        rows: R.
        width: M.
        most: The maximum number of rows of a group that is no prompt.
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
        # The fields of the rows, the groups' lengths, their first rows with the end of the last,
        # and the rows that have results
        sizes = [_ROW_FIELDS * rows, rows, rows + 1, rows]
        self._max_rows = rows
        self._counted = np.arange(rows + 1)
        self._fields = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        row_fields, self._lengths, self._starts, self._results = self._fields.split(sizes)
        self._rows = row_fields.view(_ROW_FIELDS, rows)
        self._table = torch.full((rows, width), null_page, device=device)
        self.tensors = [self._fields, self._table]
        self._page_size = page_size
        self._null_page = null_page
        self._blank = np.zeros(sum(sizes), np.int64)  # a step of unused rows, each with a result
        fields, lengths, _, results = self._parts_of(self._blank)
        # The fields of a row beyond the sequences, one below the other.
        fields[:] = np.array([[0], [-1], [0], [null_page * page_size], [-1]])
        lengths[:] = 1
        results[:] = self._counted[:-1]
        self._shown: list[Seq[int]] = []  # the pages in the first rows of the table
        self._num_shown: list[int] = []
        self.fill(PreparedStep.of((), (), (), page_size), rows)

    def _parts_of(self, host: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return views of the parts of `_fields` on the host."""
        rows = self._max_rows
        first = _ROW_FIELDS * rows
        return (
            host[:first].reshape(_ROW_FIELDS, rows),
            host[first : first + rows],
            host[first + rows : first + 2 * rows + 1],
            host[first + 2 * rows + 1 :],
        )

    def batch(
        self,
        rows: int,
        prompts: int,
        width: int,
        num_results: int,
        table: AdapterTable | None = None,
    ) -> tuple[Tensor, Tensor, Batch]:
        """Return tokens, sources and the batch of the first rows.

        Args:
            rows: The number of rows before those of prompts.
            prompts: The number of rows of prompts.
            width: The pages of each table.
            num_results: The number of rows that have results.
            table: The adapters that the rows may have; None where no row has one.
        """
        tokens, sources, positions, slots, adapters = self._rows[:, : rows + prompts]
        counts = [1] * rows + [prompts] * PROMPT_GROUPS if prompts else [self._most] * rows
        groups = len(counts)
        batch = Batch(
            positions,
            slots,
            self._table[:groups, :width],
            self._starts[: groups + 1],
            self._lengths[:groups],
            self._results[:num_results],
            counts,
            [width * self._page_size] * groups,
            adapters=None if table is None else AdapterRows((), adapters, table),
        )
        return tokens, sources, batch

    def fill(self, step: PreparedStep, rows: int, prompts: int = 0) -> None:
        """Copy the inputs of a step to the device.

        Args:
            step: The step.
            rows: The rows for what is no prompt, at least as many as it needs.
            prompts: The rows for prompts.
        """
        host = self._blank.copy()
        fields, lengths, starts, results = self._parts_of(host)
        n = step.num_single
        num_unused = rows - n
        num_prompt_rows = step.fields.shape[1] - n
        first = len(step.ends) - step.num_prompts  # the first group of a prompt
        fields[:, :n] = step.fields[:, :n]
        of_groups = step.lengths()
        lengths[:first] = of_groups[:first]
        starts[1 : first + 1] = step.ends[:first]
        starts[first + 1 : first + 1 + num_unused] = self._counted[n + 1 : rows + 1]
        starts[first + 1 + num_unused :] = rows
        if prompts:
            end = rows + step.num_prompts
            fields[:, rows : rows + num_prompt_rows] = step.fields[:, n:]
            lengths[rows:end] = of_groups[first:]
            starts[rows + 1 : end + 1] = step.ends[first:] + num_unused
            starts[end + 1 :] = rows + prompts
        if step.results is not None:
            wanted = np.array(step.results, np.int64)
            results[: len(wanted)] = np.where(wanted < n, wanted, wanted + num_unused)
        sent = pinned(host, self._fields.device)
        self._fields.copy_(sent, non_blocking=True)
        nobody: list[Seq[int]] = [()] * (rows - first)
        self._update_tables([*step.pages[:first], *nobody, *step.pages[first:]])

    def _update_tables(self, tables: list[Seq[int]]) -> None:
        """Copy the changed entries of the page tables to the device.

        A sequence's pages are the same array object as long as pages are only appended to it, so
        that a row with the same object needs its new pages only.
        """
        width = self._table.shape[1]
        num_more = len(tables) - len(self._shown)
        self._shown += [()] * num_more
        self._num_shown += [0] * num_more
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
        del self._shown[len(tables) :]
        del self._num_shown[len(tables) :]
        if indices:
            all_indices = np.concatenate(indices)
            all_values = np.concatenate(values)
            changes = np.array([all_indices, all_values], np.int64)
            device = self._table.device
            sent = pinned(changes, device).to(device, non_blocking=True)
            flat_table = self._table.view(-1)
            flat_table[sent[0]] = sent[1]
