"""Scanners of the values in a tool call, for a text that arrives in pieces.

In: literals of JSON or Python. Out: JSON. A scanner is a generator that yields when it needs more
text: the package `regex` reports whether a text could still become a match of a pattern. One
scanner reads both notations, as models mix them. (A JSON parser would read an argument again for
each piece, and does not report where it ends.) It knows no format of calls.
"""

import json
from collections.abc import Callable, Generator
from typing import TypeVar

import regex

_T = TypeVar("_T")
Scan = Generator[None, None, _T]  # yields when it needs more text; returns a value
Sink = Callable[[str], object]  # receives pieces of JSON

S = r"[ \t\r\n]{0,256}+"  # limited, as a model may write spaces without end
_MAX_DEPTH = 64  # levels of nested values
_CONSTANTS = {
    "true": "true", "false": "false", "null": "null",
    "True": "true", "False": "false", "None": "null",
}  # fmt: skip
_ESCAPES = {
    '"': '"', "'": "'", "\\": "\\", "/": "/", "a": "\a", "b": "\b", "f": "\f", "n": "\n",
    "r": "\r", "t": "\t", "v": "\v", "\n": "",
}  # fmt: skip
_SPACES = regex.compile(S)
# Python's numbers, of at most 128 characters: also 1_000, +5, .5 and 5.
_DIGITS = "[0-9](?:_?[0-9])*"
_INT = "(?:0|[1-9](?:_?[0-9])*)"
_PART = r"[\p{L}\p{N}_.+-]"
_NUMBER = rf"[+-]?(?:{_INT}\.|(?:{_INT}(?:\.{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?)"
_VALUE = regex.compile(
    rf"""(?P<quote>["]{{3}}|[']{{3}}|""|''|["'])|(?P<open>[\[({{])"""
    rf"|(?={_PART}{{1,128}}+(?!{_PART}))(?:(?P<constant>{'|'.join(_CONSTANTS)})|(?P<number>{_NUMBER}))"
    rf"(?!{_PART})"
)
_QUOTE = regex.compile("""(?P<quote>["]{3}|[']{3}|""|''|["'])""")
# A code with its digits, or the character alone: the text after it decides which one it is.
_HEX = "0-9a-fA-F"
_CODES = "|".join(
    rf"{char}(?P<hex>[{_HEX}]{{{n}}})|(?P<char>{char})(?=[{_HEX}]{{0,{n - 1}}}+[^{_HEX}])"
    for char, n in (("x", 2), ("u", 4), ("U", 8))
)
_ESCAPE = rf"\\(?:(?P<char>[^xuU])|{_CODES})"
_PLAIN = {quote: regex.compile(rf"[^\\{quote}]++") for quote in "\"'"}
_PIECE = {
    quote: regex.compile(
        rf"(?P<end>{quote})|(?P<text>{quote[0]})(?={quote[0]}?[^{quote[0]}])|{_ESCAPE}"
    )
    for quote in ('"', "'", '"""', "'''")
}
_COLON = regex.compile(":")
_ENDS = {"{": r"\}", "[": r"\]", "(": r"\)"}
_FIRST = {
    opening: regex.compile(rf"(?P<end>{end})|(?=[{'^' * (opening != '{')}{other}])")
    for (opening, end), other in zip(_ENDS.items(), ("\"'", r"\]", r"\)"), strict=True)
}
NEXT = {opening: regex.compile(rf",|(?={end})") for opening, end in _ENDS.items()}


class ParseError(Exception):
    """The text at the position of the source is not what the scanner reads."""


class Source:
    """A text that grows at its end, and a position in it; the text before it is dropped."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.is_ended = False
        self._kept_from: int | None = None  # a position to which the source may return

    @property
    def end(self) -> int:
        """Position after the text that has arrived."""
        return len(self.text)

    def add(self, text: str) -> None:
        """Append text."""
        start = self.pos if self._kept_from is None else self._kept_from
        self.text = self.text[start:] + text
        self.pos -= start
        if self._kept_from is not None:
            self._kept_from = 0

    def hold(self) -> None:
        """Keep the text from the position on, until `release` or `restore`."""
        self._kept_from = self.pos

    def release(self) -> None:
        """Drop the text that was kept."""
        self._kept_from = None

    def restore(self) -> None:
        """Return to the position of `hold`."""
        assert self._kept_from is not None
        self.pos = self._kept_from
        self._kept_from = None

    def upto(self, end: int) -> str:
        """Return the text up to a position, and advance to it."""
        start = self.pos
        self.pos = end
        return self.text[start:end]

    def search(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        """Return the first match from the position on, or what may become one at the end."""
        return pattern.search(self.text, self.pos, partial=not self.is_ended)

    def look(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        """Return a match at the position, or what may become one."""
        return pattern.match(self.text, self.pos, partial=not self.is_ended)

    def try_match(
        self,
        pattern: regex.Pattern[str],
        *,
        grows: bool = False,
        allows: Callable[[regex.Match[str]], bool] = bool,
    ) -> Scan[regex.Match[str] | None]:
        """Advance past a match at the position, and return it; return None if there is none.

        Args:
            pattern: what to match.
            grows: wait for the text after the match, as it may change the match.
            allows: whether a match, or the beginning of one, is accepted.
        """
        while True:
            match = self.look(pattern)
            if match is None or not allows(match):
                return None
            may_grow = grows and match.end() == self.end and not self.is_ended
            if not (match.partial or may_grow):
                self.pos = match.end()
                return match
            yield

    def match(self, pattern: regex.Pattern[str], *, grows: bool = False) -> Scan[regex.Match[str]]:
        """Advance past a match at the position; raise a ParseError if there is none."""
        match = yield from self.try_match(pattern, grows=grows)
        if match is None:
            raise ParseError
        return match

    def token(self, pattern: regex.Pattern[str], *, grows: bool = False) -> Scan[regex.Match[str]]:
        """Advance past spaces and line breaks, and a match after them."""
        yield from self.match(_SPACES, grows=True)
        return (yield from self.match(pattern, grows=grows))


def scan_value(source: Source, sink: Sink, depth: int = 0) -> Scan[None]:
    """Advance past one value, and write it to the sink as JSON while it arrives."""
    yield from source.match(_SPACES, grows=True)
    if depth > _MAX_DEPTH:
        raise ParseError
    match = yield from source.match(_VALUE, grows=True)
    if match["quote"]:
        yield from _string(source, sink, match["quote"])
    elif match["open"]:
        yield from _items(source, sink, match["open"], depth)
    elif match["constant"]:
        sink(_CONSTANTS[match["constant"]])
    else:
        sink(_number(match["number"]))


def scan_string(source: Source, sink: Sink) -> Scan[None]:
    """Advance past a string, with single or triple quotes of either kind.

    It may contain the escapes of JSON and of Python.
    """
    match = yield from source.token(_QUOTE, grows=True)
    yield from _string(source, sink, match["quote"])


def _items(source: Source, sink: Sink, opening: str, depth: int) -> Scan[None]:
    """Advance past the rest of a list or an object; it may end with a comma."""
    sink("{" if opening == "{" else "[")
    separator = ""
    while not (yield from source.token(_FIRST[opening]))["end"]:
        sink(separator)
        if opening == "{":
            yield from scan_string(source, sink)
            yield from source.token(_COLON)
            sink(": ")
        yield from scan_value(source, sink, depth + 1)
        yield from source.token(NEXT[opening])
        separator = ", "
    sink("}" if opening == "{" else "]")


def _number(text: str) -> str:
    """Return a number of Python as a number of JSON."""
    text = text.replace("_", "").removeprefix("+")
    if text.endswith("."):
        text += "0"
    return text.replace(".", "0.", 1) if text.startswith((".", "-.")) else text


def _string(source: Source, sink: Sink, quote: str) -> Scan[None]:
    sink('"')
    while len(quote) != 2:  # "" is a whole string
        plain = _PLAIN[quote[0]].match(source.text, source.pos)
        if plain is not None:
            sink(quoted(source.upto(plain.end())))
        if source.pos == source.end and not source.is_ended:
            yield
            continue
        match = yield from source.try_match(_PIECE[quote])
        if match is None:  # the answer ended inside an escape, or inside the closing quotes
            source.upto(source.end)
            raise ParseError
        if match["end"]:
            break
        sink(quoted(match["text"]) if match["text"] else _escaped(match))
    sink('"')


def _escaped(match: regex.Match[str]) -> str:
    """Return an escape as JSON.

    As in Python, a backslash before a character without a meaning stands for itself.
    """
    digits = match["hex"]
    if digits is None:
        char = match["char"]
        return quoted(_ESCAPES.get(char, "\\" + char))
    code = int(digits, 16)
    if len(digits) == 4 or 0xD800 <= code <= 0xDFFF:  # may be half of a pair, as in JSON
        return f"\\u{digits[-4:]}"
    return quoted(chr(code) if code <= 0x10FFFF else match[0])


def quoted(text: str) -> str:
    """Return a text as it is inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
