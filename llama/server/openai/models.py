"""Request bodies of OpenAI's completion APIs: the models that read them are the published schema.

In: a JSON object of a server or a batch file. Out: an `OpenAIRequest`, or a `FieldError` that names
the field. It knows no files and no network, and runs nothing.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, TypeAdapter

from llama.checks import FieldError
from llama.prompts.chat import JsonSchema, ResponseFormatField
from llama.prompts.fields import UNUSED, Fields, chosen_by, read_as
from llama.prompts.messages import Content, Dialog
from llama.prompts.tools import ToolFields
from llama.sampling_params import SamplingParams, StructuredOutput
from llama.server.accepted import AcceptedFields
from llama.server.errors import ErrorFields
from llama.server.openai.request import OpenAIRequest
from llama.server.sampling import OPENAI_NAMES, TokenId, sampling_fields

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
MOST_PROMPTS = 2048  # of one body, as OpenAI has it


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Literal[False] | None, UNUSED] = None
    continuous_usage_stats: Annotated[Literal[False] | None, UNUSED] = None


class SchemaFormat(JsonSchema):
    """The form of an answer, as the other APIs have it."""

    type: Literal["json_schema"]


_Form = tuple[str, StructuredOutput | None]  # after the place in the body that gave it


class StructuredOutputs(Fields):
    """vLLM's field: one of these. See `StructuredOutput`."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def form(self, place: str) -> _Form:
        given = {name.rstrip("_"): value for name, value in self if value is not None}
        try:
            form = StructuredOutput(**given)
        except FieldError as e:
            raise e.at(e.field.replace("structured_output", place, 1)) from None
        return f"{place}.{form.kind}", form


class _Body(AcceptedFields):
    """What the bodies of both APIs have."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormatField | None = None
    structured_outputs: StructuredOutputs | None = None

    def form(self) -> _Form:
        wanted, others = self.response_format, self.structured_outputs
        if wanted is None:
            return ("tools", None) if others is None else others.form("structured_outputs")
        if others is not None:
            words = "response_format and structured_outputs are both given: give one"
            raise FieldError("response_format", words)
        return "response_format", wanted.structured_output()

    def has_usage(self) -> bool:
        options = self.stream_options
        if options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options needs stream to be true")
        return bool(options and options.include_usage)


def _kind_of_prompt(prompt: Any) -> str | None:
    """All entries of a list must be like the first one."""
    if isinstance(prompt, str):
        return "text"
    if not isinstance(prompt, list) or not prompt:
        return None
    first = prompt[0]
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


_Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_MANY: Any = Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)
_Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[_Ids, Tag("ids")]
    | Annotated[list[str], _MANY, Tag("texts")]
    | Annotated[list[_Ids], _MANY, Tag("lists")],
    chosen_by(
        _kind_of_prompt,
        " must be a string, a list of token ids, or a list of at least one of either",
    ),
]
_TextSampling: Any = sampling_fields(OPENAI_NAMES)
_ChatSampling: Any = sampling_fields(OPENAI_NAMES | {"top_logprobs": "logprobs"})


class CompletionBody(_TextSampling, _Body):
    """The body of /v1/completions."""

    unknown_message: ClassVar[str] = "{names} cannot be used in a completion request: leave it out"

    prompt: _Prompt
    echo: bool | None = None

    def request(self, defaults: SamplingParams) -> OpenAIRequest:
        """`defaults`: the parameters that the body does not give."""
        place, form = self.form()
        echoed = {"prompt_logprobs": self.logprobs} if self.echo else {}
        params = self.sampling_params(defaults, structured_output=form, **echoed)
        is_list = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return OpenAIRequest(
            prompts=tuple(self.prompt) if is_list else (self.prompt,),  # type: ignore[arg-type]
            params=params,
            model=self.model,
            echo=bool(self.echo),
            stream=bool(self.stream),
            has_usage=self.has_usage(),
            fields=ErrorFields("prompt", self.given_names(), form=place),
        )


class Prediction(Fields):
    """Predicted outputs."""

    type: Literal["content"]
    content: Content

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(ToolFields, _ChatSampling, _Body):
    """The body of /v1/chat/completions. top_logprobs: how many where logprobs is true."""

    unknown_message: ClassVar[str] = "{names} cannot be used in a chat request: leave it out"
    own_names: ClassVar[Any] = {
        own: name for own, name in _ChatSampling.own_names.items() if own != "logprobs"
    }

    messages: Dialog
    logprobs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = None

    def request(self, defaults: SamplingParams) -> OpenAIRequest:
        """`defaults`: the parameters that the body does not give."""
        place, form = self.form()
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs to be true")
        own: dict[str, Any] = {}
        if self.logprobs and self.top_logprobs is None:
            own["logprobs"] = 0
        if self.prediction is not None:
            own["prediction"] = self.prediction.text()
        return OpenAIRequest(
            messages=self.messages,
            params=self.sampling_params(defaults, structured_output=form, **own),
            model=self.model,
            stream=bool(self.stream),
            has_usage=self.has_usage(),
            tools=self.tool_request(),
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            fields=ErrorFields("messages", self.given_names(), form=place),
        )


_BODIES: dict[bool, Any] = {True: TypeAdapter(ChatBody), False: TypeAdapter(CompletionBody)}


def parse_body(body: Any, defaults: SamplingParams, *, chat: bool) -> OpenAIRequest:
    """The request in a body that is not checked yet. FieldError names the field."""
    return read_as(_BODIES[chat], body).request(defaults)
