"""The forms of Llama's tool calls, read while they are written.

In: a `Source`, where a call may begin, and the names of the tools. Out: the names of the calls, and
their arguments as JSON, piece by piece. The methods are scanners, as in `values`: each passes its
text or raises Broken. It knows no content and no events.
"""

from collections.abc import Callable, Collection, Sequence

from llama.prompts.values import (
    SPACES,
    Broken,
    Emit,
    Scan,
    Source,
    quoted,
    scan_comma,
    scan_dict,
    scan_string,
    scan_value,
)

FUNCTION_TAG = "<function="
_END_FUNCTION = "</function>"
_KEYS = ("name", "type", "parameters", "arguments")
_MAX_NAME = 128  # characters of a function's name, or of an argument's


class CallForms:
    """names: those that a call may have; None for any. searches: the built-in tools that are called
    as name.call(query="..."). begin: told the name once it is a call, whatever follows; it returns
    what takes the pieces of the arguments. A Broken after that ends the call there, and
    `Source.mark` is the place of the text that is not part of it, or None for where it broke.
    """

    def __init__(
        self,
        source: Source,
        names: Collection[str] | None,
        searches: Sequence[str],
        begin: Callable[[str], Emit],
    ) -> None:
        self._source = source
        self._names = names
        self._searches = searches
        self._begin = begin

    def call(self) -> Scan[None]:
        """Pass one call, or a list of them."""
        char = yield from self._source.peek()
        if char == "{":
            yield from self._json()
        elif char == "[":
            yield from self._list()
        elif char == "<":
            yield from self._function_tag()
        else:
            yield from self._search()

    def _name(self, ends: str) -> Scan[str]:
        """The name of a tool, before one of these characters."""
        if self._names is not None:
            return (yield from self._source.one_of(self._names, ends))
        name = yield from self._source.word(is_of_name, _MAX_NAME)
        if not name or name[0] in "-.0123456789":
            raise Broken
        return name

    def _json(self) -> Scan[None]:
        """{"name": "f", "parameters": {...}}, with or without "type": "function"."""
        source, name, keys = self._source, "", set[str]()
        yield from source.expect("{")
        while True:
            yield from source.spaces()
            key = yield from self._in_quotes(_KEYS)
            if key in keys:  # again and again, the text would be held back without bound
                raise Broken
            keys.add(key)
            yield from source.spaces()
            yield from source.expect(":")
            char = yield from source.spaces()
            if key in ("parameters", "arguments"):
                break
            if key == "name":
                yield from source.expect('"')
                name = yield from self._name('"')
                yield from source.expect('"')
            else:
                yield from self._in_quotes(("function",))
            yield from source.spaces()
            yield from source.expect(",")
        if not name or char != "{":
            raise Broken
        yield from scan_dict(source, self._begin(name))
        yield from self._optional(self._end_of_json())

    def _end_of_json(self) -> Scan[None]:
        source = self._source
        if (yield from source.spaces()) == ",":
            source.pos += 1
            yield from source.spaces()
            yield from self._in_quotes(("type",))
            yield from source.spaces()
            yield from source.expect(":")
            yield from source.spaces()
            yield from self._in_quotes(("function",))
            yield from source.spaces()
        yield from source.expect("}")

    def _in_quotes(self, words: Sequence[str]) -> Scan[str]:
        yield from self._source.expect('"')
        found = yield from self._source.one_of(words, '"')
        self._source.pos += 1
        return found

    def _optional(self, scan: Scan[None]) -> Scan[None]:
        """Pass this, or nothing."""
        source = self._source
        source.mark = source.pos
        try:
            yield from scan
        except Broken:
            source.pos = source.mark
        source.mark = None

    def _list(self) -> Scan[None]:
        """[f(a=1), g()], or a list of objects. What is wrong after a call does not undo it."""
        source = self._source
        yield from source.expect("[")
        while True:
            if (yield from source.spaces()) == "{":
                yield from self._json()
            else:
                yield from self._python_call()
            source.mark = source.pos
            char = yield from source.spaces()
            if char == ",":
                source.pos += 1
                char = yield from source.spaces()
            elif char != "]":
                raise Broken
            if char == "]":
                source.pos += 1
                return

    def _python_call(self) -> Scan[None]:
        """f(a=1, b="x"), or f(**{"a": 1})."""
        source = self._source
        name = yield from self._name("(" + SPACES)
        yield from source.spaces()
        yield from source.expect("(")
        if (yield from source.spaces()) == "*":
            yield from source.expect("**")
            if (yield from source.spaces()) != "{":
                raise Broken
            yield from scan_dict(source, self._begin(name))
            yield from source.spaces()
            return (yield from source.expect(")"))
        emit: Emit | None = None
        while (yield from source.spaces()) != ")":
            if emit is not None:
                source.mark = source.pos
            key = yield from source.word(is_of_name, _MAX_NAME)
            yield from source.spaces()
            yield from source.expect("=")
            if not key:
                raise Broken
            separator = "{" if emit is None else ", "
            emit = self._begin(name) if emit is None else emit
            source.mark = None
            emit(f'{separator}"{quoted(key)}": ')
            yield from scan_value(source, emit, 1)
            yield from scan_comma(source, ")")
        source.pos += 1
        if emit is None:
            emit = self._begin(name)
            emit("{")
        emit("}")

    def _function_tag(self) -> Scan[None]:
        """<function=f>{...}</function>"""
        source = self._source
        yield from source.expect(FUNCTION_TAG)
        name = yield from self._name(">")
        yield from source.expect(">")
        if (yield from source.spaces()) != "{":
            raise Broken
        yield from scan_dict(source, self._begin(name))
        yield from self._optional(self._end_of_function())

    def _end_of_function(self) -> Scan[None]:
        yield from self._source.spaces()
        for each in _END_FUNCTION:
            char = yield from self._source.peek()
            if not char:  # the answer ended inside the tag
                return
            if char != each:
                raise Broken
            self._source.pos += 1

    def _search(self) -> Scan[None]:
        """brave_search.call(query="...")"""
        source = self._source
        name = yield from source.one_of(self._searches, ".")
        yield from source.expect(".call(query=")
        char = yield from source.peek()
        if not char or char not in "\"'":
            raise Broken
        emit = self._begin(name)
        emit('{"query": ')
        yield from scan_string(source, emit)
        emit("}")
        yield from self._optional(source.expect(")"))


def is_of_name(char: str) -> bool:
    return char.isalnum() or char in "_-.$"
