"""The tool calls in an answer's text, as the text comes: pieces in, content and calls out.

Each of Llama's forms is understood, whatever the prompt asked for, as in Meta's own parser:
{"name": ..., "parameters": {...}}, [name(key=value), ...], <function=name>{...}</function>,
name.call(query="...") of the built-in tools, and code after <|python_tag|>. A call names one of the
request's tools; any other text is content. It runs nothing.
"""

import contextlib
import itertools
import json
from dataclasses import dataclass, replace
from typing import Any

import regex

from llama.prompts.scanner import (
    NEXT,
    ParseError,
    S,
    Scan,
    Sink,
    Source,
    quoted,
    scan_string,
    scan_value,
)
from llama.prompts.tools import CODE, SEARCHES, Tools

_FUNCTION_TAG = "<function="
_END_FUNCTION = "</function>"
_PYTHON_TAG = r"<\|python_tag\|>"
_KEYWORD = r"[\p{L}\p{N}_.$-]{1,128}+"  # the name of an argument
_NAME = rf"(?P<at>)(?P<name>(?![-.0-9]){_KEYWORD})"  # at: where it begins, also of half a name
_TYPE = rf'"type"{S}:{S}"function"{S}'
_ARGUMENT = rf"(?:(?P<close>\))|(?P<key>{_KEYWORD}){S}=)"
# The forms, each up to its first argument.
_JSON = (
    rf'(?P<json>\{{){S}(?:{_TYPE},{S})?"name"{S}:{S}"{_NAME}"{S},{S}(?:{_TYPE},{S})?'
    rf'"(?:parameters|arguments)"{S}:{S}(?=\{{)'
)
_PYTHON = rf"{_NAME}{S}\({S}(?:(?P<stars>\*\*){S}(?=\{{)|{_ARGUMENT})"
_ITEM = f"(?:{_JSON}|{_PYTHON})"
_FORMS = (
    rf"(?:{_PYTHON_TAG}{S})?(?:{_JSON}|(?P<list>\[){S}{_ITEM}"
    rf"|(?P<tag>{_FUNCTION_TAG}){_NAME}>{S}(?=\{{)"
    rf"|(?P<at>)(?P<name>{'|'.join(SEARCHES)})(?P<search>\.call\(query=)(?=[\"']))"
)
_FIRST = regex.compile(S + _FORMS)
_FOLLOWING = regex.compile(rf"{S}(?:[;,]{S})?{_FORMS}")  # of the call before it
_NEXT_ITEM = regex.compile(rf"{S}(?:(?:,{S})?(?P<end>\])|,{S}{_ITEM})")
_NEXT_ARGUMENT = regex.compile(_ARGUMENT)
_CLOSE = regex.compile(r"\)")
_AFTER_JSON = regex.compile(rf"{S}(?:,{S}{_TYPE})?\}}")
_ENDS = "|".join(regex.escape(_END_FUNCTION[:n]) for n in range(1, len(_END_FUNCTION)))
_AFTER_FUNCTION = regex.compile(rf"{S}(?:{_END_FUNCTION}|(?:{_ENDS})\Z)")  # or the answer's end
_CODE = regex.compile(rf"{S}{_PYTHON_TAG}{S}(?=[^ \t\r\n])")
_NEXT_CODE = regex.compile(rf"{S}(?:[;,]{S})?{_PYTHON_TAG}{S}(?=[^ \t\r\n])")
_TAGGED_CODE = regex.compile(rf"{S}(?=[^ \t\r\n])")
_LAST_SPACES = regex.compile(rf"{S}\Z")


def is_keyword(name: str) -> bool:
    """Whether a Python call can have it before "="; else it is written as f(**{"a b": 1})."""
    return regex.fullmatch(_KEYWORD, name) is not None


@dataclass(frozen=True)
class Content:
    text: str  # for the reader


@dataclass(frozen=True)
class CallStart:
    index: int  # the number of the call
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: all pieces, joined, are a JSON object, if the model wrote one."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


@dataclass(frozen=True)
class ToolCall:
    name: str  # of the function that the model wants to be called
    arguments: dict[str, Any]


def parse_tool_call(text: str) -> ToolCall | None:
    """The first call in an answer's text, of a function of any name; None if there is none whole.
    The text has its special tokens: code is a call only after <|python_tag|>."""
    parser = ToolCallParser(None)
    events = [*parser.push(text), *parser.flush()]
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [event.text for event in events if isinstance(event, CallArguments)]
    try:
        return ToolCall(names[0], json.loads("".join(arguments))) if names else None
    except ValueError:
        return None


class ToolCallParser:
    """Splits one answer into content and calls, in the same way however the text is cut. What could
    begin a call is held back. From the first argument on it is one: where the text then goes wrong,
    the call ends, and the rest is content. Spaces around calls are part of them.

    tools: those of the request, which say how many calls there may be; where a grammar held the
    answer to them, a call later in it is content. None takes one call, of any name. is_tagged: the
    answer began with the token <|python_tag|>, and the text does not show it.
    """

    def __init__(self, tools: Tools | None, *, is_tagged: bool = False) -> None:
        self._names = None if tools is None else tools.callable_names
        names = (CODE, *SEARCHES) if self._names is None else self._names
        self._has_code = CODE in names
        self._parallel = tools is not None and tools.several
        self._only_at_start = tools is not None and tools.needs_grammar
        self._source = Source()
        searches = [regex.escape(f"{name}.call(") for name in SEARCHES if name in names]
        starts = [r"\{", r"\[", _FUNCTION_TAG, _PYTHON_TAG, *searches]
        self._starts = regex.compile("|".join(starts))
        self._events: list[Event] = []
        self._num_calls = 0
        self._run = self._answer(is_tagged)

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> list[Event]:
        """Take more text; return what is certain by now."""
        if text:
            self._source.add(text)
        return self._go_on()

    def flush(self) -> list[Event]:
        """At the end: return what was held back."""
        self._source.is_ended = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        """The events that come now, neighbours of one content or argument joined."""
        next(self._run, None)
        merged: list[Event] = []
        kinds = itertools.groupby(self._events, lambda e: (type(e), getattr(e, "index", 0)))
        for (kind, _), group in kinds:
            same: list[Any] = list(group)
            if kind is not CallStart:
                same = [replace(same[0], text="".join(e.text for e in same))]
            merged += same
        self._events = []
        return merged

    def _answer(self, is_tagged: bool) -> Scan[None]:
        source = self._source
        is_call = yield from self._try_call(_FIRST, _TAGGED_CODE if is_tagged else _CODE)
        while True:
            while is_call:
                is_call = yield from self._try_call(_FOLLOWING, _NEXT_CODE)
                if not is_call:
                    yield from source.try_match(_LAST_SPACES)
            if self._only_at_start:
                while True:
                    self._content(source.end)
                    yield
            if not (yield from self._content_before_call()):
                return
            is_call = yield from self._try_call(_FIRST, _CODE)
            if not is_call:
                self._content(source.pos + 1)

    def _content(self, end: int) -> None:
        if end > self._source.pos:
            self._events.append(Content(self._source.upto(end)))

    def _content_before_call(self) -> Scan[bool]:
        """Pass all text that begins no call; whether one may begin here."""
        while True:
            found = self._source.search(self._starts)
            self._content(self._source.end if found is None else found.start())
            if found is not None and not found.partial:
                return True
            if self._source.is_ended:
                return False
            yield

    def _try_call(self, form: regex.Pattern[str], code: regex.Pattern[str]) -> Scan[bool]:
        """Pass the call, or the list of calls, or the code, that begins here; else nothing."""
        found = yield from self._source.try_match(form, allows=self._allows)
        if found is None:
            is_code = self._has_code and (yield from self._source.try_match(code)) is not None
            if is_code:
                yield from self._code()
            return is_code
        with contextlib.suppress(ParseError):  # it ends there: the rest is content
            yield from self._arguments(found)
            while found["list"]:
                item = yield from self._source.try_match(_NEXT_ITEM, allows=self._allows)
                if item is None or item["end"]:
                    break
                yield from self._arguments(item)
        return True

    def _allows(self, found: regex.Match[str]) -> bool:
        """Whether the name, or the half of it that is there, is that of a tool."""
        at, name = found.start("at"), found["name"]
        if self._names is None or at < 0:
            return True
        if name is not None:
            return name in self._names
        return any(each.startswith(self._source.text[at:]) for each in self._names)

    def _arguments(self, found: regex.Match[str]) -> Scan[None]:
        """Pass the rest of the call that begins with this match."""
        source, groups = self._source, found.groupdict()
        sink = self._begin(found["name"])
        if groups.get("search"):
            sink('{"query": ')
            yield from scan_string(source, sink)
            sink("}")
            yield from source.try_match(_CLOSE)
        elif groups["key"] or groups["close"]:
            yield from self._keywords(found, sink)
        else:
            yield from scan_value(source, sink)
            if groups["stars"]:
                yield from source.token(_CLOSE)
            elif groups["json"]:
                yield from source.try_match(_AFTER_JSON)
            else:
                yield from source.try_match(_AFTER_FUNCTION, grows=True)

    def _keywords(self, found: regex.Match[str], sink: Sink) -> Scan[None]:
        """a=1, b="x")"""
        separator = "{"
        while found["key"]:
            sink(f'{separator}"{quoted(found["key"])}": ')
            yield from scan_value(self._source, sink, 1)
            yield from self._source.token(NEXT["("])
            found = yield from self._source.token(_NEXT_ARGUMENT)
            separator = ", "
        sink("}" if separator == ", " else "{}")

    def _code(self) -> Scan[None]:
        source, sink = self._source, self._begin(CODE)
        sink('{"code": "')
        while True:
            sink(quoted(source.upto(source.end)))
            if source.is_ended:
                break
            yield
        sink('"}')

    def _begin(self, name: str) -> Sink:
        """From here on it is a call. What takes its arguments."""
        index = self._num_calls
        self._num_calls += 1
        if index and not self._parallel:
            return lambda text: None
        self._events.append(CallStart(index, name))
        return lambda text: self._events.append(CallArguments(index, text))
