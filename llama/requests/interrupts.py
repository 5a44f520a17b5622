"""Ctrl-C while a step runs: deferred until the step has ended, or left to rank 0.

A first Ctrl-C does not interrupt a block between two statements, so that pages and counts need no
repair. Python runs signal handlers in the main thread only, so other threads need nothing.
"""

import contextlib
import threading
from _signal import getsignal, signal  # the enums of `signal` would cost 10 us per token
from collections.abc import Iterator
from signal import SIGINT
from types import FrameType
from typing import Any

from llama.ranks.signals import SIGNALS


class DeferredInterrupt:
    """A block that defers Ctrl-C to its end; a second Ctrl-C takes effect at once."""

    def __enter__(self) -> list[Any]:
        """Return the list of the signals so far, which is empty while none has come."""
        self._deferred: list[tuple[int, FrameType | None]] = []
        handler = _handler()
        self._before: Any = None if SIGNALS.is_own(handler) else handler
        if self._before is not None:
            signal(SIGINT, self._defer)
        return self._deferred

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._before is not None:
            signal(SIGINT, self._before)
            if kind is None and len(self._deferred) == 1:
                self._before(*self._deferred[0])

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._deferred.append((number, frame))
        if len(self._deferred) > 1:
            self._before(number, frame)


@contextlib.contextmanager
def interrupt_ignored() -> Iterator[None]:
    """Ignore Ctrl-C in the block: a terminal sends it to every rank, and rank 0 decides."""
    handler = _handler()
    if handler is not None:
        signal(SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        if handler is not None:
            signal(SIGINT, handler)


def _handler() -> Any:
    """Return the current handler of SIGINT, if it is a Python function run by this thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = getsignal(SIGINT)
    return handler if callable(handler) else None
