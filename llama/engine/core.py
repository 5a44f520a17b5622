"""The engine core and its one step: schedule, run, update.

In: sequences. Out: the same sequences with more tokens. With asynchronous scheduling (on a GPU), a
step is scheduled and started before the one in flight is read, so that the device does not wait for
the host: `step` starts one and reads the previous one. With P pipeline stages, `step` starts one
and reads the one that was started P steps before, see `llama.engine.stages`.

Every rank runs the same core on the same sequences and so decides alike. It knows ids only, and
one thread at a time may use it: `llama.requests` decodes the text and orders the threads. The file
has over 400 lines because everything that a step changes is in one class.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from llama.checkpoint.lora.unmerged import LoadedAdapter
from llama.engine.constraints import find_failure
from llama.engine.draft_model import ModelDrafter
from llama.engine.lookup import Speculator
from llama.engine.pages import PagePool
from llama.engine.recorder import Recorder
from llama.engine.rows import VERIFY, Reader, Scheduled
from llama.engine.runner import ModelRunner
from llama.engine.scheduler import Scheduler
from llama.engine.sequence import FinishReason, SequenceState
from llama.engine.speculative import Drafter
from llama.engine.stages import Pipeline, StageRunner
from llama.engine.step import Step, StepResults
from llama.model.args import ModelArgs
from llama.model.transformer import Transformer
from llama.ops.cpu.openmp import SpinController
from llama.ranks.parallel import Parallel

PAGE_SIZE = 16  # slots; a shared prefix is reused in multiples of this many tokens
TOKEN_BUDGET = 2048  # tokens per step: bounds its memory, and the wait between two tokens
# The tokens of prompts that a step of a pipeline has at least, on a CPU and on other devices. With
# fewer, reading the weights would take longer than the products.
_MIN_PROMPT_TOKENS_CPU = 32
_MIN_PROMPT_TOKENS = 512


def step_tokens(params: ModelArgs, batch_size: int, stages: int = 1) -> int:
    """Return the maximum number of tokens of a step; a bidirectional model has whole prompts."""
    longest = 0 if params.is_causal else params.max_seq_len
    # A prompt of as many tokens as a step may have would keep one stage busy, and no other.
    return max(TOKEN_BUDGET // stages, batch_size, longest)


_Started = tuple[Step, Reader[StepResults]]


@dataclass(frozen=True)
class DrafterKind:
    """A drafter that needs no draft model.

    Attributes:
        make: Makes the drafter of `max_drafts` and a rank among its peers. The last argument says
            whether it may use the texts of other requests.
        can_share: Whether it has a use for these texts, so that `speculate_shared` is allowed.
    """

    make: Callable[[int, Parallel, bool], Drafter]
    can_share: bool = False


# The drafters, by the value of `speculate`. Every other value is a draft model.
DRAFTERS = {"lookup": DrafterKind(Speculator, can_share=True)}


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


class EngineCore:
    """The scheduler, the runners of the model and its draft model, and the step in flight.

    Args:
        runners: The runner of the draft model, if there is one, then that of the model.
        scheduler: The scheduler, with the page pool of the model's KV cache.

    Attributes:
        explain_failure: Is called once, on every rank, when a row first has no token to choose.
    """

    def __init__(self, runners: list[ModelRunner], scheduler: Scheduler) -> None:
        self.runners = runners
        self.runner = runners[-1]
        self.scheduler = scheduler
        self._pipeline = Pipeline(self.runner) if isinstance(self.runner, StageRunner) else None
        self._spin = SpinController.for_this_process()
        self.drafter: Drafter | None = None
        self.explain_failure: Callable[[], None] | None = None
        self.stats = Stats()
        self._in_flight: _Started | None = None  # started, and not read yet
        self._seconds = 0.0  # the time of a pipeline since its last step was counted
        self._moved: list[SequenceState] = []  # sequences that this step gave a token or ended

    @classmethod
    def for_model(
        cls,
        model: Transformer,
        *,
        num_pages: int,
        page_size: int = PAGE_SIZE,
        token_budget: int | None = None,
        draft_model: Transformer | None = None,
        recorder_for: Callable[[Transformer], Recorder | None] = lambda model: None,
        **runner_options: Any,
    ) -> "EngineCore":
        """Return the core of a loaded model.

        Args:
            model: The model.
            num_pages: The pages of its KV cache.
            page_size: The slots of a page.
            token_budget: The maximum number of tokens in a step.
            draft_model: A draft model; its KV cache is allocated first.
            recorder_for: Returns the recorder of a model's graphs, or None for no graphs.
            **runner_options: Further arguments of `ModelRunner`.
        """
        batch_size = model.params.max_batch_size
        stages = model.parallel.placement.stages
        token_budget = token_budget or step_tokens(model.params, batch_size, stages)
        runner_options |= {"num_pages": num_pages, "page_size": page_size}
        runner_options |= {"step_tokens": token_budget}
        models = [model] if draft_model is None else [draft_model, model]
        runner_class = StageRunner if stages > 1 else ModelRunner
        runners = [runner_class(x, recorder=recorder_for(x), **runner_options) for x in models]
        is_on_cpu = model.norm.weight.is_cpu
        scheduler = Scheduler(
            PagePool(runners[-1].num_pages, page_size),
            max_batch_size=batch_size,
            token_budget=token_budget,
            num_stages=stages,
            min_prompt_tokens=_MIN_PROMPT_TOKENS_CPU if is_on_cpu else _MIN_PROMPT_TOKENS,
            has_whole_prompts=not model.params.is_causal,
        )
        return cls(runners, scheduler)

    def speculate(self, max_draft: int, name: str = "lookup", *, is_shared: bool = False) -> None:
        """Speculate from now on, with the draft model, if the core has one.

        Steps do not overlap then, since a draft follows the last token.

        Args:
            max_draft: The maximum number of draft tokens of a sequence in a step.
            name: The drafter of `DRAFTERS` that is used without a draft model.
            is_shared: Whether that drafter may use the texts of other requests.
        """
        self.runner.async_scheduling = False
        if len(self.runners) > 1:
            self.drafter = ModelDrafter(max_draft, self.runners[0], self.scheduler)
        else:
            parallel = self.runner.model.parallel
            self.drafter = DRAFTERS[name].make(max_draft, parallel, is_shared)

    def read_adapter(self, path: str) -> LoadedAdapter:
        """Read a LoRA adapter for the model, in any thread, without adding it.

        Raises:
            OSError: A file is missing or cannot be read.
            ValueError: The adapter cannot be used; the message says why.
        """
        return self.runner.adapters.read(path)

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Let sequences choose an adapter from the next step on."""
        self.runner.adapters.add(adapter)
        self.scheduler.has_adapters = True

    def drop_adapter(self, digest: bytes) -> None:
        """Forget an adapter that no live sequence has; the draft model never has one."""
        self.runner.adapters.drop(digest)
        self.scheduler.has_adapters = bool(self.runner.adapters)

    def add(self, seq: SequenceState) -> None:
        """Queue a sequence.

        Raises:
            ValueError: It could not fit the pages even alone.
        """
        pool = self.scheduler.pool
        longest = seq.spec.max_len
        if not 0 < len(seq.tokens) <= longest:
            raise ValueError(f"the prompt has {len(seq.tokens)} tokens: give 1 to {longest}")
        if pool.pages_for(longest) > pool.num_pages:
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

    @property
    def has_step_in_flight(self) -> bool:
        """Whether a step is in flight that the next one will read."""
        return bool(self._pipeline) or self._in_flight is not None

    def step(
        self,
        added: Iterable[SequenceState] = (),
        removed: Iterable[SequenceState] = (),
        before_run: Callable[[Step], None] | None = None,
    ) -> list[SequenceState]:
        """Run one pass of the model, and return the sequences that got a token or ended.

        With asynchronous scheduling the result is that of the previous pass, and the first pass
        returns nothing. If the runner fails, every sequence that has run ends with "error", and its
        pages are freed before the exception is raised; the next step runs the others.

        Args:
            added: The sequences that came since the last step.
            removed: The sequences that are no longer wanted.
            before_run: Gets the scheduled step; where rank 0 leads, it informs the other ranks.
        """
        began = time.perf_counter()
        self._moved = []
        if self._spin is not None:
            self._spin.poll()
        for seq in added:
            self.add(seq)
        for seq in removed:
            self.finish(seq, "abort")
        if self._pipeline is not None:
            return self._step_of_pipeline(self._pipeline, before_run, began)
        step = self.scheduler.schedule()
        if before_run is not None:
            before_run(step)
        if not step.items and not self.has_step_in_flight:
            assert not self.has_unfinished(), "sequences wait, and none can run"
            return []
        try:
            self._draft(step)
            started = self._start(step)
            self._settle()
            self._in_flight = started
            if not self.runner.async_scheduling or step.is_read_at_once:
                self._settle()
        except Exception:
            self.break_off("error")
            raise
        self.stats.count(step, time.perf_counter() - began)
        if not self.has_unfinished():
            self._in_flight = None  # nobody wants its results
        return list(dict.fromkeys(self._moved))

    def _step_of_pipeline(
        self, pipeline: Pipeline, before_run: Callable[[Step], None] | None, began: float
    ) -> list[SequenceState]:
        """Settle the oldest of the steps in flight, and start the next one behind the others.

        Where no sequence could run before more results are read, these are read at once.

        Args:
            pipeline: The steps in flight.
            before_run: See `step`.
            began: When this step began, by `time.perf_counter`.
        """
        settled: list[Step] = []
        try:
            if pipeline.is_full:
                settled.append(self._settle_oldest(pipeline))
            step = self.scheduler.schedule()
            if before_run is not None:
                before_run(step)
            if step.items:
                self._draft(step)
                pipeline.start(step)
                step.mark_awaited()
            if pipeline and not (step.items and self.scheduler.has_ready()):
                settled.append(self._settle_oldest(pipeline))
            while pipeline and not self.has_unfinished():  # other stages have begun these, too
                settled.append(self._settle_oldest(pipeline))
            if not self.has_unfinished():
                pipeline.flush()  # the caller may drop the model now, and other stages may be late
        except Exception:
            self.break_off("error")
            raise
        self._seconds += time.perf_counter() - began
        for each in settled:
            self.stats.count(each, self._seconds / len(settled))
        if settled:
            self._seconds = 0.0
        assert step.items or settled or not self.has_unfinished(), "sequences wait, and none runs"
        return list(dict.fromkeys(self._moved))

    def _settle_oldest(self, pipeline: Pipeline) -> Step:
        """Wait for the results of the oldest step, give them to its sequences, and return it."""
        step, results = pipeline.settle()
        self._update(step, results)
        return step

    def drain(self) -> None:
        """Run the steps in flight to their end; every rank of a pipeline must do so alike."""
        while self._pipeline:
            self._settle_oldest(self._pipeline)
        if self._pipeline is not None:
            self._pipeline.flush()

    def _draft(self, step: Step) -> None:
        """Add drafts to a decode step, if this core speculates."""
        if self.drafter is not None and step.is_decode:
            sequences = [item.sequence for item in step.items]
            drafts = self.drafter.draft(sequences, self.stats.generate_seconds)
            self.scheduler.add_drafts(step, drafts)

    def _start(self, step: Step) -> _Started | None:
        """Start a step, if it has tokens.

        The step in flight is read between the pass of the model and the sampling, where a row needs
        its tokens.
        """
        if not step.items:
            return None
        running = self.runner.start(step)
        if self._in_flight is not None and running.needs_tokens:
            self._settle()
        read = running.compute_rows()
        step.mark_pending()
        return step, read

    def _settle(self) -> None:
        """Read the step in flight, if there is one, and give the sequences its results."""
        if self._in_flight is not None:
            step, read = self._in_flight
            self._in_flight = None
            self._update(step, read())

    def _update(self, step: Step, results: StepResults) -> None:
        """Give the sequences of a step its results."""
        moved = self.scheduler.update(step, results)
        self._moved += moved
        if self._pipeline is not None:  # Only the last stage has asked the constraints.
            for seq in moved:
                if seq.finish_reason == "error" and seq.constraint is not None:
                    find_failure(seq, self.runner.model.vocab_size)
        if self.explain_failure is not None and any(map(_has_no_token, self._moved)):
            explain = self.explain_failure
            self.explain_failure = None
            explain()

    def _forget_in_flight(self) -> None:
        self._in_flight = None
        if self._pipeline is not None:
            self._pipeline.clear()

    def break_off(self, reason: FinishReason) -> None:
        """End the sequences that a step which broke off may have left in any state.

        The content of all pages is forgotten. Sequences that never ran go on waiting.
        """
        self._forget_in_flight()
        if self._pipeline is not None:
            self._pipeline.break_off()
        for seq in self.scheduler.started():
            seq.finish_reason = seq.finish_reason or reason
        self.scheduler.clear_started()

    def clear(self, reason: FinishReason) -> None:
        """End every sequence, and forget the content of all pages."""
        self._forget_in_flight()
        for seq in self.scheduler.live():
            seq.finish_reason = seq.finish_reason or reason
        self.scheduler.clear()

    def close(self) -> None:
        """Free the graphs, which hold collectives of groups that are about to end."""
        if self._spin is not None:
            self._spin.spin.turn_off()
        for runner in self.runners:
            runner.close()


def _has_no_token(seq: SequenceState) -> bool:
    """Return whether a sequence ended because there was no token to choose."""
    has_failed_format = seq.constraint is not None and seq.constraint.failure
    return seq.finish_reason == "error" and not has_failed_format
