"""Kernels that read rows of logits block by block: top tokens, sums, and bounds of what is kept.

In: logits, row maxima and parameters, see sample.py, which launches them and explains the method.
Out: maxima, sums and ids. The functions at the top are those that its own kernels share.

Shapes: B rows, V vocabulary, N blocks per row.
"""

from collections.abc import Callable
from types import FunctionType

import triton
import triton.language as tl

from llama.ops import fixed_point

NUM_PARAMS = tl.constexpr(6)  # int64 numbers per row, see `pack_params`
UNIT = tl.constexpr(float(2**40))
ALL = tl.constexpr(2**62)  # a share of one
# Of the upper bits of a float32: exponent and two more. 2**-40 has the first that is counted.
FIRST_BIN = tl.constexpr(347)
LAST_BIN = tl.constexpr(162)  # behind that of the likeliest token
GROUP = tl.constexpr(256)  # ids, the first of which to come is known by one number


def _jit(function: Callable) -> triton.JITFunction:
    """Compiled, with what Triton and its interpreter look for among the names of its file."""
    seen = vars(fixed_point) | {"tl": tl, "Tensor": tl.tensor}
    return triton.jit(FunctionType(function.__code__, seen, function.__name__))


_uniform, share_of = _jit(fixed_point.uniform), _jit(fixed_point.share)
_split_mix, _exponential_of = _jit(fixed_point.split_mix), _jit(fixed_point.exponential)


@triton.jit
def rate_of(rules, row):
    """What a row's logits are multiplied with to be powers of 2; 0 where it is greedy."""
    return tl.load(rules + row * NUM_PARAMS).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def filters_of(rules, row):
    """min_p as the least probability, top_k, and top_p of 2**62; 0, 0 and ALL without."""
    at = rules + row * NUM_PARAMS
    return tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def has_filters(rules, row):
    floor, top_k, top_p = filters_of(rules, row)
    return (floor > 0) | (top_k > 0) | (top_p < ALL)


@triton.jit
def is_sampled(top, rate):
    """Whether a row with this maximum and rate is sampled."""
    return (tl.abs(top) < float("inf")) & (rate > 0)  # NaN is less than nothing


@triton.jit
def probs_of(x, top, rate):
    """Logits -> probabilities over that of the likeliest, as the torch body computes them."""
    return tl.exp2((x - top) * rate)


@triton.jit
def to_fixed(probs):
    return (probs * UNIT).to(tl.int64)


@triton.jit
def uniform_of(rules, row):
    """A row's number of 2**62, from its seed and position."""
    at = rules + row * NUM_PARAMS
    return _uniform(tl.load(at + 4), tl.load(at + 5))


@triton.jit
def _exponential(numbers):
    exponent = ((numbers & (2**23 - 1)) | 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return _exponential_of(numbers, (149 - exponent).to(tl.int64))


@triton.jit
def finishes_of(fixed_probs, begin, uniform):
    """When the ids of these probabilities, from `begin` on, a multiple of GROUP, reach the goal of
    the race, as in the sampler: float64. What a group has in common is computed once."""
    groups = begin // GROUP + tl.arange(0, fixed_probs.shape[0] // GROUP)
    of_group = _split_mix(uniform, groups.to(tl.int64) + 2**32)
    nth = tl.arange(0, GROUP)
    ids = groups[:, None].to(tl.int64) * GROUP + nth[None, :]
    after = _exponential(_split_mix(uniform, ids)) * GROUP
    after = tl.where(((of_group >> 23) & (GROUP - 1))[:, None] == nth[None, :], 0, after)
    time = (_exponential(of_group)[:, None] + after).to(tl.float64)
    probs = tl.reshape(fixed_probs, ids.shape)
    finish = tl.where(probs > 0, time / tl.maximum(probs, 1).to(tl.float64), float("inf"))
    return tl.reshape(finish, fixed_probs.shape)


@triton.jit
def first_of(finishes, ids, v):
    """The least, and the lowest of the ids that have it."""
    best = tl.min(finishes, 0)
    return best, tl.min(tl.where(finishes == best, ids, v - 1), 0)


@triton.jit
def block_tops(logits, maxima, places, stride, v, BLOCK: tl.constexpr):
    """The maximum of each block, NaN where there is one, and its first place."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + cols, mask=cols < v, other=-float("inf"))
    is_nan = x != x
    top = tl.max(tl.where(is_nan, -float("inf"), x), 0)
    place = tl.min(tl.where((x == top) & (cols < v), cols, v), 0)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    at = row * tl.num_programs(1) + block
    tl.store(maxima + at, tl.where(has_nan, float("nan"), top))
    tl.store(places + at, tl.minimum(place, v - 1))


@triton.jit
def row_tops(maxima, places, row_max, ids, n, N: tl.constexpr):
    """Of each row, from those of its blocks."""
    row = tl.program_id(0)
    blocks = tl.arange(0, N)
    x = tl.load(maxima + row * n + blocks, mask=blocks < n, other=-float("inf"))
    is_nan = x != x
    top = tl.max(tl.where(is_nan, -float("inf"), x), 0)
    first = tl.min(tl.where((x == top) & (blocks < n), blocks, n), 0)
    place = tl.load(places + row * n + tl.minimum(first, n - 1)).to(tl.int64)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    place = tl.where(has_nan | (tl.abs(top) == float("inf")), -1, place)
    tl.store(row_max + row, tl.where(has_nan, float("nan"), top))
    tl.store(ids + row, place)


@triton.jit
def edge_of(bins):
    """The least probability of each bin, as a whole number; 0 of the first."""
    edge = ((tl.minimum(bins, LAST_BIN) + FIRST_BIN) << 21).to(tl.float32, bitcast=True)
    return tl.where(bins > 0, to_fixed(edge), 0)


@triton.jit
def block_sums(
    logits, row_max, rules, sums, maxima, bins, stride, v, BLOCK: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """Of each block of a row with filters the sum of probabilities, the largest as a float, and how
    many tokens there are in each bin of probability: a quarter of what lies between two powers of
    2. Of other rows the largest is 1."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top, rate = tl.load(row_max + row), rate_of(rules, row)
    at = row * tl.num_programs(1) + block
    if is_sampled(top, rate) & has_filters(rules, row):
        cols = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + cols, mask=cols < v, other=-float("inf"))
        probs = probs_of(x, top, rate)
        tl.store(sums + at, tl.sum(to_fixed(probs), 0))
        tl.store(maxima + at, tl.max(probs, 0))
        own = tl.maximum((probs.to(tl.int32, bitcast=True) >> 21) - FIRST_BIN, 0)
        found = tl.histogram(own, BINS)
        own_bins = bins + row * BINS + tl.arange(0, BINS)
        tl.atomic_add(own_bins, found, mask=found > 0, sem="relaxed")
    else:
        tl.store(maxima + at, 1.0)


@triton.jit
def row_bounds(rules, sums, bins, totals, bounds, n, N: tl.constexpr, BINS: tl.constexpr):
    """Of each row the sum of all probabilities, and one of at least 1 below which no token is kept,
    from how many each bin has.

    The k-th largest is in the last bin that k tokens reach. Without min_p and top_k, the least
    tokens that together have less than the mass beyond top_p are outside, if at their bins' ends.
    """
    row, bound = tl.program_id(0).to(tl.int64), tl.full((), 1, tl.int64)
    if has_filters(rules, row):
        floor, top_k, top_p = filters_of(rules, row)
        blocks = tl.arange(0, N)
        total = tl.sum(tl.load(sums + row * n + blocks, mask=blocks < n, other=0), 0)
        tl.store(totals + row, total)
        nth = tl.arange(0, BINS)
        counts = tl.load(bins + row * BINS + nth).to(tl.int64)
        reaching = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        below = tl.cumsum(counts * edge_of(nth + 1), 0) - counts * edge_of(nth + 1)
        least = (top_k > 0) & (reaching >= top_k)
        least |= (top_k == 0) & (floor == 0) & (below < total - share_of(total, top_p))
        bound = tl.maximum(tl.max(tl.where(least, edge_of(nth), 0), 0), tl.maximum(floor, 1))
    tl.store(bounds + row, bound)
