"""Filters, tests and functions of chat templates, computed within limits.

In: the `Rendering`, which counts the cost, and the operands. Out: what transformers' templates get;
texts keep their marks. `FILTERS`, `TESTS` and `FUNCTIONS` are all that a template can call, besides
its own macros and the methods of `llama.prompts.jinja.operations`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import filters, tests
from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined
from jinja2.sandbox import MAX_RANGE
from jinja2.utils import Namespace

from llama.prompts.jinja.marked import MarkedText
from llama.prompts.jinja.operations import (
    check_stripped,
    formatted,
    joined,
    limited,
    num_lines,
    replaced,
)
from llama.prompts.jinja.rendering import ITEM, Rendering

EACH = "each item"  # the filter of every loop that has a condition; no template can name it
_MAX_DIGITS = 64  # characters that become a number
_MAX_INDENT = 16
_MAX_MESSAGE = 200  # characters of a message of a template, or of the format of a date
_Filter = Callable[..., Any]


class Raised(Exception):
    """The message that a template gave to raise_exception."""


def shown(message: object) -> str:
    """Return what a template or its failure says: one printable line of limited length."""
    text = str(message)[:_MAX_MESSAGE]
    printable = "".join(c if c.isprintable() else " " for c in text)
    return printable or type(message).__name__


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that a template can name an attribute self
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r:.40}")


def _range(*args: int) -> range:
    if len(range(*args)) > MAX_RANGE:
        raise SecurityError(f"a range has more than {MAX_RANGE:,} numbers")
    return range(*args)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: Any = "") -> NoReturn:
    raise Raised(shown(message))


def _strftime_now(layout: str) -> str:
    """Return today's date; it is no text of the template's."""
    if len(layout) > _MAX_MESSAGE or re.search(r"\d\d\d", layout):
        raise SecurityError("the format of a date is too long")
    return datetime.now().strftime(layout)


@jinja2.pass_context
def written(context: Rendering, value: Any) -> str:
    """Return what {{ value }} writes.

    As it needs the context, Jinja does not compute expressions when it compiles.
    """
    return context.text_of(value)


def _counted(function: _Filter) -> _Filter:
    """Return a filter that counts as a step."""

    @jinja2.pass_context
    def counted(context: Rendering, value: Any, *args: Any, **kwargs: Any) -> Any:
        context.step()
        return function(context, value, *args, **kwargs)

    return counted


def _of_text(method: Callable[[str], str]) -> _Filter:
    """Return a filter that changes the case of a text."""

    def changed(context: Rendering, value: Any) -> Any:
        return context.stored(method(context.text_of(value)))

    return changed


def _of_items(function: _Filter) -> _Filter:
    """Return a filter of Jinja's that takes a context and yields some items of a list."""

    def chosen(context: Rendering, value: Any, *args: Any, **kwargs: Any) -> Any:
        return function(context, context.each(value or ()), *args, **kwargs)

    return chosen


def _sorted_by(function: _Filter) -> _Filter:
    """Return a filter of Jinja's that compares the items of a list with one another."""

    def ordered(context: Rendering, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(value, dict):
            value = list(context.each(value))
        bytes_left = context.bytes_left
        context.measured(value)
        looks = len(value).bit_length()  # how often a sort compares each item with another
        context.spend(looks * (bytes_left - context.bytes_left))
        if function is filters.do_dictsort:
            return context.stored(function(value, *args, **kwargs))
        return context.stored(list(function(context.environment, value, *args, **kwargs)))

    return ordered


def _title(text: str) -> str:
    changed = filters.do_title(text)
    if not isinstance(text, MarkedText) or len(changed) != len(text):
        return str(changed)
    return MarkedText(changed, text.mask)


def _trim(context: Rendering, value: Any, chars: str | None = None) -> Any:
    check_stripped(chars)
    return context.stored(context.text_of(value).strip(chars))


def _join(context: Rendering, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = (context.environment.getitem(item, attribute) for item in value)
    return joined(context, context.text_of(d), value)


def _replace(context: Rendering, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = context.text_of(value)
    return replaced(context, text, context.text_of(old), context.text_of(new), count)


def _format(context: Rendering, value: Any, *args: Any) -> str:
    return formatted(context, context.text_of(value), args)


def _tojson(
    context: Rendering,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> Any:
    """Return JSON as transformers writes it; Jinja's own filter escapes HTML."""
    _check_indent(indent)
    if separators is not None and sum(map(len, separators)) > _MAX_INDENT:
        raise SecurityError("a separator is too long")
    context.measured(value, is_written=True, indent=indent or 0)
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else tuple(separators),  # type: ignore[arg-type]
        sort_keys=sort_keys,
    )
    return context.stored(text)


def _check_indent(indent: Any) -> None:
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= _MAX_INDENT):
        raise SecurityError(f"an indent must be a number from 0 to {_MAX_INDENT}")


def _indent(
    context: Rendering, value: Any, width: int = 4, first: bool = False, blank: bool = False
) -> Any:
    _check_indent(width)
    text = context.text_of(value)
    context.spend((ITEM + width) * num_lines(text))
    return context.stored(filters.do_indent(text, width, first, blank))


def _check_digits(value: Any) -> None:
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise SecurityError(f"a number has more than {_MAX_DIGITS} digits")


def _float(context: Rendering, value: Any, default: Any = 0.0) -> Any:
    _check_digits(value)
    return filters.do_float(value, default)


def _int(context: Rendering, value: Any, default: Any = 0, base: int = 10) -> Any:
    _check_digits(value)
    return limited(context, filters.do_int(value, default, base))


def _list(context: Rendering, value: Any) -> Any:
    return context.stored(list(context.each(value)))


def _items(context: Rendering, value: Any) -> Any:
    if isinstance(value, Undefined):
        return ()
    if not isinstance(value, dict):
        raise TypeError("only an object has items")
    return value.items()


def _last(context: Rendering, value: Any) -> Any:
    return next(reversed(value), context.environment.undefined("an empty list has no last item"))


def _first(context: Rendering, value: Any) -> Any:
    return next(iter(value), context.environment.undefined("an empty list has no first item"))


def _reverse(context: Rendering, value: Any) -> Any:
    if isinstance(value, str):
        return context.stored(value[::-1])
    return reversed(value)


_BY_NAMES: Mapping[str, _Filter] = {
    "abs": lambda context, value: abs(value),
    "capitalize": _of_text(lambda text: text.capitalize()),
    "d default": lambda context, *args, **kwargs: filters.do_default(*args, **kwargs),
    "dictsort": _sorted_by(filters.do_dictsort),
    "first": _first,
    "float": _float,
    "format": _format,
    "indent": _indent,
    "int": _int,
    "items": _items,
    "join": _join,
    "last": _last,
    "count length": lambda context, value: len(value),
    "list": _list,
    "lower": _of_text(lambda text: text.lower()),
    "map": _of_items(filters.do_map),
    "reject": _of_items(filters.do_reject),
    "rejectattr": _of_items(filters.do_rejectattr),
    "replace": _replace,
    "reverse": _reverse,
    "safe string": lambda context, value: context.text_of(value),
    "select": _of_items(filters.do_select),
    "selectattr": _of_items(filters.do_selectattr),
    "sort": _sorted_by(filters.do_sort),
    "title": _of_text(_title),
    "tojson": _tojson,
    "trim": _trim,
    "unique": _sorted_by(filters.do_unique),
    "upper": _of_text(lambda text: text.upper()),
}
FILTERS: Mapping[str, _Filter] = {
    **{name: _counted(function) for names, function in _BY_NAMES.items() for name in names.split()},
    EACH: jinja2.pass_context(lambda context, value: context.each(value)),
}


def _compared(test: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    """Return a test that compares two values."""

    @jinja2.pass_context
    def compared(context: Rendering, left: Any, right: Any) -> bool:
        return test(context.measured(left), context.measured(right))

    return compared


def _of_number(test: Callable[..., bool]) -> Callable[..., bool]:
    """Return a test of numbers; of a text, % would be an operator that formats."""

    def checked(value: Any, *args: Any) -> bool:
        if isinstance(value, str):
            raise TypeError("a text is no number")
        return test(value, *args)

    return checked


_JINJA_TESTS: Mapping[str, Callable[..., bool]] = cast(Any, tests.TESTS)
_CHECKS = (
    "boolean callable defined false float integer iterable mapping none number sameas sequence "
    "string true undefined"
)
_ARITHMETIC = "divisibleby even odd"
_COMPARISONS = "in == eq equalto != ne > gt greaterthan ge >= < lt lessthan <= le"
TESTS: Mapping[str, Callable[..., bool]] = {
    **{name: _JINJA_TESTS[name] for name in _CHECKS.split()},
    **{name: _of_number(_JINJA_TESTS[name]) for name in _ARITHMETIC.split()},
    **{name: _compared(_JINJA_TESTS[name]) for name in _COMPARISONS.split()},
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "range": _range,
    "namespace": _Namespace,
    "dict": _dict,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
