"""The state of one sequence in the engine: how far it is, its results, and the pages it has.

How far it is are four lengths: `0 <= num_computed <= len(tokens) + num_pending <= max_len`. A step
computes tokens that are known and not computed yet. Once all are, it samples the next one, which is
pending until the host reads it; the next step may begin before that, as the device knows the token.

Ids in lists; no torch and no text. What the sequence asks for is its `SequenceSpec`.
"""

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from llama.engine.request import Constraint, SequenceSpec

if TYPE_CHECKING:
    import numpy as np

TopLogprobs = list[tuple[int, float]]  # ids and log-probabilities, the most probable first
# Why a sequence ended: a stop token or text, its maximum length, its caller, or an error.
FinishReason = Literal["stop", "length", "abort", "error"]


def no_pages() -> "array[int]":
    """Return an empty array of page numbers."""
    return array("q")


@dataclass(eq=False)  # sequences with the same tokens are different sequences
class SequenceState:
    """A sequence: what it asks for, and what it has so far.

    Attributes:
        constraint: The rule that its tokens follow, where this rank has it.
        tokens: The prompt, then the output.
        num_computed: The leading tokens whose keys and values are in pages, or will be after the
            steps that have been scheduled.
        num_pending: The tokens after these that are sampled and not read yet: 0 or 1, but several
            in a draft.
        awaits_results: Whether a step of a pipeline is in flight that has results for it. Nothing
            more of it is scheduled until they are read.
        last_step: The number of the last step of a pipeline that had tokens of it.
        num_cached: The prompt tokens found in the prefix cache when it was first admitted.
        num_offered: The leading pages that other sequences can find by their hashes.
        num_drafted: The drafts of its tokens that steps have verified.
        num_accepted: The drafts that were right.
        pages: Its pages in order, as int64 that the runner copies to the device.
        page_hashes: The hashes of its full pages, in order.
        finish_reason: Why it ended, once it has ended.
        stop_id: The token that stopped it.
        logprobs: The log-probability of each output token, then of the token that stopped it.
        top_logprobs: The most probable tokens in the place of each of these.
        prompt_logprobs: The log-probability of each prompt token; 0.0 for the first.
        prompt_top_logprobs: The most probable tokens in the place of each of these.
        pooled: The sum of the hidden states that its pooling wants, (E) float64, as far as they
            are computed; in the end the vector, (E) float32.
        captured: By the number of a state, its parts on the host, (N, E) each, in the order of the
            tokens.
        pixels: The pixels of its images by their digests, (r, T, T, 3) uint8; empty on ranks that
            follow.
    """

    spec: SequenceSpec
    constraint: Constraint | None = None
    tokens: list[int] = field(init=False)
    num_computed: int = 0
    num_pending: int = 0
    awaits_results: bool = False
    last_step: int = 0
    num_cached: int = 0
    num_offered: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    pages: "array[int]" = field(default_factory=no_pages)
    page_hashes: list[bytes] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    pooled: "np.ndarray | None" = None
    captured: dict[int, list[Any]] = field(default_factory=dict)
    pixels: dict[bytes, "np.ndarray"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = list(self.spec.tokens)
        self.num_prompt = len(self.tokens)
        if self.spec.prompt_logprobs is not None:
            self.prompt_logprobs.append(0.0)
            self.prompt_top_logprobs.append([])

    @property
    def output(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        """The number of output tokens that the host knows."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_known(self) -> int:
        """The number of tokens that the device knows; the host does not know a pending one."""
        return len(self.tokens) + self.num_pending

    @property
    def num_new(self) -> int:
        """The number of tokens that are known and not computed: those a step may compute."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def ends_with_pending(self) -> bool:
        """Whether the pending token is the last by length, so that nothing is left to compute."""
        return self.num_pending > 0 and self.num_known == self.spec.max_len

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None

    def append(self, token: int) -> None:
        """Append a sampled token, unless it ends the sequence: a stop id, or -1 for an error."""
        assert not self.finished and len(self.tokens) < self.spec.max_len
        if token < 0:
            self.finish_reason = "error"
        elif token in self.spec.stop_ids:  # the sampler chooses none before `min_tokens`
            self.stop_id = token
            self.finish_reason = "stop"
        else:
            self.tokens.append(token)
            if len(self.tokens) == self.spec.max_len:
                self.finish_reason = "length"

    def ahead(self, drafts: Sequence[int]) -> "SequenceState":
        """Return a copy for the sampler to read, as the sequence is once these drafts are right."""
        view = copy.copy(self)
        view.tokens = [*self.tokens, *drafts]
        return view
