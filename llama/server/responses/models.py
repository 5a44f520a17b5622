"""The request body of OpenAI's Responses API: the model that reads it is its published schema.

In: a JSON object. Out: an `OpenAIRequest`, or a `FieldError` that names the field. Source:
https://platform.openai.com/docs/api-reference/responses. There is no stored state: a body has its
whole dialog. It knows no network, and runs nothing.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from llama.prompts.fields import Fields, chosen_by, said
from llama.prompts.messages import text_of
from llama.prompts.tools import MOST_TOOLS, Function, Tools, tool_request
from llama.sampling_params import SamplingParams, StructuredOutput
from llama.server.accepted import AcceptedFields
from llama.server.errors import ErrorFields
from llama.server.openai.models import SchemaFormat, form_of
from llama.server.openai.request import ConvertedChat, OpenAIRequest
from llama.server.sampling import sampling_fields

RESPONSES_URL = "/v1/responses"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_NO_STATE = said(" cannot be used: there is no stored state, so send the dialog")
_Nothing = Annotated[list[Any], Field(max_length=0)]


class Part(Fields):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: _Nothing | None = None
    logprobs: _Nothing | None = None


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
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: _Text
    name: str | None = None


def _kind_of_item(item: Any) -> str | None:
    kind = (item.get("type") or "message") if isinstance(item, dict) else None
    return kind if kind in ("message", "function_call", "function_call_output") else None


_Items = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    chosen_by(
        _kind_of_item,
        " must be an object of the type 'message', 'function_call' or 'function_call_output'",
    ),
]
_Input = str | Annotated[list[_Items], Field(min_length=1, fail_fast=True)]


class FunctionTool(Function):
    type: Annotated[
        Literal["function"], said(" must be 'function': other kinds of tools cannot be used")
    ]


class FunctionChoice(Fields):
    type: Literal["function"]
    name: str


class FreeFormat(Fields):
    type: Literal["text", "json_object"]


class TextConfig(Fields):
    format: Annotated[FreeFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class StreamOptions(Fields):
    include_obfuscation: Literal[False] | None = None


_Sampling: Any = sampling_fields(
    {"max_output_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p"}
)


class ResponsesBody(AcceptedFields, _Sampling):
    """The body of /v1/responses."""

    unknown_words: ClassVar[str] = "{names} cannot be used in a request for a response"

    input: _Input
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Literal[0] | None = None
    previous_response_id: Annotated[None, _NO_STATE] = None
    conversation: Annotated[None, _NO_STATE] = None
    prompt: Annotated[None, _NO_STATE] = None

    def request(self, defaults: SamplingParams) -> OpenAIRequest:
        """As a chat; `defaults`: the parameters that the body does not give."""
        dialog = self._dialog()
        place, form = self._form()
        return OpenAIRequest(
            messages=dialog.messages(),
            params=self.sampling_params(defaults, structured_output=form),
            model=self.model,
            stream=bool(self.stream),
            tools=self._tool_request(),
            fields=ErrorFields("input", self.given_names(), place, dialog.places),
        )

    def _tool_request(self) -> Tools | None:
        tools, choice, parallel = self.tools or [], self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, FunctionChoice):
            return tool_request(tools, None, parallel, name=choice.name)
        return tool_request(tools, choice, parallel)

    def _dialog(self) -> ConvertedChat:
        """The dialog; the instructions come first."""
        dialog = ConvertedChat(self.instructions, "instructions")
        if isinstance(self.input, str):
            dialog.say("user", self.input, "input")
            return dialog
        for i, item in enumerate(self.input):
            place = f"input[{i}]"
            if isinstance(item, MessageItem):
                dialog.say(_ROLES[item.role], text_of(item.content), place)
            elif isinstance(item, CallItem):
                dialog.call(item.call_id, item.name, item.arguments, place)
            else:
                words = "no function_call before it: there is no stored state, so send the call too"
                id_field = f"{place}.call_id"
                dialog.result(item.call_id, text_of(item.output), place, id_field, words)
        return dialog

    def _form(self) -> tuple[str, StructuredOutput | None]:
        """The form of the answer, after the field that gave it."""
        wanted = None if self.text is None else self.text.format
        if isinstance(wanted, SchemaFormat):
            return form_of(wanted, "text.format.schema")
        is_json = wanted is not None and wanted.type == "json_object"
        return "text.format", StructuredOutput(json_object=True) if is_json else None
