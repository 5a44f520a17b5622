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
from llama.requests.llm_engine import Request, RequestOutput
from llama.sampling_params import SamplingParams

KEEP_ALIVE_S = 20.0
_GO_ON, _STOP, _BYE = b"", b"stop", b"bye"  # what rank 0 says, besides prompts with settings


def chat(
    llama: Llama, *, system: str | None = None, timeout_s: float = 600.0, **settings: Any
) -> None:
    """Talk until the person leaves or input ends; every rank makes this call.

    settings: those of `/set`. timeout_s: as given to `Llama.build`; however long the person
    thinks, the other ranks hear from rank 0 in time. ValueError for a bad setting, and for several
    model-parallel groups, as there is one keyboard.
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
        _lead(llama, conversation, Terminal(parallel.size), min(KEEP_ALIVE_S, timeout_s / 4))


def _lead(llama: Llama, conversation: Conversation, terminal: Terminal, every: float) -> None:
    """Rank 0: read, answer, until the end. The others are told of it where they wait for word."""
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
        parallel.broadcast_bytes(_BYE)
        raise
    parallel.broadcast_bytes(_BYE)


def _read(terminal: Terminal, parallel: ModelParallel, every: float) -> str | None:
    """The next turn; None at the end of input, or at the second Ctrl-C in a row."""
    for left in (1, 0):
        try:
            with _keeping_others(parallel, every):
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
def _keeping_others(parallel: ModelParallel, every: float) -> Iterator[None]:
    """While rank 0 waits for a person, let the others hear of it before their patience ends."""
    if parallel.size == 1:
        yield
        return
    done = threading.Event()

    def beat() -> None:
        while not done.wait(every):
            parallel.broadcast_bytes(_GO_ON)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _answer(llama: Llama, conversation: Conversation, turn: Turn, terminal: Terminal) -> None:
    """Show the answer to a turn, and keep it; where there is none, the turn never was."""
    try:
        output, times = _stream(llama, conversation, turn, terminal)
    except (TypeError, ValueError) as error:
        terminal.note(f"error: {error}. The question was not kept.")
        return
    if output is None or not (output.finished or output.outputs[0].text):
        terminal.note("stopped before the first word: the question was not kept")
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
                _STOP if pressed() else _GO_ON
            ):
                yield next(outputs)
        except GeneratorExit:  # rank 0 could not show the last output, and the others wait for word
            if not request.finished:
                parallel.broadcast_bytes(_STOP)
            raise


def _follow(llama: Llama) -> None:
    """Every rank but 0: run what it runs, and say nothing."""
    while (word := llama.model.parallel.broadcast_bytes(b"")) != _BYE:
        if word != _GO_ON:
            request = _prepare(llama, *json.loads(word))
            with contextlib.suppress(ValueError):  # which rank 0 has too, and tells
                for _ in _run(llama, request, lambda: False):
                    pass
