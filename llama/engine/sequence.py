"""One request inside the engine: its tokens, how far they are computed, and the pages they hold.

Ids in a list; no torch, no text. The whole state is four lengths:
`0 <= num_computed <= len(tokens) + num_pending <= max_len`. A step lets num_computed catch up with
the known tokens; when it has, one token is sampled. It is pending until the host reads it, and the
next step may begin before that: the device knows it.
"""

import copy
import functools
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

_GREEDY_BELOW = 1e-5  # temperatures under it take the top token, as in vLLM
TopLogprobs = list[tuple[int, float]]  # ids and log-probabilities, the likeliest first


@dataclass(frozen=True, kw_only=True)
class TokenParams:
    """What the sampler reads of a request: numbers and ids. See `SamplingParams`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last id of one must not follow the others
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the top token is always taken."""
        return self.temperature < _GREEDY_BELOW

    @functools.cached_property
    def takes_top(self) -> bool:
        """Whether the top token is all that is asked for, where no token is banned."""
        changes = self.logit_bias or self.has_penalties
        return self.greedy and self.logprobs is None and not changes

    @functools.cached_property
    def has_penalties(self) -> bool:
        """Whether it matters which tokens there were."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @functools.cached_property
    def has_long_bad_words(self) -> bool:
        return any(len(word) > 1 for word in self.bad_words)


class Constraint(Protocol):
    """Says which tokens may follow. failure: why it cannot say it any longer; then none may."""

    failure: str | None

    def fill_allowed(
        self, tokens: list[int], first: int, drafts: list[int], bits: "np.ndarray"
    ) -> None:
        """Set bit t % 32 of bits[j, t // 32] (int32) if token t may follow the output, which is
        tokens[first:], and the first j drafts, else clear it; behind a draft that may not follow,
        clear all. The output of the call before is a beginning of this one's."""

    def draft(self, output: list[int], guess: list[int]) -> tuple[list[int], bool]:
        """Tokens that may follow the output: those that must, and true; where none must, as much
        of the guess as may, and false."""


def no_pages() -> "array[int]":
    return array("q")


@dataclass(eq=False)  # two requests with the same tokens are two requests
class Sequence:
    """`max_len`: the most tokens, prompt and output. `stop_ids` end it and are left out."""

    tokens: list[int]  # prompt, then what was generated
    params: TokenParams
    max_len: int
    seed: int = 0  # of its draws
    stop_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    prediction: Seq[int] = ()  # what the output may repeat
    is_constrained: bool = False  # also where rank 0 alone has the constraint
    call: int = 0  # the same for all that were asked for together: calls share the places
    num_computed: int = 0  # leading tokens whose keys and values are in pages, or will be
    num_pending: int = 0  # tokens behind these that are sampled and not read yet: 0 or 1
    num_cached: int = 0  # prompt tokens found in the prefix cache when it was first admitted
    num_offered: int = 0  # leading pages that others can find by their hashes
    num_drafted: int = 0  # guesses of its next tokens that steps have verified
    num_accepted: int = 0  # those of them that were right
    pages: "array[int]" = field(default_factory=no_pages)  # int64: the runner copies it as it is
    page_hashes: list[bytes] = field(default_factory=list)  # of its full pages, in order
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_id: int | None = None  # the id that stopped it
    logprobs: list[float] = field(default_factory=list)  # per generated token, then the stop id's
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)  # [0.0, ...]: nothing comes before
    prompt_top_logprobs: list[TopLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        self.is_constrained = self.is_constrained or self.constraint is not None
        # Whether the host must know every token before it can choose the next one.
        self.needs_tokens = self.is_constrained or self.params.has_long_bad_words
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs.append(0.0)
            self.prompt_top_logprobs.append([])

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_known(self) -> int:
        """Tokens that the device knows; the host does not know a pending one."""
        return len(self.tokens) + self.num_pending

    @property
    def num_new(self) -> int:
        """Tokens that are known and not yet computed: what a step may be given."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def ends_with_pending(self) -> bool:
        """Whether the token that is pending is its last by length: nothing is left to compute."""
        return self.num_pending > 0 and self.num_known == self.max_len

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token: int) -> None:
        """Add a sampled token. A stop id ends the sequence instead; so does -1, with an error."""
        assert not self.finished and len(self.tokens) < self.max_len
        if token < 0:
            self.finish_reason = "error"
        elif token in self.stop_ids:  # `sample` does not choose one before min_tokens
            self.stop_id = token
            self.finish_reason = "stop"
        else:
            self.tokens.append(token)
            if len(self.tokens) == self.max_len:
                self.finish_reason = "length"

    def ahead(self, drafts: Seq[int]) -> "Sequence":
        """A copy for the sampler to read: this sequence as it is once these drafts are accepted."""
        view = copy.copy(self)
        view.tokens = [*self.tokens, *drafts]
        return view
