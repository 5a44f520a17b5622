"""The form that an answer must have: a JSON schema, a regular expression, a choice, a grammar.

In: what a caller gives. Out: plain hashable values, checked as far as that takes no tokenizer.
`llama.requests.grammar` compiles them; it knows no more than text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama.checks import FieldError, FieldTypeError, brief

_MOST_CHARACTERS = 100_000  # of a schema, an expression or a grammar
_MOST_CHOICES = 1024


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """Exactly one of these; an answer that does not end by its length has this form.

    json: a JSON schema, as an object or as text; the answer is JSON that it allows. $ref may point
        into the schema, and nowhere else.
    json_object: True; the answer is any JSON object.
    regex: the answer matches it as a whole (the syntax of Rust's regex, without look-around).
    choice: the answer is one of these texts.
    grammar: the answer is a sentence of this Lark grammar, in llguidance's dialect.

    The names are vLLM's. A `FieldError` names the field.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _FIELDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            raise FieldError(
                "structured_output.json",
                "structured_output.json: the schema false allows no answer",
            )
        if len(given) != 1:
            named, fields = " and ".join(given) or "none", ", ".join(_FIELDS)
            raise FieldError(
                "structured_output", f"structured_output must have one of {fields}, got {named}"
            )
        checked = _CHECKS[given[0]](f"structured_output.{given[0]}", getattr(self, given[0]))
        object.__setattr__(self, given[0], checked)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _FIELDS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """The schema as JSON, the expression, the grammar, or the choices as JSON."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)


_FIELDS = ("json", "json_object", "regex", "choice", "grammar")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise FieldTypeError(name, f"{name}={brief(value)} must be a string")
    if not 1 <= len(value) <= _MOST_CHARACTERS:
        raise FieldError(
            name, f"{name} must have 1 to {_MOST_CHARACTERS} characters, not {len(value)}"
        )
    return value


def _schema(name: str, value: Any) -> str:
    """The schema as JSON: the same text for the same schema."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise FieldError(name, f"{name} is not JSON: {e}") from None
    if not isinstance(schema, dict | bool):
        raise FieldTypeError(name, f"{name}={brief(value)} must be a JSON schema: an object")
    return _text(name, text)


def _is_true(name: str, value: Any) -> bool:
    if value is not True:
        raise FieldTypeError(name, f"{name}={brief(value)} must be True or None")
    return value


def _choices(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise FieldTypeError(name, f"{name}={brief(value)} must be a list of texts")
    if not 1 <= len(value) <= _MOST_CHOICES:
        raise FieldError(name, f"{name} must have 1 to {_MOST_CHOICES} entries, not {len(value)}")
    return tuple(_text(f"{name}[{i}]", entry) for i, entry in enumerate(value))


_CHECKS: dict[str, Any] = {
    "json": _schema,
    "json_object": _is_true,
    "regex": _text,
    "choice": _choices,
    "grammar": _text,
}
