"""Many threads call one API: each gets its usual result, and its errors affect no other.

The effects of an interrupt (Ctrl-C), at every statement of the engine, are tested too.
"""

import itertools
import linecache
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import llama.engine
import llama.requests
from helpers.prompts import prompts_of
from helpers.waiting import wait_until
from llama import Llama, SamplingParams
from llama.requests.llm_engine import LLMEngine


@pytest.fixture
def engine(shared_llama):
    yield shared_llama.llm_engine
    assert_empty(shared_llama.llm_engine)


def assert_empty(engine: LLMEngine) -> None:
    pool = engine.core.scheduler.pool
    assert not engine.has_unfinished_requests()
    engine.core.scheduler.check()
    assert pool.num_free == pool.num_pages


def in_threads(jobs: list[Callable[[], Any]], count: int = 16) -> list[Any]:
    """Return what each job returns or raises; all start at once."""
    start = threading.Barrier(min(count, len(jobs)))

    def run(job: Callable[[], Any]) -> Any:
        start.wait(60)
        try:
            return job()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, jobs))


def test_sixteen_threads_get_what_each_gets_alone(shared_llama, engine):
    """Sixteen threads get what each gets alone.

    Calls of every kind run at once, bad ones and abandoned streams among them.
    """
    llama: Llama = shared_llama
    prompts = prompts_of([3 + 5 * i for i in range(16)], seed=50)
    texts = ["a", "Once upon", "The end of", "xyz"]

    def left_stream() -> str:
        stream = llama.stream_text(texts, 0.0, max_gen_len=40)
        index = next(stream).index
        stream.close()
        return str(index in range(4))

    def aborted() -> str | None:
        name, reason = f"abort-{threading.get_ident()}", "length"
        while reason == "length":  # other threads have run all of its steps before the abort
            engine.submit([engine.prepare(name, prompts[3], SamplingParams(max_tokens=60))])
            output = engine.abort_request(name)
            assert output is not None
            reason = str(output.outputs[0].finish_reason)
        return reason

    jobs: list[Callable[[], Any]] = [
        lambda: llama.generate(prompts[:1], 30, 0.0),
        lambda: llama.generate(prompts[1:4], 20, 1.0, 1.0, seed=5),
        lambda: llama.generate(prompts[4:5], 9, 0.0, logprobs=True, echo=True)[0],
        lambda: llama.text_completion(texts, 0.8, 0.9, 25, seed=6),
        lambda: llama.chat_completion([[{"role": "user", "content": "hi"}]], 0.0, 0.9, 20),
        lambda: "".join(d.text for d in llama.stream_text(texts[:1], 0.0, max_gen_len=15)),
        lambda: [b["generation"] for b in llama.beam_search(texts[:1], 3, 8)[0]],
        lambda: llama.generate([prompts[5] + [999]], 5),
        lambda: llama.text_completion([None], 0.0),  # type: ignore[list-item]
        left_stream,
        aborted,
        lambda: llama.generate([prompts[6]], 12, 1.0, 1.0, seed=9),
    ]
    wanted = [in_threads([job], 1)[0] for job in jobs]
    assert "ValueError: prompt 0 holds 999" in str(wanted[7]), "the test tests no errors"
    order = random.Random(8).choices(range(len(jobs)), k=16 * 6)
    found = in_threads([jobs[i] for i in order])
    for i, result in zip(order, found, strict=True):
        assert result == wanted[i], i


def hold_first_step(engine: LLMEngine, monkeypatch, num_waiting: int) -> None:
    """Let the first step wait until so many other threads have queued requests, and sleep."""
    step, steps = engine.core.step, itertools.count()

    def held_step(*args):
        if next(steps) == 0:
            wait_until(lambda: len(engine.port.threads._waiters) >= num_waiting)
        return step(*args)

    monkeypatch.setattr(engine.core, "step", held_step)


def test_threads_are_one_batch(shared_llama, engine, monkeypatch):
    """Threads are one batch.

    Four threads of one prompt each take about the steps of one call with four, not the sum. Steps
    are counted, not timed; the threads do not start at the same step.
    """
    hold_first_step(engine, monkeypatch, num_waiting=3)
    prompts = prompts_of([9] * 4, seed=51)
    steps = shared_llama.engine.stats
    before = steps.steps
    in_threads([partial(shared_llama.generate, [p], 100, 0.0) for p in prompts], 4)
    assert steps.steps - before < 100 + 10


def test_a_failing_step_reaches_everyone_in_it_and_nobody_after(shared_llama, engine, monkeypatch):
    start, arrived = engine.core.runner.start, threading.Event()

    def fail(step):
        if len(step.items) == 2:
            arrived.set()
            raise MemoryError("no room")
        return start(step)

    monkeypatch.setattr(engine.core.runner, "start", fail)
    hold_first_step(engine, monkeypatch, num_waiting=1)
    prompts = prompts_of([5, 6], seed=52)
    found = in_threads([partial(shared_llama.generate, [p], 100, 0.0) for p in prompts], 2)
    assert found == ["MemoryError: no room"] * 2
    assert arrived.is_set()
    assert shared_llama.generate(prompts[:1], 4, 0.0)[0][0]


@pytest.mark.parametrize("first", ["short", "long"])
def test_threads_wake_one_another(first, shared_llama, engine, monkeypatch):
    """Threads wake one another.

    The first thread runs the model, and the other sleeps. A short first one leaves and hands the
    model over; a long first one wakes the other as soon as its answer is there. No thread wakes up
    by itself: the limit of a sleep is longer than the test may take.
    """
    monkeypatch.setattr("llama.requests.threads._MAX_SLEEP_S", 3600.0)
    prompts = prompts_of([5, 6], seed=53)
    generate = shared_llama.generate
    jobs = {
        "short": lambda: generate(prompts[:1], 3, 0.0),
        "long": lambda: generate(prompts[1:], 90, 0.0),
    }
    wanted = {name: job() for name, job in jobs.items()}
    step, in_step, short_is_done = engine.core.step, threading.Event(), threading.Event()
    steps = itertools.count()

    def held_step(*args):
        in_step.set()
        number = next(steps)
        while (
            number == 0 and not engine.port.threads._waiters
        ):  # the other thread sleeps from here on
            time.sleep(0.001)
        if number == 20:
            assert short_is_done.wait(30), "the short answer is there, and nobody woke its thread"
        return step(*args)

    monkeypatch.setattr(engine.core, "step", held_step)
    with ThreadPoolExecutor(2) as pool:
        futures = {first: pool.submit(jobs[first])}
        assert in_step.wait(30)
        (second,) = jobs.keys() - {first}
        futures[second] = pool.submit(jobs[second])
        futures["short"].add_done_callback(lambda _: short_is_done.set())
        try:
            assert {name: future.result(30) for name, future in futures.items()} == wanted
        finally:  # otherwise the pool would wait for a thread that nobody wakes
            engine.port.threads._ring(list(engine.port.threads._waiters))


def test_step_serves_who_adds_while_others_run(shared_llama, engine):
    """`step` serves its caller's requests while others run.

    vLLM's loop runs in one thread, Meta's call in another: no output goes to the wrong one.
    """
    prompts = prompts_of([8, 9], seed=54)
    params = SamplingParams(max_tokens=30, temperature=0)

    def loop() -> list[int]:
        last = None
        engine.add_request("mine", prompts[0], params)
        while last is None or not last.finished:
            for output in engine.step():
                assert output.request_id == "mine"
                last = output
        return last.outputs[0].token_ids

    jobs: list[Callable[[], Any]] = [loop, lambda: shared_llama.generate(prompts[1:], 60, 0.0)]
    wanted = [job() for job in jobs]
    for _ in range(10):
        assert in_threads(jobs, 2) == wanted


def test_an_output_costs_the_same_at_any_length(shared_llama, engine, monkeypatch):
    """An output costs the same at any length.

    Nothing unread is rebuilt: tokens and log probabilities are counted as they are copied, and an
    old output keeps its contents.
    """
    (prompt,) = prompts_of([9], seed=55)
    params = SamplingParams(max_tokens=100, temperature=0, logprobs=2, ignore_eos=True)
    engine.add_request("a", prompt, params)
    outputs = []
    touched: list[Any] = []
    monkeypatch.setattr("llama.requests.request._dicts", lambda *args: touched.append(args))
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert not touched and len(outputs) == 100
    monkeypatch.undo()
    for count, output in enumerate(outputs, 1):
        answer = output.outputs[0]
        assert len(answer.token_ids) == count and answer.logprobs is not None
        assert [next(iter(entry)) for entry in answer.logprobs] == answer.token_ids
        assert answer.cumulative_logprob == pytest.approx(
            sum(e[t] for e, t in zip(answer.logprobs, answer.token_ids, strict=True))
        )
    texts = [output.outputs[0].text for output in outputs]
    assert "".join(output.outputs[0].new_text for output in outputs) == texts[-1]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))


OURS = [str(Path(package.__path__[0])) for package in (llama.engine, llama.requests)]


class Interrupt:
    """Ctrl-C, a real signal, at the n-th statement that the engine executes in this thread.

    The end of a `with` statement, which Python traces as a statement, is excluded: there a real
    signal is handled only after the lock has been released.
    """

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(tuple(OURS)):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


def test_an_interrupt_at_any_statement_loses_nothing(make_checkpoint):
    """An interrupt at any statement loses nothing.

    With Ctrl-C at each of the statements of a call, no page is lost, a running request of another
    caller gets its answer, and the next call is right. (A request whose cleanup was interrupted may
    remain, but it is gone after the next call.)
    """
    folder, _, _ = make_checkpoint(n_layers=1, seed=60)
    llama = Llama.build(str(folder), None, 64, 2, device="cpu", dtype="fp32")
    engine = llama.llm_engine
    prompts = prompts_of([20, 18, 5], seed=56)
    wanted = [llama.generate([prompt], 5, 0.0)[0] for prompt in prompts]
    params = SamplingParams(max_tokens=5, temperature=0)
    at = interrupted = 0
    while True:
        at += 1 + at // 30
        engine.add_request("other", prompts[2], params)
        sys.settrace(Interrupt(at))
        try:
            llama.generate(prompts[:2], 5, 0.0)
            ended = True
        except KeyboardInterrupt:
            ended = False
        finally:
            sys.settrace(None)
        interrupted += not ended
        outputs = engine.step()
        while not outputs or not outputs[-1].finished:
            outputs = engine.step()
        other = outputs[-1]
        assert [other.outputs[0].token_ids] == wanted[2], at
        assert llama.generate(prompts[:1], 5, 0.0)[0] == wanted[0], at
        engine.core.scheduler.check()
        pool = engine.core.scheduler.pool
        assert pool.num_free == pool.num_pages, at
        assert not engine.has_unfinished_requests(), at
        if ended:
            break
    assert interrupted > 100, "the test interrupted nothing"


def interrupted_step(engine: LLMEngine, times: int) -> Callable[[list], Any]:
    start = engine.core.runner.start

    def interrupted(scheduled):
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        return start(scheduled)

    return interrupted


def test_an_interrupt_takes_effect_after_the_step(shared_llama, engine, monkeypatch):
    """An interrupt takes effect after the step.

    A step that broke off would leave inconsistent pages and counts, and the other ranks waiting in
    it.
    """
    prompts = prompts_of([5, 6], seed=57)
    wanted = shared_llama.generate(prompts[:1], 8, 0.0)[0]
    engine.add_request("other", prompts[0], SamplingParams(max_tokens=8, temperature=0))
    monkeypatch.setattr(engine.core.runner, "start", interrupted_step(engine, 1))
    with pytest.raises(KeyboardInterrupt):
        shared_llama.generate(prompts[1:], 8, 0.0)
    monkeypatch.undo()
    (output,) = engine.step()
    assert len(output.outputs[0].token_ids) == 1, "the step was not finished"
    while not output.finished:
        (output,) = engine.step()
    assert [output.outputs[0].token_ids] == wanted


def test_a_second_interrupt_breaks_the_step_off(shared_llama, engine, monkeypatch):
    """A second interrupt breaks the step off.

    A user need not wait for a step of minutes: all requests in it end with an error.
    """
    prompts = prompts_of([5, 6], seed=58)
    engine.add_request("other", prompts[0], SamplingParams(max_tokens=8, temperature=0))
    monkeypatch.setattr(engine.core.runner, "start", interrupted_step(engine, 2))
    with pytest.raises(KeyboardInterrupt):
        shared_llama.generate(prompts[1:], 8, 0.0)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="ended by KeyboardInterrupt"):
        engine.step()
    assert_empty(engine)
    assert shared_llama.generate(prompts[:1], 4, 0.0)[0][0]
