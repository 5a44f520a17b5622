"""Objects of JSON that others write: the base of their models, and the words of their errors.

In: dicts, lists and plain values. Out: frozen models, or a `FieldError` that names the place of
what is wrong as the caller wrote it; a lenient reader leaves out what has no use here, and says so.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticOmit

from llama.checks import FieldError, FieldTypeError, brief

_T = TypeVar("_T")
UNUSED = object()  # marks a field whose other values a lenient reader leaves out
_LeftOut = list[tuple[Any, str | None]]  # objects, or a field of each
_MOST_NAMED = 8  # fields in one error
_MOST_READ = 1000  # errors of one value
_JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
_WANTED = {
    "model_type": "an object", "model_attributes_type": "an object", "dict_type": "an object",
    "list_type": "a list", "string_type": "a string", "bool_type": "true or false",
    "int_type": "a whole number", "float_type": "a number",
}  # fmt: skip
_WORDS = {  # that follow the place of the value, by pydantic's types of errors
    "wrong": "{words}",
    "not_chosen": "{said}, got {value}",
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
    """The type of a value from JSON, in JSON's words."""
    return "null" if value is None else _JSON_TYPES.get(type(value), "a number")


class Fields(BaseModel):
    """An object of JSON. A field that it does not know is an error. null is a field that is not
    given, as clients write it, so a name that is not known may be null."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )
    unknown_words: ClassVar[str] = ": {names} cannot be used: leave it out"
    known_names: ClassVar[frozenset[str]]
    unused_names: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        named = {each.alias or name: each for name, each in cls.model_fields.items()}
        cls.known_names = frozenset(named)
        cls.unused_names = frozenset(name for name in named if UNUSED in named[name].metadata)

    @model_validator(mode="wrap")
    @classmethod
    def _read_given(cls, value: Any, read: Any, info: ValidationInfo) -> Any:
        """Of what is not null. An unknown name may be any text, also half a surrogate pair."""
        if not isinstance(value, dict):
            return read(value)
        given = {name: each for name, each in value.items() if each is not None}
        left_out: _LeftOut | None = info.context
        unused = given.keys() - cls.known_names
        if unused and left_out is None:
            first = heapq.nsmallest(_MOST_NAMED, map(str, unused))
            names = ", ".join(map(brief, first)) + ", ..." * (len(unused) > len(first))
            raise wrong(cls.unknown_words.format(names=names), first[0])
        try:
            found = read({name: each for name, each in given.items() if name not in unused})
        except ValidationError as e:
            if left_out is None:
                raise
            at_fault = {each["loc"][0] for each in e.errors(include_url=False) if each["loc"]}
            if not at_fault or not at_fault <= cls.unused_names:
                raise
            unused |= at_fault
            found = read({name: each for name, each in given.items() if name not in unused})
        if left_out is not None:
            left_out += [(value, name) for name in unused]
        return found


def wrong(words: str, field: str = "") -> PydanticCustomError:
    """An error whose words follow the place of the value. field: the one at fault, of an object."""
    context = {"words": words, "field": (field,) if field else ()}
    return PydanticCustomError("wrong", "{words}", context)


def said(words: str, *, of_parts: bool = False) -> WrapValidator:
    """What is wrong with a value, in words that may have the {value}; of_parts: or inside it."""

    def check(value: Any, read: Any) -> Any:
        try:
            return read(value)
        except ValidationError as e:
            if of_parts or any(not each["loc"] for each in e.errors(include_url=False)):
                raise wrong(words.replace("{value}", brief(value))) from None
            raise

    return WrapValidator(check)


def _unless_other_type(value: Any, read: Any, info: ValidationInfo) -> Any:
    try:
        return read(value)
    except ValidationError as e:
        left_out: _LeftOut | None = info.context
        kinds = {each["type"] for each in e.errors() if each["loc"] in ((), ("type",))}
        if left_out is None or not kinds & {"union_tag_invalid", "literal_error", "wrong"}:
            raise
        left_out.append((value, None))
        raise PydanticOmit from None


SKIP_OTHER_TYPES = WrapValidator(_unless_other_type)
"""Of the objects of a list: a lenient reader leaves out those of a type that is not known."""


def chosen_by(kind: Callable[[Any], str | None], words: str) -> Discriminator:
    """Of a union of types with tags: `kind` says which one a value has; words: it has none."""
    return Discriminator(kind, custom_error_type="not_chosen", custom_error_message=words)


def read_as(
    adapter: TypeAdapter[_T], given: Any, root: str = "", ignored: list[str] | None = None
) -> _T:
    """What is given, as this type; `FieldError` where it is none. root: its name, where it is a
    part of a body. ignored: of a lenient reader; gets the places of what it left out."""
    left_out: _LeftOut | None = None if ignored is None else []
    try:
        value = adapter.validate_python(given, context=left_out)
    except ValidationError as e:
        raise field_error(e, given, root) from None
    if left_out and ignored is not None:
        ignored += sorted(_places(left_out, given))
    return value


def _places(left_out: _LeftOut, given: Any) -> Iterator[str]:
    """tools[0], messages[1].name"""
    names: dict[int, set[str | None]] = {}
    for value, name in left_out:
        names.setdefault(id(value), set()).add(name)
    todo: list[tuple[list[str | int], Any]] = [([], given)]
    while todo:
        path, value = todo.pop()
        for name in names.get(id(value), ()):
            yield _joined(path if name is None else [*path, name])
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        todo += [([*path, key], each) for key, each in inside if isinstance(each, dict | list)]


def field_error(error: ValidationError, given: Any, root: str = "") -> FieldError:
    """The one thing that is wrong with what is given; where there are several, or a value could
    have several types, that which is furthest inside. root: as of `read_as`."""
    found = [(_path_of(each, given), each) for each in error.errors(include_url=False)[:_MOST_READ]]

    def rank(entry: tuple[list[str | int], ErrorDetails]) -> Any:
        indices = [each for each in entry[0] if isinstance(each, int)]
        return len(entry[0]), indices, entry[1]["type"] != "missing"

    path, _ = max(found, key=rank)
    same = [each for where, each in found if where == path]
    first = next((each for each in same if each["type"] not in _WANTED), same[0])
    wanted = list(dict.fromkeys(_WANTED[e["type"]] for e in same if e["type"] in _WANTED))
    words = _words(first, " or ".join(wanted))
    place = _joined([root, *path] if root else path) or "body" * words.startswith(" ")
    if root == "messages" and path:  # of a dialog alone: message 0: content
        place = ": ".join(filter(None, [f"message {path[0]}", _joined(path[1:])]))
    message = f"{place}{words}".removeprefix(": ")
    field = _joined([*([root] if root else []), *path, *first.get("ctx", {}).get("field", ())])
    kind = FieldTypeError if first["type"] in _WANTED else FieldError
    return kind(field, message)


def _path_of(error: ErrorDetails, given: Any) -> list[str | int]:
    """Where an error is, as the caller wrote it: pydantic names the branch of a union, too."""
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


def _words(error: ErrorDetails, wanted: str) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in _WORDS:
        size = len(value) if kind == "too_long" else 0
        return _WORDS[kind].format(**context, value=brief(value), size=size, said=error["msg"])
    if kind == "union_tag_not_found":
        return f".{context['discriminator'][1:-1]} is needed"
    if kind == "union_tag_invalid":
        name, found = context["discriminator"][1:-1], brief(context["tag"])
        return f".{name} must be one of {context['expected_tags']}, got {found}"
    if wanted:
        return f" must be {wanted}, got {json_type(value)}"
    return f": {error['msg'][:1].lower()}{error['msg'][1:]}"


def _joined(path: list[str | int]) -> str:
    """tools[0].function.name"""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")
