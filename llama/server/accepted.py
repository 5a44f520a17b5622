"""The fields of a body that change nothing: labels, hints, and what asks for nothing.

In: the table below, which holds for every API. Out: the base of the bodies' models. A field of a
body is honoured, and then in the model of its API, or is in this table, or is an error that names
it. A value that would change the answer is an error, too. The server's README has the same table.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from llama.prompts.fields import Fields, said

_NOT_STORED = said(" must be false: there is no stored state")
_NOTHING: Any = Annotated[list[Any], Field(max_length=0)]


def _number(value: float) -> Any:
    return Annotated[
        float,
        Field(ge=value, le=value),
        said(f"={{value}} must be {value}, which asks for nothing"),
    ]


class NoReasoning(Fields):
    effort: Literal["none"] | None = None


class NoThinking(Fields):
    type: Literal["disabled"]


LABELS: dict[str, Any] = {  # for the client's own books, or hints: any value of the type
    "model": str,
    "user": str,
    "metadata": dict[str, Any],
    "client_metadata": dict[str, Any],
    "safety_identifier": str,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "cache_prompt": bool,
    "cache_control": dict[str, Any],
    "request_id": str,
    "include_reasoning": bool,
}
NOTHING_ASKED: dict[str, Any] = {  # the one value, or the few, that an answer has anyway
    "service_tier": Literal["auto", "default", "standard_only"],
    "speed": Literal["standard"],
    "store": Annotated[Literal[False], _NOT_STORED],
    "background": Annotated[Literal[False], _NOT_STORED],
    "truncation": Literal["disabled"],
    "verbosity": Literal["medium"],
    "modalities": Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)],
    "include": list[Literal["reasoning.encrypted_content"]],
    "reasoning_effort": Literal["none"],
    "reasoning": NoReasoning,
    "thinking": NoThinking,
    "echo": Literal[False],
    "use_beam_search": Literal[False],
    "early_stopping": Literal[False],
    "return_token_ids": Literal[False],
    "return_tokens_as_token_ids": Literal[False],
    "timings_per_token": Literal[False],
    "priority": Literal[0],
    "mirostat": Literal[0],
    "id_slot": Literal[-1],
    "length_penalty": _number(1.0),
    "typical_p": _number(1.0),
    "suffix": Literal[""],
    "documents": _NOTHING,
    "functions": _NOTHING,
    "mcp_servers": _NOTHING,
}


def _fields() -> dict[str, Any]:
    return {name: (kind | None, None) for name, kind in (LABELS | NOTHING_ASKED).items()}


AcceptedFields: Any = create_model("AcceptedFields", __base__=Fields, **_fields())
