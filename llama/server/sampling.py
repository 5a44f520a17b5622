"""What a body of any API says of sampling: fields that are made from those of `SamplingParams`.

In: names of fields. Out: the base of a body's model, and the parameters that a body asks for.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, create_model

from llama.checks import FieldError
from llama.prompts.fields import Fields
from llama.sampling_params import (
    BIAS,
    MAX_BIASES,
    MAX_COUNT,
    NUMBER_TYPES,
    BadWords,
    SamplingParams,
    StopIds,
    StopTexts,
    Text,
)
from llama.validation import with_message

# Of OpenAI's own APIs: all by their names, but these three, which follow from other fields.
_DERIVED = {"prompt_logprobs", "structured_output", "prediction"}
_NAMES = [each.name for each in dataclasses.fields(SamplingParams) if each.name not in _DERIVED]
OPENAI_NAMES = {name: name for name in _NAMES} | {"max_completion_tokens": "max_tokens"}
# Of the APIs with one answer, whose limit of tokens has a name of their own.
_NOT_SHARED = {"n", "best_of", "logprobs", "max_tokens", "max_completion_tokens"}
SHARED_NAMES = {own: name for own, name in OPENAI_NAMES.items() if own not in _NOT_SHARED}


def _encodable(text: str) -> str:
    """Return the text; raise a ValueError if it has a lone surrogate."""
    text.encode()
    return text


# A prompt may have a million ids, so pydantic checks them without calling a Python function.
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Text = Annotated[Text, AfterValidator(_encodable)]
StopList = Annotated[list[_Text], Field(max_length=StopTexts.high)]
_Key = Annotated[str, Field(pattern="^[0-9]{1,10}$"), with_message(": keys must be token ids")]
_Logprobs: Any = NUMBER_TYPES["logprobs"]
_TYPES: dict[str, Any] = {
    "stop": Annotated[
        Annotated[_Text, Tag("one")] | Annotated[StopList, Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list) else "one"),
    ],
    "stop_token_ids": Annotated[list[TokenId], Field(max_length=StopIds.high)],
    "bad_words": Annotated[list[_Text], Field(max_length=BadWords.high)],
    "logit_bias": Annotated[dict[_Key, Annotated[float, BIAS]], Field(max_length=MAX_BIASES)],
    **NUMBER_TYPES,
    "logprobs": Annotated[  # false stands for none, as in a chat request
        _Logprobs | Literal[False],
        AfterValidator(lambda value: None if value is False else value),
    ],
}
TokenLimit: Any = _TYPES["max_tokens"]


class SamplingFields(Fields):
    """own_names: of the fields that ask for parameters, with the parameters' names."""

    own_names: ClassVar[Mapping[str, str]] = {}

    def sampling_params(self, defaults: SamplingParams, **changes: Any) -> SamplingParams:
        """`defaults` with what the body gives, and `changes`. FieldError names the body's field."""
        for own, name in self.own_names.items():
            value = getattr(self, own)
            if value is None:
                continue
            if name in changes:
                raise FieldError(name, f"{name} and {own} are the same: give one")
            # The keys of JSON are strings.
            is_bias = name == "logit_bias"
            changes[name] = {int(key): v for key, v in value.items()} if is_bias else value
        try:
            return dataclasses.replace(defaults, **changes)
        except FieldError as e:
            raise e.at(self.given_names().get(e.field, e.field)) from None

    def given_names(self) -> dict[str, str]:
        """The names of the parameters, and the body's names of those that it gives."""
        return {n: own for own, n in self.own_names.items() if getattr(self, own) is not None}


def sampling_fields(own_names: Mapping[str, str]) -> Any:
    """A base for the model of a body that has these fields, of the types of the parameters."""
    fields: Any = {own: (_TYPES.get(name, bool) | None, None) for own, name in own_names.items()}
    model: Any = create_model("SamplingFields", __base__=SamplingFields, **fields)
    model.own_names = own_names
    return model
