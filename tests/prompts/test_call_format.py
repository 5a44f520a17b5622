"""The forms of tool calls that chat templates have: found, forced and read.

Templates are rendered by jinja2 itself, and grammars are read by llguidance.
"""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jinja2
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from llguidance.tiktoken import lltokenizer_from_encoding

from helpers.fine_tunes import make_tokenizer
from llama.prompts.call_format import KNOWN_FORMATS, CallFormat, find_call_format
from llama.prompts.call_format_parser import CallFormatParser
from llama.prompts.parser import CallArguments, CallStart, Content
from llama.prompts.tools import Tools
from llama.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "parameters": SCHEMA}
NOW = {"name": "now"}
TOOLS = Tools((WEATHER, NOW))
CALLS = [("weather", '{"city": "Zürich", "days": 3}'), ("now", "{}")]

# Templates as published fine-tunes have them, each with the form that it shows.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "CALLS<|im_end|>\n{% endfor %}"
)
OBJECT = '{"name": "{{ c.function.name }}", "KEY": {{ c.function.arguments | tojson }}}'
HERMES = (
    "{% for c in m.tool_calls or [] %}{{ '\\n' if not loop.first }}<tool_call>\n"
    + OBJECT.replace("KEY", "arguments")
    + "\n</tool_call>{% endfor %}"
)
LISTED = (
    "{% if m.tool_calls %}OPEN{% for c in m.tool_calls %}"
    + OBJECT.replace("KEY", "arguments")
    + "{{ ', ' if not loop.last }}{% endfor %}CLOSE{% endif %}"
)
SINGLE = (
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ fail() }}{% endif %}"
    "{% set c = m.tool_calls[0] %}" + OBJECT.replace("KEY", "parameters") + "{% endif %}"
)
TAGGED = (
    "{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
    "{{ c.function.arguments | tojson }}</function>{% endfor %}"
)
WITH_ID = (
    '{% if m.tool_calls %}[{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}"
)
TEMPLATES = {
    "hermes": CHATML.replace("CALLS", HERMES),
    "xlam": CHATML.replace("CALLS", LISTED.replace("OPEN", "[").replace("CLOSE", "]")),
    "nemotron": CHATML.replace(
        "CALLS", LISTED.replace("OPEN", "<TOOLCALL>[").replace("CLOSE", "]</TOOLCALL>")
    ),
    "llama3_json": CHATML.replace("CALLS", SINGLE),
    "functionary": CHATML.replace("CALLS", TAGGED),
}


def renderer(template: str) -> Callable[[list[dict[str, Any]]], str]:
    environment = jinja2.Environment(trim_blocks=False)
    environment.filters["tojson"] = json.dumps

    def fail() -> None:
        raise ValueError("one call only")

    compiled = environment.from_string(template)
    return lambda messages: compiled.render(messages=messages, fail=fail)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_form_is_read_off_the_template(name):
    assert find_call_format(renderer(TEMPLATES[name]), ["<|im_end|>"]) == KNOWN_FORMATS[name]


def test_ids_are_no_part_of_a_form():
    template = CHATML.replace("CALLS", WITH_ID)
    assert find_call_format(renderer(template), ["<|im_end|>"]) == KNOWN_FORMATS["xlam"]


def test_a_turn_may_end_in_text_or_by_another_token():
    text_end = TEMPLATES["hermes"].replace("<|im_end|>", "</s>")
    assert find_call_format(renderer(text_end), []) == KNOWN_FORMATS["hermes"]
    eom = TEMPLATES["functionary"].replace(
        "<|im_end|>", "{{ '<|eom_id|>' if m.tool_calls else '<|im_end|>' }}"
    )
    stops = ["<|im_end|>", "<|eom_id|>"]
    assert find_call_format(renderer(eom), stops) == KNOWN_FORMATS["functionary"]


def test_templates_that_show_no_calls_have_no_form():
    assert find_call_format(renderer(CHATML.replace("CALLS", "")), ["<|im_end|>"]) is None
    python = "{% for c in m.tool_calls or [] %}{{ c.function.name }}(){% endfor %}"
    assert find_call_format(renderer(CHATML.replace("CALLS", python)), ["<|im_end|>"]) is None
    refusing = CHATML.replace("CALLS", "{% if m.tool_calls %}{{ fail() }}{% endif %}")
    assert find_call_format(renderer(refusing), ["<|im_end|>"]) is None


def written(form: CallFormat, calls: list[tuple[str, str]]) -> str:
    """Return an answer with calls in a form, by its definition."""
    texts = [form.before + name + form.between + value + form.after for name, value in calls]
    return form.open + (form.separator or "").join(texts) + form.close


def read(form: CallFormat, tools: Tools, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content and the calls that the parser finds in the pieces of an answer."""
    parser = CallFormatParser(tools, form)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    calls: list[list[str]] = []
    content = ""
    for event in events:
        if isinstance(event, CallStart):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[event.index][1] += event.text
        else:
            assert isinstance(event, Content)
            content += event.text
    return content, [(name, arguments) for name, arguments in calls]


def cuts(text: str) -> list[list[str]]:
    """Return the text whole, cut at each position, and in single characters."""
    return [[text], *([text[:i], text[i:]] for i in range(1, len(text))), list(text)]


@pytest.mark.parametrize("name", sorted(KNOWN_FORMATS))
def test_calls_are_read_at_every_cut(name):
    form = KNOWN_FORMATS[name]
    num_calls = 1 if form.separator is None else 2
    text = written(form, CALLS[:num_calls])
    for before in ("", "Let me look.\n"):
        for pieces in cuts(before + text):
            assert read(form, TOOLS, pieces) == (before, CALLS[:num_calls]), pieces


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "nemotron"])
def test_the_keys_of_an_object_come_in_any_order(name):
    form = KNOWN_FORMATS[name]
    value = json.loads(CALLS[0][1])
    fields = {"name": "weather", "arguments": value, "id": "x1", "type": "function"}
    before = form.open + form.before.partition("{")[0]
    after = form.after.partition("}")[2] + form.close
    for order in itertools.permutations(fields):
        text = before + json.dumps({key: fields[key] for key in order}, ensure_ascii=False) + after
        for pieces in ([text], list(text)):
            assert read(form, TOOLS, pieces) == ("", CALLS[:1]), pieces
    text = before + '{"name": "now"}' + after
    assert read(form, TOOLS, [text]) == ("", [("now", "{}")])


@pytest.mark.parametrize("name", sorted(KNOWN_FORMATS))
def test_what_is_no_call_is_content(name):
    form = KNOWN_FORMATS[name]
    call = written(form, CALLS[:1])
    texts = [
        "plain text", "a { b [ c < d", call.replace("weather", "other"),
        call[: call.index("weather") + 3], '{"name": 3, "arguments": {}}',
        call.replace(CALLS[0][1], "3"),
    ]  # fmt: skip
    for text in texts:
        for pieces in ([text], list(text)):
            assert read(form, TOOLS, pieces) == (text, []), pieces


def test_further_calls_are_dropped_where_one_is_allowed():
    form = KNOWN_FORMATS["hermes"]
    text = written(form, CALLS)
    assert read(form, replace(TOOLS, parallel=False), [text]) == ("", CALLS[:1])


@pytest.mark.parametrize("name", sorted(KNOWN_FORMATS))
def test_a_forced_call_has_the_form_and_is_read(takes, name):
    form = KNOWN_FORMATS[name]
    forced = replace(TOOLS, must_call=True)
    grammar = form.grammar(forced, {})
    one = written(form, CALLS[:1])
    assert takes(grammar, one)
    assert takes(grammar, written(form, CALLS)) is (form.separator is not None)
    for bad in (
        "", "text", one + " x", one.replace("weather", "other"), one.replace("3", '"3"'),
        one.replace('"days": 3', '"days": 3, "x": 1'), "x" + one,
    ):  # fmt: skip
        assert not takes(grammar, bad), bad
    assert not takes(form.grammar(replace(forced, parallel=False), {}), written(form, CALLS))
    only = form.grammar(replace(forced, only="now"), {})
    assert not takes(only, one) and takes(only, written(form, CALLS[1:]))
    free = form.grammar(TOOLS, {})
    assert takes(free, one) and takes(free, "It is sunny.") and takes(free, "")
    assert not takes(free, one[:-1])
    with pytest.raises(ValueError, match="there are none"):
        form.grammar(Tools(must_call=True), {})


@pytest.fixture(scope="module")
def hermes(tmp_path_factory) -> tuple[Tokenizer, LLTokenizer]:
    """A tokenizer with Hermes' marks as added tokens, and llguidance's index of it."""
    folder = tmp_path_factory.mktemp("hermes")
    make_tokenizer(folder, "hermes")
    tokenizer = Tokenizer(folder / "tokenizer.json")
    index = lltokenizer_from_encoding(
        tokenizer.model, n_vocab=tokenizer.n_words, eos_token=sorted(tokenizer.stop_tokens)
    )
    return tokenizer, index


def test_marks_that_are_added_tokens_are_tokens_of_the_grammar(hermes):
    """The mark's id is accepted, and its name as text is not; without the name it is reversed."""
    tokenizer, index = hermes
    form = KNOWN_FORMATS["hermes"]
    mark = tokenizer.special_tokens["<tool_call>"]
    end = tokenizer.special_tokens["</tool_call>"]
    text = written(form, CALLS[:1]).removeprefix("<tool_call>").removesuffix("</tool_call>")
    as_tokens = [mark, *tokenizer.encode(text, bos=False, eos=False), end]
    as_text = tokenizer.encode(written(form, CALLS[:1]), bos=False, eos=False)
    forced = replace(TOOLS, must_call=True)
    for names, good, bad in (
        (tokenizer.special_tokens, as_tokens, as_text),
        ({}, as_text, as_tokens),
    ):
        source = grammar_from("lark", form.grammar(forced, names))
        matcher = LLMatcher(index, source)
        assert matcher.try_consume_tokens(good) == len(good) and matcher.is_accepting()
        matcher = LLMatcher(index, source)
        assert matcher.try_consume_tokens(bad) == 0


def test_random_answers_are_read_alike_however_they_are_cut():
    choose = random.Random(5)
    for name, form in sorted(KNOWN_FORMATS.items()):
        call = written(form, CALLS[: 1 if form.separator is None else 2])
        for _ in range(60):
            start = choose.randrange(len(call))
            text = choose.choice(["", "a <", "{"]) + call[:start] + choose.choice(["", "}", "x"])
            text += call[choose.randrange(start, len(call)) :]
            whole = read(form, TOOLS, [text])
            assert whole == read(form, TOOLS, list(text)), (name, text)
