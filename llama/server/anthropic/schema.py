"""The JSON schemas of the bodies of Anthropic's Messages API, for /openapi.json.

In: the limits that `parse_messages_body` holds requests to. Out: a schema for each body.
"""

from typing import Any

from llama.prompts.tools import MOST_TOOLS
from llama.sampling_params import NUMBERS, WHOLE_NUMBERS
from llama.server.anthropic.requests import CLEAR_THINKING, COUNT_FIELDS, EFFORTS, FIELDS, ONLY
from llama.server.openai.schema import record

_TEXT = {"type": "string"}
_HINT = {"type": "object"}


def within(kind: str, low: float, high: float) -> dict[str, Any]:
    """A number, both limits included."""
    return {"type": kind, "minimum": low, "maximum": high}


_TEXT_BLOCK = record({"type": {"const": "text"}, "text": _TEXT, "cache_control": _HINT},
                      "type", "text")  # fmt: skip
_TEXT_BLOCKS = {"type": "array", "minItems": 1, "items": _TEXT_BLOCK}
_TEXTS = {"anyOf": [_TEXT, _TEXT_BLOCKS]}
_TOOL_USE = record(
    {
        "type": {"const": "tool_use"},
        "id": _TEXT,
        "name": _TEXT,
        "input": {"type": "object"},
        "cache_control": _HINT,
    },
    "type", "id", "name", "input",
)  # fmt: skip
_TOOL_RESULT = record(
    {
        "type": {"const": "tool_result"},
        "tool_use_id": _TEXT,
        "content": _TEXTS,
        "is_error": {"type": "boolean"},
        "cache_control": _HINT,
    },
    "type", "tool_use_id",
)  # fmt: skip


_THINKING = record(
    {"type": {"const": "thinking"}, "thinking": _TEXT, "signature": _TEXT}, "type", "thinking"
)


def _message(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    items = {"anyOf": [_TEXT_BLOCK, *blocks]}
    content = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": items}]}
    return record({"role": {"const": role}, "content": content}, "role", "content")


_TOOL = record(
    {
        "name": {"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_.-]{0,63}$"},
        "description": _TEXT,
        "input_schema": {"type": "object"},
        "strict": {"type": "boolean"},
        "type": {"const": "custom"},
        "cache_control": _HINT,
    },
    "name", "input_schema",
)  # fmt: skip
_SCHEMAS: dict[str, dict[str, Any]] = {
    "model": _TEXT,
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                _message("user", _TOOL_RESULT),
                _message("assistant", _TOOL_USE, _THINKING),
                _message("system"),
            ]
        },
    },
    "system": _TEXTS,
    "tools": {"type": "array", "maxItems": MOST_TOOLS, "items": _TOOL},
    "tool_choice": record(
        {
            "type": {"enum": ["auto", "any", "tool", "none"]},
            "name": _TEXT,
            "disable_parallel_tool_use": {"type": "boolean"},
        },
        "type",
    ),
    "thinking": record({"type": {"enum": ["disabled", "adaptive"]}}, "type"),
    "context_management": record(
        {"edits": {"type": "array", "items": record({"type": {"const": CLEAR_THINKING}}, "type")}}
    ),
    "output_config": record(
        {
            "effort": {"enum": list(EFFORTS)},
            "format": record(
                {"type": {"const": "json_schema"}, "schema": {"type": "object"}}, "type", "schema"
            )
        }
    ),
    "stop_sequences": {
        "type": "array",
        "maxItems": 32,
        "items": {"type": "string", "minLength": 1, "maxLength": 256},
    },
    "cache_control": _HINT,
    "metadata": _HINT,
    "stream": {"type": "boolean"},
    **{name: {"enum": list(values)} for name, values in ONLY.items()},
    **{name: within("integer", *WHOLE_NUMBERS[name][:2]) for name in ("max_tokens", "top_k")},
    **{name: within("number", *NUMBERS[name]) for name in ("temperature", "top_p")},
}  # fmt: skip


def messages_schema(*, counts: bool) -> dict[str, Any]:
    """The schema of a body of /v1/messages, or of /v1/messages/count_tokens."""
    needed = ["messages"] if counts else ["max_tokens", "messages"]
    properties = {
        name: _SCHEMAS[name] if name in needed else {"anyOf": [_SCHEMAS[name], {"type": "null"}]}
        for name in sorted(COUNT_FIELDS if counts else FIELDS)
    }
    return record(properties, *needed)
