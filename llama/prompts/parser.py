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

from llama.prompts.calls import FIRST, FOLLOWING, FUNCTION_TAG, PYTHON_TAG, CallForms
from llama.prompts.scanner import ParseError, S, Scan, Sink, Source, quoted
from llama.prompts.tools import CODE, SEARCHES, Tools

_CODE = regex.compile(rf"{S}{PYTHON_TAG}{S}(?=[^ \t\r\n])")
_NEXT_CODE = regex.compile(rf"{S}(?:[;,]{S})?{PYTHON_TAG}{S}(?=[^ \t\r\n])")
_TAGGED_CODE = regex.compile(rf"{S}(?=[^ \t\r\n])")
_LAST_SPACES = regex.compile(rf"{S}\Z")


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The call of this number begins."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: all pieces, joined, are a JSON object, if the model wrote one."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


@dataclass(frozen=True)
class ToolCall:
    """The function that the model wants to be called."""

    name: str
    arguments: dict[str, Any]


def parse_tool_call(text: str) -> ToolCall | None:
    """The first call in an answer's text, of a function of any name; None if there is none whole.

    The text has its special tokens: code is a call only after <|python_tag|>.
    """
    parser = ToolCallParser(None)
    events = [*parser.push(text), *parser.flush()]
    name = next((event.name for event in events if isinstance(event, CallStart)), None)
    if name is None:
        return None
    arguments = [e.text for e in events if isinstance(e, CallArguments) and e.index == 0]
    try:
        return ToolCall(name, json.loads("".join(arguments)))
    except ValueError:
        return None


class ToolCallParser:
    """Splits one answer into content and calls. The same events come however the text is cut, but
    for the places where pieces of one content or argument meet.

    What could begin a call is held back until it is one or cannot become one. From the first
    argument on it is a call: where the text then goes wrong, the call ends there, and the rest is
    content. Spaces before, between and after calls are part of them.

    tools: those that may be called; None takes any name. parallel: False drops all calls but the
    first. is_tagged: the answer began with the token <|python_tag|>, and the text does not show it.
    only_at_start: a call later in the answer is content.
    """

    def __init__(
        self,
        tools: Tools | None,
        *,
        parallel: bool = True,
        is_tagged: bool = False,
        only_at_start: bool = False,
    ) -> None:
        names = (CODE, *SEARCHES) if tools is None else tools.names
        self._has_code = CODE in names
        self._parallel = parallel
        self._only_at_start = only_at_start
        self._source = Source()
        self._forms = CallForms(self._source, None if tools is None else tools.names, self._begin)
        searches = [regex.escape(f"{name}.call(") for name in SEARCHES if name in names]
        self._starts = regex.compile("|".join([r"\{", r"\[", FUNCTION_TAG, PYTHON_TAG, *searches]))
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
            next(self._run, None)
        return self._take()

    def flush(self) -> list[Event]:
        """At the end: return what was held back."""
        self._source.is_ended = True
        next(self._run, None)
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return _merged(events)

    def _answer(self, is_tagged: bool) -> Scan[None]:
        source = self._source
        is_call = yield from self._try_call(FIRST, _TAGGED_CODE if is_tagged else _CODE)
        while True:
            while is_call:
                is_call = yield from self._try_call(FOLLOWING, _NEXT_CODE)
                if not is_call:
                    yield from source.try_match(_LAST_SPACES)
            if self._only_at_start:
                while True:
                    self._content(source.end)
                    yield
            if not (yield from self._content_before_call()):
                return
            is_call = yield from self._try_call(FIRST, _CODE)
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
        found = yield from self._forms.head(form)
        if found is None:
            is_code = self._has_code and (yield from self._source.try_match(code)) is not None
            if is_code:
                yield from self._code()
            return is_code
        with contextlib.suppress(ParseError):  # it ends there: the rest is content
            yield from self._forms.call(found)
        return True

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


def _merged(events: list[Event]) -> list[Event]:
    """The same events, neighbours of one content or argument joined."""
    merged: list[Event] = []
    for _, group in itertools.groupby(events, key=lambda e: (type(e), getattr(e, "index", 0))):
        same = list(group)
        first = same[0]
        if isinstance(first, CallStart):
            merged += same
        else:
            merged.append(replace(first, text="".join(e.text for e in same)))  # type: ignore[union-attr]
    return merged
