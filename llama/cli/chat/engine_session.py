"""A chat with a `Llama` on any number of ranks: `llama chat`.

Rank 0 reads the keyboard, writes to the screen and leads: it decides what each turn does, and
before each step whether to continue. The other ranks run its steps and sleep in between.
"""

import contextlib
import functools
from collections.abc import Generator
from pathlib import Path
from typing import Any

from llama.api import SIGNALS, Llama, Watch
from llama.cli.chat.conversation import Conversation, Turn
from llama.cli.chat.session import Part, talk
from llama.cli.chat.terminal import Terminal
from llama.cli.ranks import check_one_group
from llama.prompts.chat import chat_params
from llama.prompts.dialog_format import Messages, PromptOptions
from llama.prompts.pictures import Picture, PictureReader, pictures_of, with_pictures


class _Reader(PictureReader):
    """Reads each image of a chat once."""

    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes.chunk_size, sizes.max_tiles)
        object.__setattr__(self, "_read", functools.cache(super().read))

    def read(self, source: Any) -> Picture:
        """Read an image, or return it as it was read before."""
        picture: Picture = self._read(source)  # type: ignore[attr-defined]
        return picture


def chat_on_engine(llama: Llama, history: Path | None = None, **settings: Any) -> None:
    """Chat until the user leaves or the input ends. Every rank makes this call.

    Args:
        llama: The model.
        history: The file that keeps what is typed; None: it is not kept.
        settings: Initial values of the settings of `/set`, and `system`.

    Raises:
        ValueError: A setting is not allowed, or there are several model-parallel groups.
    """
    parallel = llama.model.parallel
    check_one_group(parallel.data_size, "a chat is one conversation", "or start fewer processes")
    context = llama.model.params.max_seq_len
    SIGNALS.has_begun = True  # Every rank sets this.

    reader = None if llama.llm_engine.images is None else _Reader(llama.llm_engine.images)

    def read(messages: Messages) -> Messages:
        return messages if reader is None else with_pictures(list(messages), reader)

    def encode(messages: Messages, *, add_generation_prompt: bool = True) -> list[int]:
        options = PromptOptions(add_generation_prompt=add_generation_prompt)
        return llama.dialog_format.encode(read(messages), None, options)

    conversation = Conversation(encode, context, **settings)
    terminal = Terminal(Watch.of_process(), history)

    def answers(turn: Turn) -> Generator[Part, None, None]:
        params = chat_params(
            conversation.sampling(turn.attempt),
            None,
            llama.dialog_format,
            PromptOptions(),
        )
        ids = conversation.prompt(turn)
        pictures = pictures_of(read(conversation.window.of(turn.dialog)))
        request = llama.llm_engine.prepare("", ids, params, pictures=pictures)
        with contextlib.closing(llama.llm_engine.stream([request])) as outputs:
            for output in outputs:
                if output.error is not None:
                    raise ValueError(output.error)
                answer = output.outputs[0]
                yield Part(
                    answer.new_text,
                    answer.finish_reason,
                    output.usage,
                    new_reasoning=answer.new_reasoning,
                )

    def lead() -> OSError | None:
        """Chat, and return the error if nobody reads any more or the drain time is over.

        For the other ranks that is an ordinary end, hence no exception is raised here.
        """
        try:
            talk(answers, conversation, terminal)
        except OSError as error:
            return error
        return None

    error = llama.lead(lead)
    if error is not None:
        raise error
