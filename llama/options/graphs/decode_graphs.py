"""Decode steps of a fixed shape, recorded once as CUDA graphs and replayed.

In: single tokens, among them drafts that are verified. Out: the logits of their rows and their top
ids, in tensors that the next step overwrites. A stage of a pipeline records its own layers: it also
gets hidden states, or gives hidden states instead of logits. Messages between stages are outside of
the graphs.

A step of an 8B model launches some 300 kernels; a replayed graph costs one launch (CUDA C++
Programming Guide, "CUDA Graphs"). The price is a fixed shape: a batch is padded to the next of a
few sizes with rows that write to a page that nobody reads. All shapes share their inputs and
outputs. A recorder decides what recording means, so that tests can record without a GPU.

Shapes: R rows of the bucket, M pages of a row's table, S slots per page, E model dim, V vocabulary.
"""

import itertools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from llama.engine.hooks import Decoded
from llama.engine.rows import Scheduled
from llama.engine.runner import LastIds
from llama.engine.sampler import top_of_ranks
from llama.kernels.cuda.table import has_attention, queries_at_once
from llama.model.transformer import Transformer
from llama.ops.adapters import Reach
from llama.ops.sample import choose_ids
from llama.options.adapters import NumberedAdapters
from llama.options.graphs.decode_inputs import DecodeInputs, DecodeStep
from llama.options.graphs.recorder import CaptureError, Outputs, Recorder

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # then multiples of 64
_MIN_TABLE_WIDTH = 64  # pages; wider tables are powers of two times it


class Shape(NamedTuple):
    """The steps that one graph can replay.

    Attributes:
        rows: The rows.
        width: The pages of a row's table.
        wants_logits: Whether logits are computed.
        reach: What the adapters of the rows may change; nothing where no row has one.
    """

    rows: int
    width: int
    wants_logits: bool
    reach: Reach = Reach()


class DecodeGraphs:
    """The graphs of one model or stage and its KV cache, whose last page belongs to no sequence.

    With the attention kernel a shape depends on the number of rows alone. PyTorch's attention reads
    the whole width of the page tables, so that there is a shape for each of a few widths. The
    kernel also reads the keys of a sequence once for several of its rows, such as drafts.

    Args:
        model: The model.
        kv_cache: Its KV cache, with one page more than sequences may have.
        recorder: Records the steps.
        last_ids: The ids of the previous step, which the runner updates in place.
        recorded_rows: The rows up to which `record_all` records all shapes; a shape of more rows is
            recorded when it is first needed. By default max_batch_size.
        max_queries: The number of rows that a sequence usually has at most.
        adapters: The adapters that rows may have. Graphs with adapters are recorded when they are
            first needed, as their kernels would cost other steps 5 % and more.
    """

    def __init__(
        self,
        model: Transformer,
        kv_cache: Tensor,
        recorder: Recorder,
        last_ids: LastIds,
        recorded_rows: int | None = None,
        max_queries: int = 1,
        adapters: NumberedAdapters | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._recorder = recorder
        self.adapters = adapters
        self._recorded_rows = recorded_rows or model.params.max_batch_size
        self._last_rows = last_ids
        self._last_ids = last_ids.ids
        self._page_size = kv_cache.shape[3]
        self._max_pages = -(-model.params.max_seq_len // self._page_size)
        self._max_rows = max_rows = len(self._last_ids)
        device = kv_cache.device
        heads = model.norm.weight.new_empty(0, model.plan.n_heads, model.plan.head_dim)
        self._most = min(max_queries, queries_at_once(model.kernels, heads, kv_cache[0]))
        self._inputs = DecodeInputs(
            max_rows,
            self._max_pages,
            most=self._most,
            page_size=self._page_size,
            null_page=kv_cache.shape[2] - 1,
            device=device,
        )
        placement = model.parallel.placement
        self._has_lm_head = placement.is_last
        self._arrived: Tensor | None = None  # (R, E), what the stage before has computed
        if not placement.is_first:
            self._arrived = model.norm.weight.new_zeros(max_rows, model.params.dim)
        # All graphs write to these outputs, as one of them runs at a time.
        self._outputs: Outputs
        if self._has_lm_head:
            logits_shape = (max_rows, model.vocab_size)
            logits = torch.empty(logits_shape, dtype=torch.float32, device=device)
            self._outputs = (torch.zeros_like(self._last_ids), logits)
        else:
            self._outputs = (model.norm.weight.new_zeros(max_rows, model.params.dim),)
        # The widths of tables, in pages. With the attention kernel there is one.
        self._widths = [self._max_pages]
        if not model.parallel.all_hold(has_attention(model.kernels)):
            self._widths = _table_widths(self._max_pages)
        self.is_over = False
        self._graphs: dict[Shape, tuple[Outputs, Callable[[], None]]] = {}
        self._path: object = None  # the model's execution path when the graphs were recorded

    def prepare(self, sampled: list[Scheduled]) -> DecodeStep | None:
        """Return a step of these items, see `Replayer.prepare`."""
        if not self._takes(len(sampled)):
            return None
        sequences = [item.sequence for item in sampled]
        tokens = [seq.tokens[-1] for seq in sequences]
        rows = self._last_rows.rows
        sources = [rows[seq] if seq.num_pending else -1 for seq in sequences]
        numbers: list[int] | int = -1
        if self.adapters is not None:
            numbers = self.adapters.of_rows(seq.spec.adapter for seq in sequences)
        return DecodeStep.of(tokens, sources, sampled, self._page_size, self._most, numbers)

    def _takes(self, num_rows: int) -> bool:
        """Return whether a step of so many single tokens that sample can be replayed.

        It can unless there are too many, or the model runs in another way than when it was
        recorded: a replay calls no hook, and reads the weights where they were.

        Raises:
            RuntimeError: The model of one rank of a group has changed. Either all ranks of a group
                replay a step or none (NCCL, "CUDA Graphs").
        """
        if num_rows > self._max_rows:
            return False
        path = self._model.execution_path()
        is_hooked = path is None and self._kv_cache.is_cuda
        takes = not is_hooked and (not self._graphs or path is self._path)
        if not takes and self._model.parallel.size > 1:
            raise RuntimeError(
                "a hook or another change of a rank's model, whose steps are recorded: build with "
                "LLAMA_GPU_KERNELS=none to look into the model of several ranks"
            )
        return takes

    def run(
        self, step: DecodeStep, x: Tensor | None = None, *, wants_logits: bool
    ) -> Decoded | Tensor:
        """Run one step, see `Replayer.run`.

        A step that cannot be recorded, for want of memory say, is the end of graphs on all ranks of
        the group. The step runs operator by operator, as do those that are prepared already.
        """
        shape = self._fill(step, x, wants_logits)
        if not self.is_over and shape not in self._graphs:
            try:
                self._graphs[shape] = self._record(shape)
            except CaptureError as error:
                warn_of_no_graphs(error)
                self.close()
        if self.is_over:
            return self._results(self._step(shape))
        outputs, replay = self._graphs[shape]
        replay()
        return self._results(outputs)

    def run_eagerly(
        self, step: DecodeStep, x: Tensor | None = None, *, wants_logits: bool
    ) -> Decoded | Tensor:
        """Run what `run` replays operator by operator, in the same shape."""
        return self._results(self._step(self._fill(step, x, wants_logits)))

    def _fill(self, step: DecodeStep, x: Tensor | None, wants_logits: bool) -> Shape:
        """Copy the inputs of a step to where the graphs read them, and return its shape."""
        rows = bucket_of(step.fields.shape[1])
        self._inputs.fill(step, rows)
        if self._arrived is not None:
            assert x is not None, "a later stage computes what the one before has sent"
            self._arrived[: len(x)].copy_(x, non_blocking=True)
        last_position = step.last_position
        width = next(n for n in self._widths if n * self._page_size > last_position)
        reach = Reach()
        if self.adapters is not None and step.has_adapters:
            reach = self.adapters.table.reach
        return Shape(rows, width, wants_logits or not self._has_lm_head, reach)

    def _results(self, outputs: Outputs) -> Decoded | Tensor:
        return Decoded(*outputs) if self._has_lm_head else outputs[0]

    def shapes(self) -> list[Shape]:
        """Return all shapes without adapters up to `recorded_rows`, the largest first."""
        buckets = {bucket_of(n + 1) for n in range(self._recorded_rows)}
        # Several ranks exchange the top ids of greedy rows, and need no logits for that.
        has_both = self._has_lm_head and self._model.parallel.size > 1
        wants_logits = (True, False) if has_both else (True,)
        descending = sorted(buckets, reverse=True)
        shapes = itertools.product(descending, reversed(self._widths), wants_logits)
        return [Shape(*shape) for shape in shapes]

    @torch.inference_mode()
    def num_bytes(self) -> int:
        """Return the device memory that all graphs will take, beside what the recorder has now.

        Two graphs are recorded. The first one allocates the memory that all of the recorder share;
        the second one takes the driver's own memory of a graph, as each further one does. They stay
        until the recorder is closed.
        """
        shapes = self.shapes()
        used = 0
        for shape in (*shapes, *shapes)[:2]:
            free = self._recorder.free_bytes()
            self._record(shape)
            used = free - self._recorder.free_bytes()
        return used * len(shapes) + self._outputs[-1].nbytes

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record all shapes.

        Raises:
            CaptureError: A shape cannot be recorded, on this rank or on another one of the group.
        """
        for shape in self.shapes():
            self._graphs[shape] = self._record(shape)

    def _record(self, shape: Shape) -> tuple[Outputs, Callable[[], None]]:
        """Record one shape. All ranks of the group do so at once, and agree on whether all could.

        Raises:
            CaptureError: A rank cannot capture the step, which it has run once: PyTorch or the
                driver refused, or there is no memory for a graph. It is raised on all ranks.
        """
        if not self._graphs:
            self._path = self._model.execution_path()

        def step() -> Outputs:
            results = self._step(shape)
            outputs = []
            for tensor, result in zip(self._outputs, results, strict=False):
                used_rows = tensor[: shape.rows]
                outputs.append(used_rows.copy_(result))
            return tuple(outputs)

        inputs = [*self._inputs.tensors, self._kv_cache, self._last_ids, *self._outputs]
        if self._arrived is not None:
            inputs.append(self._arrived)
        if self.adapters is not None:
            inputs.append(self.adapters.table.fields)
        recorded = None
        reason = "another rank could not"
        try:
            recorded = self._recorder.record(step, inputs)
        except Exception as e:
            if not isinstance(e, CaptureError) and self._model.parallel.size > 1:
                raise  # the step itself broke off, and other ranks may wait for this one's sums
            reason = str(e)
        if not self._model.parallel.all_hold(recorded is not None) or recorded is None:
            raise CaptureError(f"a step of {shape.rows} rows was not captured: {reason}")
        return recorded

    def _step(self, shape: Shape) -> Outputs:
        """Compute one step of a fixed shape, which is what a graph captures.

        It can run twice: it writes keys and values, and nothing that it reads before.
        """
        model = self._model
        rows = shape.rows
        table = self.adapters.table if self.adapters and shape.reach.max_rank else None
        tokens, sources, batch = self._inputs.batch(rows, shape.width, table)
        if self._arrived is None:
            known = self._last_ids[sources.clamp(min=0)]
            x = model.tok_embeddings(torch.where(sources < 0, tokens, known))
        else:
            x = self._arrived[:rows]
        x = model.run_layers(x, batch, self._kv_cache)
        if not self._has_lm_head:
            return (x,)
        hidden = model.normalize(x, batch)
        if not shape.wants_logits:
            return (top_of_ranks(model, hidden),)
        logits = model.logits(hidden)
        greedy = [None] * rows
        ids = choose_ids(logits, greedy, (), (), model.kernels)
        return ids, logits

    def close(self) -> None:
        """Free all graphs."""
        self.is_over = True
        self._graphs.clear()
        self._recorder.close()


def warn_of_no_graphs(error: CaptureError) -> None:
    """Warn that steps run operator by operator from now on."""
    warnings.warn(f"steps run without graphs from now on: {error}", stacklevel=3)


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
