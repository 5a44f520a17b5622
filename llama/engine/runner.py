"""From what the scheduler chose to sampled ids: packs one flat batch, runs the model, samples.

It owns the KV cache. `start` begins a step, and what it returns, the same `RowResults` on every
rank, waits for the device once. Scoring prompts waits in `start`, once per _SCORED_ROWS rows. On a
GPU without the kernel for sampling, rows with top_p, top_k or min_p cost two more waits.

On a GPU scheduling is asynchronous, as in vLLM: the next step begins before this one is read, and
takes the tokens that this one sampled from the device. Steps of single tokens are replayed as
graphs, see `llama.engine.graphs`; all others run operator by operator.
"""

import contextlib
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from llama.device import current, free_bytes
from llama.engine.constraints import TokenMasks
from llama.engine.graphs import CaptureError, DecodeGraphs, Recorder, bucket_of
from llama.engine.processors import LogitsProcessors
from llama.engine.sampler import Sampled, needs_top_only, sample, score, top_of_ranks
from llama.engine.scheduler import Scheduled
from llama.engine.sequence import RowResults, Sequence, Tokens, TopLogprobs
from llama.model.transformer import Transformer
from llama.ops.batch import Batch
from llama.ops.sample import on_device_of
from llama.ops.triton.kernels import TORCH_ONLY, kernel_errors

_SCORED_ROWS = 256  # prompt rows that get logits at once: 256 x 128,256 float32 are 131 MB


class ModelRunner:
    """Runs `model` over `num_pages` pages of `page_size` slots, which it allocates.

    async_scheduling: a step may start while the one before it is not read; by default on a GPU.
    recorder: of graphs; None runs every step operator by operator.
    reserve: bytes of a step. With graphs the cache has only pages that fit beside both.
    settle: gives the sequences what the step before came to, where rows need it to be sampled.
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
    ) -> None:
        self.model = model
        self.page_size = page_size
        self.settle: Callable[[], None] = lambda: None
        device = model.norm.weight.device
        self.async_scheduling = (
            device.type == "cuda" if async_scheduling is None else async_scheduling
        )
        self._token_masks = TokenMasks(model.vocab_size)
        self._processors = LogitsProcessors()
        most_rows = bucket_of(max(model.params.max_batch_size, 64))  # of a graph, or a step
        self._last_ids = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._last_rows: dict[Sequence, int] = {}  # which row of it is whose
        self._graphs: DecodeGraphs | None = None
        self.num_pages = num_pages  # those that sequences may have
        with model.parallel.step(), current(device):
            if recorder is None:
                self.kv_cache = model.new_kv_cache(num_pages, page_size)
            else:
                self._record(recorder, reserve)

    def _record(self, recorder: Recorder, reserve: int) -> None:
        """The graphs, and the KV cache beside them: they are first tried over one of two pages."""
        model, size = self.model, self.page_size
        small, taken = model.new_kv_cache(2, size), 0
        with contextlib.suppress(CaptureError):  # it is told below
            taken = DecodeGraphs(model, small, recorder, self._last_ids).num_bytes()
        fitting = 2 * (free_bytes(small.device) - taken - reserve) // small.nbytes - 1
        least = -(-model.params.max_seq_len // size)
        fitting = max(least, model.parallel.all_reduce_min(fitting))
        self.num_pages = min(self.num_pages, fitting)
        # One page more than the scheduler knows: a graph's unused rows write there.
        self.kv_cache = model.new_kv_cache(self.num_pages + 1, size)
        self._graphs = DecodeGraphs(model, self.kv_cache, recorder, self._last_ids)
        try:
            self._graphs.record_all()
        except CaptureError as e:
            self._give_up_graphs(e)

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None

    def _give_up_graphs(self, error: CaptureError) -> None:
        """Ranks could not all know of it, so there the error goes on."""
        if not self.model.parallel.is_alone:
            raise error
        warnings.warn(f"steps run without graphs from now on: {error}", stacklevel=2)
        self.close()

    @torch.inference_mode()
    def start(self, scheduled: list[Scheduled]) -> Callable[[], RowResults]:
        """Begin a step, in the order of the calls; what is returned waits for its output."""
        with current(self.kv_cache.device):
            try:
                return self._start(scheduled)
            except kernel_errors() as e:
                if not self.model.parallel.is_alone:  # the other ranks do not know of it
                    raise
                warnings.warn(f"torch runs in place of the GPU's kernels: {e}", stacklevel=2)
                self.close()
                self.model.use_kernels(TORCH_ONLY)
                return self._start(scheduled)

    def _start(self, scheduled: list[Scheduled]) -> Callable[[], RowResults]:
        sampling = [item.sequence for item in scheduled if item.num_samples]
        if scheduled[-1].drafts:  # those with more than one token come last
            verified = [  # each row a sequence as it is there, with the drafts before it
                Scheduled(seq.ahead(item.drafts[:depth]) if depth else seq, item.start + depth, 1)
                for item in scheduled
                for depth, seq in enumerate([item.sequence] * item.num_samples)
            ]
            sampling = [row.sequence for row in verified]
            scheduled = verified if self._graphs is not None else scheduled
        mask = None if self.async_scheduling else self._token_masks.start(sampling)

        def sample_all(logits: Tensor) -> Sampled:
            now = mask
            if self.async_scheduling and any(seq.needs_tokens for seq in sampling):
                self.settle()
                now = self._token_masks.start(sampling, at_once=True)
            return sample(logits, sampling, now, self.model.kernels, self._processors)

        is_greedy, scored = needs_top_only(sampling), Tokens()
        sampled = self._replayed(scheduled, sampling, is_greedy, sample_all)
        if sampled is None:
            hidden = self._hidden(scheduled)
            if len(hidden) > len(sampling):
                scored = self._score(scheduled, hidden[len(sampling) :])
            if not sampling:
                return lambda: RowResults(Tokens(), scored)
            rows = hidden[: len(sampling)]
            if not self.model.parallel.is_alone and is_greedy:
                sampled = Sampled(top_of_ranks(self.model, rows))
            else:
                sampled = sample_all(self.model.logits(rows))
        columns = self._columns(sampled, sampling, is_greedy)
        if self.async_scheduling:
            # Of a row without a token, -1, the next step makes nothing that is read.
            self._last_ids[: len(sampling)] = columns[:, 0].clamp(min=0)
            self._last_rows = {seq: row for row, seq in enumerate(sampling)}
        read = _to_host(columns)
        return lambda: RowResults(_tokens(read()), scored)

    def _replayed(
        self,
        scheduled: list[Scheduled],
        sampling: list[Sequence],
        is_greedy: bool,
        sample_all: Callable[[Tensor], Sampled],
    ) -> Sampled | None:
        """The step by a graph; None where there are none, or not for this kind of step. A step that
        cannot be recorded, for want of memory say, is the end of graphs."""
        graphs, is_alone = self._graphs, self.model.parallel.is_alone
        if graphs is None or not graphs.takes(scheduled):
            return None
        tokens = [seq.tokens[-1] for seq in sampling]
        sources = [self._last_rows[seq] if seq.num_pending else -1 for seq in sampling]
        try:
            wants_logits = is_alone or not is_greedy
            decoded = graphs.run(tokens, sources, scheduled, wants_logits=wants_logits)
        except CaptureError as e:
            self._give_up_graphs(e)
            return None
        if is_greedy or decoded.logits is None:
            return Sampled(decoded.ids[: len(sampling)])
        return sample_all(decoded.logits[: len(sampling)])

    def _hidden(self, scheduled: list[Scheduled]) -> Tensor:
        """(R, E): the rows that sample, then those that score, each in the order of the items."""
        tokens, sampling, scoring = list[int](), list[int](), list[int]()
        pending: list[int] = []  # indices of tokens that the device alone knows
        for item in scheduled:
            seq, first = item.sequence, len(tokens)
            tokens += seq.tokens[item.start : item.start + item.count]
            tokens += item.drafts
            if len(tokens) < first + item.count:
                pending.append(len(tokens))
                tokens.append(0)
            sampling += range(len(tokens) - item.num_samples, len(tokens))
            scoring += [first + offset for offset in item.scores]
        ids, batch = Batch.pack(
            tokens,
            [item.start for item in scheduled],
            [item.count for item in scheduled],
            [item.sequence.pages for item in scheduled],
            self.page_size,
            sampling + scoring,
            self.kv_cache.device,
        )
        if pending:
            last = [self._last_rows[x.sequence] for x in scheduled if x.sequence.num_pending]
            indices, sources = on_device_of(ids, pending), on_device_of(ids, last)
            ids[indices] = self._last_ids[sources]
        return self.model.hidden_states(ids, batch, self.kv_cache)

    def _score(self, scheduled: list[Scheduled], hidden: Tensor) -> Tokens:
        """The known tokens behind rows (R, E), in chunks: rows of logits are far wider."""
        wanted = [x for x in scheduled if x.scores]
        ids = [x.sequence.tokens[x.start + i + 1] for x in wanted for i in x.scores]
        logprobs, tops = list[float](), list[TopLogprobs]()
        k = max((x.sequence.params.prompt_logprobs or 0 for x in wanted), default=0)
        for start in range(0, len(ids), _SCORED_ROWS):
            rows = slice(start, start + _SCORED_ROWS)
            target = on_device_of(hidden, ids[rows])
            scored = Sampled(target, *score(self.model.logits(hidden[rows]), target, k))
            part = _tokens(_to_host(self._columns(scored, [], is_greedy=False))())
            logprobs += part.logprobs
            tops += part.tops
        return Tokens(ids, logprobs, tops)

    def _columns(self, sampled: Sampled, sampling: list[Sequence], is_greedy: bool) -> Tensor:
        """(B, 1), (B, 2) or (B, 2 + 2K) int32: ids, log-probabilities, top ids and theirs.

        Floats keep their bits. Rank 0's values on every rank, by one broadcast: unlike machines
        could round differently, and log-probabilities are sums of floats, whose order depends on
        the threads. Ids alone need none where the ranks compared their top tokens, nor between CPU
        ranks that share memory: the gathered logits are the same bits on each, and
        `llama.ops.sample` adds whole numbers. But constraints can be rank 0's alone.
        """
        parallel = self.model.parallel
        ids = sampled.ids.int()[:, None]
        if sampled.logprobs is None:
            is_constrained = any(seq.is_constrained for seq in sampling)
            is_alike = parallel.shares_memory_of(ids) and not is_constrained
            return ids if is_greedy or is_alike else parallel.broadcast(ids.contiguous())
        columns = [ids, sampled.logprobs[:, None].view(torch.int32)]
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            columns += [sampled.top_ids.int(), sampled.top_logprobs.view(torch.int32)]
        return parallel.broadcast(torch.cat(columns, dim=1))

    def close(self) -> None:
        """Free the graphs: they hold collectives of groups that are about to end."""
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None


def _to_host(x: Tensor) -> Callable[[], Tensor]:
    """Begin to copy; what is returned waits for the copy."""
    if x.device.type != "cuda":
        host = x.cpu()
        return lambda: host
    host = torch.empty_like(x, device="cpu", pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> Tensor:
        copied.synchronize()
        return host

    return read


def _tokens(columns: Tensor) -> Tokens:
    """From what `ModelRunner._columns` made, on the host."""
    ids = columns[:, 0].tolist()
    if columns.shape[1] == 1:
        return Tokens(ids)
    k = (columns.shape[1] - 2) // 2
    rows = zip(columns[:, 2 : 2 + k].tolist(), _as_floats(columns[:, 2 + k :]), strict=True)
    tops = [list(zip(*row, strict=True)) for row in rows]
    return Tokens(ids, [value for (value,) in _as_floats(columns[:, 1:2])], tops)


def _as_floats(bits: Tensor) -> list[list[float]]:
    return bits.contiguous().view(torch.float32).tolist()
