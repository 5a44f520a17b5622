"""A chat with a `Llama` in a terminal, on one rank or many.

Rank 0 owns the keyboard and the screen: it decides each turn, and before each step whether to go
on. The other ranks follow: they learn the prompt and run the same steps, and sleep in between.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from llama.chat.conversation import Conversation, Turn, TurnStats
from llama.chat.terminal import Terminal, read_turn
from llama.generation import Llama
from llama.parallel import ModelParallel
from llama.requests.request import Request, RequestOutput
from llama.sampling_params import SamplingParams

KEEP_ALIVE_S = 20.0
_CONTINUE, _STOP, _EXIT = b"", b"stop", b"exit"  # rank 0's messages, besides prompts


def chat(llama: Llama, *, system: str | None = None, **settings: Any) -> None:
    """Talk until the person leaves or input ends; every rank makes this call.

    settings: those of `/set`. However long the person thinks, the other ranks hear from rank 0 in
    time. ValueError for a bad setting, and for several model-parallel groups, as there is one
    keyboard.
    """
    parallel = llama.model.parallel
    if parallel.data_size > 1:
        raise ValueError(
            f"a chat is one conversation, and there are {parallel.data_size} model-parallel "
            "groups: leave model_parallel_size out, or start fewer processes"
        )
    context = llama.model.params.max_seq_len
    conversation = Conversation(llama.formatter, context, system=system, **settings)
    if parallel.rank:
        _follow(llama)
    else:
        every = min(KEEP_ALIVE_S, parallel.timeout_s / 4)
        _lead(llama, conversation, Terminal(parallel.size), every)


def _lead(llama: Llama, conversation: Conversation, terminal: Terminal, every: float) -> None:
    """Rank 0: read and answer until the end. Then the other ranks get an exit message."""
    parallel = llama.model.parallel
    try:
        with terminal.open():
            if terminal.screen:
                terminal.note("/help lists the commands, /bye leaves")
            while (text := _read(terminal, parallel, every)) is not None:
                turn = conversation.handle(text)
                if turn.note:
                    terminal.note(turn.note)
                if turn.leave:
                    break
                if turn.dialog:
                    _answer(llama, conversation, turn, terminal)
    except OSError:  # nobody reads the answers any more
        parallel.broadcast_bytes(_EXIT)
        raise
    parallel.broadcast_bytes(_EXIT)


def _read(terminal: Terminal, parallel: ModelParallel, every: float) -> str | None:
    """The next turn; None at the end of input, or at the second Ctrl-C in a row."""
    for left in (1, 0):
        try:
            with _heartbeat(parallel, every):
                return read_turn(terminal.read_line)
        except EOFError:
            break
        except KeyboardInterrupt:
            if not terminal.keyboard:
                raise
            if left:
                terminal.note("Ctrl-C again, Ctrl-D or /bye to leave")
    return None


@contextlib.contextmanager
def _heartbeat(parallel: ModelParallel, every: float) -> Iterator[None]:
    """While rank 0 waits for a person, send messages: each wait of the other ranks has a limit."""
    if parallel.size == 1:
        yield
        return
    done = threading.Event()

    def beat() -> None:
        while not done.wait(every):
            parallel.broadcast_bytes(_CONTINUE)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


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

    ValueError or TypeError for what cannot be asked, before the other ranks hear of it; and for
    what the model cannot answer, on every rank.
    """
    began = time.perf_counter()
    settings = conversation.sampling(turn.attempt)
    output, times = None, []
    with terminal.watch() as pressed:
        prompt = conversation.prompt(turn)
        request = _prepare(llama, prompt, settings)
        llama.model.parallel.broadcast_bytes(json.dumps([prompt, settings]).encode())
        with contextlib.closing(_run(llama, request, pressed)) as outputs:
            for output in outputs:
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


def _prepare(llama: Llama, prompt: list[int], settings: dict[str, Any]) -> Request:
    return llama.llm_engine.prepare("", prompt, SamplingParams(**settings))


def _run(
    llama: Llama, request: Request, pressed: Callable[[], bool]
) -> Generator[RequestOutput, None, None]:
    """The answer as it grows, the same on every rank; rank 0's `pressed` ends it for all."""
    parallel = llama.model.parallel
    with contextlib.closing(llama.llm_engine.stream([request])) as outputs:
        try:
            while not request.finished and not parallel.broadcast_bytes(
                _STOP if pressed() else _CONTINUE
            ):
                yield next(outputs)
        except GeneratorExit:  # rank 0 could not show an output; the others wait for a message
            if not request.finished:
                parallel.broadcast_bytes(_STOP)
            raise


def _follow(llama: Llama) -> None:
    """Every other rank: run what rank 0 runs, and print nothing."""
    while (message := llama.model.parallel.broadcast_bytes(b"")) != _EXIT:
        if message != _CONTINUE:
            request = _prepare(llama, *json.loads(message))
            with contextlib.suppress(ValueError):  # rank 0 has it too, and shows it
                for _ in _run(llama, request, lambda: False):
                    pass
