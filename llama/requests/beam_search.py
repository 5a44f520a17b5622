"""Beam search (Graves, 2012), with the scores and the stopping rules of transformers.

In each round, every beam is a request for one token; the prefix cache keeps its past, so a round
computes at most one page per beam.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from llama.checks import number, whole_number
from llama.requests.llm_engine import LLMEngine
from llama.requests.request import Request, RequestOutput
from llama.sampling_params import SamplingParams


@dataclass
class BeamParams:
    """Names and meanings of transformers' generate; scores are sum(logprobs) / length ** penalty.

    early_stopping: True ends with beam_width finished beams; False when the best running beam
    cannot pass the worst finished one at its present length; "never" at any length."""

    beam_width: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        self.beam_width = whole_number("beam_width", self.beam_width, 1, 16)
        self.length_penalty = number("length_penalty", self.length_penalty, -10, 10)
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping={self.early_stopping!r}: give True, False or 'never'")


@dataclass(frozen=True)
class Beam:
    """A continuation; `logprob` is the sum over its tokens, a final stop token included."""

    tokens: list[int]
    logprob: float
    score: float = -math.inf
    finish_reason: str | None = None


@dataclass
class _Search:
    """One prompt's beams. `length` counts generated tokens, stop tokens too, as the scores do."""

    prompt: list[int]
    limit: int  # generated tokens at most
    stop_ids: frozenset[int]
    params: BeamParams
    running: list[Beam] = field(default_factory=lambda: [Beam([], 0.0)])
    finished: list[Beam] = field(default_factory=list)
    length: int = 0

    @property
    def kept(self) -> int:
        """Candidates a round: enough that beam_width are left if every stop token is among them."""
        return max(2, 1 + len(self.stop_ids)) * self.params.beam_width

    def advance(self, likeliest: list[list[tuple[int, float]]]) -> None:
        """One round: for each running beam, the ids that may follow and their log-probabilities."""
        width = self.params.beam_width
        self.length += 1
        candidates = [
            Beam(beam.tokens + [token], beam.logprob + logprob)
            for beam, follow in zip(self.running, likeliest, strict=True)
            for token, logprob in follow
        ]
        candidates = sorted(candidates, key=lambda beam: -beam.logprob)[: self.kept]
        ended = [self._finished(beam) for beam in candidates[:width] if self._is_over(beam)]
        self.finished = sorted(self.finished + ended, key=lambda beam: -beam.score)[:width]
        self.running = [beam for beam in candidates if not self._is_over(beam)][:width]

    def _is_over(self, beam: Beam) -> bool:
        return beam.tokens[-1] in self.stop_ids or len(beam.tokens) == self.limit

    def _finished(self, beam: Beam) -> Beam:
        is_stop = beam.tokens[-1] in self.stop_ids
        tokens, reason = (beam.tokens[:-1], "stop") if is_stop else (beam.tokens, "length")
        return Beam(tokens, beam.logprob, self._score(beam.logprob, self.length), reason)

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length**self.params.length_penalty

    def may_improve(self) -> bool:
        """Whether a running beam can still come among the best."""
        if not self.running or self.limit == 0:
            return False
        if len(self.finished) < self.params.beam_width:
            return True
        if self.params.early_stopping not in (False, "never"):
            return False
        grows = self.params.early_stopping == "never" and self.params.length_penalty > 0
        reach = self.limit if grows else self.length
        return self._score(self.running[0].logprob, reach) > self.finished[-1].score


def beam_search(
    engine: LLMEngine,
    requests: Iterable[Request],
    beam_width: int,
    length_penalty: float,
    early_stopping: bool | str,
) -> list[list[Beam]]:
    """The up to beam_width best continuations of each prompt, best first; see `BeamParams`.
    requests: consumed and checked where an error on one rank becomes an error on every rank."""
    with engine.agree("the prompts or parameters") as must_match:
        params = BeamParams(beam_width, length_penalty, early_stopping)
        asked = list(requests)
        must_match += [params, [request.fingerprint() for request in asked]]
    searches = []
    for seq in (request.answers[0].sequence for request in asked):
        limit = seq.spec.max_len - seq.num_prompt
        searches.append(_Search(seq.tokens, limit, seq.spec.stop_ids, params))
    while unfinished := [search for search in searches if search.may_improve()]:
        starts = [search.prompt + beam.tokens for search in unfinished for beam in search.running]
        kept = max(search.kept for search in unfinished)
        # Nothing is drawn. With a seed, these calls take no numbers from those that draw.
        one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=kept, seed=0)
        outputs = iter(engine.run(engine.prepare("", start, one) for start in starts))
        for search in unfinished:
            search.advance([_likeliest(next(outputs)) for _ in search.running])
    return [search.finished for search in searches]


def _likeliest(output: RequestOutput) -> list[tuple[int, float]]:
    """The ids that may follow a beam, with their log-probabilities; ValueError if none may."""
    (answer,) = output.outputs
    if not answer.logprobs:
        raise ValueError(output.error)
    return list(answer.logprobs[0].items())
