"""Beam search (Graves, 2012), with the scores and the stopping rules of transformers.

In: prompts as ids. Out: the best continuations of each with their scores. Every beam is an engine
sequence of one token a round; prefix reuse keeps its past, so a round computes at most a page.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from llama.engine.core import EngineCore
from llama.engine.sequence import Sequence
from llama.sampling_params import SamplingParams


@dataclass(frozen=True)
class BeamParams:
    """Names and meanings of transformers' generate; scores are sum(logprobs) / length ** penalty.

    early_stopping: True ends with beam_width finished beams; False when the best running beam
    cannot pass the worst finished one at its present length; "never" at any length.
    """

    beam_width: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        width = self.beam_width
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= 16:
            raise ValueError(f"beam_width={width!r} must be a whole number from 1 to 16")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float):
            raise TypeError(f"length_penalty={penalty!r} must be a number from -10 to 10")
        if not -10 <= penalty <= 10:  # NaN is outside
            raise ValueError(f"length_penalty={penalty!r} must be a number from -10 to 10")
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
    done: bool = False

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
        over = [self._over(beam) for beam in candidates]
        ended = [b for b, reason in zip(candidates[:width], over, strict=False) if reason]
        self.finished += [self._finish(beam) for beam in ended]
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[:width]
        self.running = [b for b, reason in zip(candidates, over, strict=True) if not reason][:width]
        self.done = not self.running or not self._may_improve()

    def _over(self, beam: Beam) -> str | None:
        if beam.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if len(beam.tokens) == self.limit else None

    def _finish(self, beam: Beam) -> Beam:
        reason = self._over(beam)
        tokens = beam.tokens[:-1] if reason == "stop" else beam.tokens
        return Beam(tokens, beam.logprob, self._score(beam.logprob, self.length), reason)

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length**self.params.length_penalty

    def _may_improve(self) -> bool:
        if len(self.finished) < self.params.beam_width:
            return True
        if self.params.early_stopping is True:
            return False
        grows = self.params.early_stopping == "never" and self.params.length_penalty > 0
        reach = self.limit if grows else self.length
        return self._score(self.running[0].logprob, reach) > self.finished[-1].score


def beam_search(
    engine: EngineCore,
    prompts: list[list[int]],
    limits: list[int],
    stop_ids: frozenset[int],
    params: BeamParams,
    advance: Callable[[], None],
) -> list[list[Beam]]:
    """The up to beam_width best continuations of each prompt, best first; limits are in tokens.

    `advance` runs the engine once, and tells whoever else has requests in it.
    """
    searches = [_Search(p, n, stop_ids, params) for p, n in zip(prompts, limits, strict=True)]
    while open_ones := [s for s in searches if not s.done and s.limit > 0]:
        rounds = [(search, _next_tokens(search)) for search in open_ones]
        _run(engine, advance, [seq for _, sequences in rounds for seq in sequences])
        for search, sequences in rounds:
            search.advance([seq.top_logprobs[0] for seq in sequences])
    return [search.finished for search in searches]


def _next_tokens(search: _Search) -> list[Sequence]:
    """A sequence for each running beam, to be asked for its likeliest next tokens."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=search.kept)
    starts = [search.prompt + beam.tokens for beam in search.running]
    return [Sequence(start, replace(params), len(start) + 1, seed=0) for start in starts]


def _run(engine: EngineCore, advance: Callable[[], None], sequences: list[Sequence]) -> None:
    try:
        for seq in sequences:
            engine.add(seq)
        while not all(seq.finished for seq in sequences):
            advance()
    finally:
        for seq in sequences:
            engine.abort(seq)
