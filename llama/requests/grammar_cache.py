"""The compiled grammars that were used last, up to a number and a size.

In: grammars that were compiled for a format and a prefix root. Out: the same ones, while they are
kept. It knows neither tokens nor how a format is compiled.
"""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from llama.sampling_params import StructuredOutput

_T = TypeVar("_T")
_Key = tuple[bytes, StructuredOutput]  # a prefix root and a format
_MAX_GRAMMARS = 256
_MAX_CHARACTERS = 1_000_000  # 100,000 of a choice take 2.4 MB once they are compiled


class GrammarCache(Generic[_T]):
    """The compiled grammars of one tokenizer, for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grammars: OrderedDict[_Key, _T] = OrderedDict()
        self._num_characters = 0

    def get(self, key: _Key) -> _T | None:
        """Return what was compiled for a root and a format, if it is still here."""
        with self._lock:
            if key in self._grammars:
                self._grammars.move_to_end(key)
            return self._grammars.get(key)

    def add(self, key: _Key, grammar: _T) -> None:
        """Keep a compiled grammar, and drop the ones that were used before all others."""
        with self._lock:
            if key not in self._grammars:
                self._num_characters += _num_characters(key)
            self._grammars[key] = grammar
            while len(self._grammars) > _MAX_GRAMMARS or self._num_characters > _MAX_CHARACTERS:
                oldest, _ = self._grammars.popitem(last=False)
                self._num_characters -= _num_characters(oldest)


def _num_characters(key: _Key) -> int:
    """Return about how many characters a format has."""
    return len(repr(key[1]))
