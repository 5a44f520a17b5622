"""From what the scheduler chose to sampled ids: packs one flat batch, runs the model, samples.

In: `Scheduled` items. Out: a `StepOutput` of plain lists, the same on every rank. It owns the KV
cache. The host waits for the device once per step, in `_to_host`, where ids and log-probabilities
come over together; once more per _SCORED_ROWS prompt rows that are scored. On a GPU, rows with
top_p, top_k or min_p cost two more waits, in `llama.ops.sample`.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llama import openmp
from llama.engine.constraints import AllowedTokens
from llama.engine.sampler import (
    Sampled,
    needs_top_only,
    sample,
    score,
    top_of_all,
    top_of_share,
)
from llama.engine.scheduler import Scheduled
from llama.engine.sequence import Sequence
from llama.model import Batch, Transformer
from llama.ops.sample import on_device_of

_SCORED_ROWS = 256  # prompt rows that get logits at once: 256 x 128,256 float32 are 131 MB

TopLogprobs = list[tuple[int, float]]


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of the next prompt tokens of one sequence, in order."""

    sequence: Sequence
    logprobs: list[float]
    tops: list[TopLogprobs]


@dataclass(frozen=True)
class StepOutput:
    """One entry for each scheduled pair that samples, in order; logprobs empty if nobody asked."""

    ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)
    prompts: list[PromptScores] = field(default_factory=list)


class ModelRunner:
    """Runs `model` over `num_pages` pages of `page_size` slots, which it allocates."""

    def __init__(self, model: Transformer, *, num_pages: int, page_size: int) -> None:
        self.model = model
        self.page_size = page_size
        self.kv_cache = model.new_kv_cache(num_pages, page_size)
        self._allowed_tokens = AllowedTokens(model.vocab_size)

    @torch.inference_mode()
    def run(self, scheduled: list[Scheduled]) -> StepOutput:
        openmp.adapt()
        sampling = [item.sequence for item in scheduled if item.samples]
        wanted = [
            (item.sequence, offsets)
            for item in scheduled
            if (offsets := item.sequence.rows_to_score(item.count))
        ]
        allowed = self._allowed_tokens.begin(sampling)
        hidden = self._hidden(scheduled)
        prompts = self._score(wanted, hidden[len(sampling) :])
        if not sampling:
            return StepOutput([], prompts=prompts)
        rows = hidden[: len(sampling)]
        if self.model.parallel.size > 1 and needs_top_only(sampling):
            return StepOutput(self._top_ids(rows), prompts=prompts)
        sampled = sample(self.model.logits(rows), sampling, allowed)
        is_constrained = any(seq.is_constrained for seq in sampling)
        return self._to_host(sampled, prompts, is_alike=not is_constrained)

    def _top_ids(self, hidden: Tensor) -> list[int]:
        """hidden (B, E) -> the ids that `sample` would choose, in one exchange of 8 bytes a row.

        All ranks hold the same pairs then, and only compare them: no rank's word is needed after
        it, not even between unlike machines.
        """
        parallel, share = self.model.parallel, self.model.logits_share(hidden)
        own = top_of_share(share, parallel.rank * share.shape[-1])
        return top_of_all(parallel.all_gather(own)).tolist()

    def _hidden(self, scheduled: list[Scheduled]) -> Tensor:
        """(R, E): the last row of each that samples, then the rows that score prompt tokens."""
        tokens: list[int] = []
        last_rows: list[int] = []
        scored_rows: list[int] = []
        for item in scheduled:
            seq, first = item.sequence, len(tokens)
            tokens += seq.tokens[seq.num_computed : seq.num_computed + item.count]
            if item.samples:
                last_rows.append(len(tokens) - 1)
            scored_rows += [first + offset for offset in seq.rows_to_score(item.count)]
        ids, batch = Batch.pack(
            tokens,
            [item.sequence.num_computed for item in scheduled],
            [item.count for item in scheduled],
            [item.sequence.pages for item in scheduled],
            self.page_size,
            last_rows + scored_rows,
            self.kv_cache.device,
        )
        return self.model.hidden_states(ids, batch, self.kv_cache)

    def _score(self, wanted: list[tuple[Sequence, range]], hidden: Tensor) -> list[PromptScores]:
        """Chunk by chunk, since a row of logits is far wider than a row of hidden states."""
        if not wanted:
            return []
        targets = [seq.tokens[seq.num_computed + o + 1] for seq, offsets in wanted for o in offsets]
        k = max(seq.params.prompt_logprobs or 0 for seq, _ in wanted)
        logprobs: list[float] = []
        tops: list[TopLogprobs] = []
        for start in range(0, len(targets), _SCORED_ROWS):
            rows = slice(start, start + _SCORED_ROWS)
            target = on_device_of(hidden, targets[rows])
            scored = Sampled(target, *score(self.model.logits(hidden[rows]), target, k))
            output = self._to_host(scored)
            logprobs += output.logprobs
            tops += output.tops
        scores, start = [], 0
        for seq, offsets in wanted:
            rows = slice(start, start + len(offsets))
            k = seq.params.prompt_logprobs or 0
            scores.append(PromptScores(seq, logprobs[rows], [top[:k] for top in tops[rows]]))
            start += len(offsets)
        return scores

    def _to_host(
        self, sampled: Sampled, prompts: Seq[PromptScores] = (), *, is_alike: bool = True
    ) -> StepOutput:
        """Rank 0's values on every rank: unlike machines could round differently.

        is_alike: every rank chose by the same rules; constraints can be rank 0's alone.
        All of them go through one broadcast and one copy, for which the host waits: as int32,
        where floats keep their bits. Ids alone need no broadcast between CPU ranks that share
        memory: the logits that were gathered are the same bits on each, the machine is one, and
        `llama.ops.sample` adds whole numbers, so that the threads of a rank do not matter.
        Log-probabilities are sums of floats, whose order depends on the threads.
        """
        ids, logprobs = sampled.ids.int()[:, None], sampled.logprobs
        if logprobs is None:
            if not (is_alike and self.model.parallel.shares_memory_of(ids)):
                ids = self._from_rank_0(ids)
            return StepOutput(ids[:, 0].tolist(), prompts=list(prompts))
        columns = [ids, logprobs[:, None].view(torch.int32)]
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            columns += [sampled.top_ids.int(), sampled.top_logprobs.view(torch.int32)]
        host = self._from_rank_0(torch.cat(columns, dim=1))
        k = (host.shape[1] - 2) // 2
        rows = zip(host[:, 2 : 2 + k].tolist(), _as_floats(host[:, 2 + k :]), strict=True)
        tops = [list(zip(*row, strict=True)) for row in rows]
        logprobs_cpu = [value for (value,) in _as_floats(host[:, 1:2])]
        return StepOutput(host[:, 0].tolist(), logprobs_cpu, tops, list(prompts))

    def _from_rank_0(self, x: Tensor) -> Tensor:
        return self.model.parallel.broadcast(x.contiguous()).cpu()


def _as_floats(bits: Tensor) -> list[list[float]]:
    return bits.contiguous().view(torch.float32).tolist()
