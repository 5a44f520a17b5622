"""What one request asks of sampling, and the form that its answer must have.

Text and numbers, checked once, here, and frozen: the same call has the same `repr` on every rank.
It knows no tensor, no tokenizer and no model.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from llama.checks import (
    FieldError,
    FieldTypeError,
    brief,
    checked_number,
    limits_of,
    number,
    whole_number,
    within,
)

_MOST = 2**31 - 1  # of token ids, and of counts that nothing else bounds
TOKEN_IDS = (0, _MOST)
MOST_LETTERS = 256  # of a stop string, and of a bad word
MOST_STOPS, MOST_STOP_IDS, MOST_WORDS, MOST_BIASES = 32, 256, 256, 1024
BIASES = (-100, 100)
_MOST_CHARACTERS = 100_000  # of a schema, an expression or a grammar
_MOST_CHOICES = 1024


def _wrong(name: str, value: Any, must: str) -> FieldTypeError:
    return FieldTypeError(name, f"{name}={brief(value)} must {must}")


def _text(name: str, value: Any, most: int = _MOST_CHARACTERS) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, f"be a string of 1 to {most} characters")
    if not 1 <= len(value) <= most:
        words = f" must have 1 to {most} characters, not {len(value)}: {brief(value)}"
        raise FieldError.of(name, words)
    return value


_token_id = functools.partial(whole_number, low=TOKEN_IDS[0], high=TOKEN_IDS[1])
_word = functools.partial(_text, most=MOST_LETTERS)


def _tuple_of(check: Callable[[str, Any], Any], name: str, value: Any, most: int) -> tuple:
    """The entries of a list, tuple or array, each checked, at most `most` of them."""
    if value is None:
        return ()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _wrong(name, value, f"be a list or tuple of at most {most} entries")
    if len(value) > most:
        raise FieldError(name, f"{name} has {len(value)} entries: it must have at most {most}")
    return tuple(check(f"{name}[{i}]", entry) for i, entry in enumerate(value))


def _bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """A mapping, or the pairs that this made of one, as pairs sorted by id."""
    if value is None:
        return ()
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if not (isinstance(pairs, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in pairs)):
        raise _wrong(name, value, "map token ids to numbers, or be None")
    if len(pairs) > MOST_BIASES:
        raise FieldError.of(name, f" has {len(pairs)} entries: it must have at most {MOST_BIASES}")
    checked = {
        _token_id(f"{name} id", token): number(f"{name}[{token}]", bias, *BIASES)
        for token, bias in pairs
    }
    return tuple(sorted(checked.items()))


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """Exactly one of these; an answer that does not end by its length has this form.

    json: a JSON schema, as an object or as text, which it is kept as; the answer is JSON that it
        allows. $ref may point into the schema, and nowhere else.
    json_object: True; the answer is any JSON object.
    regex: the answer matches it as a whole (the syntax of Rust's regex, without look-around).
    choice: the answer is one of these texts.
    grammar: the answer is a sentence of this grammar, in Lark (llguidance's) or GBNF (llama.cpp's).

    The names are vLLM's. A `FieldError` names the field.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    kind: str = field(init=False, repr=False, compare=False)  # the name of the one that is given

    def __post_init__(self) -> None:
        if self.json is False:
            raise FieldError.of("structured_output.json", ": the schema false allows no answer")
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            named, known = " and ".join(given) or "none", ", ".join(_FORMS)
            raise FieldError.of("structured_output", f" must have one of {known}, got {named}")
        name = given[0]
        checked = _FORMS[name](f"structured_output.{name}", getattr(self, name))
        object.__setattr__(self, name, checked)
        object.__setattr__(self, "kind", name)


def _schema(name: str, value: Any) -> str:
    """The schema as JSON: the same text for the same schema."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise FieldError(name, f"{name} is not JSON: {e}") from None
    if not isinstance(schema, dict | bool):
        raise _wrong(name, value, "be a JSON schema: an object")
    return _text(name, text)


def _is_true(name: str, value: Any) -> bool:
    if value is not True:
        raise _wrong(name, value, "be True or None")
    return value


def _choices(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong(name, value, "be a list of texts")
    if not 1 <= len(value) <= _MOST_CHOICES:
        raise FieldError(name, f"{name} must have 1 to {_MOST_CHOICES} entries, not {len(value)}")
    return _tuple_of(_text, name, value, _MOST_CHOICES)


_FORMS: dict[str, Callable[[str, Any], Any]] = {
    "json": _schema,
    "json_object": _is_true,
    "regex": _text,
    "choice": _choices,
    "grammar": _text,
}


def _form(name: str, value: Any) -> StructuredOutput | None:
    if value is None or isinstance(value, StructuredOutput):
        return value
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "be a StructuredOutput, or be None")
    unknown = sorted(value.keys() - _FORMS.keys())
    if unknown:
        raise FieldError(name, f"{name} has no field {unknown[0]!r}")
    return StructuredOutput(**value)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, when they end, and what is reported.

    Names, defaults and meanings are those of vLLM and of the OpenAI API, and of transformers where
    it has the field. A `FieldError` names the field, the value and what is allowed.
    `llama.engine.sampler` says in which order the fields are applied.

    temperature: divides the logits (Ackley et al. 1985); below 1e-5 the top token is taken.
    top_p: nucleus sampling (Holtzman et al. 2020) by Meta's rule: a token is kept while the mass
        before it, from the likeliest down, is at most top_p. So the top token always stays.
    top_k: the k likeliest (Fan et al. 2018), and whatever equals the k-th; 0 or -1 for all.
    min_p: tokens at least min_p times as likely as the top one (Nguyen et al. 2024).
    repetition_penalty: of the tokens in prompt and output (Keskar et al. 2019, CTRL): a positive
        logit is divided by it, a negative one multiplied.
    presence_penalty, frequency_penalty: taken off the logits of tokens in the output, once and per
        occurrence (OpenAI).
    logit_bias: added to the logits of these ids (OpenAI); kept as pairs sorted by id.
    bad_words: texts never to be generated.
    max_tokens: the most generated tokens; None for what fits, 0 to score the prompt only.
    min_tokens: no token or text stops the request before so many.
    stop, stop_token_ids: texts and ids that end the output, beside the model's own stop tokens,
        which `ignore_eos` sets aside; the text is left out unless `include_stop_str_in_output`.
    skip_special_tokens: leave special tokens out of the text; False here, as in Meta's decode.
    seed: of this request's random numbers; None leaves it to the engine.
    n, best_of: answers returned, and generated to choose them from by log-probability. At
        temperature 0 they are all the same.
    logprobs, prompt_logprobs: log-probability of each generated, or prompt, token and of so many
        of the likeliest in its place; 0 for the token's own, None for none.
    prediction: a text that the answer may repeat, as OpenAI's predicted outputs. Where the model
        speculates, its tokens are guesses; the answer does not depend on them.
    structured_output: the form that the answer must have, a `StructuredOutput` or its fields as a
        mapping. It ends the answer itself, so min_tokens and ignore_eos cannot be used beside it.
    """

    max_tokens: int | None = within(16, 0, _MOST)
    min_tokens: int = within(0, 0, _MOST)  # and at most max_tokens
    temperature: float = within(1.0, 0, 100)
    top_p: float = within(1.0, 0, 1)
    top_k: int = within(0, -1, _MOST)
    min_p: float = within(0.0, 0, 1)
    repetition_penalty: float = within(1.0, 0.01, 10)  # nearer to 0, float32 would overflow
    presence_penalty: float = within(0.0, -2, 2)
    frequency_penalty: float = within(0.0, -2, 2)
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = False
    ignore_eos: bool = False
    seed: int | None = within(None, 0, 2**63 - 1)
    n: int = within(1, 1, 64)
    best_of: int | None = within(None, 1, 64)  # and at least n
    logprobs: int | None = within(None, 0, 100)
    prompt_logprobs: int | None = within(None, 0, 100)
    bad_words: Sequence[str] = ()
    prediction: str = ""
    structured_output: StructuredOutput | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, (kind, low, high, optional) in LIMITS.items():
            if name == "min_tokens" and self.max_tokens is not None:
                high = self.max_tokens
            if name == "best_of":
                low = self.n
            value = checked_number(name, getattr(self, name), kind, low, high, optional)
            self._set(name, value)
        for name in (each.name for each in fields(self) if each.type is bool):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "be True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", _tuple_of(_word, "stop", stop, MOST_STOPS))
        ids = _tuple_of(_token_id, "stop_token_ids", self.stop_token_ids, MOST_STOP_IDS)
        self._set("stop_token_ids", ids)
        self._set("bad_words", _tuple_of(_word, "bad_words", self.bad_words, MOST_WORDS))
        if not isinstance(self.prediction, str):
            raise _wrong("prediction", self.prediction, "be a string")
        self._set("logit_bias", _bias("logit_bias", self.logit_bias))
        self._set("structured_output", _form("structured_output", self.structured_output))
        if self.structured_output is not None and (self.ignore_eos or self.min_tokens):
            words = " and min_tokens cannot be used with structured_output, which ends an answer "
            raise FieldError.of("ignore_eos", f"{words}where its form does: leave them out")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen from here on

    def check_vocab(self, vocab_size: int) -> None:
        """FieldError unless every id of the request is one of a vocabulary of `vocab_size`."""
        biased = dict(self.logit_bias or ())
        for name, ids in (("logit_bias", biased), ("stop_token_ids", self.stop_token_ids)):
            if ids and max(ids) >= vocab_size:
                words = f" has the token id {max(ids)}: this vocabulary's are from 0 to "
                raise FieldError.of(name, f"{words}{vocab_size - 1}")


LIMITS = limits_of(SamplingParams)
