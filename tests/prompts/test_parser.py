"""Tool calls in an answer's text: the same however it is split, and no character is lost."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama.prompts.call_format import KNOWN_FORMATS
from llama.prompts.call_format_parser import CallFormatParser
from llama.prompts.parser import CallArguments, CallStart, Content, Event, ToolCallParser
from llama.prompts.scanner import Source
from llama.prompts.tools import Tools


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "it works"}}


NAMES = ("f", "get_weather", "a.b-c")
FUNCTIONS = Tools.of([function(name) for name in NAMES])
BUILT_IN = ("brave_search", "wolfram_alpha", "code_interpreter")
ALL = Tools.of([*map(function, NAMES), *({"function": {"name": name}} for name in BUILT_IN)])


def parse(
    text: str, sizes: list[int] | None = None, tools: Tools = ALL, **options: bool
) -> list[Event]:
    """Return the events of a text in pieces of these sizes, with adjacent pieces joined."""
    parser = ToolCallParser(tools, **options)
    events: list[Event] = []
    start = 0
    for size in sizes or [len(text)]:
        events += parser.push(text[start : start + size])
        start += size
    events += [*parser.push(text[start:]), *parser.flush()]
    joined: list[Any] = []
    new: Any
    for new in events:
        last: Any = joined[-1] if joined else None
        same = type(new) is type(last) and not isinstance(new, CallStart)
        if same and getattr(new, "index", 0) == getattr(last, "index", 0):
            joined[-1] = replace(last, text=last.text + new.text)
        else:
            joined.append(new)
    return joined


def calls(*pairs: tuple[str, Any]) -> list[Event]:
    """Return the events of these calls, with their arguments as JSON or as text."""
    events: list[Event] = []
    for index, (name, arguments) in enumerate(pairs):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        events += [CallStart(index, name), CallArguments(index, text)]
    return events


TAG = "<|python_tag|>"
NESTED = {"a": [1, -2.5e3, {"b": [True, None]}], "c": 'x"\\ \n'}
CASES: list[tuple[str, list[Event]]] = [
    (json.dumps({"name": "f", "parameters": NESTED}), calls(("f", NESTED))),
    ('\n {"type": "function", "name": "a.b-c", "parameters": {}}', calls(("a.b-c", {}))),
    ('{"name":"f","arguments":{"x":1.50},"type":"function"} ', calls(("f", '{"x": 1.50}'))),
    (TAG + json.dumps({"name": "f", "parameters": {"n": "10"}}, indent=4),
     calls(("f", {"n": "10"}))),
    ('{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"a": 1}}',
     calls(("f", {}), ("f", {"a": 1}))),
    ('Sure. {"name": "f", "parameters": {}}', [Content("Sure. "), *calls(("f", {}))]),
    ('{"name": "f", "parameters": {}} Done.', [*calls(("f", {})), Content(" Done.")]),
    ('<function=f>{"n": 10}</function>', calls(("f", {"n": 10}))),
    ('<function=f>{"n": 10}</func', calls(("f", {"n": 10}))),
    ('<function=f>{"n": 10}', calls(("f", {"n": 10}))),
    (TAG + 'brave_search.call(query="price of \\"gold\\"")',
     calls(("brave_search", {"query": 'price of "gold"'}))),
    ("wolfram_alpha.call(query='x^2')", calls(("wolfram_alpha", {"query": "x^2"}))),
    (TAG + "def f(n):\n    return [n]",
     calls(("code_interpreter", {"code": "def f(n):\n    return [n]"}))),
    (TAG + '{"a": 1}', calls(("code_interpreter", {"code": '{"a": 1}'}))),
    ("[f(), a.b-c(x=1, y='it''s')]".replace("''", "\\'"),
     calls(("f", {}), ("a.b-c", {"x": 1, "y": "it's"}))),
    ("[get_weather(city='San Francisco', metric='celsius'), get_weather(city='Seattle')]",
     calls(("get_weather", {"city": "San Francisco", "metric": "celsius"}),
           ("get_weather", {"city": "Seattle"}))),
    ('[f(a=True, b=[None, (1, 2,),], c={"k": {"m": False}}, d-e=.5, g=1_000, h=+5, i=5.)]',
     calls(("f", '{"a": true, "b": [null, [1, 2]], "c": {"k": {"m": false}}, "d-e": 0.5, '
                 '"g": 1000, "h": 5, "i": 5.0}'))),
    ('[f(a="""x "q"\n y""", b=\'\')]', calls(("f", '{"a": "x \\"q\\"\\n y", "b": ""}'))),
    ("[f(a='\\x41\\u00e9\\ud83d\\ude00\\U0001F600\\d\\t')]",
     calls(("f", '{"a": "A\\u00e9\\ud83d\\ude00😀\\\\d\\t"}'))),
    ('[f(**{"a b": 1})]', calls(("f", {"a b": 1}))),
    ('[{"name": "f", "parameters": {}}, f(a=1)]', calls(("f", {}), ("f", {"a": 1}))),
    ("[f(a=1), hello]", [*calls(("f", {"a": 1})), Content(", hello]")]),
    ("[f(a=1", calls(("f", '{"a": 1'))),  # truncated by max_tokens
    ("[f(a='x", calls(("f", '{"a": "x'))),
    ("[f(a=1 2)]", [*calls(("f", '{"a": 1')), Content("2)]")]),
    ('{"name": "f", "parameters": {"a": nothing}}',
     [*calls(("f", '{"a": ')), Content("nothing}}")]),
]  # fmt: skip
WORDS = [
    "", " ", "It is sunny.", '{"a": 1}', "[1]", '{"name": "g", "parameters": {}}', '{"name": "f"',
    '{"name": "f", "parameters": "x"}', '{"parameters": {}, "name": "f"}', "[f]", "[f(1)]", "[g()]",
    "f(a=1)", "<function=g>{}</function>", "<function=f>x", "brave_search.call(q=1)", "< {{ <|py",
    "{" * 300, '{"name":' + " " * 300 + '"f"', "[f(" + "a" * 300 + "=1)]", TAG,
]  # fmt: skip


CASES += [(words, [Content(words)] if words else []) for words in WORDS]


@pytest.mark.parametrize(("text", "wanted"), CASES)
def test_calls_are_found_however_the_text_is_cut(text, wanted):
    assert parse(text) == wanted
    assert parse(text, [1] * len(text)) == wanted
    for cut in range(len(text)):
        assert parse(text, [cut]) == wanted, cut


def test_what_can_be_no_call_is_not_held_back():
    """Text that cannot be a call is not held back.

    It has the name of no tool, or the first key of another object: from there on it is content.
    """
    for text in ("Hello", "{x", '{"z', '{"name": "z', "[1", "[z", "<b", "a < c", "<function=z"):
        parser = ToolCallParser(ALL)
        held = [bool(parser.push(char)) for char in text]
        assert held[-1], text
        assert "".join(e.text for e in parse(text) if isinstance(e, Content)) == text
    parser = ToolCallParser(ALL)
    assert parser.push('[f(city="San') == calls(("f", '{"city": "San'))
    assert parser.push(" Fran") == [CallArguments(0, " Fran")]


def test_code_is_a_call_only_where_it_was_asked_for():
    assert parse("import math", is_tagged=True) == calls(
        ("code_interpreter", {"code": "import math"})
    )
    assert parse(" import math", is_tagged=True, tools=FUNCTIONS) == [Content(" import math")]
    assert parse('{"name": "f", "parameters": {}}', is_tagged=True, tools=FUNCTIONS) == calls(
        ("f", {})
    )
    assert parse('brave_search.call(query="x")', tools=FUNCTIONS) == [
        Content('brave_search.call(query="x")')
    ]  # fmt: skip


def test_one_call_and_calls_at_the_start_alone():
    two = "[f(a=1), f(b=2)] Done."
    assert parse(two, tools=replace(ALL, parallel=False)) == [
        *calls(("f", {"a": 1})),
        Content(" Done."),
    ]
    held = replace(ALL, must_call=True)
    assert parse(" " + two, tools=held)[:4] == calls(("f", {"a": 1}), ("f", {"b": 2}))
    assert parse("x " + two, tools=held) == [Content("x " + two)]


def test_nothing_is_too_deep_or_too_long():
    """No text is too deep or too long: there are bounds, and the work is linear in the text."""
    deep = "[f(a=" + "[" * 10_000
    (start, *_, rest) = parse(deep)
    assert start == CallStart(0, "f") and isinstance(rest, Content)
    assert parse("[f(a=" + "1" * 1000 + ")]")[-1] == Content("1" * 1000 + ")]")
    for text in ("[" * 20_000, "{ " * 10_000, '{"name": ' * 2_000, "[f(" * 5_000):
        assert parse(text) == [Content(text)]
    long = "x" * 500_000
    assert parse(f"[f(a='{long}')]", [1000] * 500) == calls(("f", {"a": long}))


HOSTILE = [
    "[", "{", '{"a":', "[ ", "\\", "[f(", "[f()]", '{"name": "f", ', '{"type": "function", ',
    "<function=", TAG, "brave_search.call(", "''x", "\\u12", "1,", '"type": "function", ',
    '{"name": "f", "parameters": {',
]  # fmt: skip


@pytest.mark.parametrize(
    "start", ["", "{", "[f(a=", "[f(a='", '{"name": "f", "parameters": {"a": "', TAG]
)
@pytest.mark.parametrize("piece", HOSTILE)
def test_the_work_grows_with_the_text_alone(monkeypatch, start, piece):
    """The work is linear in the text.

    The text begins calls without end, in one piece and by characters. Counted are the characters of
    each search in the text, and the characters that are copied when more arrive: each at most twice
    the text.
    """
    work = 0
    look, search, add = Source.look, Source.search, Source.add

    def counted_look(self, pattern):
        nonlocal work
        found = look(self, pattern)
        work += 1 + (0 if found is None else found.end() - self.pos)
        return found

    def counted_search(self, pattern):
        nonlocal work
        found = search(self, pattern)
        work += (self.end if found is None else found.end()) - self.pos
        return found

    def counted_add(self, text):
        nonlocal work
        add(self, text)
        work += len(self.text)

    monkeypatch.setattr(Source, "look", counted_look)
    monkeypatch.setattr(Source, "search", counted_search)
    monkeypatch.setattr(Source, "add", counted_add)
    for size in (1, 10**6):
        counts = []
        for length in (1000, 2000):
            work, text = 0, start + piece * (length // len(piece))
            parser = ToolCallParser(ALL)
            for at in range(0, len(text), size):
                parser.push(text[at : at + size])
            parser.flush()
            counts.append(work)
        assert counts[1] < 2.5 * counts[0] + 500, (size, counts)


PIECES = st.sampled_from(
    [*"{}[]()<>\"'\\,:;=*. \n-_|1eaf", '{"name": "f"', '"parameters": {', "[f(", "f(a=",
     "<function=", "a.b-c(",
     "f>{", TAG, '"""', "</function>", "brave_search.call(query=", "True", "null", "\\u12",
     '{"name": "f", "parameters": {"a": 1}}', "[f(a=1)]", "😀"]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.characters(), max_size=40).map("".join)


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.lists(st.integers(1, 9), max_size=40), st.booleans(), st.booleans(), st.booleans())
def test_any_text_is_content_and_calls(text, sizes, tagged, parallel, at_start):
    """Any text is content and calls.

    The parser never raises, a stream equals the whole, and what is not in a call is content in
    order.
    """
    tools = replace(ALL, parallel=parallel, must_call=at_start)
    events = parse(text, tools=tools, is_tagged=tagged)
    assert parse(text, [1] * len(text), tools, is_tagged=tagged) == events
    assert parse(text, sizes, tools, is_tagged=tagged) == events
    content = "".join(e.text for e in events if isinstance(e, Content))
    starts = [e.index for e in events if isinstance(e, CallStart)]
    assert starts == list(range(len(starts))) and (parallel or len(starts) <= 1)
    if not starts:
        assert content == text
    rest = iter(text)
    assert all(char in rest for char in content), "content is not in the order of the text"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
ARGUMENTS = st.dictionaries(KEYS, JSON, max_size=3)
PLAIN = st.text(st.sampled_from("abc .,!?é😀\n"), max_size=12).map(lambda s: f"({s})")


@settings(max_examples=200, deadline=None)
@given(PLAIN, PLAIN, st.lists(ARGUMENTS, min_size=1, max_size=3), st.integers(0, 3))
def test_every_value_comes_back(before, after, arguments, form):
    """Every value survives, as Python and JSON write it, in each format, between content."""
    written = {
        0: lambda given: json.dumps({"name": "f", "parameters": given}),
        1: lambda given: f"<function=f>{json.dumps(given, indent=1)}</function>",
        2: lambda given: f"[f({', '.join(f'{k}={v!r}' for k, v in given.items())})]",
        3: lambda given: f"[f(**{given!r})]",
    }[form]
    text = before + " ".join(map(written, arguments)) + after
    events = parse(text)
    found = [json.loads(e.text) for e in events if isinstance(e, CallArguments)]
    assert found == arguments
    assert [e.text for e in events if isinstance(e, Content)] == [before, after]


WRAPPED = [
    '{"type": "function", "function": {"name": "weather", "parameters": {"city": "Bern"}}}',
    '{"function": {"name": "weather", "arguments": {"city": "Bern"}}, "type": "function"}',
    '{"id": "call_1", "type": "function", "function": '
    '{"name": "weather", "arguments": "{\\"city\\": \\"Bern\\"}"}}',
    '{"name": "weather", "parameters": "{\\"city\\": \\"Bern\\"}"}',
]
EMPTY = ['{"name": "weather", "parameters": null}', '{"name": "weather", "arguments": ""}']
NO_CALLS = [
    '{"name": "weather", "parameters": "none"}',
    '{"function": {"name": "other", "arguments": {}}}',
    '{"name": "weather", "parameters": nul',
]


@pytest.mark.parametrize(("before", "after"), [("", ""), ("<tool_call>\n", "\n</tool_call>")])
def test_calls_in_openai_s_object_and_arguments_as_text_or_null(before, after):
    """Nothing of such a call is left in the content; what is no call is content."""
    tools = Tools.of([{"function": {"name": "weather"}}])

    def read(text: str, size: int) -> tuple[str, list[str], str]:
        is_hermes = bool(before)
        hermes = KNOWN_FORMATS["hermes"]
        parser = CallFormatParser(tools, hermes) if is_hermes else ToolCallParser(tools)
        whole = before + text + after
        events = [x for i in range(0, len(whole), size) for x in parser.push(whole[i : i + size])]
        events += parser.flush()
        content = "".join(x.text for x in events if isinstance(x, Content))
        arguments = "".join(x.text for x in events if isinstance(x, CallArguments))
        return content, [x.name for x in events if isinstance(x, CallStart)], arguments

    for size in (1, 7, 1000):
        for text in WRAPPED:
            assert read(text, size) == ("", ["weather"], '{"city": "Bern"}')
        for text in EMPTY:
            assert read(text, size) == ("", ["weather"], "{}")
        for text in NO_CALLS:
            assert read(text, size) == (before + text + after, [], "")
