"""The format that the answer of a chat must have.

In: tools and a response format, from `Llama`, the server and batch files. Out: sampling parameters.
It knows no engine.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from llama.common.checks import FieldError
from llama.common.validation import with_message
from llama.prompts.dialog_format import DialogFormat, PromptOptions
from llama.prompts.fields import UNUSED, Fields, read_as
from llama.prompts.messages import check_json
from llama.prompts.reasoning import ReasoningMarks, effort_options
from llama.prompts.tools import ToolFields, Tools
from llama.sampling_params import MAX_COUNT, ReasoningRule, SamplingParams, StructuredOutput

_NO_SCHEMA = " must be an object with a schema"
_SCALARS = " must be an object whose values are texts, numbers or booleans"
_TemplateKwargs = Annotated[
    dict[str, str | bool | int | float],
    with_message(_SCALARS, of_parts=True),
    AfterValidator(check_json),
]
ThinkingBudget = Annotated[int, Field(ge=-1, le=MAX_COUNT)]


def chat_params(
    params: SamplingParams,
    tools: Tools | None,
    dialog_format: DialogFormat,
    options: PromptOptions,
) -> SamplingParams:
    """Return the parameters of a chat in this format.

    They have the stop strings of the format, the marks and the budget of its reasoning, and the
    grammar of the calls, if a grammar must constrain the answer. An answer that must have a format
    may be a call instead.

    Args:
        params: the parameters of the request.
        tools: the tools of the request.
        dialog_format: the format of the model's dialogs.
        options: the options of the prompt. They have no effect on a model that does not reason.

    Raises:
        FieldError: the request asks for a budget that cannot be kept.
        ValueError: the model cannot call the tools.
    """
    if dialog_format.stop_strings:
        params = replace(params, stop=(*params.stop, *dialog_format.stop_strings))
    if dialog_format.reasoning is not None:
        params = replace(params, reasoning=_reasoning_rule(dialog_format.reasoning, options))
    if tools is None or not tools.needs_grammar:
        return params
    if tools.must_call or params.structured_output is None:
        output = StructuredOutput(calls=dialog_format.call_grammar(tools))
    else:
        calls = dialog_format.call_grammar(replace(tools, must_call=True))
        assert isinstance(params.structured_output, StructuredOutput)
        output = replace(params.structured_output, calls=calls)
    return replace(params, structured_output=output)


def _reasoning_rule(marks: ReasoningMarks, options: PromptOptions) -> ReasoningRule:
    """Return the rule of an answer's reasoning.

    Reasoning that is switched off has a budget of 0 as well, since a template may have no switch,
    and a model may not heed it.
    """
    if options.enable_thinking is False and marks.end_id is not None:
        return marks.rule(0)
    return marks.rule(options.thinking_budget)


class JsonSchema(Fields):
    """The JSON schema of a response format, with its name."""

    json_schema: Any = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # without effect: the schema always constrains the answer

    def structured_output(self, path: str) -> StructuredOutput:
        """Return the format; raise a `FieldError` at this path if it is no JSON schema."""
        return _schema_format(self.json_schema, path)


def _schema_format(schema: Any, path: str) -> StructuredOutput:
    try:
        return StructuredOutput(json=schema)
    except FieldError as e:
        raise e.at(path) from None


class ResponseFormat(Fields):
    """OpenAI's field for the format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema, with_message(_NO_SCHEMA, of_parts=True)] | None = None
    object_schema: dict[str, Any] | None = Field(None, alias="schema")

    def structured_output(self) -> StructuredOutput | None:
        """Return the format, or None for any text; raise a `FieldError` without a valid schema."""
        if self.object_schema is not None:
            if self.type != "json_object":
                raise FieldError.of("response_format.schema", " needs the type json_object")
            return _schema_format(self.object_schema, "response_format.schema")
        if self.type != "json_schema":
            return StructuredOutput(json_object=True) if self.type == "json_object" else None
        if self.json_schema is None:
            raise FieldError("response_format", f"response_format.json_schema{_NO_SCHEMA}")
        return self.json_schema.structured_output("response_format.json_schema.schema")


ResponseFormatField = Annotated[
    ResponseFormat, with_message(" must have the type text, json_object or json_schema")
]


class PromptFields(Fields):
    """The fields of a chat that its prompt depends on: template variables and reasoning.

    Attributes:
        reasoning_effort: OpenAI's field; "none" switches reasoning off.
        chat_template_kwargs: variables of the template. `enable_thinking` is also a switch for
            models whose template does not read it.
        thinking_token_budget: vLLM's field; -1 has no limit.
    """

    reasoning_effort: Annotated[str | None, UNUSED] = None
    chat_template_kwargs: _TemplateKwargs | None = None
    thinking_token_budget: ThinkingBudget | None = None

    def prompt_options(self) -> dict[str, Any]:
        """Return the fields of `PromptOptions` that these fields give."""
        options: dict[str, Any] = effort_options(self.reasoning_effort)
        template_kwargs = dict(self.chat_template_kwargs or {})
        if "enable_thinking" in template_kwargs:
            options["enable_thinking"] = template_kwargs.pop("enable_thinking")
            if not isinstance(options["enable_thinking"], bool):
                field = "chat_template_kwargs.enable_thinking"
                raise FieldError.of(field, " must be true or false")
        if template_kwargs:
            options["template_kwargs"] = template_kwargs
        if self.thinking_token_budget is not None and self.thinking_token_budget >= 0:
            options["thinking_budget"] = self.thinking_token_budget
        return options


class _ChatFields(ToolFields, PromptFields):
    response_format: ResponseFormatField | None = None


_CHAT_FIELDS: TypeAdapter[_ChatFields] = TypeAdapter(_ChatFields)


@dataclass(frozen=True)
class ChatOptions:
    """The options of `chat_completion` for all answers; they are checked when first used."""

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: Any = None
    chat_template_kwargs: Any = None
    thinking_token_budget: Any = None

    @cached_property
    def _read(self) -> _ChatFields:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return read_as(_CHAT_FIELDS, given)

    @cached_property
    def tool_request(self) -> Tools | None:
        """The tools that may be called."""
        tools = self._read.tool_request()
        has_format = self._structured_output is not None
        return tools and replace(tools, has_format=has_format)

    @cached_property
    def _structured_output(self) -> StructuredOutput | None:
        response_format = self._read.response_format
        return None if response_format is None else response_format.structured_output()

    @cached_property
    def prompt_options(self) -> PromptOptions:
        """The options of the prompts."""
        return PromptOptions(**self._read.prompt_options())

    def params(self, params: SamplingParams, dialog_format: DialogFormat) -> SamplingParams:
        """Return the parameters with the format of the answer.

        The text of an answer that may have calls contains no special tokens.
        """
        if self._structured_output is not None:
            params = replace(params, structured_output=self._structured_output)
        if self.tool_request is not None:
            params = replace(params, skip_special_tokens=True)
        return chat_params(params, self.tool_request, dialog_format, self.prompt_options)
