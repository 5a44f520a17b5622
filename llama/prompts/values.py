"""The values in a tool call, character by character: JSON's or Python's literals in, JSON out.

A scanner is a generator that yields when it needs more text, so that a value is read while it is
written. It reads each character once, or once more after a token that failed, and holds back one
token at most. `Broken` says that what follows is no such value. It knows no calls.
"""

import json
import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

_T = TypeVar("_T")
Scan = Generator[None, None, _T]  # yields when it needs more text; returns a value
Emit = Callable[[str], object]  # takes a piece of JSON

SPACES = " \t\r\n"
_MAX_SPACES = 256  # in one place: a model that writes spaces only writes no call
_MAX_DEPTH = 64
_MAX_TOKEN = 128  # characters of a number
_WORDS = {
    "true": "true", "false": "false", "null": "null",
    "True": "true", "False": "false", "None": "null",
}  # fmt: skip
_ESCAPES = {
    '"': '"', "'": "'", "\\": "\\", "/": "/", "a": "\a", "b": "\b", "f": "\f", "n": "\n",
    "r": "\r", "t": "\t", "v": "\v", "\n": "",
}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_UNDERSCORE = re.compile(r"(?<=[0-9])_(?=[0-9])")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}


class Broken(Exception):
    """What was read is not what the scanner reads; `Source.mark` says where it began to differ."""


class Source:
    """Text that grows at its end, and a place in it; places count from the start of all text.

    mark: where to go back to, if what is being read turns out to be something else. Text before it,
    or before the place where there is none, is forgotten.
    """

    def __init__(self) -> None:
        self.pos = 0
        self.mark: int | None = None
        self.is_ended = False
        self._text = ""
        self._begin = 0  # the place of the first character that is kept

    @property
    def end(self) -> int:
        return self._begin + len(self._text)

    def add(self, text: str) -> None:
        kept = self.pos if self.mark is None else self.mark
        self._text = self._text[kept - self._begin :] + text
        self._begin = kept

    def upto(self, end: int) -> str:
        """Pass the text up to a place."""
        start, self.pos = self.pos, end
        return self._text[start - self._begin : end - self._begin]

    def search(self, pattern: re.Pattern[str]) -> int | None:
        """The place of the first match from here on."""
        found = pattern.search(self._text, self.pos - self._begin)
        return None if found is None else self._begin + found.start()

    def held(self, openings: Collection[str], longest: int) -> int:
        """The length of the longest end of the text, from here on, that is one of the openings."""
        rest = self._text[max(self.pos - self._begin, len(self._text) - longest) :]
        return next((n for n in range(len(rest), 0, -1) if rest[-n:] in openings), 0)

    def peek(self) -> Scan[str]:
        """The next character; "" at the end of all text."""
        while self.pos == self.end:
            if self.is_ended:
                return ""
            yield
        return self._text[self.pos - self._begin]

    def spaces(self) -> Scan[str]:
        """Pass spaces and line breaks; the character after them."""
        for _ in range(_MAX_SPACES):
            char = yield from self.peek()
            if not char or char not in SPACES:
                return char
            self.pos += 1
        raise Broken

    def expect(self, wanted: str) -> Scan[None]:
        """Pass exactly this text."""
        for each in wanted:
            if (yield from self.peek()) != each:
                raise Broken
            self.pos += 1

    def word(self, is_part: Callable[[str], bool], most: int) -> Scan[str]:
        """Pass the characters for which is_part, at most so many."""
        found = ""
        while True:
            char = yield from self.peek()
            if not char or not is_part(char):
                return found
            if len(found) == most:
                raise Broken
            found += char
            self.pos += 1

    def one_of(self, words: Collection[str], ends: str) -> Scan[str]:
        """Pass one of the words, which a character of `ends` must follow. Broken at the first
        character with which it can be none of them."""
        found = ""
        while True:
            char = yield from self.peek()
            if char and char in ends and found in words:
                return found
            found += char
            if not char or not any(word.startswith(found) for word in words):
                raise Broken
            self.pos += 1

    def plain(self, quote: str) -> str:
        """Pass what is neither a backslash nor this quote."""
        found = _PLAIN[quote].match(self._text, self.pos - self._begin)
        assert found is not None
        self.pos = self._begin + found.end()
        return found[0]


def scan_value(source: Source, emit: Emit, depth: int = 0) -> Scan[None]:
    """Pass one value, and emit it as JSON while it comes."""
    char = yield from source.spaces()
    if depth > _MAX_DEPTH:
        raise Broken
    if char and char in "\"'":
        yield from scan_string(source, emit)
    elif char == "{":
        yield from scan_dict(source, emit, depth)
    elif char and char in "[(":
        yield from _list(source, emit, depth, "]" if char == "[" else ")")
    else:
        yield from _token(source, emit)


def scan_dict(source: Source, emit: Emit, depth: int = 0) -> Scan[None]:
    """Pass {"key": value, ...}; a comma may stand before the end, as in Python."""
    source.pos += 1
    emit("{")
    separator = ""
    while (char := (yield from source.spaces())) != "}":
        if not char or char not in "\"'":
            raise Broken
        emit(separator)
        yield from scan_string(source, emit)
        yield from source.spaces()
        yield from source.expect(":")
        emit(": ")
        yield from scan_value(source, emit, depth + 1)
        yield from scan_comma(source, "}")
        separator = ", "
    source.pos += 1
    emit("}")


def _list(source: Source, emit: Emit, depth: int, end: str) -> Scan[None]:
    source.pos += 1
    emit("[")
    separator = ""
    while (yield from source.spaces()) != end:
        emit(separator)
        yield from scan_value(source, emit, depth + 1)
        yield from scan_comma(source, end)
        separator = ", "
    source.pos += 1
    emit("]")


def scan_comma(source: Source, end: str) -> Scan[None]:
    """Pass a comma, if the end does not follow."""
    char = yield from source.spaces()
    if char == ",":
        source.pos += 1
    elif char != end:
        raise Broken


def _token(source: Source, emit: Emit) -> Scan[None]:
    """A number, or one of the words; it is known whole only by the character after it."""
    had_mark = source.mark is not None
    if not had_mark:
        source.mark = source.pos
    text = yield from source.word(lambda c: c.isalnum() or c in "+-._", _MAX_TOKEN)
    emit(_WORDS.get(text) or _number(text))
    if not had_mark:
        source.mark = None


def _number(text: str) -> str:
    """A number of Python as one of JSON: 1_000, +5, .5 and 5. are numbers there."""
    text = _UNDERSCORE.sub("", text).removeprefix("+")
    if text.endswith("."):
        text += "0"
    if text.startswith((".", "-.")):
        text = text.replace(".", "0.", 1)
    if not _NUMBER.fullmatch(text):
        raise Broken
    return text


def scan_string(source: Source, emit: Emit) -> Scan[None]:
    """Pass a string in quotes of either kind, or in three of them, with JSON's escapes or Python's.

    What is between the quotes is emitted piece by piece, as a JSON string.
    """
    quote = yield from source.peek()
    source.pos += 1
    emit('"')
    length = 1
    if (yield from source.peek()) == quote:
        source.pos += 1
        if (yield from source.peek()) != quote:
            emit('"')
            return
        source.pos += 1
        length = 3
    while (char := (yield from source.peek())) != quote or length == 3:
        if not char:
            raise Broken
        if char == "\\":
            yield from _escape(source, emit)
        elif char == quote:
            if (yield from _is_end(source, quote, emit)):
                break
        else:
            emit(quoted(source.plain(quote)))
    else:
        source.pos += 1
    emit('"')


def _is_end(source: Source, quote: str, emit: Emit) -> Scan[bool]:
    """Whether three quotes follow; fewer are part of the string."""
    for passed in range(3):
        if (yield from source.peek()) != quote:
            emit(quoted(quote * passed))
            return False
        source.pos += 1
    return True


def _escape(source: Source, emit: Emit) -> Scan[None]:
    source.pos += 1
    char = yield from source.peek()
    if not char:
        raise Broken
    source.pos += 1
    if char in _HEX:
        digits = ""
        for _ in range(_HEX[char]):
            digit = yield from source.peek()
            if not digit or digit not in "0123456789abcdefABCDEF":
                break
            digits += digit
            source.pos += 1
        if len(digits) == _HEX[char] and int(digits, 16) <= 0x10FFFF:
            # \u may be one half of a pair, which JSON writes the same way.
            is_unit = len(digits) == 4 or 0xD800 <= int(digits, 16) <= 0xDFFF
            emit(f"\\u{digits[-4:]}" if is_unit else quoted(chr(int(digits, 16))))
        else:
            emit(quoted(f"\\{char}{digits}"))
    else:
        # As in Python, a backslash before any other character is one: models write \d.
        emit(quoted(_ESCAPES.get(char, "\\" + char)))


def quoted(text: str) -> str:
    """The inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
