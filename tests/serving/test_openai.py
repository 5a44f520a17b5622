"""Request bodies of OpenAI's API: every field that is taken, and each bad body with its message.

The responses are tested with real answers in batch/test_lines.py.
"""

import dataclasses
import re
from typing import Any

import pytest

from llama.sampling_params import SamplingParams
from llama.serving.openai.requests import field_of, parse_body

HELLO = [{"role": "user", "content": "Hello"}]


def test_every_field_reaches_the_sampler():
    """All of SamplingParams by its own name, OpenAI's aliases, labels, and null for not given."""
    changed: dict[str, Any] = {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 3,
        "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": 1.0,
        "frequency_penalty": -1.0, "stop": ["a", "b"], "stop_token_ids": [4],
        "include_stop_str_in_output": True, "skip_special_tokens": True, "ignore_eos": True,
        "seed": 8, "n": 2, "best_of": 3,
        "logprobs": 2, "bad_words": ["c"], "logit_bias": {"7": 1.5},
    }  # fmt: skip
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    assert changed.keys() == names - {"prompt_logprobs", "structured_output"}
    labels = {"model": "m", "user": "u", "metadata": {"k": "v"}, "stream": False, "tools": None}
    request = parse_body({"prompt": "x", **changed, **labels}, SamplingParams(), chat=False)
    assert request.params == SamplingParams(**{**changed, "logit_bias": {7: 1.5}})
    assert (request.chat, request.prompts, request.model, request.user) == (False, ("x",), "m", "u")
    assert not request.stream
    defaults = SamplingParams(max_tokens=None, temperature=0.6, top_p=0.9)
    request = parse_body(
        {"prompt": "x", "temperature": None, "max_tokens": None}, defaults, chat=False
    )
    assert request.params == defaults
    request = parse_body({"messages": HELLO, "max_completion_tokens": 4}, defaults, chat=True)
    assert request.params == dataclasses.replace(defaults, max_tokens=4)
    assert (request.add_generation_prompt, request.continue_final_message) == (True, False)
    body = {"messages": HELLO, "add_generation_prompt": False, "continue_final_message": True}
    request = parse_body(body, defaults, chat=True)
    assert (request.add_generation_prompt, request.continue_final_message) == (False, True)


BAD: list[tuple[Any, str]] = [
    ([], "body must be an object, got a list"),
    ({"prompt": "x", "stream": 0}, "stream must be true or false, got a number"),
    ({"prompt": "x", "stream_options": {}, "stream": 1}, "stream must be true or false"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "needs stream to be true"),
    (
        {"prompt": "x", "stream": True, "stream_options": {"a": 1}},
        "stream_options has 'a': only include_usage can be used",
    ),
    ({"messages": HELLO, "echo": True}, "'echo' cannot be used in a chat request"),
    ({"prompt": "x", "echo": "yes"}, "echo must be true or false, got a string"),
    ({"prompt": []}, "prompt is an empty list"),
    ({"prompt": ["x", 1]}, "prompt[1] must be a string, as the first one, got a number"),
    ({"prompt": [[1], "x"]}, "prompt[1] must be a list, as the first one, got a string"),
    ({"prompt": "x", "tools": [], "tool_choice": "auto"}, "'tool_choice', 'tools' cannot be"),
    ({"prompt": "x", "top_logprobs": 2}, "'top_logprobs' cannot be used in a completion request"),
    ({}, "prompt must be a string, a list of token ids, or a list of either, got null"),
    (
        {"prompt": 7},
        "prompt must be a string, a list of token ids, or a list of either, got a number",
    ),
    (
        {"prompt": {"a": 1}},
        "prompt must be a string, a list of token ids, or a list of either, got an object",
    ),
    ({"prompt": "x", "temperature": -1}, "temperature=-1 must be a number from 0 to 100"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens='5' must be a whole number"),
    ({"prompt": "x", "max_tokens": 1, "max_completion_tokens": 1}, "are the same: give one"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias has the key 'a': keys must be token ids"),
    ({"prompt": "x", "logit_bias": [1]}, "logit_bias must be an object, got a list"),
    ({"prompt": "x", "logprobs": True}, "logprobs=True must be a whole number"),
    ({"prompt": "x", "prompt_logprobs": 1}, "'prompt_logprobs' cannot be used"),
    ({"prompt": "x", "model": 3}, "model must be a string, got a number"),
    ({"messages": HELLO, "logprobs": 2}, "logprobs=2 must be true or false in a chat"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs needs logprobs to be true"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": True}, "logprobs=True must be a whole"),
    ({"prompt": "x", "response_format": "json"}, "response_format='json' must have the type"),
    (
        {"prompt": "x", "response_format": {"type": "xml"}},
        "must have the type text, json_object or",
    ),
    (
        {"prompt": "x", "response_format": {"type": "json_schema"}},
        "object with a schema",
    ),
    (
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        "response_format: structured_output.json=3 must be a JSON schema",
    ),
    ({"prompt": "x", "structured_outputs": 1}, "structured_outputs must be an object"),
    (
        {"prompt": "x", "structured_outputs": {"regexp": "a"}},
        "structured_outputs: got an",
    ),
    (
        {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs: structured_output must have one of",
    ),
    (
        {"prompt": "x", "structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
        "response_format and structured_outputs are both given",
    ),
    (
        {"prompt": "x", "structured_outputs": {"regex": "a"}, "ignore_eos": True},
        "ignore_eos and min_tokens cannot",
    ),
    ({"messages": "Hello"}, "messages must be a list, got a string"),
    ({"messages": HELLO, "continue_final_message": True}, "needs add_generation_prompt to be fal"),
    ({"messages": HELLO, "add_generation_prompt": 0}, "add_generation_prompt must be true or"),
    ({"prompt": "x", "continue_final_message": True}, "'continue_final_message' cannot be used"),
]


@pytest.mark.parametrize(("body", "message"), BAD)
def test_a_bad_body_is_an_error_that_names_the_field(body, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        parse_body(body, SamplingParams(), chat="messages" in body)


def test_a_body_may_have_many_prompts_and_ask_for_a_stream():
    defaults = SamplingParams(max_tokens=None)
    for prompt, prompts in [
        ("x", ("x",)),
        (["x", "y"], ("x", "y")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
    ]:
        assert parse_body({"prompt": prompt}, defaults, chat=False).prompts == prompts
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    request = parse_body(body, defaults, chat=False)
    assert request.stream and request.has_usage
    assert not parse_body({"prompt": "x", "stream": True}, defaults, chat=False).has_usage
    echoed = parse_body({"prompt": "x", "echo": True, "logprobs": 2}, defaults, chat=False)
    assert echoed.params == SamplingParams(max_tokens=None, logprobs=2, prompt_logprobs=2)


@pytest.mark.parametrize(("body", "message"), BAD[1:])
def test_the_error_names_the_field(body, message):
    with pytest.raises((TypeError, ValueError)) as error:
        parse_body(body, SamplingParams(), chat="messages" in body)
    name = field_of(error.value, body)
    assert name in body or name in ("prompt", "max_tokens"), (name, error.value)
