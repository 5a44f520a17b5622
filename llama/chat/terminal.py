"""The keyboard and the screen of a chat: turns of input in; answers, and notes about them, out.

On a terminal there are prompts, line editing and notes dimmed among the answers. In a pipe, stdout
is the answers and nothing else. It knows neither commands nor the model.

While an answer streams, Ctrl-C is a byte to be read and no signal: torchrun's own process would get
the signal too, and end all ranks.
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
from typing import Any, TextIO

FENCE = '"""'
PROMPT, MORE = "> ", ". "
_CTRL_C = b"\x03"
_DIM = "\x1b[2m{}\x1b[0m"
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.|.)?|[\x00-\x07\x09\x0b-\x1f]")
_ERASED = re.compile(r"[^\n]?[\x08\x7f]")  # a character and the backspace after it
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def read_turn(read_line: Callable[[str], str]) -> str:
    """One turn: a line, lines that a backslash continues, or a text between two lines of quotes.

    Such a text is a question, whatever it begins with. EOFError where input has ended before it;
    a turn that the end cuts short is taken as it is.
    """
    lines = read_line(PROMPT).split("\n")  # what is pasted may be several
    fenced = lines[0].strip() == FENCE
    with contextlib.suppress(EOFError):
        while fenced and (len(lines) < 2 or lines[-1].strip() != FENCE):
            lines += read_line(MORE).split("\n")
        while not fenced and lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines += read_line(MORE).split("\n")
    if not fenced:
        return "\n".join(lines)
    inner = "\n".join(line for line in lines if line.strip() != FENCE).strip()
    return "/" + inner if inner.startswith("/") else inner


class Terminal:
    """Standard input and output, within `open`; of several `ranks`, rank 0's."""

    def __init__(self, ranks: int = 1) -> None:
        self.keyboard = sys.stdin.isatty()
        self.screen = self.keyboard and sys.stdout.isatty()
        self._dims = self.screen and not os.environ.get("NO_COLOR")
        self._ranks = ranks
        self._ahead = ""  # typed during an answer, for the next prompts
        self._reading = self._pressed = False  # a line, and Ctrl-C
        self._readline: ModuleType | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Take the terminal over; whatever ends the block, it is given back as it was."""
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        if not self.keyboard:
            yield
            return
        before = termios.tcgetattr(0)

        def die(number: int, _: FrameType | None) -> None:
            _restore(before)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        handlers = {signal.SIGTERM: die, signal.SIGINT: self._interrupt}
        replaced = {number: signal.signal(number, new) for number, new in handlers.items()}
        try:
            if self._ranks > 1:
                _unsignal(lines=True)
            if self.screen:
                self._readline = _line_editing()
            yield
        finally:
            _restore(before)
            for number, old in replaced.items():
                signal.signal(number, old)

    def read_line(self, prompt: str) -> str:
        """One line. EOFError at the end of input, KeyboardInterrupt for Ctrl-C."""
        typed, enter, self._ahead = self._ahead.partition("\n")
        if enter:
            print(prompt + typed, file=self._aside, flush=True)
            return typed
        self._reading, self._pressed = True, False
        try:
            line = self._input(prompt, typed)
        except (EOFError, KeyboardInterrupt):
            if self.keyboard:
                print(file=self._aside)
            raise
        finally:
            self._reading = False
        if _CTRL_C.decode() in line:
            raise KeyboardInterrupt
        return line

    def _input(self, prompt: str, typed: str) -> str:
        """A line from whatever stdin is; on a terminal it begins with what was `typed` before."""
        readline = self._readline
        if readline is None:
            if self.keyboard:
                print(prompt + typed, end="", file=self._aside, flush=True)
            return typed + input()
        readline.set_startup_hook(lambda: readline.insert_text(typed))
        line = input(prompt)
        if line.strip() and _CTRL_C.decode() not in line:
            readline.add_history(line)
        return line

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Ctrl-C as a signal: ends the reading of a line, or is seen by who watches for it."""
        self._pressed = True
        if self._reading:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def watch(self) -> Iterator[Callable[[], bool]]:
        """For the time of an answer: gives a function that tells whether Ctrl-C was pressed."""
        if not self.keyboard:
            yield lambda: False
            return
        typed = b""

        def pressed() -> bool:
            nonlocal typed
            typed += _keys()
            self._pressed = self._pressed or _CTRL_C in typed
            return self._pressed

        before = termios.tcgetattr(0)
        _unsignal(lines=False)
        try:
            yield pressed
        finally:
            pressed()  # takes the last keys
            self._ahead += _text_of(typed)
            self._pressed = False
            _restore(before)

    def write(self, text: str) -> None:
        """A piece of an answer, at once; on a screen, without what could steer the terminal."""
        sys.stdout.write(_CONTROL.sub("\ufffd", text) if self.screen else text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line or more about the chat: dimmed on a screen, else on stderr."""
        text = _CONTROL.sub("\ufffd", text)
        print(_DIM.format(text) if self._dims else text, file=self._aside, flush=True)

    @property
    def _aside(self) -> TextIO:
        """Where all goes that is no answer."""
        return sys.stdout if self.screen else sys.stderr


def _unsignal(*, lines: bool) -> None:
    """Make Ctrl-C and Ctrl-Z mere bytes; unless `lines`, no key waits for Enter or is echoed."""
    mode = termios.tcgetattr(0)
    off = bytes([os.fpathconf(0, "PC_VDISABLE")])
    mode[6][termios.VINTR] = mode[6][termios.VSUSP] = off
    if not lines:
        mode[3] &= ~(termios.ICANON | termios.ECHO)
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
    termios.tcsetattr(0, termios.TCSANOW, mode)


def _restore(mode: list[Any]) -> None:
    with contextlib.suppress(termios.error):  # a terminal that is gone needs nothing
        termios.tcsetattr(0, termios.TCSANOW, mode)


def _keys() -> bytes:
    """What was typed since last time, without waiting; of a terminal that is gone, Ctrl-C."""
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


def _text_of(typed: bytes) -> str:
    """Typed keys as a line editor would leave them: after the last Ctrl-C, without other keys."""
    text = _ESCAPES.sub("", typed.rpartition(_CTRL_C)[2].decode(errors="ignore"))
    while _ERASED.search(text):
        text = _ERASED.sub("", text, count=1)
    return text


def _line_editing() -> ModuleType | None:
    """Have `input` edit lines and remember them, in memory only; None where Python cannot."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_auto_history(False)
    # Where Ctrl-C is no signal, it empties the line, puts itself there and enters that.
    readline.parse_and_bind(r'"\C-c": "\C-a\C-k\C-v\C-c\C-m"')
    return readline
