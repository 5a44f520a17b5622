"""The forms of Llama's tool calls, read while they are written.

In: a `Source`, where a call may begin, and the names of the tools. Out: the names of the calls, and
their arguments as JSON, piece by piece. It knows no content and no events.
"""

from collections.abc import Callable, Collection

import regex

from llama.prompts.scanner import (
    NEXT,
    ParseError,
    S,
    Scan,
    Sink,
    Source,
    quoted,
    scan_string,
    scan_value,
)
from llama.prompts.tools import SEARCHES

FUNCTION_TAG = "<function="
PYTHON_TAG = r"<\|python_tag\|>"
_END_FUNCTION = "</function>"
_KEYWORD = r"[\p{L}\p{N}_.$-]{1,128}+"  # the name of an argument
_NAME = rf"(?P<at>)(?P<name>(?![-.0-9]){_KEYWORD})"  # at: where it begins, also of half a name
_TYPE = rf'"type"{S}:{S}"function"{S}'
_ARGUMENT = rf"(?:(?P<close>\))|(?P<key>{_KEYWORD}){S}=)"
# The forms, each up to its first argument.
_JSON = (
    rf'(?P<json>\{{){S}(?:{_TYPE},{S})?"name"{S}:{S}"{_NAME}"{S},{S}(?:{_TYPE},{S})?'
    rf'"(?:parameters|arguments)"{S}:{S}(?=\{{)'
)
_PYTHON = rf"{_NAME}{S}\({S}(?:(?P<stars>\*\*){S}(?=\{{)|{_ARGUMENT})"
_ITEM = f"(?:{_JSON}|{_PYTHON})"
_FORMS = (
    rf"(?:{PYTHON_TAG}{S})?(?:{_JSON}|(?P<list>\[){S}{_ITEM}"
    rf"|(?P<tag>{FUNCTION_TAG}){_NAME}>{S}(?=\{{)"
    rf"|(?P<at>)(?P<name>{'|'.join(SEARCHES)})(?P<search>\.call\(query=)(?=[\"']))"
)
FIRST = regex.compile(S + _FORMS)
FOLLOWING = regex.compile(rf"{S}(?:[;,]{S})?{_FORMS}")  # of the call before it
_NEXT_ITEM = regex.compile(rf"{S}(?:(?:,{S})?(?P<end>\])|,{S}{_ITEM})")
_NEXT_ARGUMENT = regex.compile(_ARGUMENT)
_CLOSE = regex.compile(r"\)")
_AFTER_JSON = regex.compile(rf"{S}(?:,{S}{_TYPE})?\}}")
_ENDS = "|".join(regex.escape(_END_FUNCTION[:n]) for n in range(1, len(_END_FUNCTION)))
_AFTER_FUNCTION = regex.compile(rf"{S}(?:{_END_FUNCTION}|(?:{_ENDS})\Z)")  # or the answer's end


def is_keyword(name: str) -> bool:
    """Whether a Python call can have it before "="; else it is written as f(**{"a b": 1})."""
    return regex.fullmatch(_KEYWORD, name) is not None


class CallForms:
    """names: those that a call may have; None for any. begin: told the name once it is a call,
    whatever follows; it returns what takes the pieces of the arguments.
    """

    def __init__(
        self, source: Source, names: Collection[str] | None, begin: Callable[[str], Sink]
    ) -> None:
        self._source = source
        self._names = names
        self._begin = begin

    def head(self, form: regex.Pattern[str]) -> Scan[regex.Match[str] | None]:
        """Pass the beginning of a call in one of the forms, up to its first argument."""
        return self._source.try_match(form, allows=self._allows)

    def _allows(self, found: regex.Match[str]) -> bool:
        """Whether the name, or the half of it that is there, is that of a tool."""
        at, name = found.start("at"), found["name"]
        if self._names is None or at < 0:
            return True
        if name is not None:
            return name in self._names
        return any(each.startswith(self._source.text[at:]) for each in self._names)

    def call(self, found: regex.Match[str]) -> Scan[None]:
        """Pass the call that begins with this match, or the list of calls. ParseError: the call, or
        the list, ends here, and what follows is not part of it."""
        in_list = found["list"] is not None
        yield from self._arguments(found)
        while in_list:
            item = yield from self.head(_NEXT_ITEM)
            if item is None:
                raise ParseError
            if item["end"]:
                return
            yield from self._arguments(item)

    def _arguments(self, found: regex.Match[str]) -> Scan[None]:
        source, groups = self._source, found.groupdict()
        sink = self._begin(found["name"])
        if groups.get("search"):
            sink('{"query": ')
            yield from scan_string(source, sink)
            sink("}")
            yield from source.try_match(_CLOSE)
        elif groups["key"] or groups["close"]:
            yield from self._keywords(found, sink)
        else:
            yield from scan_value(source, sink)
            if groups["stars"]:
                yield from source.token(_CLOSE)
            elif groups["json"]:
                yield from source.try_match(_AFTER_JSON)
            else:
                yield from source.try_match(_AFTER_FUNCTION, grows=True)

    def _keywords(self, found: regex.Match[str], sink: Sink) -> Scan[None]:
        """a=1, b="x")"""
        separator = "{"
        while found["key"]:
            sink(f'{separator}"{quoted(found["key"])}": ')
            yield from scan_value(self._source, sink, 1)
            yield from self._source.token(NEXT["("])
            found = yield from self._source.token(_NEXT_ARGUMENT)
            separator = ", "
        sink("}" if separator == ", " else "{}")
