"""The engine's outputs in vLLM's shape.

In: `llama.requests`' outputs of one request, as they come. Out: `RequestOutput`, with the fields,
types and meanings of vLLM's. It submits and steps nothing.
"""

from dataclasses import dataclass, field

from llama.compat.vllm.params import RequestOutputKind
from llama.requests import request as engine
from llama.requests.beam_search import Beam
from llama.sampling_params import SamplingParams
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
    """One answer. token_ids: with the id that stopped it, whose text is left out.

    finish_reason: None, "stop", "length", "abort" or "error". stop_reason: the string or the id of
    the request that stopped it; None for one of the model's own stop tokens; what went wrong, after
    "error".
    """

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
class Reporter:
    """Makes vLLM's outputs of one request. `prompt`: its text, if it had one."""

    request_id: str
    prompt: str | None
    params: SamplingParams
    kind: RequestOutputKind
    detokenize: bool
    tokenizer: Tokenizer
    _sent: dict[int, int] = field(default_factory=dict)  # tokens reported, per answer
    _has_sent: bool = False

    def report(self, output: engine.RequestOutput) -> RequestOutput | None:
        """None where the client wants no output before the last."""
        if self.kind is RequestOutputKind.FINAL_ONLY and not output.finished:
            return None
        is_delta = self.kind is RequestOutputKind.DELTA
        prompt_logprobs = None
        if output.prompt_logprobs is not None and not (is_delta and self._has_sent):
            prompt_logprobs = [
                None if position is None else self._position(position, self.params.prompt_logprobs)
                for position in output.prompt_logprobs
            ]
        self._has_sent = True
        return RequestOutput(
            self.request_id,
            self.prompt,
            output.prompt_token_ids,
            prompt_logprobs,
            [self._answer(answer, output.error, is_delta) for answer in output.outputs],
            output.finished,
            num_cached_tokens=output.usage.cached_tokens,
        )

    def report_beams(self, prompt_ids: list[int], beams: list[Beam]) -> RequestOutput:
        """The best beams, as the one output of a beam search; without beams, it was aborted."""
        skips = self.params.skip_special_tokens
        answers = [
            CompletionOutput(
                i,
                self.tokenizer.decode(beam.tokens, skip_special_tokens=skips)
                if self.detokenize
                else "",
                beam.tokens,
                beam.logprob,
                None,
                beam.finish_reason,
            )
            for i, beam in enumerate(beams)
        ]
        aborted = CompletionOutput(0, "", [], None, None, "abort")
        return RequestOutput(
            self.request_id, self.prompt, prompt_ids, None, answers or [aborted], True
        )

    def _answer(
        self, answer: engine.CompletionOutput, error: str | None, is_delta: bool
    ) -> CompletionOutput:
        ids, logprobs, reason = answer.token_ids, answer.logprobs, answer.stop_reason
        cumulative = answer.cumulative_logprob
        if isinstance(reason, int):
            ids = [*ids, reason]
            if logprobs is not None and answer.stop_logprobs is not None:
                logprobs = [*logprobs, answer.stop_logprobs]
                cumulative = (cumulative or 0.0) + answer.stop_logprobs[reason]
            if reason not in self.params.stop_token_ids:
                reason = None
        first = self._sent.get(answer.index, 0) if is_delta else 0
        self._sent[answer.index] = len(ids)
        count = self.params.logprobs
        return CompletionOutput(
            answer.index,
            self._text(answer, is_delta),
            ids[first:],
            cumulative,
            None if logprobs is None else [self._position(x, count) for x in logprobs[first:]],
            answer.finish_reason,
            error if answer.finish_reason == "error" else reason,
        )

    def _text(self, answer: engine.CompletionOutput, is_delta: bool) -> str:
        if not self.detokenize:
            return ""
        return answer.new_text if is_delta else answer.text

    def _position(self, logprobs: dict[int, float], count: int | None) -> _Position:
        """count: how many of the likeliest there are; the token's own entry comes first."""
        best = sorted(logprobs, key=lambda token: -logprobs[token])
        ranks = {token: rank for rank, token in enumerate(best, start=1) if rank <= (count or 0)}
        return {
            token: Logprob(logprob, ranks.get(token), self.tokenizer.decode([token]))
            for token, logprob in logprobs.items()
        }
