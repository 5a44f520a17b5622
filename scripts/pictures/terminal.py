"""A recording of `llama chat` as an animated SVG: a real shell in a pseudo-terminal, typed into.

In: what a person types. Out: one picture, small, whose text appears when it appeared in the
terminal. Waits of more than a second, as while the model loads, are shortened to one. The session
fits on the screen, and of a line that is written twice (the bar of loading) the last state counts:
so each character has one moment at which it comes, and without animation the picture shows the end.
It knows neither the model nor the server.
"""

import os
import pty
import random
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path

COMMAND = "llama chat --temperature 0"
QUESTIONS = (
    "Tell me a story about a lion named Leo.",
    "/clear",
    "What is the capital of France?",
    "What is the opposite of hot?",
)
COLUMNS, ROWS = 96, 30
_LIMIT_S = 120.0  # for one answer, or for loading
_LONGEST_WAIT_S, _LAST_S = 1.0, 5.0
_ADVANCE, _LINE, _LEFT, _TOP = 8.4, 20.0, 18.0, 62.0  # pixels, at a font size of 14
_TOKEN = re.compile(r"\x1b\[([0-?]*)[ -/]*([@-~])|[\s\S]")
_STYLE = """
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
white-space:pre;fill:#d7dde5}
.dim{fill:#7d8793}.title{fill:#9aa4b0;font-size:13px}
"""


@dataclass
class Cell:
    """A character on the screen and the second at which it appeared."""

    text: str = " "
    is_dim: bool = False
    since: float = 0.0


@dataclass
class Screen:
    """A terminal's screen, for the few codes that a shell and `llama chat` send."""

    columns: int = COLUMNS
    rows: int = ROWS
    cells: list[list[Cell]] = field(default_factory=list)
    row: int = 0
    column: int = 0
    is_dim: bool = False
    cursor: list[tuple[float, int, int]] = field(default_factory=list)  # since, row, column

    def __post_init__(self) -> None:
        self.cells = [[Cell() for _ in range(self.columns)] for _ in range(self.rows)]

    def feed(self, text: str, now: float) -> None:
        """Show output of the terminal; raise ValueError where the session does not fit."""
        for token in _TOKEN.finditer(text):
            if token[2] == "m":
                self.is_dim = token[1] == "2"
            elif token[2] is None:
                self._show(token[0], now)
        self.cursor.append((now, self.row, self.column))

    def _show(self, text: str, now: float) -> None:
        if text == "\r":
            self.column = 0
        elif text == "\n":
            self.row += 1
        elif text == "\b":
            self.column -= 1
        elif text.isprintable():
            if self.column == self.columns:
                self.row, self.column = self.row + 1, 0
            if self.row >= self.rows:
                raise ValueError(f"the session needs more than {self.rows} rows: shorten it")
            self.cells[self.row][self.column] = Cell(text, self.is_dim, now)
            self.column += 1

    def line(self) -> str:
        """Return the text of the cursor's line."""
        if self.row >= self.rows:
            return ""
        return "".join(cell.text for cell in self.cells[self.row]).rstrip()


class Recorder:
    """A shell on a pseudo-terminal, and the screen that it fills."""

    def __init__(self) -> None:
        self.screen = Screen()
        self._dice = random.Random(1)  # how fast the next key is pressed
        self._cut = 0.0  # seconds that were left out
        self._last = self._start = time.monotonic()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "NO_COLOR"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept |= {"PATH": path, "PS1": "$ ", "ENV": "", "TERM": "xterm"}
        self._shell, self._terminal = pty.fork()
        if self._shell == 0:
            os.execvpe("sh", ["sh", "-i"], kept)
        termios.tcsetwinsize(self._terminal, (ROWS, COLUMNS))

    def type(self, text: str) -> None:
        """Press the keys of a line one by one, and Enter."""
        for key in f"{text}\r":
            os.write(self._terminal, key.encode())
            self._read_for(self._dice.uniform(0.03, 0.09))

    def wait_for(self, line: str) -> None:
        """Wait until the cursor's line has just this text; TimeoutError after two minutes."""
        end = time.monotonic() + _LIMIT_S
        while self.screen.line() != line:
            if time.monotonic() > end:
                raise TimeoutError(f"no line {line!r} within {_LIMIT_S:g} s")
            self._read_for(0.02)
        self._read_for(_LONGEST_WAIT_S)

    def close(self) -> float:
        """End the shell and return the seconds that the recording lasts."""
        os.kill(self._shell, signal.SIGKILL)
        os.waitpid(self._shell, 0)
        os.close(self._terminal)
        return self._now()

    def _read_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self._terminal], [], [], left)[0]:
                return
            text = os.read(self._terminal, 65536).decode(errors="replace")
            self.screen.feed(text, self._now())

    def _now(self) -> float:
        """Return the seconds since the start, with each wait shortened to one second."""
        now = time.monotonic()
        self._cut += max(0.0, now - self._last - _LONGEST_WAIT_S)
        self._last = now
        return now - self._start - self._cut


def record() -> tuple[Screen, float]:
    """Run the session and return its screen and its length in seconds."""
    recorder = Recorder()
    recorder.wait_for("$")
    recorder.type(COMMAND)
    recorder.wait_for(">")
    for question in QUESTIONS:
        recorder.type(question)
        recorder.wait_for(">")
    return recorder.screen, recorder.close()


def draw(screen: Screen, seconds: float) -> str:
    """Return the SVG of a recording."""
    total = seconds + _LAST_S
    used = 1 + max(i for i, row in enumerate(screen.cells) if any(c.text != " " for c in row))
    width = round(2 * _LEFT + _ADVANCE * screen.columns)
    height = round(_TOP + _LINE * used)
    times = sorted({cell.since for row in screen.cells for cell in row})
    names = {since: f"k{i}" for i, since in enumerate(times)}
    moments = (
        f"@keyframes {names[t]}{{0%{{visibility:hidden}}{100 * t / total:.2f}%"
        "{visibility:visible}}"
        for t in times
    )
    body = [_row(cells, i, names) for i, cells in enumerate(screen.cells[:used])]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="A recording of llama chat">',
            f"<style>{_STYLE}@media (prefers-reduced-motion:no-preference){{"
            f"tspan{{animation:{total:.2f}s step-end infinite}}"
            f"#cursor{{animation:move {total:.2f}s step-end infinite}}}}",
            *moments,
            f"@keyframes move{{{_moves(screen, total)}}}</style>",
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10" '
            'fill="#11161d" stroke="#39424e"/>',
            *(f'<circle cx="{20 + 20 * i}" cy="20" r="6" fill="{colour}"/>'
              for i, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))),
            f'<text class="title" x="{width / 2}" y="24" text-anchor="middle">llama chat</text>',
            *filter(None, body),
            f'<rect id="cursor" x="{_LEFT}" y="{_TOP - 15}" width="8" height="18" fill="#d7dde5" '
            f'opacity=".6" transform="{_translate(*screen.cursor[-1][1:])}"/>',
            "</svg>\n",
        ]
    )  # fmt: skip


def _row(cells: list[Cell], index: int, names: dict[float, str]) -> str:
    """Return a line of the screen, in pieces that appeared together."""
    text = "".join(cell.text for cell in cells).rstrip()
    if not text:
        return ""
    pieces = []
    for (since, is_dim), run in groupby(cells[: len(text)], lambda c: (c.since, c.is_dim)):
        look = ' class="dim"' if is_dim else ""
        shown = escape("".join(cell.text for cell in run))
        pieces.append(f'<tspan{look} style="animation-name:{names[since]}">{shown}</tspan>')
    y, length = _TOP + _LINE * index, _ADVANCE * len(text)
    return f'<text x="{_LEFT}" y="{y:g}" textLength="{length:.1f}">{"".join(pieces)}</text>'


def _moves(screen: Screen, total: float) -> str:
    """Return keyframes of the cursor's position."""

    def steps() -> Iterator[str]:
        for since, row, column in screen.cursor:
            x, y = _ADVANCE * column, _LINE * row
            yield f"{100 * since / total:.2f}%{{transform:translate({x:.1f}px,{y:g}px)}}"

    return "".join(steps())


def _translate(row: int, column: int) -> str:
    return f"translate({_ADVANCE * column:.1f} {_LINE * row:g})"


def make(folder: Path) -> None:
    """Write terminal.svg."""
    (folder / "terminal.svg").write_text(draw(*record()))
