"""Text as it comes: ids in, pieces of text out, with no half character and no stop string in them.

Joined, the pieces are what the whole would be: where a token or a character ends shows nowhere.
"""

import codecs
from collections.abc import Sequence

from llama.tokenizer import Tokenizer


class Detokenizer:
    """Text from ids as they come, never with half a character in it.

    All that `push` and `flush` return, joined, is `tokenizer.decode` of all ids. Raises as
    `decode_bytes` does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Take more ids; return the text that is certain, holding back up to three bytes."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def flush(self) -> str:
        """End the stream: return the text held back, U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Ends a text at the first stop string in it, however the text is cut into pieces.

    The stop string that is complete first wins; of several that end at the same character, the
    longest. So where the text ends does not depend on token borders, and no stop string is ever in
    it; with `include`, the one that ended it is its end.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
            raise TypeError(f"stop strings must be a list of str, got {stops!r:.60}")
        if "" in stops:
            raise ValueError("a stop string is empty, and would stop every text: leave it out")
        self._stops = list(stops)
        self._include = include
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; return what is certain of it, and the stop string found, if any.

        Once stopped, all further text is dropped.
        """
        if self.stopped is not None:
            return "", self.stopped
        text = self._held + text
        # (end, start, stop): the least is the one complete first, then the longest
        hits = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if hits:
            end, start, self.stopped = min(hits)
            self._held = ""
            return text[: end if self._include else start], self.stopped
        keep = self._open_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """End the stream: return the text held back, since no stop string can follow."""
        text, self._held = self._held, ""
        return text

    def _open_suffix(self, text: str) -> int:
        """Return the length of the longest suffix that may yet grow into a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
