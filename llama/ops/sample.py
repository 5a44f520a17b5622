"""The next token of each row: logits and sampling parameters in, ids out.

Probabilities are fixed-point integers, so that their sums are exact in any order. The id depends on
its own row of logits, its filters, seed and position alone, not on the batch or on the order in
which a device adds. A kernel gives the same ids. Requests, grammars and kernels must not be known
here.

A draw is an exponential race: each id has a random time, an integer that follows from seed,
position and id, and the id with the smallest time over probability wins. Two models to which the
same ids are likely so draw the same one as often as is possible without communication (Daliri,
Musco and Suresh, 2024, drafter-invariant speculative decoding).

Shapes: B rows; V vocabulary; C candidates of a race.
"""

import functools
import math
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llama.common.allocation import pinned
from llama.ops.fixed_point import exponential, share, split_mix, uniform
from llama.ops.kernels import NO_KERNELS, Kernels

_Array = np.ndarray[Any, Any]

# The fixed-point probability of the most probable token. A token of less than 2**-40 of that has 0,
# and is never sampled.
FIXED_ONE = 2**40
_GROUP = 256  # neighbouring ids whose first arrival is known by one number
_SHARE_ONE = 2**62  # a share of 1, see `fixed_point.share`


class SamplingRow(NamedTuple):
    """The filters of one row: see `sample_ids`. The defaults sample from all tokens as they are."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def is_filtered(self) -> bool:
        """Return whether a filter may exclude tokens."""
        return self.top_p < 1 or self.min_p > 0 or self.top_k > 0


def choose_ids(
    logits: Tensor,
    rows: Seq[SamplingRow | None],
    seeds: Seq[int],
    positions: Seq[int],
    kernels: Kernels = NO_KERNELS,
) -> Tensor:
    """Return the next id of each row, sampled or the top one.

    Args:
        logits: (B, V) float32.
        rows: The filters of each row; None for the top token.
        seeds: The seed of each row, from 0.
        positions: The position of each row, below 2**32. What is sampled follows from it and the
            seed.
        kernels: The kernels that may run.

    Returns:
        (B) ids. A row without a finite maximum has -1: no token is allowed, or its logits have NaN
        or +inf.
    """
    chosen: Tensor | None = kernels.run("choose_ids", logits, rows, seeds, positions)
    if chosen is not None:
        return chosen
    row_max, ids = top_tokens(logits, kernels)
    if any(row is not None for row in rows):
        # Philox has about 70 tiny operations: they run on the host, while the model runs.
        seed_tensor = torch.tensor(seeds)
        position_tensor = torch.tensor(positions)
        uniforms = uniform(seed_tensor, position_tensor)
        filters = [row or SamplingRow() for row in rows]
        sampled = sample_ids(logits, row_max, filters, uniforms, kernels)
        sampled = sampled.where(row_max.isfinite(), -1)
        takes_top = on_device_of(logits, [row is None for row in rows])
        ids = ids.where(takes_top, sampled)
    return ids


def top_tokens(logits: Tensor, kernels: Kernels = NO_KERNELS) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row, and its id.

    Args:
        logits: (B, V).
        kernels: The kernels that may run.

    Returns:
        (B) maxima, NaN where a row has one; and (B) ids, the first of several, -1 where the maximum
        is not finite.
    """
    tops: tuple[Tensor, Tensor] | None = kernels.run("top_tokens", logits)
    if tops is not None:
        return tops
    row_max = logits.amax(dim=-1)
    ids = logits.argmax(dim=-1)
    return row_max, ids.where(row_max.isfinite(), -1)


def sample_ids(
    logits: Tensor,
    row_max: Tensor,
    rows: Seq[SamplingRow],
    uniforms: Tensor,
    kernels: Kernels = NO_KERNELS,
) -> Tensor:
    """Return a sampled id for each row; a row without a finite maximum gets any id.

    The temperature divides the logits. min_p keeps tokens that are at least min_p times as likely
    as the top token. top_k keeps the k most probable, and those as likely as the k-th. top_p keeps,
    of what these leave, a token while the mass before it, from the most probable down, is at most
    top_p. Of tokens as likely as the last one, those with the lowest ids are kept.

    Args:
        logits: (B, V) float32, which are not changed.
        row_max: (B) The maximum of each row.
        rows: The filters of each row.
        uniforms: (B) int64 below 2**62, on the host. They give the random times of the ids.
        kernels: The kernels that may run.

    Returns:
        (B) ids.
    """
    assert logits.dtype is torch.float32, logits.dtype
    sampled: Tensor | None = kernels.run("sample_ids", logits, row_max, rows, uniforms)
    if sampled is not None:
        return sampled
    if logits.device.type == "mps":
        # An Apple GPU has no float64, in which the finishes of the race are compared. It shares the
        # host's memory, so that the copy takes less than a millisecond per row.
        return sample_ids(logits.cpu(), row_max.cpu(), rows, uniforms, kernels).to(logits.device)
    is_cuda = logits.device.type == "cuda"
    uniforms = uniforms.to(logits.device, non_blocking=is_cuda)
    uniforms = uniforms[:, None]
    fixed_probs = relative_probs(logits, row_max, rows).mul_(FIXED_ONE).long()
    kept, ids = _filtered(fixed_probs, rows, uniforms)
    finishes = _finishes(kept, ids, uniforms)
    winners = finishes.argmin(1, keepdim=True)
    return ids.gather(1, winners).squeeze(1)


def on_device_of(tensor: Tensor, values: Seq[Any] | _Array) -> Tensor:
    """Return numbers on the device of a tensor, without a sync; floats become float32."""
    dtype = np.float32 if isinstance(values[0], float) else None
    device = tensor.device
    # NumPy makes a tensor of a long list several times as fast. A copy to mps must not be
    # asynchronous: the memory may be freed before it is read (pytorch #189690).
    host = pinned(np.asarray(values, dtype), device)
    return host.to(device, non_blocking=device.type == "cuda")


def pack_params(
    rows: Seq[SamplingRow | None],
    draws: Seq[Seq[int]],
) -> _Array:
    """Return what kernels read of each row, as one array.

    Args:
        rows: The filters of each row; None for a greedy row.
        draws: The N integers of each row's draw: its uniform below 2**62, or the seed and position
            of which a GPU makes that.

    Returns:
        (B, 4 + N) int64: the bits of the float32 that turns logits into powers of 2, 0 for a greedy
        row; the smallest fixed-point probability that min_p keeps; top_k; top_p times 2**62; and
        the draw.
    """
    filters = _filters(tuple(rows))
    packed_draws = np.array(draws, np.int64)
    return np.hstack((filters, packed_draws))


@functools.lru_cache(16)
def _filters(rows: tuple[SamplingRow | None, ...]) -> _Array:
    """Return the part of `pack_params` that is the same in each step: (B, 4)."""
    packed = np.empty((len(rows), 4), np.int64)
    for i, row in enumerate(rows):
        rate = math.log2(math.e) / row.temperature if row else 0
        row = row or SamplingRow()
        packed[i] = (
            np.float32(rate).view(np.int32),
            math.ceil(row.min_p * FIXED_ONE),
            max(row.top_k, 0),
            int(row.top_p * _SHARE_ONE),
        )
    return packed


def relative_probs(logits: Tensor, row_max: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """Return probabilities after temperature, relative to the top token's: (B, V) float32."""
    filters = _filters(tuple(rows))
    rate_bits = filters[:, 0].astype(np.int32)
    rates = on_device_of(logits, rate_bits.view(np.float32))
    scores = logits - row_max[:, None]  # at most 0: no temperature makes them overflow
    # These are powers of 2, because on a CPU torch's exp takes three times as long.
    return scores.mul_(rates[:, None]).exp2_()


def _filtered(
    fixed_probs: Tensor,
    rows: Seq[SamplingRow],
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return what min_p, top_k and top_p keep; of rows without filters, what can win the race.

    Each filter has a lower bound, so that few tokens are sorted. min_p and top_k are such bounds
    themselves. V tokens of which each is below a V-th of the mass beyond top_p cannot reach into
    the nucleus.

    Args:
        fixed_probs: (B, V).
        rows: The filters of each row.
        uniforms: (B, 1).

    Returns:
        (B, C) probabilities, 0 for those that are not kept; and (B, C) ids, ascending.
    """
    v = fixed_probs.shape[1]
    filters = _filters(tuple(rows))
    without_rates = on_device_of(fixed_probs, filters[:, 1:])
    min_prob, top_k, max_share = without_rates.unbind(1)
    max_k = int(filters[:, 2].max())
    max_k = min(max_k, v)
    if max_k:
        last = top_k.clamp(1, v)[:, None] - 1
        kth = fixed_probs.topk(max_k).values.gather(1, last).squeeze(1)
        min_prob = torch.where(top_k > 0, min_prob.maximum(kth), min_prob)
    total = fixed_probs.sum(dim=-1)
    beyond = total - share(total, max_share)
    lower_bound = torch.where(min_prob > 0, min_prob, beyond // v)
    lower_bound = lower_bound.clamp(min=1)
    is_kept = fixed_probs >= lower_bound[:, None]
    has_filters = [row.is_filtered for row in rows]
    if not all(has_filters):
        is_filtered = on_device_of(fixed_probs, has_filters)[:, None]
        is_kept &= is_filtered | _can_win(fixed_probs, uniforms)
    kept, ids = _gathered(fixed_probs, is_kept)
    if all(row.top_p == 1 for row in rows):
        return kept, ids
    ordered, order = kept.sort(dim=-1, descending=True, stable=True)
    mass = torch.where(min_prob > 0, kept.sum(dim=-1), total)
    limit = share(mass, max_share)
    mass_before = ordered.cumsum(dim=-1) - ordered
    ordered.masked_fill_(mass_before > limit[:, None], 0)
    return kept.scatter_(1, order, ordered), ids


def _gathered(fixed_probs: Tensor, is_kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities that are kept, and their ids; 0 fills shorter rows.

    This waits for the device, as C depends on the values: tens for a confident model, V where all
    tokens are equally likely.

    Args:
        fixed_probs: (B, V).
        is_kept: (B, V) bool.

    Returns:
        (B, C) probabilities, and (B, C) ids.
    """
    row, ids = is_kept.nonzero(as_tuple=True)
    counts = row.bincount(minlength=len(fixed_probs))
    first = counts.cumsum(0) - counts
    column = torch.arange(len(row), device=row.device)
    column = column - first[row]
    max_count = int(counts.max())
    shape = (len(fixed_probs), max(1, max_count))
    packed = fixed_probs.new_zeros(shape)
    packed_ids = fixed_probs.new_zeros(shape)
    packed[row, column] = fixed_probs[row, ids]
    packed_ids[row, column] = ids
    return packed, packed_ids


def _finishes(fixed_probs: Tensor, ids: Tensor, uniforms: Tensor) -> Tensor:
    """Return when each id finishes the race: its random time over its probability.

    The first time in a group of ids has a random number of its own, and so has each time after that
    one. The times are then exponential, and one number decides whether a group can win: the first
    of n exponential times comes n times as early, and the rest of the wait has no memory of it.

    Args:
        fixed_probs: (B, C).
        ids: (B, C).
        uniforms: (B, 1).

    Returns:
        (B, C) float64.
    """
    group_bits = split_mix(uniforms, ids // _GROUP + 2**32)
    after_first = split_mix(uniforms, ids)
    after_first = _exponential(after_first) * _GROUP
    is_first = _first_in_group(group_bits) == ids % _GROUP
    after_first.masked_fill_(is_first, 0)
    times = (_exponential(group_bits) + after_first).double()
    return times / fixed_probs


def _can_win(fixed_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return which ids are in a group that is early enough, (B, V) bool.

    They are compared with the first ids of all groups.

    Args:
        fixed_probs: (B, V).
        uniforms: (B, 1).
    """
    v = fixed_probs.shape[1]
    num_groups = -(-v // _GROUP)
    groups = torch.arange(num_groups, device=fixed_probs.device)
    group_bits = split_mix(uniforms, groups + 2**32)
    firsts = groups * _GROUP + _first_in_group(group_bits)
    firsts = firsts.clamp(max=v - 1)
    first_probs = fixed_probs.gather(1, firsts)
    finishes = _finishes(first_probs, firsts, uniforms)
    best = finishes.amin(1, keepdim=True)
    earliest = _exponential(group_bits).repeat_interleave(_GROUP, dim=1)
    earliest = earliest[:, :v].double() / fixed_probs
    return earliest <= best


def _first_in_group(group_bits: Tensor) -> Tensor:
    """Return which id of a group, from 0 to 255, comes first."""
    return (group_bits >> 23) % _GROUP


def _exponential(bits: Tensor) -> Tensor:
    """Return exponentially distributed integers, made of 64 random bits each.

    The exponent of a float32 counts the leading zeros of the low 23 bits; see `exponential`.
    """
    low_bits = (bits & (2**23 - 1)) | 1
    exponent = low_bits.float().view(torch.int32) >> 23
    halvings = 149 - exponent.long()
    return exponential(bits, halvings)
