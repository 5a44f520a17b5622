"""The request bodies of Anthropic's Messages API: the models that read them are their published
schema.

In: a JSON object. Out: an `OpenAIRequest`, or a `FieldError` that names the field. Source:
https://docs.anthropic.com/en/api/messages. It knows no network, and runs nothing.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llama.checks import FieldError
from llama.prompts.fields import Fields, said
from llama.prompts.messages import text_of
from llama.prompts.tools import (
    MOST_TOOLS,
    Function,
    Parameters,
    ToolName,
    Tools,
    tool_request,
)
from llama.sampling_params import SamplingParams, StructuredOutput
from llama.server.accepted import AcceptedFields
from llama.server.errors import ErrorFields
from llama.server.openai.models import SchemaFormat, form_of
from llama.server.openai.request import ConvertedChat, OpenAIRequest
from llama.server.sampling import SamplingFields, StopWords, sampling_fields

MESSAGES_URL, COUNT_URL = "/v1/messages", "/v1/messages/count_tokens"
# In Anthropic's words, which agents look for: they shorten the dialog then.
_TOO_LONG = "messages: prompt is too long: {count} tokens > {most} maximum"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Block(Fields):
    """Prefixes are always cached, so the hint changes nothing."""

    cache_control: dict[str, Any] | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolUse(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[Literal["type"], Literal["direct"]] | None = None


_LIST: Any = Field(min_length=1, fail_fast=True)
_Text = str | Annotated[list[TextBlock], _LIST]


class ToolResult(_Block):
    """An error goes to the model as {"error": text}: the format has no flag."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None

    def value(self) -> Any:
        text = text_of(self.content)
        return {"error": text} if self.is_error else text


class Thinking(_Block):
    """Of another model: a dialog may have begun with one. It is left out, as Anthropic's API does
    with that of earlier turns."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


_UserBlock = Annotated[TextBlock | ToolResult, Field(discriminator="type")]
_AnswerBlock = Annotated[TextBlock | ToolUse | Thinking, Field(discriminator="type")]


class UserMessage(Fields):
    role: Literal["user"]
    content: str | Annotated[list[_UserBlock], _LIST]


class AssistantMessage(Fields):
    role: Literal["assistant"]
    content: str | Annotated[list[_AnswerBlock], _LIST]


class SystemMessage(Fields):
    role: Literal["system"]
    content: _Text


_Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class InputTool(_Block):
    """A function that the model may call, and hints that change nothing."""

    name: ToolName
    input_schema: Parameters
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    eager_input_streaming: Literal[True] | None = None

    def function(self) -> Function:
        named = {"name": self.name, "description": self.description, "strict": self.strict}
        return Function.model_validate(named | {"parameters": self.input_schema})


class InputChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Fields):
    """Thinking, which Llama does not: "adaptive" leaves it to the model."""

    type: Annotated[
        Literal["disabled", "adaptive"],
        said(" must be 'disabled' or 'adaptive': this model has no thinking"),
    ]
    budget_tokens: int | None = None
    display: str | None = None


class ClearThinking(Fields):
    """Of earlier turns: the prompt never has it, so there is none to clear."""

    type: Annotated[
        Literal["clear_thinking_20251015"],
        said(" must be 'clear_thinking_20251015': shorten the dialog on your side"),
    ]
    keep: Any = None


class ContextManagement(Fields):
    edits: Annotated[list[ClearThinking], Field(fail_fast=True)] | None = None


class OutputConfig(Fields):
    """effort: Anthropic's default, what leaving it out means."""

    format: SchemaFormat | None = None
    effort: Literal["high"] | None = None


_Sampling: Any = sampling_fields(
    {
        "max_tokens": "max_tokens",
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "stop_sequences": "stop",
    },
    required="max_tokens",
)


class CountBody(AcceptedFields, SamplingFields):
    """The body of /v1/messages/count_tokens: what makes the prompt."""

    unknown_words: ClassVar[str] = "{names} cannot be used in a request for messages: leave it out"

    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    system: _Text | None = None
    tools: Annotated[list[InputTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: InputChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None

    def request(self, defaults: SamplingParams) -> OpenAIRequest:
        """As a chat; `defaults`: the parameters that the body does not give. A last message of the
        assistant is the beginning of the answer."""
        dialog = self._dialog()
        messages = dialog.messages()
        continues = messages[-1]["role"] == "assistant"
        wanted = None if self.output_config is None else self.output_config.format
        place, form = "tools", None
        if wanted is not None:
            place, form = form_of(wanted, "output_config.format.schema")
        tools = self._tool_request()
        if continues:
            _check_beginning(messages[-1], dialog.places[-1], form, tools)
        return OpenAIRequest(
            messages=messages,
            params=self.sampling_params(defaults, structured_output=form),
            model=self.model,
            tools=tools,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            fields=ErrorFields("messages", self.given_names(), place, dialog.places, _TOO_LONG),
        )

    def _dialog(self) -> ConvertedChat:
        dialog = ConvertedChat(None if self.system is None else text_of(self.system), "system")
        for i, message in enumerate(self.messages):
            content, place = message.content, f"messages[{i}]"
            if message.role == "assistant":
                dialog.say("assistant", None, place)
            if isinstance(content, str):
                dialog.say(message.role, content, place)
                continue
            for number, block in enumerate(content):
                if isinstance(block, TextBlock):
                    dialog.say(message.role, block.text, place)
                elif isinstance(block, ToolUse):
                    dialog.call(block.id, block.name, block.input, place)
                elif isinstance(block, ToolResult):
                    words = "no tool_use block of a message before it"
                    id_field = f"{place}.content[{number}].tool_use_id"
                    dialog.result(block.tool_use_id, block.value(), place, id_field, words)
        return dialog

    def _tool_request(self) -> Tools | None:
        tools = [each.function() for each in self.tools or []]
        wanted = self.tool_choice
        if wanted is None:
            return tool_request(tools)
        if (wanted.type == "tool") != (wanted.name is not None):
            field = "tool_choice.name"
            raise FieldError(field, f"{field} is needed with the type 'tool', and only with it")
        parallel = not wanted.disable_parallel_tool_use
        return tool_request(tools, _CHOICES.get(wanted.type), parallel, name=wanted.name)


class MessagesBody(CountBody, _Sampling):
    """The body of /v1/messages."""

    own_names: ClassVar[Any] = _Sampling.own_names

    stop_sequences: StopWords | None = None
    stream: bool | None = None

    def request(self, defaults: SamplingParams) -> OpenAIRequest:
        return replace(super().request(defaults), stream=bool(self.stream))


def _check_beginning(
    message: dict[str, Any], place: str, form: StructuredOutput | None, tools: Tools | None
) -> None:
    """Of the answer, which goes on from its last character. A beginning that the client wrote is
    not part of a grammar, and no call begins after it."""
    field, words, text = place, "", message["content"]
    if "tool_calls" in message:
        words = ": the results of its tool_use blocks must follow"
    elif not text or text[-1].isspace():
        words = ": the beginning of an answer must not be empty, or end with a space"
    elif form is not None:
        field = "output_config"
        words = " cannot be used where the last message is the assistant's"
    elif tools is not None and tools.needs_grammar:
        field = "tool_choice" if tools.must_call else "tools"
        words = ": a call that is forced, or strict, cannot have a last message of the assistant "
        words += "before it"
    if words:
        raise FieldError(field, field + words)
