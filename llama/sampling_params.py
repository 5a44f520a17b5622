"""What one request asks of sampling: checked once, here, and frozen.

Text and numbers from the caller in, plain hashable values out: the same call has the same `repr` on
every rank. It knows no tensor, no tokenizer and no model; `check_vocab` is told the vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as brief  # a value may be as long as a prompt
from typing import Any, NamedTuple

_GREEDY_BELOW = 1e-5  # temperatures under it take the top token, as in vLLM
_MOST = 2**31 - 1  # of token ids, and of counts that nothing else bounds


class _Range(NamedTuple):
    """The numbers that a field may be, ends included unless `above` says that low is not."""

    low: float
    high: float
    whole: bool = True
    optional: bool = False  # None is allowed too
    above: bool = False

    def check(self, name: str, value: Any) -> Any:
        """The value as a plain int or float; TypeError or ValueError says what is allowed."""
        if value is None and self.optional:
            return None
        allowed = (int,) if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise TypeError(f"{name}={brief(value)} must be {self}")
        inside = self.low < value if self.above else self.low <= value
        if not (inside and value <= self.high):  # so written, NaN is outside
            raise ValueError(f"{name}={brief(value)} must be {self}")
        return int(value) if self.whole else float(value)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        start = f"above {self.low} and up" if self.above else f"from {self.low}"
        return f"{kind} {start} to {self.high}" + " or None" * self.optional


_TOKEN_ID = _Range(0, _MOST)
_BIAS = _Range(-100, 100, whole=False)
_NUMBERS = {
    "max_tokens": _Range(0, _MOST, optional=True),
    "temperature": _Range(0, 100, whole=False),
    "top_p": _Range(0, 1, whole=False),
    "top_k": _Range(-1, _MOST),
    "min_p": _Range(0, 1, whole=False),
    "repetition_penalty": _Range(0, 10, whole=False, above=True),
    "presence_penalty": _Range(-2, 2, whole=False),
    "frequency_penalty": _Range(-2, 2, whole=False),
    "seed": _Range(0, 2**63 - 1, optional=True),
    "n": _Range(1, 64),
    "logprobs": _Range(0, 100, optional=True),
    "prompt_logprobs": _Range(0, 100, optional=True),
}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}={brief(value)} must be a string of 1 to 256 characters")
    if not 1 <= len(value) <= 256:
        raise ValueError(f"{name}={brief(value)} must have 1 to 256 characters, not {len(value)}")
    return value


def _ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _tuple_of(_TOKEN_ID.check, name, value, 1024)
    if not ids:
        raise ValueError(f"{name}={brief(value)} must have 1 to 1024 token ids")
    return ids


def _tuple_of(check: Callable[[str, Any], Any], name: str, value: Any, most: int) -> tuple:
    """The entries of a list or tuple, each checked, at most `most` of them."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={brief(value)} must be a list or tuple of at most {most} entries")
    entries = tuple(value)
    if len(entries) > most:
        raise ValueError(f"{name} has {len(entries)} entries: it must have at most {most}")
    return tuple(check(f"{name}[{i}]", entry) for i, entry in enumerate(entries))


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    """A mapping, or the pairs that this made of one, as pairs sorted by id."""
    if value is None:
        return ()
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if not (isinstance(pairs, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in pairs)):
        raise TypeError(f"logit_bias={brief(value)} must map token ids to numbers, or be None")
    if len(pairs) > 1024:
        raise ValueError(f"logit_bias has {len(pairs)} entries: it must have at most 1024")
    checked = {
        _TOKEN_ID.check("logit_bias id", token): _BIAS.check(f"logit_bias[{token}]", bias)
        for token, bias in pairs
    }
    return tuple(sorted(checked.items()))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, when they end, and what is told of them.

    Names, defaults and meanings are those of vLLM and of the OpenAI API, and of transformers where
    it has the field. TypeError or ValueError names the field, the value and what is allowed.
    `llama.engine.sampling` says in which order the fields are applied.

    temperature: divides the logits (Ackley et al. 1985); below 1e-5 the top token is taken.
    top_p: nucleus sampling (Holtzman et al. 2020) by Meta's rule: a token is kept while the mass
        before it, from the likeliest down, is at most top_p. So the top token always stays.
    top_k: the k likeliest (Fan et al. 2018), and whatever equals the k-th; 0 or -1 for all.
    min_p: tokens at least min_p times as likely as the top one (Nguyen et al. 2024).
    repetition_penalty: of the tokens in prompt and output (Keskar et al. 2019, CTRL): a positive
        logit is divided by it, a negative one multiplied.
    presence_penalty, frequency_penalty: taken off the logits of tokens in the output, once and once
        an occurrence (OpenAI).
    logit_bias: added to the logits of these ids (OpenAI); kept as pairs sorted by id.
    bad_words: texts never to be generated; the tokenizer's layer writes them as `bad_words_ids`.
    max_tokens: the most generated tokens; None for what fits, 0 to score the prompt only.
    min_tokens: no token or text stops the request before so many.
    stop, stop_token_ids: texts and ids that end the output, beside the model's own stop tokens,
        which `ignore_eos` sets aside; the text is left out unless `include_stop_str_in_output`.
    seed: of this request's random numbers; None leaves it to the engine.
    n, best_of: answers returned, and generated to choose them from by log-probability. Greedy
        decoding has one answer, so it refuses more.
    logprobs, prompt_logprobs: log-probability of each generated, or prompt, token and of so many
        of the likeliest in its place; 0 for the token's own, None for none.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, allowed in _NUMBERS.items():
            self._set(name, allowed.check(name, getattr(self, name)))
        most = _MOST if self.max_tokens is None else self.max_tokens
        self._set("min_tokens", _Range(0, most).check("min_tokens", self.min_tokens))
        self._set("best_of", _Range(self.n, 64, optional=True).check("best_of", self.best_of))
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        self._set("logit_bias", _bias(self.logit_bias))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", _tuple_of(_text, "stop", stop, 32))
        ids = _tuple_of(_TOKEN_ID.check, "stop_token_ids", self.stop_token_ids, 256)
        self._set("stop_token_ids", ids)
        self._set("bad_words", _tuple_of(_text, "bad_words", self.bad_words, 256))
        self._set("bad_words_ids", _tuple_of(_ids, "bad_words_ids", self.bad_words_ids, 1024))
        answers = max(self.n, self.best_of or 1)
        if self.greedy and answers > 1:
            raise ValueError(
                f"n={self.n} and best_of={self.best_of} must be 1 with temperature="
                f"{self.temperature}: greedy decoding has one answer; ask for a temperature above 0"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen from here on

    @property
    def greedy(self) -> bool:
        """Whether the top token is always taken."""
        return self.temperature < _GREEDY_BELOW

    def check_vocab(self, vocab_size: int) -> None:
        """ValueError unless every id of the request is one of a vocabulary of `vocab_size`."""
        named = {
            "logit_bias": dict(self.logit_bias or ()),
            "stop_token_ids": self.stop_token_ids,
            "bad_words_ids": [token for word in self.bad_words_ids for token in word],
        }
        for name, ids in named.items():
            for token in ids:
                if token >= vocab_size:
                    raise ValueError(
                        f"{name} has the token id {token}: this vocabulary's are from 0 to "
                        f"{vocab_size - 1}"
                    )
