"""The one step: schedule, run, update. Sequences in; sequences with more tokens out.

Every rank runs the same engine on the same sequences and so decides alike; nothing is
remote-controlled. It knows ids only: text is made by those who call it.
"""

import time
from dataclasses import dataclass
from typing import Protocol

from llama.engine.runner import StepOutput
from llama.engine.scheduler import Scheduled, Scheduler
from llama.engine.sequence import Sequence


class RunsSteps(Protocol):
    """What the engine needs of a runner; a fake one tests the engine without a model."""

    def run(self, scheduled: list[Scheduled]) -> StepOutput: ...


@dataclass
class Stats:
    """Counted since the engine was made; a step with any prompt chunk counts as prompt time."""

    steps: int = 0
    prompt_tokens: int = 0  # computed, so without those that were reused
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    generate_seconds: float = 0.0


class EngineCore:
    def __init__(self, runner: RunsSteps, scheduler: Scheduler) -> None:
        if scheduler.token_budget < scheduler.max_batch_size:
            raise ValueError(
                f"a token budget of {scheduler.token_budget} a step cannot serve "
                f"max_batch_size={scheduler.max_batch_size} sequences: raise it to that at least"
            )
        self.runner = runner
        self.scheduler = scheduler
        self.stats = Stats()

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. ValueError if it could never fit, however alone it ran."""
        pool = self.scheduler.pool
        if not 0 < len(seq.tokens) <= seq.limit:
            raise ValueError(f"{len(seq.tokens)} prompt tokens, where 1 to {seq.limit} can be")
        if pool.pages_for(seq.limit) > pool.num_pages:
            raise ValueError(
                f"a sequence of up to {seq.limit} tokens does not fit the "
                f"{pool.num_pages * pool.page_size} that all pages hold"
            )
        self.scheduler.add(seq)

    def abort(self, seq: Sequence, reason: str = "abort") -> None:
        """End a sequence now and free its pages; one that has ended stays as it is."""
        if not seq.finished:
            self.scheduler.abort(seq, reason)

    def has_unfinished(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Sequence]:
        """One pass of the model. Returns the sequences that got a token or ended.

        If the runner fails, every sequence is aborted and its pages are freed before the error goes
        on: the engine is then empty, and takes new ones.
        """
        began = time.perf_counter()
        scheduled = self.scheduler.schedule()
        if not scheduled:
            assert not self.has_unfinished(), "sequences wait, and none can run"
            return []
        try:
            output = self.runner.run(scheduled)
        except BaseException:
            for seq in list(self.scheduler.live()):
                self.abort(seq)
            raise
        before = [(item.sequence, item.samples) for item in scheduled]
        self._count(scheduled, time.perf_counter() - began)
        _keep_prompt_scores(output)
        self.scheduler.update(scheduled, output.ids)
        _keep_logprobs([s for s, sampled in before if sampled], output)
        return [s for s, sampled in before if sampled or s.finished]

    def _count(self, scheduled: list[Scheduled], seconds: float) -> None:
        stats = self.stats
        sampled = sum(item.samples for item in scheduled)
        stats.steps += 1
        stats.generated_tokens += sampled
        stats.prompt_tokens += sum(
            max(0, min(item.count, item.sequence.num_prompt - item.sequence.num_computed))
            for item in scheduled
        )
        if any(item.count > 1 for item in scheduled):
            stats.prompt_seconds += seconds
        else:
            stats.generate_seconds += seconds


def _keep_prompt_scores(output: StepOutput) -> None:
    for scores in output.prompts:
        scores.sequence.prompt_logprobs += scores.logprobs
        scores.sequence.prompt_top_logprobs += scores.tops


def _keep_logprobs(sampling: list[Sequence], output: StepOutput) -> None:
    """One entry a kept token: the id that stopped a sequence is left out, and so is its own."""
    if not output.logprobs:
        return
    for seq, logprob, top in zip(sampling, output.logprobs, output.tops, strict=True):
        if seq.params.logprobs is not None and len(seq.logprobs) < seq.num_output:
            seq.logprobs.append(logprob)
            seq.top_logprobs.append(top[: seq.params.logprobs])
