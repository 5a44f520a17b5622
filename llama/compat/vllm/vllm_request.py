"""A request whose outputs have vLLM's fields, types and meanings.

The engine asks the request for its output, which is vLLM's `RequestOutput` then.
"""

from dataclasses import dataclass, field

from llama.compat.vllm.vllm_params import RequestOutputKind, SamplingParams
from llama.requests import request as engine
from llama.requests.beam_search import Beam
from llama.tokenizer import Tokenizer


@dataclass
class Logprob:
    """Natural, of the model. rank: 1 is the likeliest; None of a token beyond those asked for."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


_Position = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One answer. token_ids: with the id that stopped it, whose text is left out. finish_reason:
    None, "stop", "length", "abort" or "error". stop_reason: the string or the id of the request
    that stopped it; None for a stop token of the model's own; what went wrong, after "error"."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[_Position] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The answers of one request. metrics: always None; vLLM's is None too without statistics."""

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
    """A beam: tokens and text with the prompt's; the token that stopped it is in cum_logprob."""

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str | None


@dataclass
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(eq=False, kw_only=True)
class VllmRequest(engine.Request):
    """A request as vLLM's clients see it."""

    name: str  # its request_id there; the engine knows those of LLM by their index
    params: SamplingParams
    tokenizer: Tokenizer
    _num_sent: dict[int, int] = field(default_factory=dict)  # of DELTA: tokens, per answer

    def note_output(self) -> None:
        if self.finished or self.params.output_kind is not RequestOutputKind.FINAL_ONLY:
            super().note_output()

    def take_output(self) -> RequestOutput:  # type: ignore[override]
        output = super().take_output()
        scores, count = output.prompt_logprobs, self.params.prompt_logprobs
        return RequestOutput(
            self.name,
            self.prompt,
            output.prompt_token_ids,
            None
            if scores is None or self._num_sent
            else [None if x is None else self._position(x, count) for x in scores],
            [self._answer(answer, output.error) for answer in output.outputs],
            output.finished,
            num_cached_tokens=output.usage.cached_tokens,
        )

    def of_beams(self, beams: list[Beam]) -> BeamSearchOutput:
        """The beams of a search that this request was the prompt of."""
        skips, prompt = self.params.skip_special_tokens, self.answers[0].sequence.tokens
        found = []
        for beam in beams:
            ids = prompt + beam.tokens
            text = self.tokenizer.decode(ids, skip_special_tokens=skips)
            found.append(BeamSearchSequence(ids, beam.logprob, text, beam.finish_reason))
        return BeamSearchOutput(found)

    def _answer(self, answer: engine.CompletionOutput, error: str | None) -> CompletionOutput:
        reason, text, cumulative = answer.stop_reason, answer.text, answer.cumulative_logprob
        stop_ids = [reason] if isinstance(reason, int) else []
        ids = answer.token_ids + stop_ids
        logprobs = answer.logprobs_of(ids)
        if logprobs is not None and cumulative is not None:
            cumulative += sum(logprobs[-1][stop_id] for stop_id in stop_ids)
        if reason in stop_ids and reason not in self.params.stop_token_ids:
            reason = None
        first = 0
        if self.params.output_kind is RequestOutputKind.DELTA:
            text, first = answer.new_text, self._num_sent.get(answer.index, 0)
            self._num_sent[answer.index] = len(ids)
        count = self.params.logprobs
        return CompletionOutput(
            answer.index,
            text if self.params.detokenize else "",
            ids[first:],
            cumulative,
            None if logprobs is None else [self._position(x, count) for x in logprobs[first:]],
            answer.finish_reason,
            error if answer.finish_reason == "error" else reason,
        )

    def _position(self, logprobs: dict[int, float], count: int | None) -> _Position:
        """count: how many of the likeliest there are; the token's own entry comes first."""
        best = sorted(logprobs, key=lambda token: -logprobs[token])
        ranks = {token: rank for rank, token in enumerate(best, start=1) if rank <= (count or 0)}
        return {
            token: Logprob(logprob, ranks.get(token), self.tokenizer.decode([token]))
            for token, logprob in logprobs.items()
        }
