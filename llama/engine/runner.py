"""The model on one rank: a `Step` in, the results of its rows out, the same on every rank.

A step has two parts. `ModelRunner.start` packs the tokens into one flat batch and begins the pass
of the model over the KV cache. `RunningStep.compute_rows` then begins to compute the results of the
rows, and returns a function that waits for the device, once. Scoring prompts waits earlier, once
per _SCORED_ROWS rows. On a GPU without the kernel for sampling, rows with top_p, top_k or min_p
cost two more waits.

On a GPU scheduling is asynchronous, as in vLLM: the next step begins before this one is read, and
takes the tokens that this one sampled from the device. A `Replayer` may compute steps of single
tokens and of short prompts; all others run operator by operator.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from llama.common.device import current, free_unused
from llama.engine import sampler
from llama.engine.constraints import TokenMasks
from llama.engine.hooks import Decoded, Replayer, StepHook
from llama.engine.processors import LogitsProcessors
from llama.engine.rows import CapturedStates, HiddenStates, Reader, Rows, Scheduled, Tokens
from llama.engine.sampler import Sampled, needs_top_only, sample, score, top_of_ranks
from llama.engine.sequence import SequenceState
from llama.engine.step import Step, StepResults
from llama.model.execution import Watched
from llama.model.transformer import Transformer
from llama.ops.batch import Batch
from llama.ops.sample import on_device_of

_SCORED_ROWS = 256  # prompt rows that get logits at once: 256 x 128,256 float32 are 131 MB


class LastIds:
    """The tokens that the latest step sampled, on the device, for the step that starts next.

    Attributes:
        ids: The token of each row, (max_rows) int64.
        rows: The row of each sequence.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.rows: dict[SequenceState, int] = {}

    @classmethod
    def of(cls, model: Transformer) -> "LastIds":
        """Return memory for the rows of any step of a model: a multiple of 64 rows."""
        max_rows = -(-model.params.max_batch_size // 64) * 64
        return cls(max_rows, model.norm.weight.device)

    def keep(self, ids: Tensor, step: Step) -> None:
        """Keep the last token of each sequence of a step that sampled these (R)."""
        items = step.sampling_items()
        if len(items) < len(ids):  # drafts have rows of their own
            last_rows = np.cumsum([item.count for item in items]) - 1
            ids = ids[on_device_of(ids, last_rows)]
        # A row without a token has the id -1; nothing that the next step makes of it is read.
        self.ids[: len(items)] = ids.clamp(min=0)
        self.rows = {item.sequence: row for row, item in enumerate(items)}


class ModelRunner:
    """Runs a model over the pages of its KV cache.

    Args:
        model: The model.
        kv_cache: Its KV cache, (L, 2, P, S, K, W), which the runner frees when it is closed.
        num_pages: The pages that sequences may use.
        async_scheduling: Whether a step may start before the previous one is read; by default it
            may on a GPU.
        last_ids: The tokens of the latest step, which a replayer reads as well.
        replayer: Computes steps in the place of the operators, if there is one.
        hooks: The options that take part in each step. The core has the same list.
    """

    def __init__(
        self,
        model: Transformer,
        kv_cache: Tensor,
        num_pages: int,
        *,
        async_scheduling: bool | None = None,
        last_ids: LastIds | None = None,
        replayer: Replayer | None = None,
        hooks: list[StepHook] | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.num_pages = num_pages
        self.page_size = kv_cache.shape[3]
        self.async_scheduling = kv_cache.is_cuda if async_scheduling is None else async_scheduling
        self.token_masks = TokenMasks(model.vocab_size)
        self.processors = LogitsProcessors()
        self.last_ids = last_ids or LastIds.of(model)
        self.replayer = replayer
        self.hooks = [] if hooks is None else hooks

    def run(self, step: Step) -> StepResults:
        """Run a step and wait for its results."""
        return self.start(step).compute_rows()()

    def start(self, step: Step) -> "RunningStep":
        """Begin a step: its pass of the model is under way when this returns.

        Steps run in the order in which they are started.
        """
        with torch.inference_mode(), current(self.kv_cache.device):
            for hook in self.hooks:
                hook.before_pass(step)
            return RunningStep(self, step)

    def prepare_replay(
        self, step: Step, sampled: list[Scheduled]
    ) -> Callable[..., Decoded | Tensor] | None:
        """Return what computes a step in the place of `hidden_states`, see `Replayer.run`.

        The result takes the arguments of `Replayer.run` that follow the step. None: the step runs
        operator by operator.
        """
        if self.replayer is not None and self.replayer.is_over:
            self.stop_replaying()
        if self.replayer is None:
            return None
        if any(hook.wanted_states or hook.changes_batch(step) for hook in self.hooks):
            return None
        prepared = self.replayer.prepare(step, sampled)
        return None if prepared is None else functools.partial(self.replayer.run, prepared)

    def stop_replaying(self) -> None:
        """Run all steps operator by operator from now on."""
        if self.replayer is not None:
            self.replayer.close()
            self.replayer = None

    def watched(self, step: Step) -> Watched:
        """Return the hidden states of a step that its sequences and the hooks want to see."""
        wanted = [hook.wanted_states for hook in self.hooks]
        return Watched(step.captured_layers(), frozenset().union(*wanted))

    def hidden_states(self, step: Step, watched: Watched) -> Tensor:
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
        for item in step.items:
            seq = item.sequence
            first = len(tokens)
            end = item.start + item.count
            tokens += seq.tokens[item.start : end]
            tokens += item.drafts
            if len(tokens) < first + item.count:
                pending.append(len(tokens))
                sources.append(self.last_ids.rows[seq])
                tokens.append(0)
        ids, batch = Batch.pack(
            tokens,
            [item.start for item in step.items],
            [item.count for item in step.items],
            [item.sequence.pages for item in step.items],
            self.page_size,
            step.result_rows(),
            self.kv_cache.device,
        )
        for hook in self.hooks:
            batch = hook.pack(step, batch)
        if pending:
            known = self.last_ids.ids[on_device_of(ids, sources)]
            ids[on_device_of(ids, pending)] = known
        return ids, batch

    def close(self) -> None:
        """Free the KV cache, and what replays steps: it holds collectives of groups that end."""
        self.stop_replaying()
        device = self.kv_cache.device
        self.kv_cache = torch.empty(0)
        free_unused(device)


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
        self._watched = runner.watched(step)
        self._hidden = self._run(sampled)

    @property
    def wants_logits(self) -> bool:
        """Whether a graph must compute logits: the ranks of a group agree on ids without them."""
        return self._model.parallel.size == 1 or not self._is_greedy

    def _run(self, sampled: list[Scheduled]) -> HiddenStates:
        """Begin the pass of the model."""
        runner = self._runner
        replay = runner.prepare_replay(self._step, sampled)
        if replay is not None:
            return replay(wants_logits=self.wants_logits)
        return runner.hidden_states(self._step, self._watched)

    def compute_rows(self) -> Reader[StepResults]:
        """Begin to compute the results of all rows; the function returned waits for them."""
        with torch.inference_mode(), current(self._runner.kv_cache.device):
            return self._compute_rows()

    def _compute_rows(self) -> Reader[StepResults]:
        for hook in self._runner.hooks:
            if hook.wanted_states:
                hook.see(self._step, self._watched.states)
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
        """Sample a token after each row, from hidden states (R, E) or the output of a graph."""
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
        if self._runner.async_scheduling:
            self._runner.last_ids.keep(columns[:, 0], self._step)
        read = sampler.to_host(columns)
        return lambda: sampler.tokens_of(self._publish(read()))

    def _sampled(self, logits: Tensor) -> Sampled:
        runner = self._runner
        mask = self._mask
        if runner.async_scheduling and self.needs_tokens:
            mask = runner.token_masks.start(self._sequences, at_once=True)
        return sample(logits, self._sequences, mask, self._model.kernels, self._processors)

    def score(self, hidden: HiddenStates, ids: list[int], num_top: int) -> Reader[Tokens]:
        """Score known tokens, from hidden states (R, E), and the most probable of each row.

        It waits for the device, chunk by chunk: rows of logits are far wider than hidden states.
        """
        parts = []
        for start in range(0, len(ids), _SCORED_ROWS):
            chunk = slice(start, start + _SCORED_ROWS)
            # The id of an image is no row of the logits, and its result is not read.
            targets = on_device_of(hidden, ids[chunk]).clamp(max=self._model.vocab_size - 1)
            logits = self._model.logits(hidden[chunk])
            scored = Sampled(targets, *score(logits, targets, num_top))
            parts.append(sampler.to_host(self._columns(scored))())
        return lambda: sampler.tokens_of(self._publish(torch.cat(parts)))

    def add_up(self, hidden: HiddenStates, counts: list[int]) -> Reader[np.ndarray]:
        """Add up groups of neighbouring rows: (R, E) -> (groups, E) float64, alike on all ranks."""
        dtype = (
            torch.float32 if hidden.device.type == "mps" else torch.float64
        )  # mps has no float64
        if len(counts) == len(hidden):
            sums = hidden.to(dtype)
        else:
            sums = torch.stack([part.sum(0, dtype=dtype) for part in hidden.split(counts)])
        read = sampler.to_host(self._model.parallel.broadcast(sums))
        return lambda: self._publish(read()).double().numpy()

    def captured(self, rows: Rows) -> Reader[CapturedStates]:
        """Copy the hidden states of rows of the step to the host, alike on all ranks."""
        first = 0
        for other in self._step.rows.values():
            if other is rows:
                break
            first += other.num_rows
        end = first + rows.num_rows
        layers = sorted(self._watched.of_rows)
        readers = []
        for layer in layers:  # one after the other: together they would be a copy of all
            state = self._model.parallel.broadcast(self._rows_of(layer)[first:end])
            readers.append(sampler.to_host(state))

        def read() -> CapturedStates:
            states = torch.stack([read_state() for read_state in readers])
            return dict(zip(layers, self._publish(states), strict=True))

        return read

    def _rows_of(self, layer: int) -> Tensor:
        """Return a hidden state of the rows that have results, (R, E)."""
        state = self._watched.states[layer]
        if layer in self._watched.of_tokens:
            return state[on_device_of(state, self._step.result_rows())]
        return state

    def _columns(self, sampled: Sampled) -> Tensor:
        """Put all that the host reads of each row into one tensor, the same on every rank.

        Rank 0's values reach every rank by one broadcast: unlike machines could round differently,
        and log-probabilities are sums of floats, whose order depends on the threads. Ids alone need
        none where the ranks compared their top tokens, nor between CPU ranks that share memory: the
        gathered logits are the same bits on each, and `llama.ops.sample` adds whole numbers. But
        constraints can be rank 0's alone.

        Returns:
            What `sampler.make_table` makes.
        """
        parallel = self._model.parallel
        table = sampler.make_table(sampled)
        if sampled.logprobs is None:
            is_constrained = any(seq.spec.is_constrained for seq in self._sequences)
            is_alike = parallel.shares_memory_of(table) and not is_constrained
            if self._is_greedy or is_alike:
                return table
        return parallel.broadcast(table.contiguous())

    def _publish(self, results: Tensor) -> Tensor:
        """Return results that are on the host, after others that need them have got them."""
        return results
