"""Steps of a fixed shape, recorded once as CUDA graphs and replayed.

In: single tokens, among them drafts that are verified, or single tokens and short prompts. Out: the
logits of their rows and their top ids, in tensors that the next step overwrites. A stage of a
pipeline records its own layers: it also gets hidden states, or gives hidden states instead of
logits. Messages between stages are outside of the graphs.

A step of an 8B model launches some 300 kernels; a replayed graph costs one launch (CUDA C++
Programming Guide, "CUDA Graphs"). The price is a fixed shape: a batch is padded to the next of a
few sizes with rows that write to a page that nobody reads. All shapes share their inputs and
outputs. A recorder decides what recording means, so that tests can record without a GPU.

Shapes: R rows of the bucket, M pages of a row's table, S slots per page, E model dim, V vocabulary.
"""

import itertools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from llama.engine.hooks import Decoded
from llama.engine.rows import SAMPLE, Scheduled
from llama.engine.runner import LastIds
from llama.engine.sampler import top_of_ranks
from llama.engine.step import Step
from llama.kernels.cuda.table import has_attention, queries_at_once
from llama.model.transformer import Transformer
from llama.ops.adapters import Reach
from llama.ops.sample import choose_ids
from llama.options.adapters import NumberedAdapters
from llama.options.graphs.recorder import CaptureError, Outputs, Recorder
from llama.options.graphs.shapes import (
    MAX_MIXED_ROWS,
    PROMPT_GROUPS,
    MixedBuckets,
    Shape,
    bucket_of,
    table_widths,
)
from llama.options.graphs.step_inputs import PreparedStep, StepInputs


class StepGraphs:
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
        max_queries: The number of rows that a sequence usually has at most in a step without
            prompts.
        max_tokens: The maximum number of tokens of a step with prompts. Such steps are recorded
            where there is the kernel for attention. 0: none is.
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
        max_tokens: int = 0,
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
        has_kernel = model.parallel.all_hold(has_attention(model.kernels))
        has_prompts = max_tokens and has_kernel and model.params.is_causal
        self._mixed = MixedBuckets(max_tokens if has_prompts else 0)
        self._max_results = len(self._last_ids)
        max_rows = max(self._max_results, MAX_MIXED_ROWS if has_prompts else 0)
        device = kv_cache.device
        heads = model.norm.weight.new_empty(0, model.plan.n_heads, model.plan.head_dim)
        self._most = min(max_queries, queries_at_once(model.kernels, heads, kv_cache[0]))
        self._inputs = StepInputs(
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
            logits_shape = (self._max_results, model.vocab_size)
            logits = torch.empty(logits_shape, dtype=torch.float32, device=device)
            self._outputs = (torch.zeros_like(self._last_ids), logits)
        else:
            self._outputs = (model.norm.weight.new_zeros(max_rows, model.params.dim),)
        # The widths of tables, in pages. With the attention kernel there is one.
        self._widths = [self._max_pages] if has_kernel else table_widths(self._max_pages)
        self.is_over = False
        self._graphs: dict[Shape, tuple[Outputs, Callable[[], None]]] = {}
        self._path: object = None  # the model's execution path when the graphs were recorded

    def prepare(self, step: Step, sampled: list[Scheduled]) -> PreparedStep | None:
        """Return a step in the form that `run` takes, see `Replayer.prepare`."""
        if len(sampled) < sum([item.count for item in step.items]):
            return self._with_prompts(step)
        if len(sampled) > self._max_results or not self._takes():
            return None
        sequences = [item.sequence for item in sampled]
        tokens = [seq.tokens[-1] for seq in sequences]
        rows = self._last_rows.rows
        sources = [rows[seq] if seq.num_pending else -1 for seq in sequences]
        numbers: list[int] | int = -1
        if self.adapters is not None:
            numbers = self.adapters.of_rows(seq.spec.adapter for seq in sequences)
        return PreparedStep.of(tokens, sources, sampled, self._page_size, self._most, numbers)

    def _with_prompts(self, step: Step) -> PreparedStep | None:
        """Return a step of prompts, of which nothing but the next tokens is wanted."""
        counts = [item.count for item in step.items]
        num_single = counts.count(1)
        buckets = self._mixed.of(num_single, sum(counts) - num_single)
        has_groups = len(counts) - num_single < PROMPT_GROUPS
        if not (step.rows.keys() <= {SAMPLE} and buckets and has_groups and self._takes()):
            return None
        tokens: list[int] = []
        sources: list[int] = []
        numbers: list[int] = []
        for item in step.items:
            seq = item.sequence
            known = seq.tokens[item.start : item.start + item.count]
            tokens += known
            sources += [-1] * len(known)
            if len(known) < item.count:  # the step before samples its last token
                tokens.append(0)
                sources.append(self._last_rows.rows[seq])
            if self.adapters is not None:
                numbers += self.adapters.of_rows([seq.spec.adapter]) * item.count
        return PreparedStep.with_prompts(
            tokens, sources, step.items, self._page_size, step.result_rows(), numbers or -1
        )

    def _takes(self) -> bool:
        """Return whether a step can be replayed.

        It can unless the model runs in another way than when it was recorded: a replay calls no
        hook, and reads the weights where they were.

        Raises:
            RuntimeError: The model of one rank of a group has changed. Either all ranks of a group
                replay a step or none (NCCL, "CUDA Graphs").
        """
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
        self, step: PreparedStep, x: Tensor | None = None, *, wants_logits: bool
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
            return self._results(step, self._step(shape))
        outputs, replay = self._graphs[shape]
        replay()
        return self._results(step, outputs)

    def run_eagerly(
        self, step: PreparedStep, x: Tensor | None = None, *, wants_logits: bool
    ) -> Decoded | Tensor:
        """Run what `run` replays operator by operator, in the same shape."""
        return self._results(step, self._step(self._fill(step, x, wants_logits)))

    def _fill(self, step: PreparedStep, x: Tensor | None, wants_logits: bool) -> Shape:
        """Copy the inputs of a step to where the graphs read them, and return its shape."""
        rows, prompts = self._rows_of(step)
        self._inputs.fill(step, rows, prompts)
        if self._arrived is not None:
            assert x is not None, "a later stage computes what the one before has sent"
            n = step.num_single
            self._arrived[:n].copy_(x[:n], non_blocking=True)
            if prompts:
                self._arrived[rows : rows + len(x) - n].copy_(x[n:], non_blocking=True)
        last_position = step.last_position
        width = next(n for n in self._widths if n * self._page_size > last_position)
        reach = Reach()
        if self.adapters is not None and step.has_adapters:
            reach = self.adapters.table.reach
        return Shape(rows, width, wants_logits or not self._has_lm_head, prompts, reach)

    def _rows_of(self, step: PreparedStep) -> tuple[int, int]:
        """Return the rows of single tokens and of prompts of the shape of a step."""
        num_rows = step.fields.shape[1]
        if not step.num_prompts:
            return bucket_of(num_rows), 0
        buckets = self._mixed.of(step.num_single, num_rows - step.num_single)
        assert buckets is not None, "a step was prepared that has no shape"
        return buckets

    def _results(self, step: PreparedStep, outputs: Outputs) -> Decoded | Tensor:
        """Return the outputs of a step: on a stage without lm_head rows in the step's order."""
        if self._has_lm_head:
            return Decoded(*outputs)
        (states,) = outputs
        if not step.num_prompts:
            return states
        n = step.num_single
        rows, _ = self._rows_of(step)
        return torch.cat([states[:n], states[rows : rows + step.fields.shape[1] - n]])

    def shapes(self) -> list[Shape]:
        """Return all shapes without adapters up to `recorded_rows`, the largest first."""
        buckets = {bucket_of(n + 1) for n in range(self._recorded_rows)}
        # Several ranks exchange the top ids of greedy rows, and need no logits for that.
        has_both = self._has_lm_head and self._model.parallel.size > 1
        wants_logits = (True, False) if has_both else (True,)
        descending = sorted(buckets, reverse=True)
        shapes = itertools.product(descending, reversed(self._widths), wants_logits)
        mixed = self._mixed.all_of(self._model.params.max_batch_size)
        found = [
            Shape(rows, self._max_pages, wants, prompts)
            for (rows, prompts), wants in itertools.product(mixed, wants_logits)
        ]
        found += [Shape(*shape) for shape in shapes]
        return sorted(found, key=lambda shape: -shape.rows - shape.prompts)

    @torch.inference_mode()
    def num_bytes(self) -> int:
        """Return the device memory that all graphs will take, besides what the recorder has now.

        Two graphs are recorded. The first one allocates the memory that all of the recorder share;
        the second one takes the driver's own memory of a graph, as each further one does. They stay
        until the recorder is closed.
        """
        shapes = self.shapes()
        used = 0
        for shape in (*shapes, *shapes)[:2]:
            free = self._recorder.free_bytes()
            self._record_unused(shape)
            used = free - self._recorder.free_bytes()
        return used * len(shapes) + self._outputs[-1].nbytes

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record all shapes.

        Raises:
            CaptureError: A shape cannot be recorded, on this rank or on another one of the group.
        """
        for shape in self.shapes():
            self._graphs[shape] = self._record_unused(shape)

    def _record_unused(self, shape: Shape) -> tuple[Outputs, Callable[[], None]]:
        """Record one shape, whose rows belong to no sequence."""
        nobody = PreparedStep.of((), (), (), self._page_size)
        self._inputs.fill(nobody, shape.rows, shape.prompts)
        return self._record(shape)

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
                used_rows = tensor[: len(result)]
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
            num_rows = shape.rows + shape.prompts
            raise CaptureError(f"a step of {num_rows} rows was not captured: {reason}")
        return recorded

    def _step(self, shape: Shape) -> Outputs:
        """Compute one step of a fixed shape, which is what a graph captures.

        It can run twice: it writes keys and values, and nothing that it reads before.
        """
        model = self._model
        rows = shape.rows + shape.prompts
        num_results = shape.rows
        if shape.prompts:
            num_results = min(shape.rows + PROMPT_GROUPS, self._max_results)
        table = self.adapters.table if self.adapters and shape.reach.max_rank else None
        tokens, sources, batch = self._inputs.batch(
            shape.rows, shape.prompts, shape.width, num_results, table
        )
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
        greedy = [None] * num_results
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
