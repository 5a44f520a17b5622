"""What a body of any API says of sampling: fields that are made from those of `SamplingParams`.

In: names of fields. Out: the base of a body's model, and the parameters that a body asks for.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, create_model

from llama.checks import FieldError
from llama.prompts.fields import Fields, said
from llama.sampling_params import (
    BIASES,
    LIMITS,
    MOST_BIASES,
    MOST_LETTERS,
    MOST_STOP_IDS,
    MOST_STOPS,
    MOST_WORDS,
    TOKEN_IDS,
    SamplingParams,
)

# Of OpenAI's own APIs: all by their names, but these three, which follow from other fields.
_DERIVED = {"prompt_logprobs", "structured_output", "prediction"}
_NAMES = [each.name for each in dataclasses.fields(SamplingParams) if each.name not in _DERIVED]
OPENAI_NAMES = {name: name for name in _NAMES} | {"max_completion_tokens": "max_tokens"}
# Of the APIs with one answer, whose limit of tokens has a name of their own.
_NOT_SHARED = {"n", "best_of", "logprobs", "max_tokens", "max_completion_tokens"}
SHARED_NAMES = {own: name for own, name in OPENAI_NAMES.items() if own not in _NOT_SHARED}


def _within(kind: type, low: float, high: float) -> Any:
    """A number, both limits included."""
    words = f"a {'whole ' if kind is int else ''}number from {low} to {high}"
    return Annotated[kind, Field(ge=low, le=high), said("={value} must be " + words)]


TokenId = Annotated[int, Field(ge=TOKEN_IDS[0], le=TOKEN_IDS[1])]
Word = Annotated[
    str,
    Field(min_length=1, max_length=MOST_LETTERS),
    said(f"={{value}} must be a string of 1 to {MOST_LETTERS} characters"),
]
StopWords = Annotated[list[Word], Field(max_length=MOST_STOPS)]
_Key = Annotated[str, Field(pattern="^[0-9]{1,10}$"), said(": keys must be token ids")]
_Bias: Any = _within(float, *BIASES)
_TYPES: dict[str, Any] = {
    "stop": Annotated[
        Annotated[Word, Tag("one")] | Annotated[StopWords, Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list) else "one"),
    ],
    "stop_token_ids": Annotated[list[TokenId], Field(max_length=MOST_STOP_IDS)],
    "bad_words": Annotated[list[Word], Field(max_length=MOST_WORDS)],
    "logit_bias": Annotated[dict[_Key, _Bias], Field(max_length=MOST_BIASES)],
    **{name: _within(kind, low, high) for name, (kind, low, high, _) in LIMITS.items()},
    "logprobs": Annotated[  # false: as a chat has it
        _within(int, *LIMITS["logprobs"][1:3]) | Literal[False],
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
