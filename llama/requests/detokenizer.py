"""Token ids to text, incrementally: no piece has half a character or a part of a stop string.

In: the ids of one answer, in any portions. Out: pieces of text that, joined, are its text.
"""

import codecs
from collections.abc import Sequence

from llama.tokenizer import Tokenizer


class Detokenizer:
    """Incremental `tokenizer.decode`: joined, the pieces of `push` and `flush` are its text."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Take more ids; return all whole characters. Up to three bytes are held back."""
        skip = self._skip_special_tokens
        return self._decoder.decode(self._tokenizer.decode_bytes(ids, skip_special_tokens=skip))

    def flush(self) -> str:
        """At the end: return the text held back, U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Ends a text at the stop string that is complete first, wherever the borders of the pieces
    are; of several that end at the same character, at the longest one. include: the text ends with
    it, not before it. No stop string is empty: `SamplingParams` has checked them."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; return what can be no part of a stop string any more, and the one that
        was found, if any. After that, all text is dropped."""
        if self.stopped is not None:
            return "", self.stopped
        text = self._held + text
        # (end, start, stop): the minimum is complete first, and of those the longest
        hits = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if hits:
            end, start, self.stopped = min(hits)
            self._held = ""
            return text[: end if self._include else start], self.stopped
        keep = self._open_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """At the end: return the text held back, which no stop string can follow."""
        text, self._held = self._held, ""
        return text

    def _open_suffix(self, text: str) -> int:
        """The length of the longest suffix that is the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
