"""Decode steps of a fixed shape, recorded once as CUDA graphs and replayed.

In: sequences with one new token each. Out: the logits of their rows and their top ids, in tensors
that the next step overwrites.

A step of an 8B model launches some 300 kernels; a replayed graph costs one launch (CUDA C++
Programming Guide, "CUDA Graphs"). The price is a fixed shape: a batch is padded to the next of a
few sizes with rows that write to a page that nobody reads. All shapes share their inputs and
outputs. A recorder decides what recording means, so that tests can record without a GPU.

Shapes: R rows of the bucket, M pages of a row's table, S slots per page, V vocabulary.
"""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llama.device import pinned
from llama.engine.recorder import CaptureError, Outputs, Recorder
from llama.engine.rows import Scheduled
from llama.engine.sampler import top_of_ranks
from llama.model.transformer import Transformer
from llama.ops.batch import Batch
from llama.ops.sample import choose_ids

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # then multiples of 64
_MIN_TABLE_WIDTH = 64  # pages; wider tables are powers of two times it
_ROW_FIELDS = 5  # token, source, position, slot and length

_Shape = tuple[int, int, bool]  # rows, pages of a row's table, and whether logits are wanted


class Decoded(NamedTuple):
    """The results of a step of R rows.

    Attributes:
        ids: The top token of each row, (R) int64, as `sampler.sample` computes it.
        logits: (R, V) float32; None where only ids were wanted.
    """

    ids: Tensor
    logits: Tensor | None = None


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
        self.fill((), (), ())

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

    def fill(self, tokens: Seq[int], sources: Seq[int], scheduled: Seq[Scheduled]) -> None:
        """Copy the inputs of a step to the device.

        Args:
            tokens: The token of each row; it is ignored where the row has a source.
            sources: The row of the previous step whose result is the token; -1 for none.
            scheduled: The items of the step, one per row.
        """
        n = len(scheduled)
        size = self._page_size
        tables: list[Seq[int]] = [item.sequence.pages for item in scheduled]
        starts = np.array([item.start for item in scheduled], np.int64)
        pages = np.array([item.sequence.pages[item.start // size] for item in scheduled], np.int64)
        rows = np.empty(self._rows.shape, np.int64)
        rows[:, n:] = self._unused_row
        rows[0, :n] = tokens
        rows[1, :n] = sources
        rows[2, :n] = starts
        rows[3, :n] = pages * size + starts % size
        rows[4, :n] = starts + 1
        sent = pinned(rows, self._rows.device)
        self._rows.copy_(sent, non_blocking=True)
        self._update_tables(tables)

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


class DecodeGraphs:
    """The graphs of one model and KV cache, whose last page belongs to no sequence.

    With the attention kernel a shape depends on the number of rows alone. PyTorch's attention reads
    the whole width of the page tables, so that there is a shape for each of a few widths.

    Args:
        model: The model.
        kv_cache: Its KV cache, with one page more than sequences may have.
        recorder: Records the steps.
        last_ids: The ids of the previous step, row by row, which the caller updates in place.
        recorded_rows: The rows up to which `record_all` records all shapes; a shape of more rows is
            recorded when it is first needed. By default max_batch_size.
    """

    def __init__(
        self,
        model: Transformer,
        kv_cache: Tensor,
        recorder: Recorder,
        last_ids: Tensor,
        recorded_rows: int | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._recorder = recorder
        self._recorded_rows = recorded_rows or model.params.max_batch_size
        self._last_ids = last_ids
        self._page_size = kv_cache.shape[3]
        self._max_pages = -(-model.params.max_seq_len // self._page_size)
        max_rows = len(last_ids)
        device = kv_cache.device
        self._inputs = DecodeInputs(
            max_rows,
            self._max_pages,
            page_size=self._page_size,
            null_page=kv_cache.shape[2] - 1,
            device=device,
        )
        # All graphs write to these outputs, as one of them runs at a time.
        self._ids = torch.zeros_like(last_ids)
        logits_shape = (max_rows, model.vocab_size)
        self._logits = torch.empty(logits_shape, dtype=torch.float32, device=device)
        # The widths of tables, in pages. With the attention kernel there is one.
        self._widths = [self._max_pages]
        if "attention" not in model.kernels.names:
            self._widths = _table_widths(self._max_pages)
        self._graphs: dict[_Shape, tuple[Decoded, Callable[[], None]]] = {}
        self._path: object = None  # the model's execution path when the graphs were recorded

    def takes(self, scheduled: Seq[Scheduled]) -> bool:
        """Return whether a step of these items, single tokens that sample, can be replayed.

        It can unless there are too many, or the model runs in another way than when it was
        recorded: a replay calls no hook, and reads the weights where they were.

        Raises:
            RuntimeError: The model of one of several ranks has changed. Either all ranks replay a
                step or none (NCCL, "CUDA Graphs").
        """
        if len(scheduled) > len(self._ids):
            return False
        path = self._model.execution_path()
        is_hooked = path is None and self._kv_cache.is_cuda
        takes = not is_hooked and (not self._graphs or path is self._path)
        if not takes and not self._model.parallel.is_alone:
            raise RuntimeError(
                "a hook or another change of a rank's model, whose steps are recorded: build with "
                "LLAMA_GPU_KERNELS=none to look into the model of several ranks"
            )
        return takes

    def run(
        self,
        tokens: Seq[int],
        sources: Seq[int],
        scheduled: Seq[Scheduled],
        *,
        wants_logits: bool,
        is_eager: bool = False,
    ) -> Decoded:
        """Run one step and return its results; rows beyond those of `scheduled` mean nothing.

        Args:
            tokens: The token of each row; it is ignored where the row has a source.
            sources: The row of the previous step whose result is the token; -1 for none.
            scheduled: The items of the step, one per row.
            wants_logits: Whether logits are computed, or ids only.
            is_eager: Run the same step of the same shape operator by operator.

        Raises:
            CaptureError: The shape cannot be recorded.
        """
        rows = bucket_of(len(scheduled))
        width = self._width_of(scheduled)
        shape = (rows, width, wants_logits)
        self._inputs.fill(tokens, sources, scheduled)
        if is_eager:
            return Decoded(*self._step(*shape))
        if shape not in self._graphs:
            self._graphs[shape] = self._record(*shape)
        decoded, replay = self._graphs[shape]
        replay()
        return decoded

    def _width_of(self, scheduled: Seq[Scheduled]) -> int:
        last_position = max(item.start for item in scheduled)
        return next(width for width in self._widths if width * self._page_size > last_position)

    def _shapes(self) -> list[_Shape]:
        """Return all shapes up to `recorded_rows`, the largest first."""
        buckets = {bucket_of(n + 1) for n in range(self._recorded_rows)}
        # Several ranks exchange the top ids of greedy rows, and need no logits for that.
        is_alone = self._model.parallel.is_alone
        wants_logits = (True,) if is_alone else (True, False)
        descending = sorted(buckets, reverse=True)
        return list(itertools.product(descending, reversed(self._widths), wants_logits))

    @torch.inference_mode()
    def num_bytes(self) -> int:
        """Return the device memory that all graphs will take, beside what the recorder has now.

        Two graphs are recorded. The first one allocates the memory that all of the recorder share;
        the second one takes the driver's own memory of a graph, as each further one does. They stay
        until the recorder is closed.
        """
        shapes = self._shapes()
        used = 0
        for shape in (*shapes, *shapes)[:2]:
            free = self._recorder.free_bytes()
            self._record(*shape)
            used = free - self._recorder.free_bytes()
        return used * len(shapes) + self._logits.nbytes

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record all shapes.

        Raises:
            CaptureError: A shape cannot be recorded.
        """
        for shape in self._shapes():
            self._graphs[shape] = self._record(*shape)

    def _record(
        self, rows: int, width: int, wants_logits: bool
    ) -> tuple[Decoded, Callable[[], None]]:
        if not self._graphs:
            self._path = self._model.execution_path()
        shared = self._ids, self._logits

        def step() -> Outputs:
            results = self._step(rows, width, wants_logits)
            outputs = []
            for tensor, result in zip(shared, results, strict=False):
                used_rows = tensor[:rows]
                outputs.append(used_rows.copy_(result))
            return tuple(outputs)

        inputs = [*self._inputs.tensors, self._kv_cache, self._last_ids, *shared]
        try:
            outputs, replay = self._recorder.record(step, inputs)
        except Exception as e:
            # PyTorch or the driver refused, or a kernel does not fit.
            raise CaptureError(f"a step of {rows} rows was not captured: {e}") from e
        return Decoded(*outputs), replay

    def _step(self, rows: int, width: int, wants_logits: bool) -> Outputs:
        """Compute one step of a fixed shape, which is what a graph captures.

        It can run twice: it writes keys and values, and nothing that it reads before.
        """
        tokens, sources, batch = self._inputs.batch(rows, width)
        known = self._last_ids[sources.clamp(min=0)]
        tokens = torch.where(sources < 0, tokens, known)
        hidden = self._model.hidden_states(tokens, batch, self._kv_cache)
        if not wants_logits:
            return (top_of_ranks(self._model, hidden),)
        logits = self._model.logits(hidden)
        greedy = [None] * rows
        ids = choose_ids(logits, greedy, (), (), self._model.kernels)
        return ids, logits

    def close(self) -> None:
        """Free all graphs."""
        self._graphs.clear()
        self._recorder.close()


def _table_widths(max_pages: int) -> list[int]:
    """Return the widths of page tables, ascending; the last one has all pages of a sequence."""
    widths = []
    width = _MIN_TABLE_WIDTH
    while width < max_pages:
        widths.append(width)
        width *= 2
    return [*widths, max_pages]


def bucket_of(num_rows: int) -> int:
    """Return the rows of the graph in which `num_rows` sequences run."""
    for rows in _BUCKETS:
        if rows >= num_rows:
            return rows
    return -(-num_rows // 64) * 64
