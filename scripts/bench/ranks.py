"""Measure the cost of ranks: a step on several ranks, and its share of collectives.

In: the flags of the command, under torchrun or alone. Out: a table, printed by rank 0; a line per
batch and per path on which the ranks talk. The weights are random, made in each rank's memory.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.report import Column
from bench.run import Bench, Row, whole
from bench.shapes import DTYPES, fill, write_tokenizer
from llama import Llama, ModelArgs, SamplingParams, Tokenizer, Transformer
from llama.checkpoint.packing import pack_model
from llama.ranks.collectives import ModelParallel
from llama.ranks.groups import connect
from llama.ranks.parallel import Parallel
from llama.weights.choice import QUANTIZED

_COLUMNS: list[Column] = [
    ("path", "path", ""), ("ranks", "ranks", ""), ("threads", "threads", ""),
    ("batch", "batch", ""), ("first ms", "first_ms", ".1f"), ("step ms", "step_ms", ".2f"),
    ("least", "step_ms_min", ".2f"), ("tokens/s", "tokens_per_s", ".1f"),
    ("collectives ms", "collectives_ms", ".2f"), ("of the step", "collectives_fraction", ".0%"),
    ("4 KB us", "sum_4k_us", ".1f"), ("1 MB us", "sum_1m_us", ".1f"),
]  # fmt: skip
_LIMIT_S = 300.0  # limit of a wait for another rank
SUMS = {"sum_4k_us": (4 << 10, 300), "sum_1m_us": (1 << 20, 30)}  # bytes, and how often


class _Timed(ModelParallel):
    """Counts the seconds in collectives, which include waiting for a slower rank."""

    seconds = 0.0

    def _count(self, collective: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        began = time.perf_counter()
        result = collective(x)
        _Timed.seconds += time.perf_counter() - began
        return result

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._count(super().all_reduce, x)

    def all_gather(self, x: Tensor, widths: Sequence[int] = ()) -> Tensor:
        return self._count(functools.partial(super().all_gather, widths=widths), x)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._count(super().broadcast, x)


def ranks(
    batches: tuple[int, ...] = (1, 8), tokens: int = 256, steps: int = 32, **flags: Any
) -> None:
    """Time a step on several ranks, and its collectives: start it with torchrun.

    A single process gives the figure to compare with; --threads is per rank. Where the ranks share
    memory, each batch runs through shared memory, and again through gloo.
    """
    bench = Bench(**flags)
    longest = whole("tokens", tokens) + whole("steps", steps) + 2 * max(batches) + 2
    joined = connect(None, bench.device_used, _LIMIT_S)
    paths: dict[str, Parallel] = {_path_name(joined): joined}
    if isinstance(joined, ModelParallel) and joined.shared is not None:
        paths["gloo"] = replace(joined, shared=None)
    rows = []
    for path, parallel in paths.items():
        timed = _Timed(**{f.name: getattr(parallel, f.name) for f in fields(parallel)})
        sizes = {"max_seq_len": longest, "max_batch_size": max(batches)}
        llama = _random_llama(bench, timed, sizes)
        about = {"path": path, "ranks": timed.size, "threads": torch.get_num_threads()}
        about |= {name: sum_us(timed, *size) for name, size in SUMS.items()}
        rows += [about | _steps(llama, whole("batches", b), tokens, steps) for b in batches]
        llama.close()
    if joined.global_rank == 0:
        bench.report(_COLUMNS, rows, None)


def _path_name(parallel: Parallel) -> str:
    if not isinstance(parallel, ModelParallel):
        return "alone"
    return "gloo" if parallel.shared is None else "shared memory"


def _random_llama(bench: Bench, parallel: Parallel, sizes: dict[str, int]) -> Llama:
    quantize = bench.dtype if bench.dtype in QUANTIZED else None
    args = ModelArgs(**(bench.params | sizes))
    model = Transformer(
        args, dtype=DTYPES[bench.stored], device=bench.device_used.type, parallel=parallel
    )
    fill(model.named_shards())
    pack_model(model, quantize=quantize)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "tokenizer.model")
        write_tokenizer(path, args.vocab_size)
        return Llama(model, Tokenizer(path))


def sum_us(parallel: Parallel, size: int, count: int) -> float:
    """Return the median microseconds of an all-reduce of `size` bytes in bf16."""
    x = torch.zeros(size // 2, dtype=torch.bfloat16)
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        parallel.all_reduce(x)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e6


def _steps(llama: Llama, batch: int, tokens: int, steps: int) -> Row:
    """Time prompts of `tokens` random ids, then steps with one token per sequence."""
    engine = llama.llm_engine
    draw = torch.Generator().manual_seed(batch)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
    for name in range(batch):
        prompt = torch.randint(0, 256, (tokens,), generator=draw).tolist()
        engine.add_request(str(name), prompt, params)
    waiting = set(map(str, range(batch)))
    began = time.perf_counter()
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    first = time.perf_counter() - began
    seconds, collectives = [], []
    for _ in range(steps):
        _Timed.seconds = 0.0
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
        collectives.append(_Timed.seconds)
    for name in range(batch):
        engine.abort_request(str(name))
    step = statistics.median(seconds)
    together = statistics.median(collectives)
    return {
        "batch": batch, "first_ms": first * 1e3, "step_ms": step * 1e3,
        "step_ms_min": min(seconds) * 1e3, "tokens_per_s": batch / step,
        "collectives_ms": together * 1e3, "collectives_fraction": together / step,
    }  # fmt: skip
