"""The request body of OpenAI's Responses API: the model that reads it is its published schema.

In: a JSON object, with its whole dialog, as there is no stored state. Out: an `OpenAIRequest`, or a
`FieldError`. Source: https://platform.openai.com/docs/api-reference/responses. It runs nothing.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from llama.prompts.fields import UNUSED, Fields, chosen_by
from llama.prompts.messages import text_of
from llama.prompts.tools import FunctionName, tool_request
from llama.sampling_params import SamplingParams, StructuredOutput
from llama.server.accepted import NO_STATE, AcceptedFields
from llama.server.errors import ErrorFields
from llama.server.openai.models import SchemaFormat, StreamOptions
from llama.server.openai.request import ConvertedChat, OpenAIRequest
from llama.server.responses.tools import LOCAL_SHELL, Callee, ToolList, callees, name_of
from llama.server.sampling import SHARED_NAMES, sampling_fields

RESPONSES_URL = "/v1/responses"
_Nothing = Annotated[list[Any] | None, Field(max_length=0), UNUSED]


class Part(Fields):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: _Nothing = None
    logprobs: _Nothing = None


_Text = str | Annotated[list[Part], Field(min_length=1, fail_fast=True)]


class _Item(Fields):
    """The labels of an item of an answer, which has them when it comes back."""

    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: _Text
    phase: str | None = None


class CallItem(_Item):
    """Of a tool of any type; each has its own field for what is given to it."""

    type: Literal["function_call", "custom_tool_call", "local_shell_call"]
    call_id: str
    name: str = LOCAL_SHELL
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None

    def given(self) -> str | dict[str, Any]:
        if self.action is not None:
            return {k: v for k, v in self.action.items() if v and k not in ("type", "env", "user")}
        return self.arguments or {} if self.input is None else {"input": self.input}


class OutputItem(_Item):
    """call_id: of a local shell's, the id may be it."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: str | None = None
    output: _Text
    name: str | None = None


class ReasoningItem(_Item):
    """Of another model: it is left out, as Anthropic's thinking is."""

    type: Literal["reasoning"]
    summary: Any = None
    content: Any = None
    encrypted_content: Any = None


class ToolsItem(_Item):
    type: Literal["additional_tools"]
    role: Literal["developer"]
    tools: ToolList


def _kind_of_item(item: Any) -> str | None:
    kind = (item.get("type") or "message") if isinstance(item, dict) else None
    return kind.rpartition("_")[2] if isinstance(kind, str) else None


_Items = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("call")]
    | Annotated[OutputItem, Tag("output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ToolsItem, Tag("tools")],
    chosen_by(
        _kind_of_item, " must be an object: a message, a call, its output, reasoning or tools"
    ),
]
_Input = str | Annotated[list[_Items], Field(min_length=1, fail_fast=True)]


class FunctionChoice(FunctionName):
    type: Literal["function", "custom"]


class FreeFormat(Fields):
    type: Literal["text", "json_object"]


class TextConfig(Fields):
    format: Annotated[FreeFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = None  # a hint, as of reasoning


_Sampling: Any = sampling_fields(SHARED_NAMES | {"max_output_tokens": "max_tokens"})


class ResponsesBody(AcceptedFields, _Sampling):
    """The body of /v1/responses."""

    unknown_message: ClassVar[str] = "{names} cannot be used in a request for a response"

    input: _Input
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    tools: ToolList | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[Literal[0] | None, UNUSED] = None
    previous_response_id: Annotated[None, NO_STATE, UNUSED] = None
    conversation: Annotated[None, NO_STATE, UNUSED] = None
    prompt: Annotated[None, NO_STATE, UNUSED] = None

    def request(self, defaults: SamplingParams) -> OpenAIRequest:
        """As a chat; `defaults`: the parameters that the body does not give."""
        dialog = self._dialog()
        place, form = self._form()
        functions = [each.function for each in self.callees()]
        return OpenAIRequest(
            messages=dialog.messages(),
            params=self.sampling_params(defaults, structured_output=form),
            model=self.model,
            stream=bool(self.stream),
            tools=tool_request(functions, self.tool_choice, self.parallel_tool_calls),
            fields=ErrorFields("input", self.given_names(), place, dialog.places),
        )

    def callees(self) -> list[Callee]:
        """What the answer may call."""
        items = self.input if isinstance(self.input, list) else ()
        added = [tool for item in items if isinstance(item, ToolsItem) for tool in item.tools]
        return list(callees([*(self.tools or ()), *added]))

    def _dialog(self) -> ConvertedChat:
        """The dialog; the instructions come first."""
        dialog = ConvertedChat(self.instructions, "instructions")
        if isinstance(self.input, str):
            dialog.say("user", self.input, "input")
            return dialog
        for i, item in enumerate(self.input):
            place = f"input[{i}]"
            if isinstance(item, MessageItem):
                role = "system" if item.role == "developer" else item.role
                dialog.say(role, text_of(item.content), place)
            elif isinstance(item, CallItem):
                name = name_of(item.name, item.namespace)
                dialog.call(item.call_id, name, item.given(), place)
            elif isinstance(item, OutputItem):
                words = "no function_call before it: there is no stored state, so send the call too"
                call_id, id_field = item.call_id or item.id or "", f"{place}.call_id"
                dialog.result(call_id, text_of(item.output), place, id_field, words)
        return dialog

    def _form(self) -> tuple[str, StructuredOutput | None]:
        """The form of the answer, after the field that gave it."""
        wanted, place = None if self.text is None else self.text.format, "text.format.schema"
        if isinstance(wanted, SchemaFormat):
            return place, wanted.form(place)
        is_json = wanted is not None and wanted.type == "json_object"
        return "text.format", StructuredOutput(json_object=True) if is_json else None
