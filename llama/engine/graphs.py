"""Decode steps of a fixed shape, recorded once and replayed: CUDA graphs, and why they may be used.

In: sequences with one new token each. Out: the logits of their rows and their top ids, in tensors
that the next step overwrites. A step of an 8B model launches some 300 kernels; a replayed graph
costs one launch (CUDA's programming guide, "CUDA Graphs"). The price is a fixed shape: a batch is
filled up to the next of a few sizes with rows that write to a page that nobody reads. All shapes
share their inputs and outputs. A recorder decides what recording means; tests have a tape.

Shapes: R rows of the bucket, M pages of a row's table, S slots per page, V vocabulary.
"""

import atexit
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from llama.device import pinned
from llama.engine.rows import Scheduled
from llama.engine.sampler import top_of_ranks
from llama.model.transformer import Transformer
from llama.ops.batch import Batch
from llama.ops.sample import choose_ids

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # then multiples of 64
_LEAST_PAGES = 64  # the narrowest page table; wider ones are powers of two times it
_HEAD = 5  # numbers of a row beside its page table

Outputs = tuple[Tensor, ...]
_Shape = tuple[int, int, bool]  # rows, pages of a row's table, and whether logits are wanted


class Recorder(Protocol):
    """Turns a function into one that repeats its work on the device: it reads and writes tensors
    that stay where they are, the model's and `inputs`, and each replay writes what it returns."""

    def record(
        self, function: Callable[[], Outputs], inputs: Seq[Tensor]
    ) -> tuple[Outputs, Callable[[], None]]: ...

    def free_bytes(self) -> int:
        """Of the device, as the driver counts them."""

    def close(self) -> None: ...


class CaptureError(RuntimeError):
    """A step could not be recorded; it can still be run operator by operator."""


class CudaRecorder:
    """CUDA graphs of one device, which share one pool of memory: one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # Before the process groups end, whose collectives the graphs may hold: last in, first out.
        close = weakref.WeakMethod(self.close)
        atexit.register(lambda: (alive := close()) and alive())

    def record(
        self, function: Callable[[], Outputs], inputs: Seq[Tensor]
    ) -> tuple[Outputs, Callable[[], None]]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()  # what is made at first use (workspaces, modules) cannot be captured
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # nccl's watchdog calls CUDA from its own thread, which must not end the capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            outputs = function()
        self._graphs.append(graph)
        return outputs, graph.replay

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def close(self) -> None:
        """Free the graphs: before the process groups whose collectives they hold."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # one that nobody holds cannot be used again


class Decoded(NamedTuple):
    """Of R rows; logits are None where the ids are all that was asked for."""

    ids: Tensor  # (R) int64, the top token of each row, as `sampler.sample` has it
    logits: Tensor | None = None  # (R, V) float32


class DecodeInputs:
    """What steps of all shapes read, at fixed addresses: of each row its token, the row of the step
    before that gives it, its position, slot and length; and the page tables, one below the other.

    The rows are sent with each step; of the tables what has changed: one page a row every S steps,
    unless the rows move. Rows beyond the sequences compute token 0 at position 0 of the null page.
    """

    def __init__(
        self, rows: int, width: int, *, page_size: int, null_page: int, device: torch.device
    ) -> None:
        self._rows = torch.zeros(_HEAD, rows, dtype=torch.int64, device=device)
        self._table = torch.full((rows, width), null_page, device=device)
        self._numbers = torch.arange(rows + 1, device=device)
        self.tensors = [self._rows, self._table, self._numbers]
        self._page_size, self._null_page = page_size, null_page
        self._held: list[Seq[int]] = [()] * rows  # the pages that each row of the table shows,
        self._num_held = [0] * rows  # and how many of them
        self.fill((), (), ())

    def batch(self, rows: int, width: int) -> tuple[Tensor, Tensor, Batch]:
        """Tokens, sources and the rest of the first rows, with tables of `width` pages."""
        tokens, sources, positions, slots, seq_lens = self._rows[:, :rows]
        table, starts = self._table[:rows, :width], self._numbers[: rows + 1]
        lists = [1] * rows, [width * self._page_size] * rows
        batch = Batch(positions, slots, table, starts, seq_lens, starts[:-1], *lists)
        return tokens, sources, batch

    def fill(self, tokens: Seq[int], sources: Seq[int], scheduled: Seq[Scheduled]) -> None:
        """tokens: of each row, unless its source, a row of the step before, is not -1."""
        n, size = len(scheduled), self._page_size
        starts = np.array([item.start for item in scheduled], np.int64)
        pages = np.array([x.sequence.pages[x.start // size] for x in scheduled], np.int64)
        rows = np.empty(self._rows.shape, np.int64)
        rows[:, n:] = [[0], [-1], [0], [self._null_page * size], [1]]
        rows[:, :n] = tokens, sources, starts, pages * size + starts % size, starts + 1
        self._rows.copy_(pinned(rows, self._rows.device), non_blocking=True)
        self._show([*(item.sequence.pages for item in scheduled)])

    def _show(self, tables: list[Seq[int]]) -> None:
        """A sequence's pages are one array as long as they are only appended to."""
        width, where, pages = self._table.shape[1], list[range](), list[Seq[int]]()
        for row, held in enumerate(self._held):
            now: Seq[int] = tables[row] if row < len(tables) else ()
            first = self._num_held[row] if held is now else 0
            if held is now and first == len(now):
                continue
            self._held[row], self._num_held[row] = now, len(now)
            shown = now[first:] or [self._null_page]
            where.append(range(row * width + first, row * width + first + len(shown)))
            pages.append(shown)
        if where:
            changed = np.array([np.concatenate(where), np.concatenate(pages)], np.int64)
            device = self._table.device
            sent = pinned(changed, device).to(device, non_blocking=True)
            self._table.view(-1)[sent[0]] = sent[1]


class DecodeGraphs:
    """The graphs of one model and KV cache, the last page of which no sequence gets.

    With the attention kernel the number of rows alone makes a shape: `record_all` records all.
    torch's body reads page tables as wide as they are: each of a few widths is recorded when it is
    first needed. last_ids: of the step before, row by row, which the caller keeps there.
    """

    def __init__(
        self, model: Transformer, kv_cache: Tensor, recorder: Recorder, last_ids: Tensor
    ) -> None:
        self._model, self._kv_cache, self._recorder = model, kv_cache, recorder
        self._last_ids = last_ids
        self._page_size = kv_cache.shape[3]
        self._most_pages = -(-model.params.max_seq_len // self._page_size)
        most = len(last_ids)
        null_page, device = kv_cache.shape[2] - 1, kv_cache.device
        self._inputs = DecodeInputs(
            most, self._most_pages, page_size=self._page_size, null_page=null_page, device=device
        )
        # Of all graphs: one of them runs at a time.
        self._ids = torch.zeros_like(last_ids)
        self._logits = torch.empty(most, model.vocab_size, dtype=torch.float32, device=device)
        self._has_one_width = "attention" in model.kernels.names
        self._graphs: dict[_Shape, tuple[Decoded, Callable[[], None]]] = {}
        self._path: object = None  # of the model, when they were recorded

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
        """The rows of `scheduled` come first; what the graph holds beyond them means nothing.

        is_eager: the same step of the same shape, operator by operator. CaptureError where the
        shape cannot be recorded.
        """
        shape = bucket_of(len(scheduled)), self._width_of(scheduled), wants_logits
        self._inputs.fill(tokens, sources, scheduled)
        if is_eager:
            return Decoded(*self._step(*shape))
        if shape not in self._graphs:
            self._graphs[shape] = self._record(*shape)
        decoded, replay = self._graphs[shape]
        replay()
        return decoded

    def _width_of(self, scheduled: Seq[Scheduled]) -> int:
        if self._has_one_width:
            return self._most_pages
        longest, width = max(item.start for item in scheduled) + 1, _LEAST_PAGES
        while width * self._page_size < longest:
            width *= 2
        return min(width, self._most_pages)

    def _shapes(self) -> list[_Shape]:
        """All that steps have, the largest first; none where their tables' widths matter."""
        if not self._has_one_width:
            return []
        most = self._model.params.max_batch_size
        buckets = sorted({bucket_of(n + 1) for n in range(most)}, reverse=True)
        kinds = (True, False)[: 1 + (not self._model.parallel.is_alone)]
        return [(rows, self._most_pages, wants) for rows in buckets for wants in kinds]

    @torch.inference_mode()
    def num_bytes(self) -> int:
        """What all graphs will take of the device: two are recorded, and freed again. The first
        makes the memory that all share; the other adds what the driver keeps of one."""
        shapes, taken = self._shapes(), [0]
        for shape in shapes[:2]:
            free = self._recorder.free_bytes()
            self._record(*shape)
            taken.append(free - self._recorder.free_bytes())
        self.close()
        return sum(taken[:2]) + taken[-1] * (len(shapes) - 1) + self._logits.nbytes

    @torch.inference_mode()
    def record_all(self) -> None:
        """CaptureError where a shape cannot be recorded."""
        for shape in self._shapes():
            self._graphs[shape] = self._record(*shape)

    def _record(self, rows: int, width: int, wants_logits: bool) -> tuple[Decoded, Callable]:
        self._path = self._path if self._graphs else self._model.execution_path()
        kept = self._ids, self._logits

        def step() -> Outputs:
            made = self._step(rows, width, wants_logits)
            return tuple(x[:rows].copy_(new) for x, new in zip(kept, made, strict=False))

        inputs = [*self._inputs.tensors, self._kv_cache, self._last_ids, *kept]
        try:
            outputs, replay = self._recorder.record(step, inputs)
        except Exception as e:  # of torch, the driver, or a kernel that does not fit
            raise CaptureError(f"a step of {rows} rows was not captured: {e}") from e
        return Decoded(*outputs), replay

    def _step(self, rows: int, width: int, wants_logits: bool) -> Outputs:
        """The work of one step, of fixed shape: what is captured.

        It can be run twice: it writes keys and values, and nothing that it reads before.
        """
        tokens, sources, batch = self._inputs.batch(rows, width)
        known = self._last_ids[sources.clamp(min=0)]
        tokens = torch.where(sources < 0, tokens, known)
        hidden = self._model.hidden_states(tokens, batch, self._kv_cache)
        if not wants_logits:
            return (top_of_ranks(self._model, hidden),)
        logits = self._model.logits(hidden)
        return choose_ids(logits, [None] * rows, (), (), self._model.kernels), logits

    def close(self) -> None:
        self._graphs.clear()
        self._recorder.close()


def bucket_of(num_rows: int) -> int:
    """The rows of the graph that `num_rows` sequences run in."""
    return next((rows for rows in _ROWS if rows >= num_rows), -(-num_rows // 64) * 64)
