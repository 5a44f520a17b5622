"""A chat in a terminal: turns in, answers out, of the engine (engine_session.py) or of a server
(server_session.py). No ranks and no torch."""

import contextlib
import time
from collections.abc import Callable, Generator
from typing import NamedTuple

from llama.cli.chat.conversation import Conversation, Turn, TurnStats
from llama.cli.chat.terminal import Terminal, read_turn
from llama.requests.request import Usage


class Part(NamedTuple):
    """What came of an answer; without text and reason, some time without news."""

    new_text: str = ""
    finish_reason: str | None = None  # OpenAI's, once it has ended
    usage: Usage | None = None  # the tokens so far, where they are known
    rate: float | None = None  # tokens per second, where a server says


# Begins the answer to a turn, whose parts come up to one with a finish_reason. Closed, it stops the
# answer. TypeError or ValueError for what cannot be asked, and for an answer that fails.
Answers = Callable[[Turn], Generator[Part, None, None]]


def talk(answers: Answers, conversation: Conversation, terminal: Terminal) -> None:
    """Read and answer until the end. OSError if nobody reads, or it took too long after SIGTERM."""
    with terminal.open():
        if terminal.screen:
            terminal.note("/help lists the commands, /bye leaves")
        while (text := _read(terminal)) is not None and not terminal.stops:
            turn = conversation.handle(text)
            if turn.note:
                terminal.note(turn.note)
            if turn.leave:
                break
            if turn.dialog:
                _answer(answers, conversation, turn, terminal)


def _read(terminal: Terminal) -> str | None:
    """The next turn; None at the end of input, or at the second Ctrl-C in a row."""
    for left in (1, 0):
        try:
            return read_turn(terminal.read_line)
        except EOFError:
            break
        except KeyboardInterrupt:
            if not terminal.keyboard:
                raise
            if left:
                terminal.note("Ctrl-C again, Ctrl-D or /bye to leave")
    return None


def _answer(answers: Answers, conversation: Conversation, turn: Turn, terminal: Terminal) -> None:
    """Show the answer as it comes, and add the turn to the conversation, if there is an answer."""
    began = time.perf_counter()
    part, text = Part(), ""
    times: list[float] = []  # when each part came
    try:
        with terminal.watch() as pressed, contextlib.closing(answers(turn)) as parts:
            while not (part.finish_reason or pressed()):
                terminal.check_drain()
                part = next(parts)
                if part != Part():
                    times.append(time.perf_counter() - began)
                text += part.new_text
                terminal.write(part.new_text)
    except (TypeError, ValueError) as error:
        if text:
            terminal.write("\n")
        terminal.note(f"error: {error}. The question was not kept.")
        return
    if not (part.finish_reason or text):
        terminal.note("stopped before the first word: the question was not kept")
        return
    terminal.write("\n")
    stats = TurnStats(times[0], times[-1], part.usage or Usage(0, len(times), 0), part.rate)
    conversation.commit(turn, text, stats)
    terminal.note(_end(part, conversation.context) + stats.describe(conversation.context))


def _end(part: Part, context: int | None) -> str:
    """Why an answer ended where it would have gone on."""
    if part.finish_reason == "length":
        full = context is not None and part.usage and part.usage.total_tokens >= context
        return "the context is full: /undo or /clear | " if full else "cut at max_gen_len | "
    return "" if part.finish_reason else "stopped | "
