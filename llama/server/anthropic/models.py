"""Request bodies of Anthropic's Messages API: the models that read them are the published schema.

In: a JSON object. Out: an `OpenAIRequest`, or a `FieldError` that names the field. Source:
https://docs.anthropic.com/en/api/messages. It knows no network, and runs nothing.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llama.checks import FieldError
from llama.prompts.fields import SKIP_OTHER_TYPES, UNUSED, Fields
from llama.prompts.messages import text_of
from llama.prompts.tools import (
    TOOLS,
    Function,
    FunctionName,
    Parameters,
    ToolName,
    Tools,
    tool_request,
)
from llama.sampling_params import SamplingParams
from llama.server.accepted import NO_STATE, AcceptedFields
from llama.server.errors import ErrorFields
from llama.server.openai.models import SchemaFormat
from llama.server.openai.request import ConvertedChat, OpenAIRequest
from llama.server.sampling import (
    SHARED_NAMES,
    SamplingFields,
    StopList,
    TokenLimit,
    sampling_fields,
)

MESSAGES_URL, COUNT_URL = "/v1/messages", "/v1/messages/count_tokens"
# In Anthropic's words, which agents look for: they shorten the dialog then.
_TOO_LONG = "messages: prompt is too long: {count} tokens > {most} maximum"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Block(Fields):
    cache_control: dict[str, Any] | None = None  # a hint without use: prefixes are always cached


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any] | None, Field(max_length=0), UNUSED] = None


class ToolUse(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[Literal["type"], Literal["direct"]] | None = None


_LIST: Any = Field(min_length=1, fail_fast=True)
_Text = str | Annotated[list[TextBlock], _LIST]


class ToolReference(_Block):
    """A tool that a search has found: it is in the prompt already, so its name is enough."""

    type: Literal["tool_reference"]
    text: Annotated[str, Field(alias="tool_name")]


_ResultBlock = Annotated[TextBlock | ToolReference, Field(discriminator="type")]


class ToolResult(_Block):
    """An error goes to the model as {"error": text}: the format has no flag."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[_ResultBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


class Thinking(_Block):
    """Of another model. It is left out, as Anthropic's API leaves out that of earlier turns."""

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
    """A function that the model may call, and hints without use: all tools are in the prompt."""

    name: ToolName
    input_schema: Parameters
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    defer_loading: bool | None = None
    allowed_callers: Annotated[list[Literal["direct"]] | None, UNUSED] = None
    eager_input_streaming: bool | None = None

    def function(self) -> Function:
        named = {"name": self.name, "description": self.description, "strict": self.strict}
        return Function.model_validate(named | {"parameters": self.input_schema})


class InputChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Fields):
    """effort: a hint, as of thinking."""

    format: SchemaFormat | None = None
    effort: str | None = None


_Sampling: Any = sampling_fields(
    SHARED_NAMES | {"max_tokens": "max_tokens", "stop_sequences": "stop"}
)


class CountBody(AcceptedFields, SamplingFields):
    """The body of /v1/messages/count_tokens: what makes the prompt."""

    unknown_message: ClassVar[str] = (
        "{names} cannot be used in a request for messages: leave it out"
    )

    messages: Annotated[list[_Message], _LIST]
    system: _Text | None = None
    tools: Annotated[list[Annotated[InputTool, SKIP_OTHER_TYPES]], TOOLS] | None = None
    tool_choice: InputChoice | None = None
    output_config: OutputConfig | None = None

    def request(self, defaults: SamplingParams) -> OpenAIRequest:
        """As a chat; `defaults`: of parameters. A last message of the assistant's is continued."""
        dialog = self._dialog()
        messages = dialog.messages()
        continues = messages[-1]["role"] == "assistant"
        wanted = None if self.output_config is None else self.output_config.format
        place = "tools" if wanted is None else "output_config.format.schema"
        form = None if wanted is None else wanted.form(place)
        tools = self._tool_request()
        if continues:  # from its last character: no grammar has it, and no call begins after it
            field, words, text = dialog.places[-1], "", messages[-1]["content"]
            if "tool_calls" in messages[-1]:
                words = ": the results of its tool_use blocks must follow"
            elif not text or text[-1].isspace():
                words = ": the beginning of an answer must not be empty, or end with a space"
            elif form is not None:
                field = "output_config"
                words = " cannot be used where the last message is the assistant's"
            elif tools is not None and tools.needs_grammar:
                field = "tool_choice" if tools.must_call else "tools"
                words = ": a call that is forced, or strict, cannot have a last message of the "
                words += "assistant before it"
            if words:
                raise FieldError(field, field + words)
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
                    words, text = "no tool_use block of a message before it", text_of(block.content)
                    id_field = f"{place}.content[{number}].tool_use_id"
                    value = {"error": text} if block.is_error else text
                    dialog.result(block.tool_use_id, value, place, id_field, words)
        return dialog

    def _tool_request(self) -> Tools | None:
        tools, wanted = [each.function() for each in self.tools or []], self.tool_choice
        if wanted is None:
            return tool_request(tools, None, None)
        if (wanted.type == "tool") != (wanted.name is not None):
            field = "tool_choice.name"
            raise FieldError(field, f"{field} is needed with the type 'tool', and only with it")
        choice = FunctionName(name=wanted.name) if wanted.name else _CHOICES[wanted.type]
        return tool_request(tools, choice, not wanted.disable_parallel_tool_use)


class MessagesBody(_Sampling, CountBody):
    """The body of /v1/messages."""

    own_names: ClassVar[Any] = _Sampling.own_names

    max_tokens: TokenLimit
    stop_sequences: StopList | None = None
    stream: bool | None = None
    thread: Annotated[None, NO_STATE] = None  # nor left out: what follows would lack the dialog

    def request(self, defaults: SamplingParams) -> OpenAIRequest:
        return replace(super().request(defaults), stream=bool(self.stream))
