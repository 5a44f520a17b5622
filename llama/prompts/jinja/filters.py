"""Filters and functions of chat templates that Jinja does not have as transformers has them.

In: the operands. Out: what transformers' templates get; texts keep their marks. `FILTERS` and
`FUNCTIONS` are all that a template can call, besides its own macros and methods of values.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import filters
from jinja2.sandbox import safe_range
from jinja2.utils import Namespace
from markupsafe import soft_str

from llama.prompts.jinja.marked import MarkedText

_MAX_MESSAGE = 200  # characters of a message of a template


class Raised(Exception):
    """The message that a template gave to raise_exception."""


def shown(message: object) -> str:
    """Return what a template or its failure says: one printable line of limited length."""
    text = str(message)[:_MAX_MESSAGE]
    printable = "".join(c if c.isprintable() else " " for c in text)
    return printable or type(message).__name__


def _raise_exception(message: Any = "") -> NoReturn:
    raise Raised(shown(message))


def _strftime_now(layout: str) -> str:
    """Return today's date; it is no text of the template's."""
    return datetime.now().strftime(layout)


def _title(value: Any) -> str:
    text = soft_str(value)
    changed = filters.do_title(text)
    if not isinstance(text, MarkedText) or len(changed) != len(text):
        return str(changed)
    return MarkedText(changed, text.mask)


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment,
    value: Iterable[Any],
    d: str = "",
    attribute: str | int | None = None,
) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(environment, attribute), value)
    return MarkedText(d, getattr(d, "mask", None)).join(value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers writes it; Jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else tuple(separators),  # type: ignore[arg-type]
        sort_keys=sort_keys,
    )


_JINJA = (
    "abs capitalize count d default dictsort first float format indent int items last length list "
    "lower map reject rejectattr replace reverse select selectattr sort string trim unique upper"
)
FILTERS: Mapping[str, Callable[..., Any]] = {
    **{name: filters.FILTERS[name] for name in _JINJA.split()},
    "join": _join,
    "safe": soft_str,
    "title": _title,
    "tojson": _tojson,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "range": safe_range,
    "namespace": Namespace,
    "dict": dict,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
