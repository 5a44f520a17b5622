"""The chat as a person has it: scripts/chat.py in a pseudo-terminal, alone and on two ranks."""

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.prompts import FRANCE, JAPAN, STORY, replies
from helpers.terminal import CTRL_C, FIGURES, Session
from llama import Llama
from llama.cli.chat.terminal import Terminal
from llama.ranks.signals import SIGNALS


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
    session.command("/undo", f"removed: {JAPAN}")
    session.command("/stats", "turns 1")
    assert session.ask("/retry") == france
    session.command(f"/save {folder}/talk.json", "2 messages written")
    session.command("/clear", "are removed")
    session.command("/hello", "there is no command /hello")
    session.command(f"/load {folder}/talk.json", "2 messages read")
    assert session.ask(JAPAN) == japan
    session.command("/clear", "are removed")
    session.at_prompt('"""\rAnd of\r')
    session.expect("\n. ")
    session.keys('Japan?\r"""\r')
    session.expect(replies(demo, "And of\nJapan?")[0])
    session.command("/clear", "are removed")
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
    session.command("/clear", "are removed")


def test_a_chat_alone(sessions, demo, tmp_path):
    session = Session()
    sessions.append(session)
    talk(session, demo, tmp_path)
    session.at_prompt(f"{FRANCE}{CTRL_C}")
    session.expect("press Ctrl-C again or Ctrl-D, or type /bye")
    assert session.ask(FRANCE), "the line was dropped, and the chat goes on"
    session.at_prompt("\x1b[A\r")  # the arrow up: the last line that was entered
    session.expect(f"{FRANCE}\n")
    session.expect(FIGURES)
    session.expect("\n> ")
    session.wait_for_keys()
    session.process.send_signal(signal.SIGTERM)  # nothing runs: it leaves at once, in order
    assert session.ended() == 0


def test_what_is_typed_during_an_answer(sessions, demo):
    """It is dropped, but for Ctrl-C. SIGTERM in an answer lets it come to its end, and gives the
    terminal back. NO_COLOR is heeded."""
    session = Session(NO_COLOR="1")
    sessions.append(session)
    begin = begin_of_story(demo)
    session.at_prompt(f"{STORY}\r")
    session.expect(begin)
    session.keys("/help\r/cle")
    shown = session.expect(FIGURES)
    assert "this list" not in shown
    session.at_prompt("/stats\r")
    session.expect("turns 1")
    session.at_prompt("/clear\r")
    session.expect("all messages are removed")
    session.at_prompt("/set min_tokens 490\r")
    session.at_prompt(f"{STORY}\r")
    session.expect(begin)
    session.keys(f"/help\r{CTRL_C}")
    shown = session.expect(FIGURES)
    assert "stopped | " in shown and "this list" not in shown and "\x1b[2m" not in shown
    session.at_prompt("/set min_tokens 150\r")
    session.at_prompt(f"{STORY}\r")
    session.expect(begin)
    session.process.send_signal(signal.SIGTERM)
    session.expect(FIGURES)
    assert session.ended() == 0


def test_a_signal_before_the_first_prompt_ends_the_chat(monkeypatch):
    """It came while the model was loaded; the chat would wait for a line as long as ranks may."""
    monkeypatch.setattr(SIGNALS, "stop_since", 0.0)
    monkeypatch.setattr("sys.stdin", io.StringIO("a question\n"))
    terminal = Terminal()
    with terminal.open(), pytest.raises(EOFError):
        terminal.read_line("> ")


@pytest.mark.slow
def test_a_chat_on_two_ranks(sessions, demo, tmp_path):
    """The same talk; and Ctrl-C, which would end the ranks if it were a signal, ends the chat in
    order."""
    session = Session(ranks=2)
    sessions.append(session)
    talk(session, demo, tmp_path)
    session.at_prompt(f"{FRANCE}{CTRL_C}")
    session.expect("press Ctrl-C again")
    session.at_prompt(CTRL_C)
    assert session.ended() == 0


@pytest.mark.slow
def test_a_killed_rank_leaves_the_terminal_as_it_was(sessions):
    """It could not put it right itself, and a shell takes what it finds for the user's wish."""
    session = Session(ranks=2)
    sessions.append(session)
    session.expect("\n> ")
    files = Path(f"/proc/{session.process.pid}/task").glob("*/children")
    first, _ = sorted(int(pid) for file in files for pid in file.read_text().split())[-2:]
    os.kill(first, signal.SIGKILL)
    assert session.ended() == 128 + signal.SIGKILL
