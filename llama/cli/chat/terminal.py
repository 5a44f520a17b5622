"""The keyboard and the screen of a chat. In: what is typed. Out: answers, and notes about them.

While an answer is shown, Ctrl-C is read as a byte and is not a signal: torchrun's own process would
get the signal too, and end all ranks.
"""

import contextlib
import io
import os
import re
import select
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

from llama.ranks.signals import SIGNALS, stop_requested
from llama.ranks.watch import Watch

QUOTES = '"""'
PROMPT, MORE = "> ", ". "
_CTRL_C = b"\x03"
_DIM = "\x1b[2m{}\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def read_turn(read_line: Callable[[str], str]) -> str:
    """One text: a line, lines that a backslash continues, or the lines between two lines of quotes,
    which are always a question. EOFError if the input has ended, and not within a text."""
    lines = read_line(PROMPT).split("\n")  # pasted text can have several lines
    quoted = lines[0].strip() == QUOTES
    with contextlib.suppress(EOFError):
        while quoted and (len(lines) < 2 or lines[-1].strip() != QUOTES):
            lines += read_line(MORE).split("\n")
        while not quoted and lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines += read_line(MORE).split("\n")
    if not quoted:
        return "\n".join(lines)
    inner = "\n".join(line for line in lines if line.strip() != QUOTES).strip()
    return "/" + inner if inner.startswith("/") else inner


class Terminal:
    """Standard input and output, to be used within `open`. watch: where there are several ranks."""

    def __init__(self, watch: Watch | None = None) -> None:
        self.keyboard = sys.stdin.isatty()
        self.screen = self.keyboard and sys.stdout.isatty()
        self._notes = sys.stdout if self.screen else sys.stderr  # for all that is not an answer
        self._dim_notes = self.screen and not os.environ.get("NO_COLOR")
        self._watch = watch
        self._reading = self._pressed = False  # a line is being read; Ctrl-C was pressed
        self._readline: ModuleType | None = None
        self.stops = False  # SIGTERM came: nothing new is asked

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Set the terminal up; restore its mode at the end. SIGTERM ends the chat."""
        with contextlib.ExitStack() as stack:
            if self._watch is None:  # else the watch gets the signal, and tells this rank
                stack.enter_context(SIGNALS.taken_alone(signal.SIGTERM))
            SIGNALS.on_stop = self._stop
            stack.callback(setattr, SIGNALS, "on_stop", None)
            self.stops = stop_requested()  # it came while the model was loaded
            for stream in (sys.stdin, sys.stdout):
                if isinstance(stream, io.TextIOWrapper):
                    stream.reconfigure(errors="replace")
            if self.keyboard:
                self._take_keyboard(stack)
            yield

    def _take_keyboard(self, stack: contextlib.ExitStack) -> None:
        before, handler = termios.tcgetattr(0), signal.signal(signal.SIGINT, self._interrupt)
        stack.callback(signal.signal, signal.SIGINT, handler)
        stack.callback(_restore, before)
        if self._watch is not None:
            # Where another rank fails, the watch ends this process from a thread.
            self._watch.before_end.append(lambda: _restore(before))
            stack.callback(self._watch.before_end.clear)
            _disable_signal_read_keys(lines=True)
        if self.screen:
            self._readline = _load_readline()

    def _stop(self) -> None:
        self.stops = True
        if self._reading:
            raise EOFError

    def check_drain(self) -> None:
        """TimeoutError where the answer takes too long after a signal; for ranks the watch does."""
        if self._watch is None and SIGNALS.is_time_over:
            limit_s = SIGNALS.drain_s
            raise TimeoutError(f"the answer did not finish within {limit_s:g} s: it was ended")

    def read_line(self, prompt: str) -> str:
        """One line. EOFError at the end of input, KeyboardInterrupt for Ctrl-C."""
        self._reading, self._pressed = True, False
        try:
            if self.stops:
                raise EOFError
            line = self._input(prompt)
        except (EOFError, KeyboardInterrupt):
            if self.keyboard:
                print(file=self._notes)
            raise
        finally:
            self._reading = False
        if _CTRL_C.decode() in line:
            raise KeyboardInterrupt
        return line

    def _input(self, prompt: str) -> str:
        if self._readline is None:
            if self.keyboard:
                print(prompt, end="", file=self._notes, flush=True)
            return input()
        line = input(prompt)
        if line.strip() and _CTRL_C.decode() not in line:
            self._readline.add_history(line)
        return line

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Ctrl-C as a signal: end the reading of a line, or let `watch` see it."""
        self._pressed = True
        if self._reading:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def watch(self) -> Iterator[Callable[[], bool]]:
        """While an answer is shown: yields what tells if Ctrl-C was pressed; drops other keys."""
        if not self.keyboard:
            yield lambda: False
            return

        def pressed() -> bool:
            self._pressed = _CTRL_C in _read_keys() or self._pressed
            return self._pressed

        before = termios.tcgetattr(0)
        _disable_signal_read_keys(lines=False)
        try:
            yield pressed
        finally:
            pressed()  # takes the last keys
            self._pressed = False
            _restore(before)

    def write(self, text: str) -> None:
        """Show a piece of an answer at once. On a screen, control characters become U+FFFD."""
        sys.stdout.write(_CONTROL.sub("\ufffd", text) if self.screen else text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Show lines about the chat: dimmed on a screen, else on stderr."""
        text = _CONTROL.sub("\ufffd", text)
        print(_DIM.format(text) if self._dim_notes else text, file=self._notes, flush=True)


def _disable_signal_read_keys(*, lines: bool) -> None:
    """Make Ctrl-C and Ctrl-Z bytes. If not `lines`, keys come at once and are not echoed."""
    mode = termios.tcgetattr(0)
    off = bytes([os.fpathconf(0, "PC_VDISABLE")])
    mode[6][termios.VINTR] = mode[6][termios.VSUSP] = off
    if not lines:
        mode[3] &= ~(termios.ICANON | termios.ECHO)
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
    termios.tcsetattr(0, termios.TCSANOW, mode)


def _restore(mode: list[Any]) -> None:
    with contextlib.suppress(termios.error):  # the terminal is gone
        termios.tcsetattr(0, termios.TCSANOW, mode)


def _read_keys() -> bytes:
    """The keys typed since the last call, without waiting. Ctrl-C if the terminal is gone."""
    keys = b""
    try:
        while select.select([0], [], [], 0)[0]:
            chunk = os.read(0, 4096)
            if not chunk:
                return keys + _CTRL_C
            keys += chunk
    except OSError:
        return keys + _CTRL_C
    return keys


def _load_readline() -> ModuleType | None:
    """Give `input` line editing, and a history in memory. None if Python has no readline."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_auto_history(False)
    # Where Ctrl-C is not a signal: empty the line, insert the Ctrl-C itself, and enter it.
    readline.parse_and_bind(r'"\C-c": "\C-a\C-k\C-v\C-c\C-m"')
    return readline
