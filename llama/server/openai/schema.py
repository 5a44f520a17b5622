"""The JSON schemas of request bodies, for /openapi.json and for whoever reads it.

In: the limits of SamplingParams, which `parse_body` holds requests to. Out: a schema for each body.
A schema says less than the errors do: the order of two numbers, say, it cannot name.
"""

from typing import Any

from llama.prompts.tools import MOST_TOOLS
from llama.sampling_params import NUMBERS, WHOLE_NUMBERS
from llama.server.openai.requests import CHAT_FIELDS, MOST_PROMPTS, TEXT_FIELDS

_TEXT = {"type": "string"}
_WORD = {"type": "string", "minLength": 1, "maxLength": 256}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_FLAG = {"type": "boolean"}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "prompt": {
        "anyOf": [
            _TEXT,
            _IDS,
            {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MOST_PROMPTS},
            {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MOST_PROMPTS},
        ]
    },
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": _TEXT},
            "required": ["role", "content"],
            "additionalProperties": False,
        },
    },
    "logit_bias": {
        "type": "object",
        "maxProperties": 1024,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "stop": {"anyOf": [_WORD, {"type": "array", "items": _WORD, "maxItems": 32}]},
    "bad_words": {"type": "array", "items": _WORD, "maxItems": 256},
    "stop_token_ids": {**_IDS, "minItems": 0, "maxItems": 256},
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": _FLAG},
        "additionalProperties": False,
    },
    "response_format": {
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
        "required": ["type"],
    },
    "structured_outputs": {"type": "object", "maxProperties": 1},
    "tools": {
        "type": "array",
        "maxItems": MOST_TOOLS,
        "items": {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_.-]{0,63}$"},
                        "description": _TEXT,
                        "parameters": {"type": "object"},
                        "strict": _FLAG,
                    },
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
    },
    "tool_choice": {
        "anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}],
    },
    "model": _TEXT,
    "user": _TEXT,
    "metadata": {"type": "object"},
}
_FLAGS = {
    "echo", "stream", "include_stop_str_in_output", "skip_special_tokens", "ignore_eos",
    "add_generation_prompt", "continue_final_message",
    "parallel_tool_calls",
}  # fmt: skip
_COUNTS = {"best_of": (1, 64), "min_tokens": (0, 2**31 - 1)}


def record(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def body_schema(*, chat: bool) -> dict[str, Any]:
    """The schema of a body of /v1/chat/completions, or of /v1/completions."""
    names = sorted(CHAT_FIELDS if chat else TEXT_FIELDS)
    properties = {name: _nullable(_field(name, chat)) for name in names}
    needed = "messages" if chat else "prompt"
    properties[needed] = _field(needed, chat)
    return record(properties, needed)


def _field(name: str, chat: bool) -> dict[str, Any]:
    if name in _FLAGS or (chat and name == "logprobs"):
        return _FLAG
    if name in ("top_logprobs", "max_completion_tokens"):
        name = "logprobs" if name == "top_logprobs" else "max_tokens"
    if name in _COUNTS or name in WHOLE_NUMBERS:
        low, high = _COUNTS[name] if name in _COUNTS else WHOLE_NUMBERS[name][:2]
        return {"type": "integer", "minimum": low, "maximum": high}
    if name in NUMBERS:
        low_high = NUMBERS[name]
        return {"type": "number", "minimum": low_high[0], "maximum": low_high[1]}
    return _SCHEMAS[name]


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """null is a field that is not given."""
    return {"anyOf": [schema, {"type": "null"}]}
