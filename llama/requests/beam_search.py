"""Beam search (Graves, 2012), with the scores and the stopping rules of transformers.

In each round, every beam is a request for one token. The prefix cache stores the keys and values of
its earlier tokens, so a round computes at most one page per beam.

In: checked requests, and the engine that runs them. Out: the best beams of each prompt. This module
knows nothing of the model.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llama.common.checks import number, whole_number
from llama.prompts.pictures import Picture
from llama.requests.llm_engine import LLMEngine
from llama.requests.request import Request, RequestOutput
from llama.sampling_params import SamplingParams


@dataclass
class BeamParams:
    """Parameters of beam search, with the names and meanings of transformers' `generate`.

    The score of a beam is sum(logprobs) / length ** length_penalty.

    Attributes:
        beam_width: The number of beams.
        length_penalty: The exponent of the length; larger values favour longer answers.
        early_stopping: When a search ends. True: as soon as `beam_width` beams have finished.
            False: when the best running beam cannot exceed the worst finished one at its current
            length. "never": when it cannot at any length.
    """

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
    """One continuation of a prompt."""

    tokens: list[int]
    logprob: float  # sum over the tokens, including a final stop token
    score: float = -math.inf
    finish_reason: str | None = None


@dataclass
class _Search:
    """The beams of one prompt."""

    prompt: list[int]
    limit: int  # largest number of generated tokens
    stop_ids: frozenset[int]
    params: BeamParams
    root: bytes = b""  # prefix root of the prompt's sequence
    adapter: str | None = None  # name of the adapter
    pictures: Sequence[Picture] = ()  # the images of the prompt
    running: list[Beam] = field(default_factory=lambda: [Beam([], 0.0)])
    finished: list[Beam] = field(default_factory=list)
    length: int = 0  # generated tokens, including stop tokens, as in the scores

    @property
    def num_candidates(self) -> int:
        """Return the number of candidates of a round.

        It leaves at least beam_width candidates even if all stop tokens are among them.
        """
        candidates_per_beam = max(2, 1 + len(self.stop_ids))
        return candidates_per_beam * self.params.beam_width

    def advance(self, tops: list[list[tuple[int, float]]]) -> None:
        """Extend the running beams by one token.

        Args:
            tops: The most probable next ids of each running beam, with their log-probabilities.
        """
        width = self.params.beam_width
        self.length += 1
        candidates = []
        for beam, next_tokens in zip(self.running, tops, strict=True):
            for token, logprob in next_tokens:
                candidates.append(Beam([*beam.tokens, token], beam.logprob + logprob))
        candidates.sort(key=lambda beam: -beam.logprob)
        running = []
        for rank, beam in enumerate(candidates[: self.num_candidates]):
            if not self._is_complete(beam):
                running.append(beam)
            elif rank < width:
                self.finished.append(self._finish(beam))
        self.finished.sort(key=lambda beam: -beam.score)
        self.finished = self.finished[:width]
        self.running = running[:width]

    def _is_complete(self, beam: Beam) -> bool:
        return beam.tokens[-1] in self.stop_ids or len(beam.tokens) == self.limit

    def _finish(self, beam: Beam) -> Beam:
        """Return a complete beam with its score and without its stop token."""
        score = self._score(beam.logprob, self.length)
        if beam.tokens[-1] in self.stop_ids:
            return Beam(beam.tokens[:-1], beam.logprob, score, "stop")
        return Beam(beam.tokens, beam.logprob, score, "length")

    def _score(self, logprob: float, length: int) -> float:
        normalizer: float = length**self.params.length_penalty
        return logprob / normalizer

    def may_improve(self) -> bool:
        """Return whether a running beam can still become one of the best beams."""
        if not self.running or self.limit == 0:
            return False
        if len(self.finished) < self.params.beam_width:
            return True
        if self.params.early_stopping not in (False, "never"):
            return False
        length = self.length
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.limit  # the score grows with the length
        best_score = self._score(self.running[0].logprob, length)
        return best_score > self.finished[-1].score


def beam_search(
    engine: LLMEngine,
    requests: Iterable[Request],
    beam_width: int,
    length_penalty: float,
    early_stopping: bool | str,
    adapter: str | None = None,
) -> list[list[Beam]]:
    """Return up to `beam_width` continuations of each prompt, the best first.

    Args:
        engine: The engine that computes the beams.
        requests: One request per prompt. They are consumed where an error on one rank is raised on
            every rank.
        beam_width: See `BeamParams`.
        length_penalty: See `BeamParams`.
        early_stopping: See `BeamParams`.
        adapter: The name of the adapter that the requests have.
    """
    with engine.agree("the prompts or parameters") as must_match:
        params = BeamParams(beam_width, length_penalty, early_stopping)
        checked = list(requests)
        must_match += [params, [request.fingerprint() for request in checked]]
    searches = []
    for request in checked:
        seq = request.answers[0].sequence
        limit = seq.spec.max_len - seq.num_prompt
        root = seq.spec.prefix_root
        pictures = [
            Picture(seq.pixels[image.digest], image.rows, image.columns)
            for image in seq.spec.images
        ]
        stop_ids = seq.spec.stop_ids
        searches.append(_Search(seq.tokens, limit, stop_ids, params, root, adapter, pictures))
    while unfinished := [search for search in searches if search.may_improve()]:
        _advance(engine, unfinished)
    return [search.finished for search in searches]


def _advance(engine: LLMEngine, searches: list[_Search]) -> None:
    """Run one round of the searches in one call of the engine."""
    num_candidates = max(search.num_candidates for search in searches)
    # Nothing is sampled. The fixed seed keeps these calls from advancing the count of calls without
    # a seed, from which the seeds of other calls are derived.
    params = SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=num_candidates, seed=0
    )
    requests = (
        engine.prepare(
            "",
            search.prompt + beam.tokens,
            params,
            tenant=search.root,
            adapter=search.adapter,
            pictures=search.pictures,
        )
        for search in searches
        for beam in search.running
    )
    outputs = iter(engine.run(requests))
    for search in searches:
        search.advance([_top_tokens(next(outputs)) for _ in search.running])


def _top_tokens(output: RequestOutput) -> list[tuple[int, float]]:
    """Return the most probable next ids of a beam with their log-probabilities.

    Raises:
        ValueError: No token can follow the beam.
    """
    (answer,) = output.outputs
    if not answer.logprobs:
        raise ValueError(output.error)
    return list(answer.logprobs[0].items())
