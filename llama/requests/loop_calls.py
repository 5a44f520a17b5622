"""Calls that one thread asks an event loop to make: the loop wakes up once for all that wait.

In: functions, from the thread of the engine. Out: their calls, in the event loop. To wake a loop is
a system call, and the step of an engine has outputs for many streams.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable


class LoopCalls:
    """The calls that wait for one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_waking = False

    def add(self, call: Callable[[], None]) -> None:
        """Let the loop call a function, which must not raise; one thread at a time does this."""
        self._waiting.append(call)
        if not self._is_waking:
            self._is_waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody reads
                self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._is_waking = False  # Before the queue is read, or a call that comes now would be lost.
        while self._waiting:
            self._waiting.popleft()()
