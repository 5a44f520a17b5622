"""One request with text, and what it has come to: sequences below it, outputs of it.

In: the tokens that its sequences got. Out: `RequestOutput`, cheap to make at any length: an output
remembers how far the answers had come, and builds a text or a list only when that is read.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from llama.engine.sequence import SequenceState
from llama.requests.detokenizer import Detokenizer, StopStrings
from llama.sampling_params import SamplingParams

NO_TOKEN = (
    "there was no token to choose: logit_bias, bad_words, min_tokens and structured_output ban the "
    "whole vocabulary, or the model's logits hold NaN or infinity"
)
FORM_STOPPED = "structured_output is too large to go on with ({why}): ask for a simpler form"


@dataclass(frozen=True)
class Usage:
    """Tokens of one request. Answers do not depend on the last two, which do not compare."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, computed for an earlier request
    draft_tokens: int = field(default=0, compare=False)  # guesses of the next token
    accepted_tokens: int = field(default=0, compare=False)  # those that were right

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(eq=False)
class Answer:
    """A sequence and its text. Text is emitted once no stop string can begin in it any more."""

    sequence: SequenceState
    params: SamplingParams
    detokenizer: Detokenizer
    stops: StopStrings
    pieces: list[str] = field(default_factory=list)  # of text, in order
    num_read: int = 0  # output tokens that are decoded
    num_taken: int = 0  # pieces that an output has carried
    first_token_ts: float = 0.0  # when its first token was read, by time.monotonic; 0: not yet
    last_token_ts: float = 0.0
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None  # None, "stop", "length", "abort" or "error"
    stop_reason: str | int | None = None  # the string or the id that stopped it

    def read(self) -> None:
        """Decode the new tokens; a stop string ends the answer, whose text ends before it."""
        seq = self.sequence
        if self.num_read < seq.num_output:
            self.last_token_ts = time.monotonic()
            self.first_token_ts = self.first_token_ts or self.last_token_ts
        while self.num_read < seq.num_output and self.stop_reason is None:
            if seq.logprobs:
                self.cumulative_logprob += seq.logprobs[self.num_read]
            token = seq.tokens[seq.num_prompt + self.num_read]
            self.num_read += 1
            self._push(self.detokenizer.push([token]), self.num_read > self.params.min_tokens)
        if seq.finished and self.stop_reason is None:
            rest = ""
            if seq.stop_id is not None and self.params.include_stop_str_in_output:
                rest = self.detokenizer.push([seq.stop_id])
            self._push(rest + self.detokenizer.flush(), True)
            self._push(self.stops.flush(), False)
        if self.stop_reason is not None:
            self.finish_reason = "stop"
        elif seq.finished:
            self.finish_reason, self.stop_reason = seq.finish_reason, seq.stop_id

    def _push(self, text: str, may_stop: bool) -> None:
        if may_stop:
            text, self.stop_reason = self.stops.push(text)
        if text:
            self.pieces.append(text)


class CompletionOutput:
    """One answer so far. index: its place among those of the request. new_text: what came since the
    request's last output. token_ids: without a stop token. logprobs: one dict per token, id ->
    log-probability, of the token itself and of the likeliest. finish_reason, stop_reason: as of
    `Answer`. decode_s: seconds from its first token to its latest."""

    def __init__(self, index: int, answer: Answer) -> None:
        self.index = index
        self.finish_reason = answer.finish_reason
        self.stop_reason = answer.stop_reason
        self.cumulative_logprob = (
            None if answer.params.logprobs is None else answer.cumulative_logprob
        )
        self._answer = answer
        self.decode_s = answer.last_token_ts - answer.first_token_ts
        self._num_tokens = answer.num_read
        self._taken, answer.num_taken = answer.num_taken, len(answer.pieces)
        self._num_pieces = len(answer.pieces)

    @property
    def text(self) -> str:
        return "".join(self._answer.pieces[: self._num_pieces])

    @property
    def new_text(self) -> str:
        return "".join(self._answer.pieces[self._taken : self._num_pieces])

    @property
    def token_ids(self) -> list[int]:
        seq = self._answer.sequence
        return seq.tokens[seq.num_prompt : seq.num_prompt + self._num_tokens]

    def num_predicted(self) -> tuple[int, int]:
        """Of the tokens of the request's prediction, those that came, and those that did not."""
        from llama.engine.lookup import count_predicted  # and torch: clients do without

        return count_predicted(self._answer.sequence.spec.prediction, self.token_ids)

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        return self.logprobs_of(self.token_ids)

    def logprobs_of(self, ids: list[int]) -> list[dict[int, float]] | None:
        """`logprobs` of its token_ids, or of these with the id that stopped it."""
        if self._answer.params.logprobs is None:
            return None
        seq = self._answer.sequence
        return list(_dicts(ids, seq.logprobs, seq.top_logprobs))

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, "
            f"token_ids={self.token_ids}, finish_reason={self.finish_reason!r}, "
            f"stop_reason={self.stop_reason!r})"
        )


class RequestOutput:
    """All answers of one request so far; `finished` is true of the last output. index: its place in
    the caller's list, where it has no request_id. error: why an answer ended with finish_reason
    "error"; error_field: the parameter at fault, if one was. prompt_logprobs: one dict per prompt
    token; the first is None: nothing comes before it."""

    def __init__(self, request: "Request") -> None:
        self.request_id = request.request_id
        self.index = request.index
        self.prompt = request.prompt
        self.finished = request.finished
        self.outputs = [
            CompletionOutput(i, answer) for i, answer in enumerate(request.returned_answers())
        ]
        self._first = request.answers[0].sequence
        self.error: str | None = None
        self.error_field: str | None = None
        for answer in request.answers:
            seq = answer.sequence
            if answer.finish_reason == "error" and self.error_field is None:
                self.error = NO_TOKEN
                if seq.constraint is not None and seq.constraint.failure:
                    self.error = FORM_STOPPED.format(why=seq.constraint.failure)
                    self.error_field = "structured_output"
        self.usage = Usage(
            prompt_tokens=self._first.num_prompt,
            completion_tokens=sum(answer.num_read for answer in request.answers),
            cached_tokens=self._first.num_cached,
            draft_tokens=sum(answer.sequence.num_drafted for answer in request.answers),
            accepted_tokens=sum(answer.sequence.num_accepted for answer in request.answers),
        )

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._first.tokens[: self._first.num_prompt]

    @property
    def prompt_logprobs(self) -> list[dict[int, float] | None] | None:
        seq = self._first
        if seq.spec.prompt_logprobs is None:
            return None
        scored = seq.tokens[1 : seq.num_prompt]
        return [None, *_dicts(scored, seq.prompt_logprobs[1:], seq.prompt_top_logprobs[1:])]

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id!r}, finished={self.finished}, "
            f"usage={self.usage}, outputs={self.outputs})"
        )


@dataclass(eq=False)
class Request:
    """A checked request with its sequences, from `Preparer.prepare`. listener: called when it has
    an output, within the engine's lock: it must be quick and must not call the engine. Where
    `submit` finds none, it is that of `LLMEngine.step`."""

    request_id: str
    prompt: str | None
    params: SamplingParams
    answers: list[Answer]
    index: int = 0
    listener: Callable[[], object] | None = None
    has_output: bool = False
    exception: BaseException | None = None  # of the step that failed for all
    seed: int | None = None  # given with it, or derived when it is submitted; see `set_seed`

    @property
    def finished(self) -> bool:
        return None not in [answer.finish_reason for answer in self.answers]

    @property
    def is_best_of(self) -> bool:
        """More answers are generated than returned: only the end tells which."""
        return len(self.answers) > self.params.n

    def returned_answers(self) -> list[Answer]:
        if not self.is_best_of:
            return self.answers
        best = sorted(self.answers, key=lambda answer: -answer.cumulative_logprob)
        return best[: self.params.n]

    def fingerprint(self) -> tuple[object, ...]:
        """What must be the same on every rank."""
        first = self.answers[0].sequence
        return self.request_id, first.tokens, first.spec.max_len, self.seed, self.params

    def set_seed(self, seed: int) -> None:
        """Its first answer draws from this seed itself, the others from seeds derived from it."""
        self.seed = seed
        for place, answer in enumerate(self.answers):
            seq = answer.sequence
            seq.spec = replace(seq.spec, seed=derived_seed(seed, place))

    def set_call(self, call: int) -> None:
        """Set the number of the call that it belongs to, when it is queued."""
        for answer in self.answers:
            answer.sequence.spec = replace(answer.sequence.spec, call=call)

    def note_output(self) -> None:
        """An answer has new tokens or has ended."""
        if self.finished or not self.is_best_of:
            self.has_output = True
            if self.listener is not None:
                self.listener()

    def end(self, reason: str) -> None:
        """End every answer that goes on."""
        for answer in self.answers:
            answer.finish_reason = answer.finish_reason or reason
        self.note_output()

    def take_output(self) -> RequestOutput:
        """The output now due; an exception of the step that failed is raised instead."""
        if self.exception is not None:
            raise self.exception
        self.has_output = False
        return RequestOutput(self)


def derived_seed(seed: int, number: int, *, of: str = "place") -> int:
    """`seed` itself for number 0, else one far from it: 63 bits of a SHA-256. number: the place of
    a prompt in its call, of an answer in its request; or of="call", of a call without a seed."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {of} {number}".encode()).digest()[:8]) >> 1


def _dicts(
    tokens: Iterable[int], own: Iterable[float], tops: Iterable[list[tuple[int, float]]]
) -> Iterator[dict[int, float]]:
    """The token's own entry first, then the likeliest; the shortest list ends it."""
    for token, logprob, top in zip(tokens, own, tops, strict=False):
        yield {token: logprob, **dict(top)}
