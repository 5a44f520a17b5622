"""Pydantic types for values from callers, and pydantic's errors as `FieldError`.

In: a pydantic type, and the value of a caller. Out: plain Python values, or one `FieldError` that
names the value at fault. `BuildArgs`, `SamplingParams` and the bodies of the server declare their
fields with the types of this module and of checks.py, so that each rule is written once. It knows
no field by name.
"""

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar, dataclass_transform, get_args, get_type_hints

import pydantic.dataclasses
from pydantic import (
    ConfigDict,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import (
    CoreSchema,
    ErrorDetails,
    core_schema,
)

from llama.common.checks import FieldError, FieldTypeError, brief, nearest

_T = TypeVar("_T")
_Path = list[str | int]  # keys of objects and indices of lists, from the outside in
_MAX_ERRORS = 1000  # number of errors of one value that are considered
_JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
_EXPECTED = {  # keys: pydantic's types of errors
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
}
_MESSAGES = {  # the text after the path of the value, by pydantic's type of error
    "not_chosen": "{msg}, got {value}",
    "value_error": ": {error}",
    "missing": " is needed",
    "literal_error": " must be {expected}, got {value}",
    "int_type": "={value} must be a whole number",
    "greater_than_equal": "={value} must be at least {ge}",
    "less_than_equal": "={value} must be at most {le}",
    "string_too_long": " must have at most {max_length} characters",
    "too_short": " must be a list of at least one",
    "too_long": " has {size} entries: it must have at most {max_length}",
}


def json_type(value: object) -> str:
    """Return the type of a value from JSON, as JSON calls it, with its article."""
    return "null" if value is None else _JSON_TYPES.get(type(value), "a number")


def with_message(text: str, *, of_parts: bool = False) -> WrapValidator:
    """Replace pydantic's errors of a value by one message.

    Args:
        text: the message after the path of the value; "{value}" stands for the value.
        of_parts: replace errors of parts of the value, too.
    """

    def check(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError as e:
            errors = e.errors(include_url=False)
            if not of_parts and all(error["loc"] for error in errors):
                raise
            is_type = any(map(_is_type_error, errors))
            kind = FieldTypeError if is_type else FieldError
            raise kind("", text.replace("{value}", brief(value))) from None

    return WrapValidator(check)


@dataclass(frozen=True)
class Length:
    """Annotation of a text of `low` to `high` characters, both included."""

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: Any, _: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema for `str` or `str | None`."""
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
                    raise FieldTypeError("", text) from None
            if self.low <= len(value) <= self.high:
                return value  # a text with a lone surrogate, whose length pydantic cannot count
            raise FieldError("", f" must have {allowed}, not {len(value)}: {brief(value)}")

        return core_schema.no_info_wrap_validator_function(check, schema)


@dataclass(frozen=True)
class TupleOf:
    """Annotation of a list, tuple or array that is stored as a tuple.

    Attributes:
        entry: type of an entry.
        low: smallest number of entries; if it is 0, None stands for no entries.
        high: largest number of entries.
        may_be_text: whether one text may be given in place of a list of it.
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
        allowed = f"{self.low} to {self.high} entries" if self.low else f"at most {self.high}"
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            text = f"={brief(value)} must be a list or tuple of {allowed}"
            raise FieldTypeError("", text if self.low else f"{text} entries")
        if self.low <= len(value) <= self.high:
            return tuple(value)
        if self.low:
            raise FieldError("", f" must have {allowed}, not {len(value)}")
        raise FieldError("", f" has {len(value)} entries: it must have {allowed}")


@dataclass(frozen=True)
class _Located:
    """One of pydantic's errors, and the path of its value as the caller wrote it."""

    path: _Path
    details: ErrorDetails

    @property
    def rank(self) -> tuple[int, _Path, bool]:
        """The error with the largest rank is the one that is reported."""
        indices = [key for key in self.path if isinstance(key, int)]
        return len(self.path), list(indices), self.details["type"] != "missing"


def field_error(error: ValidationError, given: Any = None, root: str = "") -> FieldError:
    """Make a `FieldError` of one of pydantic's errors: the one furthest inside the value.

    Args:
        error: the error that pydantic has raised.
        given: the value from JSON that was read. pydantic's paths name the branches of unions,
            which the caller did not write; this value serves to leave them out.
        root: the name of the value, if it is a part of something larger.
    """
    details = error.errors(include_url=False)[:_MAX_ERRORS]
    located = [_Located(_path_of(each, given), each) for each in details]
    path = max(located, key=lambda each: each.rank).path
    at_path = [each.details for each in located if each.path == path]
    first = next((each for each in at_path if each["type"] not in _EXPECTED), at_path[0])
    expected = [_EXPECTED[each["type"]] for each in at_path if each["type"] in _EXPECTED]
    text = _message_of(first, " or ".join(dict.fromkeys(expected)))
    whole_path: _Path = [root, *path] if root else path
    name = join_path(whole_path)
    if not name and text.startswith(" "):
        name = "body"
    if root == "messages" and path:  # the message of a dialog: "message 0: content"
        name = ": ".join(filter(None, [f"message {path[0]}", join_path(path[1:])]))
    message = f"{name}{text}".removeprefix(": ")
    field = join_path(whole_path)
    if (cause := _relative(first)) is not None:
        field = f"{field}{cause.field}".removeprefix(".")
    return FieldTypeError(field, message) if _is_type_error(first) else FieldError(field, message)


def _is_type_error(error: ErrorDetails) -> bool:
    return error["type"] in _EXPECTED or isinstance(_relative(error), FieldTypeError)


def _relative(error: ErrorDetails) -> FieldError | None:
    """Return the error of a validator whose message follows the path of the value."""
    cause = error.get("ctx", {}).get("error")
    return cause if isinstance(cause, FieldError) and cause.is_relative else None


def _path_of(error: ErrorDetails, given: Any) -> _Path:
    """Return the path of an error without the branches of unions, which pydantic names, too."""
    location = list(error["loc"])
    if given is None:
        return location
    is_missing = error["type"] == "missing"
    missing_name = location[-1:] if is_missing else []
    readings = _readings(location[:-1] if is_missing else location, given)
    path, _ = max(readings, key=lambda reading: (reading[1] is error["input"], len(reading[0])))
    return [*path, *missing_name]


def _readings(location: _Path, value: Any) -> Iterator[tuple[_Path, Any]]:
    """Yield every path that the location may stand for, with the part of the value there."""
    if not location:
        yield [], value
        return
    first = location[0]
    rest = location[1:]
    yield from _readings(rest, value)  # `first` is the branch of a union
    is_index = isinstance(value, list) and isinstance(first, int) and first < len(value)
    if is_index or (isinstance(value, dict) and first in value):
        for path, part in _readings(rest, value[first]):
            yield [first, *path], part


def _message_of(error: ErrorDetails, expected: str) -> str:
    """Return the text that follows the path of the value.

    Args:
        error: one of pydantic's errors.
        expected: the types that the value may have, joined.
    """
    kind = error["type"]
    value = error["input"]
    context = error.get("ctx", {})
    if _relative(error) is not None:
        return str(_relative(error))
    if kind in _MESSAGES:
        size = len(value) if kind == "too_long" else 0
        return _MESSAGES[kind].format(**context, value=brief(value), size=size, msg=error["msg"])
    if kind == "union_tag_not_found":
        return f".{context['discriminator'][1:-1]} is needed"
    if kind == "union_tag_invalid":
        name = context["discriminator"][1:-1]
        return f".{name} must be one of {context['expected_tags']}, got {brief(context['tag'])}"
    if expected:
        return f" must be {expected}, got {json_type(value)}"
    return f": {error['msg'][:1].lower()}{error['msg'][1:]}"


def join_path(path: _Path) -> str:
    """Return a path as text, such as "tools[0].function.name"."""
    keys = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in path]
    return "".join(keys).removeprefix(".")


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def checked_fields(values: _T, names: Mapping[str, Any]) -> _T:
    """Return a copy of a plain dataclass whose fields pydantic has checked.

    Args:
        values: the object. The `__pydantic_config__` of its class defers the build, and asks for
            the validation of objects.
        names: names in its annotations that its module imports for type checkers alone.

    Raises:
        FieldError: a value cannot be used.
    """
    cls: Any = type(values)
    adapter = _adapter(cls)
    adapter.rebuild(_types_namespace=names)
    try:
        checked: _T = adapter.validate_python(values)
    except ValidationError as e:
        raise _nested(e) or field_error(e) from None
    return checked


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def checked_dataclass(cls: type[_T]) -> type[_T]:
    """Make a frozen, keyword-only dataclass whose fields pydantic checks when it is made.

    Its constructor raises a TypeError for an unknown argument, and a `FieldError` for a value that
    cannot be used. A class may set `path_prefix`, the name that errors put before its fields.
    """
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    checked: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=config)(cls)
    pydantic_init = checked.__init__
    names = frozenset(field.name for field in dataclasses.fields(checked) if field.init)

    def __init__(self: Any, **values: Any) -> None:
        for name in values.keys() - names:
            raise TypeError(f'{cls.__name__}() has no argument "{name}"{nearest(name, names)}')
        try:
            pydantic_init(self, **values)
        except ValidationError as e:
            raise _nested(e) or field_error(e, root=getattr(cls, "path_prefix", "")) from None

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    checked.__init__ = __init__
    checked.__signature__ = _plain_signature(checked)
    result: type[_T] = checked
    return result


def _plain_signature(cls: Any) -> inspect.Signature:
    """Return the signature with plain types: `help()` would show the annotations at full length."""
    hints = get_type_hints(cls)
    parameters = inspect.signature(cls).parameters.values()
    return inspect.Signature([each.replace(annotation=hints[each.name]) for each in parameters])


def _nested(error: ValidationError) -> FieldError | None:
    """Return the `FieldError` with the name of its field that a validator has raised, if any.

    It is a copy. pydantic's error refers to the original in a way that the garbage collector does
    not see, and the one that is raised refers to pydantic's error: both would never be freed, nor
    the values in their frames.
    """
    for details in error.errors(include_url=False):
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, FieldError) and not cause.is_relative:
            return type(cause)(cause.field, cause.message)
    return None
