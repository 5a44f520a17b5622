"""A request whose outputs have vLLM's fields, types and meanings.

The engine asks each request for its outputs, which a `VllmRequest` makes in vLLM's format.
"""

from dataclasses import dataclass, field

from llama import api
from llama.api import Beam
from llama.compat.vllm.vllm_params import RequestOutputKind, SamplingParams
from llama.tokenizer import Tokenizer


@dataclass
class Logprob:
    """The log-probability of a token.

    Attributes:
        logprob: The natural logarithm of the model's probability.
        rank: 1 for the most likely token; None for a token beyond those that were asked for.
        decoded_token: The text of the token.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


_Position = dict[int, Logprob]  # token id -> log-probability


@dataclass
class CompletionOutput:
    """One answer.

    Attributes:
        index: The index of the answer in its request.
        text: The text, or with DELTA the new text.
        token_ids: The tokens, including the one that stopped the answer, whose text is left out.
        cumulative_logprob: The sum of the log-probabilities of the tokens.
        logprobs: For each token, the log-probabilities of it and of the most likely tokens.
        finish_reason: None, "stop", "length", "abort" or "error".
        stop_reason: The stop string or stop id of the request that ended the answer; None for one
            of the model's own stop tokens; the error message if the finish_reason is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[_Position] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Return whether the answer is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The answers of one request.

    `metrics` is always None, as vLLM's is if statistics are disabled.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[_Position | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: None = None
    num_cached_tokens: int | None = None


@dataclass
class BeamSearchSequence:
    """One beam.

    Attributes:
        tokens: The tokens of prompt and answer.
        cum_logprob: The sum of the log-probabilities, with that of the token that stopped the beam.
        text: The text of prompt and answer.
        finish_reason: "stop" or "length".
    """

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str | None


@dataclass
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(eq=False, kw_only=True)
class VllmRequest:
    """A request of a client of vLLM: what makes its outputs.

    Attributes:
        request: The engine's request, which has not been submitted. Its outputs become vLLM's.
        params: The parameters, with vLLM's own fields.
        name: The client's request_id. The engine knows the requests of `LLM` by their index.
        prompt: The text of the prompt, if the client gave one.
        tokenizer: The tokenizer, for the texts of tokens in `Logprob`.
    """

    request: api.Request
    params: SamplingParams
    name: str
    prompt: str | None
    tokenizer: Tokenizer
    # With DELTA: the number of tokens that have been reported, by index of the answer.
    _num_reported: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the engine announce and make the outputs that the client asked for."""
        self.request.is_final_only = self.params.output_kind is RequestOutputKind.FINAL_ONLY
        self.request.make_output = self.output

    def output(self, request: api.Request) -> RequestOutput:
        """Return the output that is due, in vLLM's format."""
        output = api.RequestOutput(request)
        prompt_logprobs = None
        scores = output.prompt_logprobs
        if scores is not None and not self._num_reported:
            count = self.params.prompt_logprobs
            prompt_logprobs = [None if x is None else self._position(x, count) for x in scores]
        return RequestOutput(
            self.name,
            self.prompt,
            output.prompt_token_ids,
            prompt_logprobs,
            [self._answer(answer, output.error) for answer in output.outputs],
            output.finished,
            num_cached_tokens=output.usage.cached_tokens,
        )

    def beam_search_output(self, beams: list[Beam]) -> BeamSearchOutput:
        """Return the beams of a search that had this request as its prompt."""
        prompt = self.request.answers[0].sequence.tokens
        sequences = []
        for beam in beams:
            ids = prompt + beam.tokens
            text = self.tokenizer.decode(ids, skip_special_tokens=self.params.skip_special_tokens)
            sequences.append(BeamSearchSequence(ids, beam.logprob, text, beam.finish_reason))
        return BeamSearchOutput(sequences)

    def _answer(self, answer: api.CompletionOutput, error: str | None) -> CompletionOutput:
        """Return an answer in vLLM's format, where the token that stopped it is one of its tokens.

        Args:
            answer: The answer as the engine reports it.
            error: The error message of the request.
        """
        reason = answer.stop_reason
        stop_ids = [reason] if isinstance(reason, int) else []
        ids = answer.token_ids + stop_ids
        logprobs = answer.logprobs_of(ids)
        cumulative = answer.cumulative_logprob
        if logprobs is not None and cumulative is not None:
            cumulative += sum(logprobs[-1][stop_id] for stop_id in stop_ids)
        if reason in stop_ids and reason not in self.params.stop_token_ids:
            reason = None
        text = answer.text
        first = 0
        if self.params.output_kind is RequestOutputKind.DELTA:
            text = answer.new_text
            first = self._num_reported.get(answer.index, 0)
            self._num_reported[answer.index] = len(ids)
        positions = None
        if logprobs is not None:
            count = self.params.logprobs
            positions = [self._position(entry, count) for entry in logprobs[first:]]
        return CompletionOutput(
            answer.index,
            text if self.params.detokenize else "",
            ids[first:],
            cumulative,
            positions,
            answer.finish_reason,
            error if answer.finish_reason == "error" else reason,
        )

    def _position(self, logprobs: dict[int, float], count: int | None) -> _Position:
        """Return the log-probabilities of one position, the token's own entry first.

        Args:
            logprobs: The log-probabilities by token id.
            count: How many of the most likely tokens were asked for.
        """
        ordered = sorted(logprobs, key=lambda token: -logprobs[token])
        ranks = {token: i for i, token in enumerate(ordered, start=1) if i <= (count or 0)}
        return {
            token: Logprob(logprob, ranks.get(token), self.tokenizer.decode([token]))
            for token, logprob in logprobs.items()
        }
