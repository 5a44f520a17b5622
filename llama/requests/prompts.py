"""The prompts of Meta's API: texts, dialogs or token ids in, requests for the engine out.

In: prompts as a caller gives them, and the options of one call. Out: token ids and requests. All
checks run while these are iterated, not when a method is called: the engine iterates them where an
error of one rank becomes an error of every rank.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llama.common.checks import FieldError, FieldTypeError, whole_number
from llama.prompts.chat import ChatOptions
from llama.prompts.dialog_format import DialogFormat
from llama.prompts.pictures import (
    Picture,
    PictureReader,
    pictures_of,
    split_text,
    with_pictures,
)
from llama.requests.llm_engine import LLMEngine
from llama.requests.prepare import not_ids
from llama.requests.request import Request
from llama.sampling_params import SamplingParams


@dataclass(frozen=True)
class Prompt:
    """The token ids of a prompt, and its images in order."""

    ids: list[int]
    pictures: list[Picture]


@dataclass(frozen=True)
class CallOptions:
    """The options of one call of Meta's API, which hold for all of its prompts.

    Attributes:
        max_gen_len: The maximum number of generated tokens; None generates as many as fit.
        sampling: Fields of `SamplingParams`, as the caller gave them.
        logprobs: Whether the log-probabilities of the tokens are wanted.
        echo: Whether the answer begins with its prompt.
        chat: The options of a chat; None for a call without dialogs.
        adapter: The name of a LoRA adapter; None for the base model.
    """

    max_gen_len: int | None
    sampling: Mapping[str, Any]
    logprobs: bool = False
    echo: bool = False
    chat: ChatOptions | None = None
    adapter: str | None = None

    def params(self, dialog_format: DialogFormat) -> SamplingParams:
        """Return the sampling parameters of each prompt.

        Args:
            dialog_format: The format of the model's dialogs.

        Raises:
            TypeError, ValueError: Names the parameter at fault.
        """
        max_tokens = whole_number("max_gen_len", self.max_gen_len, 0, 2**31 - 1, optional=True)
        params = SamplingParams(
            max_tokens=max_tokens,
            logprobs=0 if self.logprobs else None,
            prompt_logprobs=0 if self.logprobs and self.echo else None,
            **self.sampling,
        )
        return params if self.chat is None else self.chat.params(params, dialog_format)


@dataclass(frozen=True)
class PromptReader:
    """Reads the prompts of a call.

    Attributes:
        engine: The engine, whose tokenizer encodes texts.
        dialog_format: The format of the model's dialogs.
    """

    engine: LLMEngine
    dialog_format: DialogFormat

    @property
    def pictures(self) -> PictureReader | None:
        """The reader of images for the model; None if it reads text alone."""
        sizes = self.engine.images
        return None if sizes is None else PictureReader(sizes.chunk_size, sizes.max_tiles)

    def texts(self, prompts: Any) -> Iterator[list[int] | Prompt]:
        """Yield each prompt of a list: the ids of a text, or of texts and images."""
        tokenizer = self.engine.tokenizer
        for i, prompt in enumerate(rows("prompts", prompts)):
            if isinstance(prompt, str):
                yield tokenizer.encode(prompt, bos=True, eos=False)
                continue
            reader = self.pictures
            if reader is None or tokenizer.image_id is None or not isinstance(prompt, list):
                raise TypeError(f"prompts[{i}] is {type(prompt).__name__}, not a string")
            try:
                parts = split_text(prompt, reader)
            except (TypeError, ValueError) as e:
                raise FieldError("prompts", f"prompts[{i}]{e}") from None
            ids = [tokenizer.bos_id]
            for part in parts:
                if isinstance(part, str):
                    ids += tokenizer.encode(part, bos=False, eos=False)
                else:
                    ids.append(tokenizer.image_id)
            yield Prompt(ids, [part for part in parts if isinstance(part, Picture)])

    def dialogs(self, dialogs: Any, chat: ChatOptions) -> Iterator[list[int] | Prompt]:
        """Yield the token ids of each dialog of a list, with its images."""
        self.engine.check_generates()
        reader = self.pictures
        for i, dialog in enumerate(rows("dialogs", dialogs)):
            tools = chat.tool_request
            try:
                read = dialog if reader is None else with_pictures(dialog, reader)
                ids = self.dialog_format.encode(read, tools, chat.prompt_options)
                yield ids if reader is None else Prompt(ids, pictures_of(read))
            except (TypeError, ValueError) as e:
                field = getattr(e, "field", "dialogs")
                message = f"dialog {i}, {e}"
                if isinstance(e, TypeError):
                    raise FieldTypeError(field, message) from None
                raise FieldError(field, message) from None

    def requests(self, prompts: Iterable[Any], options: CallOptions) -> Iterator[Request]:
        """Yield a request for each prompt: a list of token ids, or a `Prompt`."""
        params = options.params(self.dialog_format)
        for i, prompt in enumerate(prompts):
            ids, pictures = prompt, []
            if isinstance(prompt, Prompt):
                ids, pictures = prompt.ids, prompt.pictures
            if isinstance(ids, str):  # the engine would accept a text as a prompt
                raise not_ids(f"prompt {i}", ids)
            yield self.engine.prepare(
                "", ids, params, index=i, adapter=options.adapter, pictures=pictures
            )


def rows(name: str, prompts: Any) -> Iterator[Any]:
    """Yield the prompts of a list or tuple, or the rows of an array or tensor.

    Args:
        name: The name of the argument.
        prompts: Its value.
    """
    if not (isinstance(prompts, list | tuple) or hasattr(prompts, "tolist")):
        raise TypeError(f"{name} must be a list, got {type(prompts).__name__}: wrap it in [ ]")
    yield from prompts
