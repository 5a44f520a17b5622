"""generate_stream and its dialects: what a host may send, its output, and its errors.

The oracles are the same request to LLMEngine, transformers' scores of the same weights, the raw
model token by token, and FastChat's own rules, written down here.
"""

import asyncio
import contextlib
import itertools
import re
from typing import Any

import pytest
import torch

from helpers.prompts import prompts_of
from llama import AsyncLLMEngine, Llama, SamplingParams
from llama.compat.client_tokenizer import ClientTokenizer
from llama.compat.hosts import async_generate_stream, generate_stream


def key_of(llama: Llama, token: int) -> str:
    """Return a token as in OpenAI's logprobs: its text, or its bytes if these are partial
    characters.
    """
    raw = llama.tokenizer.decode_bytes([token])
    with contextlib.suppress(UnicodeDecodeError):
        return raw.decode()
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def params(**changes: Any) -> dict[str, Any]:
    return {
        "prompt": "Once upon",
        "max_new_tokens": 12,
        "temperature": 0.0,
        "echo": False,
        **changes,
    }


def stream(llama: Llama, *, context_len: int = 128, **changes: Any) -> list[dict[str, Any]]:
    return list(generate_stream(llama, llama.tokenizer, params(**changes), "cpu", context_len))


def stream_async(llama: Llama, *, context_len: int = 128, **changes: Any) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        served = AsyncLLMEngine(llama)
        reports = async_generate_stream(
            served, llama.tokenizer, params(**changes), "cpu", context_len
        )
        try:
            return [report async for report in reports]
        finally:
            served.close()

    return asyncio.run(collect())


def answer(llama: Llama, prompt: str, **sampling: Any) -> list[str]:
    """Return LLMEngine's answer to the same request, without special tokens."""
    engine = llama.llm_engine
    wanted = SamplingParams(skip_special_tokens=True, **sampling)
    (output,) = engine.run(
        [engine.prepare("", ClientTokenizer(llama.tokenizer).encode(prompt), wanted)]
    )
    return [each.text for each in output.outputs]


# --- streaming


@pytest.mark.parametrize("interval", [1, 2, 3, 20])
def test_a_dict_comes_with_the_first_token_then_every_interval(interval, shared_llama):
    """A dict comes with the first token, then at every interval, and at the end.

    FastChat's rule is i % interval == 0 for the i-th token, counted from 0.
    """
    told = list(
        generate_stream(shared_llama, shared_llama.tokenizer, params(), "cpu", 128, interval)
    )
    texts = [t["text"] for t in told]
    assert texts[-1] == answer(shared_llama, "Once upon", max_tokens=12, temperature=0)[0]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
    counts = [t["usage"]["completion_tokens"] for t in told]
    last = counts[-1]
    by_rule = [i + 1 for i in range(last) if i % interval == 0]
    assert counts == [*(c for c in by_rule if c < last), last, last]
    assert [t["finish_reason"] for t in told[:-1]] == [None] * (len(told) - 1)
    assert told[-1]["finish_reason"] in ("length", "stop")
    usage = told[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_special_tokens_do_not_show(shared_llama):
    """Special tokens do not show.

    A random model emits many: they are counted, are in no text, and are in logprobs by name.
    """
    changes: dict[str, Any] = {
        "max_new_tokens": 60, "temperature": 1.0, "seed": 5, "logprobs": 0,
    }  # fmt: skip
    last = stream(shared_llama, **changes, stop_token_ids=None)[-1]
    names = [t for t in last["logprobs"]["tokens"] if t in shared_llama.tokenizer.special_tokens]
    assert names and "<|" not in last["text"]
    assert last["usage"]["completion_tokens"] == len(last["logprobs"]["tokens"])
    assert "<|" not in stream_async(shared_llama, **changes)[-1]["text"]


def test_a_template_of_special_tokens_is_read(demo):
    """A template of special tokens is read.

    Hosts write Llama 3's template as text: the answer is chat_completion's. An echo is the host's
    decoded prompt, or, for DB-GPT, the unchanged prompt.
    """
    dialog: list[Any] = [{"role": "user", "content": "Hello"}]
    prompt = ClientTokenizer(demo.tokenizer).apply_chat_template(
        dialog, tokenize=False, add_generation_prompt=True
    )
    (wanted,) = demo.chat_completion([dialog], 0.0, max_gen_len=12)
    content = wanted["generation"]["content"]
    assert stream(demo, prompt=prompt)[-1]["text"] == content
    shown = re.sub(r"<\|\w+\|>", "", prompt)
    assert stream(demo, prompt=prompt, echo=True)[-1]["text"] == shown + content
    assert stream_async(demo, prompt=prompt, echo=True)[-1]["text"] == prompt + content


def test_logprobs_are_fastchats(shared_llama):
    """Logprobs are FastChat's: the raw model's scores; with echo those of the prompt, the first
    None.
    """
    for echo in (False, True):
        last = stream(shared_llama, logprobs=2, echo=echo, ignored=None)[-1]
        found = last["logprobs"]
        assert found.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        assert len({len(values) for values in found.values()}) == 1
        ids = ClientTokenizer(shared_llama.tokenizer).encode("Once upon")
        request = SamplingParams(max_tokens=12, temperature=0)
        engine = shared_llama.llm_engine
        (output,) = engine.run([engine.prepare("", ids, request)])
        tokens = ids + output.outputs[0].token_ids
        scores = shared_llama.model(torch.tensor([tokens]), 0)[0].log_softmax(-1)
        values = [float(scores[i - 1, t]) for i, t in enumerate(tokens) if i]
        own = values[-len(output.outputs[0].token_ids) :]
        if echo:
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            assert found["token_logprobs"][1:] == pytest.approx(values, abs=1e-4)
            assert found["tokens"] == [key_of(shared_llama, t) for t in tokens]
            assert found["text_offset"][:3] == [0, 0, 1]  # begin_of_text is not in the text
        else:
            assert found["token_logprobs"] == pytest.approx(own, abs=1e-4)
            assert found["text_offset"][0] == 0
        assert all(2 <= len(top) <= 3 for top in found["top_logprobs"][1:])
    assert stream(shared_llama)[-1]["logprobs"] is None


def test_closing_aborts(shared_llama):
    reports: Any = generate_stream(shared_llama, shared_llama.tokenizer, params(), "cpu", 128)
    next(reports)
    assert shared_llama.llm_engine.has_unfinished_requests()
    reports.close()
    assert not shared_llama.llm_engine.has_unfinished_requests()


def test_no_token_to_choose_is_a_runtime_error(shared_llama):
    """A constraint without possible tokens gives a RuntimeError.

    FastChat catches it and reports it to its client; text without an error would look like an
    answer.
    """
    weights = shared_llama.model.norm.weight.data
    before = weights.clone()
    try:
        weights.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="no token to choose"):
            stream(shared_llama, prompt="never seen before")
    finally:
        weights.copy_(before)


# --- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beams": 3}, "params has beams=3, which this worker does not support"),
        ({"use_beam_search": True}, "use_beam_search=True"),
        ({"prompt": None}, "no 'prompt'"),
        ({"prompt": "z" * 127}, "has 128 tokens, which leaves no space for an answer in the con"),
        ({"max_new_tokens": "8.5"}, "params: max_new_tokens=8.5 must be a whole number"),
        ({"temperature": -1.0}, "params: temperature"),
        ({"top_p": "a lot"}, "params: top_p='a lot' must be a number"),
        ({"stop_token_ids": [512]}, "stop_token_ids has the token id 512"),
        ({"n": 2, "temperature": 1, "logprobs": 1}, "logprobs needs n=1, not n=2"),
        ({"judge_sent_end": True}, "judge_sent_end=True, which this worker does not support"),
        ({"echo": "maybe"}, "echo='maybe' must be True or False"),
    ],
)
def test_what_cannot_be_done_is_refused_at_the_call(change, message, shared_llama):
    tokenizer = shared_llama.tokenizer
    with pytest.raises(ValueError, match=re.escape(message)):
        generate_stream(shared_llama, tokenizer, params(**change), "cpu", 128)
    assert not shared_llama.llm_engine.has_unfinished_requests()


def test_another_model_tokenizer_or_device_is_refused(shared_llama, demo):
    good: list[Any] = [shared_llama, shared_llama.tokenizer, params(), "cpu", 128, 2, False]
    for place, bad, message in (
        (0, shared_llama.model, "model must be a Llama, got Transformer"),
        (1, demo.tokenizer, "tokenizer is not the model's own"),
        (3, "cuda", "device='cuda', but the model was built on cpu"),
        (4, "wide", "context_len='wide'"),
        (5, 0, "stream_interval=0"),
        (6, True, "judge_sent_end=True cannot be used"),
    ):
        call = [*good[:place], bad, *good[place + 1 :]]
        with pytest.raises(ValueError, match=re.escape(message)):
            generate_stream(*call)

    async def with_a_llama() -> None:
        await anext(async_generate_stream(*good[:5]))

    with pytest.raises(
        ValueError, match=r"must be a llama.AsyncLLMEngine, got llama\.generation\.Llama"
    ):
        asyncio.run(with_a_llama())


# --- dialects


def test_the_prompt_is_kept_and_the_answer_is_shorter(shared_llama):
    """The prompt is kept, and the answer is shortened.

    As in vLLM, whichever function is called, all of the prompt is read, and the answer ends with
    the context. A prompt that fills the context is refused: none loses its beginning.
    """
    prompt = "z" * 90
    wanted = answer(shared_llama, prompt, max_tokens=9, temperature=0, ignore_eos=False)[0]
    for function in (stream, stream_async):
        for wish in (30, None, 2**31 - 1):
            last = function(shared_llama, prompt=prompt, max_new_tokens=wish, context_len=100)[-1]
            assert (last["text"], last["usage"]["prompt_tokens"]) == (wanted, 91)
        with pytest.raises(ValueError, match="has 101 tokens, which leaves no space for an"):
            function(shared_llama, prompt="z" * 100, context_len=100)


def test_n_answers_are_joined_and_each_has_its_reason(shared_llama):
    changes: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 4}
    wanted = answer(shared_llama, "Once upon", max_tokens=12, **changes)
    assert len(set(wanted)) == 3
    for told in (stream_async(shared_llama, **changes), stream(shared_llama, **changes)):
        assert told[-1]["text"] == " ".join(wanted)
        assert set(told[-1]["finish_reason"]) <= {"stop", "length"}
        assert len(told[-1]["finish_reason"]) == 3
    best = answer(shared_llama, "Once upon", max_tokens=12, temperature=1.0, seed=4, best_of=3)
    assert stream(shared_llama, temperature=1.0, seed=4, best_of="3")[-1]["text"] == best[0]


def test_the_benchmark_variable_ignores_every_stop(shared_llama, monkeypatch):
    """The benchmark variable disables every stop.

    DB_GPT_MODEL_BENCHMARK is read at the call: each request makes max_new_tokens.
    """
    changes: dict[str, Any] = {"stop": ["e", "a"], "stop_token_ids": [*range(200)]}
    stopped = stream_async(shared_llama, max_new_tokens=30, **changes)[-1]
    assert stopped["finish_reason"] == "stop"
    monkeypatch.setenv("DB_GPT_MODEL_BENCHMARK", "True")
    last = stream_async(shared_llama, max_new_tokens=30, **changes)[-1]
    assert (last["usage"]["completion_tokens"], last["finish_reason"]) == (30, "length")
    monkeypatch.setenv("DB_GPT_MODEL_BENCHMARK", "False")
    assert stream_async(shared_llama, max_new_tokens=30, **changes)[-1] == stopped


def test_many_async_requests_get_each_its_own_answer(shared_llama):
    texts = [shared_llama.tokenizer.decode(ids) for ids in prompts_of([4, 9, 20, 33], seed=3)]
    wanted = [answer(shared_llama, text, max_tokens=12, temperature=0)[0] for text in texts]

    async def one(served: AsyncLLMEngine, text: str) -> str:
        reports = async_generate_stream(
            served, shared_llama.tokenizer, params(prompt=text), "cpu", 128
        )
        return [report["text"] async for report in reports][-1]

    async def main() -> list[str]:
        served = AsyncLLMEngine(shared_llama)
        try:
            return await asyncio.gather(*(one(served, text) for text in texts))
        finally:
            served.close()

    assert asyncio.run(main()) == wanted
