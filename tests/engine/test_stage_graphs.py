"""Graphs of pipeline stages, without a GPU: the stages are threads, and tapes replay their steps.

A message is handed over at the last moment that the sender allows, and not copied: a stage that
overwrites what it has sent shows by a wrong answer.
"""

import queue
import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.drafts import MostlyRight
from helpers.hooks import SeenStates
from helpers.sequences import state_of
from helpers.tape import TapeRecorder
from llama.assembly import assemble
from llama.engine.core import EngineCore
from llama.engine.processors import LogitsProcessors
from llama.engine.request import Capture
from llama.engine.sequence import SequenceState
from llama.kernels.cuda.table import table
from llama.model import Transformer
from llama.model.args import ModelArgs
from llama.ops.kv_cache import FORMATS
from llama.options.engine_options import EngineOptions
from llama.options.graphs.recorder import Outputs
from llama.options.speculation.hook import speculate
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement

PAGE = 4
LIMIT_S = 60.0
ARGS = ModelArgs(
    dim=64, n_layers=5, n_heads=4, n_kv_heads=2, vocab_size=512, multiple_of=32,
    max_seq_len=128, max_batch_size=7,
)  # fmt: skip


class Link:
    """One stage among others in one process, in the place of a `StageLink`."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.is_last = stage, stage == stages - 1
        self.hidden: queue.Queue[Tensor] = queue.Queue()  # what has arrived, in order
        self.results: queue.Queue[Tensor] = queue.Queue()
        self.sent: list[Tensor] = []  # under way
        self.links: list[Link] = []

    def new_step(self) -> "Link":
        return self

    def expect_hidden(self, shape: tuple[int, ...], like: Tensor) -> Callable[[], Tensor]:
        return lambda: self._checked(self.hidden.get(timeout=LIMIT_S), shape)

    def send_hidden(self, x: Tensor) -> None:
        self.deliver()
        self.sent.append(x)

    def flush(self) -> None:
        self.deliver()

    def deliver(self) -> None:
        for x in self.sent:
            self.links[self.stage + 1].hidden.put(x.clone())
        self.sent.clear()

    def expect_results(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        def arrived() -> Tensor:
            self.deliver()
            return self._checked(self.results.get(timeout=LIMIT_S), shape)

        return arrived

    def send_results(self, x: Tensor) -> None:
        for link in self.links[:-1]:
            link.results.put(x)

    def _checked(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        assert tuple(x.shape) == shape
        return x


class Counting(TapeRecorder):
    """Counts the replays."""

    num_replays = 0

    def record(
        self, function: Callable[[], Outputs], inputs: Iterable[Tensor]
    ) -> tuple[Outputs, Callable[[], None]]:
        outputs, replay = super().record(function, inputs)

        def counted() -> None:
            self.num_replays += 1
            replay()

        return outputs, counted


def filled(model: Transformer) -> Transformer:
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.data.normal_(0, 0.3 if weight.dim() > 1 else 1.0)
    return model


def stages_of(whole: Transformer, stages: int) -> list[Transformer]:
    """Return the same model in stages that are linked."""
    links = [Link(stage, stages) for stage in range(stages)]
    models = []
    for stage, link in enumerate(links):
        link.links = links
        at: Any = {"placement": Placement(stage=stage, stages=stages), "link": link}
        model = Transformer(whole.params, parallel=Parallel(**at), kv_format=whole.plan.kv_format)
        model.load_state_dict(whole.state_dict(), strict=False)
        models.append(model)
    return models


def core_of(model: Transformer, recorder: TapeRecorder | None) -> EngineCore:
    return assemble(
        model,
        EngineOptions(
            num_pages=40, page_size=PAGE, token_budget=24, recorder_for=lambda model: recorder
        ),
    ).core


def answers(core: EngineCore) -> list[tuple]:
    """Return what a core answers to requests of several kinds, on too few pages for all of them."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    rng = random.Random(1)
    live = []
    for i in range(10):
        prompt = [rng.randrange(512) for _ in range(rng.randrange(1, 30))]
        live.append(state_of(prompt, len(prompt) + 20, i, **kinds[i % len(kinds)]))
    waiting = live.copy()
    while waiting or core.has_unfinished():
        core.step(waiting[:2])
        del waiting[:2]
    assert core.scheduler.num_preemptions
    return [(seq.tokens, seq.finish_reason, seq.logprobs, seq.prompt_logprobs) for seq in live]


@pytest.mark.parametrize(
    ("stages", "kv_format", "drafts", "prompts"),
    [(2, None, False, True), (3, None, True, False), (3, "int8", False, True)],
)
def test_stages_in_graphs_give_the_answers_of_one_process(stages, kv_format, drafts, prompts):
    """Stages that replay their steps give the answers of one process that does not.

    With P stages, P steps are in flight. Drafts take a row each. With a GPU's kernel for attention,
    in whose place PyTorch computes here, steps with prompts are replayed as well.
    """
    whole = filled(Transformer(ARGS, kv_format=FORMATS[kv_format]))
    wanted = answers(core_of(whole, None))
    models = stages_of(whole, stages)
    for model in models if prompts else ():
        model.use_kernels(table({"attention"}, ()))
    recorders = [Counting.of_model(model) for model in models]
    cores = [core_of(model, recorder) for model, recorder in zip(models, recorders, strict=True)]
    for recorder in recorders:
        recorder.num_replays = 0  # type: ignore[attr-defined]
    for core in cores if drafts else ():
        answered = {seed: tokens for seed, (tokens, *_) in enumerate(wanted)}
        speculate(core, MostlyRight(core.runner.model, answered))
    with ThreadPoolExecutor(stages) as threads:
        for found in threads.map(answers, cores, timeout=LIMIT_S):
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours[:2] == theirs[:2]
                assert ours[2] == pytest.approx(theirs[2], abs=4e-5)
    (replays,) = {recorder.num_replays for recorder in recorders}  # type: ignore[attr-defined]
    num_eager = cores[0].stats.steps - replays
    assert replays > 10 and num_eager < (10 if prompts else 40)
    assert (cores[0].stats.accepted_tokens > 20) == drafts


def test_the_last_stage_sees_the_states_of_all_stages():
    """A hook sees the states of all tokens from the stages before, next to captured ones."""
    whole = filled(Transformer(ARGS))
    numbers = {0, 1, ARGS.n_layers, ARGS.n_layers + 1}

    def seen(core: EngineCore) -> tuple[SeenStates, list[Tensor]]:
        hook = SeenStates(numbers)
        core.hooks.append(hook)
        live = [state_of(range(i, 30), 36, i, temperature=0.0) for i in range(3)]
        live.append(state_of(range(20), 20, 3, capture=Capture((0, 1, 2), last_only=True)))
        for seq in live:
            core.add(seq)
        while core.has_unfinished():
            core.step()
        return hook, [torch.cat(live[3].captured[number]) for number in (0, 1, 2)]

    wanted, captured = seen(core_of(whole, None))
    cores = [core_of(model, None) for model in stages_of(whole, 2)]
    with ThreadPoolExecutor(2) as threads:
        (first, other), (last, same) = threads.map(seen, cores, timeout=LIMIT_S)
    assert not first.states and last.states.keys() == wanted.states.keys()
    for key, states in wanted.states.items():
        assert last.states[key].keys() == states.keys()
        for position, state in states.items():
            assert torch.allclose(last.states[key][position], state, atol=1e-3)
    for each in zip(captured, other, same, strict=True):
        assert all(torch.allclose(x.float(), each[0].float(), atol=1e-3) for x in each)


def test_steps_in_flight_count_the_tokens_of_their_own_sequences(monkeypatch):
    """Two steps in flight have sequences of their own, which take turns.

    The processors of logits look at sequences again only when they have changed, as with one stage.
    """
    begun: list[list[SequenceState]] = []
    begin = LogitsProcessors._begin

    def counted(self: LogitsProcessors, logits: Tensor, sequences: list[SequenceState]) -> None:
        begun.append(sequences)
        begin(self, logits, sequences)

    monkeypatch.setattr(LogitsProcessors, "_begin", counted)

    def tokens(core: EngineCore) -> list[list[int]]:
        live = [state_of([i, 7, i], 40, i, repetition_penalty=1.3) for i in range(4)]
        for seq in live:
            core.add(seq)
        while core.has_unfinished():
            core.step()
        return [seq.tokens for seq in live]

    whole = filled(Transformer(ARGS))
    wanted = tokens(core_of(whole, None))
    begun.clear()
    cores = [core_of(model, None) for model in stages_of(whole, 2)]
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(tokens, cores, timeout=LIMIT_S)] == [wanted, wanted]
    assert cores[0].stats.steps > 60 and len(begun) < 8


@pytest.mark.parametrize("kind", ["single tokens", "prompts"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_that_replays_wrongly_is_found_at_build(stage, kind):
    """Each stage compares its own part of a replayed step with that of the step."""

    class Tape(TapeRecorder):
        def record(
            self, function: Callable[[], Outputs], inputs: Iterable[Tensor]
        ) -> tuple[Outputs, Callable[[], None]]:
            outputs, replay = super().record(function, inputs)
            is_mixed = len(outputs[-1]) >= 32  # a stage has 64 rows, the last one 32 results

            def wrong() -> None:
                replay()
                if is_mixed == (kind == "prompts"):
                    outputs[-1].mul_(2)

            return outputs, wrong

    model = stages_of(filled(Transformer(ARGS)), 3)[stage]
    model.use_kernels(table({"attention"}, ()))
    assert core_of(model, TapeRecorder.of_model(model)).runner.replayer
    wrong = "logits" if stage == 2 else "hidden states"
    with pytest.warns(UserWarning, match=f"steps run without graphs .* wrong: {wrong} are off"):
        assert not core_of(model, Tape.of_model(model)).runner.replayer


@pytest.mark.parametrize("fails", ["here", "there"])
def test_stages_give_up_graphs_together(fails):
    """Where one stage cannot record its steps, all run them operator by operator."""

    class Agreeing(Parallel):
        def all_reduce_min(self, value: int) -> int:
            return value if value > 1 else min(value, fails != "there")

    class NoRoom(TapeRecorder):
        def record(
            self, function: Callable[[], Outputs], inputs: Iterable[Tensor]
        ) -> tuple[Outputs, Callable[[], None]]:
            raise torch.OutOfMemoryError("no room")

    link: Any = Link(0, 2)
    parallel = Agreeing(Placement(stage=0, stages=2), link=link)
    model = Transformer(ARGS, parallel=parallel)
    recorder = (NoRoom if fails == "here" else TapeRecorder).of_model(model)
    reason = "no room" if fails == "here" else "another rank cannot record them"
    with pytest.warns(UserWarning, match=f"steps run without graphs from now on: .*{reason}"):
        core = core_of(model, recorder)
    assert not core.runner.replayer and core.scheduler.pool.num_pages == 40
