"""Pydantic types for values from callers, and its errors as a `FieldError` that names the field.

In: a pydantic type, and what a caller gave. Out: plain Python values, or one `FieldError` for the
value at fault. Both `SamplingParams` and the bodies of the server declare their fields with the
types of this module, so that a rule is written once. It knows no field by name.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar, dataclass_transform, get_args, get_type_hints

import pydantic.dataclasses
from pydantic import (
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from llama.checks import FieldError, FieldTypeError, brief, index_of, nearest, python_scalar

_T = TypeVar("_T")
_MAX_ERRORS = 1000  # errors of one value that are looked at
_JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
_EXPECTED = {  # by pydantic's type of error
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
}
_MESSAGES = {  # that follow the path of the value, by pydantic's type of error
    "custom": "{text}",
    "custom_type": "{text}",
    "not_chosen": "{msg}, got {value}",
    "value_error": ": {error}",
    "missing": " is needed",
    "literal_error": " must be {expected}, got {value}",
    "int_type": "={value} must be a whole number",
    "greater_than_equal": "={value} must be at least {ge}",
    "less_than_equal": "={value} must be at most {le}",
    "too_short": " must be a list of at least one",
    "too_long": " has {size} entries: it must have at most {max_length}",
}


def json_type(value: object) -> str:
    """Return the type of a value from JSON, as JSON calls it, with its article."""
    return "null" if value is None else _JSON_TYPES.get(type(value), "a number")


def custom_error(text: str, field: str = "", *, is_type: bool = False) -> PydanticCustomError:
    """Make an error whose text follows the path of the value.

    Args:
        text: the rest of the message, such as "=7 must be a string".
        field: the field at fault inside the value, where the value is an object.
        is_type: the value has a wrong type, so that the error is a `FieldTypeError`.
    """
    context = {"text": text, "field": (field,) if field else ()}
    return PydanticCustomError("custom_type" if is_type else "custom", "{text}", context)


def with_message(text: str, *, of_parts: bool = False) -> WrapValidator:
    """Replace pydantic's errors of a value.

    Args:
        text: the rest of the message after the path; "{value}" stands for the value.
        of_parts: replace errors of what is inside the value, too.
    """

    def check(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError as e:
            errors = e.errors(include_url=False)
            if not of_parts and all(error["loc"] for error in errors):
                raise
            is_type = any(error["type"] in _EXPECTED for error in errors)
            raise custom_error(text.replace("{value}", brief(value)), is_type=is_type) from None

    return WrapValidator(check)


@dataclass(frozen=True)
class Range:
    """Annotation of a number from `low` to `high`, both included.

    A scalar of numpy or torch becomes a number of Python, an int for a float field a float.
    """

    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, _: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema for `int` or `float`, or for one of them or None."""
        types = get_args(source) or (source,)
        is_whole = float not in types
        schema: CoreSchema
        if is_whole:
            schema = core_schema.int_schema(strict=True, ge=int(self.low), le=int(self.high))
        else:
            schema = core_schema.float_schema(
                strict=True, ge=self.low, le=self.high, allow_inf_nan=False
            )
        allowed = f"a {'whole ' * is_whole}number from {self.low} to {self.high}"
        if NoneType in types:
            schema = core_schema.nullable_schema(schema)
            allowed += " or None"

        convert = index_of if is_whole else python_scalar

        def check(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
            plain = value if type(value) in (int, float) else convert(value)
            is_number = isinstance(plain, int | float) and not isinstance(plain, bool)
            shown = plain if is_number else value
            if is_number or value is None:
                with contextlib.suppress(ValidationError):
                    return read(shown)
            is_type = not is_number or (is_whole and isinstance(plain, float))
            raise custom_error(f"={brief(shown)} must be {allowed}", is_type=is_type)

        return core_schema.no_info_wrap_validator_function(check, schema)


@dataclass(frozen=True)
class Length:
    """Annotation of a text of `low` to `high` characters, both included."""

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: Any, _: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema for `str`, or for a text or None."""
        schema: CoreSchema
        schema = core_schema.str_schema(strict=True, min_length=self.low, max_length=self.high)
        if NoneType in get_args(source):
            schema = core_schema.nullable_schema(schema)
        allowed = f"{self.low} to {self.high} characters"

        def check(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
            try:
                return read(value)
            except ValidationError:
                if not isinstance(value, str):
                    text = f"={brief(value)} must be a string of {allowed}"
                    raise custom_error(text, is_type=True) from None
            if self.low <= len(value) <= self.high:
                return value  # with half of a surrogate pair, which pydantic does not count
            raise custom_error(f" must have {allowed}, not {len(value)}: {brief(value)}")

        return core_schema.no_info_wrap_validator_function(check, schema)


@dataclass(frozen=True)
class TupleOf:
    """Annotation of a list, tuple or array that is stored as a tuple.

    Attributes:
        entry: the type of an entry.
        low, high: the number of entries, both included. Where `low` is 0, None stands for no entry.
        may_be_text: a single text stands for itself as the one entry.
    """

    entry: Any
    low: int
    high: int
    may_be_text: bool = False

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema for a tuple of entries, after the conversion to a tuple."""
        entry = handler.generate_schema(self.entry)
        entries = core_schema.tuple_schema([entry], variadic_item_index=0, fail_fast=True)
        return core_schema.no_info_before_validator_function(self._as_tuple, entries)

    def _as_tuple(self, value: Any) -> tuple[Any, ...]:
        if value is None and self.low == 0:
            return ()
        if isinstance(value, str) and self.may_be_text:
            return (value,)
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            allowed = f"a list or tuple of {self.low or 'at most'} {'to ' * bool(self.low)}"
            text = f"={brief(value)} must be {allowed}{self.high} entries"
            raise custom_error(text, is_type=True)
        if len(value) > self.high and not self.low:
            raise custom_error(f" has {len(value)} entries: it must have at most {self.high}")
        if not self.low <= len(value) <= self.high:
            text = f" must have {self.low} to {self.high} entries, not {len(value)}"
            raise custom_error(text)
        return tuple(value)


def field_error(error: ValidationError, given: Any = None, root: str = "") -> FieldError:
    """Choose one of pydantic's errors: the one furthest inside the value.

    Args:
        error: what pydantic raised.
        given: the value from JSON that was read. pydantic's paths name the branches of unions,
            which the caller did not write: they are left out with the help of the value.
        root: the name of the value, where it is a part of something larger.
    """
    found = [
        (_path_of(each, given), each) for each in error.errors(include_url=False)[:_MAX_ERRORS]
    ]

    def rank(entry: tuple[list[str | int], ErrorDetails]) -> Any:
        indices = [each for each in entry[0] if isinstance(each, int)]
        return len(entry[0]), indices, entry[1]["type"] != "missing"

    path, _ = max(found, key=rank)
    same = [each for where, each in found if where == path]
    first = next((each for each in same if each["type"] not in _EXPECTED), same[0])
    wanted = list(dict.fromkeys(_EXPECTED[e["type"]] for e in same if e["type"] in _EXPECTED))
    text = _message_of(first, " or ".join(wanted))
    place = join_path([root, *path] if root else path) or "body" * text.startswith(" ")
    if root == "messages" and path:  # of a dialog alone: message 0: content
        place = ": ".join(filter(None, [f"message {path[0]}", join_path(path[1:])]))
    message = f"{place}{text}".removeprefix(": ")
    field = join_path([*([root] if root else []), *path, *first.get("ctx", {}).get("field", ())])
    is_type = first["type"] in _EXPECTED or first["type"] == "custom_type"
    return FieldTypeError(field, message) if is_type else FieldError(field, message)


def _path_of(error: ErrorDetails, given: Any) -> list[str | int]:
    """Where an error is, as the caller wrote it: pydantic names the branch of a union, too."""
    if given is None:
        return list(error["loc"])
    is_missing = error["type"] == "missing"
    ways = list(_ways(error["loc"][:-1] if is_missing else error["loc"], given))
    path, _ = max(ways, key=lambda way: (way[1] is error["input"], len(way[0])))
    return [*path, error["loc"][-1]] if is_missing else path


def _ways(loc: Sequence[str | int], value: Any) -> Iterator[tuple[list[str | int], Any]]:
    """All readings of a place, each with what is there."""
    if not loc:
        yield [], value
        return
    first, rest = loc[0], loc[1:]
    yield from _ways(rest, value)
    in_list = isinstance(value, list) and isinstance(first, int) and first < len(value)
    if in_list or (isinstance(value, dict) and first in value):
        for path, found in _ways(rest, value[first]):
            yield [first, *path], found


def _message_of(error: ErrorDetails, wanted: str) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in _MESSAGES:
        size = len(value) if kind == "too_long" else 0
        return _MESSAGES[kind].format(**context, value=brief(value), size=size, msg=error["msg"])
    if kind == "union_tag_not_found":
        return f".{context['discriminator'][1:-1]} is needed"
    if kind == "union_tag_invalid":
        name, found = context["discriminator"][1:-1], brief(context["tag"])
        return f".{name} must be one of {context['expected_tags']}, got {found}"
    if wanted:
        return f" must be {wanted}, got {json_type(value)}"
    return f": {error['msg'][:1].lower()}{error['msg'][1:]}"


def join_path(path: list[str | int]) -> str:
    """tools[0].function.name"""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def checked_dataclass(cls: type[_T]) -> type[_T]:
    """Make a frozen, keyword-only dataclass whose fields pydantic checks when it is made.

    An unknown argument is a TypeError, and a value that cannot be used a `FieldError`. A class may
    name the `path_prefix` of its fields in errors.
    """
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    checked: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=config)(cls)
    read = checked.__init__
    names = frozenset(f.name for f in dataclasses.fields(checked) if f.init)

    def __init__(self: Any, **values: Any) -> None:
        for name in values.keys() - names:
            raise TypeError(f'{cls.__name__}() has no argument "{name}"{nearest(name, names)}')
        try:
            read(self, **values)
        except ValidationError as e:
            raise _nested(e) or field_error(e, root=getattr(cls, "path_prefix", "")) from None

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    checked.__init__ = __init__
    hints = get_type_hints(checked)  # without the annotations, which would be all that help() shows
    parameters = inspect.signature(checked).parameters.values()
    plain = [each.replace(annotation=hints[each.name]) for each in parameters]
    checked.__signature__ = inspect.Signature(plain)
    return checked


def _nested(error: ValidationError) -> FieldError | None:
    """Return the `FieldError` that a validator raised, if one did."""
    for details in error.errors(include_url=False):
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, FieldError):
            return cause
    return None
