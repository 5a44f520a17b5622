"""The sections `skew`, `lora` and `prompts` of `scripts/gpu_check.py`: steps whose rows differ.

In: a section. Out: the time of replayed steps of the 8B shape. In `skew` one of 64 sequences is
longer than the others, or each has several tokens to verify; in `lora` their rows have one adapter,
eight or none; in `prompts` a prompt is among 32 or none, which also runs operator by operator.
Steps read a cache that nobody has filled.
"""

import functools
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bench import machine
from bench.gpu_run import MODES, Section
from llama.checkpoint.lora.unmerged import LoadedAdapter, products_of
from llama.engine.core import PAGE_SIZE
from llama.engine.request import SequenceSpec
from llama.engine.rows import Scheduled
from llama.engine.runner import ModelRunner
from llama.engine.sequence import SequenceState
from llama.engine.step import Step
from llama.model.transformer import Transformer
from llama.ops.adapters import AdapterWeights, Delta, DeltaPart
from llama.ops.kernels import Kernels
from llama.options.graphs.step_graphs import StepGraphs
from llama.options.graphs.step_inputs import PreparedStep

LIMITS = {"skew": 100, "lora": 60, "prompts": 60}  # seconds of each section
_ROWS = 64
_CONTEXT = 2048
_LONGEST = (2048, 8192, 32_768, 102_400)
_DRAFTS = 4
_RANK = 16
_PROMPTS = ((0, 60), (32, 60), (0, 200), (32, 200))  # single tokens, and those of a prompt
_COUNTS = (0, 1, 8)  # adapters in a step


def skew(at: Section) -> None:
    """Time steps of 63 sequences of 2,048 tokens and a longer one, and the tokens of drafts."""
    rows, context = at.size(_ROWS, 2), at.size(_CONTEXT, 20)
    longest = [at.size(length, 20 * (1 + i)) for i, length in enumerate(_LONGEST)]
    model = at.model("8b", max(longest) + 64, rows)
    with at.engine(model, MODES[0], (rows - 1) * context + max(longest) + 64 * rows) as engine:
        graphs = engine.core.runner.replayer
        assert isinstance(graphs, StepGraphs), "steps run without graphs"
        plain = 0.0
        for length in longest:
            step = _step([context] * (rows - 1) + [length])
            seconds = _seconds(at, functools.partial(graphs.run, step, wants_logits=True))
            plain = plain or seconds
            what = f"8b {rows - 1} x {context} and {length}"
            at.say(what, seconds * 1e3, "ms", times_alike=seconds / plain)
    drafts = {"speculate": "lookup", "speculate_tokens": _DRAFTS}
    with at.engine(model, MODES[0], rows * (context + 64), **drafts) as engine:
        graphs = engine.core.runner.replayer
        assert isinstance(graphs, StepGraphs), "steps run without graphs"
        batch = at.size(rows // (1 + _DRAFTS), 2)
        for count in (1, 1 + _DRAFTS):
            step = _step([context] * batch, count)
            seconds = _seconds(at, functools.partial(graphs.run, step, wants_logits=True))
            at.say(f"8b {batch} x {context}, {count} tokens each", seconds * 1e3, "ms")


def lora(at: Section) -> None:
    """Time steps of rows with one adapter, with eight and with none; compare with no graph."""
    rows, context = at.size(_ROWS, 4), at.size(512, 20)
    model = at.model("8b", context + 64, rows)
    with at.engine(model, MODES[0], rows * (context + 64)) as engine:
        graphs = engine.core.runner.replayer
        assert isinstance(graphs, StepGraphs), "steps run without graphs"
        numbered = graphs.adapters
        if numbered is None:
            at.say("lora", "the kernel of adapters is not in use")
            return
        kept = [_adapter(model, number) for number in range(max(_COUNTS))]
        for adapter in kept:
            numbered.add(adapter)
        plain = 0.0
        for count in _COUNTS:
            digests = [kept[i % count].digest if count else b"" for i in range(rows)]
            step = _step([context] * rows, 1, numbered.of_rows(digests))
            seconds = _seconds(at, functools.partial(graphs.run, step, wants_logits=True))
            plain = plain or seconds
            what = f"8b {rows} rows, {count} adapters"
            at.say(what, seconds * 1e3, "ms", times_plain=seconds / plain)
            eager = _logits(graphs.run_eagerly(step, wants_logits=True), rows)
            replayed = _logits(graphs.run(step, wants_logits=True), rows)
            error = float((replayed - eager).norm() / eager.norm())
            at.say(f"{what}: error of the replay", error)


def prompts(at: Section) -> None:
    """Time steps of single tokens and a prompt, as a graph and operator by operator."""
    context = at.size(512, 20)
    model = at.model("8b", context + 256, at.size(64, 4))
    # Without the kernel for attention, steps with prompts are no graphs. Dry, PyTorch attends.
    at.dry_kernels = Kernels({"paged_attention": _refuse}, frozenset({"attention"}))
    num_tokens = at.size(64, 4) * (context + 256)
    with at.engine(model, MODES[0], num_tokens, token_budget=at.size(2048, 24)) as engine:
        runner = engine.core.runner
        graphs = runner.replayer
        assert isinstance(graphs, StepGraphs), "steps run without graphs"
        for single, count in _PROMPTS:
            single = at.size(single, min(single, 2))
            step = _with_prompt(single, context, at.size(count, 18))
            prepared = graphs.prepare(step, step.sampled())
            if prepared is None:
                at.say("prompts", "the kernel for attention is not in use")
                return
            replay = functools.partial(graphs.run, prepared, wants_logits=True)
            what = f"8b {single} x {context} and a prompt of {count}"
            at.say(f"{what}, graph", _seconds(at, replay) * 1e3, "ms")
            run = functools.partial(_run_eagerly, runner, step)
            at.say(f"{what}, eager", _seconds(at, run) * 1e3, "ms")
            rows = single + 1
            eager = run().clone()
            error = float((_logits(replay(), rows) - eager).norm() / eager.norm())
            at.say(f"{what}: error of the replay", error)


def _refuse(*_: object) -> None:
    """Stand in for a kernel that takes no tensors, so that PyTorch computes."""


@torch.inference_mode()
def _run_eagerly(runner: ModelRunner, step: Step) -> Tensor:
    """Return the logits of a step that runs operator by operator."""
    return runner.model.logits(runner.hidden_states(step, runner.watched(step)))


def _with_prompt(single: int, context: int, count: int) -> Step:
    """Return a step of single tokens after so many others, and of a prompt."""
    items = []
    used = 0
    for length, new in [*[(context, 1)] * single, (count, count)]:
        seq = SequenceState(SequenceSpec((1,) * length, length + 1))
        num_pages = -(-length // PAGE_SIZE)
        seq.pages.extend(range(used, used + num_pages))
        used += num_pages
        items.append(Scheduled(seq, length - new, new))
    return Step.of(items)


def _step(
    lengths: Sequence[int], count: int = 1, numbers: Sequence[int] | int = -1
) -> PreparedStep:
    """Return a step of the last `count` tokens of sequences, each on pages of its own."""
    pages: list[list[int]] = []
    used = 0
    for length in lengths:
        end = used + -(-length // PAGE_SIZE)
        pages.append([*range(used, end)])
        used = end
    positions, slots = [], []
    for length, table in zip(lengths, pages, strict=True):
        for position in range(length - count, length):
            positions.append(position)
            slots.append(table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
    fields = np.empty((5, len(positions)), np.int64)
    fields[0] = 1
    fields[1] = -1
    fields[2] = positions
    fields[3] = slots
    fields[4] = numbers
    ends = count * np.arange(1, len(pages) + 1)
    return PreparedStep(fields, ends, list(pages))


def _seconds(at: Section, run: functools.partial) -> float:
    """Return the seconds of one of many runs that follow one another."""
    run()
    times = []
    for _ in range(at.size(3, 1)):
        machine.wait_for(at.device)
        began = time.perf_counter()
        count = at.size(20, 1)
        for _ in range(count):
            run()
        machine.wait_for(at.device)
        times.append((time.perf_counter() - began) / count)
    return statistics.median(times)


def _adapter(model: Transformer, seed: int) -> LoadedAdapter:
    """Return a random adapter of all products, whose matrices stored as one it updates apart."""
    generator = torch.Generator().manual_seed(seed)
    like = model.norm.weight

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(like) * shape[-1] ** -0.5

    deltas = {}
    for block in model.blocks():
        for linear in products_of(block):
            n, k = linear.weight.shape
            rows = n // len(linear.names)
            deltas[linear.names[0]] = Delta(
                [
                    DeltaPart(i * rows, draw(rows, _RANK), draw(_RANK, k), 0.5)
                    for i in range(len(linear.names))
                ]
            )
    return LoadedAdapter(bytes([seed]) * 32, AdapterWeights(deltas), "", _RANK)


def _logits(decoded: object, rows: int) -> Tensor:
    """Return the logits of a step, copied."""
    logits: Tensor = getattr(decoded, "logits")  # noqa: B009
    return logits[:rows].clone()
