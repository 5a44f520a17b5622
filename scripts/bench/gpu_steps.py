"""Timed steps of the sections of `scripts/gpu_check.py`.

In: a section and an engine. Out: requests in flight, the seconds of a prompt, the figures of decode
steps, and the time of calls on the device alone.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import machine
from bench.gpu_run import Section
from llama import SamplingParams
from llama.model.cost import decode_bytes, step_roofline
from llama.requests.llm_engine import LLMEngine

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)


def begin(engine: LLMEngine, batch: int, context: int, params: SamplingParams = GREEDY) -> None:
    """Start `batch` sequences, and step until all of them decode."""
    draw = random.Random(batch)
    ids = list(engine.tokenizer.ranks.values())
    for i in range(batch):
        engine.add_request(f"{time.monotonic_ns()}-{i}", draw.choices(ids, k=context), params)
    core = engine.core
    while (
        engine.core.scheduler.waiting
        or not core.scheduler.running
        or any(seq.num_output == 0 for seq in core.scheduler.running)
    ):
        engine.step()


def step_seconds(at: Section, engine: LLMEngine, steps: int) -> float:
    """Return the seconds of a step of the requests in flight, as the mean of `steps` steps."""
    machine.wait_for(at.device)
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    machine.wait_for(at.device)
    return (time.perf_counter() - began) / steps


def say_decode(
    at: Section, what: str, mode: str, engine: LLMEngine, batch: int, context: int, steps: int,
    params: SamplingParams = GREEDY, quantize: str | None = None,
) -> None:  # fmt: skip
    """Report the tokens per second of steps, and their fraction of the machine's limits."""
    args = engine.core.runner.model.params
    begin(engine, batch, context, params)
    for _ in range(at.size(2, 1)):
        engine.step()
    step = step_seconds(at, engine, steps)
    engine.discard_all()
    contexts = [context + steps // 2] * batch
    bandwidth = at.found("read bandwidth")
    flops = at.found("matrix rate")
    floor = step_roofline(args, at.dtype.itemsize, contexts, bandwidth, flops, quantize=quantize)
    read = decode_bytes(args, at.dtype.itemsize, contexts, quantize=quantize)
    at.say(
        what, batch / step, "tokens/s", mode=mode, of_floor=floor / step, step_ms=step * 1e3,
        gb_per_s=read / step / 1e9,
    )  # fmt: skip


def prefill_seconds(engine: LLMEngine, tokens: int, repeats: int) -> float:
    """Return the seconds from a prompt without a cached prefix to its first token.

    The result is the minimum of `repeats`.
    """
    times = []
    for i in range(repeats + 1):
        draw = random.Random(1000 + i)
        prompt = draw.choices(list(engine.tokenizer.ranks.values()), k=tokens)
        began = time.perf_counter()
        request = engine.prepare("", prompt, SamplingParams(temperature=0.0, max_tokens=1))
        engine.run([request])
        times.append(time.perf_counter() - began)
    return min(times[1:])


def answer(engine: LLMEngine, lengths: list[tuple[int, int]]) -> None:
    draw = random.Random(0)
    ids = list(engine.tokenizer.ranks.values())
    requests = [
        engine.prepare(
            "", draw.choices(ids, k=prompt),
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count),
        )
        for prompt, count in lengths
    ]  # fmt: skip
    engine.run(requests)


def device_seconds(at: Section, calls: Sequence[Callable[[], Any]], least: int = 20) -> float:
    """Return the seconds of one call on the device, without the host.

    They are the median of several graphs, in each of which the calls take turns, at least so many
    times.
    """
    if at.dry:
        return machine.best_seconds(calls[0], at.device)
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    count = max(least, len(calls))
    with torch.cuda.graph(graph):
        for call in itertools.islice(itertools.cycle(calls), count):
            call()
    return (
        statistics.median(machine.best_seconds(graph.replay, at.device) for _ in range(3)) / count
    )
