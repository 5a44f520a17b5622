"""A parser of tool calls in the format of a chat template, for a text that arrives in pieces.

In: pieces of text, and the `CallFormat` of a template. Out: content and calls, as from
`ToolCallParser`, which reads Llama's own notations. White space may differ from the format's.
"""

import contextlib
import json
import re
from dataclasses import dataclass

import regex

from llama.prompts.call_format import NAME_KEY, CallFormat
from llama.prompts.parser import ToolCallParser
from llama.prompts.scanner import NEXT, ParseError, S, Scan, Sink, scan_string, scan_value
from llama.prompts.tools import Tools

_SPACES = re.compile(r"\s+")
_NAME = r"(?P<at>)(?P<name>[\p{L}\p{N}_.$-]{1,128}+)"
_LAST_SPACES = regex.compile(rf"{S}\Z")
_OPEN_OBJECT = regex.compile(r"\{")
_KEY_OR_END = regex.compile(r"(?P<end>\})|(?=[\"'])")
_COLON = regex.compile(":")
_ARGUMENTS_BEGIN = regex.compile(rf'{S}(?=\{{|null|"{S}\{{|"")')


@dataclass(frozen=True)
class _Patterns:
    """The patterns of a `CallFormat`, with white space of any length where it has some.

    Attributes:
        start: the text that a call begins with.
        first: the first call of an answer, up to its arguments or its object. The group "at" marks
            the beginning of a name, and the group "name" is the name, unless calls are objects.
        following: a call after another one.
        after: what follows the arguments of a call.
        close: what follows the last call.
        is_object: a call is a JSON object with the keys name and arguments (or parameters).
    """

    start: regex.Pattern[str]
    first: regex.Pattern[str]
    following: regex.Pattern[str]
    after: regex.Pattern[str]
    close: regex.Pattern[str]
    is_object: bool


def _patterns_of(call_format: CallFormat) -> _Patterns:
    before = call_format.before
    after = call_format.after
    head = rf"{_NAME}{_pattern(call_format.between)}(?=\{{)"
    if call_format.is_object:
        before = NAME_KEY.sub("", before)
        after = after.lstrip()[1:]
        head = r"(?=\{)"
    opening = _pattern(call_format.open)
    first = f"{opening}{_pattern(before)}{head}"
    separator = _pattern(call_format.separator or "")
    following = f"(?:{separator})?{S}(?:{opening})?{_pattern(before)}{head}"
    start = (call_format.open + before).strip() or "{"
    return _Patterns(
        start=regex.compile(regex.escape(_SPACES.split(start)[0])),
        first=regex.compile(S + first),
        following=regex.compile(S + following),
        after=regex.compile(S + _pattern(after)),
        close=regex.compile(S + _pattern(call_format.close)),
        is_object=call_format.is_object,
    )


def _pattern(text: str) -> str:
    """Return a pattern of a text, in which white space may be of any length, or missing."""
    parts = [regex.escape(part) for part in _SPACES.split(text)]
    return S.join(parts)


class CallFormatParser(ToolCallParser):
    """Splits one answer into content and calls of the format that a chat template has.

    In the object of a call the keys may come in any order: arguments before the name are kept until
    the name is known. Other keys, such as id and type, are passed over.
    """

    def __init__(self, tools: Tools, call_format: CallFormat) -> None:
        """Begin an answer to a request with these tools."""
        super().__init__(tools)
        self._patterns = _patterns_of(call_format)
        self._starts = self._patterns.start
        self._run = self._read_answer()

    def _read_answer(self) -> Scan[None]:
        patterns = self._patterns
        is_call = yield from self._try_format(patterns.first)
        while True:
            while is_call:
                is_call = yield from self._try_format(patterns.following)
                if not is_call:
                    yield from self._source.try_match(patterns.close, grows=True)
                    yield from self._source.try_match(_LAST_SPACES)
            if self._only_at_start:
                while True:
                    self._content(self._source.end)
                    yield
            if not (yield from self._content_before_call()):
                return
            is_call = yield from self._try_format(patterns.first)
            if not is_call:
                self._content(self._source.pos + 1)

    def _try_format(self, pattern: regex.Pattern[str]) -> Scan[bool]:
        """Advance past a call that begins here; return whether there is one."""
        source = self._source
        source.hold()
        allows = bool if self._patterns.is_object else self._allows
        match = yield from source.try_match(pattern, allows=allows)
        if match is None:
            source.restore()
            return False
        if self._patterns.is_object:
            is_call = yield from self._read_call()
            if not is_call:
                source.restore()
                return False
        else:
            source.release()
            with contextlib.suppress(ParseError):  # the call ends there, and the rest is content
                yield from scan_value(source, self._begin(match["name"]))
        yield from source.try_match(self._patterns.after, grows=True)
        return True

    def _read_call(self) -> Scan[bool]:
        """Advance past the object of a call; return whether it is one, and begin it if it is.

        Until the name and the arguments have begun, nothing is certain, and the source can return
        to the beginning of the object.
        """
        source = self._source
        name: str | None = None
        sink: Sink | None = None
        kept: list[str] = []
        try:
            yield from source.token(_OPEN_OBJECT)
            depth = 1
            while depth:
                if (yield from source.token(_KEY_OR_END))["end"]:
                    depth -= 1
                    if depth:
                        yield from source.token(NEXT["{"])
                    continue
                key = yield from self._text()
                yield from source.token(_COLON)
                if key == "name":
                    name = yield from self._text()
                    if self._names is not None and name not in self._names:
                        return False
                    if kept:
                        sink = self._started(name, kept)
                elif key in ("arguments", "parameters"):
                    yield from source.token(_ARGUMENTS_BEGIN)
                    if name is not None:
                        sink = self._started(name, kept)
                    yield from self._json_arguments(kept.append if sink is None else sink)
                elif key == "function":  # around the name and the arguments, as OpenAI writes calls
                    yield from source.token(_OPEN_OBJECT)
                    depth += 1
                    continue
                else:
                    yield from scan_value(source, _drop)
                yield from source.token(NEXT["{"])
        except ParseError:
            return sink is not None  # the call ends there, and the rest is content
        if name is None:
            return False
        if sink is None:
            self._started(name, ["{}"])
        return True

    def _started(self, name: str, arguments: list[str]) -> Sink:
        """Begin a call with the arguments that have arrived before its name."""
        self._source.release()
        sink = self._begin(name)
        for piece in arguments:
            sink(piece)
        return sink

    def _text(self) -> Scan[str]:
        """Advance past a string, and return it."""
        pieces: list[str] = []
        yield from scan_string(self._source, pieces.append)
        return str(json.loads("".join(pieces)))


def _drop(text: str) -> None:
    """Ignore the value of a key that is no part of a call."""
