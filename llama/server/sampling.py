"""The sampling fields of the bodies of all APIs, made from the fields of `SamplingParams`.

In: names of fields. Out: the base of a body's model, and the `SamplingParams` that a body asks for.
It must not know any API's other fields.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, create_model

from llama.common.checks import FieldError
from llama.common.validation import with_message
from llama.prompts.fields import Fields
from llama.sampling_params import (
    BIAS,
    CACHE_SALT,
    MAX_BIASES,
    MAX_COUNT,
    NUMBER_TYPES,
    BadWords,
    Retention,
    SamplingParams,
    StopIds,
    StopTexts,
    Text,
)

_DERIVED = {
    "prompt_logprobs",
    "structured_output",
    "prediction",
    "reasoning",
}  # these follow from other fields
_NAMES = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in _DERIVED]
# Names of fields in OpenAI's APIs -> names of parameters.
OPENAI_NAMES = {name: name for name in _NAMES} | {"max_completion_tokens": "max_tokens"}
# The same in APIs with one answer, which have a name of their own for the token limit.
_NOT_SHARED = {"n", "best_of", "logprobs", "max_tokens", "max_completion_tokens"}
SHARED_NAMES = {own: name for own, name in OPENAI_NAMES.items() if own not in _NOT_SHARED}


def _encodable(text: str) -> str:
    """Return the text; raise a ValueError if it has a lone surrogate."""
    text.encode()
    return text


# A prompt may have a million ids, so pydantic checks them without calling a Python function.
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Text = Annotated[Text, AfterValidator(_encodable)]
CacheSalt = Annotated[str, CACHE_SALT, AfterValidator(_encodable)]
StopList = Annotated[list[_Text], Field(max_length=StopTexts.high)]
_Key = Annotated[str, Field(pattern="^[0-9]{1,10}$"), with_message(": keys must be token ids")]
# OpenAI's and Ollama's seeds have 64 bits and a sign. -1 stands for none, as in llama.cpp.
Seed = Annotated[
    int,
    Field(ge=-(2**63), le=2**63 - 1),
    AfterValidator(lambda seed: None if seed == -1 else seed % 2**63),
]
_Logprobs: Any = NUMBER_TYPES["logprobs"]
_TYPES: dict[str, Any] = {
    "stop": Annotated[
        Annotated[_Text, Tag("one")] | Annotated[StopList, Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list) else "one"),
    ],
    "stop_token_ids": Annotated[list[TokenId], Field(max_length=StopIds.high)],
    "bad_words": Annotated[list[_Text], Field(max_length=BadWords.high)],
    "cache_salt": CacheSalt,
    "prompt_cache_retention": Retention,
    "logit_bias": Annotated[dict[_Key, Annotated[float, BIAS]], Field(max_length=MAX_BIASES)],
    **NUMBER_TYPES,
    "seed": Seed,
    "logprobs": Annotated[  # false stands for None, as in a chat request
        _Logprobs | Literal[False],
        AfterValidator(lambda value: None if value is False else value),
    ],
}
TokenLimit: Any = _TYPES["max_tokens"]


class SamplingFields(Fields):
    """Base of the bodies that have sampling fields.

    Attributes:
        own_names: names of the body's sampling fields -> names of the parameters.
    """

    own_names: ClassVar[Mapping[str, str]] = {}

    def sampling_params(self, defaults: SamplingParams, **changes: Any) -> SamplingParams:
        """Return `defaults` with the fields of this body, and with `changes`.

        Raises:
            FieldError: names the field of the body.
        """
        for own_name, name in self.own_names.items():
            value = getattr(self, own_name)
            if value is None:
                continue
            if name in changes:
                raise FieldError(name, f"{name} and {own_name} are the same: give one")
            if name == "logit_bias":  # the keys of a JSON object are strings
                value = {int(key): bias for key, bias in value.items()}
            changes[name] = value
        try:
            return dataclasses.replace(defaults, **changes)
        except FieldError as e:
            raise e.at(self.given_names().get(e.field, e.field)) from None

    def given_names(self) -> dict[str, str]:
        """Return the parameters that this body gives, each with its name in the body."""
        return {
            name: own_name
            for own_name, name in self.own_names.items()
            if getattr(self, own_name) is not None
        }


def sampling_fields(own_names: Mapping[str, str]) -> Any:
    """Make a base for the model of a body that has these fields, with the parameters' types."""
    fields: Any = {
        own_name: (_TYPES.get(name, bool) | None, None) for own_name, name in own_names.items()
    }
    model: Any = create_model("SamplingFields", __base__=SamplingFields, **fields)
    model.own_names = own_names
    return model
