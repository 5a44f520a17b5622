"""Fields that a body of any API may have and that change no answer.

In: names of fields and the values that are accepted for them. Out: a base for the models of bodies.
A field of a body is either honored, and then declared in the model of its API, or declared here,
or an error that names it. A value that would change the answer is an error as well. A lenient
server drops both instead. docs/reference/routes.md has the same table; a test compares them.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from llama.common.validation import with_message
from llama.prompts.fields import UNUSED, Fields

# Without this, 0 and 0.0 would pass, since they equal False.
_NO_NUMBER = BeforeValidator(lambda value: value if isinstance(value, bool) else str(value))
NO_STATE = with_message(" cannot be used: there is no stored state, so send the dialog")
_NOT_STORED = with_message(" must be false: there is no stored state")
_IS_ONE = Field(ge=1, le=1)

_Text = Annotated[str | None, UNUSED]
ModelName = Annotated[str, Field(max_length=1024)]  # every event of a stream repeats it
_Object = Annotated[dict[str, Any] | None, UNUSED]
_Flag = Annotated[bool | None, UNUSED]
FalseOnly = Annotated[Literal[False], _NO_NUMBER]
_False = Annotated[FalseOnly | None, UNUSED]
_NotStored = Annotated[Annotated[FalseOnly, _NOT_STORED] | None, UNUSED]
_EmptyList = Annotated[Annotated[list[Any], Field(max_length=0)] | None, UNUSED]
_Zero = Annotated[Literal[0] | None, UNUSED]
_OneInt = Annotated[Annotated[int, _IS_ONE] | None, UNUSED]
_OneFloat = Annotated[Annotated[float, _IS_ONE] | None, UNUSED]
_Modalities = Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)]


class LabelFields(Fields):
    """Labels for the client's own records, and hints: any value of the type is accepted."""

    model: Annotated[ModelName | None, UNUSED] = None
    user: _Text = None
    safety_identifier: _Text = None
    prompt_cache_key: _Text = None
    request_id: _Text = None
    guided_decoding_backend: _Text = None
    reasoning_effort: _Text = None
    verbosity: _Text = None
    metadata: _Object = None
    client_metadata: _Object = None
    cache_control: _Object = None
    reasoning: _Object = None
    thinking: _Object = None
    context_management: _Object = None
    cache_prompt: _Flag = None
    include_reasoning: _Flag = None
    separate_reasoning: _Flag = None
    stream_reasoning: _Flag = None


class AcceptedFields(LabelFields):
    """Labels, and fields whose accepted values ask for what every answer does anyway."""

    logprobs: _False = None
    echo: _False = None
    use_beam_search: _False = None
    early_stopping: _False = None
    return_token_ids: _False = None
    return_tokens_as_token_ids: _False = None
    timings_per_token: _False = None
    no_stop_trim: _False = None
    return_hidden_states: _False = None
    store: _NotStored = None
    background: _NotStored = None
    documents: _EmptyList = None
    functions: _EmptyList = None
    mcp_servers: _EmptyList = None
    n: _OneInt = None
    best_of: _OneInt = None
    length_penalty: _OneFloat = None
    typical_p: _OneFloat = None
    priority: _Zero = None
    mirostat: _Zero = None
    id_slot: Annotated[Literal[-1] | None, UNUSED] = None
    suffix: Annotated[Literal[""] | None, UNUSED] = None
    service_tier: Annotated[Literal["auto", "default", "standard_only"] | None, UNUSED] = None
    speed: Annotated[Literal["standard"] | None, UNUSED] = None
    truncation: Annotated[Literal["disabled"] | None, UNUSED] = None
    modalities: Annotated[_Modalities | None, UNUSED] = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]] | None, UNUSED] = None
