"""Prompts with tools against Meta's own: the pages on prompt formats, and the code next to them."""

import re
from pathlib import Path
from typing import Any

import llama_models
import pytest
from llama_models.datatypes import RawMessage, StopReason, ToolPromptFormat
from llama_models.datatypes import ToolCall as OracleCall
from llama_models.llama3 import chat_format as oracle_chat_format
from llama_models.llama3 import tokenizer as oracle_module

from llama.model.args import ModelArgs
from llama.prompts import ToolFormat, encode_chat, parse_tool_call
from llama.prompts.tools import tool_format_of
from llama.tokenizer import Tokenizer

PYTHON = ToolFormat.LLAMA_3_2
SEARCHES: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name}} for name in ("brave_search", "wolfram_alpha")
]
CODE: list[dict[str, Any]] = [{"type": "function", "function": {"name": "code_interpreter"}}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get weather info for places",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {
                    "type": "string",
                    "description": "The name of the city to get the weather for",
                },
                "metric": {
                    "type": "string",
                    "description": "The metric for weather. Options are: celsius, fahrenheit",
                    "default": "celsius",
                },
            },
            "required": ["city"],
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(oracle_module.__file__).with_name("tokenizer.model"))


def page(name: str, heading: str) -> str:
    """Return the prompt below a heading of one of Meta's pages."""
    text = (Path(llama_models.__file__).parent / name / PAGES[name]).read_text()
    text = text[text.index(heading) :]
    found = re.search(r"Input Prompt Format\n```\n(.*?)\n```", text, re.DOTALL)
    assert found is not None
    return found[1]


PAGES = {"llama3_1": "prompt_format.md", "llama3_2": "text_prompt_format.md"}


def ids_of(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encode a page's prompt as Meta's ChatFormat does: a header is encoded on its own."""
    parts = re.split(r"(?<=<\|end_header_id\|>\n\n)", prompt)
    encode = tokenizer.encode
    return [i for p in parts for i in encode(p, bos=False, eos=False, allowed_special="all")]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(name: str, arguments: dict[str, Any], number: str = "1") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": number, "type": "function", "function": function}


def test_built_in_tools_are_as_on_metas_pages(tokenizer):
    wanted = page("llama3_1", "## Builtin Tool Calling")
    dialog = [
        {"role": "system", "content": "You are a helpful assistant."},
        user("Search the web for the latest price of 1oz gold?"),
    ]
    for tool_format in (ToolFormat.LLAMA_3_1, PYTHON):
        ids = encode_chat(
            tokenizer, dialog, SEARCHES, date="21 September 2024", tool_format=tool_format
        )
        assert ids == ids_of(tokenizer, wanted)
    wanted = page("llama3_2", "## Code Interpreter")
    question = user("Write code to check if number is prime. Use it to verify if number 7 is prime")
    ids = encode_chat(tokenizer, [question], CODE, date="24 September 2024", tool_format=PYTHON)
    assert ids == ids_of(tokenizer, wanted)


def test_a_built_in_call_and_its_result_are_as_on_metas_page(tokenizer):
    """A built-in call and its result are as on Meta's page.

    That page's system message has no dates, so what follows it is compared.
    """
    wanted = page("llama3_1", "## Built-in tools full interaction")
    result = wanted.split("ipython<|end_header_id|>\n\n")[1].split("<|eot_id|>")[0]
    dialog = [
        user("What is the 100th decimal of pi?"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("wolfram_alpha", {"query": "100th decimal of pi"})],
        },
        {"role": "tool", "tool_call_id": "1", "content": result},
    ]
    ids = encode_chat(tokenizer, dialog, SEARCHES)
    after_system = wanted.split("<|eot_id|>", 1)[1]
    assert ids[ids.index(tokenizer.eot_id) + 1 :] == ids_of(tokenizer, after_system)
    assert tokenizer.eom_id in ids
    code = {"role": "assistant", "tool_calls": [call("code_interpreter", {"code": "print(1)"})]}
    ids = encode_chat(tokenizer, [user("x"), code], CODE, add_generation_prompt=False)
    assert tokenizer.decode(ids).endswith("<|python_tag|>print(1)<|eom_id|>")


@pytest.mark.parametrize(
    ("arguments", "text"), [('{"code": "a\\nprint(\\"b', 'a\nprint("b'), ('{"code": "a\\', "a")]
)
def test_code_of_a_stream_that_broke_off_goes_back_in_as_its_text(tokenizer, arguments, text):
    function = {"name": "code_interpreter", "arguments": arguments}
    code = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
    ids = encode_chat(tokenizer, [user("x"), code], CODE, add_generation_prompt=False)
    assert tokenizer.decode(ids).endswith(f"<|python_tag|>{text}<|eot_id|>")


def test_python_calls_are_as_on_metas_pages(tokenizer):
    wanted = page("llama3_2", "## Zero shot function calling\n")
    question = user("What is the weather in SF and Seattle?")
    assert encode_chat(tokenizer, [question], [WEATHER], tool_format=PYTHON) == ids_of(
        tokenizer, wanted
    )
    system = {"role": "system", "content": "You are terse."}
    ids = encode_chat(tokenizer, [system, question], [WEATHER], tool_format=PYTHON)
    with_system = wanted.replace("]<|eot_id|>", "]\nYou are terse.<|eot_id|>")
    assert ids == ids_of(tokenizer, with_system)


def test_a_python_call_goes_back_in_as_the_model_wrote_it(tokenizer):
    """A Python call is sent back as the model wrote it.

    The page writes <|python_tag|> before it, which neither the answers on that page nor Meta's
    ChatFormat contain.
    """
    wanted = page("llama3_2", "## Zero shot function calling E2E format").replace(
        "<|python_tag|>[", "["
    )
    arguments = {"city": "San Francisco", "metric": "celsius"}
    dialog: list[Any] = [
        user("What is the weather in SF?"),
        {"role": "assistant", "content": None, "tool_calls": [call("get_weather", arguments)]},
        {"role": "tool", "tool_call_id": "1", "content": "25 C"},
    ]
    ids = encode_chat(tokenizer, dialog, [WEATHER], tool_format=PYTHON)
    assert ids == ids_of(tokenizer, wanted)
    chat = oracle_chat_format.ChatFormat(oracle_module.Tokenizer.get_instance())
    oracle = OracleCall(call_id="1", tool_name="get_weather", arguments=arguments)
    message = RawMessage(role="assistant", content="", stop_reason=StopReason.end_of_turn,
                         tool_calls=[oracle])  # fmt: skip
    turn = encode_chat(tokenizer, dialog[1:2], tool_format=PYTHON, add_generation_prompt=False)
    assert turn[1:] == chat.encode_message(message, ToolPromptFormat.python_list)[0]


def test_several_calls_are_one_list_and_results_follow_in_their_order(tokenizer):
    calls = [
        call("f", {"a": True, "b": None, "c": {"k": [1.5, 'x"y']}}, "one"),
        call("g", {"a b": False}, "two"),
    ]
    results = [{"role": "tool", "tool_call_id": n, "content": n} for n in ("two", "one")]
    dialog: list[Any] = [
        user("?"),
        {"role": "assistant", "content": "Well.\n", "tool_calls": calls},
    ]
    text = tokenizer.decode(
        encode_chat(tokenizer, [*dialog, *results], [WEATHER], tool_format=PYTHON)
    )
    assert (
        'Well.\n[f(a=True, b=None, c={"k": [1.5, "x\\"y"]}), g(**{"a b": False})]<|eot_id|>' in text
    )
    assert text.index('\n"one"<') < text.index('\n"two"<')
    found = parse_tool_call(text[text.index("Well") :])
    assert found is not None and found.arguments == calls[0]["function"]["arguments"]


def test_the_template_with_built_in_tools(tokenizer):
    """Built-in tools give the prompt of the chat template of Llama-3.1-8B-Instruct."""
    dialog = [user("?"), {"role": "assistant", "tool_calls": [call("f", {"a": 1})]}]
    tools = [*SEARCHES, {"type": "function", "function": {"name": "f", "parameters": {}}}]
    text = tokenizer.decode(encode_chat(tokenizer, dialog, tools, add_generation_prompt=False))
    head = "Environment: ipython\nTools: brave_search, wolfram_alpha\n\nCutting Knowledge Date: "
    assert head in text and "brave_search" not in text.replace(head, "")
    assert text.endswith('{"name": "f", "parameters": {"a": 1}}<|eom_id|>')


@pytest.mark.parametrize("tool_format", [ToolFormat.LLAMA_3_1, PYTHON])
def test_no_text_becomes_a_special_token(tokenizer, tool_format):
    """No text becomes a special token: the special ids and their order do not depend on strings."""
    evil = "".join(tokenizer.special_tokens)[:600]

    def special(text: str) -> list[int]:
        function = {
            "name": text,
            "description": text,
            "parameters": {"properties": {text: {"t": text}}},
        }
        tools: list[Any] = [{"type": "function", "function": function}, *SEARCHES]
        dialog: list[Any] = [
            {"role": "system", "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {
                "role": "assistant",
                "content": text,
                "tool_calls": [call(text, {text: [text]}, text)],
            },
            {"role": "tool", "tool_call_id": text, "content": text},
            {"role": "assistant", "tool_calls": [call("brave_search", {"query": text})]},
            {"role": "tool", "content": text},
        ]
        ids = encode_chat(tokenizer, dialog, tools, tool_format=tool_format)
        return [i for i in ids if i in tokenizer.special_tokens.values()]

    assert special(evil) == special("x")
    assert special("x").count(tokenizer.python_tag_id) == 1


def test_the_generation_is_told_by_the_files(tokenizer):
    def format_of(is_guard: bool = False, **params: Any) -> ToolFormat:
        return tool_format_of(ModelArgs(**params).rope_factor, is_guard=is_guard)

    assert format_of(dim=4096) is ToolFormat.NONE
    assert format_of(dim=4096, use_scaled_rope=True) is ToolFormat.LLAMA_3_1
    assert format_of(dim=8192, use_scaled_rope=True) is ToolFormat.LLAMA_3_1
    assert format_of(dim=2048, use_scaled_rope=True) is PYTHON
    assert format_of(dim=4096, use_scaled_rope=True, rope_scale_factor=32.0) is PYTHON
    assert format_of(is_guard=True, dim=4096, use_scaled_rope=True) is ToolFormat.NONE
    none = ToolFormat.NONE
    with pytest.raises(ValueError, match="tools cannot be used with this model"):
        encode_chat(tokenizer, [user("?")], [WEATHER], tool_format=none)
    with pytest.raises(ValueError, match="message 0: tool_calls cannot be used"):
        dialog = [{"role": "assistant", "tool_calls": [call("f", {})]}]
        encode_chat(tokenizer, dialog, tool_format=none)
    first = Tokenizer(Path(oracle_module.__file__).with_name("tokenizer.model"), llama_3_0=True)
    with pytest.raises(ValueError, match="brave_search needs the token"):
        encode_chat(first, [user("?")], SEARCHES)
