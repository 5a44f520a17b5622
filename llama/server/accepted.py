"""The fields of a body that change nothing: labels, hints, and what asks for nothing.

A field of a body is honoured, and then in the model of its API, or is in this table, which holds
for every API, or is an error that names it; so is a value that would change the answer. A lenient
server leaves both out. docs/reference/routes.md has the same table.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model

from llama.prompts.fields import UNUSED, Fields
from llama.validation import with_message

_NO_NUMBER = BeforeValidator(lambda x: x if isinstance(x, bool) else str(x))  # 0 is equal to False
_IS_FALSE: Any = Annotated[Literal[False], _NO_NUMBER]
NO_STATE = with_message(" cannot be used: there is no stored state, so send the dialog")
_NOT_STORED: Any = Annotated[_IS_FALSE, with_message(" must be false: there is no stored state")]
_NO_LIST: Any = Annotated[list[Any], Field(max_length=0)]
_IS_ONE: Any = Field(ge=1, le=1)

_TEXTS = (
    "model", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "reasoning_effort", "verbosity",
)  # fmt: skip
_OBJECTS = (
    "metadata", "client_metadata", "cache_control", "reasoning", "thinking", "context_management",
)  # fmt: skip
LABELS: dict[str, Any] = {  # for the client's own books, or hints: any value of the type
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(_OBJECTS, dict[str, Any]),
    **dict.fromkeys(("cache_prompt", "include_reasoning"), bool),
}
_FALSE = (
    "logprobs", "echo", "use_beam_search", "early_stopping", "return_token_ids",
    "return_tokens_as_token_ids", "timings_per_token",
)  # fmt: skip
NOTHING_ASKED: dict[str, Any] = {  # the one value, or the few, that an answer has anyway
    **dict.fromkeys(_FALSE, _IS_FALSE),
    **dict.fromkeys(("store", "background"), _NOT_STORED),
    **dict.fromkeys(("documents", "functions", "mcp_servers"), _NO_LIST),
    **dict.fromkeys(("n", "best_of"), Annotated[int, _IS_ONE]),
    **dict.fromkeys(("length_penalty", "typical_p"), Annotated[float, _IS_ONE]),
    **dict.fromkeys(("priority", "mirostat"), Literal[0]),
    "id_slot": Literal[-1],
    "suffix": Literal[""],
    "service_tier": Literal["auto", "default", "standard_only"],
    "speed": Literal["standard"],
    "truncation": Literal["disabled"],
    "modalities": Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)],
    "include": list[Literal["reasoning.encrypted_content"]],
}
_KINDS: dict[str, Any] = LABELS | NOTHING_ASKED
_FIELDS: Any = {name: (Annotated[kind | None, UNUSED], None) for name, kind in _KINDS.items()}
AcceptedFields: Any = create_model("AcceptedFields", __base__=Fields, **_FIELDS)
