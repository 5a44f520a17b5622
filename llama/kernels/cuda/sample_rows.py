"""Kernels that read rows of logits block by block: top tokens, sums, and bounds of what is kept.

In: logits, row maxima and parameters, see sample.py, which launches them and explains the method.
Out: maxima, sums and ids. The functions at the top are those that its own kernels share.

Shapes: B rows, V vocabulary, N blocks per row.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from llama.ops import fixed_point

# `packed_params` are int64, six per row, see `pack_params`. No kernel may call them `params`: the
# function that Triton generates to launch a kernel has a local variable of that name.
NUM_PARAMS = tl.constexpr(6)
ONE = tl.constexpr(float(2**40))  # the fixed-point probability of the most probable token
ALL = tl.constexpr(2**62)  # top_p of 1, in fixed point
# Bins are the upper bits of a float32: its exponent and two bits more. The first bin that is
# counted is that of 2**-40, and the last is after that of the most probable token.
FIRST_BIN = tl.constexpr(347)
LAST_BIN = tl.constexpr(162)
GROUP = tl.constexpr(256)  # neighboring ids whose first arrival follows from one random number


def _jit(function: Callable[..., Any]) -> triton.JITFunction:
    """Compile a function of another module, with the names that Triton looks up in a module."""
    names = vars(fixed_point) | {"tl": tl, "Tensor": tl.tensor}
    return triton.jit(FunctionType(function.__code__, names, function.__name__))


share_of = _jit(fixed_point.share)
_uniform = _jit(fixed_point.uniform)
_split_mix = _jit(fixed_point.split_mix)
_scaled_exponential = _jit(fixed_point.exponential)


@triton.jit
def rate_of(packed_params: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return the factor that turns a row's logits into powers of 2; 0 for a greedy row."""
    bits = tl.load(packed_params + row * NUM_PARAMS).to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def filters_of(packed_params: tl.tensor, row: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the smallest probability that min_p keeps, top_k, and top_p as a part of 2**62.

    Without a filter they are 0, 0 and ALL.
    """
    row_params = packed_params + row * NUM_PARAMS
    floor = tl.load(row_params + 1)
    top_k = tl.load(row_params + 2)
    top_p = tl.load(row_params + 3)
    return floor, top_k, top_p


@triton.jit
def has_filters(packed_params: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return whether a row has min_p, top_k or top_p."""
    floor, top_k, top_p = filters_of(packed_params, row)
    return (floor > 0) | (top_k > 0) | (top_p < ALL)


@triton.jit
def is_sampled(top: tl.tensor, rate: tl.tensor) -> tl.tensor:
    """Return whether a row with this maximum and rate is sampled: not greedy, and finite."""
    return (tl.abs(top) < float("inf")) & (rate > 0)  # a comparison with NaN is false


@triton.jit
def probs_of(x: tl.tensor, top: tl.tensor, rate: tl.tensor) -> tl.tensor:
    """Return probabilities relative to the most probable token, as the torch body computes them."""
    return tl.exp2((x - top) * rate)


@triton.jit
def to_fixed(probs: tl.tensor) -> tl.tensor:
    """Return probabilities as whole numbers, of which ONE is that of the most probable token."""
    return (probs * ONE).to(tl.int64)


@triton.jit
def uniform_of(packed_params: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return a row's random number below 2**62, which follows from its seed and position."""
    row_params = packed_params + row * NUM_PARAMS
    seed = tl.load(row_params + 4)
    position = tl.load(row_params + 5)
    return _uniform(seed, position)


@triton.jit
def _exponential(bits: tl.tensor) -> tl.tensor:
    """Return exponentially distributed numbers, made of 64 random bits each."""
    low_bits = (bits & (2**23 - 1)) | 1
    exponent = low_bits.to(tl.float32).to(tl.int32, bitcast=True) >> 23
    halvings = (149 - exponent).to(tl.int64)
    return _scaled_exponential(bits, halvings)


@triton.jit
def finishes_of(fixed_probs: tl.tensor, begin: tl.tensor, uniform: tl.tensor) -> tl.tensor:
    """Return when ids reach the goal of the race, as in `llama.ops.sample`: float64.

    Args:
        fixed_probs: The probabilities of neighboring ids; those with 0 never arrive.
        begin: The first of the ids, a multiple of GROUP. What a group shares is computed once.
        uniform: The row's random number.
    """
    groups = begin // GROUP + tl.arange(0, fixed_probs.shape[0] // GROUP)
    of_group = _split_mix(uniform, groups.to(tl.int64) + 2**32)
    nth = tl.arange(0, GROUP)
    first_ids = groups[:, None].to(tl.int64) * GROUP
    ids = first_ids + nth[None, :]
    after = _exponential(_split_mix(uniform, ids)) * GROUP
    first_nth = (of_group >> 23) & (GROUP - 1)
    after = tl.where(first_nth[:, None] == nth[None, :], 0, after)
    first_time = _exponential(of_group)
    time = (first_time[:, None] + after).to(tl.float64)
    probs = tl.reshape(fixed_probs, ids.shape)
    arrives = probs > 0
    finish = time / tl.maximum(probs, 1).to(tl.float64)
    finish = tl.where(arrives, finish, float("inf"))
    return tl.reshape(finish, fixed_probs.shape)


@triton.jit
def first_of(finishes: tl.tensor, ids: tl.tensor, v: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the earliest arrival, and the lowest of the ids that have it."""
    best = tl.min(finishes, 0)
    best_ids = tl.where(finishes == best, ids, v - 1)
    return best, tl.min(best_ids, 0)


@triton.jit
def block_tops(
    logits: tl.tensor,
    maxima: tl.tensor,
    indices: tl.tensor,
    stride: tl.tensor,
    v: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the maximum of a block, NaN where there is one, and its first index in the row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    row_logits = logits + row * stride
    x = tl.load(row_logits + cols, mask=cols < v, other=-float("inf"))
    is_nan = x != x
    without_nan = tl.where(is_nan, -float("inf"), x)
    top = tl.max(without_nan, 0)
    is_top = (x == top) & (cols < v)
    index = tl.min(tl.where(is_top, cols, v), 0)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    at = row * tl.num_programs(1) + block
    tl.store(maxima + at, tl.where(has_nan, float("nan"), top))
    tl.store(indices + at, tl.minimum(index, v - 1))


@triton.jit
def row_tops(
    maxima: tl.tensor,
    indices: tl.tensor,
    row_max: tl.tensor,
    ids: tl.tensor,
    n: tl.tensor,
    N: tl.constexpr,
) -> None:
    """Write the maximum of a row and its first index, -1 if it is not finite, from its blocks'."""
    row = tl.program_id(0)
    blocks = tl.arange(0, N)
    x = tl.load(maxima + row * n + blocks, mask=blocks < n, other=-float("inf"))
    is_nan = x != x
    without_nan = tl.where(is_nan, -float("inf"), x)
    top = tl.max(without_nan, 0)
    is_top = (x == top) & (blocks < n)
    first = tl.min(tl.where(is_top, blocks, n), 0)
    index_at = indices + row * n + tl.minimum(first, n - 1)
    index = tl.load(index_at).to(tl.int64)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    is_infinite = tl.abs(top) == float("inf")
    index = tl.where(has_nan | is_infinite, -1, index)
    tl.store(row_max + row, tl.where(has_nan, float("nan"), top))
    tl.store(ids + row, index)


@triton.jit
def edge_of(bins: tl.tensor) -> tl.tensor:
    """Return the smallest fixed-point probability of each bin; 0 of the first."""
    bits = (tl.minimum(bins, LAST_BIN) + FIRST_BIN) << 21
    edge = bits.to(tl.float32, bitcast=True)
    return tl.where(bins > 0, to_fixed(edge), 0)


@triton.jit
def block_sums(
    logits: tl.tensor,
    row_max: tl.tensor,
    packed_params: tl.tensor,
    sums: tl.tensor,
    maxima: tl.tensor,
    bins: tl.tensor,
    stride: tl.tensor,
    v: tl.tensor,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Sum and count the probabilities of a block, of a row with filters.

    It writes the sum of the block and its largest probability, a float, and adds to the row's
    counts of tokens in each bin. A bin is a quarter of what lies between two powers of 2. In rows
    without filters the largest probability of each block is taken as 1.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    top = tl.load(row_max + row)
    rate = rate_of(packed_params, row)
    at = row * tl.num_programs(1) + block
    if is_sampled(top, rate) & has_filters(packed_params, row):
        cols = block * BLOCK + tl.arange(0, BLOCK)
        row_logits = logits + row * stride
        x = tl.load(row_logits + cols, mask=cols < v, other=-float("inf"))
        probs = probs_of(x, top, rate)
        tl.store(sums + at, tl.sum(to_fixed(probs), 0))
        tl.store(maxima + at, tl.max(probs, 0))
        upper_bits = probs.to(tl.int32, bitcast=True) >> 21
        bin_of = tl.maximum(upper_bits - FIRST_BIN, 0)
        counts = tl.histogram(bin_of, BINS)
        row_bins = bins + row * BINS + tl.arange(0, BINS)
        tl.atomic_add(row_bins, counts, mask=counts > 0, sem="relaxed")
    else:
        tl.store(maxima + at, 1.0)


@triton.jit
def row_bounds(
    packed_params: tl.tensor,
    sums: tl.tensor,
    bins: tl.tensor,
    totals: tl.tensor,
    bounds: tl.tensor,
    n: tl.tensor,
    N: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Write the sum of a row's probabilities, and a bound of at least 1 below which none is kept.

    The bound follows from the counts of the bins. The k-th largest probability is in the last bin
    that k tokens reach. Without min_p and top_k, the least likely tokens that together have less
    than the mass beyond top_p are not kept, even if they are at the upper ends of their bins.
    """
    row = tl.program_id(0).to(tl.int64)
    bound = tl.full((), 1, tl.int64)
    if has_filters(packed_params, row):
        floor, top_k, top_p = filters_of(packed_params, row)
        blocks = tl.arange(0, N)
        block_masses = tl.load(sums + row * n + blocks, mask=blocks < n, other=0)
        total = tl.sum(block_masses, 0)
        tl.store(totals + row, total)
        nth = tl.arange(0, BINS)
        counts = tl.load(bins + row * BINS + nth).to(tl.int64)
        reaching = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        max_masses = counts * edge_of(nth + 1)
        below = tl.cumsum(max_masses, 0) - max_masses
        is_bound = (top_k > 0) & (reaching >= top_k)
        has_top_p_only = (top_k == 0) & (floor == 0)
        is_bound |= has_top_p_only & (below < total - share_of(total, top_p))
        bin_bound = tl.max(tl.where(is_bound, edge_of(nth), 0), 0)
        bound = tl.maximum(bin_bound, tl.maximum(floor, 1))
    tl.store(bounds + row, bound)
