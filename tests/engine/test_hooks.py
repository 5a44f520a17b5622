"""What an option gets of each step through `StepHook`, and that the core calls it in order."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.hooks import SeenStates
from helpers.sequences import state_of
from helpers.tape import TapeRecorder
from llama.assembly import assemble
from llama.engine.hooks import StepHook
from llama.engine.request import Capture
from llama.engine.sequence import SequenceState
from llama.engine.step import Step, StepResults
from llama.model import Transformer
from llama.model.args import ModelArgs
from llama.options.engine_options import EngineOptions
from llama.options.speculation.drafter import Drafter, DraftState
from llama.options.speculation.hook import speculate
from llama.ranks.parallel import Parallel

ARGS = ModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=300, multiple_of=32, max_seq_len=64,
    max_batch_size=4,
)  # fmt: skip
NORMALIZED = ARGS.n_layers + 1  # the number of the states from which logits are computed


@pytest.fixture(scope="module")
def model() -> Transformer:
    made = Transformer(ARGS)
    generator = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        weight.data.normal_(0, 0.3 if weight.dim() > 1 else 1.0, generator=generator)
    return made


class Watching(StepHook):
    """Keeps what it is told, and the order of the calls."""

    wanted_states = frozenset({NORMALIZED})

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.states: list[Tensor] = []
        self.sampled: list[int] = []
        self.ended: list[str] = []
        self.sequences: list[SequenceState] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def before_pack(self, step: Step) -> None:
        self.calls.append("before_pack")
        self.sequences = [item.sequence for item in step.items]

    def see(self, step: Step, states: dict[int, Tensor]) -> None:
        self.calls.append("see")
        self.states.append(states[NORMALIZED][step.result_rows()])

    def after_rows(self, step: Step, results: StepResults) -> None:
        self.calls.append("after_rows")
        self.sampled += [item.sequence.tokens[-1] for item in step.sampling_items()]

    def broke_off(self) -> None:
        self.calls.append("broke_off")
        self.ended += [str(seq.finish_reason) for seq in self.sequences]

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_hook_sees_the_hidden_states_from_which_tokens_are_sampled(model, graphs):
    """The top tokens of the states that a hook sees are the tokens that are sampled.

    Where graphs are recorded, steps run operator by operator as long as the hook wants states.
    """
    core = assemble(
        model,
        EngineOptions(
            num_pages=20, recorder_for=TapeRecorder.of_model if graphs else lambda model: None
        ),
    ).core
    hook = Watching()
    core.hooks.append(hook)
    for i in range(3):
        core.add(state_of([5, i, 7 * i, 3], 12 + i, i, temperature=0.0))
    while core.has_unfinished():
        core.step()
    assert hook.calls[:4] == ["begin", "before_pack", "see", "after_rows"]
    assert len(set(Counter(hook.calls).values())) == 1
    assert model.logits(torch.cat(hook.states)).argmax(-1).tolist() == hook.sampled
    core.hooks.remove(hook)
    core.add(seq := state_of([5, 0, 0, 3], 12, 0, temperature=0.0))
    while core.has_unfinished():
        core.step()
    assert seq.tokens and len(hook.calls) == 4 * len(hook.states)  # it is not called any more
    core.close()


def test_a_step_captures_the_states_of_so_many_tokens(model, monkeypatch):
    """Prompts whose states are captured get fewer tokens in a step, and the same states.

    Those that want the last token alone, and other prompts, are not limited.
    """
    found = []
    for limit in (None, 4):
        core = assemble(model, EngineOptions(num_pages=20, token_budget=14)).core
        core.scheduler.max_captured = limit
        live = [state_of(range(i, i + 9), 9, i, capture=Capture((0, 2))) for i in range(3)]
        live.append(state_of(range(9), 9, 3, capture=Capture((1,), last_only=True)))
        live.append(state_of(range(9), 12, 4, temperature=0.0))
        for seq in live:
            core.add(seq)
        schedule = core.scheduler.schedule
        steps: list[Step] = []

        def noted(*given: Any, schedule: Any = schedule, steps: list[Step] = steps) -> Step:
            steps.append(schedule(*given))
            return steps[-1]

        monkeypatch.setattr(core.scheduler, "schedule", noted)
        while core.has_unfinished():
            core.step()
        counts = [
            sum(item.count for item in step.items if item.sequence in live[:3]) for step in steps
        ]
        assert max(counts) == (limit or 14) and sum(counts) == 27
        found.append([*(torch.cat(seq.captured[2]) for seq in live[:3]), live[4].tokens])
        core.close()
    (*wanted, tokens), (*limited, same) = found
    assert tokens == same
    for a, b in zip(wanted, limited, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_hook_sees_the_states_of_all_tokens(model):
    """They are those that a request captures in the same steps, which are chunks of prompts."""
    core = assemble(model, EngineOptions(num_pages=20, token_budget=5)).core
    hook = SeenStates({0, 1, NORMALIZED})
    core.hooks.append(hook)
    plain = state_of(range(7), 12, 0, temperature=0.0)
    captured = [
        state_of(range(9), 9, 1, capture=Capture((1, NORMALIZED))),
        state_of(range(3, 12), 9, 2, capture=Capture((1, 2), last_only=True)),
    ]
    for seq in (plain, *captured):
        core.add(seq)
    while core.has_unfinished():
        core.step()
    assert hook.num_results < hook.num_tokens == 11 + 9 + 9
    for seq in captured:
        last = seq.num_prompt - 1
        positions = [last] if seq is captured[1] else range(seq.num_prompt)
        for number in {1, NORMALIZED} & seq.captured.keys():
            seen = [hook.states[seq.spec.seed, number][position] for position in positions]
            assert torch.equal(torch.stack(seen), torch.cat(seq.captured[number]))
    embedded = [hook.states[0, 0][position] for position in range(7)]
    assert torch.equal(torch.stack(embedded), model.tok_embeddings(torch.arange(7)))


class Failing(Watching):
    """Fails once, when it sees the states of the first step."""

    def see(self, step: Step, states: dict[int, Tensor]) -> None:
        super().see(step, states)
        if self.calls.count("see") == 1:
            raise RuntimeError("the hook failed")


def test_a_hook_learns_of_a_step_that_broke_off(model):
    """It learns of it once the sequences have ended, and the next step runs as usual."""
    core = assemble(model, EngineOptions(num_pages=20)).core
    hook = Failing()
    core.hooks.append(hook)
    core.add(first := state_of([5, 9, 3], 30, 1, temperature=0.0))
    with pytest.raises(RuntimeError, match="the hook failed"):
        core.step()
    assert hook.calls == ["begin", "before_pack", "see", "broke_off"]
    assert hook.ended == ["error"] == [first.finish_reason]
    core.add(second := state_of([5, 9, 3], 6, 1, temperature=0.0))
    while core.has_unfinished():
        core.step()
    assert second.finish_reason == "length" and hook.calls.count("broke_off") == 1


class FromStates(Drafter):
    """Drafts a token that the hidden states of the last step have on top."""

    wanted_states = frozenset({NORMALIZED})

    def __init__(self, model: Transformer) -> None:
        super().__init__(1, Parallel(), [])
        self.model = model
        self.tops: dict[SequenceState, list[int]] = {}  # of the tokens of the last step

    def see(self, step: Step, states: dict[int, Tensor]) -> None:
        tops = self.model.logits(states[NORMALIZED]).argmax(-1).tolist()
        for item in step.items:
            self.tops[item.sequence] = [tops.pop(0) for _ in range(item.count)]

    def _begin(self, seq: SequenceState) -> DraftState:
        return DraftState(seq, [])

    def _draft(self, states: list[DraftState], seconds: float) -> list[list[int]]:
        assert all(state.seq.tokens[-1] in self.tops[state.seq] for state in states)
        return [self.tops[state.seq][:1] for state in states]


def test_a_drafter_may_ask_for_hidden_states(model):
    """A drafter gets the states of each step before it drafts for the next one."""
    found = []
    for drafts in (False, True):
        core = assemble(model, EngineOptions(num_pages=20)).core
        if drafts:
            speculate(core, FromStates(model))
        core.add(seq := state_of([5, 9, 3], 30, 1, temperature=0.0))
        while core.has_unfinished():
            core.step()
        found.append(seq.tokens)
        assert bool(core.stats.draft_tokens) == drafts
    assert found[0] == found[1]
