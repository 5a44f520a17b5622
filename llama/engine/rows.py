"""What a step came to: the tokens that it chose, and those of prompts that it scored.

A row is one token that the step computes. Of a prompt of 5 tokens that is scored, rows 0 to 3 score
the token behind each; row 4 samples the token that is not there yet. With two drafts behind the
last token of a sequence, the step computes three rows, and all of them sample.
"""

from dataclasses import dataclass, field

TopLogprobs = list[tuple[int, float]]  # ids and log-probabilities, the likeliest first


@dataclass(slots=True)
class Tokens:
    """ids; log-probabilities and the likeliest where asked for: as many as `ids`, or none."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class RowResults:
    """Of all rows that sample, and of all that score, in the order of the step's items."""

    sampled: Tokens
    scored: Tokens
