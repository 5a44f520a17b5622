"""What a JSON value is, in the words of errors: a value or names in, text or an error out."""

import heapq
from typing import Any, TypeVar

from llama.checks import brief
from llama.prompts.fields import json_type as json_type

_T = TypeVar("_T")
_MOST_NAMED = 8  # fields in one error
_NAMES = {
    dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a whole number"
}  # fmt: skip


class UnknownField(ValueError):
    """field: the name as the client wrote it, or None where another place says it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def refuse_fields(unknown: set[str], place: str) -> None:
    """UnknownField that names the fields, if there are any; of many the first ones."""
    if unknown:
        first = heapq.nsmallest(_MOST_NAMED, unknown)
        names = ", ".join(brief(name) for name in first) + ", ..." * (len(unknown) > len(first))
        raise UnknownField(f"{names} cannot be used in {place}: leave it out", first[0])


def of_type(value: Any, kind: type[_T], where: str) -> _T:
    """The value, which must be of this type; TypeError says where it is not."""
    if type(value) is not kind:
        raise TypeError(f"{where} must be {_NAMES[kind]}, got {json_type(value)}")
    return value


def object_at(value: Any, known: set[str], where: str) -> dict[str, Any]:
    """An object without its fields that are null, which clients write for what is not given.

    TypeError or ValueError says where it is no object, or has a field that is not known.
    """
    given = {key: each for key, each in of_type(value, dict, where).items() if each is not None}
    for key in sorted(given.keys() - known):
        raise ValueError(f"{where}.{key} cannot be used: leave it out")
    return given


def only(given: dict[str, Any], allowed: dict[str, tuple[Any, ...]], where: str = "") -> None:
    """ValueError for a field with another value than these, which change nothing here."""
    for name in sorted(allowed.keys() & given.keys()):
        if not any(
            given[name] == value and type(given[name]) is type(value) for value in allowed[name]
        ):
            words = " or ".join(map(repr, allowed[name]))
            raise ValueError(f"{where}{name} must be {words} here: leave it out")
