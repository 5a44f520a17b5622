"""The keyboard and the screen of a chat.

The input is what the user types; the output is answers, and notes about them. While an answer is
shown, Ctrl-C is read as a byte instead of being a signal, because torchrun's own process would get
the signal too and end all ranks.
"""

import contextlib
import io
import os
import re
import select
import shutil
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from llama.api import SIGNALS, Watch, stop_requested
from llama.cli.chat.completion import complete
from llama.cli.chat.line_editor import LineEditor
from llama.cli.chat.word_wrap import WordWrap

QUOTES = '"""'
PROMPT = "> "
MORE = ". "  # prompt of a continuation line
_CTRL_C = b"\x03"
_END_BRACKETED_PASTE = b"\x1b[?2004l"
_ERASE_LINE = "\x1b[K"  # control sequence that erases the rest of a line
_DIM = "\x1b[2m{}\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all except tab and newline
_LOCAL_FLAGS = 3  # index of lflag in termios' list of attributes
_CONTROL_CHARS = 6  # index of cc


def read_turn(read_line: Callable[[str], str]) -> str:
    """Read one text.

    A text is a line, lines that a backslash continues, or the lines between two lines of quotes,
    which are always a question.

    Args:
        read_line: Reads a line after showing the prompt that it is given.

    Raises:
        EOFError: The input ended before the text began.
    """
    lines = read_line(PROMPT).split("\n")  # Pasted text can have several lines.
    is_quoted = lines[0].strip() == QUOTES
    with contextlib.suppress(EOFError):
        while is_quoted and (len(lines) < 2 or lines[-1].strip() != QUOTES):
            lines += read_line(MORE).split("\n")
        while not is_quoted and lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines += read_line(MORE).split("\n")
    if not is_quoted:
        return "\n".join(lines)
    text = "\n".join(line for line in lines if line.strip() != QUOTES).strip()
    return "/" + text if text.startswith("/") else text


class Terminal:
    """Standard input and output of a chat, to be used within `open`."""

    def __init__(self, watch: Watch | None = None, history: Path | None = None) -> None:
        """Look at the standard streams.

        Args:
            watch: The watch of this rank, if there are several ranks.
            history: The file that keeps what a person types; None: it is not kept.
        """
        self.keyboard = sys.stdin.isatty()
        self.screen = self.keyboard and sys.stdout.isatty()
        self._notes = sys.stdout if self.screen else sys.stderr  # receives all except answers
        self._dim_notes = self.screen and not os.environ.get("NO_COLOR")
        self._watch = watch
        self._reading = False  # A line is being read.
        self._pressed = False  # Ctrl-C was pressed.
        self._history = history
        self._editor: LineEditor | None = None
        self._reasoning = ""  # what the line of `write_reasoning` shows
        self._wrap = WordWrap()
        self.stops = False  # SIGTERM has come, so that no further question is asked.

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Set the terminal up, and restore its mode at the end. SIGTERM ends the chat."""
        with contextlib.ExitStack() as stack:
            if self._watch is None:  # With several ranks the watch gets the signal.
                stack.enter_context(SIGNALS.taken_alone(signal.SIGTERM))
            SIGNALS.on_stop = self._stop
            stack.callback(setattr, SIGNALS, "on_stop", None)
            self.stops = stop_requested()  # The signal may have come while the model was loaded.
            for stream in (sys.stdin, sys.stdout):
                if isinstance(stream, io.TextIOWrapper):
                    stream.reconfigure(errors="replace")
            if self.keyboard:
                self._take_keyboard(stack)
            yield

    def _take_keyboard(self, stack: contextlib.ExitStack) -> None:
        before = termios.tcgetattr(0)
        handler = signal.signal(signal.SIGINT, self._interrupt)
        stack.callback(signal.signal, signal.SIGINT, handler)
        stack.callback(_restore, before)
        if self._watch is not None:
            # If another rank fails, the watch ends this process from a thread.
            self._watch.before_end.append(lambda: self._abandon(before))
            stack.callback(self._watch.before_end.clear)
            _disable_signal_keys(by_line=True)
        if self.screen:
            self._editor = self._make_editor()

    def _make_editor(self) -> LineEditor | None:
        """Return an editor with the history, or without it if its file cannot be used."""
        try:
            import readline
        except ImportError:
            return None
        try:
            return LineEditor(readline, complete, self._history)
        except OSError as error:
            self._note_no_history(error)
            return LineEditor(readline, complete, None)

    def _note_no_history(self, error: OSError) -> None:
        self.note(f"the history is not kept: {error}; --no_history leaves it out")

    def _abandon(self, before: list[Any]) -> None:
        """Restore the terminal while a line may be read, because the process ends at once."""
        _restore(before)
        if self._editor is not None:
            with contextlib.suppress(OSError):
                os.write(1, _END_BRACKETED_PASTE)

    def _stop(self) -> None:
        self.stops = True
        if self._reading:
            raise EOFError

    def check_drain(self) -> None:
        """Check that an answer does not take too long after SIGTERM.

        Raises:
            TimeoutError: The drain time is over. With several ranks the watch ends the process.
        """
        if self._watch is None and SIGNALS.is_time_over:
            limit_s = SIGNALS.drain_s
            raise TimeoutError(f"the answer did not finish within {limit_s:g} s: it was ended")

    def read_line(self, prompt: str) -> str:
        """Read one line.

        Raises:
            EOFError: The input has ended.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        self._reading = True
        self._pressed = False
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
        if self._editor is None:
            if self.keyboard:
                print(prompt, end="", file=self._notes, flush=True)
            return input()
        line = self._editor.read_line(prompt)
        if line.strip() and _CTRL_C.decode() not in line:
            try:
                self._editor.remember(line)
            except OSError as error:
                self._note_no_history(error)
        return line

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Handle Ctrl-C as a signal: end the reading of a line, or record the key for `watch`."""
        self._pressed = True
        if self._reading:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def watch(self) -> Iterator[Callable[[], bool]]:
        """Read the keyboard while an answer is shown, and drop all keys except Ctrl-C.

        Yields a function that returns whether Ctrl-C was pressed.
        """
        if not self.keyboard:
            yield lambda: False
            return

        def pressed() -> bool:
            self._pressed = _CTRL_C in _read_keys() or self._pressed
            return self._pressed

        before = termios.tcgetattr(0)
        _disable_signal_keys(by_line=False)
        try:
            yield pressed
        finally:
            pressed()  # This drops the keys that were typed last.
            self._pressed = False
            _restore(before)

    def write(self, text: str) -> None:
        """Show a piece of an answer at once.

        On a screen, control characters become U+FFFD, and lines are broken between words.
        """
        if text:
            self.fold_reasoning()
        if self.screen:
            columns = shutil.get_terminal_size().columns
            text = self._wrap.feed(_CONTROL.sub("\ufffd", text), columns)
        sys.stdout.write(text)
        sys.stdout.flush()

    def write_reasoning(self, text: str) -> None:
        """Show the end of what the model thinks on one line of the screen; a pipe gets nothing."""
        if not self.screen:
            return
        self._reasoning += text
        # Half of the columns are enough for characters of double width.
        columns = shutil.get_terminal_size().columns // 2 - 1
        line = " ".join(self._reasoning[-columns:].split())
        self._rewrite_line(_CONTROL.sub("\ufffd", line))

    def fold_reasoning(self) -> None:
        """Replace the line of `write_reasoning`, if there is one, by a note."""
        if self._reasoning:
            self._reasoning = ""
            self._rewrite_line("")
            self.note("thought before the answer: /think shows it")

    def _rewrite_line(self, text: str) -> None:
        line = _DIM.format(text) if self._dim_notes and text else text
        sys.stdout.write(f"\r{_ERASE_LINE}{line}")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Show lines about the chat: dimmed on a screen, and otherwise on stderr."""
        text = _CONTROL.sub("\ufffd", text)
        if self.screen:
            text = WordWrap().feed(text, shutil.get_terminal_size().columns)
        print(_DIM.format(text) if self._dim_notes else text, file=self._notes, flush=True)


def _disable_signal_keys(*, by_line: bool) -> None:
    """Make Ctrl-C and Ctrl-Z ordinary bytes.

    Args:
        by_line: Whether keys arrive line by line and are echoed. If not, they arrive at once.
    """
    mode = termios.tcgetattr(0)
    chars = mode[_CONTROL_CHARS]
    disabled = bytes([os.fpathconf(0, "PC_VDISABLE")])
    chars[termios.VINTR] = disabled
    chars[termios.VSUSP] = disabled
    if not by_line:
        mode[_LOCAL_FLAGS] &= ~(termios.ICANON | termios.ECHO)
        chars[termios.VMIN] = 1
        chars[termios.VTIME] = 0
    termios.tcsetattr(0, termios.TCSANOW, mode)


def _restore(mode: list[Any]) -> None:
    with contextlib.suppress(termios.error):  # The terminal may be gone.
        termios.tcsetattr(0, termios.TCSANOW, mode)


def _read_keys() -> bytes:
    """Return the keys typed since the last call, without waiting. A lost terminal is a Ctrl-C."""
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
