"""The messages of a dialog in OpenAI's format, which is also Meta's: JSON in, checked models out.

An unknown role, content that is no text, and a malformed call are errors that name the message. It
knows neither tokens nor what a model can do.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import from_json

from llama.common.checks import FieldError, brief
from llama.common.validation import field_error, json_type, with_message
from llama.prompts.fields import IMAGES, LATER_IMAGES, NO_IMAGES, Fields, read_as
from llama.prompts.pictures import Picture
from llama.tokenizer import Role

# The roles of messages, and the role that the prompt has for each of them. A new role is also a
# value of `role` in the class of its messages below, and in chat_template.jinja.
HEADER_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "ipython",
    "ipython": "ipython",
}

_T = TypeVar("_T")
_MAX_DEPTH = 64  # levels of nested JSON
_CONTENT = " must be a str, or a list of parts of type text"
_CALL = (
    ": a tool call must be {'function': {'name': ..., 'arguments': ...}}, with arguments as a dict "
    "or as JSON"
)


def check_json(value: _T) -> _T:
    """Return the value; raise a ValueError for deeply nested JSON and for numbers such as 1e999."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        if any(isinstance(item, float) and not math.isfinite(item) for item in level):
            raise ValueError("a number is too large, or is not a number of JSON")
        next_level: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                next_level += item.values()
            elif isinstance(item, list):
                next_level += item
        if not next_level:
            return value
        level = next_level
    raise ValueError(f"nested more than {_MAX_DEPTH} deep")


class PartLabels(Fields):
    """Fields that clients add to the parts of messages, and that change no text."""

    id: str | None = None
    index: int | str | None = None
    annotations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    extras: dict[str, Any] | None = None


class TextPart(PartLabels):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class ImagePart(PartLabels):
    """A part of a message that is an image."""


class ReadImagePart(ImagePart):
    """An image that has been read: JSON alone cannot have one."""

    type: Literal["image"]
    picture: Annotated[InstanceOf[Picture], WithJsonSchema({"not": {}})]


Detail = Literal["auto", "low", "high", "original"]  # "low" shrinks the image into one tile


class ImageUrl(Fields):
    """The place of an image."""

    url: str
    detail: Detail | None = None


class ImageUrlPart(ImagePart):
    """An image that is to be read, as OpenAI's chats have it; some clients write the URL alone."""

    type: Literal["image_url"]
    image_url: ImageUrl | str

    @property
    def url(self) -> str:
        """The URL of the image."""
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url

    @property
    def detail(self) -> Detail | None:
        """How much of the image is seen."""
        return None if isinstance(self.image_url, str) else self.image_url.detail


class RefusalPart(PartLabels):
    """A part of a message of the assistant in which it refuses to answer."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


Content = Annotated[str | list[TextPart], with_message(_CONTENT, of_parts=True), NO_IMAGES]
ContentWithImages = Annotated[
    str
    | list[
        Annotated[
            TextPart | ImageUrlPart | SkipJsonSchema[ReadImagePart], Field(discriminator="type")
        ]
    ],
    with_message(f"{_CONTENT} or image_url", of_parts=True),
    IMAGES,
]
AnswerContent = Annotated[
    str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
    with_message(_CONTENT, of_parts=True),
    NO_IMAGES,
]


def _arguments(given: Any) -> Any:
    """Return arguments as an object; OpenAI's clients write them as JSON text.

    If the answer was cut off inside of the arguments, they stay an incomplete text.
    """
    try:
        arguments = json.loads(given or "{}") if isinstance(given, str) else given
    except (ValueError, RecursionError) as e:
        with contextlib.suppress(ValueError):
            if isinstance(from_json(given, allow_partial=True), dict):
                return given
        raise FieldError("", f": {type(e).__name__}: {e}") from None
    check_json(arguments)
    if not isinstance(arguments, dict):
        raise FieldError("", f" must be an object, got {json_type(arguments)}")
    return arguments


class FunctionCall(Fields):
    """The name of a function that is called, and its arguments."""

    name: str
    arguments: Annotated[
        dict[str, Any] | str,
        BeforeValidator(_arguments, json_schema_input_type=str | dict[str, Any]),
    ]


class ToolCall(Fields):
    """A call of a function in a message of the assistant."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None  # clients join the parts of a stream and send this field back


def _call(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(value)
    except ValidationError as e:
        problem = f"{_CALL} ({field_error(e, value, 'call')})"
    raise FieldError("", problem)  # It refers to no other error, see `_nested` in validation.py.


_NO_CALLS = with_message(" need the role assistant")
_ANSWERS_ONLY = with_message(" needs the role assistant")


class _Labelled(Fields):
    """Fields that are accepted without effect, as Meta's prompt format has nothing like them."""

    unknown_message: ClassVar[str] = " has unknown keys [{names}]: leave them out"

    name: str | None = None
    refusal: Annotated[str | None, Field(max_length=0), _ANSWERS_ONLY] = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name
    tool_call_id: str | None = None
    tool_calls: Annotated[list[Any] | None, Field(max_length=0), _NO_CALLS] = None


class TextMessage(_Labelled):
    """A message of the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: ContentWithImages


class AssistantMessage(_Labelled):
    """A message of the model: text, calls, or text followed by calls; reasoning may precede it.

    A refusal is text of the message.
    """

    role: Literal["assistant"]
    content: AnswerContent | None = None
    refusal: str | None = None  # a part of the content, once it is read
    tool_calls: Annotated[
        list[Annotated[ToolCall, WrapValidator(_call)]], with_message(" must be a list of calls")
    ] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _join_refusal(cls, value: Any) -> Any:
        """Append the refusal to the content."""
        refusal = value.get("refusal") if isinstance(value, dict) else None
        if not isinstance(refusal, str) or not refusal:
            return value
        content = value.get("content") or []
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list):
            return value
        return {**value, "content": [*parts, {"type": "refusal", "refusal": refusal}]}

    @property
    def reasoning_text(self) -> str | None:
        """The reasoning, for formats that show it to the model again."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


class ToolMessage(_Labelled):
    """The result of a tool, text or any JSON value, and the id of the call."""

    role: Literal["tool", "ipython"]
    content: Annotated[
        str | list[TextPart] | dict[str, Any] | bool | int | float,
        with_message(_CONTENT, of_parts=True),
        NO_IMAGES,
        AfterValidator(check_json),
    ] = ""


ChatMessage = Annotated[TextMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Dialog = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True), LATER_IMAGES]
_DIALOG: TypeAdapter[list[ChatMessage]] = TypeAdapter(Dialog)


def read_messages(
    messages: Sequence[Mapping[str, Any]] | Sequence[ChatMessage],
    *,
    takes_images: bool = False,
) -> list[ChatMessage]:
    """Read the messages of a dialog as models.

    Args:
        messages: The messages.
        takes_images: Whether they may have images that nobody has read.

    Raises:
        FieldError: names the message, such as "message 3: content must be ...".
    """
    is_list = isinstance(messages, list | tuple)
    if not is_list or not messages:
        text = f"messages must be a list of at least one message, got {brief(messages)}"
        raise ValueError(text) if is_list else TypeError(text)
    return read_as(_DIALOG, list(messages), "messages", takes_images=takes_images)


def has_images(content: Any) -> bool:
    """Return whether the content of a message has images."""
    return isinstance(content, list) and any(isinstance(part, ImagePart) for part in content)


def text_of(content: Any) -> str:
    """Return the text of a message's content, in any API.

    The texts of several parts are joined by line breaks. The text of None is empty.
    """
    if isinstance(content, list):
        return "\n".join(part.text for part in content if not isinstance(part, ImagePart))
    text: str = content or ""
    return text
