"""The one step: schedule, run, update. Sequences in; sequences with more tokens out.

Every rank runs the same core on the same sequences and so decides alike. It knows ids only, and
one thread at a time may use it: `llama.requests` makes text of ids and orders the threads.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from llama.engine.pages import PagePool
from llama.engine.runner import ModelRunner, StepOutput
from llama.engine.scheduler import Scheduled, Scheduler
from llama.engine.sequence import Sequence
from llama.model import Transformer

PAGE_SIZE = 16  # slots: a shared prefix is reused in steps of this many tokens
TOKEN_BUDGET = 2048  # tokens per step: bounds its memory, and the wait between two tokens


class RunsSteps(Protocol):
    """What the core needs of a runner; a fake one tests the core without a model."""

    def run(self, scheduled: list[Scheduled]) -> StepOutput: ...


@dataclass
class Stats:
    """Counted since the core was made; a step with any prompt chunk counts as prompt time."""

    steps: int = 0
    prompt_tokens: int = 0  # computed, so without those that were cached
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    generate_seconds: float = 0.0


class EngineCore:
    def __init__(self, runner: RunsSteps, scheduler: Scheduler) -> None:
        if scheduler.token_budget < scheduler.max_batch_size:
            raise ValueError(
                f"a token budget of {scheduler.token_budget} per step cannot serve "
                f"max_batch_size={scheduler.max_batch_size} sequences: raise it to that at least"
            )
        self.runner = runner
        self.scheduler = scheduler
        self.stats = Stats()

    @classmethod
    def for_model(
        cls,
        model: Transformer,
        *,
        num_pages: int,
        page_size: int = PAGE_SIZE,
        token_budget: int | None = None,
    ) -> "EngineCore":
        """The core of a loaded model: a KV cache of `num_pages` pages, and all that shares it."""
        batch_size = model.params.max_batch_size
        scheduler = Scheduler(
            PagePool(num_pages, page_size),
            max_batch_size=batch_size,
            token_budget=token_budget or max(TOKEN_BUDGET, batch_size),
        )
        return cls(ModelRunner(model, num_pages=num_pages, page_size=page_size), scheduler)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; ValueError as `check`."""
        self.check(seq)
        self.scheduler.add(seq)

    def check(self, seq: Sequence) -> None:
        """ValueError if a sequence could not fit the pages even alone."""
        pool = self.scheduler.pool
        if not 0 < len(seq.tokens) <= seq.max_len:
            raise ValueError(f"{len(seq.tokens)} prompt tokens, where 1 to {seq.max_len} can be")
        if pool.pages_for(seq.max_len) > pool.num_pages:
            raise ValueError(
                f"a sequence of up to {seq.max_len} tokens does not fit the KV cache of "
                f"{pool.num_pages * pool.page_size} tokens"
            )

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence now and free its pages; one that has ended stays as it is."""
        if not seq.finished:
            self.scheduler.finish(seq, reason)

    def has_unfinished(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Sequence]:
        """One pass of the model. Returns the sequences that got a token or ended.

        If the runner fails, every sequence ends with "error" and its pages are freed before the
        exception goes on: the core is then empty, and takes new ones. After an interrupt, call
        `restart`.
        """
        began = time.perf_counter()
        scheduled = self.scheduler.schedule()
        self.before_run(scheduled)
        if not scheduled:
            assert not self.has_unfinished(), "sequences wait, and none can run"
            return []
        try:
            output = self.runner.run(scheduled)
        except Exception:
            self.clear("error")
            raise
        self._count(scheduled, time.perf_counter() - began)
        _keep_scores([item.sequence for item in scheduled if item.samples], output)
        self.scheduler.update(scheduled, output.ids)
        return [item.sequence for item in scheduled if item.samples or item.sequence.finished]

    def before_run(self, scheduled: list[Scheduled]) -> None:
        """Called in each step before the model runs: where rank 0 leads, it tells the others."""

    def clear(self, reason: str) -> None:
        """End every sequence; what is in the pages is forgotten, as a step may have broken off."""
        for seq in list(self.scheduler.live()):
            seq.finish_reason = seq.finish_reason or reason
        self.scheduler.restart(())

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """After an interrupt: compute these again, in their order; all others are forgotten."""
        self.scheduler.restart(sequences)

    def _count(self, scheduled: list[Scheduled], seconds: float) -> None:
        stats = self.stats
        stats.steps += 1
        stats.generated_tokens += sum(item.samples for item in scheduled)
        stats.prompt_tokens += sum(
            max(0, min(item.count, item.sequence.num_prompt - item.sequence.num_computed))
            for item in scheduled
        )
        if any(item.count > 1 for item in scheduled):
            stats.prompt_seconds += seconds
        else:
            stats.generate_seconds += seconds


def _keep_scores(sampling: list[Sequence], output: StepOutput) -> None:
    """Log-probabilities come before their tokens: what has no token is dropped by a restart.

    One entry per chosen token: the id that stops a sequence has one too, the last.
    """
    for scores in output.prompts:
        scores.sequence.prompt_logprobs += scores.logprobs
        scores.sequence.prompt_top_logprobs += scores.tops
    if not output.logprobs:
        return
    rows = zip(sampling, output.ids, output.logprobs, output.tops, strict=True)
    for seq, token, logprob, top in rows:
        if seq.params.logprobs is not None and token >= 0:
            seq.logprobs.append(logprob)
            seq.top_logprobs.append(top[: seq.params.logprobs])
