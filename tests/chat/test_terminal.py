"""The chat as a person has it: scripts/chat.py in a pseudo-terminal, alone and under torchrun."""

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
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.launch import REPO, environment
from helpers.prompts import FRANCE, JAPAN, STORY, replies
from llama import Llama

FIGURES = " from cache"  # the end of the line after an answer
CTRL_C, CTRL_D = "\x03", "\x04"


class Session:
    """The script with a terminal of its own, which is also the controlling one: keys are typed,
    and Ctrl-C is a signal to the foreground group unless the script sees to it."""

    def __init__(self, *flags: str, ranks: int = 1, **variables: str) -> None:
        self.main, self.side = pty.openpty()
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        self.mode = termios.tcgetattr(self.side)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        self.process = subprocess.Popen(
            [
                sys.executable, *(torchrun if ranks > 1 else []), str(REPO / "scripts/chat.py"),
                "--temperature=0", "--dtype=fp32", "--device=cpu", *flags,
            ],
            stdin=self.side, stdout=self.side, stderr=self.side, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=environment(TERM="xterm", **variables),
        )  # fmt: skip
        self.shown = ""  # and not yet expected
        self.expect("/bye leaves")

    def expect(self, text: str, within: float = 60.0) -> str:
        """What is shown up to the text and with it; fails if that does not come in time."""
        end = time.monotonic() + within
        while text not in self.shown:
            assert time.monotonic() < end, f"waiting for {text!r}, shown is {self.shown!r}"
            if select.select([self.main], [], [], 0.1)[0]:
                self.shown += os.read(self.main, 4096).decode().replace("\r\n", "\n")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def at_prompt(self, keys: str) -> None:
        """Type at the next prompt."""
        self.expect("\n> ")
        typed = keys.removesuffix(CTRL_C)
        self.keys(typed)
        if typed != keys:
            if typed:
                self.expect(typed)
            self.wait_for_keys()
            self.keys(CTRL_C)

    def wait_for_keys(self) -> None:
        """Wait until the script, if it runs alone, sleeps in its read: a signal that comes after
        the prompt, and before that read, would wait for the next key."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.001)

    def keys(self, keys: str) -> None:
        os.write(self.main, keys.encode())

    def ask(self, question: str) -> str:
        """The answer, without the figures."""
        self.at_prompt(f"{question}\r")
        self.expect(f"{question}\n")
        return re.sub(r"\n\x1b\[2m.*", "", self.expect(FIGURES))

    def command(self, command: str, note: str) -> None:
        self.at_prompt(f"{command}\r")
        self.expect(f"{command}\n\x1b[2m")  # dimmed
        self.expect(note)

    def ended(self) -> int:
        """The exit code, once the terminal is seen to be as it was."""
        code = self.process.wait(30)
        assert termios.tcgetattr(self.side) == self.mode
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(60)
        os.close(self.main)
        os.close(self.side)


@pytest.fixture
def sessions() -> Iterator[list[Session]]:
    started: list[Session] = []
    yield started
    for session in started:
        session.close()


def talk(session: Session, demo: Llama, folder: Path) -> None:
    """What a person does in a chat, Ctrl-C in a long answer included; the same on any ranks."""
    france, japan = replies(demo, FRANCE, JAPAN)
    assert session.ask(FRANCE) == france
    assert session.ask(JAPAN) == japan, "it has the first question in view"
    session.command("/undo", f"forgotten: {JAPAN}")
    session.command("/stats", "turns 1")
    assert session.ask("/retry") == france
    session.command(f"/save {folder}/talk.json", "2 messages written")
    session.command("/clear", "forgotten")
    session.command("/hello", "there is no command /hello")
    session.command(f"/load {folder}/talk.json", "2 messages read")
    assert session.ask(JAPAN) == japan
    session.command("/clear", "forgotten")
    session.at_prompt('"""\rAnd of\r')
    session.expect("\n. ")
    session.keys('Japan?\r"""\r')
    session.expect(replies(demo, "And of\nJapan?")[0])
    session.command("/clear", "forgotten")
    stop(session, demo)
    assert session.ask(FRANCE) == replies(demo, FRANCE)[0]


def begin_long(session: Session, demo: Llama) -> None:
    """Ask for an answer that fills the context if it is let, and wait for its first word."""
    begin = begin_of_story(demo)  # before the question: the answer is there in two seconds
    session.command("/set min_tokens 490", "min_tokens 490")
    session.at_prompt(f"{STORY}\r")
    session.expect(begin)


def begin_of_story(demo: Llama) -> str:
    return "\n" + replies(demo, STORY)[0].split()[0]


def stop(session: Session, demo: Llama) -> None:
    """Ctrl-C in a long answer: what was said is kept, and the chat goes on."""
    begin_long(session, demo)
    session.keys(CTRL_C)
    assert "stopped | " in session.expect(FIGURES)
    session.command("/stats", "turns 1")
    session.command("/set min_tokens 0", "min_tokens 0")
    session.command("/clear", "forgotten")


def test_a_chat_alone(sessions, demo, tmp_path):
    session = Session()
    sessions.append(session)
    talk(session, demo, tmp_path)
    session.at_prompt(f"{FRANCE}{CTRL_C}")
    session.expect("Ctrl-C again, Ctrl-D or /bye to leave")
    assert session.ask(FRANCE), "the line was dropped, and the chat goes on"
    session.at_prompt("\x1b[A\r")  # the arrow up: the last line that was entered
    session.expect(f"{FRANCE}\n")
    session.expect(FIGURES)
    session.expect("\n> ")
    session.wait_for_keys()
    session.process.send_signal(signal.SIGTERM)  # nothing runs: it leaves at once, in order
    assert session.ended() == 0


def test_what_is_typed_during_an_answer(sessions, demo):
    """It waits for the prompt, corrected as typed; Ctrl-C drops it, as the terminal itself does.
    SIGTERM in an answer lets it come to its end, and gives the terminal back. NO_COLOR is heeded.
    """
    session = Session(NO_COLOR="1")
    sessions.append(session)
    begin = begin_of_story(demo)
    session.at_prompt(f"{STORY}\r")
    session.expect(begin)
    session.keys("/help\r/stax\x7fts\x1b[D\r/cle")
    shown = session.expect("turns 1")
    assert shown.index(FIGURES) < shown.index("this list") < shown.index("\n> /stats\n")
    session.keys("ar\r")
    session.expect("> /clear\nthe dialog is forgotten")
    session.at_prompt("/set min_tokens 490\r")
    session.at_prompt(f"{STORY}\r")
    session.expect(begin)
    session.keys(f"/help\r{CTRL_C}/undo\r")
    shown = session.expect(f"forgotten: {STORY}")
    assert "stopped | " in shown and "this list" not in shown and "\x1b[2m" not in shown
    session.at_prompt(f"{STORY}\r")
    session.expect(begin)
    session.process.send_signal(signal.SIGTERM)
    session.expect(FIGURES)
    assert session.ended() == 0


@pytest.mark.slow
def test_a_chat_on_two_ranks(sessions, demo, tmp_path):
    """The same talk; and Ctrl-C, which would end torchrun if it were a signal, ends the chat in
    order."""
    session = Session(ranks=2)
    sessions.append(session)
    talk(session, demo, tmp_path)
    session.at_prompt(f"{FRANCE}{CTRL_C}")
    session.expect("Ctrl-C again")
    session.at_prompt(CTRL_C)
    assert session.ended() == 0
