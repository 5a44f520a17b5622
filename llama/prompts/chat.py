"""The form that the answer of a chat must have: tools and a response format in, parameters out.

`Llama`, the server and batch files all come through here. It knows no engine.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from llama.checks import FieldError
from llama.prompts.fields import Fields, read_as
from llama.prompts.grammar import call_grammar
from llama.prompts.tools import ToolFields, ToolFormat, Tools
from llama.sampling_params import SamplingParams, StructuredOutput
from llama.validation import with_message

_NO_SCHEMA = " must be an object with a schema"


def chat_params(
    params: SamplingParams, tools: Tools | None, tool_format: ToolFormat, form_field: str
) -> SamplingParams:
    """The parameters, with the grammar of the calls where the answer must be held to one.
    FieldError where the request gave it another form, in `form_field`."""
    if tools is None or not tools.needs_grammar:
        return params
    if params.structured_output is not None:
        field = "tool_choice" if tools.must_call else "tools"
        words = f": a call that is forced, or strict, cannot have {form_field} beside it"
        raise FieldError.of(field, words)
    form = StructuredOutput(grammar=call_grammar(tools, tool_format))
    return replace(params, structured_output=form)


class JsonSchema(Fields):
    json_schema: Any = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # always: the answer is held to the schema

    def form(self, place: str) -> StructuredOutput:
        """FieldError, with its place, where the schema is none."""
        try:
            return StructuredOutput(json=self.json_schema)
        except FieldError as e:
            raise e.at(place) from None


class ResponseFormat(Fields):
    """OpenAI's form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema, with_message(_NO_SCHEMA, of_parts=True)] | None = None

    def structured_output(self) -> StructuredOutput | None:
        """FieldError where the schema is none."""
        if self.type != "json_schema":
            return StructuredOutput(json_object=True) if self.type == "json_object" else None
        if self.json_schema is None:
            raise FieldError("response_format", f"response_format.json_schema{_NO_SCHEMA}")
        return self.json_schema.form("response_format.json_schema.schema")


ResponseFormatField = Annotated[
    ResponseFormat, with_message(" must have the type text, json_object or json_schema")
]


class _ChatFields(ToolFields):
    response_format: ResponseFormatField | None = None


_CHAT_FIELDS: TypeAdapter[_ChatFields] = TypeAdapter(_ChatFields)


@dataclass(frozen=True)
class ChatOptions:
    """What a caller asks of all answers, as of `chat_completion`; checked at the first use."""

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: Any = None

    @cached_property
    def _read(self) -> _ChatFields:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return read_as(_CHAT_FIELDS, given)

    @cached_property
    def tool_request(self) -> Tools | None:
        return self._read.tool_request()

    def params(self, params: SamplingParams, tool_format: ToolFormat) -> SamplingParams:
        """With the form of the answer. The text of one that may have calls has no special token."""
        form = self._read.response_format
        if form is not None:
            params = replace(params, structured_output=form.structured_output())
        if self.tool_request is not None:
            params = replace(params, skip_special_tokens=True)
        return chat_params(params, self.tool_request, tool_format, "response_format")
