"""The part of a model that one rank holds: layers, and a share of every dimension.

In: the counts of a model, such as its layers, heads or vocabulary rows. Out: the ranges of them
that belong to this rank. Everything that divides a model asks a `Placement`: the layer plan, the
parallel layers, the names and shapes of tensors, the checkpoint reader and the memory estimate.
It must not know of process groups, tensors or files, so that a placement can be computed for a
rank that does not run here.

Pipeline stages divide the layers. The ranks of one stage, a model-parallel group, divide heads,
feed-forward columns and vocabulary rows.
"""

import functools
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise

from llama.ops.formats import N_BLOCK


@dataclass(frozen=True)
class Placement:
    """The part of a model that one rank holds; the default is a rank that holds all of it.

    Attributes:
        stage: The pipeline stage of this rank. Stage 0 holds the first layers; see `stage_of`.
        stages: The number of pipeline stages.
        rank: This rank within the model-parallel group of its stage.
        size: The number of ranks in that group.
        shares: The relative share of each rank of the group, such as (3, 3, 2). Empty: all ranks
            have equal shares.
        column_step: Unequal parts of the feed-forward columns are multiples of it. Weights whose
            groups of columns share a scale, and a GPU's kernels, need larger steps than others.
        layer_counts: The number of layers of each stage. Empty: by the work of each.
        ffn_shares: The relative share of the feed-forward columns of each rank. Empty: `shares`.
    """

    stage: int = 0
    stages: int = 1
    rank: int = 0
    size: int = 1
    shares: tuple[int, ...] = ()
    column_step: int = N_BLOCK
    layer_counts: tuple[int, ...] = ()
    ffn_shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (0 <= self.stage < self.stages and 0 <= self.rank < self.size):
            raise ValueError(
                f"stage {self.stage} of {self.stages} and rank {self.rank} of {self.size} do not "
                "exist: stages and ranks are counted from 0"
            )
        for name, shares in (("shares", self.shares), ("ffn_shares", self.ffn_shares)):
            if shares and (len(shares) != self.size or min(shares) < 1):
                raise ValueError(
                    f"{name}={shares} must be {self.size} positive numbers, one for each rank"
                )
        counts = self.layer_counts
        if counts and (len(counts) != self.stages or min(counts) < 1):
            raise ValueError(
                f"layer_counts={counts} must be {self.stages} positive numbers, one for each stage"
            )

    @property
    def is_first(self) -> bool:
        """Whether this stage holds the first layer and the token embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage holds the last layer and the lm_head."""
        return self.stage == self.stages - 1

    def layers(self, n_layers: int, lm_head: Fraction = Fraction(0)) -> range:
        """Return the layers of this stage: as many as `layer_counts` says, or by the work of each.

        Args:
            n_layers: The layers of the model.
            lm_head: The work of the lm_head, in layers, where `layer_counts` is empty.

        Raises:
            ValueError: There are fewer layers than stages, or `layer_counts` is of another model.
        """
        counts = self.layer_counts or divide_layers(n_layers, self.stages, lm_head)
        if sum(counts) != n_layers:
            raise ValueError(f"layer_counts={counts} are not the {n_layers} layers of the model")
        first = sum(counts[: self.stage])
        return range(first, first + counts[self.stage])

    @property
    def is_even(self) -> bool:
        """Whether all ranks of the group have equal shares."""
        return len(set(self.shares)) <= 1 and len(set(self.ffn_shares)) <= 1

    def peers(self) -> "list[Placement]":
        """Return the placement of each rank of the group, in order."""
        return [replace(self, rank=rank) for rank in range(self.size)]

    def span(self, count: int, step: int = 1) -> range:
        """Return the part of a dimension that this rank holds.

        Args:
            count: The size of the whole dimension, in rows, columns or heads.
            step: The granularity of the shares: parts begin at multiples of it. The last step may
                be incomplete.
        """
        bounds = _bounds(-(-count // step), self._weights())
        return range(bounds[self.rank] * step, min(bounds[self.rank + 1] * step, count))

    def blocks(self, count: int, step: int) -> range:
        """Return the part of a dimension that this rank holds, in whole blocks where it can be.

        Equal ranks have exactly equal parts where their number divides the dimension. Otherwise
        parts begin at multiples of `step`, which is halved while there are fewer steps than ranks.

        Args:
            count: The size of the whole dimension.
            step: The size of a block.
        """
        if len(set(self.shares)) <= 1 and count % self.size == 0:
            return self.span(count)
        return self.span(count, self._block_size(count, step))

    def ffn_columns(self, count: int) -> range:
        """Return the feed-forward columns of this rank, of `count` in all."""
        placement = replace(self, shares=self.ffn_shares or self.shares)
        return placement.blocks(count, math.gcd(self.column_step, count))

    def num_ffn_blocks(self, count: int) -> int:
        """Return the blocks of feed-forward columns that unequal ranks divide."""
        return count // self._block_size(count, math.gcd(self.column_step, count))

    def _block_size(self, count: int, step: int) -> int:
        """Return `step`, halved while a dimension has fewer such blocks than there are ranks."""
        while step > 1 and count // step < self.size:
            step //= 2
        return step

    def heads(self, n_heads: int, n_kv_heads: int) -> tuple[range, range]:
        """Return the query heads and the key-value heads of this rank.

        A rank holds whole groups: a key-value head with all query heads that read it. Where there
        are more ranks than key-value heads, several ranks hold the same key-value head and divide
        its query heads. With 2 key-value heads, 4 ranks hold heads 0, 0, 1 and 1.
        """
        group_size = n_heads // n_kv_heads  # query heads that read one key-value head
        if self.size <= n_kv_heads:
            kv_heads = self.span(n_kv_heads)
            return range(kv_heads.start * group_size, kv_heads.stop * group_size), kv_heads
        owners = _bounds(self.size, (1,) * n_kv_heads)  # ranks of each key-value head
        kv_head = next(i for i in range(n_kv_heads) if self.rank < owners[i + 1])
        weights = self._weights()[owners[kv_head] : owners[kv_head + 1]]
        bounds = _bounds(group_size, weights)
        index = self.rank - owners[kv_head]
        first = kv_head * group_size
        return range(first + bounds[index], first + bounds[index + 1]), range(kv_head, kv_head + 1)

    def _weights(self) -> tuple[int, ...]:
        return self.shares or (1,) * self.size


def stage_of(rank: int, size: int, stages: int) -> int:
    """Return the pipeline stage of a rank of the job.

    Stages count from the first layers, and ranks from the last stage: rank 0 samples, leads and
    prints, and the last stage has what it needs for that. docs/concepts/ranks.md has a drawing.

    Args:
        rank: The rank among all ranks of the job.
        size: The number of ranks in the group of each stage.
        stages: The number of stages.
    """
    return stages - 1 - rank // size % stages


@functools.lru_cache(64)  # the table of tensors asks once for each of them
def divide_layers(n_layers: int, stages: int, lm_head: Fraction) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    The stages divide the work of an answer's token as evenly as whole layers allow. The last stage
    has fewer layers where its lm_head is large.

    Args:
        n_layers: The layers of the model.
        stages: The number of stages.
        lm_head: The work of the lm_head, in layers.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    if n_layers < stages:
        raise ValueError(f"{n_layers} layers cannot be divided among {stages} stages")
    if stages == 1:
        return (n_layers,)
    others = stages - 1

    def max_work(num_last: int) -> Fraction:
        """Return the work of the slowest stage, in layers, where the last has `num_last`."""
        num_first = -(-(n_layers - num_last) // others)
        return max(num_last + lm_head, Fraction(num_first))

    num_last = min(range(1, n_layers - others + 1), key=max_work)
    bounds = _bounds(n_layers - num_last, (1,) * others)
    return (*(end - start for start, end in pairwise(bounds)), num_last)


@functools.lru_cache(1024)
def _bounds(count: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Divide `count` units by weight; part i is from bound i to bound i + 1.

    Every part has at least one unit. Which parts get the units that remain after rounding follows
    from how far each is below its exact share (the largest remainder method); of equal ones, the
    first. Whole numbers alone are compared, so that every rank computes the same bounds.
    """
    if count < len(weights):
        raise ValueError(f"{count} units cannot be divided among {len(weights)} parts")
    total = sum(weights)
    counts = [max(1, count * weight // total) for weight in weights]

    def missing(part: int) -> int:
        """How far a part is below its exact share, in units times `total`."""
        return count * weights[part] - counts[part] * total

    parts = range(len(weights))
    while sum(counts) < count:
        counts[max(parts, key=missing)] += 1
    while sum(counts) > count:  # parts that were raised to one unit took it from the others
        counts[min((part for part in parts if counts[part] > 1), key=missing)] -= 1
    return tuple(accumulate(counts, initial=0))


WHOLE = Placement()  # a rank that holds the whole model
