"""A chat with a `Llama` in a terminal, on one rank or many.

Rank 0 owns the keyboard and the screen, and leads: it decides each turn, and before each step
whether to go on. The other ranks run its steps, and sleep in between.
"""

import contextlib
import time
from typing import Any

from llama.chat.conversation import Conversation, Turn, TurnStats
from llama.chat.terminal import Terminal, read_turn
from llama.generation import Llama
from llama.requests.request import RequestOutput
from llama.sampling_params import SamplingParams
from llama.signals import SIGNALS


def chat(llama: Llama, *, system: str | None = None, **settings: Any) -> None:
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
    SIGNALS.has_begun = True
    conversation = Conversation(llama.formatter, context, system=system, **settings)
    gone = llama.lead(lambda: _talk(llama, conversation, Terminal(parallel.size)))
    if gone is not None:
        raise gone


def _talk(llama: Llama, conversation: Conversation, terminal: Terminal) -> OSError | None:
    """Read and answer until the end; the error if nobody reads the answers any more, or the last
    one took too long after SIGTERM.

    It is returned: for the other ranks, that is an end as any other.
    """
    try:
        _take_turns(llama, conversation, terminal)
    except OSError as error:
        return error
    return None


def _take_turns(llama: Llama, conversation: Conversation, terminal: Terminal) -> None:
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
                _answer(llama, conversation, turn, terminal)


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


def _answer(llama: Llama, conversation: Conversation, turn: Turn, terminal: Terminal) -> None:
    """Show the answer and add the turn to the conversation. Without an answer, the question is
    dropped too.
    """
    try:
        output, times = _stream(llama, conversation, turn, terminal)
    except (TypeError, ValueError) as error:
        terminal.note(f"error: {error}. The question was not kept.")
        return
    if output is None or not (output.finished or output.outputs[0].text):
        terminal.note("stopped before the first word: the question was not kept")
        return
    if output.error is not None:
        terminal.note(f"error: {output.error}. The question was not kept.")
        return
    terminal.write("\n")
    usage = output.usage
    stats = TurnStats(
        times[0], times[-1], usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
    )
    conversation.commit(turn, output.outputs[0].text, stats)
    terminal.note(_end(output, conversation.context) + stats.describe(conversation.context))


def _stream(
    llama: Llama, conversation: Conversation, turn: Turn, terminal: Terminal
) -> tuple[RequestOutput | None, list[float]]:
    """The last output, all of whose text has been shown, and when each came, in seconds from now.

    ValueError or TypeError for what cannot be asked.
    """
    began = time.perf_counter()
    engine, output, times = llama.llm_engine, None, []
    with terminal.watch() as pressed:
        params = SamplingParams(**conversation.sampling(turn.attempt))
        request = engine.prepare("", conversation.prompt(turn), params)
        with contextlib.closing(engine.stream([request])) as outputs:
            while not (request.finished or pressed()):
                terminal.check_drain()
                output = next(outputs)
                times.append(time.perf_counter() - began)
                terminal.write(output.outputs[0].new_text)
    return output, times


def _end(output: RequestOutput, context: int) -> str:
    """Why an answer ended where it would have gone on."""
    reason = output.outputs[0].finish_reason
    if reason == "length":
        full = output.usage.total_tokens >= context
        return "the context is full: /undo or /clear | " if full else "cut at max_gen_len | "
    return "" if reason else "stopped | "
