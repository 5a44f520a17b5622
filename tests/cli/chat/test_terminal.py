"""The chat as a person uses it: scripts/chat.py in a pseudo-terminal, alone and on two ranks."""

import io
import json
import os
import signal
import stat
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
    """Run a person's chat, including Ctrl-C in a long answer; it is the same on any number of
    ranks.
    """
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
    """Ask for an answer that would fill the context, and wait for its first word."""
    begin = begin_of_story(demo)  # before the question, since the answer takes only two seconds
    session.command("/set min_tokens 490", "min_tokens 490")
    session.at_prompt(f"{STORY}\r")
    session.expect(begin)


def begin_of_story(demo: Llama) -> str:
    return "\n" + replies(demo, STORY)[0].split()[0]


def stop(session: Session, demo: Llama) -> None:
    """Press Ctrl-C in a long answer: the text so far is kept, and the chat goes on."""
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
    session.at_prompt("\x1b[A\r")  # the arrow key recalls the last line
    session.expect(f"{FRANCE}\n")
    session.expect(FIGURES)
    session.expect("\n> ")
    session.wait_for_keys()
    session.process.send_signal(signal.SIGTERM)  # nothing runs, so it exits in order and at once
    assert session.ended() == 0


def test_what_is_typed_during_an_answer(sessions, demo):
    """Keys typed during an answer are dropped, except Ctrl-C.

    SIGTERM during an answer lets it finish and restores the terminal. NO_COLOR is respected.
    """
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


PASTE = "\x1b[200~{}\x1b[201~"  # as a terminal marks pasted text


def test_a_paste_tab_and_the_history(sessions, tmp_path):
    """A paste is one message, Tab completes, and the next chat recalls what was typed."""
    session = Session(XDG_STATE_HOME=str(tmp_path / "state"), LLAMA_NO_HISTORY="0")
    sessions.append(session)
    pasted = "And of\tJapan?\n\n/help is text\n  the last line"
    session.at_prompt("Text: " + PASTE.format(pasted.replace("\n", "\r")))
    session.expect("the last line")
    session.keys("\r")
    session.expect(FIGURES)
    session.at_prompt("/sav\t" + f"{tmp_path}/talk.json\r")
    session.expect("2 messages written")
    question, _ = json.loads((tmp_path / "talk.json").read_text())
    assert question["content"] == f"Text: {pasted}"
    session.at_prompt(f"/clear\r/load {tmp_path}/ta\t\r")
    session.expect("2 messages read")
    session.at_prompt("/bye\r")
    assert session.ended() == 0
    history = tmp_path / "state" / "llama" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    assert [json.loads(line) for line in history.read_text().splitlines()] == [
        f"Text: {pasted}",
        f"/save {tmp_path}/talk.json",
        "/clear",
        f"/load {tmp_path}/talk.json",
        "/bye",
    ]
    again = Session(XDG_STATE_HOME=str(tmp_path / "state"), LLAMA_NO_HISTORY="0")
    sessions.append(again)
    again.at_prompt("\x1b[A\x1b[A\r")
    again.expect("2 messages read")
    again.at_prompt("\x1b[A" * 6 + "\r")
    again.expect(FIGURES)
    again.at_prompt(f"/save {tmp_path}/again.json\r")
    again.expect("4 messages written")
    assert json.loads((tmp_path / "again.json").read_text())[2]["content"] == f"Text: {pasted}"


def test_a_flag_turns_the_history_off(sessions, tmp_path):
    session = Session("--no_history", XDG_STATE_HOME=str(tmp_path))
    sessions.append(session)
    session.command("/stats", "turns 0")
    session.at_prompt("/bye\r")
    assert session.ended() == 0 and not [*tmp_path.iterdir()]


def test_a_signal_before_the_first_prompt_ends_the_chat(monkeypatch):
    """A signal before the first prompt ends the chat.

    It arrived while the model was loaded; without this the chat would wait for a line indefinitely.
    """
    monkeypatch.setattr(SIGNALS, "stop_since", 0.0)
    monkeypatch.setattr("sys.stdin", io.StringIO("a question\n"))
    terminal = Terminal()
    with terminal.open(), pytest.raises(EOFError):
        terminal.read_line("> ")


@pytest.mark.slow
def test_a_chat_on_two_ranks(sessions, demo, tmp_path):
    """A chat on two ranks goes like one on one rank.

    Ctrl-C, which would end the ranks if it were a signal, ends the chat in order.
    """
    session = Session(ranks=2)
    sessions.append(session)
    talk(session, demo, tmp_path)
    session.at_prompt(f"{FRANCE}{CTRL_C}")
    session.expect("press Ctrl-C again")
    session.at_prompt(CTRL_C)
    assert session.ended() == 0


@pytest.mark.slow
def test_a_killed_rank_leaves_the_terminal_as_it_was(sessions):
    """A killed rank leaves the terminal as it was.

    The rank cannot restore it, and a shell takes the settings that it finds for the user's choice.
    """
    session = Session(ranks=2)
    sessions.append(session)
    session.expect("\n> ")
    files = Path(f"/proc/{session.process.pid}/task").glob("*/children")
    first, _ = sorted(int(pid) for file in files for pid in file.read_text().split())[-2:]
    os.kill(first, signal.SIGKILL)
    assert session.ended() == 128 + signal.SIGKILL
