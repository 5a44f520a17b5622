"""The request body of OpenAI's Responses API: the model that reads it is its published schema.

In: a JSON object, with its whole dialog, because there is no stored state. Out: an `ApiRequest`,
or a `FieldError`. Source: https://platform.openai.com/docs/api-reference/responses. This file knows
no network and runs no model.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from llama.common.checks import FieldError, brief
from llama.prompts.dialog_format import PromptOptions
from llama.prompts.fields import IMAGES, LATER_IMAGES, NO_IMAGES, UNUSED, Fields, chosen_by
from llama.prompts.messages import HEADER_ROLES, Detail, PartLabels, RefusalPart, text_of
from llama.prompts.reasoning import effort_options
from llama.prompts.tools import Allowed, FunctionName, tool_request
from llama.sampling_params import SamplingParams, StructuredOutput
from llama.server.accepted import NO_STATE, AcceptedFields
from llama.server.errors import ErrorFields
from llama.server.openai.models import AnswerFormat, SchemaFormat, StreamOptions
from llama.server.request import ApiRequest, ConvertedChat, ImageSource
from llama.server.responses.tools import LOCAL_SHELL, Callee, ToolList, callees, qualified_name
from llama.server.sampling import SHARED_NAMES, SamplingFields, sampling_fields

RESPONSES_URL = "/v1/responses"
_NO_SUCH_CALL = "no function_call before it: there is no stored state, so send the call too"
LOGPROBS = "message.output_text.logprobs"  # an item of `include`
_SHELL_HINTS = ("type", "env", "user")  # fields of a shell action that the model does not see


class Part(PartLabels):
    """A part of a message that is text; files are not accepted."""

    type: Literal["input_text", "output_text"]
    text: str
    logprobs: list[Any] | None = None  # an answer that is sent back may have them


class ImagePart(PartLabels):
    """A part of a message that is an image; one that was uploaded before cannot be named."""

    type: Literal["input_image"]
    image_url: str
    detail: Detail | None = None


_Part = Annotated[Part | RefusalPart, Field(discriminator="type")]
_Text = Annotated[str | Annotated[list[_Part], Field(min_length=1, fail_fast=True)], NO_IMAGES]
_MessagePart = Annotated[Part | RefusalPart | ImagePart, Field(discriminator="type")]
_Content = Annotated[
    str | Annotated[list[_MessagePart], Field(min_length=1, fail_fast=True)], IMAGES
]


class _Item(Fields):
    """The fields that every item of a response has when a client sends it back."""

    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    """A message of anyone."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
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
_Input = str | Annotated[list[_AnyItem], Field(min_length=1, fail_fast=True), LATER_IMAGES]


class FunctionChoice(FunctionName):
    """The tool that must be called."""

    type: Literal["function", "custom"]


class AllowedChoice(Fields):
    """The choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


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


def _choice_tag(choice: Any) -> str | None:
    if not isinstance(choice, dict):
        return None
    return "some" if choice.get("type") == "allowed_tools" else "one"


_Included = list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]]


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
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[
            Annotated[FunctionChoice, Tag("one")] | Annotated[AllowedChoice, Tag("some")],
            chosen_by(_choice_tag, " must be 'none', 'auto', 'required' or a choice of tools"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    include: _Included | None = None  # type: ignore[assignment]  # one more than elsewhere
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    previous_response_id: Annotated[None, NO_STATE, UNUSED] = None
    conversation: Annotated[None, NO_STATE, UNUSED] = None
    prompt: Annotated[None, NO_STATE, UNUSED] = None

    def request(self, defaults: SamplingParams) -> ApiRequest:
        """Return the body as a chat; `defaults` are the parameters that it does not give."""
        dialog = self._dialog()
        path, structured_output = self._answer_format()
        changes: dict[str, Any] = {"structured_output": structured_output}
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            changes["logprobs"] = self.top_logprobs or 0
        called = self.callees()
        functions = [callee.function for callee in called]
        return ApiRequest(
            messages=dialog.messages(),
            images=dialog.images,
            params=self.sampling_params(defaults, **changes),
            model=self.model,
            stream=bool(self.stream),
            tools=tool_request(functions, self._chosen(), self.parallel_tool_calls),
            prompt_options=PromptOptions.for_answer(
                continues=False, **effort_options(self.effort())
            ),
            fields=ErrorFields(
                "input",
                self.given_names(),
                path,
                dialog.paths,
                tool_paths=[callee.path for callee in called],
            ),
        )

    def _chosen(self) -> str | FunctionName | Allowed | None:
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return Allowed(choice.mode, frozenset(tool.name for tool in choice.tools))
        return choice

    def effort(self) -> str | None:
        """Return how much to reason; "none" switches reasoning off."""
        effort = (self.reasoning or {}).get("effort")
        if effort is None or isinstance(effort, str):
            return effort
        raise FieldError.of("reasoning.effort", f"={brief(effort)} must be a text")

    def callees(self) -> list[Callee]:
        """Return what the answer may call."""
        found = list(callees(self.tools or (), "tools"))
        for i, item in enumerate(self.input if isinstance(self.input, list) else ()):
            if isinstance(item, ToolsItem):
                found += callees(item.tools, f"input[{i}].tools")
        return found

    def _dialog(self) -> ConvertedChat:
        """Return the dialog, which begins with the instructions."""
        dialog = ConvertedChat(self.instructions, "instructions")
        if isinstance(self.input, str):
            dialog.add_text("user", self.input, "input")
            return dialog
        for i, item in enumerate(self.input):
            path = f"input[{i}]"
            if isinstance(item, MessageItem):
                _add_message(dialog, item, path)
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


def _add_message(dialog: ConvertedChat, item: MessageItem, path: str) -> None:
    """Add a message to a dialog."""
    role = HEADER_ROLES[item.role]
    parts = item.content if isinstance(item.content, list) else []
    if not any(isinstance(part, ImagePart) for part in parts):
        dialog.add_text(role, text_of(item.content), path)
        return
    if role == "assistant":
        raise FieldError.of(f"{path}.content", " has an image, and those of answers are not read")
    for i, part in enumerate(parts):
        if isinstance(part, ImagePart):
            small = part.detail == "low"
            image = ImageSource(part.image_url, f"{path}.content[{i}]", is_small=small)
            dialog.add_image(role, image, path)
        else:
            dialog.add_text(role, part.text, path)
