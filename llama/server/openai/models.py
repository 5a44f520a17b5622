"""Request bodies of OpenAI's completion APIs: the models that read them are the published schema.

In: a JSON object of a server or a batch file. Out: an `ApiRequest`, or a `FieldError` that names
the field. This file knows no files and no network, and runs no model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from llama.common.checks import FieldError
from llama.prompts.chat import (
    JsonSchema,
    PromptFields,
    ResponseFormatField,
    ThinkingBudget,
)
from llama.prompts.dialog_format import PromptOptions
from llama.prompts.fields import UNUSED, Fields, chosen_by
from llama.prompts.messages import ChatMessage, Content, Dialog, ImageUrlPart
from llama.prompts.tools import ToolFields
from llama.sampling_params import SamplingParams, StructuredOutput
from llama.server.accepted import AcceptedFields
from llama.server.errors import ErrorFields
from llama.server.request import ApiRequest, ImageSource
from llama.server.sampling import OPENAI_NAMES, SamplingFields, TokenId, sampling_fields

CHAT_URL = "/v1/chat/completions"
TEXT_URL = "/v1/completions"
# The paths of bodies that are in files of their own, for those who read none of them.
EMBEDDINGS_URL = "/v1/embeddings"
SCORE_URLS = ("/score", "/v1/score")
RERANK_URLS = ("/rerank", "/v1/rerank", "/v2/rerank")
MAX_PROMPTS = 2048  # prompts of one body, as in OpenAI's API

# The path of the field that gives the format of the answer, and the format.
AnswerFormat = tuple[str, StructuredOutput | None]


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Literal[False] | None, UNUSED] = None
    continuous_usage_stats: bool | None = None


class SchemaFormat(JsonSchema):
    """A JSON schema that the answer must match, as the other APIs have it."""

    type: Literal["json_schema"]


class StructuredOutputs(Fields):
    """vLLM's field, of which one member must be given. See `StructuredOutput`."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def answer_format(self, path: str) -> AnswerFormat:
        """Return the format of the answer; `path` is that of this field in the body."""
        given = {name.rstrip("_"): value for name, value in self if value is not None}
        try:
            structured_output = StructuredOutput(**given)
        except FieldError as error:
            raise error.at(error.field.replace("structured_output", path, 1)) from None
        return f"{path}.{structured_output.kind}", structured_output


class GuidedFields(Fields):
    """The fields of older versions of vLLM that structured_outputs has replaced."""

    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def guided_format(self, name: str) -> AnswerFormat:
        """Return the format of the answer that the field `name` gives."""
        kind = name.removeprefix("guided_")
        try:
            return name, StructuredOutput(**{kind: getattr(self, name)})
        except FieldError as error:
            raise error.at(error.field.replace(f"structured_output.{kind}", name, 1)) from None


class _Body(GuidedFields, AcceptedFields):
    """The fields that the bodies of both APIs have."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormatField | None = None
    structured_outputs: StructuredOutputs | None = None

    def answer_format(self) -> AnswerFormat:
        """Return the format of the answer, which at most one field may give."""
        names = ("response_format", "structured_outputs", *GuidedFields.model_fields)
        given = [name for name in names if getattr(self, name) is not None]
        if not given:
            return "tools", None
        if len(given) > 1:
            text = f"{' and '.join(given[:2])} are both given: give one"
            raise FieldError(given[0], text)
        if self.response_format is not None:
            return "response_format", self.response_format.structured_output()
        if self.structured_outputs is not None:
            return self.structured_outputs.answer_format("structured_outputs")
        return self.guided_format(given[0])

    def has_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        options = self.stream_options
        if options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options needs stream to be true")
        return bool(options and options.include_usage)

    def has_running_usage(self) -> bool:
        """Return whether each chunk of a stream has the usage so far (vLLM's field)."""
        options = self.stream_options
        return self.has_usage() and bool(options and options.continuous_usage_stats)


def _prompt_tag(prompt: Any) -> str | None:
    """Return the tag of the type that reads a prompt; the first entry of a list decides."""
    if isinstance(prompt, str):
        return "text"
    if not isinstance(prompt, list) or not prompt:
        return None
    if isinstance(prompt[0], str):
        return "texts"
    return "lists" if isinstance(prompt[0], list) else "ids"


_Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_PROMPT_LIST = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
PromptField = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[_Ids, Tag("ids")]
    | Annotated[list[str], _PROMPT_LIST, Tag("texts")]
    | Annotated[list[_Ids], _PROMPT_LIST, Tag("lists")],
    chosen_by(
        _prompt_tag,
        " must be a string, a list of token ids, or a list of at least one of either",
    ),
]
_TextSampling: type[SamplingFields] = sampling_fields(OPENAI_NAMES)
_ChatSampling: type[SamplingFields] = sampling_fields(OPENAI_NAMES | {"top_logprobs": "logprobs"})


class CompletionBody(_TextSampling, _Body):  # type: ignore[misc, valid-type]
    """The body of /v1/completions."""

    unknown_message: ClassVar[str] = "{names} cannot be used in a completion request: leave it out"

    prompt: PromptField
    parse_special: bool | None = None  # llama.cpp's name
    echo: bool | None = None  # type: ignore[assignment]  # honored here, so not only false

    def request(self, defaults: SamplingParams) -> ApiRequest:
        """Return what the body asks for; `defaults` are the parameters that it does not give."""
        path, structured_output = self.answer_format()
        derived: dict[str, Any] = {"structured_output": structured_output}
        if self.echo:
            derived["prompt_logprobs"] = self.logprobs
        prompt: Any = self.prompt
        is_list = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return ApiRequest(
            prompts=tuple(prompt) if is_list else (prompt,),
            params=self.sampling_params(defaults, **derived),
            model=self.model,
            echo=bool(self.echo),
            stream=bool(self.stream),
            has_usage=self.has_usage(),
            has_running_usage=self.has_running_usage(),
            fields=ErrorFields("prompt", self.given_names(), answer_format=path),
            parse_special=bool(self.parse_special),
        )


class Prediction(Fields):
    """A text that the answer probably repeats in parts (OpenAI's predicted outputs)."""

    type: Literal["content"]
    content: Content

    def text(self) -> str:
        """Return the text, whose parts are joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(ToolFields, PromptFields, _ChatSampling, _Body):  # type: ignore[misc, valid-type]
    """The body of /v1/chat/completions."""

    unknown_message: ClassVar[str] = "{names} cannot be used in a chat request: leave it out"
    # In a chat, logprobs is a flag, and top_logprobs gives the number.
    own_names: ClassVar[Any] = {
        own_name: name
        for own_name, name in _ChatSampling.own_names.items()
        if own_name != "logprobs"
    }

    messages: Dialog
    logprobs: bool | None = None  # type: ignore[assignment]  # honored, as echo is above
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = None
    thinking_budget_tokens: ThinkingBudget | None = None  # llama.cpp's name
    include_reasoning: bool | None = None  # honored, unlike in the other APIs

    def request(self, defaults: SamplingParams) -> ApiRequest:
        """Return what the body asks for; `defaults` are the parameters that it does not give."""
        path, structured_output = self.answer_format()
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs to be true")
        derived: dict[str, Any] = {"structured_output": structured_output}
        if self.logprobs and self.top_logprobs is None:
            derived["logprobs"] = 0
        if self.prediction is not None:
            derived["prediction"] = self.prediction.text()
        params = self.sampling_params(defaults, **derived)
        if not self.logprobs:
            params = replace(params, logprobs=None)  # top_logprobs may be 0
        return ApiRequest(
            messages=self.messages,
            images=_images_of(self.messages),
            params=params,
            model=self.model,
            stream=bool(self.stream),
            has_usage=self.has_usage(),
            has_running_usage=self.has_running_usage(),
            tools=self.tool_request(),
            prompt_options=PromptOptions(
                add_generation_prompt=self.add_generation_prompt is not False,
                continue_final_message=bool(self.continue_final_message),
                keeps_space=True,
                **self.prompt_options(),
            ),
            shows_reasoning=self.include_reasoning is not False,
            fields=ErrorFields("messages", self.given_names(), answer_format=path),
        )

    def prompt_options(self) -> dict[str, Any]:
        """Return the fields of `PromptOptions` that the body gives."""
        options = super().prompt_options()
        budget = self.thinking_budget_tokens
        if budget is None:
            return options
        if self.thinking_token_budget is not None:
            problem = " and thinking_budget_tokens are the same: give one"
            raise FieldError.of("thinking_token_budget", problem)
        return {**options, "thinking_budget": budget if budget >= 0 else None}

    def given_names(self) -> dict[str, str]:
        """Return the parameters that this body gives, each with its name in the body."""
        names: dict[str, str] = super().given_names()
        if self.thinking_budget_tokens is not None:
            names["thinking_token_budget"] = "thinking_budget_tokens"
        return names


def _images_of(messages: Sequence[ChatMessage]) -> list[ImageSource]:
    """Return the images of a dialog, in order."""
    found = []
    for i, message in enumerate(messages):
        content: Any = message.content
        for k, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, ImageUrlPart):
                path = f"messages[{i}].content[{k}]"
                found.append(ImageSource(part.url, path, is_small=part.detail == "low"))
    return found
