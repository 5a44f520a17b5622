"""The messages of a dialog, in OpenAI's form, which Meta's have too: JSON in, checked models out.

A role that no format has, content that is no text, and a call that is none, are errors that name
the message. It knows no tokens, and not what a model can do.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    WrapValidator,
)
from pydantic_core import from_json

from llama.checks import brief
from llama.prompts.fields import Fields, read_as
from llama.validation import custom_error, field_error, json_type, with_message

_CONTENT = " must be a str, or a list of parts of type text"
_CALL = (
    ": a tool call must be {'function': {'name': ..., 'arguments': ...}}, with arguments as a dict "
    "or as JSON"
)


def check_json(value: Any, most: int = 64) -> Any:
    """`value`. ValueError for JSON that is nested too deeply, or has a number such as 1e999."""
    level = [value]
    for _ in range(most):
        if any(isinstance(each, float) and not math.isfinite(each) for each in level):
            raise ValueError("a number is too large, or none of JSON")
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return value
    raise ValueError(f"nested more than {most} deep")


class TextPart(Fields):
    type: Literal["text"]
    text: str


Content = Annotated[str | list[TextPart], with_message(_CONTENT, of_parts=True)]


def _arguments(given: Any) -> Any:
    """From JSON, as OpenAI's clients write them; text where the answer was cut off in them."""
    try:
        arguments = json.loads(given or "{}") if isinstance(given, str) else given
    except (ValueError, RecursionError) as e:
        with contextlib.suppress(ValueError):
            if isinstance(from_json(given, allow_partial=True), dict):
                return given
        raise custom_error(f": {type(e).__name__}: {e}") from None
    check_json(arguments)
    if not isinstance(arguments, dict):
        raise custom_error(f" must be an object, got {json_type(arguments)}")
    return arguments


class FunctionCall(Fields):
    name: str
    arguments: Annotated[
        dict[str, Any] | str,
        BeforeValidator(_arguments, json_schema_input_type=str | dict[str, Any]),
    ]


class ToolCall(Fields):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None  # of a stream's parts, which clients join and send back


def _call(value: Any, read: Any) -> ToolCall:
    try:
        return read(value)
    except ValidationError as e:
        raise custom_error(f"{_CALL} ({field_error(e, value, 'call')})") from None


_NO_CALLS = with_message(" need the role assistant")


class _Labelled(Fields):
    """The fields for which the format has no place: they are taken, and change nothing."""

    unknown_message: ClassVar[str] = " has unknown keys [{names}]: leave them out"

    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[Any] | None, Field(max_length=0), _NO_CALLS] = None


class TextMessage(_Labelled):
    role: Literal["system", "developer", "user"]
    content: Content


class AssistantMessage(_Labelled):
    """What a model said: words, calls, or words and then calls."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[
        list[Annotated[ToolCall, WrapValidator(_call)]], with_message(" must be a list of calls")
    ] = Field(default_factory=list)


class ToolMessage(_Labelled):
    """What a tool returned, and the id of its call: words, or any value of JSON."""

    role: Literal["tool", "ipython"]
    content: Annotated[
        str | list[TextPart] | dict[str, Any] | bool | int | float,
        with_message(_CONTENT, of_parts=True),
        AfterValidator(check_json),
    ] = ""


ChatMessage = Annotated[TextMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Dialog = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
_DIALOG: TypeAdapter[list[ChatMessage]] = TypeAdapter(Dialog)


def read_messages(
    messages: Sequence[Mapping[str, Any]] | Sequence[ChatMessage],
) -> list[ChatMessage]:
    """The messages, checked, as models. `FieldError`: "message 3: content must be ..."."""
    is_list = isinstance(messages, list | tuple)
    if not is_list or not messages:
        words = f"messages must be a list of at least one message, got {brief(messages)}"
        raise (ValueError if is_list else TypeError)(words)
    return read_as(_DIALOG, list(messages), "messages")


def text_of(content: Any) -> str:
    """A text, or the texts of parts, of any API, joined by line breaks; "" for None."""
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""
