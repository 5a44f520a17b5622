"""Text that knows which of its characters a chat template wrote, and the ids of such text.

In: constants of a template, which are trusted, and texts of messages, which are not. Out: token
ids, in which only a name that the template wrote in full is a special token. Nothing here knows
templates or files.

The mask fails closed: where an operation does not carry it over, the result is an ordinary str,
which is not trusted at all. A special token may then be lost, but no message can contain one.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex, overload

from llama.storage.token_files import IMAGE
from llama.tokenizer import Tokenizer

TRUSTED = "1"
UNTRUSTED = "0"
_TRUSTED_RUN = re.compile(f"{TRUSTED}+")
# White_Space of Unicode, which Hugging Face's tokenizers strip. Python's strip has more: U+001C ...
_SPACES = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B)))
_SPACES += "\u2028\u2029\u202f\u205f\u3000"
_LEADING_SPACES = re.compile(f"[{_SPACES}]*")


class MarkedText(str):
    """A str with a mask, which says of each character whether the template wrote it.

    Methods of str that are not defined here return a str, which is not trusted.

    Attributes:
        mask: as long as the text: "1" for characters of the template and "0" for all others.
    """

    __slots__ = ("mask",)
    mask: str

    def __new__(cls, text: str = "", mask: str | None = None) -> "MarkedText":
        """Make a text; without a mask it is not trusted."""
        self = str.__new__(cls, text)
        self.mask = UNTRUSTED * len(self) if mask is None else mask
        return self

    @property
    def plain(self) -> str:
        """The text without its mask."""
        return str.__getitem__(self, slice(None))

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return concatenate((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concatenate((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> "MarkedText":
        return MarkedText(str.__mul__(self, count), self.mask * count)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> "MarkedText":
        return MarkedText(str.__getitem__(self, key), self.mask[key])

    def __iter__(self) -> Iterator["MarkedText"]:
        return map(MarkedText, str.__iter__(self), self.mask)

    def __mod__(self, values: object) -> str:
        """Return a formatted text, which is marked if each conversion is %s."""
        given = values if isinstance(values, tuple) else (values,)
        parts = self.split("%s")
        if len(parts) != len(given) + 1 or any("%" in part for part in parts):
            return str.__mod__(self.plain, values)
        pieces = [parts[0]]
        for value, part in zip(given, parts[1:], strict=True):
            pieces += [str(value), part]
        return concatenate(pieces)

    def join(self, values: Iterable[object]) -> str:
        """Return values as texts, with this text between them; Jinja's filter takes all values."""
        pieces: list[str] = []
        for value in values:
            pieces += [self, str(value)]
        return concatenate(pieces[1:])

    def lstrip(self, chars: str | None = None) -> "MarkedText":
        """Return the text without leading characters."""
        text = str.lstrip(self, chars)
        return MarkedText(text, self.mask[len(self) - len(text) :])

    def rstrip(self, chars: str | None = None) -> "MarkedText":
        """Return the text without trailing characters."""
        text = str.rstrip(self, chars)
        return MarkedText(text, self.mask[: len(text)])

    def strip(self, chars: str | None = None) -> "MarkedText":
        """Return the text without leading and trailing characters."""
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> "MarkedText":
        """Return the text without a prefix."""
        text = str.removeprefix(self, prefix)
        return MarkedText(text, self.mask[len(self) - len(text) :])

    def removesuffix(self, suffix: str) -> "MarkedText":
        """Return the text without a suffix."""
        text = str.removesuffix(self, suffix)
        return MarkedText(text, self.mask[: len(text)])

    @overload  # type: ignore[override]
    def split(self, sep: None = None, maxsplit: SupportsIndex = -1) -> list[str]: ...
    @overload
    def split(self, sep: str, maxsplit: SupportsIndex = -1) -> Sequence[str]: ...
    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> Sequence[str]:
        """Return the parts between separators; those between white space are not trusted."""
        parts = str.split(self, sep, maxsplit)
        return parts if sep is None else self._parts(parts, len(sep))

    @overload  # type: ignore[override]
    def rsplit(self, sep: None = None, maxsplit: SupportsIndex = -1) -> list[str]: ...
    @overload
    def rsplit(self, sep: str, maxsplit: SupportsIndex = -1) -> Sequence[str]: ...
    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> Sequence[str]:
        """Return the parts between separators, which are looked for from the end."""
        parts = str.rsplit(self, sep, maxsplit)
        return parts if sep is None else self._parts(parts, len(sep))

    def _parts(self, parts: list[str], gap: int) -> Sequence[str]:
        """Return successive parts of this text, with `gap` characters between them, marked."""
        marked: list[str] = []
        start = 0
        for part in parts:
            end = start + len(part)
            marked.append(MarkedText(part, self.mask[start:end]))
            start = end + gap
        return marked

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        """Return the text with occurrences of `old` replaced.

        What replaces a text that is not trusted is not trusted either, whoever wrote it: a constant
        of the template would otherwise stand wherever a message has `old`.
        """
        if not old:
            return str.replace(self, old, new, count)
        pieces: list[str] = []
        start = 0
        left = count.__index__()
        while left and (position := self.find(old, start)) >= 0:
            end = position + len(old)
            is_trusted = UNTRUSTED not in self.mask[position:end]
            pieces.append(self[start:position])
            pieces.append(new if is_trusted else MarkedText(new))
            start = end
            left -= 1
        return concatenate([*pieces, self[start:]])

    def upper(self) -> "MarkedText":
        """Return the text in upper case."""
        return self._same_length(str.upper(self))

    def lower(self) -> "MarkedText":
        """Return the text in lower case."""
        return self._same_length(str.lower(self))

    def title(self) -> "MarkedText":
        """Return the text with each word capitalized."""
        return self._same_length(str.title(self))

    def capitalize(self) -> "MarkedText":
        """Return the text with its first character in upper case and the rest in lower case."""
        return self._same_length(str.capitalize(self))

    def _same_length(self, text: str) -> "MarkedText":
        """Return the text with this one's mask.

        No character becomes fewer in another case, so that equal lengths mean equal positions. A
        text that is longer is not trusted.
        """
        return MarkedText(text, self.mask if len(text) == len(self) else None)


def trusted(text: str) -> MarkedText:
    """Return a text that counts as the template's."""
    return MarkedText(text, TRUSTED * len(text))


def mask_of(text: str) -> str:
    """Return the mask of any text; a str that is no MarkedText is not trusted."""
    return text.mask if isinstance(text, MarkedText) else UNTRUSTED * len(text)


def concatenate(parts: Sequence[str]) -> str:
    """Join texts; the result is marked if one of them is."""
    text = "".join(parts)
    if not any(isinstance(part, MarkedText) for part in parts):
        return text
    return MarkedText(text, "".join(map(mask_of, parts)))


class MarkedEncoder:
    """Encodes marked texts with a tokenizer.

    The longest name of an added token that is trusted in full becomes its id, from left to right.
    The text between two of them is encoded as one run without special tokens. A name that is
    followed by a message's text is found all the same, even if both together are a longer name.

    Args:
        tokenizer: the tokenizer of the model. Where one of its added tokens has `lstrip` or
            `rstrip`, white space alongside it belongs to the token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {name: token.id for name, token in tokenizer.added_tokens.items()}
        if tokenizer.image_id is not None:
            self._ids[IMAGE] = tokenizer.image_id
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        added = tokenizer.added_tokens.items()
        self._strips_left = {name for name, token in added if token.lstrip}
        self._strips_right = {name for name, token in added if token.rstrip}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; nothing is added before it or after it."""
        plain = text.plain if isinstance(text, MarkedText) else text
        ids: list[int] = []
        start = 0
        for name, position in self._tokens(plain, mask_of(text)):
            before = plain[start:position]
            if name in self._strips_left:
                before = before.rstrip(_SPACES)
            ids += self._encode_plain(before)
            ids.append(self._ids[name])
            start = position + len(name)
            if name in self._strips_right:
                spaces = _LEADING_SPACES.match(plain, start)
                start = spaces.end() if spaces else start
        return ids + self._encode_plain(plain[start:])

    def names_in(self, text: str) -> set[str]:
        """Return the names of the added tokens that the ids of a text contain."""
        plain = text.plain if isinstance(text, MarkedText) else text
        return {name for name, _ in self._tokens(plain, mask_of(text))}

    def _tokens(self, plain: str, mask: str) -> Iterator[tuple[str, int]]:
        """Yield each added token, and its position in the text."""
        for run in _TRUSTED_RUN.finditer(mask):
            for match in self._names.finditer(plain, run.start(), run.end()):
                yield match[0], match.start()

    def _encode_plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, bos=False, eos=False) if text else []
