"""The request body of OpenAI's Responses API: the model that reads it is its published schema.

In: a JSON object, with its whole dialog, because there is no stored state. Out: an `ApiRequest`,
or a `FieldError`. Source: https://platform.openai.com/docs/api-reference/responses. This file knows
no network and runs no model.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from llama.common.checks import FieldError, brief
from llama.prompts.dialog_format import PromptOptions
from llama.prompts.fields import NO_IMAGES, UNUSED, Fields, chosen_by
from llama.prompts.messages import HEADER_ROLES, text_of
from llama.prompts.reasoning import effort_options
from llama.prompts.tools import FunctionName, tool_request
from llama.sampling_params import SamplingParams, StructuredOutput
from llama.server.accepted import NO_STATE, AcceptedFields
from llama.server.errors import ErrorFields
from llama.server.openai.models import AnswerFormat, SchemaFormat, StreamOptions
from llama.server.request import ApiRequest, ConvertedChat
from llama.server.responses.tools import LOCAL_SHELL, Callee, ToolList, callees, qualified_name
from llama.server.sampling import SHARED_NAMES, SamplingFields, sampling_fields

RESPONSES_URL = "/v1/responses"
_NO_SUCH_CALL = "no function_call before it: there is no stored state, so send the call too"
_SHELL_HINTS = ("type", "env", "user")  # fields of a shell action that the model does not see
_EmptyList = Annotated[list[Any] | None, Field(max_length=0), UNUSED]


class Part(Fields):
    """A part of a message; only text is accepted."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: _EmptyList = None
    logprobs: _EmptyList = None


_Text = Annotated[str | Annotated[list[Part], Field(min_length=1, fail_fast=True)], NO_IMAGES]


class _Item(Fields):
    """The fields that every item of a response has when a client sends it back."""

    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    """A message of anyone."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: _Text
    phase: str | None = None


class CallItem(_Item):
    """A call of a tool; each type of tool has its own field for the arguments."""

    type: Literal["function_call", "custom_tool_call", "local_shell_call"]
    call_id: str
    name: str = LOCAL_SHELL
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None

    def call_arguments(self) -> str | dict[str, Any]:
        """Return the arguments of the function that the model called."""
        if self.action is not None:
            shown = self.action.items()
            return {key: value for key, value in shown if value and key not in _SHELL_HINTS}
        if self.input is not None:
            return {"input": self.input}
        return self.arguments or {}


class OutputItem(_Item):
    """The result of a call; the id of a local shell's output may be that of its call."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: str | None = None
    output: _Text
    name: str | None = None


class ReasoningItem(_Item):
    """The reasoning before an answer; a chat template decides whether the model sees it again.

    Its text is in the content; the summary and the encrypted content of other models are left out.
    """

    type: Literal["reasoning"]
    summary: Any = None
    content: Any = None
    encrypted_content: Any = None

    def texts(self) -> list[str]:
        """Return the texts of the reasoning."""
        parts = self.content if isinstance(self.content, list) else []
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        return [text for text in texts if isinstance(text, str)]


class ToolsItem(_Item):
    """More tools, from this point of the dialog on."""

    type: Literal["additional_tools"]
    role: Literal["developer"]
    tools: ToolList


def _item_tag(item: Any) -> str | None:
    """Return the tag of the type that reads an item: the last word of its own type."""
    item_type = (item.get("type") or "message") if isinstance(item, dict) else None
    return item_type.rpartition("_")[2] if isinstance(item_type, str) else None


_AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("call")]
    | Annotated[OutputItem, Tag("output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ToolsItem, Tag("tools")],
    chosen_by(_item_tag, " must be an object: a message, a call, its output, reasoning or tools"),
]
_Input = str | Annotated[list[_AnyItem], Field(min_length=1, fail_fast=True)]


class FunctionChoice(FunctionName):
    """The tool that must be called."""

    type: Literal["function", "custom"]


class FreeFormat(Fields):
    """A format of the answer without a schema."""

    type: Literal["text", "json_object"]


class TextConfig(Fields):
    """How the text of the answer looks; verbosity is a hint without effect."""

    format: Annotated[FreeFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = None


_Sampling: type[SamplingFields] = sampling_fields(
    SHARED_NAMES | {"max_output_tokens": "max_tokens"}
)


class ResponsesBody(AcceptedFields, _Sampling):  # type: ignore[misc, valid-type]
    """The body of /v1/responses."""

    unknown_message: ClassVar[str] = (
        "{names} cannot be used in a request for a response: leave it out"
    )

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

    def request(self, defaults: SamplingParams) -> ApiRequest:
        """Return the body as a chat; `defaults` are the parameters that it does not give."""
        dialog = self._dialog()
        path, structured_output = self._answer_format()
        functions = [callee.function for callee in self.callees()]
        return ApiRequest(
            messages=dialog.messages(),
            params=self.sampling_params(defaults, structured_output=structured_output),
            model=self.model,
            stream=bool(self.stream),
            tools=tool_request(functions, self.tool_choice, self.parallel_tool_calls),
            prompt_options=PromptOptions.for_answer(
                continues=False, **effort_options(self.effort())
            ),
            fields=ErrorFields("input", self.given_names(), path, dialog.paths),
        )

    def effort(self) -> str | None:
        """Return how much to reason; "none" switches reasoning off."""
        effort = (self.reasoning or {}).get("effort")
        if effort is None or isinstance(effort, str):
            return effort
        raise FieldError.of("reasoning.effort", f"={brief(effort)} must be a text")

    def callees(self) -> list[Callee]:
        """Return what the answer may call."""
        tools = list(self.tools or ())
        for item in self.input if isinstance(self.input, list) else ():
            if isinstance(item, ToolsItem):
                tools += item.tools
        return list(callees(tools))

    def _dialog(self) -> ConvertedChat:
        """Return the dialog, which begins with the instructions."""
        dialog = ConvertedChat(self.instructions, "instructions")
        if isinstance(self.input, str):
            dialog.add_text("user", self.input, "input")
            return dialog
        for i, item in enumerate(self.input):
            path = f"input[{i}]"
            if isinstance(item, MessageItem):
                dialog.add_text(HEADER_ROLES[item.role], text_of(item.content), path)
            elif isinstance(item, ReasoningItem):
                for text in item.texts():
                    dialog.add_reasoning(text)
            elif isinstance(item, CallItem):
                name = qualified_name(item.name, item.namespace)
                dialog.add_call(item.call_id, name, item.call_arguments(), path)
            elif isinstance(item, OutputItem):
                dialog.add_result(
                    item.call_id or item.id or "",
                    text_of(item.output),
                    path,
                    id_field=f"{path}.call_id",
                    problem=_NO_SUCH_CALL,
                )
        return dialog

    def _answer_format(self) -> AnswerFormat:
        """Return the format of the answer, after the path of the field that gives it."""
        text_format = None if self.text is None else self.text.format
        if isinstance(text_format, SchemaFormat):
            path = "text.format.schema"
            return path, text_format.structured_output(path)
        is_json = text_format is not None and text_format.type == "json_object"
        return "text.format", StructuredOutput(json_object=True) if is_json else None
