"""Objects of JSON that others write: the base of their models, and the words of their errors.

In: dicts, lists and plain values. Out: frozen models, or a `FieldError` that names the place of
what is wrong as the caller wrote it. It knows no field of any API.
"""

import heapq
from collections.abc import Collection
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from llama.checks import FieldError, FieldTypeError, brief

_MOST_NAMED = 8  # fields in one error
_JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
_WANTED = {
    "model_type": "an object", "model_attributes_type": "an object", "dict_type": "an object",
    "list_type": "a list", "string_type": "a string", "bool_type": "true or false",
    "int_type": "a whole number", "float_type": "a number",
}  # fmt: skip


def json_type(value: object) -> str:
    """The type of a value from JSON, in JSON's words."""
    return "null" if value is None else _JSON_TYPES.get(type(value), "a number")


class Fields(BaseModel):
    """An object of JSON. A field that it does not know is an error. null is a field that is not
    given, as clients write it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    unknown_words: ClassVar[str] = ": {names} cannot be used: leave it out"

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        """What is not null. An unknown name may be any text: pydantic's own error of a half
        surrogate does not name it."""
        if not isinstance(value, dict):
            return value
        given = {name: each for name, each in value.items() if each is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if unknown := given.keys() - known:
            first = heapq.nsmallest(_MOST_NAMED, map(str, unknown))
            names = ", ".join(map(brief, first)) + ", ..." * (len(unknown) > len(first))
            raise wrong(cls.unknown_words.format(names=names), first[0])
        return given


def wrong(words: str, field: str = "") -> PydanticCustomError:
    """An error whose words follow the place of the value. field: the one at fault, of an object."""
    return PydanticCustomError("wrong", "{words}", {"words": words, "field": field})


def said(words: str, *, of_parts: bool = False) -> WrapValidator:
    """What is wrong with a value, in these words; of_parts: with what is inside of it, too."""

    def check(value: Any, read: Any) -> Any:
        try:
            return read(value)
        except ValidationError as e:
            if of_parts or any(not each["loc"] for each in e.errors(include_url=False)):
                raise wrong(words) from None
            raise

    return WrapValidator(check)


def field_error(error: ValidationError, tags: Collection[str] = (), root: str = "") -> FieldError:
    """The first thing that is wrong.

    tags: of unions in a list: pydantic names one after the number of the entry, and the caller
    wrote none. root: the name of what was read, where it is a part of a body.
    """
    first = error.errors(include_url=False)[0]
    path: list[str | int] = [root] if root else []
    for each in first["loc"]:
        if not (each in tags and path and isinstance(path[-1], int)):
            path.append(each)
    context = first.get("ctx", {})
    words = _words(first["type"], first["input"], first["msg"], context)
    message = f"{_place(path)}{words}".removeprefix(": ").strip()
    path += [context["field"]] if context.get("field") else []
    kind = FieldTypeError if first["type"].endswith("_type") else FieldError
    return kind(_joined(path), message)


def _words(kind: str, value: Any, message: str, context: dict[str, Any]) -> str:
    if kind == "wrong":
        return str(context["words"])
    if kind == "value_error":
        return f": {context['error']}"
    if kind == "missing":
        return " is needed"
    if kind == "literal_error":
        return f" must be {context['expected']}, got {brief(value)}"
    if kind == "too_long":
        return f" has {len(value)} entries: it must have at most {context['max_length']}"
    if kind in _WANTED:
        return f" must be {_WANTED[kind]}, got {json_type(value)}"
    return f": {message[:1].lower()}{message[1:]}"


def _joined(path: list[str | int]) -> str:
    """tools[0].function.name"""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def _place(path: list[str | int]) -> str:
    """The same in the text of an error, where a message has a number: message 0: content"""
    if path[:1] == ["messages"] and len(path) > 1:
        rest = _joined(path[2:])
        return f"message {path[1]}" + (f": {rest}" if rest else "")
    return _joined(path)
