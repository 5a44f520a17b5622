"""Request bodies of OpenAI's API: every field that is taken, and each bad body with its message.

The responses are tested with real answers in batch/test_lines.py.
"""

import dataclasses
import re
from typing import Any

import pytest

from llama.sampling_params import SamplingParams
from llama.serving.openai import parse_body

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
    assert changed.keys() == names - {"prompt_logprobs"}
    labels = {"model": "m", "user": "u", "metadata": {"k": "v"}, "stream": False, "tools": None}
    request = parse_body({"prompt": "x", **changed, **labels}, SamplingParams(), chat=False)
    assert request.params == SamplingParams(**{**changed, "logit_bias": {7: 1.5}})
    assert (request.chat, request.prompt, request.model) == (False, "x", "m")
    defaults = SamplingParams(max_tokens=None, temperature=0.6, top_p=0.9)
    request = parse_body(
        {"prompt": "x", "temperature": None, "max_tokens": None}, defaults, chat=False
    )
    assert request.params == defaults
    request = parse_body({"messages": HELLO, "max_completion_tokens": 4}, defaults, chat=True)
    assert request.params == dataclasses.replace(defaults, max_tokens=4)


BAD: list[tuple[Any, str]] = [
    ([], "body must be an object, got a list"),
    ({"prompt": "x", "stream": True}, "'stream' cannot be used in a completion request"),
    ({"prompt": "x", "stream": 0}, "'stream' cannot be used in a completion request"),
    ({"messages": HELLO, "tools": [], "tool_choice": "auto"}, "'tool_choice', 'tools' cannot be"),
    ({"prompt": "x", "top_logprobs": 2}, "'top_logprobs' cannot be used in a completion request"),
    ({}, "prompt must be a string or a list of token ids, got null"),
    ({"prompt": 7}, "prompt must be a string or a list of token ids, got a number"),
    ({"prompt": {"a": 1}}, "prompt must be a string or a list of token ids, got an object"),
    ({"prompt": "x", "temperature": -1}, "temperature=-1 must be a number from 0 to 100"),
    ({"prompt": "x", "temperature": 0, "n": 2}, "greedy decoding has one answer"),
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
    ({"messages": "Hello"}, "messages must be a list, got a string"),
]


@pytest.mark.parametrize(("body", "message"), BAD)
def test_a_bad_body_is_an_error_that_names_the_field(body, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        parse_body(body, SamplingParams(), chat="messages" in body)
