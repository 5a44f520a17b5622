"""Measure the host's share of a decode step: its time on a GPU that computes in no time.

In: batch sizes. Out: a table of milliseconds and one JSON line. The engine is the real one, with
steps of a fixed shape and a step in flight. The recorder's replays do nothing, so that scheduling,
packing, reading and text remain. The figure excludes the time of a driver to launch a graph and to
copy ids (some 30 microseconds), and launches of the sampling kernels. The time of operators on
tensors outside the graph is reported separately: a GPU would do that work, and the host launch it.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.machine import require_triton
from bench.report import Column
from bench.run import Bench, Row, whole
from bench.shapes import write_tokenizer
from llama import Llama, ModelArgs, SamplingParams, Tokenizer, Transformer
from llama.engine.core import PAGE_SIZE
from llama.kernels.cuda.table import table
from llama.options.engine_options import EngineOptions
from llama.options.graphs.recorder import Outputs

_VOCABULARY = 512
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
_KINDS = {
    "greedy": _GREEDY,
    "sampled": replace(_GREEDY, temperature=0.8, top_p=0.95),
    "penalized": replace(
        _GREEDY, temperature=0.8, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.1, logit_bias={5: 1.0, 6: -1.0},
    ),
    "constrained": _GREEDY,
}  # fmt: skip
_COLUMNS: list[Column] = [
    ("kind", "kind", ""), ("batch", "batch", ""), ("context", "context", ""),
    ("engine ms", "core_ms", ".3f"),
    ("least", "core_ms_min", ".3f"), ("operators", "operators", ".0f"),
    ("in them ms", "operator_ms", ".3f"), ("host ms", "host_ms", ".3f"),
    ("to greedy", "to_greedy", ".2f"),
    ("with text ms", "step_ms", ".3f"), ("least", "step_ms_min", ".3f"),
]  # fmt: skip


class AnyToken:
    """A constraint without cost: a real grammar runs in a thread of its own."""

    failure: str | None = None

    def fill_allowed(
        self, tokens: list[int], first: int, drafts: list[int], bits: np.ndarray
    ) -> None:
        bits.fill(-1)

    def draft(self, output: list[int], prediction: list[int]) -> tuple[list[int], bool]:
        return [], False


class NoDevice:
    """A recorder whose replays only take a time: the top token of a greedy row is always the same.

    Attributes:
        step_s: the seconds of a replay.
        token: the top token.
    """

    def __init__(self, step_s: float = 0.0, token: int = 0) -> None:
        self.step_s = step_s
        self.token = token

    def record(
        self, function: Callable[[], Outputs], inputs: Any
    ) -> tuple[Outputs, Callable[[], None]]:
        rows = len(inputs[-1])
        outputs = torch.full((rows,), self.token), torch.zeros(rows, _VOCABULARY)
        return outputs, partial(time.sleep, self.step_s) if self.step_s else lambda: None

    def free_bytes(self) -> int:
        return 1 << 50

    def close(self) -> None:
        pass


def host(
    batches: tuple[int, ...] = (1, 64, 256),
    context: tuple[int, ...] = (512,),
    steps: int = 200,
    **flags: Any,
) -> None:
    """Measure the host's share of a decode step, with a device that does nothing.

    "engine" is scheduling, packing and reading ids; "with text" is the public request API, which
    also decodes the text. The figures are the median and the minimum of `steps` steps.
    """
    require_triton("host")
    bench = Bench(**flags)
    sizes = [whole("batches", n) for n in batches]
    length = whole("context", context[0])
    count = whole("steps", steps)
    rows = [_measure(kind, n, length, count) for n in sizes for kind in _KINDS]
    greedy = {row["batch"]: row["host_ms"] for row in rows if row["kind"] == "greedy"}
    for row in rows:
        row["to_greedy"] = row["host_ms"] / greedy[row["batch"]]
    bench.report(_COLUMNS, rows, None)


_VIEWS = ("_unsafe_view", "detach", "_reshape_alias")


class Operators(TorchDispatchMode):
    """Counts torch's operators that write something, and the time in all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.seconds = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        began = time.perf_counter()
        out = function(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - began
        name = function.overloadpacket.__name__
        self.count += not (function.is_view or "empty" in name or name in _VIEWS)
        return out


def _measure(kind: str, batch: int, context: int, steps: int) -> Row:
    with tempfile.TemporaryDirectory() as scratch:
        engine = llama_without_device(Path(scratch), batch, context + 3 * steps + 32).llm_engine
    for i in range(batch):
        engine.add_request(str(i), [64 + i % 64] * context, _KINDS[kind])
    while engine.core.scheduler.waiting or engine.core.stats.generated_tokens < 8 * batch:
        engine.step()
    for seq in engine.core.scheduler.live() if kind == "constrained" else ():
        seq.spec = replace(seq.spec, is_constrained=True)
        seq.constraint = AnyToken()
    text = _times(engine.step, steps)
    core = _times(engine.core.step, steps)
    in_operators: list[float] = []
    for _ in range(steps):
        with Operators() as operators:
            engine.core.step()
        in_operators.append(operators.seconds * 1e3)
    return {
        "kind": kind, "batch": batch, "context": context,
        "core_ms": statistics.median(core), "core_ms_min": min(core),
        "operators": operators.count, "operator_ms": min(in_operators),
        "host_ms": min(core) - min(in_operators),
        "step_ms": statistics.median(text), "step_ms_min": min(text),
    }  # fmt: skip


def _times(step: Callable[[], Any], count: int) -> list[float]:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        found.append((time.perf_counter() - began) * 1e3)
    return found


def llama_without_device(
    folder: Path, batch: int, longest: int, step_s: float = 0.0, token: int = 0
) -> Llama:
    """Return a model on a device that does nothing; see `NoDevice`.

    Args:
        folder: where its tokenizer is written.
        batch: sequences that run at once.
        longest: tokens of a sequence.
        step_s: the seconds of a step.
        token: the token that every greedy step gives.
    """
    args = ModelArgs(
        dim=64, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=_VOCABULARY, multiple_of=32,
        max_seq_len=longest, max_batch_size=batch,
    )  # fmt: skip
    model = Transformer(args)
    from llama.kernels.cuda import sample as gpu_sample  # imports Triton

    # A GPU's path: attention in torch, and launches of the sampling kernels that do nothing.
    model.use_kernels(table(frozenset({"attention", "sample"}), frozenset()))
    ids = torch.zeros(batch, dtype=torch.int64)
    gpu_sample.choose = lambda logits, *_, **__: ids[: len(logits)]
    gpu_sample.top_tokens = lambda logits, **_: (ids[: len(logits)], ids[: len(logits)])
    for weight in model.parameters():
        weight.data.zero_()
    options = EngineOptions(
        num_pages=batch * (longest // PAGE_SIZE + 2),
        async_scheduling=True,
    )
    path = folder / "tokenizer.model"
    write_tokenizer(path, _VOCABULARY)
    with (
        mock.patch("llama.generation.recorder_for", lambda model: NoDevice(step_s, token)),
        # A device that does nothing cannot replay a step as it is computed.
        mock.patch("llama.options.graphs.kv_cache.replay_problem", lambda *_: None),
    ):
        return Llama(model, Tokenizer(path), seed=0, options=options)
