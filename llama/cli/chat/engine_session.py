"""A chat with a `Llama` on any number of ranks, `llama chat`.

Rank 0 owns the keyboard and the screen, and leads: it decides each turn, and before each step
whether to go on. The other ranks run its steps, and sleep in between.
"""

import contextlib
from collections.abc import Generator
from typing import Any

from llama.cli.chat.conversation import Conversation, Turn
from llama.cli.chat.session import Part, talk
from llama.cli.chat.terminal import Terminal
from llama.cli.ranks import check_one_group
from llama.generation import Llama
from llama.ranks.signals import SIGNALS


def chat_on_engine(llama: Llama, **settings: Any) -> None:
    """Talk until the person leaves or input ends; every rank makes this call. settings: those of
    `/set`. ValueError for a bad setting, and for several model-parallel groups."""
    parallel = llama.model.parallel
    check_one_group(parallel.data_size, "a chat is one conversation", "or start fewer processes")
    context = llama.model.params.max_seq_len
    SIGNALS.has_begun = True  # on every rank
    conversation = Conversation(llama.formatter, context, **settings)
    terminal = Terminal(parallel.watch)

    def answers(turn: Turn) -> Generator[Part, None, None]:
        params = conversation.sampling(turn.attempt)
        request = llama.llm_engine.prepare("", conversation.prompt(turn), params)
        with contextlib.closing(llama.llm_engine.stream([request])) as outputs:
            for output in outputs:
                if output.error is not None:
                    raise ValueError(output.error)
                answer = output.outputs[0]
                yield Part(answer.new_text, answer.finish_reason, output.usage)

    def lead() -> OSError | None:
        """Nobody reads any more, or SIGTERM's time is over: for the other ranks an end as any."""
        try:
            talk(answers, conversation, terminal)
        except OSError as error:
            return error
        return None

    gone = llama.lead(lead)
    if gone is not None:
        raise gone
