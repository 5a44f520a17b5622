"""Request bodies of OpenAI's API: every supported field.

Bad bodies are in the table of test_bad_requests.py, and responses are tested with real answers in
batch/test_lines.py.
"""

import dataclasses
import re
from typing import Any

import pytest

from helpers.bodies import parse_body
from llama.common.checks import FieldError
from llama.prompts.dialog_format import PromptOptions
from llama.sampling_params import SamplingParams

HELLO = [{"role": "user", "content": "Hello"}]


GUIDED: dict[str, Any] = {
    "json": {"type": "object"}, "regex": "a+", "choice": ["a", "b"], "grammar": 'start: "a"',
}  # fmt: skip


@pytest.mark.parametrize("kind", GUIDED)
@pytest.mark.parametrize("chat", [False, True])
def test_vllms_older_guided_fields_are_structured_outputs(kind, chat):
    """vLLM's older guided_* fields mean the same as structured_outputs, and errors name them."""
    base: Any = {"messages": HELLO} if chat else {"prompt": "x"}
    name = f"guided_{kind}"
    older = {name: GUIDED[kind], "guided_decoding_backend": "xgrammar"}
    found = parse_body(base | older, SamplingParams(), chat=chat)
    new = base | {"structured_outputs": {kind: GUIDED[kind]}}
    assert found.params == parse_body(new, SamplingParams(), chat=chat).params
    assert found.params.structured_output is not None
    assert found.fields.answer_format == name
    for bad, field, message in (
        ({name: 7}, name, f"{name} must be"),
        ({name: [] if kind == "choice" else ""}, name, name),
        (older | {"response_format": {"type": "text"}}, "response_format",
         f"response_format and {name} are both given: give one"),
        (older | {"structured_outputs": {"regex": "a"}}, "structured_outputs",
         f"structured_outputs and {name} are both given: give one"),
        ({"guided_regex": "a", "guided_grammar": "b"}, "guided_regex", "guided_regex and guided_"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "cannot be used in a"),
    ):  # fmt: skip
        with pytest.raises(FieldError, match=re.escape(message)) as error:
            parse_body(base | bad, SamplingParams(), chat=chat)
        assert error.value.field.startswith(field)


def test_every_field_reaches_the_sampler():
    """Every field reaches the sampler.

    All of SamplingParams are accepted by their own names, with OpenAI's aliases, labels, and null
    for absent values.
    """
    changed: dict[str, Any] = {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 3,
        "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": 1.0,
        "frequency_penalty": -1.0, "stop": ["a", "b"], "stop_token_ids": [4],
        "include_stop_str_in_output": True, "skip_special_tokens": True, "ignore_eos": True,
        "seed": 8, "n": 2, "best_of": 3, "cache_salt": "s",
        "prompt_cache_retention": "in_memory",
        "logprobs": 2, "bad_words": ["c"], "logit_bias": {"7": 1.5},
    }  # fmt: skip
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    assert changed.keys() == names - {
        "prompt_logprobs",
        "structured_output",
        "prediction",
        "reasoning",
    }
    labels = {"model": "m", "user": "u", "metadata": {"k": "v"}, "stream": False, "tools": None}
    request = parse_body({"prompt": "x", **changed, **labels}, SamplingParams(), chat=False)
    assert request.params == SamplingParams(**{**changed, "logit_bias": {7: 1.5}})
    assert (request.chat, request.prompts, request.model) == (False, ("x",), "m")
    assert not request.stream
    defaults = SamplingParams(max_tokens=None, temperature=0.6, top_p=0.9)
    request = parse_body(
        {"prompt": "x", "temperature": None, "max_tokens": None}, defaults, chat=False
    )
    assert request.params == defaults
    request = parse_body({"messages": HELLO, "max_completion_tokens": 4}, defaults, chat=True)
    assert request.params == dataclasses.replace(defaults, max_tokens=4)
    assert request.prompt_options == PromptOptions(keeps_space=True)
    parts = [{"type": "text", "text": "def f"}, {"type": "text", "text": "():"}]
    router = {  # what the routers of SGLang and vLLM add to every body
        "no_stop_trim": False, "return_hidden_states": False,
        "separate_reasoning": True, "stream_reasoning": True,
    }  # fmt: skip
    routed = parse_body({"messages": HELLO, **router}, defaults, chat=True)
    assert routed == parse_body({"messages": HELLO}, defaults, chat=True)
    for content in ("def f():", parts):
        predicted = {"messages": HELLO, "prediction": {"type": "content", "content": content}}
        request = parse_body(predicted, defaults, chat=True)
        assert request.params == dataclasses.replace(defaults, prediction="def f():")
    body = {"messages": HELLO, "add_generation_prompt": False, "continue_final_message": True}
    request = parse_body(body, defaults, chat=True)
    assert request.prompt_options == PromptOptions.for_answer(continues=True)


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
