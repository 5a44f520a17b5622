"""Request bodies of Anthropic's Messages API: the models that read them are the published schema.

In: a JSON object. Out: an `ApiRequest`, or a `FieldError` that names the field. Source:
https://docs.anthropic.com/en/api/messages. This file knows no network and runs no model.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llama.common.checks import FieldError, brief
from llama.prompts.dialog_format import PromptOptions
from llama.prompts.fields import (
    IMAGES,
    LATER_IMAGES,
    NO_IMAGES,
    SKIP_OTHER_TYPES,
    UNUSED,
    Fields,
)
from llama.prompts.messages import PartLabels, text_of
from llama.prompts.reasoning import effort_options
from llama.prompts.tools import (
    TOOLS,
    Function,
    FunctionName,
    Parameters,
    ToolName,
    Tools,
    tool_request,
)
from llama.sampling_params import MAX_COUNT, Retention, SamplingParams
from llama.server.accepted import NO_STATE, AcceptedFields
from llama.server.errors import ErrorFields
from llama.server.openai.models import AnswerFormat, SchemaFormat
from llama.server.request import ApiRequest, ConvertedChat, ImageSource
from llama.server.sampling import (
    SHARED_NAMES,
    CacheSalt,
    SamplingFields,
    StopList,
    TokenLimit,
    sampling_fields,
)

MESSAGES_URL = "/v1/messages"
COUNT_URL = "/v1/messages/count_tokens"
# Anthropic's own message: agents look for it, and shorten the dialog then.
_TOO_LONG = "messages: prompt is too long: {count} tokens > {max_count} maximum"
_NO_SUCH_CALL = "no tool_use block of a message before it"
_SWITCHES = {"enabled": True, "disabled": False}  # "adaptive" leaves it to the model
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Block(Fields):
    """A content block; cache_control is a hint without effect, as prefixes are always cached."""

    cache_control: dict[str, Any] | None = None


class TextBlock(_Block, PartLabels):
    """Text of anyone."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any] | None, Field(max_length=0), UNUSED] = None


class ToolUse(_Block):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[Literal["type"], Literal["direct"]] | None = None


class Base64Source(Fields):
    """A file of an image; its content says what it is, whatever the type."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(Fields):
    """The URL of an image."""

    type: Literal["url"]
    url: str


class ImageBlock(_Block):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    @property
    def url(self) -> str:
        """The URL of the image, or its file in base64."""
        return self.source.data if isinstance(self.source, Base64Source) else self.source.url


_LIST: Any = Field(min_length=1, fail_fast=True)
_Text = Annotated[str | Annotated[list[TextBlock], _LIST], NO_IMAGES]


class ToolReference(_Block):
    """A tool that a search returned; its name is enough, because all tools are in the prompt."""

    type: Literal["tool_reference"]
    text: Annotated[str, Field(alias="tool_name")]


_ResultBlock = Annotated[TextBlock | ToolReference, Field(discriminator="type")]


class ToolResult(_Block):
    """The result of a call; an error becomes {"error": text}, as the format has no flag for it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        str | Annotated[list[_ResultBlock], Field(fail_fast=True)] | None, NO_IMAGES
    ] = None
    is_error: bool | None = None

    def value(self) -> Any:
        """Return what the model sees."""
        text = text_of(self.content)
        return {"error": text} if self.is_error else text


class Thinking(_Block):
    """The thinking before an answer; a chat template decides whether the model sees it again.

    The data of redacted thinking is left out: only Anthropic can read it.
    """

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


_UserBlock = Annotated[TextBlock | ImageBlock | ToolResult, Field(discriminator="type")]
_AnswerBlock = Annotated[TextBlock | ToolUse | Thinking, Field(discriminator="type")]


class UserMessage(Fields):
    """A message of the user, or the results of calls."""

    role: Literal["user"]
    content: Annotated[str | Annotated[list[_UserBlock], _LIST], IMAGES]


class AssistantMessage(Fields):
    """A message of the model, and its calls."""

    role: Literal["assistant"]
    content: str | Annotated[list[_AnswerBlock], _LIST]


class SystemMessage(Fields):
    """A message with instructions."""

    role: Literal["system"]
    content: _Text


_Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class InputTool(_Block):
    """A function that the model may call; its hints have no effect."""

    name: ToolName
    input_schema: Parameters
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    defer_loading: bool | None = None
    allowed_callers: Annotated[list[Literal["direct"]] | None, UNUSED] = None
    eager_input_streaming: bool | None = None

    def function(self) -> Function:
        """Return the function that the model sees."""
        return Function.model_validate(
            {
                "name": self.name,
                "description": self.description,
                "strict": self.strict,
                "parameters": self.input_schema,
            }
        )


class InputChoice(Fields):
    """Whether, and what, the model must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Fields):
    """How the answer looks; effort is for a chat template that reads it."""

    format: SchemaFormat | None = None
    effort: str | None = None


_Sampling: type[SamplingFields] = sampling_fields(
    SHARED_NAMES | {"max_tokens": "max_tokens", "stop_sequences": "stop"}
)


class CountBody(AcceptedFields, SamplingFields):
    """The body of /v1/messages/count_tokens: everything that makes the prompt."""

    unknown_message: ClassVar[str] = (
        "{names} cannot be used in a request for messages: leave it out"
    )

    messages: Annotated[list[_Message], _LIST, LATER_IMAGES]
    system: _Text | None = None
    tools: Annotated[list[Annotated[InputTool, SKIP_OTHER_TYPES]], TOOLS] | None = None
    tool_choice: InputChoice | None = None
    output_config: OutputConfig | None = None
    # A count reads no cache.
    cache_salt: CacheSalt | None = None
    prompt_cache_retention: Retention | None = None

    def request(self, defaults: SamplingParams) -> ApiRequest:
        """Return the body as a chat; `defaults` are the parameters that it does not give.

        The answer continues a last message of the assistant's.
        """
        dialog = self._dialog()
        messages = dialog.messages()
        path, structured_output = self._answer_format()
        tools = self._tool_request()
        continues = messages[-1]["role"] == "assistant"
        if continues:
            self._check_continued(messages[-1], dialog.paths[-1], tools)
        return ApiRequest(
            messages=messages,
            images=dialog.images,
            params=self.sampling_params(defaults, structured_output=structured_output),
            model=self.model,
            tools=tools,
            prompt_options=PromptOptions.for_answer(
                continues=continues, **self._thinking_options()
            ),
            fields=ErrorFields(
                "messages",
                self.given_names(),
                path,
                dialog.paths,
                _TOO_LONG,
                [f"tools[{i}].input_schema" for i in range(len(self.tools or ()))],
            ),
        )

    def _dialog(self) -> ConvertedChat:
        """Return the dialog, which begins with the system prompt."""
        system = None if self.system is None else text_of(self.system)
        dialog = ConvertedChat(system, "system")
        for i, message in enumerate(self.messages):
            path = f"messages[{i}]"
            if message.role == "assistant":
                dialog.add_text("assistant", None, path)
            if isinstance(message.content, str):
                dialog.add_text(message.role, message.content, path)
            else:
                _add_blocks(dialog, message, path)
        return dialog

    def _answer_format(self) -> AnswerFormat:
        """Return the format of the answer, after the path of the field that gives it."""
        schema_format = None if self.output_config is None else self.output_config.format
        if schema_format is None:
            return "tools", None
        path = "output_config.format.schema"
        return path, schema_format.structured_output(path)

    def _thinking_options(self) -> dict[str, Any]:
        """Return the fields of `PromptOptions` for `thinking` and `output_config.effort`."""
        effort = None if self.output_config is None else self.output_config.effort
        options: dict[str, Any] = effort_options(effort)
        thinking = self.thinking or {}
        kind = thinking.get("type")
        if not isinstance(kind, str | None):
            raise FieldError.of("thinking.type", f"={brief(kind)} must be a text")
        if kind in _SWITCHES:
            options["enable_thinking"] = _SWITCHES[kind]
        budget = thinking.get("budget_tokens")
        if kind == "enabled" and budget is not None:
            if type(budget) is not int or not 0 <= budget <= MAX_COUNT:
                problem = f"={brief(budget)} must be a number of tokens"
                raise FieldError.of("thinking.budget_tokens", problem)
            options["thinking_budget"] = budget
        return options

    def given_names(self) -> dict[str, str]:
        """Return the parameters that this body gives, each with its name in the body."""
        return {**super().given_names(), "thinking_token_budget": "thinking.budget_tokens"}

    def _check_continued(self, message: dict[str, Any], path: str, tools: Tools | None) -> None:
        """Check that the answer can continue a message of the assistant's.

        Args:
            message: the last message of the dialog.
            path: its path in the body.
            tools: the tools of the request.

        Raises:
            FieldError: the message has a call without its result, no text, or text that ends with
                a space; or the answer has a grammar, which would have to begin with the message.
        """
        text = message["content"]
        if "tool_calls" in message:
            raise FieldError.of(path, ": the results of its tool_use blocks must follow")
        if not text or text[-1].isspace():
            problem = ": the beginning of an answer must not be empty, or end with a space"
            raise FieldError.of(path, problem)
        if self.output_config is not None and self.output_config.format is not None:
            problem = " cannot be used where the last message is the assistant's"
            raise FieldError.of("output_config", problem)
        if tools is not None and tools.needs_grammar:
            field = "tool_choice" if tools.must_call else "tools"
            problem = (
                ": a call that is forced, or strict, cannot have a last message of the assistant "
                "before it"
            )
            raise FieldError.of(field, problem)

    def _tool_request(self) -> Tools | None:
        """Return the tools that the model sees, with what it must call."""
        functions = [tool.function() for tool in self.tools or []]
        given = self.tool_choice
        if given is None:
            return tool_request(functions, None, None)
        if (given.type == "tool") != (given.name is not None):
            field = "tool_choice.name"
            raise FieldError.of(field, " is needed with the type 'tool', and only with it")
        choice = FunctionName(name=given.name) if given.name else _CHOICES[given.type]
        return tool_request(functions, choice, not given.disable_parallel_tool_use)


def _add_blocks(
    dialog: ConvertedChat, message: UserMessage | AssistantMessage | SystemMessage, path: str
) -> None:
    """Add the content blocks of a message to a dialog."""
    for i, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            dialog.add_text(message.role, block.text, path)
        elif isinstance(block, ImageBlock):
            image = ImageSource(block.url, f"{path}.content[{i}]")
            dialog.add_image(message.role, image, path)
        elif isinstance(block, Thinking) and block.thinking:
            dialog.add_reasoning(block.thinking)
        elif isinstance(block, ToolUse):
            dialog.add_call(block.id, block.name, block.input, path)
        elif isinstance(block, ToolResult):
            dialog.add_result(
                block.tool_use_id,
                block.value(),
                path,
                id_field=f"{path}.content[{i}].tool_use_id",
                problem=_NO_SUCH_CALL,
            )


class MessagesBody(_Sampling, CountBody):  # type: ignore[misc, valid-type]
    """The body of /v1/messages."""

    own_names: ClassVar[Any] = _Sampling.own_names

    max_tokens: TokenLimit
    stop_sequences: StopList | None = None
    stream: bool | None = None
    # A lenient server must not drop this field: alongside a thread, messages are only the newest
    # part of the dialog.
    thread: Annotated[None, NO_STATE] = None

    def request(self, defaults: SamplingParams) -> ApiRequest:
        """Return the body as a chat; `defaults` are the parameters that it does not give."""
        return replace(super().request(defaults), stream=bool(self.stream))
