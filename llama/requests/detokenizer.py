"""Incremental decoding of token ids: no piece has half a character or a part of a stop string.

In: the ids of one answer, in any portions. Out: pieces of text that, joined, are its text.
"""

import codecs
import copy
from collections.abc import Sequence

from llama.tokenizer import Tokenizer


class Detokenizer:
    """Incremental `tokenizer.decode`; the pieces of `push` and `flush` joined are its text."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._hidden = tokenizer.hidden_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def fork(self) -> "Detokenizer":
        """Return a copy, for one of several texts that continue this one."""
        twin = copy.copy(self)
        twin._decoder = copy.copy(self._decoder)
        return twin

    def push(self, ids: Sequence[int]) -> str:
        """Take more ids and return all whole characters; up to three bytes are kept."""
        return self._decoder.decode(
            b"".join([self._bytes_of[i] for i in ids if i not in self._hidden])
        )

    def flush(self) -> str:
        """Return the kept text at the end, with U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Ends a text at the stop string that is complete first, however the text is cut into pieces.

    Of several stop strings that end at the same character, the longest one counts. No stop string
    is empty: `SamplingParams` has checked them.

    Attributes:
        stopped: The stop string that ended the text; None before that.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._pending = ""  # text that may be the beginning of a stop string
        self.stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text and return the text that can be no part of a stop string any more.

        The second value is the stop string that ended the text, or None. Text after it is dropped.
        """
        if not self._stops:
            return text, None
        if self.stopped is not None:
            return "", self.stopped
        text = self._pending + text
        # The minimum of (end, start, stop) is complete first, and of those the longest.
        starts = [(text.find(stop), stop) for stop in self._stops]
        hits = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if hits:
            end, start, self.stopped = min(hits)
            self._pending = ""
            return text[: end if self._include else start], self.stopped
        keep = open_suffix(text, self._stops)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Return the kept text at the end, when no stop string can be completed."""
        text = self._pending
        self._pending = ""
        return text


def open_suffix(text: str, strings: Sequence[str]) -> int:
    """Return the length of the text's longest suffix that begins one of the strings."""
    longest = max(map(len, strings), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-n:]) for string in strings):
            return n
    return 0
