"""A parser of the tool calls in the text of an answer, for a text that arrives in pieces.

In: pieces of text. Out: content and calls. Each of Llama's notations is understood, whatever the
prompt asked for, as in Meta's own parser: {"name": ..., "parameters": {...}},
[name(key=value), ...], <function=name>{...}</function>, name.call(query="...") of the built-in
tools, and code after <|python_tag|>. A call names a tool of the request; any other text is content.
Nothing is executed.
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
# The group "at" marks the beginning of a name, even if only half of the name has arrived.
_NAME = rf"(?P<at>)(?P<name>{_KEYWORD})"
_TYPE = rf'"(?:type"{S}:{S}"function"|id"{S}:{S}"[^"\\]{{0,64}}"){S}'
_TYPES = rf"(?:{_TYPE},{S}){{0,2}}"
# Arguments are an object, its JSON as a text, or null for none.
_ARGUMENTS = rf"(?=\{{|null|\"{S}\{{|\"\")"
_ARGUMENT = rf"(?:(?P<close>\))|(?P<key>{_KEYWORD}){S}=)"
# The notations of a call, each up to its first argument.
_JSON = (
    rf'(?P<outer>\{{{S}{_TYPES}"function"{S}:{S})?(?P<json>\{{){S}{_TYPES}"name"{S}:{S}"{_NAME}"'
    rf'{S},{S}{_TYPES}"(?:parameters|arguments)"{S}:{S}{_ARGUMENTS}'
)
_PYTHON = rf"{_NAME}{S}\({S}(?:(?P<stars>\*\*){S}(?=\{{)|{_ARGUMENT})"
_ITEM = f"(?:{_JSON}|{_PYTHON})"
_CALLS = (
    rf"(?:{_PYTHON_TAG}{S})?(?:{_JSON}|(?P<list>\[){S}{_ITEM}"
    rf"|(?P<tag>{_FUNCTION_TAG}){_NAME}>{S}(?=\{{)"
    rf"|(?P<at>)(?P<name>{'|'.join(SEARCHES)})(?P<search>\.call\(query=)(?=[\"']))"
)
_FIRST = regex.compile(S + _CALLS)
_FOLLOWING = regex.compile(rf"{S}(?:[;,]{S})?{_CALLS}")  # a call after another call
_NEXT_ITEM = regex.compile(rf"{S}(?:(?:,{S})?(?P<end>\])|,{S}{_ITEM})")
_NEXT_ARGUMENT = regex.compile(_ARGUMENT)
_CLOSE = regex.compile(r"\)")
_AFTER_JSON = regex.compile(rf"{S}(?:,{S}{_TYPE}){{0,2}}\}}")
_NULL = regex.compile("null")
_QUOTE = regex.compile('(?=")')
_ENDS = "|".join(regex.escape(_END_FUNCTION[:n]) for n in range(1, len(_END_FUNCTION)))
_AFTER_FUNCTION = regex.compile(
    rf"{S}(?:{_END_FUNCTION}|(?:{_ENDS})\Z)"
)  # or the end of the answer
_CODE = regex.compile(rf"{S}{_PYTHON_TAG}{S}(?=[^ \t\r\n])")
_NEXT_CODE = regex.compile(rf"{S}(?:[;,]{S})?{_PYTHON_TAG}{S}(?=[^ \t\r\n])")
_TAGGED_CODE = regex.compile(rf"{S}(?=[^ \t\r\n])")
_LAST_SPACES = regex.compile(rf"{S}\Z")


def is_keyword(name: str) -> bool:
    """Return whether a call may have the name before "="; else it is f(**{"a b": 1})."""
    return regex.fullmatch(_KEYWORD, name) is not None


@dataclass(frozen=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call: its index in the answer, and the name of the tool."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments of a call.

    All pieces, joined, are a JSON object, if the model has written one.
    """

    index: int
    text: str


Event = Content | CallStart | CallArguments


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for: the name of a function, and its arguments."""

    name: str
    arguments: dict[str, Any]


def parse_tool_call(text: str) -> ToolCall | None:
    """Return the first call in the text of an answer, of a function of any name.

    The text must contain the special tokens: code is a call only after <|python_tag|>.

    Returns:
        the call, or None if there is no complete call.
    """
    parser = ToolCallParser(None)
    events = [*parser.push(text), *parser.flush()]
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [event.text for event in events if isinstance(event, CallArguments)]
    try:
        return ToolCall(names[0], json.loads("".join(arguments))) if names else None
    except ValueError:
        return None


class ToolCallParser:
    """Splits one answer into content and calls, independently of how the text is cut into pieces.

    Text that may begin a call is kept back. From the first argument on it is a call: if the text
    then becomes malformed, the call ends, and the rest is content. Spaces around calls belong to
    the calls.

    Args:
        tools: the tools of the request, which limit the number of calls. If a grammar constrains
            the answer, a call after other text is content. None accepts one call of any name.
        is_tagged: the answer began with the token <|python_tag|>, which the text does not contain.
    """

    def __init__(self, tools: Tools | None, *, is_tagged: bool = False) -> None:
        self._names = None if tools is None else tools.callable_names
        names = (CODE, *SEARCHES) if self._names is None else self._names
        self._accepts_code = CODE in names
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
        """Whether a call has begun."""
        return self._num_calls > 0

    def push(self, text: str) -> list[Event]:
        """Add text, and return the events that are certain by now."""
        if text:
            self._source.add(text)
        return self._resume()

    def flush(self) -> list[Event]:
        """End the text, and return the events that were kept back."""
        self._source.is_ended = True
        return self._resume()

    def _resume(self) -> list[Event]:
        """Resume the scan, and return its events; neighbouring pieces of a text are joined."""
        next(self._run, None)
        merged: list[Event] = []
        groups = itertools.groupby(self._events, lambda e: (type(e), getattr(e, "index", 0)))
        for (event_type, _), group in groups:
            events: list[Any] = list(group)
            if event_type is not CallStart:
                events = [replace(events[0], text="".join(event.text for event in events))]
            merged += events
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
        """Advance past all text that begins no call; return whether a call may begin here."""
        while True:
            match = self._source.search(self._starts)
            self._content(self._source.end if match is None else match.start())
            if match is not None and not match.partial:
                return True
            if self._source.is_ended:
                return False
            yield

    def _try_call(self, call: regex.Pattern[str], code: regex.Pattern[str]) -> Scan[bool]:
        """Advance past the call, list of calls or code that begins here; return if there is one."""
        match = yield from self._source.try_match(call, allows=self._allows)
        if match is None:
            is_code = self._accepts_code and (yield from self._source.try_match(code)) is not None
            if is_code:
                yield from self._code()
            return is_code
        with contextlib.suppress(ParseError):  # the call ends there, and the rest is content
            yield from self._arguments(match)
            while match["list"]:
                item = yield from self._source.try_match(_NEXT_ITEM, allows=self._allows)
                if item is None or item["end"]:
                    break
                yield from self._arguments(item)
        return True

    def _allows(self, match: regex.Match[str]) -> bool:
        """Return whether the name, or the part of it that has arrived, is the name of a tool."""
        start = match.start("at")
        if self._names is None or start < 0:
            return True
        if match["name"] is not None:
            return match["name"] in self._names
        return any(name.startswith(self._source.text[start:]) for name in self._names)

    def _arguments(self, match: regex.Match[str]) -> Scan[None]:
        """Advance past the rest of the call that begins with this match."""
        source = self._source
        groups = match.groupdict()
        sink = self._begin(match["name"])
        if groups.get("search"):
            sink('{"query": ')
            yield from scan_string(source, sink)
            sink("}")
            yield from source.try_match(_CLOSE)
        elif groups["key"] or groups["close"]:
            yield from self._keywords(match, sink)
        else:
            yield from self._json_arguments(sink)
            if groups["stars"]:
                yield from source.token(_CLOSE)
            elif groups["json"]:
                yield from source.try_match(_AFTER_JSON)
                if groups["outer"]:
                    yield from source.try_match(_AFTER_JSON)
            else:
                yield from source.try_match(_AFTER_FUNCTION, grows=True)

    def _json_arguments(self, sink: Sink) -> Scan[None]:
        """Advance past arguments that are an object, its JSON as a text, or null."""
        source = self._source
        if (yield from source.try_match(_NULL)) is not None:
            sink("{}")
        elif (yield from source.try_match(_QUOTE)) is not None:
            pieces: list[str] = []
            yield from scan_string(source, pieces.append)
            sink(json.loads("".join(pieces)) or "{}")
        else:
            yield from scan_value(source, sink)

    def _keywords(self, match: regex.Match[str], sink: Sink) -> Scan[None]:
        """Advance past the keyword arguments of a Python call, and its closing parenthesis."""
        separator = "{"
        while match["key"]:
            sink(f'{separator}"{quoted(match["key"])}": ')
            yield from scan_value(self._source, sink, 1)
            yield from self._source.token(NEXT["("])
            match = yield from self._source.token(_NEXT_ARGUMENT)
            separator = ", "
        sink("}" if separator == ", " else "{}")

    def _code(self) -> Scan[None]:
        source = self._source
        sink = self._begin(CODE)
        sink('{"code": "')
        while True:
            sink(quoted(source.upto(source.end)))
            if source.is_ended:
                break
            yield
        sink('"}')

    def _begin(self, name: str) -> Sink:
        """Begin a call; return the sink of its arguments."""
        index = self._num_calls
        self._num_calls += 1
        if index and not self._parallel:
            return lambda text: None
        self._events.append(CallStart(index, name))
        return lambda text: self._events.append(CallArguments(index, text))
