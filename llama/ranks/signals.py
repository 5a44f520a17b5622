"""SIGTERM and SIGINT, read by a thread, as Python's own handlers wait while a rank is inside C++.

In: signals, and whether the command wants to finish what runs. Out: `stop_requested`, and the bytes
of a pipe for the thread that reads it. What a program installed for a signal before stays as it is.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

DRAIN_S = 20.0  # for running requests to finish after a signal; torchrun waits 30 and then kills
_SAME_S = 0.5  # a signal so soon after the first is the same one, come by another way


class Signals:
    """What came, and what to do about it. There is one object per process, as for signals."""

    def __init__(self) -> None:
        self.read_end = -1  # of a pipe: one byte per signal
        self.stop_since: float | None = None
        # Set before `connect`: the first signal asks to finish what runs, which is ended so many
        # seconds later; a second signal ends it at once. None: the first one does.
        self.drain_s: float | None = None
        self.has_begun = False  # what it runs; before that, there is nothing to finish
        self.is_server = False  # then a SIGTERM before that ends it in order
        self.on_stop: Callable[[], None] | None = None  # for a main thread that waits for input
        self._write_end = -1
        self._before: dict[int, object] = {}

    def install(self) -> None:
        """Take over the signals that nobody has taken; nothing, in a thread other than the main."""
        if threading.current_thread() is not threading.main_thread() or self._before:
            return
        self.read_end, self._write_end = os.pipe()  # macOS has no pipe2
        for end in (self.read_end, self._write_end):
            os.set_blocking(end, False)
        before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        if before != -1:  # of an event loop, which stays
            signal.set_wakeup_fd(before)
        for number, default in (
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGINT, signal.default_int_handler),
        ):
            is_wanted = number == signal.SIGTERM or self.drain_s is not None
            if is_wanted and signal.getsignal(number) in (default, self._take):
                self._before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Give the signals back, as they were."""
        if threading.current_thread() is not threading.main_thread() or not self._before:
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)  # type: ignore[arg-type]
        self._before.clear()
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._write_end):
            signal.set_wakeup_fd(before)
        os.close(self.read_end)
        os.close(self._write_end)
        self.read_end = self._write_end = -1

    def read(self) -> list[int]:
        """The signals of ours that came since the last call; empty if the pipe had none."""
        try:
            numbers = os.read(self.read_end, 64)
        except OSError:
            return []
        return [n for n in numbers if self.is_own(signal.getsignal(n))]

    def is_own(self, handler: object) -> bool:
        """Whether a signal's handler is the one that `install` gave it. It never raises."""
        return handler == self._handle

    def note(self) -> int:
        """Which one a signal that came now is: 1 or 2. 0 is the first one again, by another way."""
        now = time.monotonic()
        if self.stop_since is None:
            self.stop_since = now
            return 1
        return 2 if now - self.stop_since > _SAME_S else 0

    @property
    def is_time_over(self) -> bool:
        """Whether a signal came so long ago that what still runs is to be ended."""
        since, limit_s = self.stop_since, self.drain_s
        return since is not None and limit_s is not None and time.monotonic() - since > limit_s

    @contextlib.contextmanager
    def taken_alone(self, *numbers: int, is_server: bool = False) -> Iterator[None]:
        """In a process without ranks, these ask to finish what runs; a second one ends it."""
        self.is_server = is_server
        before = {number: signal.signal(number, self._take) for number in numbers}
        try:
            yield
        finally:
            self.is_server = False
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.is_server and not self.has_begun:
            os._exit(0)
        if self.note() == 2:
            sys.exit(128 + number)  # as a shell has it; what was opened is closed on the way
        if self.on_stop is not None:
            self.on_stop()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The main thread is out of C++: of use where an event loop took the wake-up pipe."""
        if self._write_end >= 0:
            os.write(self._write_end, bytes([number]))
        if self.on_stop is not None:
            self.on_stop()


SIGNALS = Signals()


def stop_requested() -> bool:
    """Whether a signal asked this rank to finish what runs, and to start nothing new."""
    return SIGNALS.stop_since is not None
