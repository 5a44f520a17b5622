"""Objects of JSON that others write: the base of their models, and the words of their errors.

In: dicts, lists and plain values. Out: frozen models, or a `FieldError` that names the place of
what is wrong as the caller wrote it; a lenient reader leaves out what has no use here, and says so.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticOmit

from llama.checks import brief
from llama.validation import custom_error, field_error, join_path

_T = TypeVar("_T")
UNUSED = object()  # marks a field whose other values a lenient reader leaves out
_LeftOut = list[tuple[Any, str | None]]  # objects, or a field of each
_MOST_NAMED = 8  # fields in one error


class Fields(BaseModel):
    """An object of JSON. A field that it does not know is an error. null is a field that is not
    given, as clients write it, so a name that is not known may be null."""

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
        named = {each.alias or name: each for name, each in cls.model_fields.items()}
        cls.known_names = frozenset(named)
        cls.unused_names = frozenset(name for name in named if UNUSED in named[name].metadata)

    @model_validator(mode="wrap")
    @classmethod
    def _read_given(cls, value: Any, read: Any, info: ValidationInfo) -> Any:
        """Of what is not null. An unknown name may be any text, also half a surrogate pair."""
        if not isinstance(value, dict):
            return read(value)
        given = {name: each for name, each in value.items() if each is not None}
        left_out: _LeftOut | None = info.context
        unused = given.keys() - cls.known_names
        if unused and left_out is None:
            first = heapq.nsmallest(_MOST_NAMED, map(str, unused))
            names = ", ".join(map(brief, first)) + ", ..." * (len(unused) > len(first))
            raise custom_error(cls.unknown_message.format(names=names), first[0])
        try:
            found = read({name: each for name, each in given.items() if name not in unused})
        except ValidationError as e:
            if left_out is None:
                raise
            at_fault = {each["loc"][0] for each in e.errors(include_url=False) if each["loc"]}
            if not at_fault or not at_fault <= cls.unused_names:
                raise
            unused |= at_fault
            found = read({name: each for name, each in given.items() if name not in unused})
        if left_out is not None:
            left_out += [(value, name) for name in unused]
        return found


_OTHER_TYPE = {"union_tag_invalid", "literal_error", "custom", "custom_type"}


def _unless_other_type(value: Any, read: Any, info: ValidationInfo) -> Any:
    try:
        return read(value)
    except ValidationError as e:
        left_out: _LeftOut | None = info.context
        kinds = {each["type"] for each in e.errors() if each["loc"] in ((), ("type",))}
        if left_out is None or not kinds & {
            "union_tag_invalid",
            "literal_error",
            "custom",
            "custom_type",
        }:
            raise
        left_out.append((value, None))
        raise PydanticOmit from None


SKIP_OTHER_TYPES = WrapValidator(_unless_other_type)
"""Of the objects of a list: a lenient reader leaves out those of a type that is not known."""


def chosen_by(kind: Callable[[Any], str | None], words: str) -> Discriminator:
    """Of a union of types with tags: `kind` says which one a value has; words: it has none."""
    return Discriminator(kind, custom_error_type="not_chosen", custom_error_message=words)


def read_as(
    adapter: TypeAdapter[_T], given: Any, root: str = "", ignored: list[str] | None = None
) -> _T:
    """What is given, as this type; `FieldError` where it is none. root: its name, where it is a
    part of a body. ignored: of a lenient reader; gets the places of what it left out."""
    left_out: _LeftOut | None = None if ignored is None else []
    try:
        value = adapter.validate_python(given, context=left_out)
    except ValidationError as e:
        raise field_error(e, given, root) from None
    if left_out and ignored is not None:
        ignored += sorted(_places(left_out, given))
    return value


def _places(left_out: _LeftOut, given: Any) -> Iterator[str]:
    """tools[0], messages[1].name"""
    names: dict[int, set[str | None]] = {}
    for value, name in left_out:
        names.setdefault(id(value), set()).add(name)
    todo: list[tuple[list[str | int], Any]] = [([], given)]
    while todo:
        path, value = todo.pop()
        for name in names.get(id(value), ()):
            yield join_path(path if name is None else [*path, name])
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        todo += [([*path, key], each) for key, each in inside if isinstance(each, dict | list)]
