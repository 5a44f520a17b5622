"""The engine core and its one step: schedule, run, update.

In: sequences. Out: the same sequences with more tokens. With asynchronous scheduling (on a GPU), a
step is scheduled and started before the one in flight is read, so that the device does not wait for
the host: `step` starts one and reads the previous one. A `Stepper` decides that; the stages of a
pipeline have one of their own.

Every rank runs the same core on the same sequences and so decides alike. It knows ids only, and
one thread at a time may use it: `llama.requests` decodes the text and orders the threads.
Speculation, adapters and all other options are `StepHook`s, which `llama.assembly` passes in.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from llama.engine.hooks import Inform, Loop, StepHook, Stepper
from llama.engine.rows import VERIFY, Reader, Scheduled
from llama.engine.runner import ModelRunner
from llama.engine.scheduler import Scheduler
from llama.engine.sequence import FinishReason, SequenceState
from llama.engine.step import Step, StepResults
from llama.model.args import ModelArgs

PAGE_SIZE = 16  # slots; a shared prefix is reused in multiples of this many tokens
TOKEN_BUDGET = 2048  # tokens per step: bounds its memory, and the wait between two tokens


def step_tokens(
    params: ModelArgs, batch_size: int, stages: int = 1, budget: int | None = None
) -> int:
    """Return the maximum number of tokens of a step; a bidirectional model has whole prompts.

    Args:
        params: The model's sizes.
        batch_size: The sequences that run at once.
        stages: The stages of a pipeline.
        budget: The tokens of all stages together; None: TOKEN_BUDGET.
    """
    longest = 0 if params.is_causal else params.max_seq_len
    # A prompt of as many tokens as a step may have would keep one stage busy, and no other.
    return max((budget or TOKEN_BUDGET) // stages, batch_size, longest)


@dataclass
class Stats:
    """Counters since the core was made; a step with any prompt chunk counts as prompt time.

    Attributes:
        prompt_tokens: Prompt tokens that were computed, without cached ones.
        drafts: Drafts that were verified, one per sequence and step.
        accepted_at: Accepted draft tokens by their index in the draft.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)
    prompt_seconds: float = 0.0
    generate_seconds: float = 0.0

    def count(self, step: Step, seconds: float) -> None:
        """Count a step that has been started, and read where it has drafts."""
        if not step.items:
            return
        self.steps += 1
        self.generated_tokens += len(step.sampling_items())
        if VERIFY in step.rows:
            self._count_drafts(step.rows[VERIFY].items)
        for item in step.items:
            num_uncomputed = item.sequence.num_prompt - item.start
            if num_uncomputed > 0:
                self.prompt_tokens += min(item.count, num_uncomputed)
        has_prompt = VERIFY not in step.rows and step.items[-1].count > 1  # single tokens are first
        if has_prompt:
            self.prompt_seconds += seconds
        else:
            self.generate_seconds += seconds

    def _count_drafts(self, items: list[Scheduled]) -> None:
        """Count the drafts of a step; those that were wrong have been taken off the items."""
        for item in items:
            if item.count > 1:
                self.drafts += 1
                self.draft_tokens += item.count - 1
                self.generated_tokens += len(item.drafts)
                self.accepted_tokens += len(item.drafts)
                self.accepted_at.update(range(len(item.drafts)))


class OverlappedStepper(Stepper):
    """At most one step in flight: it is read after the next one has been started.

    Without asynchronous scheduling, each step is read at once.
    """

    def __init__(self) -> None:
        self._in_flight: tuple[Step, Reader[StepResults]] | None = None  # started, and not read yet

    @property
    def has_step_in_flight(self) -> bool:
        """Whether a step was started and not read."""
        return self._in_flight is not None

    def advance(self, core: Loop, inform: Inform) -> list[Step]:
        """Start the next step, and read the one before it."""
        step = core.schedule(inform)
        if not step.items and self._in_flight is None:
            assert not core.has_unfinished(), "sequences wait, and none can run"
            return []
        started = self._start(core, step) if step.items else None
        self._settle(core)
        self._in_flight = started
        if not core.runner.async_scheduling or step.is_read_at_once:
            self._settle(core)
        if not core.has_unfinished():
            self._in_flight = None  # nobody wants its results
        return [step]

    def _start(self, core: Loop, step: Step) -> tuple[Step, Reader[StepResults]]:
        """Start a step.

        The step in flight is read between the pass of the model and the sampling, where a row needs
        its tokens.
        """
        running = core.runner.start(step)
        if self._in_flight is not None and running.needs_tokens:
            self._settle(core)
        read = running.compute_rows()
        step.mark_pending()
        return step, read

    def _settle(self, core: Loop) -> None:
        """Read the step in flight, if there is one, and give the sequences its results."""
        if self._in_flight is not None:
            step, read = self._in_flight
            self._in_flight = None
            core.update(step, read())

    def drain(self, core: Loop) -> None:
        """Leave the step in flight as it is: no other rank waits for its results."""

    def forget(self, *, is_broken: bool) -> None:
        """Forget the step in flight."""
        self._in_flight = None


class EngineCore:
    """The scheduler, the runner of the model, and the steps in flight.

    `llama.assembly.assemble` makes the core of a loaded model.

    Args:
        runner: The runner of the model.
        scheduler: The scheduler, with the page pool of the model's KV cache.
        stepper: Starts and reads steps; by default one is in flight at most.
        hooks: The options that take part in each step, in this order. The runner has the same list.

    Attributes:
        explain_failure: Is called once, on every rank, when a row first has no token to choose.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        stepper: Stepper | None = None,
        hooks: list[StepHook] | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.hooks = [] if hooks is None else hooks
        self.explain_failure: Callable[[], None] | None = None
        self.stats = Stats()
        self._stepper = stepper or OverlappedStepper()
        self._seconds = 0.0  # the time since steps were last counted
        self._moved: list[SequenceState] = []  # sequences that this step gave a token or ended
        self._resting: frozenset[SequenceState] = frozenset()  # sequences that sit out this step

    def add(self, seq: SequenceState) -> None:
        """Queue a sequence.

        Raises:
            ValueError: It could not fit the pages even alone.
        """
        pool = self.scheduler.pool
        longest = seq.spec.max_len
        if not 0 < len(seq.tokens) <= longest:
            raise ValueError(f"the prompt has {len(seq.tokens)} tokens: give 1 to {longest}")
        if self.scheduler.max_pages(seq) > pool.num_pages:
            raise ValueError(
                f"a sequence of up to {longest} tokens does not fit the KV cache of "
                f"{pool.num_pages * pool.page_size} tokens"
            )
        self.scheduler.waiting.add(seq)

    def finish(self, seq: SequenceState, reason: FinishReason) -> None:
        """End a sequence now and free its pages; one that has ended stays as it is."""
        if not seq.finished:
            seq.finish_reason = reason
            self.scheduler.remove(seq)

    def has_unfinished(self) -> bool:
        """Return whether any sequence runs or waits."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def has_ready(self) -> bool:
        """Return whether a sequence may run before more results are read."""
        return self.scheduler.has_ready()

    @property
    def has_step_in_flight(self) -> bool:
        """Whether a step is in flight that the next one will read."""
        return self._stepper.has_step_in_flight

    def step(
        self,
        added: Iterable[SequenceState] = (),
        removed: Iterable[SequenceState] = (),
        inform: Inform = None,
        resting: Iterable[SequenceState] = (),
    ) -> list[SequenceState]:
        """Run one pass of the model, and return the sequences that got a token or ended.

        With asynchronous scheduling the result is that of the previous pass, and the first pass
        returns nothing. If the runner fails, every sequence that has run ends with "error", and its
        pages are freed before the exception is raised; the next step runs the others.

        Args:
            added: The sequences that came since the last step.
            removed: The sequences that are no longer wanted.
            inform: Gets the scheduled step; where rank 0 leads, it informs the other ranks.
            resting: Sequences that sit out this step, unless nothing else can run.
        """
        began = time.perf_counter()
        self._moved = []
        self._resting = frozenset(resting)
        for hook in self.hooks:
            hook.begin()
        for seq in added:
            self.add(seq)
        for seq in removed:
            self.finish(seq, "abort")
        try:
            counted = self._stepper.advance(self, inform)
        except Exception:
            self.break_off("error")
            raise
        self._count(counted, time.perf_counter() - began)
        return list(dict.fromkeys(self._moved))

    def schedule(self, inform: Inform) -> Step:
        """Return the next step, with what the hooks add to it."""
        step = self.scheduler.schedule(self._resting)
        if self._resting and not step.items and not self.has_step_in_flight:
            step = self.scheduler.schedule()
        if inform is not None:
            inform(step)
        if step.items:
            for hook in self.hooks:
                hook.before_pack(step)
        return step

    def update(self, step: Step, results: StepResults) -> None:
        """Give the sequences of a step its results, and forget those that have ended."""
        moved = self.scheduler.update(step, results)
        for hook in self.hooks:
            hook.after_rows(step, results)
        for seq in moved:
            if seq.finish_reason is not None:
                self.scheduler.remove(seq)
        self._moved += moved
        if self.explain_failure is not None and any(map(_has_no_token, self._moved)):
            explain = self.explain_failure
            self.explain_failure = None
            explain()

    def _count(self, steps: list[Step], seconds: float) -> None:
        """Count steps, among which the time since the last count is divided."""
        self._seconds += seconds
        for step in steps:
            self.stats.count(step, self._seconds / len(steps))
        if steps:
            self._seconds = 0.0

    def drain(self) -> None:
        """Run the steps to their end for whose results other ranks wait."""
        self._stepper.drain(self)

    def break_off(self, reason: FinishReason) -> None:
        """End the sequences that a step which broke off may have left in any state.

        The content of all pages is forgotten. Sequences that never ran go on waiting.
        """
        self._stepper.forget(is_broken=True)
        for seq in self.scheduler.started():
            seq.finish_reason = seq.finish_reason or reason
        self.scheduler.clear_started()
        for hook in self.hooks:
            hook.broke_off()

    def clear(self, reason: FinishReason) -> None:
        """End every sequence, and forget the content of all pages."""
        self._stepper.forget(is_broken=False)
        for seq in self.scheduler.live():
            seq.finish_reason = seq.finish_reason or reason
        self.scheduler.clear()

    def close(self) -> None:
        """Free the KV cache and what the options hold on the device."""
        for hook in self.hooks:
            hook.close()
        self.runner.close()


def _has_no_token(seq: SequenceState) -> bool:
    """Return whether a sequence ended because there was no token to choose."""
    has_failed_format = seq.constraint is not None and seq.constraint.failure
    return seq.finish_reason == "error" and not has_failed_format
