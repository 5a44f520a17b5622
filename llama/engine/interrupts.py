"""Ctrl-C while a step runs: held back until it has ended, or left to rank 0.

A first Ctrl-C does not break a block off between two statements, so that pages and counts need no
repair. Python runs handlers in the main thread alone: in any other, nothing is to be done.
"""

import contextlib
import threading
from _signal import getsignal, signal  # not through enums, which take 10 us of each token
from collections.abc import Iterator
from signal import SIGINT
from types import FrameType
from typing import Any

from llama.ranks.signals import SIGNALS


class InterruptHeldBack:
    """A block after which Ctrl-C takes effect; a second one does at once."""

    def __enter__(self) -> list[Any]:
        """A list that is empty while none has come."""
        self._held: list[tuple[int, FrameType | None]] = []
        handler = _handler()
        self._before: Any = None if SIGNALS.is_own(handler) else handler
        if self._before is not None:
            signal(SIGINT, self._hold)
        return self._held

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._before is not None:
            signal(SIGINT, self._before)
            if kind is None and len(self._held) == 1:
                self._before(*self._held[0])

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))
        if len(self._held) > 1:
            self._before(number, frame)


@contextlib.contextmanager
def interrupt_ignored() -> Iterator[None]:
    """Ctrl-C in a terminal reaches every rank: rank 0 decides what it means."""
    handler = _handler()
    if handler is not None:
        signal(SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        if handler is not None:
            signal(SIGINT, handler)


def _handler() -> Any:
    """The present handler of SIGINT, if it is one of Python's that runs in this thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = getsignal(SIGINT)
    return handler if callable(handler) else None
