"""Decode steps of a fixed shape, recorded once and replayed: CUDA graphs, and why they may be used.

In: sequences with one new token each. Out: the logits of their rows and their top ids, in tensors
that the next step overwrites. A step of an 8B model launches some 300 kernels, each of which costs
Python and the driver more time than the GPU; a replayed graph costs one launch (CUDA's programming
guide, "CUDA Graphs"). The price is a fixed shape: a batch is filled up to the next of a few sizes
with rows that write to a page that nobody reads.

A recorder decides what recording means: torch.cuda.graph here; tests have a tape of operators. It
knows nothing of requests or sampling parameters.

Shapes: R rows of the bucket, M pages of a row's table, S slots per page, V vocabulary.
"""

import atexit
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from llama.engine.rows import SAMPLE_ONE
from llama.engine.scheduler import Scheduled
from llama.model.transformer import Transformer
from llama.ops.batch import Batch

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # then multiples of 64
_LEAST_PAGES = 64  # the narrowest page table; wider ones are powers of two times it
_HEAD = 5  # numbers of a row beside its page table

Outputs = tuple[Tensor, ...]


class Recorder(Protocol):
    """Turns a function without arguments into one that repeats its work on the device.

    The function reads and writes tensors that stay where they are: the model's and `inputs`. What
    it returns is written again by each replay, at the same addresses, and by nothing before it.
    """

    def record(
        self, function: Callable[[], Outputs], inputs: Seq[Tensor]
    ) -> tuple[Outputs, Callable[[], None]]: ...

    def close(self) -> None: ...


class CaptureError(RuntimeError):
    """A step could not be recorded; it can still be run operator by operator."""


class CudaRecorder:
    """CUDA graphs of one device, which share one pool of memory: one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # Before the process groups end, whose collectives the graphs may hold: last in, first out.
        atexit.register(_close, weakref.ref(self))

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

    def close(self) -> None:
        """Free the graphs: before the process groups whose collectives they hold."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


def _close(recorder: "weakref.ref[CudaRecorder]") -> None:
    if (alive := recorder()) is not None:
        alive.close()


@dataclass(frozen=True)
class Decoded:
    """Of R rows; logits are None where the ids are all that was asked for."""

    ids: Tensor  # (R) int64, the top token of each row, as `sampler.sample` has it
    logits: Tensor | None  # (R, V) float32


class StaticBatch:
    """A decode batch of R rows at fixed addresses, and its image on the host.

    Rows beyond the sequences compute token 0 at position 0 of the null page, all alike. A page
    table is written where it changed: one page a row every S steps, unless the rows move.
    """

    def __init__(
        self, rows: int, width: int, *, page_size: int, null_page: int, device: torch.device
    ) -> None:
        sizes = [rows] * _HEAD + [rows * width]
        buffer = torch.zeros(sum(sizes), dtype=torch.int64)
        parts = [part.numpy() for part in buffer.split(sizes)]
        self._tokens, self._sources, self._positions, self._slots, self._seq_lens, table = parts
        self._table = table.reshape(rows, width)
        self._page_size, self._null_page = page_size, null_page
        self._host = buffer
        self._device = buffer if device.type == "cpu" else buffer.to(device)
        self._staging = [
            torch.empty_like(buffer, pin_memory=True) for _ in range(2 * (device.type == "cuda"))
        ]
        self.tokens, self.sources, positions, slots, seq_lens, pages = self._device.split(sizes)
        self.batch = Batch(
            positions=positions,
            slots=slots,
            page_table=pages.view(rows, width),
            query_starts=torch.arange(rows + 1, device=device),
            seq_lens=seq_lens,
            logit_rows=torch.arange(rows, device=device),
            query_lens_cpu=[1] * rows,
            seq_lens_cpu=[width * page_size] * rows,
        )
        self._held: list[object] = [None] * rows  # the pages that each row of the table shows
        self._num_held = [0] * rows
        self._num_used = rows
        self._set_unused(0)

    def tensors(self) -> list[Tensor]:
        return [self._device, self.batch.query_starts, self.batch.logit_rows]

    def fill(self, tokens: Seq[int], sources: Seq[int], scheduled: Seq[Scheduled]) -> None:
        """tokens: of each row, unless its source, a row of the step before, is not -1."""
        n = len(scheduled)
        starts = np.array([item.start for item in scheduled], np.int64)
        self._tokens[:n], self._sources[:n] = tokens, sources
        self._positions[:n], self._seq_lens[:n] = starts, starts + 1
        for row, item in enumerate(scheduled):
            self._show_pages(row, item.sequence.pages)
        page, offset = np.divmod(starts, self._page_size)
        self._slots[:n] = self._table[np.arange(n), page] * self._page_size + offset
        if n < self._num_used:
            self._set_unused(n)
        self._num_used = n
        self._upload()

    def _show_pages(self, row: int, pages: Seq[int]) -> None:
        """A sequence's pages are one array as long as they are only appended to."""
        first = self._num_held[row] if self._held[row] is pages else 0
        if first < len(pages) or self._held[row] is not pages:
            self._table[row, first : len(pages)] = pages[first:]
            self._held[row], self._num_held[row] = pages, len(pages)

    def _set_unused(self, first: int) -> None:
        self._tokens[first:], self._sources[first:], self._positions[first:] = 0, -1, 0
        self._seq_lens[first:], self._slots[first:] = 1, self._null_page * self._page_size
        self._table[first:, 0] = self._null_page
        rows = len(self._held) - first
        self._held[first:], self._num_held[first:] = [None] * rows, [0] * rows

    def _upload(self) -> None:
        if not self._staging:
            if self._device is not self._host:
                self._device.copy_(self._host)
            return
        # Two of them: the copy of the step before this one may not have been made yet.
        self._staging.reverse()
        self._staging[0].copy_(self._host)
        self._device.copy_(self._staging[0], non_blocking=True)


class DecodeGraphs:
    """The graphs of one model and KV cache, recorded when a shape is first needed.

    The last page of the cache must be one that no sequence gets. choose: logits (R, V) -> top ids
    (R); choose_from_share: hidden (R, E) -> the same, without whole logits. last_ids: the ids that
    the step before sampled, row by row, which the caller keeps there.
    """

    def __init__(
        self,
        model: Transformer,
        kv_cache: Tensor,
        recorder: Recorder,
        *,
        last_ids: Tensor,
        choose: Callable[[Tensor], Tensor],
        choose_from_share: Callable[[Tensor], Tensor],
    ) -> None:
        self._model, self._kv_cache, self._recorder = model, kv_cache, recorder
        self._last_ids = last_ids
        self._choose, self._choose_from_share = choose, choose_from_share
        self._null_page, self._page_size = kv_cache.shape[2] - 1, kv_cache.shape[3]
        self._most_pages = -(-model.params.max_seq_len // self._page_size)
        self._batches: dict[tuple[int, int], StaticBatch] = {}
        self._graphs: dict[tuple[int, int, bool], tuple[Decoded, Callable[[], None]]] = {}
        self._path: object = None  # of the model, when they were recorded

    def takes(self, scheduled: Seq[Scheduled]) -> bool:
        """Whether this step is of a kind that is recorded, and the model runs as it did then: a
        replay calls no hook, and reads the weights where they were."""
        if not is_decode(scheduled):
            return False
        path = self._model.execution_path()
        is_hooked = path is None and self._kv_cache.is_cuda
        return not is_hooked and (not self._graphs or path is self._path)

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
        rows, width = self._shape_of(scheduled)
        batch = self._filled((rows, width), tokens, sources, scheduled)
        if is_eager:
            return _decoded(self._step(batch, wants_logits))
        key = rows, width, wants_logits
        if key not in self._graphs:
            self._graphs[key] = self._record(batch, wants_logits)
        decoded, replay = self._graphs[key]
        replay()
        return decoded

    def _shape_of(self, scheduled: Seq[Scheduled]) -> tuple[int, int]:
        longest = max(item.start for item in scheduled) + 1
        width = _width_of(-(-longest // self._page_size), self._most_pages)
        return bucket_of(len(scheduled)), width

    def _filled(
        self, shape: tuple[int, int], tokens: Seq[int], sources: Seq[int], scheduled: Seq[Scheduled]
    ) -> StaticBatch:
        batch = self._batches.get(shape)
        if batch is None:
            batch = self._batches[shape] = StaticBatch(
                *shape,
                page_size=self._page_size,
                null_page=self._null_page,
                device=self._kv_cache.device,
            )
        batch.fill(tokens, sources, scheduled)
        return batch

    def _record(self, batch: StaticBatch, wants_logits: bool) -> tuple[Decoded, Callable]:
        self._path = self._path if self._graphs else self._model.execution_path()
        inputs = [*batch.tensors(), self._kv_cache, self._last_ids]
        try:
            outputs, replay = self._recorder.record(lambda: self._step(batch, wants_logits), inputs)
        except RuntimeError as e:
            raise CaptureError(f"a step of {len(batch.tokens)} rows was not captured: {e}") from e
        return _decoded(outputs), replay

    def _step(self, batch: StaticBatch, wants_logits: bool) -> Outputs:
        """The work of one step, of fixed shape: what is captured.

        It can be run twice: it writes keys and values, and nothing that it reads before.
        """
        known = self._last_ids[batch.sources.clamp(min=0)]
        tokens = torch.where(batch.sources < 0, batch.tokens, known)
        hidden = self._model.hidden_states(tokens, batch.batch, self._kv_cache)
        if not wants_logits:
            return (self._choose_from_share(hidden),)
        logits = self._model.logits(hidden)
        return self._choose(logits), logits

    def close(self) -> None:
        self._graphs.clear()
        self._recorder.close()


def _decoded(outputs: Outputs) -> Decoded:
    ids, *logits = outputs
    return Decoded(ids, logits[0] if logits else None)


def is_decode(scheduled: Seq[Scheduled]) -> bool:
    """Whether every sequence has one new token and samples the next, and nothing else."""
    return all(item.count == 1 and item.rows == SAMPLE_ONE for item in scheduled)


def bucket_of(num_rows: int) -> int:
    """The rows of the graph that `num_rows` sequences run in."""
    return next((rows for rows in _ROWS if rows >= num_rows), -(-num_rows // 64) * 64)


def _width_of(num_pages: int, most: int) -> int:
    width = _LEAST_PAGES
    while width < num_pages:
        width *= 2
    return min(width, most)
