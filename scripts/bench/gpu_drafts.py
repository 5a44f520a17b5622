"""The section `drafts` of `scripts/gpu_check.py`: steps whose drafts a model makes.

In: a section. Out: the time of steps in which a 1B drafts four tokens, and an 8B or the 1B itself
verifies them. Each pass of the 1B is read before the next begins, or all are read at the end; the
drafts of both ways are compared. Those for an 8B are wrong, as weights are random, and those for
the 1B itself are right, so that its first pass has two new tokens.
"""

from dataclasses import replace

from bench import gpu_steps
from bench.gpu_run import MODES, Section
from llama import SamplingParams
from llama.ops.kernels import NO_KERNELS
from llama.options.speculation.draft_model import ModelDrafter, SequenceDraft
from llama.options.speculation.hook import Speculation, speculate
from llama.requests.llm_engine import LLMEngine

LIMITS = {"drafts": 150}  # seconds of the section
_DRAFTS = 4
_SAMPLED = replace(gpu_steps.GREEDY, temperature=0.8, top_p=0.95, seed=1)


class _AllDrafts(ModelDrafter):
    """Drafts as many tokens as it may, and keeps all drafts."""

    def __init__(self, engine: LLMEngine) -> None:
        core = engine.core
        (before,) = (hook.drafter for hook in core.hooks if isinstance(hook, Speculation))
        assert isinstance(before, ModelDrafter)
        super().__init__(_DRAFTS, before._runner, core.scheduler)
        self.found: list[list[int]] = []
        speculate(core, self)

    def choose(self, rates: list[list[float]], seconds: float, min_drafts: int = 0) -> list[int]:
        return [len(each) for each in rates]

    def _sample_drafts(self, states: list[SequenceDraft], lengths: list[int]) -> None:
        super()._sample_drafts(states, lengths)
        self.found += [[*state.ids] for state in states]


def drafts(at: Section) -> None:
    """Time steps with four drafts at batch 1 and 16, greedy and sampled, both ways."""
    context, batch, steps = at.size(512, 20), at.size(16, 2), at.size(40, 2)
    longest = context + (steps + 8) * (1 + _DRAFTS)
    at.dry_kernels = NO_KERNELS  # in the interpreter, graphs of 64 rows would take minutes
    small = at.model("1b", longest, batch)
    for shape in ("8b", "1b"):
        model = at.model(shape, longest, batch) if shape == "8b" else small
        options = {"speculate": "model", "speculate_tokens": _DRAFTS, "draft_model": small}
        with at.engine(model, MODES[0], batch * longest, **options) as engine:
            for rows in (1, batch):
                for params in (gpu_steps.GREEDY, _SAMPLED):
                    what = f"1b for {shape}, {rows} rows, T {params.temperature}"
                    _compare(at, what, engine, rows, context, steps, params)


def _compare(
    at: Section,
    what: str,
    engine: LLMEngine,
    rows: int,
    context: int,
    steps: int,
    params: SamplingParams,
) -> None:
    """Time steps with drafts both ways, and compare the drafts."""
    found = []
    for how, is_ahead in (("each pass read", False), ("read at the end", True)):
        drafter = _AllDrafts(engine)
        drafter._runner.async_scheduling = is_ahead
        gpu_steps.begin(engine, rows, context, params)
        for _ in range(2):
            engine.step()
        accepted = engine.core.stats.accepted_tokens
        step = gpu_steps.step_seconds(at, engine, steps)
        tokens = 1 + (engine.core.stats.accepted_tokens - accepted) / steps / rows
        at.say(f"{what}, {how}", step * 1e3, "ms", tokens_per_row=tokens)
        engine.discard_all()
        found.append(drafter.found)
    differ = sum(one != other for one, other in zip(*found, strict=False))
    at.say(f"{what}: drafts that differ", differ, of=min(map(len, found)))
