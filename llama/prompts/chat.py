"""The format that the answer of a chat must have.

In: tools and a response format, from `Llama`, the server and batch files. Out: sampling parameters.
It knows no engine.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from llama.checks import FieldError
from llama.prompts.dialog_format import DialogFormat
from llama.prompts.fields import Fields, read_as
from llama.prompts.tools import ToolFields, Tools
from llama.sampling_params import SamplingParams, StructuredOutput
from llama.validation import with_message

_NO_SCHEMA = " must be an object with a schema"


def chat_params(
    params: SamplingParams, tools: Tools | None, dialog_format: DialogFormat, format_field: str
) -> SamplingParams:
    """Return the parameters of a chat in this format.

    They have the stop strings of the format, and the grammar of the calls, if a grammar must
    constrain the answer.

    Args:
        params: the parameters of the request.
        tools: the tools of the request.
        dialog_format: the format of the model's dialogs.
        format_field: the field of the request that may ask for another format.

    Raises:
        FieldError: the request asks for another format.
    """
    if dialog_format.stop_strings:
        params = replace(params, stop=(*params.stop, *dialog_format.stop_strings))
    if tools is None or not tools.needs_grammar:
        return params
    if params.structured_output is not None:
        field = "tool_choice" if tools.must_call else "tools"
        text = f": a call that is forced, or strict, cannot be combined with {format_field}"
        raise FieldError.of(field, text)
    grammar = StructuredOutput(grammar=dialog_format.call_grammar(tools))
    return replace(params, structured_output=grammar)


class JsonSchema(Fields):
    """The JSON schema of a response format, with its name."""

    json_schema: Any = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # without effect: the schema always constrains the answer

    def structured_output(self, path: str) -> StructuredOutput:
        """Return the format; raise a `FieldError` at this path if it is no JSON schema."""
        try:
            return StructuredOutput(json=self.json_schema)
        except FieldError as e:
            raise e.at(path) from None


class ResponseFormat(Fields):
    """OpenAI's field for the format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema, with_message(_NO_SCHEMA, of_parts=True)] | None = None

    def structured_output(self) -> StructuredOutput | None:
        """Return the format, or None for any text; raise a `FieldError` without a valid schema."""
        if self.type != "json_schema":
            return StructuredOutput(json_object=True) if self.type == "json_object" else None
        if self.json_schema is None:
            raise FieldError("response_format", f"response_format.json_schema{_NO_SCHEMA}")
        return self.json_schema.structured_output("response_format.json_schema.schema")


ResponseFormatField = Annotated[
    ResponseFormat, with_message(" must have the type text, json_object or json_schema")
]


class _ChatFields(ToolFields):
    response_format: ResponseFormatField | None = None


_CHAT_FIELDS: TypeAdapter[_ChatFields] = TypeAdapter(_ChatFields)


@dataclass(frozen=True)
class ChatOptions:
    """The options of `chat_completion` for all answers; they are checked when first used."""

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: Any = None

    @cached_property
    def _read(self) -> _ChatFields:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return read_as(_CHAT_FIELDS, given)

    @cached_property
    def tool_request(self) -> Tools | None:
        """The tools that may be called."""
        return self._read.tool_request()

    def params(self, params: SamplingParams, dialog_format: DialogFormat) -> SamplingParams:
        """Return the parameters with the format of the answer.

        The text of an answer that may have calls contains no special tokens.
        """
        response_format = self._read.response_format
        if response_format is not None:
            params = replace(params, structured_output=response_format.structured_output())
        if self.tool_request is not None:
            params = replace(params, skip_special_tokens=True)
        return chat_params(params, self.tool_request, dialog_format, "response_format")
