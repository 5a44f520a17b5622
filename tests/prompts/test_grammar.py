"""The grammars of forced calls: llguidance compiles them, and accepts and refuses correctly."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import llguidance.tiktoken
import pytest
from llama_models.llama3 import tokenizer as oracle_module
from llguidance import LLMatcher, grammar_from

from llama.prompts.grammar import call_grammar
from llama.prompts.parser import CallArguments, CallStart, ToolCallParser
from llama.prompts.tools import ToolFormat, Tools
from llama.tokenizer import Tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Zürich", "Bern"]},
        "days": {"$ref": "#/$defs/days"},
        "fast": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
ODD = {"type": "object", "properties": {"a b": {"type": "integer"}}, "required": ["a b"]}
TOOLS = Tools.of(
    [
        {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "odd.one-s", "parameters": ODD}},
        {"type": "function", "function": {"name": "now"}},
    ]
)
FORCED = replace(TOOLS, must_call=True)
JSON, PYTHON = ToolFormat.LLAMA_3_1, ToolFormat.LLAMA_3_2


GOOD = {
    JSON: [
        '{"name": "weather", "parameters": {"days": 3}}',
        '{"name": "weather", "parameters": {"city": "Bern", "days": 3, "fast": true, "tags": []}}',
        '{"name": "odd.one-s", "parameters": {"a b": -1}}',
        '{"name": "now", "parameters": {}}',
    ],
    PYTHON: [
        "[weather(days=3)]",
        '[weather(city="Zürich", days=14, fast=True, tags=["a", "\\"b\\""])]',
        "[weather(days=1, fast=False), now(), odd.one-s(**{\"a b\": -1})]",
        "[now()]",
    ],
}  # fmt: skip
BAD = {
    JSON: [
        "", "It is sunny.", '{"name": "weather", "parameters": {}}',
        '{"name": "weather", "parameters": {"days": 15}}',
        '{"name": "weather", "parameters": {"days": 3, "x": 1}}',
        '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}',
        '{"name": "other", "parameters": {}}', '{"name": "now", "parameters": {}} x',
        '{"name": "now", "parameters": {}',
    ],
    PYTHON: [
        "", "It is sunny.", "[]", "[weather()]", "[weather(days=15)]", "[weather(days=3, x=1)]",
        '[weather(city="Paris", days=3)]', "[weather(, days=3)]", "[weather(days=3,)]",
        "[weather(fast=True, days=3)]", "[other()]", "[now()", "[now()] x",
    ],
}  # fmt: skip


@pytest.mark.parametrize("tool_format", [JSON, PYTHON])
def test_a_forced_call_fits_its_schema(takes, tool_format):
    grammar = call_grammar(FORCED, tool_format)
    schemas = {"weather": SCHEMA, "odd.one-s": ODD, "now": {}}
    for text in GOOD[tool_format]:
        assert takes(grammar, text), text
        parser = ToolCallParser(FORCED)
        events = [*parser.push(text), *parser.flush()]
        names = [e.name for e in events if isinstance(e, CallStart)]
        arguments = [e.text for e in events if isinstance(e, CallArguments)]
        assert (
            len(names)
            == len(arguments)
            == text.count("odd.one-s") + text.count("weather") + text.count("now")
        )
        for name, each in zip(names, arguments, strict=True):
            jsonschema.validate(json.loads(each), schemas[name])
    for text in BAD[tool_format]:
        assert not takes(grammar, text), text


@pytest.mark.parametrize("tool_format", [JSON, PYTHON])
def test_one_function_or_one_call_may_be_wanted(takes, tool_format):
    named = call_grammar(replace(FORCED, only="now"), tool_format)
    one = call_grammar(replace(FORCED, parallel=False), tool_format)
    single, several = GOOD[tool_format][3], GOOD[tool_format][2]
    assert takes(named, single) and not takes(named, GOOD[tool_format][0])
    assert takes(one, single) and takes(one, several) == (tool_format is JSON)


@pytest.mark.parametrize("tool_format", [JSON, PYTHON])
def test_without_force_words_may_come(takes, tool_format):
    grammar = call_grammar(TOOLS, tool_format)
    for text in [*GOOD[tool_format], "", "It is sunny.\n[now()]", " 1 < 2 {}"]:
        assert takes(grammar, text), text
    for text in [*BAD[tool_format][2:], "  [x"]:
        assert takes(grammar, text) == (text[:1] not in ("", "{", "[", " ")), text


@pytest.fixture(scope="module")
def tiktoken_guide():
    """llguidance's view of Llama 3's own tokenizer, and a function that encodes text with it."""
    tokenizer = Tokenizer(Path(oracle_module.__file__).with_name("tokenizer.model"))
    guide = llguidance.tiktoken.lltokenizer_from_encoding(
        tokenizer.model, n_vocab=tokenizer.n_words, eos_token=tokenizer.eot_id
    )
    return guide, lambda s: tokenizer.encode(s, bos=False, eos=False, allowed_special="all")


def test_built_in_tools_are_called_after_their_token(tiktoken_guide):
    tools = Tools.of(
        [{"function": {"name": "brave_search"}}, {"function": {"name": "code_interpreter"}}]
    )
    tokenizer, encode = tiktoken_guide
    grammar = grammar_from("lark", call_grammar(replace(tools, must_call=True), JSON))
    assert LLMatcher.validate_grammar_with_warnings(grammar, tokenizer) == (False, [])
    for text, wanted in [
        ('<|python_tag|>brave_search.call(query="gold")', True),
        ("<|python_tag|>import math\nprint(1)", True),
        ('brave_search.call(query="gold")', False),
        ("import math", False),
    ]:
        matcher = LLMatcher(tokenizer, grammar)
        ids = encode(text)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == wanted


def test_a_model_without_tools_has_no_grammar():
    for tools, tool_format in [(TOOLS, ToolFormat.NONE), (Tools(), JSON)]:
        with pytest.raises(ValueError, match="tools"):
            call_grammar(replace(tools, must_call=True), tool_format)
