"""Requests with text, in the shape that vLLM's users know: add_request, step, outputs.

In: prompts as text or ids, each with its SamplingParams, at any time. Out: a RequestOutput for
each request that moved. It turns ids to text as they come, looks for stop strings, and fans one
request out into n sequences; which tokens are computed when is the business of the engine below.
"""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from llama.engine.core import EngineCore
from llama.engine.sequence import Sequence
from llama.parallel import ModelParallel
from llama.requests.detokenizer import Detokenizer, StopStrings
from llama.sampling_params import SamplingParams
from llama.tokenizer import Tokenizer


@dataclass(frozen=True)
class Usage:
    """Tokens of one request; cached ones are prompt tokens that an earlier request had computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class CompletionOutput:
    """One answer so far. `new_text` is what came since the request's last output.

    logprobs: one dict a token, id -> log-probability, of the token itself and of the likeliest.
    finish_reason: None, "stop", "length" or "abort"; stop_reason: the string or id that stopped it.
    """

    index: int
    text: str
    new_text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True)
class RequestOutput:
    """All answers of one request so far; prompt_logprobs[0] is None, as nothing comes before."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, float] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    usage: Usage


@dataclass(eq=False)
class _Answer:
    """A sequence and its text. Text is emitted once no stop string can begin in it any more."""

    index: int
    sequence: Sequence
    decoder: Detokenizer
    stops: StopStrings
    text: str = ""
    num_read: int = 0  # output tokens that are decoded
    num_told: int = 0  # characters that an output has carried
    stop_string: str | None = None

    def read(self) -> bool:
        """Decode the new tokens. True if a stop string was completed: the text ends before it."""
        seq = self.sequence
        while self.num_read < seq.num_output and self.stop_string is None:
            token = seq.tokens[seq.num_prompt + self.num_read]
            self.num_read += 1
            self._take(self.decoder.push([token]), check=self.num_read > seq.params.min_tokens)
        if seq.finished and self.stop_string is None:
            rest = ""
            if seq.stop_id is not None and seq.params.include_stop_str_in_output:
                rest = self.decoder.push([seq.stop_id])
            self._take(rest + self.decoder.flush(), check=True)
            self.text += self.stops.flush()
        return self.stop_string is not None

    def _take(self, text: str, *, check: bool) -> None:
        if not check:
            self.text += text
            return
        emitted, self.stop_string = self.stops.push(text)
        self.text += emitted

    @property
    def cumulative_logprob(self) -> float:
        return sum(self.sequence.logprobs)

    def output(self, index: int, tell_logprobs: bool) -> CompletionOutput:
        seq, told = self.sequence, self.num_told
        self.num_told = len(self.text)
        return CompletionOutput(
            index=index,
            text=self.text,
            new_text=self.text[told:],
            token_ids=seq.output,
            logprobs=_token_logprobs(seq) if tell_logprobs else None,
            cumulative_logprob=self.cumulative_logprob if tell_logprobs else None,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_id if self.stop_string is None else self.stop_string,
        )


@dataclass(eq=False)
class Request:
    """A checked request with its sequences, from `LLMEngine.prepare`, for `LLMEngine.submit`."""

    request_id: str
    prompt: str | None
    params: SamplingParams
    answers: list[_Answer] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(answer.sequence.finished for answer in self.answers)

    @property
    def chooses(self) -> bool:
        """More answers are generated than returned: which, is known at the end only."""
        return len(self.answers) > self.params.n

    def output(self) -> RequestOutput:
        first = self.answers[0].sequence
        told = self.answers
        if self.chooses:
            best = sorted(told, key=lambda answer: -answer.cumulative_logprob)
            told = best[: self.params.n]
        tell_logprobs = self.params.logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.tokens[: first.num_prompt],
            prompt_logprobs=_prompt_logprobs(first),
            outputs=[answer.output(i, tell_logprobs) for i, answer in enumerate(told)],
            finished=self.finished,
            usage=Usage(
                prompt_tokens=first.num_prompt,
                completion_tokens=sum(answer.sequence.num_output for answer in self.answers),
                cached_tokens=first.num_cached,
            ),
        )


class LLMEngine:
    """Requests of one model. Under torchrun, every rank makes the same calls in the same order."""

    def __init__(
        self,
        engine: EngineCore,
        tokenizer: Tokenizer,
        *,
        max_seq_len: int,
        seed: int,
        parallel: ModelParallel,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.seed = seed
        self.parallel = parallel
        self._requests: dict[str, Request] = {}
        self._owner: dict[Sequence, tuple[Request, _Answer]] = {}
        self._moved: dict[Request, None] = {}  # in order; an output of each is due
        self._news: list[object] = []  # calls since the last step, to be compared across ranks

    def add_request(
        self, request_id: str, prompt: str | list[int], params: SamplingParams | None = None
    ) -> None:
        """Queue a prompt: text (begin_of_text is put before it) or token ids.

        ValueError or TypeError, before anything is queued: an id in use, an empty or too long
        prompt, an id beyond the vocabulary.
        """
        request = self.prepare(request_id, prompt, params or SamplingParams())
        self.submit(request)

    def prepare(self, request_id: str, prompt: str | list[int], params: SamplingParams) -> Request:
        """Check a request and make its sequences; nothing is queued, no state is touched."""
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id={request_id!r} must be a string that is not empty")
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id!r} is in use by a request not yet finished")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params is {type(params).__name__}, where SamplingParams belongs")
        tokens = self._tokens(prompt)
        banned = (*params.bad_words_ids, *self._bad_words(params))
        params = replace(params, bad_words_ids=banned)
        params.check_vocab(self.tokenizer.n_words)
        request = Request(request_id, prompt if isinstance(prompt, str) else None, params)
        for index in range(params.best_of or params.n):
            sequence = self._sequence(tokens, params, index)
            decoder = Detokenizer(self.tokenizer)
            stops = StopStrings(params.stop, params.include_stop_str_in_output)
            request.answers.append(_Answer(index, sequence, decoder, stops))
        return request

    def submit(self, request: Request) -> None:
        """Queue what `prepare` made."""
        if request.request_id in self._requests:
            raise ValueError(f"request_id={request.request_id!r} is in use")
        first = request.answers[0].sequence
        self._note("add", request.request_id, first.tokens[:], first.limit, request.params)
        self._requests[request.request_id] = request
        for answer in request.answers:
            self._owner[answer.sequence] = (request, answer)
            self.engine.add(answer.sequence)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now, free its pages, and return what it came to; None if unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._note("abort", request_id)
        for answer in request.answers:
            self.engine.abort(answer.sequence)
        self._forget(request)
        return request.output()

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def step(self, request_ids: Collection[str] | None = None) -> list[RequestOutput]:
        """An output for each request (of `request_ids`, if given) that moved since its last one.

        If none has moved, the model is run once. With best_of > n a request is heard of at its end
        only. If the ranks of a group differ in the requests they were given, every rank gets a
        ValueError, and all requests are aborted.
        """
        if not self._pending(request_ids) and self._requests:
            self._agree()
            self.advance()
        outputs = []
        for request in self._pending(request_ids):
            del self._moved[request]
            if request.finished:
                self._forget(request)
            if request.finished or not request.chooses:
                outputs.append(request.output())
        return outputs

    def advance(self) -> None:
        """Run the model once, for whatever the engine holds, and read the requests that moved."""
        try:
            for seq in self.engine.step():
                if seq in self._owner:
                    self._read(seq)
        except BaseException:
            self.abort_all()
            raise

    def _agree(self) -> None:
        try:
            with self.parallel.agree("the requests") as must_match:
                must_match += self._news
                self._news = []
        except BaseException:
            self.abort_all()
            raise

    def _pending(self, request_ids: Collection[str] | None) -> list[Request]:
        moved = self._moved
        return [r for r in moved if request_ids is None or r.request_id in request_ids]

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort_request(request_id)
        self._news.clear()

    def _read(self, seq: Sequence) -> None:
        request, answer = self._owner[seq]
        if answer.read():
            self.engine.abort(seq, "stop")  # does nothing if this token was its last anyway
            seq.finish_reason = "stop"
        self._moved[request] = None

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._moved.pop(request, None)
        for answer in request.answers:
            del self._owner[answer.sequence]

    def _note(self, *news: object) -> None:
        if self.parallel.size > 1:
            self._news.append(news)

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, bos=True, eos=False)
        check_prompt("the prompt", prompt, self.max_seq_len, self.tokenizer.n_words)
        return list(prompt)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it stands at the start of a text, and after a space."""
        encode = self.tokenizer.encode
        spellings = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        return tuple(tuple(encode(text, bos=False, eos=False)) for text in spellings)

    def _sequence(self, tokens: list[int], params: SamplingParams, index: int) -> Sequence:
        count = self.max_seq_len if params.max_tokens is None else params.max_tokens
        if params.best_of is not None and params.logprobs is None:
            params = replace(params, logprobs=0)  # to choose by
        if index:
            params = replace(params, prompt_logprobs=None)  # the first sequence scores it for all
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= set(self.tokenizer.stop_tokens)
        return Sequence(
            tokens=list(tokens),
            params=params,
            limit=min(self.max_seq_len, len(tokens) + count),
            seed=answer_seed(self.seed if params.seed is None else params.seed, index),
            stop_ids=frozenset(stop_ids),
        )


def answer_seed(seed: int, index: int) -> int:
    """The seed of the index-th answer of a request: its own for the first, far apart otherwise."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8]) >> 1


def check_prompt(name: str, prompt: object, longest: int, n_vocab: int) -> None:
    """TypeError or ValueError, naming the prompt, unless it is 1 to `longest` ids below n_vocab."""
    if not isinstance(prompt, list | tuple):
        raise TypeError(
            f"{name} is {type(prompt).__name__}, not a list of token ids: encode text with "
            "tokenizer.encode, or call text_completion"
        )
    if not 0 < len(prompt) <= longest:
        raise ValueError(
            f"{name} has {len(prompt)} tokens, where 1 to max_seq_len={longest} can be"
        )
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < n_vocab:
            raise ValueError(f"{name} holds {token!r}, where token ids are 0 to {n_vocab - 1}")


def _token_logprobs(seq: Sequence) -> list[dict[int, float]]:
    return _dicts(seq.output, seq.logprobs, seq.top_logprobs)


def _prompt_logprobs(seq: Sequence) -> list[dict[int, float] | None] | None:
    if seq.params.prompt_logprobs is None:
        return None
    scored = seq.tokens[1 : seq.num_prompt]
    return [None, *_dicts(scored, seq.prompt_logprobs[1:], seq.prompt_top_logprobs[1:])]


def _dicts(
    tokens: Iterable[int], own: Iterable[float], tops: Iterable[list[tuple[int, float]]]
) -> list[dict[int, float]]:
    """The token's own entry first, then the likeliest; the shortest list ends it."""
    return [
        {token: logprob, **dict(top)}
        for token, logprob, top in zip(tokens, own, tops, strict=False)
    ]
