"""A chat in a pseudo-terminal: the test types keys and reads what the screen shows."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from helpers.launch import REPO, environment

_PASTE_MODE = re.compile(r"\x1b\[\?2004(h|l\r?)")  # "pastes are marked from here on", or no longer
FIGURES = " from cache"  # the end of the line after an answer
CTRL_C, CTRL_D = "\x03", "\x04"


class Session:
    """A script with a controlling terminal of its own.

    Keys are typed, and Ctrl-C is a signal to the foreground group unless the script handles it.
    """

    def __init__(self, *flags: str, ranks: int = 1, **variables: str) -> None:
        self.start(
            sys.executable, str(REPO / "scripts/chat.py"), "--ranks", str(ranks),
            "--temperature=0", "--dtype=fp32", "--device=cpu", *flags, **variables,
        )  # fmt: skip

    def start(self, *command: str, **variables: str) -> None:
        self.main, self.side = pty.openpty()
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        self.mode = termios.tcgetattr(self.side)
        self.process = subprocess.Popen(
            command,
            stdin=self.side, stdout=self.side, stderr=self.side, start_new_session=True,
            # pytest-xdist sets COLUMNS, which comes before the size of the terminal.
            env=environment(
                **{"TERM": "xterm", "COLUMNS": "", "LLAMA_NO_HISTORY": "1"} | variables
            ),
            preexec_fn=self._take_terminal,
        )  # fmt: skip
        self.shown = ""  # output that no test has expected yet
        self.expect("/bye ends the chat")

    @staticmethod
    def _take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def expect(self, text: str, within: float = 60.0) -> str:
        """Return the output up to and including the text; fail if it does not appear in time."""
        end = time.monotonic() + within
        while text not in self.shown:
            assert time.monotonic() < end, f"waiting for {text!r}, shown is {self.shown!r}"
            if select.select([self.main], [], [], 0.1)[0]:
                self.shown += os.read(self.main, 4096).decode().replace("\r\n", "\n")
                self.shown = _PASTE_MODE.sub("", self.shown)
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def at_prompt(self, keys: str) -> None:
        """Type a line at the next prompt."""
        self.expect("\n> ")
        typed = keys.removesuffix(CTRL_C)
        self.keys(typed)
        if typed != keys:
            if typed:
                self.expect(typed)
            self.wait_for_keys()
            self.keys(CTRL_C)

    def wait_for_keys(self) -> None:
        """Wait until the script, if it runs alone, sleeps in its read.

        A signal that arrives after the prompt but before that read would wait for the next key.
        """
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.001)

    def keys(self, keys: str) -> None:
        os.write(self.main, keys.encode())

    def ask(self, question: str) -> str:
        """Ask a question and return the answer without the figures."""
        self.at_prompt(f"{question}\r")
        self.expect(f"{question}\n")
        return re.sub(r"\n\x1b\[2m.*", "", self.expect(FIGURES))

    def command(self, command: str, note: str) -> None:
        self.at_prompt(f"{command}\r")
        self.expect(f"{command}\n\x1b[2m")  # dimmed
        self.expect(note)

    def ended(self) -> int:
        """Return the exit code, after checking that the terminal is in its original state."""
        code = self.process.wait(30)
        assert termios.tcgetattr(self.side) == self.mode
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.keys("\r")  # the signal waits for a key if it comes just before the read
            self.process.wait(60)
        os.close(self.main)
        os.close(self.side)
