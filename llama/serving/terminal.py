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

FENCE = '"""'
PROMPT, MORE = "> ", ". "
_CTRL_C = "\x03"
_DIM = "\x1b[2m{}\x1b[0m"
_KEYS = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.|.)?|[\x00-\x09\x0b-\x1f\x7f]")  # but for Enter
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tab and newline


def read_turn(read_line: Callable[[str], str]) -> str:
    r"""One turn: a line; lines that a \ at the end continues; or a text between two lines of \"\"\".

    Such a text is a question, whatever it begins with. EOFError where input has ended before it;
    a turn that the end cuts short is taken as it is.
    """
    lines = read_line(PROMPT).split("\n")  # what is pasted may be several
    with contextlib.suppress(EOFError):
        if lines[0].strip() != FENCE:
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines += read_line(MORE).split("\n")
            return "\n".join(lines)
        while len(lines) < 2 or lines[-1].strip() != FENCE:
            lines += read_line(MORE).split("\n")
    if lines[0].strip() != FENCE:
        return "\n".join(lines)
    inner = "\n".join(line for line in lines[1:] if line.strip() != FENCE).strip()
    return "/" + inner if inner.startswith("/") else inner


class Terminal:
    """Use it within `open`; `ranks` is how many processes the terminal's signals would reach."""

    def __init__(self, ranks: int = 1) -> None:
        self.keyboard = sys.stdin.isatty()
        self.screen = self.keyboard and sys.stdout.isatty()
        self._colours = self.screen and not os.environ.get("NO_COLOR")
        self._ranks = ranks
        self._typed = ""  # during an answer, for the next prompt
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
            termios.tcsetattr(0, termios.TCSANOW, before)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        handler = signal.signal(signal.SIGTERM, die)
        try:
            if self._ranks > 1:
                _set_mode(signals=False)
            if self.screen:
                self._readline = _edit_lines()
            yield
        finally:
            termios.tcsetattr(0, termios.TCSANOW, before)
            signal.signal(signal.SIGTERM, handler)

    def read_line(self, prompt: str) -> str:
        """One line. EOFError at the end of input, KeyboardInterrupt for Ctrl-C."""
        line, enter, rest = self._typed.partition("\n")
        self._typed = rest
        if enter:
            self._write(f"{prompt}{line}\n")
            return line
        if self._readline:
            self._readline.set_startup_hook(lambda: self._readline.insert_text(line))
        elif self.keyboard:
            print(prompt + line, end="", file=sys.stderr, flush=True)
        found = input(prompt if self.screen else "")
        if _CTRL_C in found:
            raise KeyboardInterrupt
        if self._readline and found.strip():
            self._readline.add_history(found)
        return found

    @contextlib.contextmanager
    def watch(self) -> Iterator[Callable[[], bool]]:
        """For the time of an answer: gives a function that tells whether Ctrl-C was pressed."""
        if not self.keyboard:
            yield lambda: False
            return
        pressed = False

        def look() -> bool:
            nonlocal pressed
            keys = _keys()
            pressed = pressed or _CTRL_C in keys
            self._typed += _KEYS.sub("", keys)
            return pressed

        def press(number: int, frame: FrameType | None) -> None:
            nonlocal pressed
            pressed = True

        before = termios.tcgetattr(0)
        handler = signal.signal(signal.SIGINT, press)  # one that comes all the same
        _set_mode(signals=False, lines=False)
        try:
            yield look
            look()
        finally:
            termios.tcsetattr(0, termios.TCSANOW, before)
            signal.signal(signal.SIGINT, handler)
