"""The JSON schema of a body of OpenAI's Responses API, for /openapi.json.

In: the limits that `parse_responses_body` holds requests to. Out: the schema.
"""

from typing import Any

from llama.prompts.tools import MOST_TOOLS
from llama.sampling_params import NUMBERS, WHOLE_NUMBERS
from llama.server.openai.schema import record
from llama.server.responses.requests import FIELDS, LABELS, ONLY

_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}
_TYPES: dict[type, dict[str, Any]] = {str: _TEXT, dict: {"type": "object"}}


_PART = record({"type": {"enum": ["input_text", "output_text"]}, "text": _TEXT}, "type", "text")
_TEXTS = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": _PART}]}
_LABELS = {"id": _TEXT, "status": _TEXT}
_ROLES = ["user", "assistant", "system", "developer"]
_ITEMS = [
    record(
        {"type": {"const": "message"}, "role": {"enum": _ROLES}, "content": _TEXTS, **_LABELS},
        "role", "content",
    ),
    record(
        {
            "type": {"const": "function_call"},
            "call_id": _TEXT,
            "name": _TEXT,
            "arguments": _TEXT,
            **_LABELS,
        },
        "type", "call_id", "name", "arguments",
    ),
    record(
        {"type": {"const": "function_call_output"}, "call_id": _TEXT, "output": _TEXTS, **_LABELS},
        "type", "call_id", "output",
    ),
]  # fmt: skip
_TOOL = record(
    {
        "type": {"const": "function"},
        "name": {"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_.-]{0,63}$"},
        "description": _TEXT,
        "parameters": {"type": "object"},
        "strict": _FLAG,
    },
    "type", "name",
)  # fmt: skip
_FORMATS = [
    record({"type": {"enum": ["text", "json_object"]}}, "type"),
    record(
        {
            "type": {"const": "json_schema"},
            "name": _TEXT,
            "description": _TEXT,
            "schema": {"type": "object"},
            "strict": _FLAG,
        },
        "type", "schema",
    ),
]  # fmt: skip
_SCHEMAS: dict[str, dict[str, Any]] = {
    "input": {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": {"anyOf": _ITEMS}}]},
    "instructions": _TEXT,
    "model": _TEXT,
    "max_output_tokens": {
        "type": "integer",
        "minimum": WHOLE_NUMBERS["max_tokens"][0],
        "maximum": WHOLE_NUMBERS["max_tokens"][1],
    },
    "text": record({"format": {"anyOf": _FORMATS}, "verbosity": {"const": "medium"}}),
    "tools": {"type": "array", "maxItems": MOST_TOOLS, "items": _TOOL},
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            record({"type": {"const": "function"}, "name": _TEXT}, "type", "name"),
        ]
    },
    "parallel_tool_calls": _FLAG,
    "stream": _FLAG,
    **{
        name: {"type": "number", "minimum": NUMBERS[name][0], "maximum": NUMBERS[name][1]}
        for name in ("temperature", "top_p")
    },
    **{name: _TYPES[kind] for name, kind in LABELS.items()},
    **{name: {"enum": list(values)} for name, values in ONLY.items()},
}


def responses_schema() -> dict[str, Any]:
    """The schema of a body of /v1/responses."""
    properties = {
        name: {"anyOf": [_SCHEMAS[name], {"type": "null"}]} for name in sorted(FIELDS - {"input"})
    }
    return record({"input": _SCHEMAS["input"], **properties}, "input")
