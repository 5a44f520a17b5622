"""Construction of a checked `Request` from a prompt and its parameters.

In: text or token ids, and SamplingParams. Out: a request with one sequence per answer, or a
TypeError or ValueError that names the value at fault. Nothing is queued and no shared state is
changed, so any thread may call it at any time.

Every sequence gets the root of its prefix hashes here, and nowhere else: whatever is reused between
requests (drafts, compiled grammars, and pages beyond a public text) is reused only between equal
roots.
"""

import functools
import hmac
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from llama.common.checks import FieldError, brief, index_of
from llama.engine.request import Capture, Constraint, ImageSpan, Pooling, SequenceSpec
from llama.engine.sequence import SequenceState
from llama.options.image_sizes import ImageSizes
from llama.prompts.pictures import Picture
from llama.requests.adapters import AdapterNames
from llama.requests.answer import Answer
from llama.requests.detokenizer import Detokenizer, StopStrings
from llama.requests.formats import AnswerFormat, ConstraintMaker
from llama.requests.public_text import PublicText
from llama.requests.reasoning_text import (
    ReasoningReader,
    reads_reasoning,
    reasoning_is_open,
)
from llama.requests.request import Request
from llama.requests.seeds import derived_seed
from llama.sampling_params import IN_MEMORY, SamplingParams
from llama.storage.kv_segments import tenant_tag
from llama.tokenizer import Tokenizer

log = logging.getLogger("llama")
_SPEC_FIELDS = {field.name for field in fields(SequenceSpec)}
_PARAMS_FIELDS = {field.name for field in fields(SamplingParams)}
# Fields that are copied unchanged. Bad words and the prediction are tokenized first, and the seed
# is set when the request is submitted.
_SHARED_FIELDS = _SPEC_FIELDS & _PARAMS_FIELDS - {"bad_words", "prediction", "seed"}


class ContextLengthError(FieldError):
    """A prompt, or a prompt and max_tokens together, that exceed the context length.

    Attributes:
        count: The number of tokens that were requested.
        max_count: The largest number of tokens that is allowed.
        index: The position of the prompt in the caller's list; 0 if there is no list.
    """

    def __init__(self, field: str, message: str, count: int = 0, max_count: int = 0) -> None:
        super().__init__(field, message)
        self.count = count
        self.max_count = max_count
        self.index = 0


@dataclass
class Preparer:
    """A factory of the requests of one model."""

    tokenizer: Tokenizer
    max_seq_len: int  # largest number of tokens of a sequence, prompt and answer together
    constraints: ConstraintMaker
    adapters: AdapterNames
    why_silent: str = ""  # why the model cannot generate; empty if it can
    images: ImageSizes | None = None  # the sizes of images; None for a model of text
    public: PublicText | None = None  # whose pages all tenants share

    def check_generates(self) -> None:
        """Raise a ValueError if the model cannot generate."""
        if self.why_silent:
            raise ValueError(
                f"this model cannot generate: {self.why_silent}. It makes embeddings or scores"
            )

    def prepare(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        index: int | None = None,
        must_fit: bool = False,
        max_context: int | None = None,
        tenant: bytes = b"",
        reads: Pooling | Capture | None = None,
        adapter: str | None = None,
        parse_special: bool = False,
        pictures: Sequence[Picture] = (),
    ) -> Request:
        """Check a request and create its sequences without queueing them.

        Args:
            request_id: The name of the request; empty for a request without a name.
            prompt: Text, which begin_of_text is prepended to, or token ids as a list, a tuple, an
                array or a tensor.
            params: The sampling parameters. `params.seed` is the seed of the first prompt of a
                list; the seeds of the others are derived from it. Without a seed, one is derived
                when the request is submitted.
            index: The position of the prompt in the caller's list, if there is a list.
            must_fit: Whether `max_tokens` beyond the context length is an error. If not, the
                answer ends at the context length.
            max_context: A context length for this request, if it is less than the model's.
            tenant: The prefix root of whoever sends the request. Nothing but pages of the public
                text is reused between requests of different tenants.
            reads: What is wanted of the hidden states of the prompt, after which nothing is
                generated; None: the prompt is continued.
            adapter: The name of a loaded LoRA adapter; None: the base model.
            parse_special: Whether names of special tokens in a text are those tokens, whoever
                wrote them. If not, they are plain text.
            pictures: The images of a prompt of ids, one for each `Tokenizer.image_id` in it.

        Raises:
            TypeError: A value has the wrong type.
            ValueError: A value cannot be used.
            ContextLengthError: The request exceeds the context length.
        """
        _check_types(request_id, params)
        digest = self.adapters.digest_of(adapter)
        if reads is None:
            self.check_generates()
        name = "the prompt" if index is None else f"prompt {index}"
        context = min(max_context or self.max_seq_len, self.max_seq_len)
        text = prompt if isinstance(prompt, str) else None
        ids = prompt if text is None else self._text_ids(text, parse_special=parse_special)
        num_ids = self.tokenizer.n_words + (self.images is not None and bool(pictures))
        ids = _token_ids(name, ids, context, num_ids, index or 0)
        spans = self._spans(name, ids, pictures)
        params.check_vocab(self.tokenizer.n_words)
        _check_reads(name, reads, len(ids))
        max_len = _max_len(len(ids), params, context) if reads is None else len(ids)
        if must_fit:
            _check_fits(len(ids), params, max_len, context)
        root = prefix_root(tenant, params.cache_salt)
        if self.images is not None:
            self.images.check_fits(spans, min(max_len, context))
        answers = self._answers(ids, params, min(max_len, context), root)
        if tenant:
            _change_spec(answers, tenant=tenant_tag(tenant))
        if spans:
            _change_spec(answers, images=spans)
            for answer in answers:
                answer.sequence.pixels = {x.digest: x.pixels for x in pictures}
        _set_reads(answers, reads)
        if digest:
            _change_spec(answers, adapter=digest, prefix_root=adapter_root(root, digest))
        request = Request(request_id, text, params, answers, index or 0)
        if params.seed is not None:
            request.set_seed(derived_seed(params.seed, request.index))
        return request

    def _spans(
        self, name: str, ids: list[int], pictures: Sequence[Picture]
    ) -> tuple[ImageSpan, ...]:
        """Return where the images of a prompt are.

        Raises:
            ValueError: There are more or fewer tokens of images than images, or the model reads
                text alone.
        """
        positions = [i for i, token in enumerate(ids) if token == self.tokenizer.image_id]
        if pictures and self.images is None:
            raise ValueError(f"{name} has images, and the model reads text alone: leave them out")
        if len(positions) != len(pictures):
            raise ValueError(
                f"{name} has {len(pictures)} images, and {len(positions)} tokens that stand for one"
            )
        return tuple(
            ImageSpan(position, picture.digest, picture.rows, picture.columns)
            for position, picture in zip(positions, pictures, strict=True)
        )

    def _text_ids(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the token ids of a text."""
        if parse_special:
            return self.tokenizer.encode_rendered(text)
        if self.tokenizer.special_start(text) is not None:
            _warn_of_rendered_prompt()
        return self.tokenizer.encode(text, bos=True, eos=False)

    def _answers(
        self, ids: list[int], params: SamplingParams, max_len: int, root: bytes
    ) -> list[Answer]:
        """Return the answers of a request, each with a sequence of at most `max_len` tokens."""
        spec = self._spec(ids, params, max_len, root)
        rule = params.reasoning
        is_open = rule is not None and reasoning_is_open(ids, rule, self.tokenizer)
        answers = []
        for _ in range(params.best_of or params.n):
            constraint = self._constraint(params, root, is_open=is_open)
            stops = StopStrings(params.stop, params.include_stop_str_in_output)
            skip = params.skip_special_tokens
            detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=skip)
            sequence = SequenceState(spec, constraint)
            answer = Answer(sequence, params, detokenizer, stops)
            if rule is not None and reads_reasoning(params):
                answer.reader = ReasoningReader(rule, is_open=is_open)
            answers.append(answer)
            # The prompt is the same for all sequences: only the first one scores it.
            spec = replace(spec, prompt_logprobs=None)
        return answers

    def _constraint(
        self, params: SamplingParams, root: bytes, *, is_open: bool
    ) -> Constraint | None:
        """Return the constraint of one answer at its beginning, if it has one.

        Args:
            params: The sampling parameters.
            root: The root of the prefix hashes.
            is_open: Whether the prompt ends with the start mark of the reasoning.
        """
        output = params.structured_output
        assert not isinstance(output, Mapping)  # SamplingParams converts mappings
        rule = params.reasoning if params.constrains_reasoning else None
        if output is None and rule is None:
            return None
        return self.constraints.constraint(AnswerFormat(output, rule, is_open), root)

    def _spec(
        self, ids: list[int], params: SamplingParams, max_len: int, root: bytes
    ) -> SequenceSpec:
        """Return the specification of the request's sequences for the engine."""
        banned = []
        for word in params.bad_words:
            # A word is banned both at the start of a text and after a space.
            for text in (word, " " + word.lstrip()):
                ids_of_word = self.tokenizer.encode(text, bos=False, eos=False)
                banned.append(tuple(ids_of_word))
        shared = {name: getattr(params, name) for name in _SHARED_FIELDS}
        if params.best_of is not None and params.logprobs is None:
            shared["logprobs"] = 0  # the best answers are selected by their log-probabilities
        model_stops = () if params.ignore_eos else self.tokenizer.stop_tokens
        return SequenceSpec(
            tokens=tuple(ids),
            max_len=max_len,
            stop_ids=frozenset(params.stop_token_ids) | frozenset(model_stops),
            prefix_root=root,
            num_public=0 if self.public is None else self.public.count(ids),
            stays_in_memory=params.prompt_cache_retention in IN_MEMORY,
            is_constrained=params.structured_output is not None or params.constrains_reasoning,
            # Of a prediction, as much as the context can hold.
            prediction=tuple(self.tokenizer.encode_start(params.prediction, self.max_seq_len)),
            bad_words=tuple(banned),
            **shared,
        )


def _check_types(request_id: object, params: object) -> None:
    if not isinstance(request_id, str):
        raise TypeError(f"request_id={brief(request_id)} must be a string")
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")


def _max_len(num_ids: int, params: SamplingParams, context: int) -> int:
    """Return the tokens of prompt and answer together that a request asks for."""
    return context if params.max_tokens is None else num_ids + params.max_tokens


def _check_fits(num_ids: int, params: SamplingParams, max_len: int, context: int) -> None:
    if max_len > context:
        message = (
            f"{num_ids} prompt tokens and max_tokens={params.max_tokens} are more than the "
            f"context of {context} tokens: ask for fewer"
        )
        raise ContextLengthError("max_tokens", message, max_len, context)


def _check_reads(name: str, reads: Pooling | Capture | None, num_tokens: int) -> None:
    """Raise a ValueError if a mean leaves out all tokens of a prompt."""
    if isinstance(reads, Pooling) and reads.skip >= num_tokens:
        raise ValueError(
            f"{name} has {num_tokens} tokens, and the mean leaves out the first {reads.skip}: "
            "nothing is left"
        )


def _change_spec(answers: list[Answer], **changes: Any) -> None:
    """Change fields of the specification of each answer."""
    for answer in answers:
        answer.sequence.spec = replace(answer.sequence.spec, **changes)


def _set_reads(answers: list[Answer], reads: Pooling | Capture | None) -> None:
    """Store what is wanted of the hidden states of the prompt in each answer."""
    if isinstance(reads, Pooling):
        _change_spec(answers, pooling=reads)
    elif reads is not None:
        _change_spec(answers, capture=reads)


def prefix_root(tenant: bytes, cache_salt: str | None) -> bytes:
    """Return the root of the prefix hashes for a tenant and a salt.

    A salt is mixed in under the tenant: whoever sends another tenant's salt still meets only
    requests of their own.
    """
    if cache_salt is None:
        return tenant
    return hmac.digest(tenant, cache_salt.encode(errors="surrogatepass"), "sha256")


def adapter_root(root: bytes, digest: bytes) -> bytes:
    """Return the root of the prefix hashes for an adapter.

    The hash of the adapter is the key, so that no salt under a tenant gives the same root.

    Args:
        root: The root of the tenant and the salt.
        digest: The SHA-256 of the adapter.
    """
    return hmac.digest(digest, root, "sha256")


@functools.cache  # once in a process
def _warn_of_rendered_prompt() -> None:
    """Say what a prompt becomes that begins with the name of a special token."""
    # The text of a request is in no log, and its first token is a part of it.
    log.warning(
        "a prompt begins with the name of a special token, such as a header's, which is plain text "
        "in a prompt: send a dialog as messages; or, if a program rendered all of the prompt, give "
        "parse_special (this line is written once)"
    )


def _token_ids(name: str, prompt: object, max_seq_len: int, n_vocab: int, index: int) -> list[int]:
    """Check a prompt of token ids and return it as a list of ints.

    Args:
        name: The name of the prompt in errors.
        prompt: A list, tuple, array or tensor of 1 to `max_seq_len` ids.
        max_seq_len: The largest number of tokens.
        n_vocab: The size of the vocabulary.
        index: The position of the prompt in the caller's list.

    Raises:
        TypeError: The prompt is not a list of token ids.
        ValueError: The prompt is empty or too long, or contains something other than token ids.
    """
    if hasattr(prompt, "tolist"):  # an array of NumPy or a tensor of PyTorch
        prompt = prompt.tolist()
    if not isinstance(prompt, list | tuple):
        raise not_ids(name, prompt)
    if not prompt:
        raise ValueError(f"{name} has 0 tokens: give at least one, such as begin_of_text")
    if len(prompt) > max_seq_len:
        message = (
            f"{name} has {len(prompt)} tokens, but max_seq_len is {max_seq_len}: shorten the "
            "prompt, or build with a larger max_seq_len"
        )
        error = ContextLengthError("prompt", message, len(prompt), max_seq_len)
        error.index = index
        raise error
    ids: list[int] = []
    for element in prompt:
        token = element if type(element) is int else index_of(element)
        if token is None or not 0 <= token < n_vocab:
            raise ValueError(f"{name} holds {brief(element)}: token ids are 0 to {n_vocab - 1}")
        ids.append(token)
    return ids


def not_ids(name: str, prompt: object) -> TypeError:
    """Return the error for a prompt that is not a list of token ids."""
    return TypeError(
        f"{name} must be a list of token ids, got {type(prompt).__name__}: encode text with "
        "tokenizer.encode, or call text_completion"
    )
