"""AsyncLLMEngine with programs that end early: closes, aborts, loops that end, slow readers."""

import asyncio
import gc
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.prompts import prompts_of
from llama import AsyncLLMEngine, Llama, RequestOutput, SamplingParams
from llama.requests.loop_calls import LoopCalls

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
PROMPTS = prompts_of([9, 12, 5, 20], seed=70)


@pytest.fixture
def served(shared_llama):
    """An engine that must be empty after the test."""
    served = AsyncLLMEngine(shared_llama)
    yield served
    served.close()
    pool = shared_llama.engine.scheduler.pool
    assert not shared_llama.llm_engine.has_unfinished_requests()
    shared_llama.generate([[256]], 1, 0.0)  # a step in which abandoned requests are released
    assert pool.num_free == pool.num_pages


async def all_of(served: AsyncLLMEngine, i: int, params=GREEDY, name="r") -> list[int]:
    outputs = [o async for o in served.generate(PROMPTS[i], params, f"{name}{i}")]
    return outputs[-1].outputs[0].token_ids


def wanted(llama: Llama, i: int, count: int = 20) -> list[int]:
    request = llama.llm_engine.prepare("", PROMPTS[i], SamplingParams(
        max_tokens=count, temperature=0, ignore_eos=True))  # fmt: skip
    return llama.llm_engine.run([request])[0].outputs[0].token_ids


def test_close_ends_what_is_in_flight_and_what_comes_after(served):
    async def main() -> tuple[RequestOutput, str]:
        stream = served.generate(PROMPTS[0], LONG, "a")
        await anext(stream)
        await asyncio.to_thread(served.close)
        last = [output async for output in stream][-1]
        with pytest.raises(RuntimeError, match="closed: make another one"):
            await anext(served.generate(PROMPTS[0], LONG, "b"))
        return last, str(last.outputs[0].finish_reason)

    last, reason = asyncio.run(main())
    assert last.finished and reason == "abort"


def test_an_abort_before_the_first_step_counts(served, shared_llama, monkeypatch):
    """An abort before the first step counts; the step is held back until the abort was made."""
    step, may_step = shared_llama.engine.step, threading.Event()
    monkeypatch.setattr(
        shared_llama.engine, "step", lambda *args: may_step.wait(60) and step(*args)
    )

    async def main() -> list[RequestOutput]:
        stream = served.generate(PROMPTS[0], LONG, "a")
        reader = asyncio.create_task(anext(stream))
        while served.engine.find("a") is None:
            await asyncio.sleep(0)
        await served.abort("a")
        first = await reader
        may_step.set()
        return [first, *[output async for output in stream]]

    (only,) = asyncio.run(main())
    assert only.finished and only.outputs[0].finish_reason == "abort"
    assert only.outputs[0].token_ids == []


def test_nothing_is_kept_of_a_request_that_ended_while_another_runs(served):
    """No memory of an ended request is kept while another one runs.

    Neither the queue of the engine's thread nor the garbage collector keeps it.
    """

    async def one(i: int) -> weakref.ref:
        request = await served.prepare(PROMPTS[i], GREEDY, f"small{i}")
        async for _ in served.stream([request]):
            pass
        return weakref.ref(request)

    async def main() -> list[object]:
        long: Any = served.generate(PROMPTS[3], LONG, "long")
        await anext(long)
        ended = [await one(i) for i in range(3)]
        threads = served.engine.port.threads
        last = threads.num_steps + 2  # the last of them may be in the step that is running
        while threads.num_steps < last:
            await anext(long)
        kept = [each() for each in ended]
        await long.aclose()
        return kept

    gc.disable()
    try:
        assert asyncio.run(main()) == [None] * 3
    finally:
        gc.enable()


def test_a_loop_that_ends_early_leaves_the_next_one_alone(served, shared_llama):
    async def leave() -> None:
        await anext(served.generate(PROMPTS[0], LONG, "same"))

    for i in (1, 2):
        asyncio.run(leave())
        assert asyncio.run(all_of(served, i)) == wanted(shared_llama, i)


def test_several_loops_and_engines_share_one_model(served, shared_llama):
    """Several loops and engines share one model.

    There are two event loops in two threads, and a second AsyncLLMEngine on the same Llama.
    """
    other = AsyncLLMEngine(shared_llama.llm_engine)

    def loop(engine: AsyncLLMEngine, name: str) -> list[list[int]]:
        async def main() -> list[list[int]]:
            return await asyncio.gather(*(all_of(engine, i, name=name) for i in range(3)))

        return asyncio.run(main())

    expected = [wanted(shared_llama, i) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(loop, [served, served, other], "xyz"))
    other.close()
    assert found == [expected] * 3


def test_a_slow_reader_gets_several_steps_in_one_output(served, shared_llama):
    """A slow reader gets several steps in one output, in which unread outputs were merged."""

    async def main() -> list[RequestOutput]:
        stream = served.generate(PROMPTS[0], LONG, "slow")
        outputs = [await anext(stream)]
        await asyncio.wrap_future(
            served._thread.submit(lambda: None)
        )  # all steps are done, and none was read
        return outputs + [output async for output in stream]

    outputs = asyncio.run(main())
    assert len(outputs) == 2 and outputs[-1].finished
    assert "".join(o.outputs[0].new_text for o in outputs) == outputs[-1].outputs[0].text
    assert outputs[-1].outputs[0].token_ids == wanted(shared_llama, 0, 100)


class StrangeError(BaseException):
    """A BaseException that is not an Exception, which no handler expects."""


@pytest.mark.parametrize(
    ("kind", "told"),
    [(MemoryError, MemoryError), (StrangeError, RuntimeError), (SystemExit, RuntimeError)],
)
def test_who_arrives_in_a_failing_step_is_not_in_it(kind, told, served, shared_llama, monkeypatch):
    """A request that arrives in a failing step does not fail.

    An error of any kind ends the requests in the step. One that came meanwhile is served after it.
    """
    start = shared_llama.engine.runner.start
    in_step, may_fail = threading.Event(), threading.Event()

    def fail_once(scheduled):
        monkeypatch.undo()
        in_step.set()
        may_fail.wait(60)
        raise kind("no room")

    async def main() -> list[int]:
        monkeypatch.setattr(shared_llama.engine.runner, "start", fail_once)
        victim = asyncio.create_task(all_of(served, 0))
        await asyncio.to_thread(in_step.wait, 60)
        late = asyncio.create_task(all_of(served, 1))
        while served.engine.find("r1") is None:
            await asyncio.sleep(0)
        may_fail.set()
        with pytest.raises(told, match="no room"):
            await victim
        return await late

    assert asyncio.run(main()) == wanted(shared_llama, 1)
    assert shared_llama.engine.runner.start == start


def test_a_long_prompt_does_not_hold_the_loop_up(served, shared_llama, monkeypatch):
    """A long prompt does not block the loop: it is encoded in another thread."""
    encode, threads = shared_llama.tokenizer.encode, []

    def noted(*args, **kwargs):
        threads.append(threading.get_ident())
        return encode(*args, **kwargs)

    monkeypatch.setattr(shared_llama.tokenizer, "encode", noted)

    async def main() -> None:
        with pytest.raises(ValueError, match="max_seq_len is 128: shorten the prompt"):
            await anext(served.generate("long " * 10_000, GREEDY, "a"))
        assert [o async for o in served.generate("short", GREEDY, "b")][-1].finished

    asyncio.run(main())
    assert threads[0] != threading.get_ident() == threads[1]


def test_a_loop_is_woken_once_and_no_call_is_lost():
    """An event loop is woken once for the calls that wait.

    One that comes when the loop has found the queue empty wakes it again.
    """

    class Racing(deque[Any]):
        def __bool__(self) -> bool:
            has_calls = len(self) > 0
            if not has_calls and late:
                calls.add(late.pop())
            return has_calls

    made: list[str] = []
    woken: list[Any] = []
    late = [partial(made.append, "late")]
    loop: Any = SimpleNamespace(call_soon_threadsafe=woken.append)
    calls = LoopCalls(loop)
    calls._waiting = Racing()
    for name in ("first", "second"):
        calls.add(partial(made.append, name))
    assert len(woken) == 1
    while woken:
        woken.pop()()
    assert made == ["first", "second", "late"]
