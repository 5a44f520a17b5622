"""The tool calls in an answer's text, as the text comes: pieces in, content and calls out.

Each of Llama's forms is understood, whatever the prompt asked for, as in Meta's own parser:
{"name": ..., "parameters": {...}}, [name(key=value), ...], <function=name>{...}</function>,
name.call(query="...") of the built-in tools, and code after <|python_tag|>. A call names one of the
request's tools; any other text is content. It runs nothing.
"""

import itertools
import json
import re
from dataclasses import dataclass, replace
from typing import Any

from llama.prompts.calls import FUNCTION_TAG, CallForms
from llama.prompts.formats import CODE, SEARCHES, Tools
from llama.prompts.values import Broken, Emit, Scan, Source, quoted

PYTHON_TAG = "<|python_tag|>"


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
        searches = [name for name in SEARCHES if name in names]
        starts = ["{", "[", FUNCTION_TAG, PYTHON_TAG, *(f"{name}.call(" for name in searches)]
        self._starts = re.compile("|".join(map(re.escape, starts)))
        self._openings = {start[:n] for start in starts for n in range(1, len(start))}
        self._longest = max(map(len, starts)) - 1
        self._parallel = parallel
        self._only_at_start = only_at_start
        self._source = Source()
        self._forms = CallForms(
            self._source, None if tools is None else tools.names, searches, self._begin
        )
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

    # The methods below are scanners, as in `values`: each passes its text or raises Broken.

    def _answer(self, is_tagged: bool) -> Scan[None]:
        is_call = yield from self._try_call(is_tagged=is_tagged)
        while True:
            while is_call:
                is_call = yield from self._try_call(is_next=True)
            if self._only_at_start:
                while (yield from self._source.peek()):
                    self._content(self._source.end)
                return
            if not (yield from self._content_before_call()):
                return
            is_call = yield from self._try_call()
            if not is_call:
                self._content(self._source.pos + 1)

    def _content(self, end: int) -> None:
        if end > self._source.pos:
            self._events.append(Content(self._source.upto(end)))

    def _content_before_call(self) -> Scan[bool]:
        """Pass all text that begins no call; whether one may begin here."""
        source = self._source
        while (yield from source.peek()):
            found = source.search(self._starts)
            if found is not None:
                self._content(found)
                return True
            held = 0 if source.is_ended else source.held(self._openings, self._longest)
            self._content(source.end - held)
            if held:
                yield
        return False

    def _try_call(self, *, is_tagged: bool = False, is_next: bool = False) -> Scan[bool]:
        """Pass the call, or the list of calls, that begins here, and the spaces before it; else
        nothing. is_next: it comes after another; then spaces at the end of the text are passed."""
        source, before = self._source, self._num_calls
        source.mark = source.pos
        try:
            char = yield from source.spaces()
            if is_next and not char:
                source.mark = None
                return False
            if is_next and char in ";,":
                source.pos += 1
                yield from source.spaces()
            if is_tagged or (yield from self._has_tag()):
                yield from self._call_after_tag()
            else:
                yield from self._forms.call()
        except Broken:
            if source.mark is not None:
                source.pos = source.mark
        source.mark = None
        return self._num_calls > before

    def _has_tag(self) -> Scan[bool]:
        start = self._source.pos
        try:
            yield from self._source.expect(PYTHON_TAG)
        except Broken:
            self._source.pos = start
            return False
        return True

    def _call_after_tag(self) -> Scan[None]:
        """A call in one of the forms, or code."""
        source, start, before = self._source, self._source.pos, self._num_calls
        try:
            yield from source.spaces()
            yield from self._forms.call()
        except Broken:
            if self._num_calls > before or not self._has_code:
                raise
            source.pos = start
            yield from self._code()

    def _code(self) -> Scan[None]:
        source = self._source
        if not (yield from source.spaces()):
            raise Broken
        emit = self._begin(CODE)
        emit('{"code": "')
        while (yield from source.peek()):
            emit(quoted(source.upto(source.end)))
        emit('"}')

    def _begin(self, name: str) -> Emit:
        """From here on it is a call: nothing before is needed again. What takes its arguments."""
        self._source.mark = None
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
