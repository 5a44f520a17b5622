"""Calls share the batch in turn: a small call does not wait for the end of a large one."""

import contextlib
from typing import Any

import pytest

from helpers.kernels import KERNELS_RUN
from helpers.launch import DEMO
from llama import Llama, SamplingParams
from llama.requests.request import Request, RequestOutput

LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def engine(demo):
    return demo.llm_engine


def test_a_small_call_waits_for_no_sequence_of_a_large_one(engine):
    """A small call waits for no sequence of a large one.

    A large call came first, with twice as many sequences as the batch holds. The small one ends
    before any of them, and the preempted sequences still get their usual results.
    """
    count = 2 * engine.core.scheduler.max_batch_size
    large = [engine.prepare("", [5, 6], SamplingParams(**LONG), index=i) for i in range(count)]
    small = engine.prepare("", [7], SamplingParams(max_tokens=4))
    with contextlib.closing(engine.stream(large)) as first:
        next(first)
        (output,) = engine.run([small])
        assert output.finished
        assert not any(answer.finish_reason for request in large for answer in request.answers)
        *_, last = first
    outputs = {tuple(answer.sequence.output) for request in large for answer in request.answers}
    assert last.finished and len(outputs) == 1, "all have the same prompt"
    assert not engine.has_unfinished_requests()
    engine.core.scheduler.check()


@pytest.mark.skipif(not KERNELS_RUN, reason="only the CPU's kernels are batch-invariant")
def test_prompts_of_several_senders_have_the_bits_of_each_alone(monkeypatch):
    """Long prompts of three senders, in shares of each step, give the bits of each prompt alone."""
    engine = Llama.build(str(DEMO), None, 256, 8, device="cpu", dtype="bf16").llm_engine
    monkeypatch.setattr(engine.core.scheduler, "token_budget", 40)
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1, logprobs=2, prompt_logprobs=1)

    def requests() -> list[Request]:
        prompts = [
            [(7 * i + k) % 200 for k in range(count)] for i, count in enumerate((150, 9, 97))
        ]
        made = [engine.prepare("", prompt, params) for prompt in prompts]
        for request, sender in zip(made, (b"a", b"b", b"c"), strict=True):
            request.set_sender(sender)
        return made

    def bits(output: RequestOutput) -> object:
        answer = output.outputs[0]
        return answer.token_ids, answer.logprobs, output.prompt_logprobs

    alone = [bits(engine.run([request])[0]) for request in requests()]
    num_steps = engine.core.stats.steps
    together = engine.run(requests())
    assert engine.core.stats.steps - num_steps < 20, "the prompts were not in one batch"
    assert [bits(output) for output in together] == alone


def test_requests_that_are_queued_together_are_a_call(engine):
    """Requests that are queued together are one call, and the next ones another."""
    calls = [[engine.prepare("", [5], SamplingParams(n=n)) for n in counts]
             for counts in ((2, 1), (1,), (4,))]  # fmt: skip
    for call in calls:
        engine.submit(call)
    numbers = [
        {answer.sequence.spec.call for request in call for answer in request.answers}
        for call in calls
    ]
    first = min(numbers[0])
    assert numbers == [{first}, {first + 1}, {first + 2}]
    engine.discard_all()
    assert not engine.core.has_unfinished()


def test_requests_that_have_not_run_outlive_a_step_that_fails(engine, monkeypatch):
    """Requests that have not run outlive a step that fails.

    A call is larger than the batch. The step that fails ends the requests of which a sequence was
    in it; those that only waited are run by the next step.
    """
    start = engine.core.runner.start
    size = engine.core.scheduler.max_batch_size

    def fail_once(step):
        assert len(step.items) == size
        monkeypatch.setattr(engine.core.runner, "start", start)
        raise MemoryError("no room")

    asked: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    counts = [1] * (size - 1) + [2, 1, 1]  # one sequence of the request with two is in the step
    call = [engine.prepare("", [5, 6], SamplingParams(n=n, **asked)) for n in counts]
    engine.submit(call)
    monkeypatch.setattr(engine.core.runner, "start", fail_once)
    with pytest.raises(MemoryError, match="no room"):
        engine.step()
    assert [request.exception is not None for request in call] == [True] * size + [False] * 2
    assert engine.core.scheduler.pool.num_free == engine.core.scheduler.pool.num_pages
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]
    assert not engine.core.has_unfinished()
    engine.core.scheduler.check()
