"""A chat in a terminal: turns in, answers out, of a `Llama` on any number of ranks or of a server.

Rank 0 owns the keyboard and the screen, and leads: it decides each turn, and before each step
whether to go on. The other ranks run its steps, and sleep in between. Answers of a server are in
server_session.py, where there are neither ranks nor torch.
"""

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama.cli.chat.conversation import Conversation, Turn, TurnStats
from llama.cli.chat.terminal import Terminal, read_turn
from llama.ranks.signals import SIGNALS
from llama.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llama.generation import Llama


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


def chat(llama: "Llama", *, system: str | None = None, **settings: Any) -> None:
    """Talk until the person leaves or input ends; every rank makes this call.

    settings: those of `/set`. ValueError for a bad setting, and for several model-parallel groups,
    as there is one keyboard.
    """
    parallel = llama.model.parallel
    if parallel.data_size > 1:
        raise ValueError(
            f"a chat is one conversation, and there are {parallel.data_size} model-parallel "
            "groups: leave model_parallel_size out, or start fewer processes"
        )
    context = llama.model.params.max_seq_len
    SIGNALS.has_begun = True  # on every rank
    conversation = Conversation(llama.formatter, context, system=system, **settings)
    terminal = Terminal(parallel.size, parallel.watch)
    gone = llama.lead(lambda: talk(_of_engine(llama), conversation, terminal))
    if gone is not None:
        raise gone


def _of_engine(llama: "Llama") -> Answers:
    """Answers of the engine of this process."""

    def answers(conversation: Conversation, turn: Turn) -> Generator[Part, None, None]:
        params = SamplingParams(**conversation.sampling(turn.attempt))
        engine = llama.llm_engine
        request = engine.prepare("", conversation.prompt(turn), params)
        with contextlib.closing(engine.stream([request])) as outputs:
            for output in outputs:
                answer, usage = output.outputs[0], output.usage
                yield Part(
                    answer.text,
                    answer.new_text,
                    "error" if output.error is not None else answer.finish_reason,
                    output.error,
                    usage.prompt_tokens,
                    usage.cached_tokens,
                    usage.completion_tokens,
                )

    return answers


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
