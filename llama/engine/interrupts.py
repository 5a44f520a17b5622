"""Ctrl-C while a step runs: held back until it has ended, or left to rank 0.

In: a block. Out: the same block, which a first Ctrl-C does not break off between two statements, so
that pages and counts need no repair. It knows neither sequences nor ranks. Python runs handlers in
the main thread alone: in any other, nothing is to be done.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from llama.ranks.signals import SIGNALS


@contextlib.contextmanager
def interrupt_held_back() -> Iterator[list[Any]]:
    """Ctrl-C takes effect after the block, and a second one at once. The list is empty before."""
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1:
            handler(number, frame)

    handler = _handler()
    if handler is None or SIGNALS.is_own(handler):
        yield held
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, handler)
    if len(held) == 1:
        handler(*held[0])


@contextlib.contextmanager
def interrupt_ignored() -> Iterator[None]:
    """Ctrl-C in a terminal reaches every rank: rank 0 decides what it means."""
    handler = _handler()
    if handler is None:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _handler() -> Any:
    """The present handler of SIGINT, if it is one of Python's that runs in this thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGINT)
    return handler if callable(handler) else None
