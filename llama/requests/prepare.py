"""From a prompt and its parameters to a checked `Request`, before anything is queued.

In: text or ids, and SamplingParams. Out: a request with one sequence per answer, or a TypeError or
ValueError that names what is wrong. It touches no state, so any thread may call it at any time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from llama.checks import FieldError, brief, index_of
from llama.engine.request import SequenceSpec
from llama.engine.sequence import SequenceState
from llama.requests.detokenizer import Detokenizer, StopStrings
from llama.requests.grammar import GrammarCompiler
from llama.requests.request import Answer, Request, derived_seed
from llama.sampling_params import SamplingParams
from llama.tokenizer import Tokenizer

# The fields of both that the engine takes as they are. It gets bad words and the prediction as
# tokens, and the seed when the request is submitted.
_SHARED_FIELDS = {f.name for f in fields(SequenceSpec)} & {
    f.name for f in fields(SamplingParams)
} - {"bad_words", "prediction", "seed"}


class ContextLengthError(FieldError):
    """The prompt, or prompt and max_tokens together, have `count` tokens, where `most` can be."""

    def __init__(self, field: str, message: str, count: int = 0, most: int = 0) -> None:
        super().__init__(field, message)
        self.count, self.most = count, most


@dataclass(frozen=True)
class Preparer:
    """Makes the requests of one model: its tokenizer, and the longest sequence that it takes."""

    tokenizer: Tokenizer
    max_seq_len: int
    grammars: GrammarCompiler

    def prepare(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        index: int | None = None,
        must_fit: bool = False,
    ) -> Request:
        """Check a request and make its sequences; nothing is queued, no state is touched.

        request_id: empty for one without a name; its outputs have `index`, its place in the
        caller's list. prompt: text (begin_of_text is put before it) or token ids, also as an array
        or a tensor. params: a seed is that of the list's first prompt, from which those of the
        others are derived; without, it is made when the request is submitted. must_fit: max_tokens
        without room are an error; else the answer ends with the context. TypeError or ValueError
        says what is wrong, ContextLengthError that the request is too long.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id={brief(request_id)} must be a string")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")
        text = prompt if isinstance(prompt, str) else None
        ids = prompt if text is None else self.tokenizer.encode(text, bos=True, eos=False)
        name = "the prompt" if index is None else f"prompt {index}"
        ids = _token_ids(name, ids, self.max_seq_len, self.tokenizer.n_words)
        params.check_vocab(self.tokenizer.n_words)
        context, wish = self.max_seq_len, self.max_seq_len
        if params.max_tokens is not None:
            wish = len(ids) + params.max_tokens
        if must_fit and wish > context:
            words = f"{len(ids)} prompt tokens and max_tokens={params.max_tokens} are more than "
            words += f"the context of {context} tokens: ask for fewer"
            raise ContextLengthError("max_tokens", words, wish, context)
        answers = self._answers(ids, params, min(wish, context))
        request = Request(request_id, text, params, answers, index or 0)
        if params.seed is not None:
            request.set_seed(derived_seed(params.seed, request.index))
        return request

    def _answers(self, ids: list[int], params: SamplingParams, longest: int) -> list[Answer]:
        """Return the answers of a request, each with a sequence of at most `longest` tokens."""
        spec = self._spec(ids, params, longest)
        response_format = params.structured_output
        assert not isinstance(response_format, Mapping)  # `SamplingParams` has converted it
        answers = []
        for _ in range(params.best_of or params.n):
            constraint = None
            if response_format is not None:
                constraint = self.grammars.matcher(response_format)
            stops = StopStrings(params.stop, params.include_stop_str_in_output)
            skip = params.skip_special_tokens
            detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=skip)
            answers.append(Answer(SequenceState(spec, constraint), params, detokenizer, stops))
            spec = replace(spec, prompt_logprobs=None)  # the first sequence scores for all
        return answers

    def _spec(self, ids: list[int], params: SamplingParams, longest: int) -> SequenceSpec:
        """Return what the engine gets to know of a request."""
        # Bad words are banned at the start of a text, and after a space.
        spellings = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        bad_words = [self.tokenizer.encode(text, bos=False, eos=False) for text in spellings]
        shared = {name: getattr(params, name) for name in _SHARED_FIELDS}
        if params.best_of is not None and params.logprobs is None:
            shared["logprobs"] = 0  # to choose by
        model_stops = () if params.ignore_eos else self.tokenizer.stop_tokens
        prediction = self.tokenizer.encode(params.prediction, bos=False, eos=False)
        return SequenceSpec(
            tokens=tuple(ids),
            max_len=longest,
            stop_ids=frozenset(params.stop_token_ids) | frozenset(model_stops),
            is_constrained=params.structured_output is not None,
            prediction=tuple(prediction),
            bad_words=tuple(map(tuple, bad_words)),
            **shared,
        )


def _token_ids(name: str, prompt: object, max_seq_len: int, n_vocab: int) -> list[int]:
    """The prompt, a list, tuple, array or tensor of 1 to max_seq_len ids, as a list of ints.
    TypeError or ValueError names the prompt, and says what is allowed."""
    if hasattr(prompt, "tolist"):  # of numpy and torch
        prompt = prompt.tolist()
    if not isinstance(prompt, list | tuple):
        raise not_ids(name, prompt)
    if not prompt:
        raise ValueError(f"{name} has 0 tokens: give at least one, such as begin_of_text")
    if len(prompt) > max_seq_len:
        words = f"{name} has {len(prompt)} tokens, but max_seq_len is {max_seq_len}: shorten the "
        words += "prompt, or build with a larger max_seq_len"
        raise ContextLengthError("prompt", words, len(prompt), max_seq_len)
    ids: Any = [token if type(token) is int else index_of(token) for token in prompt]
    for token, given in zip(ids, prompt, strict=True):
        if token is None or not 0 <= token < n_vocab:
            raise ValueError(f"{name} holds {brief(given)}: token ids are 0 to {n_vocab - 1}")
    return ids


def not_ids(name: str, prompt: object) -> TypeError:
    return TypeError(
        f"{name} must be a list of token ids, got {type(prompt).__name__}: encode text with "
        "tokenizer.encode, or call text_completion"
    )
