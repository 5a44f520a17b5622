"""`continuous_usage_stats` of streams, and the log-probabilities of Responses.

The oracles are the engine's own outputs for the same prompts.
"""

from typing import Any

import openai
import pytest

from llama import Llama, SamplingParams

DIALOGS: list[Any] = [
    [{"role": "user", "content": "Tell me a story about a cat"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}],
]
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def options(**more: bool) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True, **more}}


def counts_of(chunks: list[Any], prompt_tokens: int) -> list[int]:
    """Return the number of tokens so far in each chunk of a choice."""
    counts = []
    for chunk in chunks:
        assert chunk.usage.prompt_tokens == prompt_tokens
        assert chunk.usage.total_tokens == prompt_tokens + chunk.usage.completion_tokens
        counts.append(chunk.usage.completion_tokens)
    return counts


@pytest.mark.parametrize("dialog", DIALOGS)
def test_each_chunk_of_a_chat_has_the_usage_so_far(client, demo, dialog):
    ask = {**GREEDY, "messages": dialog, "max_tokens": 12}
    chunks = list(client.chat.completions.create(**ask, **options(continuous_usage_stats=True)))
    counts = counts_of(chunks, len(demo.formatter.encode_dialog_prompt(dialog)))
    assert counts == sorted(counts) and counts[-1] == counts[-2] and len(set(counts)) > 2
    assert chunks[-1].choices == [] and counts[-1] == chunks[-1].usage.completion_tokens
    text = ""
    for chunk, count in zip(chunks[:-1], counts, strict=False):
        text += chunk.choices[0].delta.content or ""
        num_written = len(demo.tokenizer.encode(text, bos=False, eos=False))
        assert num_written <= count + 1
    for more in ({}, {"continuous_usage_stats": False}):
        plain = list(client.chat.completions.create(**ask, **options(**more)))
        assert [chunk.usage for chunk in plain[:-1]] == [None] * len(plain[:-1])
        assert plain[-1].usage.completion_tokens == counts[-1]


@pytest.mark.parametrize("prompts", [["Once upon a time"], ["The dog", "A ball and a cat"]])
def test_each_chunk_of_a_completion_counts_all_of_its_prompts(client, demo, prompts):
    num_prompt = sum(len(demo.tokenizer.encode(x, bos=True, eos=False)) for x in prompts)
    ask = {**GREEDY, "prompt": prompts, "max_tokens": 9, "extra_body": {"ignore_eos": True}}
    chunks = list(client.completions.create(**ask, **options(continuous_usage_stats=True)))
    counts = counts_of(chunks[-2:], num_prompt)
    assert counts == [9 * len(prompts)] * 2
    all_counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert all_counts == sorted(all_counts) and all_counts[0] < counts[-1]


def scores(llama: Llama, dialog: Any, count: int, num_top: int) -> list[dict[int, float]]:
    """Return the engine's log-probabilities by id of each token of the greedy answer."""
    params = SamplingParams(max_tokens=count, temperature=0, logprobs=num_top)
    ids = llama.formatter.encode_dialog_prompt(dialog)
    (output,) = llama.llm_engine.run([llama.llm_engine.prepare("", ids, params)])
    answer = output.outputs[0]
    assert answer.logprobs is not None
    return [
        {token: found[token], **found}
        for token, found in zip(answer.token_ids, answer.logprobs, strict=True)
    ]


def check_scores(llama: Llama, found: list[Any], wanted: list[dict[int, float]], top: int) -> None:
    assert len(found) == len(wanted) > 3
    for item, score in zip(found, wanted, strict=True):
        token, logprob = next(iter(score.items()))
        assert bytes(item.bytes) == llama.tokenizer.decode_bytes([token])
        assert item.logprob == pytest.approx(logprob, abs=1e-4)
        assert len(item.top_logprobs) == top
        best = sorted(score.values(), reverse=True)[:top]
        assert [x.logprob for x in item.top_logprobs] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("dialog", DIALOGS)
def test_responses_have_the_engines_log_probabilities(client, demo, dialog, top):
    included: Any = ["message.output_text.logprobs"]
    ask = {**GREEDY, "input": dialog, "max_output_tokens": 10, "top_logprobs": top}
    wanted = scores(demo, dialog, 10, top)
    whole = client.responses.create(**ask, include=included)
    check_scores(demo, whole.output[0].content[0].logprobs, wanted, top)
    events = list(client.responses.create(**ask, include=included, stream=True))
    of_deltas = [
        item
        for event in events if event.type == "response.output_text.delta"
        for item in event.logprobs
    ]  # fmt: skip
    (done,) = (event for event in events if event.type == "response.output_text.done")
    (part,) = (event.part for event in events if event.type == "response.content_part.done")
    for found in (done.logprobs, part.logprobs, events[-1].response.output[0].content[0].logprobs):
        check_scores(demo, found, wanted, top)
    assert [x.logprob for x in of_deltas] == [x.logprob for x in done.logprobs][: len(of_deltas)]
    assert len(of_deltas) >= len(wanted) - 1  # The end of a turn has no text.
    if top == 0:
        for more in ({}, {"include": ["reasoning.encrypted_content"]}):
            assert client.responses.create(**ask, **more).output[0].content[0].logprobs == []
