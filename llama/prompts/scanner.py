"""The values in a tool call, as the text comes: JSON's or Python's literals in, JSON out.

A scanner is a generator that yields when it needs more text: the package `regex` tells of a pattern
whether the text could still become it. One scanner reads both notations, as models mix them. (A
parser of JSON would read an argument anew for each piece, and does not say where it ends.)
"""

import json
from collections.abc import Callable, Generator
from typing import TypeVar

import regex

_T = TypeVar("_T")
Scan = Generator[None, None, _T]  # yields when it needs more text; returns a value
Sink = Callable[[str], object]  # takes a piece of JSON

S = r"[ \t\r\n]{0,256}+"  # in one place: a model that writes spaces only writes no call
_MAX_DEPTH = 64
_WORDS = {
    "true": "true", "false": "false", "null": "null",
    "True": "true", "False": "false", "None": "null",
}  # fmt: skip
_ESCAPES = {
    '"': '"', "'": "'", "\\": "\\", "/": "/", "a": "\a", "b": "\b", "f": "\f", "n": "\n",
    "r": "\r", "t": "\t", "v": "\v", "\n": "",
}  # fmt: skip
_SPACES = regex.compile(S)
# Numbers as Python has them: 1_000, +5, .5 and 5. too; at most 128 characters.
_DIGITS, _INT, _PART = "[0-9](?:_?[0-9])*", "(?:0|[1-9](?:_?[0-9])*)", r"[\p{L}\p{N}_.+-]"
_NUMBER = rf"[+-]?(?:{_INT}\.|(?:{_INT}(?:\.{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?)"
_VALUE = regex.compile(
    rf"""(?P<quote>["]{{3}}|[']{{3}}|""|''|["'])|(?P<open>[\[({{])"""
    rf"|(?={_PART}{{1,128}}+(?!{_PART}))(?:(?P<word>{'|'.join(_WORDS)})|(?P<number>{_NUMBER}))"
    rf"(?!{_PART})"
)
_QUOTE = regex.compile("""(?P<quote>["]{3}|[']{3}|""|''|["'])""")
# With its digits, or a character alone: what follows must be there, to tell which of them it is.
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
    """What comes at the source's place is not what the scanner reads."""


class Source:
    """Text that grows at its end, and a place in it. What is before the place is forgotten."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.is_ended = False

    @property
    def end(self) -> int:
        return len(self.text)

    def add(self, text: str) -> None:
        self.text, self.pos = self.text[self.pos :] + text, 0

    def upto(self, end: int) -> str:
        """Pass the text up to a place."""
        start, self.pos = self.pos, end
        return self.text[start:end]

    def search(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        """The first match from here on, or what could become one at the end of the text."""
        return pattern.search(self.text, self.pos, partial=not self.is_ended)

    def look(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        """A match here, or what could become one."""
        return pattern.match(self.text, self.pos, partial=not self.is_ended)

    def try_match(
        self,
        pattern: regex.Pattern[str],
        *,
        grows: bool = False,
        allows: Callable[[regex.Match[str]], bool] = bool,
    ) -> Scan[regex.Match[str] | None]:
        """Pass what matches here, if anything does. grows: what follows must be seen, as it could
        make it another match. allows: whether a match, or the beginning of one, may be one."""
        while True:
            found = self.look(pattern)
            if found is None or not allows(found):
                return None
            at_end = grows and found.end() == self.end and not self.is_ended
            if not (found.partial or at_end):
                self.pos = found.end()
                return found
            yield

    def match(self, pattern: regex.Pattern[str], *, grows: bool = False) -> Scan[regex.Match[str]]:
        """Pass what matches here; ParseError where nothing does."""
        found = yield from self.try_match(pattern, grows=grows)
        if found is None:
            raise ParseError
        return found

    def token(self, pattern: regex.Pattern[str], *, grows: bool = False) -> Scan[regex.Match[str]]:
        """Pass spaces and line breaks, and what matches after them."""
        yield from self.match(_SPACES, grows=True)
        return (yield from self.match(pattern, grows=grows))


def scan_value(source: Source, sink: Sink, depth: int = 0) -> Scan[None]:
    """Pass one value, and give it to the sink as JSON while it comes."""
    yield from source.match(_SPACES, grows=True)
    if depth > _MAX_DEPTH:
        raise ParseError
    found = yield from source.match(_VALUE, grows=True)
    if found["quote"]:
        yield from _string(source, sink, found["quote"])
    elif found["open"]:
        yield from _items(source, sink, found["open"], depth)
    else:
        sink(_WORDS[found["word"]] if found["word"] else _number(found["number"]))


def scan_string(source: Source, sink: Sink) -> Scan[None]:
    """Pass a string in quotes of either kind, one or three, with JSON's escapes or Python's."""
    found = yield from source.token(_QUOTE, grows=True)
    yield from _string(source, sink, found["quote"])


def _items(source: Source, sink: Sink, opening: str, depth: int) -> Scan[None]:
    """The rest of a list, or of {"key": value, ...}; a comma may stand before the end."""
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
    """A number of Python as one of JSON."""
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
        found = yield from source.try_match(_PIECE[quote])
        if found is None:  # the answer ended inside an escape, or inside the quotes that end it
            source.upto(source.end)
            raise ParseError
        if found["end"]:
            break
        sink(quoted(found["text"]) if found["text"] else _escaped(found))
    sink('"')


def _escaped(found: regex.Match[str]) -> str:
    """An escape as JSON. A backslash before any other character is one, as in Python: \\d."""
    digits, char = found["hex"], found["char"]
    if digits is None:
        return quoted(_ESCAPES.get(char, "\\" + char))
    code = int(digits, 16)
    if len(digits) == 4 or 0xD800 <= code <= 0xDFFF:  # it may be half of a pair, as JSON writes it
        return f"\\u{digits[-4:]}"
    return quoted(chr(code) if code <= 0x10FFFF else found[0])


def quoted(text: str) -> str:
    """The inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
