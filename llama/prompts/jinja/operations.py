"""Operators and methods of values in a chat template, computed within limits.

In: the `Rendering` and the operands. Out: the result, whose cost is counted; texts keep their
marks. An operation whose result would be too large is refused before it runs.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext

from llama.prompts.jinja.marked import MarkedText
from llama.prompts.jinja.rendering import ITEM, MAX_CHARS, MAX_ITEMS, STEP, Rendering

_MAX_NUMBER = 1 << 63
_MAX_STRIPPED = 256  # characters in the argument of strip: its time is their product
# Conversions of %, with widths and precisions of at most two digits and without keys.
_FORMAT = re.compile(r"(?:[^%]|%%|%[-#0 +]*\d{0,2}(?:\.\d{1,2})?[a-zA-Z])*")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SPLITS = frozenset({"split", "rsplit", "splitlines"})
_LOOP_METHODS = (
    "index index0 revindex revindex0 first last length previtem nextitem depth depth0 cycle"
)
_TEXT_METHODS = frozenset(
    "split rsplit splitlines strip lstrip rstrip startswith endswith replace title upper lower "
    "capitalize join index count find rfind isdigit isalnum isalpha isspace removeprefix "
    "removesuffix".split()
)
# What a template may read of values, besides the items of objects and namespaces.
METHODS: Mapping[type, frozenset[str]] = {
    str: _TEXT_METHODS,
    MarkedText: _TEXT_METHODS,
    dict: frozenset({"items", "get", "keys", "values"}),
    list: frozenset({"index", "count"}),
    tuple: frozenset({"index", "count"}),
    LoopContext: frozenset(_LOOP_METHODS.split()),
}


def compute(context: Rendering, operator: str, left: Any, right: Any) -> Any:
    """Compute +, *, % or **."""
    context.spend(ITEM)
    if operator == "+":
        if isinstance(left, str) and isinstance(right, str):
            return context.concat((left, right))
        return limited(context, left + right)
    if operator == "%":
        if isinstance(left, str):
            return formatted(context, left, right if isinstance(right, tuple) else (right,))
        return limited(context, left % right)
    if operator == "*":
        return _multiplied(context, left, right)
    raise SecurityError(f"the operator {operator} cannot be used")


def limited(context: Rendering, result: Any) -> Any:
    """Return the result of an operator if it is neither too large nor too long."""
    if isinstance(result, int) and not -_MAX_NUMBER < result < _MAX_NUMBER:
        raise SecurityError("a number is too large")
    if isinstance(result, list | tuple) and len(result) > MAX_ITEMS:
        raise SecurityError(f"a list has more than {MAX_ITEMS:,} items")
    if isinstance(result, list | tuple):
        context.spend(8 * len(result))  # pointers to existing items
    return result


def _multiplied(context: Rendering, left: Any, right: Any) -> Any:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            limit = MAX_CHARS if isinstance(sequence, str) else MAX_ITEMS
            if len(sequence) * count > limit:
                raise SecurityError("a text or list is repeated too often")
            return context.stored(sequence * count)
    limited(context, left)
    limited(context, right)
    return limited(context, left * right)


def formatted(context: Rendering, text: str, values: tuple[Any, ...]) -> str:
    """Return text % values; %s keeps the marks of the text and of its values."""
    if not _FORMAT.fullmatch(text):
        raise SecurityError("a format has a width that is too large, or a key")
    for value in values:
        context.measured(value, is_written=True)
    parts = text.split("%s")
    if len(parts) == len(values) + 1 and not any("%" in part for part in parts):
        pieces = [parts[0]]
        for value, part in zip(values, parts[1:], strict=True):
            pieces += [context.text_of(value), part]
        return context.concat(pieces)
    return str(context.stored(str(text) % values))


def call_text(
    context: Rendering,
    text: str,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a method of a text, within limits."""
    name = method.__name__
    if name == "replace":
        return replaced(context, text, *args, **kwargs)
    if name == "join":
        return joined(context, text, *args, **kwargs)
    if name in ("strip", "lstrip", "rstrip") and args:
        check_stripped(args[0])
    if name == "rfind" and args:  # the only search whose time can be the product of both lengths
        context.spend(len(text) * len(args[0]))
    result = method(*args, **kwargs) if name not in _SPLITS else _split(text, method, args, kwargs)
    return context.stored(result)


def _split(
    text: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Split a text, which is an error before it has too many parts."""
    if method.__name__ == "splitlines":
        num_lines(text)
        return method(*args, **kwargs)
    separator, limit = _split_arguments(*args, **kwargs)
    if not 0 <= limit <= MAX_ITEMS:
        limit = MAX_ITEMS
    return method(separator, limit)  # `stored` refuses MAX_ITEMS + 1 parts


def num_lines(text: str) -> int:
    """Return about how many lines a text has; it is an error if there are too many."""
    count = sum(map(text.count, _LINE_ENDS))
    if count > MAX_ITEMS:
        raise SecurityError(f"a text is split into more than {MAX_ITEMS:,} parts")
    return count


def _split_arguments(sep: str | None = None, maxsplit: int = -1) -> tuple[str | None, int]:
    return sep, maxsplit


def check_stripped(chars: str | None) -> None:
    """Refuse an argument of strip that would take too long."""
    if chars is not None and len(chars) > _MAX_STRIPPED:
        raise SecurityError("strip has too many characters")


def replaced(context: Rendering, text: str, old: str, new: str, count: int | None = None) -> str:
    """Return a text with occurrences of `old` replaced."""
    limit = -1 if count is None else count
    occurrences = text.count(old)
    if limit >= 0:
        occurrences = min(occurrences, limit)
    if len(text) + occurrences * (len(new) - len(old)) > MAX_CHARS:
        raise SecurityError(f"a text has more than {MAX_CHARS:,} characters")
    if isinstance(text, MarkedText):
        context.spend(STEP * occurrences)  # Python code runs for each of them
    return str(context.stored(text.replace(old, new, limit)))


def joined(context: Rendering, separator: str, parts: Iterable[Any]) -> str:
    """Return values as texts with a separator between them."""
    pieces: list[str] = []
    for part in context.each(parts):
        pieces += [separator, context.text_of(part)]
    return context.concat(pieces[1:])
