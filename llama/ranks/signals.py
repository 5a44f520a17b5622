"""SIGTERM and SIGINT, read by a thread, as Python's handlers do not run while a rank is inside C++.

In: signals, and whether the command wants to finish running work. Out: `stop_requested`, and the
bytes of a pipe for the thread that reads it. Handlers that a program has installed before stay. It
must not know what the work is.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

DRAIN_S = 20.0  # time for running requests to finish after a signal; torchrun kills after 30 s
_SAME_SIGNAL_S = 0.5  # a signal so soon after the first is the same one, delivered twice


class Signals:
    """The signals that this process has received; there is one object per process.

    Attributes:
        read_end: the read end of a pipe with one byte per signal; -1 before `install`.
        stop_since: when the first signal came.
        drain_s: time in which running work may finish after the first signal; a second signal ends
            it at once. None: the first signal ends it. It must be set before `connect`.
        has_begun: whether work has begun; before, there is nothing to finish.
        is_server: whether SIGTERM before the work has begun ends the process with exit code 0.
        on_stop: called at a signal, for a main thread that waits for input.
    """

    def __init__(self) -> None:
        self.read_end = -1
        self.stop_since: float | None = None
        self.drain_s: float | None = None
        self.has_begun = False
        self.is_server = False
        self.on_stop: Callable[[], None] | None = None
        self._write_end = -1
        self._before: dict[int, object] = {}

    def install(self) -> None:
        """Install handlers for the signals that have none; only the main thread can."""
        if threading.current_thread() is not threading.main_thread() or self._before:
            return
        self.read_end, self._write_end = os.pipe()  # macOS has no pipe2
        for end in (self.read_end, self._write_end):
            os.set_blocking(end, False)
        before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        if before != -1:  # the pipe of an event loop stays
            signal.set_wakeup_fd(before)
        for number, default in (
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGINT, signal.default_int_handler),
        ):
            is_wanted = number == signal.SIGTERM or self.drain_s is not None
            if is_wanted and signal.getsignal(number) in (default, self._take):
                self._before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Restore the handlers of before."""
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
        """Return the signals since the last call whose handlers `install` has installed."""
        try:
            received = os.read(self.read_end, 64)
        except OSError:
            return []
        return [n for n in received if self.is_own(signal.getsignal(n))]

    def is_own(self, handler: object) -> bool:
        """Return whether `install` has installed this handler; it never raises."""
        return handler == self._handle

    def note(self) -> int:
        """Record a signal that has just come.

        Returns:
            1 for the first signal, 2 for a second one, and 0 for the first one delivered again.
        """
        now = time.monotonic()
        if self.stop_since is None:
            self.stop_since = now
            return 1
        return 2 if now - self.stop_since > _SAME_SIGNAL_S else 0

    @property
    def is_time_over(self) -> bool:
        """Whether the first signal came longer than `drain_s` ago."""
        if self.stop_since is None or self.drain_s is None:
            return False
        return time.monotonic() - self.stop_since > self.drain_s

    @contextlib.contextmanager
    def taken_alone(self, *signals: int, is_server: bool = False) -> Iterator[None]:
        """Handle these signals in a process without ranks.

        The first signal asks to finish running work, and a second one ends it.
        """
        self.is_server = is_server
        before = {number: signal.signal(number, self._take) for number in signals}
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
            sys.exit(128 + number)  # the exit code of shells; open files are closed on the way
        if self.on_stop is not None:
            self.on_stop()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread, in case an event loop has taken the wake-up pipe."""
        if self._write_end >= 0:
            os.write(self._write_end, bytes([number]))
        if self.on_stop is not None:
            self.on_stop()


SIGNALS = Signals()


def stop_requested() -> bool:
    """Return whether a signal has asked to finish running work and to start nothing new."""
    return SIGNALS.stop_since is not None
