"""From what the scheduler chose to sampled ids: packs one flat batch, runs the model, samples.

In: `Scheduled` pairs. Out: a `StepOutput` of plain lists, the same on every rank. It owns the page
tensor. The device is waited for once a step, where the ids come to the host.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from llama.engine.sampler import Sampled, sample, score
from llama.engine.scheduler import Scheduled
from llama.engine.sequence import Sequence
from llama.model import Batch, Transformer

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

    @torch.inference_mode()
    def run(self, scheduled: list[Scheduled]) -> StepOutput:
        sampling = [item.sequence for item in scheduled if item.samples]
        wanted = [
            (item.sequence, offsets)
            for item in scheduled
            if (offsets := item.sequence.rows_to_score(item.count))
        ]
        hidden = self._hidden(scheduled)
        prompts = self._score(wanted, hidden[len(sampling) :])
        if not sampling:
            return StepOutput([], prompts=prompts)
        return self._to_host(sample(self.model.logits(hidden[: len(sampling)]), sampling), prompts)

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
        device = self.kv_cache.device
        batch = Batch.pack(
            [item.sequence.num_computed for item in scheduled],
            [item.count for item in scheduled],
            [item.sequence.pages for item in scheduled],
            self.page_size,
            last_rows + scored_rows,
            device,
        )
        ids = torch.tensor(tokens).to(device, non_blocking=True)
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
            target = torch.tensor(targets[rows], device=hidden.device)
            values, top_ids, top_values = score(self.model.logits(hidden[rows]), target, k)
            logprobs += self._agreed(values).tolist()  # sync
            tops += self._tops(len(target), top_ids, top_values)
        scores, start = [], 0
        for seq, offsets in wanted:
            rows = slice(start, start + len(offsets))
            k = seq.params.prompt_logprobs or 0
            scores.append(PromptScores(seq, logprobs[rows], [top[:k] for top in tops[rows]]))
            start += len(offsets)
        return scores

    def _to_host(self, sampled: Sampled, prompts: list[PromptScores]) -> StepOutput:
        ids = self._agreed(sampled.ids).tolist()  # sync: the one wait of a step
        if sampled.logprobs is None:
            return StepOutput(ids, prompts=prompts)
        logprobs = self._agreed(sampled.logprobs).tolist()
        tops = self._tops(len(ids), sampled.top_ids, sampled.top_logprobs)
        return StepOutput(ids, logprobs, tops, prompts)

    def _tops(self, n: int, ids: Tensor | None, logprobs: Tensor | None) -> list[TopLogprobs]:
        """The likeliest of each of n rows, as (id, log-probability); empty if nobody asked."""
        if ids is None or logprobs is None:
            return [[] for _ in range(n)]
        rows = zip(self._agreed(ids).tolist(), self._agreed(logprobs).tolist(), strict=True)
        return [list(zip(*row, strict=True)) for row in rows]

    def _agreed(self, x: Tensor) -> Tensor:
        """Rank 0's values: ranks on unlike machines could round a draw differently."""
        return self.model.parallel.broadcast(x.contiguous())
