"""The loop of a chat in a terminal: it reads turns and shows answers.

The answers come from the engine (engine_session.py) or from a server (server_session.py). This
module must know neither ranks nor torch.
"""

import contextlib
import time
from collections.abc import Callable, Generator
from typing import NamedTuple

from llama.api import Usage
from llama.cli.chat.conversation import Conversation, Turn
from llama.cli.chat.stats import TurnStats
from llama.cli.chat.terminal import Terminal, read_turn


class Part(NamedTuple):
    """A piece of an answer. A part with all defaults says that some time has passed."""

    new_text: str = ""
    finish_reason: str | None = None  # OpenAI's value, in the last part
    usage: Usage | None = None  # token counts so far, if they are known
    rate: float | None = None  # tokens per second, if a server reports it
    new_reasoning: str = ""  # what the model thinks before its answer


# Starts the answer to a turn. The last part is the one with a finish_reason. Closing the generator
# stops the answer. The generator raises TypeError or ValueError if the turn cannot be answered or
# the answer fails.
Answers = Callable[[Turn], Generator[Part, None, None]]


def talk(answers: Answers, conversation: Conversation, terminal: Terminal) -> None:
    """Read questions and show answers until the chat ends.

    Raises:
        OSError: Nobody reads the output, or an answer took too long after SIGTERM.
    """
    with terminal.open():
        if terminal.screen:
            terminal.note("/help lists the commands, /bye ends the chat")
        while (text := _read(terminal)) is not None and not terminal.stops:
            turn = conversation.handle(text)
            if turn.note:
                terminal.note(turn.note)
            if turn.leave:
                break
            if turn.dialog:
                _answer(answers, conversation, turn, terminal)


def _read(terminal: Terminal) -> str | None:
    """Read the next turn; return None at the end of input or at the second Ctrl-C in a row."""
    for may_repeat in (True, False):
        try:
            return read_turn(terminal.read_line)
        except EOFError:
            break
        except KeyboardInterrupt:
            if not terminal.keyboard:
                raise
            if may_repeat:
                terminal.note("press Ctrl-C again or Ctrl-D, or type /bye, to end the chat")
    return None


def _answer(answers: Answers, conversation: Conversation, turn: Turn, terminal: Terminal) -> None:
    """Show an answer while it is generated, and add the turn to the conversation."""
    began = time.perf_counter()
    part = Part()
    text = ""
    reasoning = ""
    times: list[float] = []  # arrival time of each part, in seconds after the question
    try:
        with terminal.watch() as pressed, contextlib.closing(answers(turn)) as parts:
            while not (part.finish_reason or pressed()):
                terminal.check_drain()
                part = next(parts)
                if part != Part():
                    times.append(time.perf_counter() - began)
                reasoning += part.new_reasoning
                if part.new_reasoning:
                    terminal.write_reasoning(part.new_reasoning)
                text += part.new_text
                terminal.write(part.new_text)
    except (TypeError, ValueError) as error:
        terminal.fold_reasoning()
        if text:
            terminal.write("\n")
        terminal.note(f"error: {error}. The question was not kept.")
        return
    terminal.fold_reasoning()
    if not (part.finish_reason or text):
        terminal.note("stopped before the first token: the question was not kept")
        return
    terminal.write("\n")
    usage = part.usage or Usage(0, len(times), 0)
    stats = TurnStats(times[0], times[-1], usage, part.rate)
    conversation.commit(turn, text, stats, reasoning)
    end = _end(part, conversation.window.context)
    if conversation.window.num_left_out:
        end += f"oldest turns left out: {conversation.window.num_left_out} | "
    terminal.note(end + stats.describe(conversation.window.context))


def _end(part: Part, context: int | None) -> str:
    """Return why an answer ended before the model ended it, or an empty text."""
    if part.finish_reason is None:
        return "stopped | "
    if part.finish_reason != "length":
        return ""
    total = part.usage.total_tokens if part.usage else 0
    if context is not None and total >= context:
        return "cut because the context is full | "
    return "cut at max_gen_len | "
