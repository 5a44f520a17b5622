"""The sampling parameters of a request, and the format that its answer must have.

In: values from callers. Out: frozen objects of plain numbers and texts, checked when they are made,
so that the same call has the same `repr` on every rank. The types of the fields also make those of
the server's bodies (`llama.server.sampling`). It knows no tensor, no tokenizer and no model.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import PlainValidator

from llama.common.checks import FieldError, FieldTypeError, Range, brief, number, whole_number
from llama.common.validation import (
    Length,
    TupleOf,
    checked_dataclass,
    with_message,
)

MAX_COUNT = 2**31 - 1  # the largest token id, and the largest count that nothing else limits
MAX_BIASES = 1024
BIAS = Range(-100, 100)
CACHE_SALT = Length(1, 512)
_MAX_CHARACTERS = 100_000  # length of a schema, a regular expression or a grammar

TokenId = Annotated[int, Range(0, MAX_COUNT)]
Text = Annotated[str, Length(1, 256)]  # a stop text or a bad word
_LongText = Annotated[str | None, Length(1, _MAX_CHARACTERS)]
StopTexts = TupleOf(Text, 0, 32, may_be_text=True)
StopIds = TupleOf(TokenId, 0, 256)
BadWords = TupleOf(Text, 0, 256)

Switch = Annotated[bool, with_message("={value} must be True or False")]
IN_MEMORY = ("in_memory", "in-memory")  # both are OpenAI's
Retention = Literal["in_memory", "in-memory", "24h"]
LogprobCount = Annotated[int | None, Range(0, 100)]
Seed = Annotated[int | None, Range(0, 2**63 - 1)]


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Return a mapping, or pairs that this function has returned before, as pairs sorted by id."""
    if value is None:
        return ()
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    is_tuple = isinstance(pairs, tuple)
    if not is_tuple or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        text = f"={brief(value)} must map token ids to numbers, or be None"
        raise FieldTypeError("", text)
    if len(pairs) > MAX_BIASES:
        raise FieldError("", f" has {len(pairs)} entries: it must have at most {MAX_BIASES}")
    biases = {}
    for token, bias in pairs:
        token_id = whole_number("logit_bias id", token, 0, MAX_COUNT)
        biases[token_id] = number(f"logit_bias[{token}]", bias, BIAS.low, BIAS.high)
    return tuple(sorted(biases.items()))


def _schema(value: Any) -> str | None:
    """Return a JSON schema as text, which is the same for the same schema."""
    if value is None:
        return None
    if value is False:
        raise FieldError("", ": the schema false allows no answer")
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise FieldError("", f" is not JSON: {e}") from None
    if not isinstance(schema, dict | bool):
        raise FieldTypeError("", f"={brief(value)} must be a JSON schema: an object")
    if len(text) > _MAX_CHARACTERS:
        allowed = f"1 to {_MAX_CHARACTERS} characters"
        raise FieldError("", f" must have {allowed}, not {len(text)}: {brief(text)}")
    return text


@checked_dataclass
class StructuredOutput:
    """The format that an answer must have; exactly one field is given, and `calls` alone or too.

    An answer that ends before its length limit has this format. The names are vLLM's. A
    `FieldError` names the field.

    Attributes:
        json: a JSON schema, as an object or as text; it is stored as text. The answer is JSON that
            the schema allows. A $ref may point into the schema only.
        json_object: True; the answer is any JSON object.
        regex: a regular expression (the syntax of Rust's regex, without look-around) that the whole
            answer matches.
        choice: the texts that the answer is one of, at most 100,000 characters together.
        grammar: a grammar, in Lark (llguidance's dialect) or GBNF (llama.cpp's), that the answer is
            a sentence of.
        calls: a grammar of tool calls, as `llama.prompts.grammar` makes it. The answer is a
            sentence of it, or has the format that another field gives.
    """

    path_prefix = "structured_output"

    json: Annotated[str | dict[str, Any] | bool | None, PlainValidator(_schema)] = None
    json_object: Annotated[bool | None, with_message("={value} must be True or None")] = None
    regex: _LongText = None
    choice: Annotated[Sequence[str], TupleOf(_LongText, 1, 1024)] | None = None
    grammar: _LongText = None
    calls: _LongText = None

    def __post_init__(self) -> None:
        """Check that exactly one of the fields is given."""
        given = [name for name in _FORMATS if getattr(self, name) not in (None, False)]
        if len(given) != 1 and not (self.calls and not given):
            fields = ", ".join(_FORMATS)
            text = f" must have one of {fields}, got {' and '.join(given) or 'none'}"
            raise FieldError.of("structured_output", text)
        num_characters = sum(map(len, self.choice or ()))
        if num_characters > _MAX_CHARACTERS:
            problem = f" must have at most {_MAX_CHARACTERS} characters in all: {num_characters}"
            raise FieldError.of("structured_output.choice", problem)

    @property
    def kind(self) -> str:
        """Name of the field that is given; "calls" if there is no other."""
        given = (name for name in _FORMATS if getattr(self, name) not in (None, False))
        return next(given, "calls")


@checked_dataclass
class ReasoningRule:
    """The marks of a model's reasoning, and how much it may reason.

    The text of an answer is its content alone; the reasoning is apart. The marks are tokens, or
    else they are plain text. Behind marks that are tokens begins the format of an answer. A
    `FieldError` names the field.

    Attributes:
        end_id: the token that ends the reasoning; None where the marks are plain text.
        start_id: the token that begins it, at the end of the prompt or of an answer's beginning;
            None where only prompts begin it.
        end_text: the text that ends the reasoning; empty where the marks are tokens.
        start_text: the text that begins it; empty where the marks are tokens.
        budget: maximum number of tokens of the reasoning without its marks; None has no limit. 0
            ends the reasoning at once.
    """

    path_prefix = "reasoning"

    end_id: Annotated[int | None, Range(0, MAX_COUNT)] = None
    start_id: Annotated[int | None, Range(0, MAX_COUNT)] = None
    end_text: str = ""
    start_text: str = ""
    budget: Annotated[int | None, Range(0, MAX_COUNT)] = None

    def __post_init__(self) -> None:
        """Check the fields that depend on one another."""
        is_text = bool(self.end_text and self.start_text)
        if is_text == (self.end_id is not None):
            problem = " must be given, or else both end_text and start_text"
            raise FieldError.of("reasoning.end_id", problem)
        if is_text and self.budget is not None:
            raise FieldError.of("reasoning.budget", " needs an end mark that is a token: end_id")


_FORMATS = ("json", "json_object", "regex", "choice", "grammar")


def _structured_output(value: Any) -> StructuredOutput | None:
    if value is None or isinstance(value, StructuredOutput):
        return value
    if not isinstance(value, Mapping):
        text = f"={brief(value)} must be a StructuredOutput, or be None"
        raise FieldTypeError("", text)
    unknown = sorted(value.keys() - {*_FORMATS, "calls"})
    if unknown:
        raise FieldError("", f" has no field {unknown[0]!r}")
    return StructuredOutput(**value)


AnswerFormat = Annotated[
    StructuredOutput | Mapping[str, Any] | None, PlainValidator(_structured_output)
]


@checked_dataclass
class SamplingParams:
    """How the tokens of one request are chosen, when they end, and what is reported.

    Names, defaults and meanings are those of vLLM and of the OpenAI API, and of transformers where
    it has the field. A `FieldError` names the field, the value and what is allowed.
    `llama.engine.sampler` documents the order in which the fields are applied.

    Attributes:
        max_tokens: maximum number of generated tokens; None generates as many as fit, 0 only scores
            the prompt.
        min_tokens: number of tokens before which no token and no text ends the request.
        temperature: divisor of the logits (Ackley et al. 1985); below 1e-5 decoding is greedy.
        top_p: nucleus sampling (Holtzman et al. 2020) by Meta's rule: a token is kept while the
            mass of the more probable tokens is at most top_p, so the top token always stays.
        top_k: number of most probable tokens that are kept (Fan et al. 2018), with all tokens that
            equal the last of them; 0 or -1 keeps all.
        min_p: smallest probability that is kept, relative to that of the top token (Nguyen et al.
            2024).
        repetition_penalty: penalty of the tokens in prompt and output (Keskar et al. 2019, CTRL): a
            positive logit is divided by it, a negative one is multiplied.
        presence_penalty: subtracted once from the logits of tokens in the output (OpenAI).
        frequency_penalty: subtracted from the logits of tokens in the output, once per occurrence
            (OpenAI).
        logit_bias: added to the logits of these token ids (OpenAI); stored as pairs sorted by id.
        stop: texts that end the output.
        stop_token_ids: token ids that end the output, in addition to the model's own stop tokens.
        include_stop_str_in_output: keep the stop text in the output.
        skip_special_tokens: leave special tokens out of the text; False, as in Meta's decode.
        ignore_eos: do not stop at the model's own stop tokens.
        seed: seed of the random numbers of this request; None leaves it to the engine.
        n: number of answers returned.
        best_of: number of answers generated, of which those with the highest log-probability are
            returned. At temperature 0 all answers are the same.
        logprobs: number of most probable tokens whose log-probabilities are reported besides that
            of each generated token; 0 reports the token's own only, None nothing.
        prompt_logprobs: the same for each token of the prompt.
        bad_words: texts that are never generated.
        prediction: a text that the answer may repeat (OpenAI's predicted outputs). With speculative
            decoding its tokens are drafts; the answer does not depend on it.
        structured_output: the format that the answer must have, as a `StructuredOutput` or as a
            mapping of its fields. It ends the answer, so it excludes min_tokens and ignore_eos.
        reasoning: the marks of the reasoning that precedes the answer, and its budget: a
            `ReasoningRule`, which the chat format of a model gives to the requests of chats.
        cache_salt: a text that separates requests (vLLM's field): those with different salts share
            neither pages of the prefix cache, nor drafts, nor compiled grammars. The answer does
            not depend on it.
        prompt_cache_retention: "in_memory" keeps the pages of the request off the disk (OpenAI's
            field); "24h", the default, writes them where `kv_cache_dir` is given.
    """

    max_tokens: Annotated[int | None, Range(0, MAX_COUNT)] = 16
    min_tokens: Annotated[int, Range(0, MAX_COUNT)] = 0  # at most max_tokens
    temperature: Annotated[float, Range(0, 100)] = 1.0
    top_p: Annotated[float, Range(0, 1)] = 1.0
    top_k: Annotated[int, Range(-1, MAX_COUNT)] = 0
    min_p: Annotated[float, Range(0, 1)] = 0.0
    repetition_penalty: Annotated[float, Range(0.01, 10)] = 1.0  # float32 would overflow near 0
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0
    logit_bias: Annotated[
        Mapping[int, float] | tuple[tuple[int, float], ...] | None, PlainValidator(_bias)
    ] = ()
    stop: Annotated[str | Sequence[str], StopTexts] = ()
    stop_token_ids: Annotated[Sequence[int], StopIds] = ()
    include_stop_str_in_output: Switch = False
    skip_special_tokens: Switch = False
    ignore_eos: Switch = False
    seed: Seed = None
    n: Annotated[int, Range(1, 64)] = 1
    best_of: Annotated[int | None, Range(1, 64)] = None  # at least n
    logprobs: LogprobCount = None
    prompt_logprobs: LogprobCount = None
    bad_words: Annotated[Sequence[str], BadWords] = ()
    prediction: Annotated[str, with_message("={value} must be a string")] = ""
    structured_output: AnswerFormat = None
    reasoning: ReasoningRule | None = None
    cache_salt: Annotated[str | None, CACHE_SALT] = None
    prompt_cache_retention: Retention | None = None

    def __post_init__(self) -> None:
        """Check the fields that depend on one another."""
        if self.max_tokens is not None:
            whole_number("min_tokens", self.min_tokens, 0, self.max_tokens)
        whole_number("best_of", self.best_of, self.n, 64, optional=True)
        if self.structured_output is not None and (self.ignore_eos or self.min_tokens):
            text = " and min_tokens cannot be used with structured_output, which ends an answer "
            raise FieldError.of("ignore_eos", f"{text}where its format does: leave them out")

    @property
    def constrains_reasoning(self) -> bool:
        """Whether reasoning has a budget, or the format of the content must wait for its end."""
        if self.reasoning is None or self.reasoning.end_id is None:
            return False
        return self.reasoning.budget is not None or self.structured_output is not None

    def check_vocab(self, vocab_size: int) -> None:
        """Raise a FieldError if a token id is outside of a vocabulary of `vocab_size` tokens."""
        biased = dict(self.logit_bias or ())
        checked = {"logit_bias": biased, "stop_token_ids": self.stop_token_ids}
        if self.reasoning is not None:
            marks = (self.reasoning.start_id, self.reasoning.end_id)
            checked["reasoning"] = [token for token in marks if token is not None]
        for name, ids in checked.items():
            if ids and max(ids) >= vocab_size:
                text = f" has the token id {max(ids)}: this vocabulary has ids from 0 to "
                raise FieldError.of(name, f"{text}{vocab_size - 1}")


def _number_types(cls: type) -> dict[str, Any]:
    """Return the fields of a class that are numbers, each with its type without None."""
    types: dict[str, Any] = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        declared, *metadata = get_args(hint) or (hint,)
        if metadata and isinstance(metadata[0], Range):
            kind = float if declared is float else int
            types[name] = Annotated[kind, metadata[0]]
    return types


NUMBER_TYPES = _number_types(SamplingParams)
