"""The model on one rank: a `Step` in, the results of its rows out, the same on every rank.

A step has two parts. `ModelRunner.start` packs the tokens into one flat batch and begins the pass
of the model over the KV cache, which it owns. `RunningStep.compute_rows` then begins to compute the
results of the rows, and returns a function that waits for the device, once. Scoring prompts waits
earlier, once per _SCORED_ROWS rows. On a GPU without the kernel for sampling, rows with top_p,
top_k or min_p cost two more waits.

On a GPU scheduling is asynchronous, as in vLLM: the next step begins before this one is read, and
takes the tokens that this one sampled from the device. Steps of single tokens are replayed as
graphs, see `llama.engine.graphs`; all others run operator by operator. The file has over 400 lines
because the two parts of a step share the runner's buffers.
"""

import warnings

import numpy as np
import torch
from torch import Tensor

from llama.common.device import current, free_unused, peak_bytes
from llama.engine import tables
from llama.engine.adapters import AdapterStore
from llama.engine.constraints import TokenMasks
from llama.engine.decode_inputs import DecodeStep
from llama.engine.graphs import Decoded, DecodeGraphs, bucket_of
from llama.engine.largest_step import largest_step
from llama.engine.processors import LogitsProcessors
from llama.engine.recorder import CaptureError, Recorder
from llama.engine.rows import CapturedStates, HiddenStates, Reader, Rows, Scheduled, Tokens
from llama.engine.sampler import Sampled, needs_top_only, sample, score, top_of_ranks
from llama.engine.sequence import SequenceState
from llama.engine.step import Step, StepResults
from llama.model.execution import NOTHING_WATCHED, Watched
from llama.model.transformer import Transformer
from llama.ops.batch import Batch
from llama.ops.sample import on_device_of
from llama.ops.triton.kernels import TORCH_ONLY, kernel_errors

_SCORED_ROWS = 256  # prompt rows that get logits at once: 256 x 128,256 float32 are 131 MB


class ModelRunner:
    """Runs `model` over `num_pages` pages of `page_size` slots, which it allocates.

    Args:
        model: The model.
        num_pages: The pages of the KV cache that sequences may use.
        page_size: The slots of a page.
        async_scheduling: Whether a step may start before the previous one is read; by default it
            may on a GPU.
        recorder: The recorder of graphs; None runs every step operator by operator.
        reserve: The bytes that a step needs. With graphs, the cache gets only the pages that fit
            beside the graphs and the reserve.
        has_drafts: Whether steps may have more rows than sequences. Graphs of all numbers of rows
            are then recorded, and not while requests wait.
        step_tokens: The maximum number of tokens of a step. A GPU runs one such step first, whose
            memory is reserved as well; 0: none.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        num_pages: int,
        page_size: int,
        async_scheduling: bool | None = None,
        recorder: Recorder | None = None,
        reserve: int = 0,
        has_drafts: bool = False,
        step_tokens: int = 0,
    ) -> None:
        self.model = model
        self.adapters = AdapterStore(model)
        self.page_size = page_size
        device = model.norm.weight.device
        self.async_scheduling = (
            device.type == "cuda" if async_scheduling is None else async_scheduling
        )
        self.token_masks = TokenMasks(model.vocab_size)
        self.processors = LogitsProcessors()
        max_rows = bucket_of(max(model.params.max_batch_size, 64))  # rows of a graph or a step
        self._last_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._last_rows: dict[SequenceState, int] = {}  # the row of each sequence in it
        self._recorded_rows = max_rows if has_drafts else model.params.max_batch_size
        self._graphs: DecodeGraphs | None = None
        self.num_pages = num_pages  # pages that sequences may use
        with model.parallel.step(), current(device):
            if device.type == "cuda" and step_tokens:
                reserve = max(reserve, self._measure_step(step_tokens))
            if recorder is None:
                self.kv_cache = model.new_kv_cache(num_pages, page_size)
            else:
                self._record(recorder, reserve)

    def _measure_step(self, num_tokens: int) -> int:
        """Return the memory that a step of so many tokens takes, see `largest_step`."""
        run = largest_step(self.model, num_tokens, self.page_size)
        try:
            return peak_bytes(self._last_ids.device, run)
        except kernel_errors() as error:
            self.give_up_kernels(error)
            return peak_bytes(self._last_ids.device, run)

    def _record(self, recorder: Recorder, reserve: int) -> None:
        """Record the graphs, and allocate the KV cache beside them.

        The memory of the graphs is measured first, with a KV cache of two pages.
        """
        model = self.model
        size = self.page_size
        small = model.new_kv_cache(2, size)
        graph_bytes = 0
        try:
            graph_bytes = self._new_graphs(small, recorder).num_bytes()
        except CaptureError:
            if model.parallel.size > 1:
                raise  # the other ranks may wait for this one's part of a sum
        cache_bytes = recorder.free_bytes() - graph_bytes - reserve
        fitting = 2 * cache_bytes // small.nbytes - 1
        min_pages = -(-model.params.max_seq_len // size)
        fitting = max(min_pages, model.parallel.all_reduce_min(fitting))
        self.num_pages = min(self.num_pages, fitting)
        # One page more than the scheduler knows: a graph's unused rows write there.
        self.kv_cache = model.new_kv_cache(self.num_pages + 1, size)
        self._graphs = self._new_graphs(self.kv_cache, recorder)
        problem: CaptureError | None = None
        try:
            self._graphs.record_all()
        except CaptureError as e:
            if model.parallel.size > 1:
                raise
            problem = e
        if not model.parallel.all_reduce_min(int(problem is None)):  # all stages alike
            self._give_up_graphs(problem or CaptureError("another rank cannot record them"))

    def _new_graphs(self, kv_cache: Tensor, recorder: Recorder) -> DecodeGraphs:
        return DecodeGraphs(self.model, kv_cache, recorder, self._last_ids, self._recorded_rows)

    @property
    def has_graphs(self) -> bool:
        """Whether steps of single tokens are replayed as graphs."""
        return self._graphs is not None

    def _give_up_graphs(self, error: CaptureError) -> None:
        """Go on without graphs, which the other ranks of the group know of."""
        warnings.warn(f"steps run without graphs from now on: {error}", stacklevel=2)
        self._drop_graphs()

    def run(self, step: Step) -> StepResults:
        """Run a step and wait for its results."""
        return self.start(step).compute_rows()()

    def start(self, step: Step) -> "RunningStep":
        """Begin a step: its pass of the model is under way when this returns.

        Steps run in the order in which they are started.
        """
        with torch.inference_mode(), current(self.kv_cache.device):
            try:
                return RunningStep(self, step)
            except kernel_errors() as error:
                self.give_up_kernels(error)
                return RunningStep(self, step)

    def give_up_kernels(self, error: Exception) -> None:
        """Let torch's operators replace the GPU's kernels, one of which has failed.

        On several ranks the error is raised instead: the others do not know of it.
        """
        if not self.model.parallel.is_alone:
            raise error
        warnings.warn(f"torch runs in place of the GPU's kernels: {error}", stacklevel=3)
        self._drop_graphs()
        self.model.use_kernels(TORCH_ONLY)

    def decode_step(self, sampled: list[Scheduled], num_tokens: int) -> DecodeStep | None:
        """Return a step as graphs take it; None where there is no graph for this kind of step.

        Graphs take steps of single tokens that are all sampled and have no adapters.
        """
        if self._graphs is None or num_tokens != len(sampled):
            return None
        if self.adapters and any(item.sequence.spec.adapter for item in sampled):
            return None
        if not self._graphs.takes(sampled):
            return None
        sequences = [item.sequence for item in sampled]
        tokens = [seq.tokens[-1] for seq in sequences]
        sources = [self._last_rows[seq] if seq.num_pending else -1 for seq in sequences]
        return DecodeStep.of(tokens, sources, sampled, self.page_size)

    def replay(
        self, step: DecodeStep, x: Tensor | None = None, *, wants_logits: bool
    ) -> Decoded | Tensor | None:
        """Run a step by a graph, see `DecodeGraphs.run`.

        A step that cannot be recorded, for want of memory say, is the end of graphs: None. On
        several ranks it raises the error, as the others do not know it.
        """
        assert self._graphs is not None, "a step for graphs, without any"
        try:
            return self._graphs.run(step, x, wants_logits=wants_logits)
        except CaptureError as error:
            if not self.model.parallel.is_alone:
                raise
            self._give_up_graphs(error)
            return None

    def hidden_states(self, step: Step, watched: Watched = NOTHING_WATCHED) -> Tensor:
        """Run a step operator by operator.

        Args:
            step: The step.
            watched: Further hidden states of its rows that are wanted.

        Returns:
            (R, E): the hidden states of its rows, kind after kind, each in the order of the items.
        """
        ids, batch = self.pack(step)
        return self.model.hidden_states(ids, batch, self.kv_cache, watched)

    def pack(self, step: Step) -> tuple[Tensor, Batch]:
        """Return the tokens of a step, (T), and its batch, as its sequences are now."""
        tokens = list[int]()
        pending = list[int]()  # indices of the tokens that only the device knows
        sources = list[int]()  # their rows in the step before
        first_of = dict[SequenceState, int]()
        for item in step.items:
            seq = item.sequence
            first = len(tokens)
            end = item.start + item.count
            first_of[seq] = first
            tokens += seq.tokens[item.start : end]
            tokens += item.drafts
            if len(tokens) < first + item.count:
                pending.append(len(tokens))
                sources.append(self._last_rows[seq])
                tokens.append(0)
        logit_rows = list[int]()
        for rows in step.rows.values():
            for item, offsets in rows.pairs():
                first = first_of[item.sequence]
                for offset in offsets:
                    logit_rows.append(first + offset)
        ids, batch = Batch.pack(
            tokens,
            [item.start for item in step.items],
            [item.count for item in step.items],
            [item.sequence.pages for item in step.items],
            self.page_size,
            logit_rows,
            self.kv_cache.device,
        )
        if self.adapters:
            adapters = self.adapters.rows_of(step.items)
            if adapters is not None:
                batch = batch.with_adapters(adapters)
        if pending:
            known = self._last_ids[on_device_of(ids, sources)]
            ids[on_device_of(ids, pending)] = known
        return ids, batch

    def keep_last_ids(self, ids: Tensor, sequences: list[SequenceState]) -> None:
        """Keep the tokens that a step sampled on the device, for the step that starts next."""
        if self.async_scheduling:
            # A row without a token has the id -1; nothing that the next step makes of it is read.
            num_rows = len(sequences)
            self._last_ids[:num_rows] = ids.clamp(min=0)
            self._last_rows = {seq: row for row, seq in enumerate(sequences)}

    def close(self) -> None:
        """Free the KV cache, and the graphs: they hold collectives of groups that will end."""
        self._drop_graphs()
        device = self.kv_cache.device
        self.kv_cache = torch.empty(0)
        free_unused(device)

    def _drop_graphs(self) -> None:
        """Free the graphs, and run steps without them from now on."""
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None


class RunningStep:
    """A step whose pass of the model has begun; `compute_rows` computes the results of its rows.

    Between the two, the previous step can be read, whose tokens some rows need for sampling.
    """

    def __init__(self, runner: ModelRunner, step: Step) -> None:
        self._runner = runner
        self._model = runner.model
        self._processors = runner.processors
        self._step = step
        sampled = step.sampled()
        self._sequences = [item.sequence for item in sampled]
        self._mask = None
        if not runner.async_scheduling:  # else the host may not know all tokens yet
            self._mask = runner.token_masks.start(self._sequences)
        self._is_greedy = needs_top_only(self._sequences)
        # Whether the host must know the tokens of the step before, to sample those of this one.
        self.needs_tokens = (
            runner.async_scheduling
            and not self._is_greedy
            and any(seq.spec.needs_tokens for seq in self._sequences)
        )
        self._watched = Watched(step.captured_layers())
        self._hidden = self._run(sampled)

    @property
    def wants_logits(self) -> bool:
        """Whether a graph must compute logits: the ranks of a group agree on ids without them."""
        return self._model.parallel.size == 1 or not self._is_greedy

    def _run(self, sampled: list[Scheduled]) -> HiddenStates:
        """Begin the pass of the model."""
        runner = self._runner
        num_tokens = sum([item.count for item in self._step.items])
        decode = runner.decode_step(sampled, num_tokens)
        if decode is not None:
            decoded = runner.replay(decode, wants_logits=self.wants_logits)
            if decoded is not None:
                return decoded
        return runner.hidden_states(self._step, self._watched)

    def compute_rows(self) -> Reader[StepResults]:
        """Begin to compute the results of all rows; the function returned waits for them."""
        with torch.inference_mode(), current(self._runner.kv_cache.device):
            try:
                return self._compute_rows()
            except kernel_errors() as error:
                self._runner.give_up_kernels(error)
                # The pass can be made again: it reads nothing that it has written.
                return RunningStep(self._runner, self._step)._compute_rows()

    def _compute_rows(self) -> Reader[StepResults]:
        readers = {}
        first = 0
        for kind, rows in self._step.rows.items():
            hidden: HiddenStates = self._hidden
            if not isinstance(hidden, Decoded):
                end = first + rows.num_rows
                hidden = hidden[first:end]
                first = end
            readers[kind] = kind.compute(self, hidden, rows)
        return lambda: {kind: read() for kind, read in readers.items()}

    def sample(self, hidden: HiddenStates) -> Reader[Tokens]:
        """Sample a token behind each row, from hidden states (R, E) or the output of a graph."""
        num_rows = len(self._sequences)
        if isinstance(hidden, Decoded):
            if self._is_greedy or hidden.logits is None:
                sampled = Sampled(hidden.ids[:num_rows])
            else:
                sampled = self._sampled(hidden.logits[:num_rows])
        elif self._is_greedy and self._model.parallel.size > 1:
            sampled = Sampled(top_of_ranks(self._model, hidden))
        else:
            sampled = self._sampled(self._model.logits(hidden))
        columns = self._columns(sampled)
        self._runner.keep_last_ids(columns[:, 0], self._sequences)
        read = tables.to_host(columns)
        return lambda: tables.tokens_of(self._publish(read()))

    def _sampled(self, logits: Tensor) -> Sampled:
        runner = self._runner
        mask = self._mask
        if runner.async_scheduling and self.needs_tokens:
            mask = runner.token_masks.start(self._sequences, at_once=True)
        return sample(logits, self._sequences, mask, self._model.kernels, self._processors)

    def score(self, hidden: HiddenStates, ids: list[int], num_top: int) -> Reader[Tokens]:
        """Score known tokens, from hidden states (R, E), beside the likeliest of each row.

        It waits for the device, chunk by chunk: rows of logits are far wider than hidden states.
        """
        parts = []
        for start in range(0, len(ids), _SCORED_ROWS):
            chunk = slice(start, start + _SCORED_ROWS)
            targets = on_device_of(hidden, ids[chunk])
            logits = self._model.logits(hidden[chunk])
            scored = Sampled(targets, *score(logits, targets, num_top))
            parts.append(tables.to_host(self._columns(scored))())
        return lambda: tables.tokens_of(self._publish(torch.cat(parts)))

    def add_up(self, hidden: HiddenStates, counts: list[int]) -> Reader[np.ndarray]:
        """Add up groups of neighbouring rows: (R, E) -> (groups, E) float64, alike on all ranks."""
        dtype = (
            torch.float32 if hidden.device.type == "mps" else torch.float64
        )  # mps has no float64
        if len(counts) == len(hidden):
            sums = hidden.to(dtype)
        else:
            sums = torch.stack([part.sum(0, dtype=dtype) for part in hidden.split(counts)])
        read = tables.to_host(self._model.parallel.broadcast(sums))
        return lambda: self._publish(read()).double().numpy()

    def captured(self, rows: Rows) -> Reader[CapturedStates]:
        """Copy the hidden states of rows of the step to the host, alike on all ranks."""
        first = 0
        for other in self._step.rows.values():
            if other is rows:
                break
            first += other.num_rows
        end = first + rows.num_rows
        layers = sorted(self._watched.layers)
        states = torch.stack([self._watched.states[layer][first:end] for layer in layers])
        read = tables.to_host(self._model.parallel.broadcast(states))
        return lambda: dict(zip(layers, self._publish(read()), strict=True))

    def _columns(self, sampled: Sampled) -> Tensor:
        """Put all that the host reads of each row into one tensor, the same on every rank.

        Rank 0's values reach every rank by one broadcast: unlike machines could round differently,
        and log-probabilities are sums of floats, whose order depends on the threads. Ids alone need
        none where the ranks compared their top tokens, nor between CPU ranks that share memory: the
        gathered logits are the same bits on each, and `llama.ops.sample` adds whole numbers. But
        constraints can be rank 0's alone.

        Returns:
            What `tables.make_table` makes.
        """
        parallel = self._model.parallel
        table = tables.make_table(sampled)
        if sampled.logprobs is None:
            is_constrained = any(seq.spec.is_constrained for seq in self._sequences)
            is_alike = parallel.shares_memory_of(table) and not is_constrained
            if self._is_greedy or is_alike:
                return table
        return parallel.broadcast(table.contiguous())

    def _publish(self, results: Tensor) -> Tensor:
        """Return results that are on the host, after others that need them have got them."""
        return results
