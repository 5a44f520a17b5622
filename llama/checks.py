"""The values that a caller gives, checked once and for all: plain Python numbers and paths out.

numpy's and torch's scalars are numbers too; neither is imported. `FieldTypeError` (no number) or
`FieldError` (out of range) names the field, and says what was given and what is allowed.
"""

import contextlib
import dataclasses
import difflib
import math
import operator
import os
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args, overload

_SHOWN_CHARS = 80  # of a value that an error quotes


class FieldError(ValueError):
    """A value that cannot be used. field: what was checked, such as `temperature` or `stop[3]`,
    which the message says as well, at its beginning where that can be."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message

    @classmethod
    def of(cls, field: str, words: str) -> "FieldError":
        """Of a message that is the field and then these words."""
        return cls(field, field + words)

    def __str__(self) -> str:
        return self.message

    def at(self, field: str) -> "FieldError":
        """The same of another field, where the value was taken from."""
        rest = self.message.removeprefix(self.field)
        return type(self)(field, self.message if rest == self.message else field + rest)


class FieldTypeError(FieldError, TypeError):
    """A value of a type that cannot be used."""


def brief(value: object) -> str:
    """The repr of a value for an error message: at most about 80 characters, whatever its size."""
    quoter = reprlib.Repr()
    quoter.maxdict = 12
    quoter.maxstring = quoter.maxother = quoter.maxlong = _SHOWN_CHARS
    try:
        text = quoter.repr(value)
    except Exception:  # a repr that fails, or an int of more digits than Python converts
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 2 * _SHOWN_CHARS else text[: 2 * _SHOWN_CHARS - 3] + "..."


def nearest(word: str, words: Iterable[str]) -> str:
    """ ": did you mean ...?" where one of the words is like this one, else nothing."""
    found = difflib.get_close_matches(word, list(words), 1)
    return f": did you mean {found[0]}?" if found else ""


def index_of(value: Any) -> int | None:
    """A whole number of Python, numpy or torch as an int, else None; True and 3.0 are none."""
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
    """`value` as an int from `low` to `high`, both included; or None, where it is `optional`."""
    if value is None and optional:
        return None
    allowed = f"a whole number from {low} to {high}" + " or None" * optional
    number = index_of(value)
    if number is None:
        raise FieldTypeError(name, f"{name}={brief(value)} must be {allowed}")
    if not low <= number <= high:
        raise FieldError(name, f"{name}={brief(number)} must be {allowed}")
    return number


def number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """`value` as a finite float from `low`, or with `above` above it, to `high`; no bool."""
    allowed = f"a number {f'above {low} and up' if above else f'from {low}'} to {high}"
    plain = python_scalar(value)
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise FieldTypeError(name, f"{name}={brief(value)} must be {allowed}")
    try:
        result = float(plain)
    except OverflowError:  # an int of more than 308 digits
        result = math.inf
    inside = low < result <= high if above else low <= result <= high
    if not (inside and math.isfinite(result)):
        raise FieldError(name, f"{name}={brief(plain)} must be {allowed}")
    return result


def within(default: Any, low: float, high: float) -> Any:
    """A dataclass's field for a number from `low` to `high`, both included: see `limits_of`."""
    return dataclasses.field(default=default, metadata={"limits": (low, high)})


def torchrun_number(name: str, below: int = 2**20) -> int:
    """That of one of torchrun's variables; where it is not set, that of a process alone."""
    low = int(name.endswith("SIZE"))
    text = os.environ.get(name, str(low))
    return whole_number(name, int(text) if text.isdecimal() else text, low, below - 1)


def limits_of(kind: type) -> dict[str, tuple[type, float, float, bool]]:
    """By field of a dataclass with limits: float or int, both limits, whether it may be None."""
    return {
        each.name: (
            float if float in (each.type, *get_args(each.type)) else int,
            *each.metadata["limits"],
            each.type not in (int, float),
        )
        for each in dataclasses.fields(kind)
        if "limits" in each.metadata
    }


def checked_number(
    name: str, value: Any, kind: type, low: float, high: float, optional: bool
) -> float | int | None:
    """A value that is within what `limits_of` has of it, as such a number."""
    if kind is float:
        return number(name, value, low, high)
    return whole_number(name, value, int(low), int(high), optional=optional)


def path_like(name: str, value: Any) -> str | os.PathLike[str]:
    """`value` as a path. An int is a folder's name, as fire reads `--ckpt_dir 123` in Meta's
    scripts. TypeError for anything else, a float among them: 3.1 may have been 3.10."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str | os.PathLike):
        remedy = f", such as ./{value}" if isinstance(value, float) else ""
        raise FieldTypeError(name, f"{name}={brief(value)} must be the text of a path{remedy}")
    return value


def python_scalar(value: Any) -> Any:
    """The Python number in a scalar of numpy or torch; any other value as it is."""
    item = getattr(value, "item", None)
    if item is None or getattr(value, "shape", None) not in ((), (1,)):
        return value
    try:
        return item()
    except (ValueError, RuntimeError):
        return value


@contextlib.contextmanager
def errors_in(source: str) -> Iterator[None]:
    """Turn a TypeError or ValueError of the block into a ValueError that begins with `source`."""
    try:
        yield
    except (TypeError, ValueError) as e:
        raise ValueError(f"{source}: {e}") from e
