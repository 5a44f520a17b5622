"""Tools in prompts against Meta's chat template, and calls in answers against Meta's parser.

The expected text is rendered by transformers with the template of Llama-3.1-8B-Instruct.
"""

from pathlib import Path
from typing import Any

import pytest
from llama_models.datatypes import StopReason
from llama_models.llama3 import chat_format as oracle_chat_format
from llama_models.llama3 import tokenizer as oracle_module

from llama.prompts import ToolCall, encode_chat, parse_tool_call
from llama.tokenizer import ChatFormat, Tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "In “Zürich” <b>", "parameters": {}},
}
CALL = {"function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}
DIALOG: list[dict[str, Any]] = [
    {"role": "system", "content": " You are terse.\n"},
    {"role": "user", "content": "  How is it in Zürich? "},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": 'sunny, "22 °C"\n'},
]
RENDERED = """<|begin_of_text|><|start_header_id|>system<|end_header_id|>

Environment: ipython
Cutting Knowledge Date: December 2023
Today Date: 26 Jul 2024

You are terse.<|eot_id|><|start_header_id|>user<|end_header_id|>

Given the following functions, please respond with a JSON for a function call with its proper \
arguments that best answers the given prompt.

Respond in the format {"name": function name, "parameters": dictionary of argument name and its \
value}.Do not use variables.

{
    "type": "function",
    "function": {
        "name": "weather",
        "description": "In “Zürich” <b>",
        "parameters": {}
    }
}

How is it in Zürich?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

{"name": "weather", "parameters": {"city": "Zürich", "days": 2}}<|eot_id|>\
<|start_header_id|>ipython<|end_header_id|>

"sunny, \\"22 °C\\"\\n"<|eot_id|><|start_header_id|>assistant<|end_header_id|>

"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(oracle_module.__file__).with_name("tokenizer.model"))


def test_tools_are_rendered_as_in_metas_template(tokenizer):
    wanted = tokenizer.encode(RENDERED, bos=False, eos=False, allowed_special="all")
    assert encode_chat(tokenizer, DIALOG, [WEATHER]) == wanted
    as_json = {"function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 2}'}}
    parts = [{"type": "text", "text": "How is it in"}, {"type": "text", "text": "Zürich?"}]
    dialog = [*DIALOG[:1], {"role": "user", "content": parts}]
    dialog.append({"role": "assistant", "tool_calls": [as_json]})
    cut = RENDERED.replace("How is it in Z", "How is it in\nZ").split("<|start_header_id|>ipython")
    assert tokenizer.decode(
        encode_chat(tokenizer, dialog, [WEATHER], add_generation_prompt=False)
    ) == cut[0]  # fmt: skip


def test_without_a_system_message_its_header_ends_in_an_empty_line(tokenizer):
    text = tokenizer.decode(encode_chat(tokenizer, DIALOG[1:2], [WEATHER]))
    assert "2024\n\n<|eot_id|>" in text


@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER, {"name": "brave_search"}]])
def test_calls_of_one_message_are_encoded_one_after_the_other(tokenizer, tools):
    """Several calls of one message are encoded one after the other.

    Meta's template refuses two calls in a message; with one call in each message and its result
    after it, it is the dialog of a model that calls again. Results come in any order, as their ids
    match the calls.
    """
    question = {"role": "user", "content": "And Bern?"}
    calls = [
        {"id": name, "function": {"name": "weather", "arguments": {"city": name}}}
        for name in ("Zürich", "Bern", "Basel")
    ]
    results = [
        {"role": "tool", "tool_call_id": name, "content": f"{name} <|eot_id|>"}
        for name in ("Zürich", "Bern", "Basel")
    ]
    said: dict[str, Any] = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    together = [question, said, results[2], results[0], results[1], question]
    apart: list[dict[str, Any]] = [question]
    for i in range(3):
        text = "I look." if i == 0 else None
        apart += [{"role": "assistant", "content": text, "tool_calls": [calls[i]]}, results[i]]
    wanted = encode_chat(tokenizer, [*apart, question], tools)
    assert encode_chat(tokenizer, together, tools) == wanted


def test_without_tools_it_is_the_chat_format(tokenizer):
    chat = ChatFormat(tokenizer)
    dialog: list[Any] = [{"role": "user", "content": " Hi <|eot_id|> "}]
    results: list[Any] = [{"role": role, "content": f' "{role}" '} for role in ("ipython", "tool")]
    # Meta's format also allows a result without a call
    for each in (dialog, results, [*results, *dialog]):
        assert encode_chat(tokenizer, each) == chat.encode_dialog_prompt(each)
    open_end: list[Any] = [*dialog, {"role": "assistant", "content": "Well, "}]
    ids = encode_chat(tokenizer, open_end, add_generation_prompt=False, continue_final_message=True)
    assert ids == chat.encode_dialog_prompt(dialog) + tokenizer.encode(
        "Well,", bos=False, eos=False
    )


BAD: list[tuple[Any, Any, str]] = [
    ([], None, "messages must be a list of at least one message"),
    ([7], None, "message 0 must be an object"),
    ([{"role": "user", "content": "x", "audio": 1}], None, "message 0 has unknown keys ['audio']"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], None, "is an image, and the model"),
    ([{"role": "bot", "content": "x"}], None, "role must be one of"),
    ([{"role": "user"}], None, "message 0: content is needed"),
    ([{"role": "assistant", "tool_calls": [CALL, CALL]}], None, "message 0: tool_calls has 2"),
    ([{"role": "assistant", "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "1"},
      {"role": "user", "content": "2"}], None, "message 0: tool_calls has 2"),
    ([{"role": "user", "tool_calls": [CALL]}], None, "tool_calls need the role assistant"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{]"}}]}], None,
     "arguments as a dict or as JSON"),
    (DIALOG[:1], [WEATHER], "tools need a first message of the user"),
    (DIALOG, ["weather"], "tools[0] must be a dict, got str"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "tools", "message"), BAD)
def test_a_bad_dialog_is_an_error_that_names_the_place(tokenizer, messages, tools, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        encode_chat(tokenizer, messages, tools)
    assert message in str(caught.value)


ANSWERS = [
    '{"name": "weather", "parameters": {"city": "Zürich"}}',
    '<|python_tag|>{"type": "function", "name": "songs", "parameters": {"n": "10"}}',
    '<function=songs>{"n": 10}</function>',
    '<|python_tag|>brave_search.call(query="price of gold")',
    "<|python_tag|>def f(n):\n    return n",
]


@pytest.mark.parametrize("text", ANSWERS)
def test_calls_are_read_as_meta_reads_them(text):
    oracle = oracle_chat_format.ChatFormat(oracle_module.Tokenizer.get_instance())
    wanted = oracle.decode_assistant_message_from_content(text, StopReason.end_of_turn)
    (call,) = wanted.tool_calls
    name = getattr(call.tool_name, "value", call.tool_name)
    assert parse_tool_call(text) == ToolCall(name, call.arguments)


@pytest.mark.parametrize("text", ["", "It is sunny.", '{"a": 1}', "[1]", '{"name": "x"', "7"])
def test_an_answer_in_words_is_no_call(text):
    assert parse_tool_call(text) is None
