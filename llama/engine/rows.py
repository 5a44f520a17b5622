"""What a sequence asks of a step, and what it gets back: kinds of rows, and their results.

A row is one token that the step computes. Of a prompt of 5 tokens that is scored, rows 0 to 3 are
SCORE, each for the token behind it; row 4 is SAMPLE, for the token that is not there yet. With two
drafts behind the last token of a sequence, the step computes three rows, and all are SAMPLE.
"""

from dataclasses import dataclass, field
from enum import Enum

TopLogprobs = list[tuple[int, float]]  # ids and log-probabilities, the likeliest first


class RowKind(Enum):
    SAMPLE = "sample"  # the id of the token behind it, to be chosen
    SCORE = "score"  # the log-probability of the token behind it, which is known


@dataclass(frozen=True, slots=True)
class Rows:
    """offsets: of the rows among the sequence's tokens of this step."""

    kind: RowKind
    offsets: range


SAMPLE_ONE = (Rows(RowKind.SAMPLE, range(1)),)  # what a sequence with one new token asks


@dataclass(slots=True)
class Tokens:
    """ids; log-probabilities and the likeliest where asked for: as many as `ids`, or none."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class RowResults:
    """What a step came to: of all SAMPLE rows and of all SCORE rows, in the order of its items."""

    sampled: Tokens
    scored: Tokens
