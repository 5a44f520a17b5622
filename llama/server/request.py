"""A checked request of any API: the types that all routes and batch files use.

In: prompts, or messages with tools, and parameters; or inputs whose hidden states are read. Out:
what the engine needs of them, and what reads the calls in an answer. This file knows no network.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llama.api import CompletionOutput, RequestOutput
from llama.api import Request as EngineRequest
from llama.common.checks import FieldError
from llama.prompts.answer import AnswerDeltas
from llama.prompts.chat import chat_params
from llama.prompts.dialog_format import DialogFormat, PromptOptions
from llama.prompts.messages import ImageUrlPart, TextPart
from llama.prompts.tools import Tools
from llama.sampling_params import SamplingParams
from llama.server.errors import ErrorFields

_ANSWERED = PromptOptions.for_answer(continues=False)


@dataclass(frozen=True)
class ImageSource:
    """An image of a chat that has not been read.

    Attributes:
        url: a data: URL, base64, or the URL of a file on a server.
        path: its path in the body, for errors.
        is_small: whether it is shrunk into one tile.
    """

    url: str
    path: str
    is_small: bool = False


@dataclass(frozen=True)
class ApiRequest:
    """A checked request; the body of another chat API becomes such a request, too.

    Attributes:
        params: parameters of all answers.
        prompts: prompts of a completion; a chat has none.
        messages: dialog of a chat.
        images: images of the dialog, in order.
        model: name of the model that the body gives.
        echo: whether a completion begins with its prompt.
        stream: whether the answer streams.
        has_usage: whether a stream ends with the usage.
        has_running_usage: whether each chunk of a stream has the usage so far.
        tools: tools of a chat.
        prompt_options: how the prompt of a chat ends, and the variables of its template.
        max_context: number of tokens of prompt and answer together; None for the whole context.
        shows_reasoning: whether the answer of a chat has the model's reasoning.
        fields: names of the body, for errors.
        parse_special: whether names of special tokens in prompts are those tokens.
    """

    params: SamplingParams
    prompts: tuple[str | list[int], ...] = ()
    messages: Sequence[Any] = ()
    images: Sequence[ImageSource] = ()
    model: str | None = None
    echo: bool = False
    stream: bool = False
    has_usage: bool = False
    has_running_usage: bool = False
    tools: Tools | None = None
    prompt_options: PromptOptions = _ANSWERED
    max_context: int | None = None
    shows_reasoning: bool = True
    fields: ErrorFields = field(default_factory=ErrorFields)
    parse_special: bool = False

    def __post_init__(self) -> None:
        if self.tools is not None and self.params.structured_output is not None:
            object.__setattr__(self, "tools", replace(self.tools, has_format=True))

    @property
    def chat(self) -> bool:
        """Whether it is a chat; it is a completion otherwise."""
        return not self.prompts

    @property
    def num_answers(self) -> int:
        """The number of sequences that it asks the engine for."""
        return max(len(self.prompts), 1) * (self.params.best_of or self.params.n)

    def chat_ids(self, dialog_format: DialogFormat) -> list[int]:
        """Return the token ids of a chat's dialog.

        Raises:
            FieldError: the error names the field, or the message, that is wrong.
        """
        return dialog_format.encode(self.messages, self.tools, self.prompt_options)

    def chat_params(self, dialog_format: DialogFormat) -> SamplingParams:
        """Return the parameters of a chat; see `llama.prompts.chat.chat_params`."""
        return chat_params(self.params, self.tools, dialog_format, self.prompt_options)

    def deltas(
        self,
        dialog_format: DialogFormat,
        response_id: str,
        output: RequestOutput,
        answer: CompletionOutput,
    ) -> AnswerDeltas:
        """Return the object that reads the reasoning and the calls in an answer."""
        key = (response_id, output.prompt_token_ids, output.index, answer.index)
        shows_special = not self.params.skip_special_tokens
        return AnswerDeltas(
            dialog_format,
            self.tools,
            key,
            shows_special=shows_special,
            shows_reasoning=self.shows_reasoning,
        )


@dataclass(frozen=True)
class PooledRequest:
    """A checked request for vectors, labels or scores, which hidden states of whole prompts give.

    Attributes:
        inputs: what `make` takes: texts, lists of token ids, pairs of texts, or dialogs.
        make: makes the engine's request for an input. It also takes `index=`, the position of the
            input, and further arguments of `Preparer.prepare`.
        content: makes the response's object of the last output of each input, in their order.
        values_per_input: numbers of the response for each input.
        num_shared: characters that are encoded again with each input.
    """

    inputs: Sequence[Any]
    make: Callable[..., EngineRequest]
    content: Callable[[list[RequestOutput]], dict[str, Any]]
    values_per_input: int = 1
    num_shared: int = 0


class ConvertedChat:
    """The dialog of a body of another API, as it becomes a dialog of OpenAI's.

    Calls and their results are matched here, because there is no stored state.

    Attributes:
        paths: for each message, the path in the body that it came from, which errors name.
        images: the images, in order.
    """

    def __init__(self, instructions: str | None, path: str) -> None:
        """Begin a dialog with a system message, if there are instructions."""
        # The content of each is a list of texts and images.
        self._messages: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.images: list[ImageSource] = []
        self._call_ids: set[str] = set()
        self._reasoning: list[str] = []  # reasoning whose message has not come yet
        if instructions is not None:
            self.add_text("system", instructions, path)

    def add_text(self, role: str, text: str | None, path: str) -> None:
        """Add a text.

        Texts of one path are one message, and so are system messages at the beginning. A text of
        None begins a message without content.
        """
        continues = self.paths[-1:] == [path] or (role == "system" and len(self.paths) == 1)
        if not continues or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
            self.paths.append(path)
        if text is not None:
            self._messages[-1]["content"].append(text)
        self._take_reasoning()

    def add_image(self, role: str, image: ImageSource, path: str) -> None:
        """Add an image to the message of the path, as `add_text` adds a text."""
        self.add_text(role, None, path)
        self._messages[-1]["content"].append(image_part(image))
        self.images.append(image)

    def add_reasoning(self, text: str) -> None:
        """Add reasoning; it belongs to the assistant's message that it precedes or is a part of."""
        self._reasoning.append(text)

    def _take_reasoning(self) -> None:
        """Put the reasoning that has come into the last message, if that is the assistant's."""
        message = self._messages[-1]
        if self._reasoning and message["role"] == "assistant":
            before = message.get("reasoning_content")
            parts = [before, *self._reasoning] if before else self._reasoning
            message["reasoning_content"] = "\n".join(parts)
        self._reasoning = []

    def add_call(self, call_id: str, name: str, arguments: str | dict[str, Any], path: str) -> None:
        """Add a call; it belongs to the message before it, if that is the assistant's."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self.add_text("assistant", None, path)
        calls = self._messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call_id, "function": {"name": name, "arguments": arguments}})
        self._call_ids.add(call_id)
        self._take_reasoning()

    def add_result(
        self, call_id: str, content: Any, path: str, *, id_field: str, problem: str
    ) -> None:
        """Add what a call returned.

        Args:
            call_id: id of the call.
            content: what it returned.
            path: path of the result in the body.
            id_field: path of the field that gives the id.
            problem: what the id names where there is no such call, for the error.

        Raises:
            FieldError: no call has the id.
        """
        if call_id not in self._call_ids:
            raise FieldError(id_field, f"{id_field} names {problem}")
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        self.paths.append(path)

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's format."""
        for message in self._messages:
            content = message["content"]
            if isinstance(content, list):
                message["content"] = _joined(content)
        return self._messages


def image_part(image: ImageSource) -> ImageUrlPart:
    """Return the part of a message of OpenAI's that an image is."""
    return ImageUrlPart(type="image_url", image_url=image.url)


def _joined(content: list[str | ImageUrlPart]) -> str | list[Any] | None:
    """Return content in OpenAI's format: a text, or parts if there are images."""
    texts = [part for part in content if isinstance(part, str)]
    if len(texts) == len(content):
        return "\n".join(texts) if texts else None
    return [TextPart(type="text", text=part) if isinstance(part, str) else part for part in content]
