"""JSON objects from callers: the base class of their pydantic models, and how they are read.

In: dicts, lists and plain values. Out: frozen models, or a `FieldError` with the path of the value
at fault, as the caller wrote it. A lenient reader ignores fields that have no effect here, and
reports their paths. No model of any API is defined here.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticOmit

from llama.common.checks import FieldError, brief
from llama.common.validation import field_error, join_path
from llama.prompts.pictures import Picture

_T = TypeVar("_T")
UNUSED = object()  # marks a field without effect: a lenient reader ignores values it cannot take
_Ignored = list[tuple[Any, str | None]]  # objects, each with the name of a field, or None for all
_MAX_NAMED = 8  # number of fields that one error names
# The types that the APIs give a part of a message that is an image.
_IMAGE_TYPES = ("image", "image_url", "input_image")
IMAGE_TEXT = "[An image was left out: it cannot be read here.]"
_NO_IMAGES = "the model reads text alone: leave it out"
_NO_IMAGE_HERE = "images are read in messages of the user and the system alone: leave it out"
_OTHER_TYPE = ("union_tag_invalid", "literal_error")


@dataclass(frozen=True)
class _Reading:
    """How a value is read: the context of its validation.

    Attributes:
        ignored: What a lenient reader has ignored; None where it is not lenient.
        takes_images: Whether the model reads images.
    """

    ignored: _Ignored | None
    takes_images: bool


_STRICT = _Reading(None, takes_images=False)


def _reading(info: ValidationInfo) -> _Reading:
    """Return how a value is read; one that is read by itself has no context."""
    reading: _Reading = info.context or _STRICT
    return reading


class Fields(BaseModel):
    """Base of the models of JSON objects.

    An unknown field is an error. null means that a field is not given, as clients write it, so an
    unknown field may be null.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )
    unknown_message: ClassVar[str] = ": {names} cannot be used: leave it out"
    known_names: ClassVar[frozenset[str]]
    unused_names: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Collect the names of the fields, as they are in JSON."""
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        cls.known_names = frozenset(fields)
        cls.unused_names = frozenset(
            name for name, field in fields.items() if UNUSED in field.metadata
        )

    @model_validator(mode="wrap")
    @classmethod
    def _read_given(
        cls, value: Any, read: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        """Read the fields that are not null."""
        if not isinstance(value, dict):
            return read(value)
        ignored = _reading(info).ignored
        given = {name: item for name, item in value.items() if item is not None}
        unused = given.keys() - cls.known_names
        if unused and ignored is None:
            raise cls._unknown(unused)
        try:
            model = read(_without(given, unused))
        except ValidationError as e:
            if ignored is None:
                raise
            at_fault = {error["loc"][0] for error in e.errors(include_url=False) if error["loc"]}
            if not at_fault or not at_fault <= cls.unused_names:
                raise
            unused |= at_fault
            model = read(_without(given, unused))
        if ignored is not None:
            ignored += [(value, name) for name in unused]
        return model

    @classmethod
    def _unknown(cls, names: Iterable[Any]) -> FieldError:
        """Make the error for unknown fields; a name may be any text, even a lone surrogate."""
        names = list(map(str, names))
        first = heapq.nsmallest(_MAX_NAMED, names)
        text = ", ".join(map(brief, first))
        if len(names) > len(first):
            text += ", ..."
        return FieldError(f".{first[0]}", cls.unknown_message.format(names=text))


def _without(fields: dict[str, Any], names: Collection[Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _is_of_type(error: ErrorDetails) -> bool:
    """Return whether an error says that an object is of another type."""
    cause = error.get("ctx", {}).get("error")
    return error["type"] in _OTHER_TYPE or (isinstance(cause, FieldError) and cause.is_relative)


def _unless_other_type(value: Any, read: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    try:
        return read(value)
    except ValidationError as e:
        ignored = _reading(info).ignored
        errors = [error for error in e.errors() if error["loc"] in ((), ("type",))]
        if ignored is None or not any(map(_is_of_type, errors)):
            raise
        ignored.append((value, None))
        raise PydanticOmit from None


SKIP_OTHER_TYPES = WrapValidator(_unless_other_type)
"""Annotation of the objects of a list: a lenient reader ignores those of an unknown type."""


def _check_images(content: Any, info: ValidationInfo, *, can_have: bool) -> Any:
    takes_images = _reading(info).takes_images
    if takes_images and can_have:
        return content
    problem = _NO_IMAGE_HERE if takes_images else _NO_IMAGES
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        is_image = isinstance(kind, str) and kind in _IMAGE_TYPES
        if is_image and not isinstance(part.get("picture"), Picture):
            raise FieldError("", f"[{index}] is an image, and {problem}")
    return content


NO_IMAGES = BeforeValidator(partial(_check_images, can_have=False))
"""Annotation of the content of a message: an image that nobody has read is refused as such."""
IMAGES = BeforeValidator(partial(_check_images, can_have=True))
"""Annotation of the content of a message that can have images, where the model reads them."""


def _check_image_list(images: Any, info: ValidationInfo) -> Any:
    if images and not _reading(info).takes_images:
        raise FieldError("", " cannot be used: the model reads text alone")
    return images


IMAGE_LIST = BeforeValidator(_check_image_list)
"""Annotation of a list of images, which is refused where the model reads text alone."""


def _replace_images(messages: Any, info: ValidationInfo) -> Any:
    """Replace images that cannot be read, where the reader is lenient.

    Where the model reads text alone, these are the ones after the first message of the user, else
    those in results of tools.
    """
    reading = _reading(info)
    ignored = reading.ignored
    if ignored is None or not isinstance(messages, list):
        return messages
    objects = [message for message in messages if isinstance(message, dict)]
    users = [i for i, message in enumerate(objects) if message.get("role") == "user"]
    for message in objects[users[0] + 1 :] if users else ():
        is_result = message.get("role") == "tool"
        replaces = is_result or not reading.takes_images
        if replaces and isinstance(message.get("images"), list) and message["images"]:
            ignored.append((message, "images"))
            texts = [message.get("content"), *[IMAGE_TEXT] * len(message.pop("images"))]
            message["content"] = "\n".join(text for text in texts if isinstance(text, str) and text)
        for part in _parts_of(message, results_only=reading.takes_images and not is_result):
            kind = part.get("type")
            if isinstance(kind, str) and kind in _IMAGE_TYPES:
                ignored.append((part, None))
                part.clear()
                part.update(type="input_text" if kind == "input_image" else "text", text=IMAGE_TEXT)
    return messages


def _parts_of(message: dict[str, Any], *, results_only: bool) -> list[dict[str, Any]]:
    """Return the parts of a message, and the parts of results among them, or these alone."""
    found: list[dict[str, Any]] = []
    holders = [message]
    for depth in range(2):
        lists = [holder.get(name) for holder in holders for name in ("content", "output")]
        holders = [
            part for parts in lists if isinstance(parts, list) for part in parts
            if isinstance(part, dict)
        ]  # fmt: skip
        is_of_result = depth > 0 or isinstance(message.get("output"), list)
        found += holders if is_of_result or not results_only else []
    return found


LATER_IMAGES = BeforeValidator(_replace_images)
"""Annotation of a list of messages: a lenient reader puts a text in the place of later images.

The answer to the first message of the user may be about its image, so one there stays an error.
"""


def chosen_by(tag_of: Callable[[Any], str | None], message: str) -> Discriminator:
    """Choose a type of a union by its tag.

    Args:
        tag_of: returns the tag of the type that a value has, or None if it has no type.
        message: the error for a value without a type.
    """
    return Discriminator(tag_of, custom_error_type="not_chosen", custom_error_message=message)


def read_as(
    adapter: TypeAdapter[_T],
    given: Any,
    root: str = "",
    ignored: list[str] | None = None,
    *,
    takes_images: bool = False,
) -> _T:
    """Read a value as the type of the adapter; raise a `FieldError` if that is not possible.

    Args:
        adapter: the type.
        given: the value, from JSON.
        root: the name of the value, if it is a part of a body.
        ignored: makes the reader lenient, and receives the paths of what it ignores.
        takes_images: whether the model reads images.
    """
    reading = _Reading(None if ignored is None else [], takes_images)
    try:
        value = adapter.validate_python(given, context=reading)
    except ValidationError as e:
        raise field_error(e, given, root) from None
    if reading.ignored and ignored is not None:
        ignored += sorted(_paths(reading.ignored, given))
    return value


def _paths(ignored: _Ignored, given: Any) -> Iterator[str]:
    """Yield the paths of ignored fields and objects, such as "messages[1].name"."""
    names: dict[int, set[str | None]] = {}
    for value, name in ignored:
        names.setdefault(id(value), set()).add(name)
    remaining: list[tuple[list[str | int], Any]] = [([], given)]
    while remaining:
        path, value = remaining.pop()
        for name in names.get(id(value), ()):
            yield join_path(path if name is None else [*path, name])
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        remaining += [([*path, key], part) for key, part in parts if isinstance(part, dict | list)]
