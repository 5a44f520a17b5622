"""Checks of the values that a caller gives: plain Python numbers and paths come out.

Scalars of numpy and torch count as numbers; neither package is imported. A value that is no number
raises a `FieldTypeError`, and one that is out of range a `FieldError`: both name the field, the
value and what is allowed. This module knows no field by name.
"""

import contextlib
import dataclasses
import difflib
import functools
import math
import operator
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, overload

_SHOWN_CHARS = 80  # length of a value that an error quotes


class FieldError(ValueError):
    """A value that cannot be used.

    Attributes:
        field: what was checked, such as `temperature` or `stop[3]`. In an error that a validator of
            pydantic raises it is empty, or begins with a dot: it follows the path of the value.
        message: the whole message, which names the field, at the beginning where that is possible.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message

    @classmethod
    def of(cls, field: str, text: str) -> "FieldError":
        """Make an error whose message is the field followed by the text."""
        return cls(field, field + text)

    @property
    def is_relative(self) -> bool:
        """Whether field and message follow the path of a value."""
        return not self.field or self.field.startswith(".")

    def __str__(self) -> str:
        return self.message

    def at(self, field: str) -> "FieldError":
        """Return the same error for another field, the one that the value was taken from."""
        text = self.message.removeprefix(self.field)
        if text == self.message:
            return type(self)(field, self.message)
        return type(self)(field, field + text)


class FieldTypeError(FieldError, TypeError):
    """A value whose type cannot be used."""


class FieldPathError(FieldError, FileNotFoundError):
    """A path that does not exist."""


def brief(value: object) -> str:
    """Return the repr of a value for an error message, cut to about 80 characters."""
    quoter = reprlib.Repr()
    quoter.maxdict = 12
    quoter.maxstring = quoter.maxother = quoter.maxlong = _SHOWN_CHARS
    try:
        text = quoter.repr(value)
    except Exception:  # a repr that fails, or an int with more digits than Python converts
        text = f"<{type(value).__name__}>"
    if len(text) <= 2 * _SHOWN_CHARS:
        return text
    return text[: 2 * _SHOWN_CHARS - 3] + "..."


def printable(text: str) -> str:
    """Return a text of elsewhere with its control characters escaped.

    They could move the cursor of a terminal, change its colours, or begin a line of a log.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ": did you mean ...?" if one of the names is similar, else an empty text."""
    similar = difflib.get_close_matches(name, list(names), 1)
    return f": did you mean {similar[0]}?" if similar else ""


def index_of(value: Any) -> int | None:
    """Return a whole number of Python, numpy or torch as an int, else None.

    True and 3.0 are no whole numbers.
    """
    try:
        return None if isinstance(python_scalar(value), bool) else operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without values
        return None


@overload
def whole_number(
    name: str, value: Any, low: int, high: int, *, optional: Literal[False] = False
) -> int: ...
@overload
def whole_number(name: str, value: Any, low: int, high: int, *, optional: bool) -> int | None: ...
def whole_number(
    name: str, value: Any, low: int, high: int, *, optional: bool = False
) -> int | None:
    """Return `value` as an int from `low` to `high`, both included, or None if it is `optional`."""
    if value is None and optional:
        return None
    allowed = f"a whole number from {low} to {high}"
    if optional:
        allowed += " or None"
    number = index_of(value)
    if number is None:
        raise FieldTypeError(name, f"{name}={brief(value)} must be {allowed}")
    if not low <= number <= high:
        raise FieldError(name, f"{name}={brief(number)} must be {allowed}")
    return number


def number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """Return `value` as a finite float from `low` to `high`; `above` excludes `low` itself."""
    lower_limit = f"above {low} and up" if above else f"from {low}"
    allowed = f"a number {lower_limit} to {high}"
    plain = python_scalar(value)
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise FieldTypeError(name, f"{name}={brief(value)} must be {allowed}")
    try:
        result = float(plain)
    except OverflowError:  # an int with more than 308 digits
        result = math.inf
    is_inside = low < result <= high if above else low <= result <= high
    if not (is_inside and math.isfinite(result)):
        raise FieldError(name, f"{name}={brief(plain)} must be {allowed}")
    return result


def torchrun_number(name: str, below: int = 2**20) -> int:
    """Read a torchrun variable as an int below `below`.

    The default is that of a single process: 1 for a size such as WORLD_SIZE, else 0.
    """
    low = int(name.endswith("SIZE"))
    text = os.environ.get(name, str(low))
    return whole_number(name, int(text) if text.isdecimal() else text, low, below - 1)


@dataclass(frozen=True)
class Range:
    """Annotation of a field: a number from `low` to `high`, both included, unless `above` is set.

    A field of a pydantic class is checked by pydantic, others by `check_ranges`. Scalars of numpy
    and torch become Python numbers, and an int in a float field a float.
    """

    low: float
    high: float
    above: bool = False  # excludes `low` itself

    def check(self, name: str, value: Any, kind: Any) -> int | float | None:
        """Return the number that `value` is.

        Args:
            name: the field, for errors.
            value: the value of a caller.
            kind: the type of the field: int or float, or one of them or None.
        """
        kinds = get_args(kind) or (kind,)
        is_optional = NoneType in kinds
        if float not in kinds:
            return whole_number(name, value, int(self.low), int(self.high), optional=is_optional)
        if value is None and is_optional:
            return None
        return number(name, value, self.low, self.high, above=self.above)

    def __get_pydantic_core_schema__(self, source: Any, _: Any) -> Any:
        """Return the schema; errors of `check` without a name are relative to pydantic's path."""
        from pydantic_core import core_schema

        kinds = get_args(source) or (source,)
        schema: Any = core_schema.int_schema(ge=int(self.low), le=int(self.high))
        if float in kinds:
            schema = core_schema.float_schema(ge=self.low, le=self.high)
        if NoneType in kinds:
            schema = core_schema.nullable_schema(schema)
        check = functools.partial(self.check, "", kind=source)
        return core_schema.no_info_before_validator_function(check, schema)


@dataclass(frozen=True)
class ReadBy:
    """Annotation of a field of a pydantic class: a function reads a value that is not None.

    Attributes:
        read: returns the value to store, or raises a `FieldError`. Its field may be empty; then the
            message follows the name of the field.
    """

    read: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, _: Any) -> Any:
        """Return the schema of the function."""
        from pydantic_core import core_schema

        schema: Any = core_schema.no_info_plain_validator_function(self.read)
        return core_schema.nullable_schema(schema) if NoneType in get_args(source) else schema


def check_ranges(values: Any) -> None:
    """Check the fields of a dataclass that are annotated with a `Range`."""
    for field in dataclasses.fields(values):
        kind, *annotations = get_args(field.type) or (field.type,)
        for annotation in annotations:
            if isinstance(annotation, Range):
                annotation.check(field.name, getattr(values, field.name), kind)


def true_or_false(value: Any) -> bool:
    """Return `value` if it is a bool; its error is relative to the field."""
    if not isinstance(value, bool):
        raise FieldTypeError("", f"={brief(value)} must be True or False")
    return value


def path_like(name: str, value: Any) -> str | os.PathLike[str]:
    """Return `value` as a path; an int is the name of a folder.

    fire, with which Meta's scripts read their flags, makes an int of `--ckpt_dir 123`. A float is a
    TypeError, as 3.1 may have been the text 3.10.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str | os.PathLike):
        remedy = f", such as ./{value}" if isinstance(value, float) else ""
        raise FieldTypeError(name, f"{name}={brief(value)} must be the text of a path{remedy}")
    return value


def python_scalar(value: Any) -> Any:
    """Return the Python number in a scalar of numpy or torch, and any other value as it is."""
    item = getattr(value, "item", None)
    if item is None or getattr(value, "shape", None) not in ((), (1,)):
        return value
    try:
        return item()
    except (ValueError, RuntimeError):
        return value


@contextlib.contextmanager
def errors_in_file(path: Path) -> Iterator[None]:
    """Name a file in every error of its reader, so that no content of it ends in a traceback.

    A ValueError that names the file, or another one in its folder, passes as it is; and so do
    errors of the system.
    """
    try:
        yield
    except ValueError as e:
        if str(path.parent) in str(e) or path.name in str(e):
            raise
        raise ValueError(f"{path}: {e}") from e
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as e:
        raise ValueError(
            f"{path} cannot be read, as something in it is of another type or size than its "
            f"reader expects ({type(e).__name__}: {brief(str(e))})"
        ) from e


@contextlib.contextmanager
def errors_in(source: str) -> Iterator[None]:
    """Turn a TypeError or ValueError of the block into a ValueError that begins with `source`."""
    try:
        yield
    except (TypeError, ValueError) as e:
        raise ValueError(f"{source}: {e}") from e
