"""The engine of one stage of a pipeline: steps follow one another through the stages.

In: steps, the same on every rank. Out: their results, the same on every rank. The first stage
embeds the tokens; each stage runs its layers and sends the hidden states on; the last stage samples
and sends what it sampled to all others. With P stages, P steps are in flight. States that requests
capture travel with the hidden states to the last stage, which sends them to all others as well.

A stage replays its part of a step as a graph where it can, see `llama.options.graphs`. Messages
are no part of it: what arrives is copied into the inputs of the graph, and what leaves is a copy of
its outputs, as the next step overwrites them while the message may be under way.

A GPU works on its own, so that each stage starts a step when it is scheduled. On a CPU a stage that
waited for the hidden states of a new step would not compute those of an older one. So stage s runs
a step when s further steps have been scheduled: by then the stage before has computed it, while
this one was computing an older step.

The results of a step have sizes that follow from its rows. All ranks therefore know what to expect,
and begin to receive when the step is scheduled: a message then crosses a network once.
"""

import itertools
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama.common.device import current
from llama.engine import sampler
from llama.engine.constraints import find_failure
from llama.engine.hooks import Inform, Loop, StepHook, Stepper
from llama.engine.processors import LogitsProcessors
from llama.engine.rows import CapturedStates, HiddenStates, Reader, Rows, Scheduled, Tokens
from llama.engine.runner import ModelRunner, RunningStep
from llama.engine.step import Step, StepResults
from llama.ranks.parallel import Link, RankError


class StageRunner(ModelRunner):
    """Runs one stage of a model over its own KV cache; see `ModelRunner`.

    The host knows every token when it schedules the next one of a sequence, so that scheduling is
    not asynchronous in the sense of `ModelRunner`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"async_scheduling": False})
        link = self.model.parallel.link
        assert link is not None, "the model is not a stage of a pipeline"
        self.link: Link = link
        # As many steps are in flight as there are stages, and sequences mostly keep their turns. So
        # each turn has processors of its own, which find the same sequences again.
        stages = self.model.parallel.placement.stages
        self._turns = itertools.cycle([LogitsProcessors() for _ in range(stages)])

    def start_stage(self, step: Step) -> "_EarlierStep | _LastStep":
        """Prepare a step, and begin to receive what it needs."""
        is_last = self.model.parallel.placement.is_last
        self.processors = next(self._turns)
        with torch.inference_mode(), current(self.kv_cache.device):
            return _LastStep(self, step) if is_last else _EarlierStep(self, step)


class Pipeline:
    """The steps in flight on one stage, the oldest first."""

    _is_broken = False  # a step was interrupted: messages of other stages may be under way

    def __init__(self, runner: StageRunner) -> None:
        placement = runner.model.parallel.placement
        self._runner = runner
        self._max_steps = placement.stages
        is_on_cpu = runner.kv_cache.device.type == "cpu"
        self._num_later = placement.stage if is_on_cpu else 0  # steps scheduled before one runs
        self._prepared: deque[_EarlierStep | _LastStep] = deque()  # they have not run yet
        self._running: deque[_EarlierStep | _LastStep] = deque()

    def __len__(self) -> int:
        return len(self._running) + len(self._prepared)

    @property
    def is_full(self) -> bool:
        """Whether a step must be settled before the next one is scheduled."""
        return len(self) == self._max_steps

    def start(self, step: Step) -> None:
        """Take a step, and run the steps whose turn it is now.

        Raises:
            RankError: An earlier step broke off.
        """
        if self._is_broken:
            raise RankError(
                "a step of the pipeline was interrupted, and the stages are out of step: start all "
                "ranks anew"
            )
        self._prepared.append(self._runner.start_stage(step))
        while len(self._prepared) > self._num_later:
            self._run_oldest()

    def settle(self) -> tuple[Step, StepResults]:
        """Wait for the results of the oldest step, and return both."""
        if not self._running:
            self._run_oldest()
        running = self._running.popleft()
        return running.step, running.read()

    def flush(self) -> None:
        """Wait until the other stages have the results that this one has sent."""
        self._runner.link.flush()

    def clear(self) -> None:
        """Forget all steps."""
        self._prepared.clear()
        self._running.clear()

    def break_off(self) -> None:
        """Forget all steps after an error or an interrupt in one; no other can follow."""
        self.clear()
        self._is_broken = True

    def _run_oldest(self) -> None:
        running = self._prepared.popleft()
        with torch.inference_mode(), current(self._runner.kv_cache.device):
            for hook in self._runner.hooks:
                hook.before_pass(running.step)
            running.run()
        self._running.append(running)


class StageStepper(Stepper):
    """Keeps as many steps in flight as there are stages, and reads the oldest of them."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @property
    def has_step_in_flight(self) -> bool:
        """Whether any step is in flight."""
        return bool(self._pipeline)

    def advance(self, core: Loop, inform: Inform) -> list[Step]:
        """Settle the oldest of the steps in flight, and start the next one after the others.

        Where no sequence could run before more results are read, these are read at once.

        Raises:
            RankError: An earlier step broke off.
        """
        pipeline = self._pipeline
        settled: list[Step] = []
        if pipeline.is_full:
            settled.append(self._settle_oldest(core))
        step = core.schedule(inform)
        if step.items:
            pipeline.start(step)
            step.mark_awaited()
        if pipeline and not (step.items and core.has_ready()):
            settled.append(self._settle_oldest(core))
        while pipeline and not core.has_unfinished():  # other stages have begun these, too
            settled.append(self._settle_oldest(core))
        if not core.has_unfinished():
            pipeline.flush()  # the caller may drop the model now, and other stages may be late
        assert step.items or settled or not core.has_unfinished(), "sequences wait, and none runs"
        return settled

    def _settle_oldest(self, core: Loop) -> Step:
        """Wait for the results of the oldest step, give them to its sequences, and return it."""
        step, results = self._pipeline.settle()
        core.update(step, results)
        return step

    def drain(self, core: Loop) -> None:
        """Run the steps in flight to their end, and wait until all results have been sent."""
        while self._pipeline:
            self._settle_oldest(core)
        self._pipeline.flush()

    def forget(self, *, is_broken: bool) -> None:
        """Forget all steps; after one that broke off, no other can follow."""
        if is_broken:
            self._pipeline.break_off()
        else:
            self._pipeline.clear()


class FailedFormats(StepHook):
    """Finds out why a format allowed no token, on stages that do not sample and never asked it."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def after_rows(self, step: Step, results: StepResults) -> None:
        """Ask the constraints of sequences that got no token in this step."""
        for item in step.items:
            seq = item.sequence
            if seq.finish_reason == "error" and seq.constraint is not None:
                find_failure(seq, self._vocab_size)


class _Pass:
    """The pass of a step through the layers of one stage.

    The batch is packed at once: the sequences may have other pages when the step runs.

    Attributes:
        watched: The states that the step captures. They are those of this stage and of the stages
            before it, once the pass has run.
    """

    def __init__(self, runner: StageRunner, step: Step) -> None:
        self._runner = runner
        self.messages = runner.link.new_step()
        self.watched = runner.watched(step)
        num_tokens = sum([item.count for item in step.items])
        self._num_tokens = num_tokens
        self._decode = runner.prepare_replay(step, step.sampled())
        if self._decode is None:
            self._ids, self._batch = runner.pack(step)
        model = runner.model
        self._arriving: list[int] = []  # captured states that come from earlier stages
        self._sizes: list[int] = []  # rows of what arrives: the stream, then each of these states
        self._arrival = None
        if not model.parallel.placement.is_first:
            first_layer = model.plan.share.layers.start
            self._arriving = sorted(layer for layer in self.watched.layers if layer < first_layer)
            num_rows = sum(rows.num_rows for rows in step.rows.values())
            of_tokens = self.watched.of_tokens
            self._sizes = [num_tokens]
            self._sizes += [num_tokens if x in of_tokens else num_rows for x in self._arriving]
            shape = (sum(self._sizes), model.params.dim)
            self._arrival = self.messages.expect_hidden(shape, model.norm.weight)

    def send_on(self) -> None:
        """Compute the hidden states (T, E), and send them and captured ones to the next stage."""
        if self._decode is None:
            x = self._run_layers(self._received())
            states = self.watched.states
            if states:
                x = torch.cat([x, *(states[layer] for layer in sorted(states))])
        else:
            outputs = self._decode(self._received(), wants_logits=False)
            assert isinstance(outputs, Tensor), "an earlier stage decodes nothing"
            x = outputs[: self._num_tokens].clone()
        self.messages.send_hidden(x)

    def finish(self, *, wants_logits: bool) -> HiddenStates:
        """Return the results of the last stage: those of a graph, or normalised states (R, E)."""
        x = self._received()
        if self._decode is not None:
            return self._decode(x, wants_logits=wants_logits)
        return self._runner.model.normalize(self._run_layers(x), self._batch, self.watched)

    def _received(self) -> Tensor | None:
        """Wait for what the stage before sends: hidden states (T, E); None on the first stage."""
        if self._arrival is None:
            return None
        parts: list[Tensor] = [*self._arrival().split(self._sizes)]
        self.watched.states.update(zip(self._arriving, parts[1:], strict=True))
        return parts[0]

    def _run_layers(self, x: Tensor | None) -> Tensor:
        model = self._runner.model
        if x is None:
            x = model.embed(self._ids, self._batch)
        return model.run_layers(x, self._batch, self._runner.kv_cache, self.watched)


class _EarlierStep:
    """A step on a stage that is not the last: it computes hidden states, and receives results.

    It is the `RowComputer` of the step's rows, and computes nothing of them itself.
    """

    def __init__(self, runner: StageRunner, step: Step) -> None:
        self.step = step
        self._runner = runner
        self._pass = _Pass(runner, step)
        self._sequences = [item.sequence for item in step.sampled()]
        self._readers: dict[Any, Reader[Any]] = {}
        for kind, rows in step.rows.items():
            self._readers[kind] = kind.compute(self, None, rows)

    def run(self) -> None:
        """Compute the hidden states, and send them on."""
        self._pass.send_on()

    def read(self) -> StepResults:
        """Wait for the results."""
        with torch.inference_mode():
            return {kind: read() for kind, read in self._readers.items()}

    def sample(self, hidden: HiddenStates) -> Reader[Tokens]:
        """Receive a token after each row of `Step.sampled`."""
        return self._expect(len(self._sequences), sampler.max_top(self._sequences))

    def score(self, hidden: HiddenStates, ids: list[int], num_top: int) -> Reader[Tokens]:
        """Receive the scores of known tokens, one per row."""
        return self._expect(len(ids), num_top)

    def add_up(self, hidden: HiddenStates, counts: list[int]) -> Reader[np.ndarray]:
        """Receive the sums of groups of rows."""
        shape = (len(counts), self._runner.model.params.dim)
        arrived = self._pass.messages.expect_results(shape, torch.float64)
        return lambda: arrived().numpy()

    def captured(self, rows: Rows) -> Reader[CapturedStates]:
        """Receive the captured states of all stages."""
        layers = sorted(self._pass.watched.of_rows)
        model = self._runner.model
        shape = (len(layers), rows.num_rows, model.params.dim)
        arrived = self._pass.messages.expect_results(shape, model.norm.weight.dtype)
        return lambda: dict(zip(layers, arrived(), strict=True))

    def _expect(self, num_rows: int, num_top: int | None) -> Reader[Tokens]:
        width = sampler.num_columns(num_top, self._runner.model.vocab_size)
        arrived = self._pass.messages.expect_results((num_rows, width), sampler.TABLE_DTYPE)
        return lambda: sampler.tokens_of(arrived())


class _LastStep(RunningStep):
    """A step on the last stage, which computes its results, and sends them to all others."""

    def __init__(self, runner: StageRunner, step: Step) -> None:
        self.step = step
        self._pass = _Pass(runner, step)
        self._results: Reader[StepResults] | None = None
        super().__init__(runner, step)
        self._watched = self._pass.watched

    def _run(self, sampled: list[Scheduled]) -> HiddenStates:
        return None  # the stage before has not computed it yet

    def run(self) -> None:
        """Compute the results, and on a CPU send them; on a GPU they are not computed yet."""
        self._hidden = self._pass.finish(wants_logits=self.wants_logits)
        read = self._compute_rows()
        if self._runner.kv_cache.is_cpu:
            results = read()
            self._results = lambda: results
        else:
            self._results = read

    def read(self) -> StepResults:
        """Wait for the results."""
        assert self._results is not None, "the step has not run"
        with torch.inference_mode():
            return self._results()

    def _publish(self, results: Tensor) -> Tensor:
        self._pass.messages.send_results(results)
        return results
