"""A request with text, its answers, and the outputs that report them.

In: the tokens that the engine appends to the sequences of a request. Out: `RequestOutput`. An
output records only the lengths of the answers, and builds a text or a list when it is read, so that
its cost does not grow with the answer. This module does not know how requests are scheduled.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llama.engine.sequence import FinishReason
from llama.options.speculation.texts import count_predicted
from llama.requests.answer import Answer
from llama.requests.port import Group, set_seeds
from llama.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

NO_TOKEN = (
    "there was no token to choose: logit_bias, bad_words, min_tokens and structured_output ban the "
    "whole vocabulary, or the model's logits hold NaN or infinity"
)
NOT_FINITE = "the model's hidden states hold NaN or infinity"
FORMAT_STOPPED = "structured_output is too large to go on with ({why}): ask for a simpler format"


@dataclass(frozen=True)
class Usage:
    """Token counts of one request.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Tokens of all answers.
        cached_tokens: Prompt tokens that the prefix cache provided.
        draft_tokens: Tokens that speculative decoding drafted. The two counts of speculative
            decoding are excluded from comparisons, because answers do not depend on them.
        accepted_tokens: Draft tokens that were accepted.
        reasoning_tokens: Tokens of the reasoning in all answers, with its marks.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int = field(default=0, compare=False)
    accepted_tokens: int = field(default=0, compare=False)
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Return the number of tokens of the prompt and the answers."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def counts(self) -> dict[str, int]:
        """Return the counts that OpenAI's objects have, by their names there."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
        }


class CompletionOutput:
    """One answer of a request at the time of an output.

    Attributes:
        index: The index of the answer within the request.
        finish_reason: Why the answer ended, or None if it has not ended.
        stop_reason: The stop string or the stop token id that ended the answer, if one did.
        cumulative_logprob: The sum of the log-probabilities of the tokens; None if they were not
            requested.
        decode_s: Seconds from the first token to the latest.
        num_reasoning_tokens: The number of tokens of its reasoning, with the marks.
    """

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
        self._num_earlier_pieces = answer.num_taken
        self._num_pieces = len(answer.pieces)
        answer.num_taken = self._num_pieces
        self.num_reasoning_tokens = answer.num_reasoning
        self._reasoning_pieces = [] if answer.reader is None else answer.reader.pieces
        self._num_earlier_reasoning_pieces = answer.num_reasoning_taken
        self._num_reasoning_pieces = len(self._reasoning_pieces)
        answer.num_reasoning_taken = self._num_reasoning_pieces

    @property
    def reasoning(self) -> str:
        """Return the whole reasoning before the text, without its marks."""
        return "".join(self._reasoning_pieces[: self._num_reasoning_pieces])

    @property
    def new_reasoning(self) -> str:
        """Return the reasoning since the previous output of the request."""
        new = slice(self._num_earlier_reasoning_pieces, self._num_reasoning_pieces)
        return "".join(self._reasoning_pieces[new])

    @property
    def text(self) -> str:
        """Return the whole text of the answer, without its reasoning."""
        return "".join(self._answer.pieces[: self._num_pieces])

    @property
    def new_text(self) -> str:
        """Return the text since the previous output of the request."""
        return "".join(self._answer.pieces[self._num_earlier_pieces : self._num_pieces])

    @property
    def token_ids(self) -> list[int]:
        """Return the token ids of the answer, without a stop token."""
        seq = self._answer.sequence
        return seq.tokens[seq.num_prompt : seq.num_prompt + self._num_tokens]

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        """Return one dict per token, from ids to log-probabilities; None if not requested.

        Each dict has the token itself first, followed by the most probable tokens.
        """
        return self.logprobs_of(self.token_ids)

    def new_scores(self, first: int) -> list[tuple[int, dict[int, float]]]:
        """Return the tokens from index `first` on, each with its entry of `logprobs`.

        The cost does not grow with the tokens before them.
        """
        seq = self._answer.sequence
        start = seq.num_prompt
        new = slice(first, self._num_tokens)
        ids = seq.tokens[start + first : start + self._num_tokens]
        return list(zip(ids, _dicts(ids, seq.logprobs[new], seq.top_logprobs[new]), strict=True))

    def logprobs_of(self, ids: list[int]) -> list[dict[int, float]] | None:
        """Return `logprobs` for `ids`: its `token_ids`, with or without the stop token."""
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
    """All answers of one request at the time of an output.

    Attributes:
        request_id: The name of the request; empty if it has none.
        index: The position of a request without a name in the caller's list.
        prompt: The text of the prompt; None if token ids were given.
        finished: Whether this is the last output of the request.
        outputs: The answers.
        error: The reason why an answer has the finish_reason "error", if one has.
        error_field: The parameter that caused the error, if one did.
        has_reasoning: Whether the reasoning is apart from the text, and counted.
    """

    def __init__(self, request: "Request") -> None:
        self.request_id = request.request_id
        self.index = request.index
        self.prompt = request.prompt
        self.finished = request.finished
        self.outputs = [
            CompletionOutput(i, answer) for i, answer in enumerate(request.returned_answers())
        ]
        self._first = request.answers[0].sequence
        self.has_reasoning = request.answers[0].reader is not None
        self.error: str | None = None
        self.error_field: str | None = None
        for answer in request.answers:
            seq = answer.sequence
            if answer.finish_reason == "error" and self.error_field is None:
                self.error = NO_TOKEN if seq.spec.pooling is None else NOT_FINITE
                if seq.constraint is not None and seq.constraint.failure:
                    self.error = FORMAT_STOPPED.format(why=seq.constraint.failure)
                    self.error_field = "structured_output"
        # The counts of each answer, also of those that are not returned.
        self._counts = [
            (
                answer.num_read,
                answer.sequence.num_drafted,
                answer.sequence.num_accepted,
                answer.num_reasoning,
            )
            for answer in request.answers
        ]

    @cached_property
    def usage(self) -> Usage:
        """The token counts."""
        completion, draft, accepted, reasoning = map(sum, zip(*self._counts, strict=True))
        return Usage(
            prompt_tokens=self._first.num_prompt,
            completion_tokens=completion,
            cached_tokens=self._first.num_cached,
            draft_tokens=draft,
            accepted_tokens=accepted,
            reasoning_tokens=reasoning,
        )

    def num_predicted(self) -> tuple[int, int]:
        """Return how many tokens of the request's prediction its answers had, and how many not."""
        prediction = self._first.spec.prediction
        return count_predicted(prediction, (answer.token_ids for answer in self.outputs))

    @property
    def prompt_token_ids(self) -> list[int]:
        """Return the token ids of the prompt."""
        return self._first.tokens[: self._first.num_prompt]

    @property
    def prompt_logprobs(self) -> list[dict[int, float] | None] | None:
        """Return one dict per prompt token, as in `CompletionOutput.logprobs`.

        The first is None, because no token precedes the first one, and so are those of images,
        which no model predicts.
        """
        seq = self._first
        if seq.spec.prompt_logprobs is None:
            return None
        scored = seq.tokens[1 : seq.num_prompt]
        dicts: list[dict[int, float] | None] = [None]
        dicts += _dicts(scored, seq.prompt_logprobs[1:], seq.prompt_top_logprobs[1:])
        for image in seq.spec.images:
            dicts[image.position] = None
        return dicts

    @property
    def pooled(self) -> "np.ndarray | None":
        """Return the vector of the prompt, (E) float32; None if it was not requested."""
        return self._first.pooled if self.finished else None

    @property
    def captured(self) -> dict[int, list[Any]]:
        """Return the hidden states of the prompt by their numbers, in parts of (N, E) each."""
        return self._first.captured if self.finished else {}

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id!r}, finished={self.finished}, "
            f"usage={self.usage}, outputs={self.outputs})"
        )


@dataclass(eq=False)
class Request:
    """A checked request with its sequences, created by `Preparer.prepare`.

    Attributes:
        request_id: The name of the request; empty if it has none.
        prompt: The text of the prompt; None if token ids were given.
        params: The sampling parameters.
        answers: The sequences with their text.
        index: The position of the request in the caller's list.
        listener: Called when the request has an output. The engine holds its lock meanwhile, so
            the function must be fast and must not call the engine. If it is None,
            `LLMEngine.submit` sets it, and `LLMEngine.step` reports the outputs.
        has_output: Whether an output can be taken.
        exception: The exception of the failed step that ended the request.
        seed: The seed of the first answer; None until it is set with `set_seed`.
        is_final_only: Whether only the output of its end is announced.
        make_output: Makes what `take_output` returns; another one is for clients of another API.
    """

    request_id: str
    prompt: str | None
    params: SamplingParams
    answers: list[Answer]
    index: int = 0
    listener: Callable[[], object] | None = None
    has_output: bool = False
    exception: BaseException | None = None
    seed: int | None = None
    is_final_only: bool = False
    make_output: Callable[["Request"], Any] = RequestOutput

    @property
    def finished(self) -> bool:
        """Return whether all answers have ended."""
        return None not in [answer.finish_reason for answer in self.answers]

    @property
    def is_best_of(self) -> bool:
        """Return whether more answers are generated than returned.

        The returned ones are known only when all have ended.
        """
        return len(self.answers) > self.params.n

    def returned_answers(self) -> list[Answer]:
        """Return the answers to report: all of them, or the `n` best of `best_of`."""
        if not self.is_best_of:
            return self.answers
        best = sorted(self.answers, key=lambda answer: -answer.cumulative_logprob)
        return best[: self.params.n]

    def fingerprint(self) -> tuple[object, ...]:
        """Return the data that must be equal on every rank."""
        first = self.answers[0].sequence
        spec = first.spec
        asked = (spec.max_len, spec.pooling, spec.capture, spec.adapter, spec.images)
        return self.request_id, first.tokens, *asked, self.seed, self.params

    def set_seed(self, seed: int) -> None:
        """Set the seed of the first answer, and of the others the seeds derived from it."""
        self.seed = seed
        set_seeds(self.group().sequences, seed)

    def group(self) -> Group:
        """Return the sequences of the request, for a port."""
        return Group([answer.sequence for answer in self.answers], self.seed)

    def set_sender(self, sender: bytes) -> None:
        """Set whoever sent the request; scheduling is fair across senders."""
        for answer in self.answers:
            answer.sequence.spec = replace(answer.sequence.spec, sender=sender)

    def note_output(self) -> None:
        """Record that an answer has new tokens or has ended, and call the listener."""
        if self.finished or not (self.is_best_of or self.is_final_only):
            self.has_output = True
            if self.listener is not None:
                self.listener()

    def end(self, reason: FinishReason) -> None:
        """End all unfinished answers with this finish_reason."""
        for answer in self.answers:
            answer.finish_reason = answer.finish_reason or reason
        self.note_output()

    def take_output(self) -> RequestOutput:
        """Return the current output, or raise the exception of the step that failed."""
        if self.exception is not None:
            raise self.exception
        self.has_output = False
        output: RequestOutput = self.make_output(self)
        return output


def _dicts(
    tokens: Iterable[int], logprobs: Iterable[float], tops: Iterable[list[tuple[int, float]]]
) -> Iterator[dict[int, float]]:
    """Yield a dict per token: its own entry, then the top ones; the shortest input ends them."""
    for token, logprob, top in zip(tokens, logprobs, tops, strict=False):
        yield {token: logprob, **dict(top)}
