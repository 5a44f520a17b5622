"""The shapes of recorded steps: a few numbers of rows, to which steps are filled up.

In: the rows of a step. Out: the rows of the graph that replays it. What a step computes must not be
known here.

Steps of up to 256 rows may have prompts. Up to about so many, a GPU reads the weights for longer
than it multiplies (an H100 up to some 250), so that unused rows cost little, and the launches of a
step may take longer than its kernels. Beyond them unused rows cost time, and launches are hidden.
"""

import itertools
from typing import NamedTuple

from llama.ops.adapters import Reach

PROMPT_GROUPS = 32  # sequences with prompts in a recorded step; the last one has the unused rows
_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # then multiples of 64
_PROMPT_BUCKETS = (64, 128, 256)  # rows of prompts
_SINGLE_BUCKETS = (0, 16, 64, 128, 192)  # rows of single tokens in a step with prompts
MAX_MIXED_ROWS = 256  # rows of a step with prompts
_MIN_TABLE_WIDTH = 64  # pages; wider tables are powers of two times it


class Shape(NamedTuple):
    """The steps that one graph can replay.

    Attributes:
        rows: The rows of single tokens.
        width: The pages of a row's table.
        wants_logits: Whether logits are computed.
        prompts: The rows of prompts, which lie behind the others.
        reach: What the adapters of the rows may change; nothing where no row has one.
    """

    rows: int
    width: int
    wants_logits: bool
    prompts: int = 0
    reach: Reach = Reach()


def bucket_of(num_rows: int) -> int:
    """Return the rows of the graph in which `num_rows` single tokens run."""
    for rows in _BUCKETS:
        if rows >= num_rows:
            return rows
    return -(-num_rows // 64) * 64


class MixedBuckets:
    """The numbers of rows of graphs for steps with prompts.

    Args:
        max_tokens: The maximum number of tokens of such a step; 0: there are none.
    """

    def __init__(self, max_tokens: int) -> None:
        num_smaller = sum(rows < max_tokens for rows in _PROMPT_BUCKETS)
        self._prompts = _PROMPT_BUCKETS[: num_smaller + 1] if max_tokens else ()

    def of(self, num_single: int, num_of_prompts: int) -> tuple[int, int] | None:
        """Return the rows for single tokens and for tokens of prompts of the smallest graph.

        None: there is no graph for so many.
        """
        for rows, prompts in itertools.product(_SINGLE_BUCKETS, self._prompts):
            if num_single <= rows and num_of_prompts <= prompts:
                return (rows, prompts) if rows + prompts <= MAX_MIXED_ROWS else None
        return None

    def all_of(self, max_sequences: int) -> list[tuple[int, int]]:
        """Return all that `of` returns for up to so many sequences."""
        singles = range(min(max_sequences, MAX_MIXED_ROWS))
        found = {self.of(*counts) for counts in itertools.product(singles, self._prompts)}
        return sorted(buckets for buckets in found if buckets is not None)


def table_widths(max_pages: int) -> list[int]:
    """Return the widths of page tables, ascending; the last one has all pages of a sequence."""
    widths = []
    width = _MIN_TABLE_WIDTH
    while width < max_pages:
        widths.append(width)
        width *= 2
    return [*widths, max_pages]
