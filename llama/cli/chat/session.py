"""A chat in a terminal: turns in, answers out, whoever gives the answers.

In: the keyboard, and an `Answers`: of the engine (engine_session.py) or of a server
(server_session.py). Out: the answers on the screen, and the conversation with them. There are
neither ranks nor torch here.
"""

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from llama.cli.chat.conversation import Conversation, Turn, TurnStats
from llama.cli.chat.terminal import Terminal, read_turn


@dataclass(frozen=True)
class Part:
    """An answer so far. finish_reason: OpenAI's, or "error", once it has ended. The counts of
    tokens are 0 where they are not known."""

    text: str
    new_text: str
    finish_reason: str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0


# Begins the answer to a turn, whose parts come up to one with a finish_reason. None stands for some
# time without news. Closed, it stops the answer. TypeError or ValueError for what cannot be asked.
Answers = Callable[[Conversation, Turn], Generator[Part | None, None, None]]


def talk(answers: Answers, conversation: Conversation, terminal: Terminal) -> OSError | None:
    """Read and answer until the end; the error if nobody reads the answers any more, or the last
    one took too long after SIGTERM.

    It is returned: for the other ranks, that is an end as any other.
    """
    try:
        _take_turns(answers, conversation, terminal)
    except OSError as error:
        return error
    return None


def _take_turns(answers: Answers, conversation: Conversation, terminal: Terminal) -> None:
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
        if terminal.stops:
            break
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
    """Show the answer and add the turn to the conversation. Without an answer, the question is
    dropped too.
    """
    try:
        part, times = _stream(answers, conversation, turn, terminal)
    except (TypeError, ValueError) as error:
        terminal.note(f"error: {error}. The question was not kept.")
        return
    if part is None or not (part.finish_reason or part.text):
        terminal.note("stopped before the first word: the question was not kept")
        return
    if part.error is not None:
        if part.text:
            terminal.write("\n")
        terminal.note(f"error: {part.error}. The question was not kept.")
        return
    terminal.write("\n")
    stats = TurnStats(
        times[0], times[-1], part.prompt_tokens, part.cached_tokens, part.tokens or len(times)
    )
    conversation.commit(turn, part.text, stats)
    terminal.note(_end(part, conversation.context) + stats.describe(conversation.context))


def _stream(
    answers: Answers, conversation: Conversation, turn: Turn, terminal: Terminal
) -> tuple[Part | None, list[float]]:
    """The last part, all of whose text has been shown, and when each came, in seconds from now.

    ValueError or TypeError for what cannot be asked.
    """
    began = time.perf_counter()
    last, times = None, []
    with terminal.watch() as pressed, contextlib.closing(answers(conversation, turn)) as parts:
        while not ((last is not None and last.finish_reason) or pressed()):
            terminal.check_drain()
            part = next(parts)
            if part is not None:
                last = part
                times.append(time.perf_counter() - began)
                terminal.write(part.new_text)
    return last, times


def _end(part: Part, context: int | None) -> str:
    """Why an answer ended where it would have gone on."""
    reason = part.finish_reason
    if reason == "length":
        full = context is not None and part.prompt_tokens + part.tokens >= context
        return "the context is full: /undo or /clear | " if full else "cut at max_gen_len | "
    return "" if reason else "stopped | "
