"""Kernels that read rows of logits block by block: top tokens, sums, and races without filters.

In: logits, row maxima and parameters, see sample.py, which launches them and explains the method.
Out: maxima, sums and ids. The functions at the top are those that its own kernels share.

Shapes: B rows, V vocabulary, N blocks per row.
"""

import triton
import triton.language as tl

NUM_PARAMS = tl.constexpr(6)  # int64 numbers per row, see `pack_params`
UNIT = tl.constexpr(float(2**40))
ALL = tl.constexpr(2**62)  # a share of one
# Of the upper bits of a float32: exponent and two more. 2**-40 has the first that is counted.
FIRST_BIN = tl.constexpr(347)
LAST_BIN = tl.constexpr(162)  # behind that of the likeliest token
LOW_31 = tl.constexpr(2**31 - 1)
LOW_32 = tl.constexpr(2**32 - 1)
LOW_33 = tl.constexpr(2**33 - 1)
GROUP = tl.constexpr(256)  # ids, the first of which to come is known by one number


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
def share_of(whole, share):
    """floor(whole * share / 2**62), for a whole below 2**60."""
    high, low = share >> 31, share & LOW_31
    a, b = whole >> 31, whole & LOW_31
    return high * a + ((high * b + low * a + ((low * b) >> 31)) >> 31)


@triton.jit
def uniform_of(rules, row):
    """A row's number of 2**62, from its seed and position by Philox2x32-10, as in the sampler."""
    seed = tl.load(rules + row * NUM_PARAMS + 4)
    left = tl.load(rules + row * NUM_PARAMS + 5)
    right, key = (seed >> 32) & LOW_32, seed & LOW_32
    for _ in tl.static_range(10):
        product = left * 0xD256D193
        left = ((product >> 32) ^ key ^ right) & LOW_32
        right = product & LOW_32
        key = key + 0x9E3779B9
    return ((left >> 1) << 31) + (right >> 1)


@triton.jit
def number_of(uniform, n):
    """The n-th number of SplitMix64, begun at a row's uniform: 64 bits, as int64."""
    z = uniform + (n + 1) * -0x61C8864680B583EB
    z = (z ^ ((z >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & LOW_33)


@triton.jit
def exponential(numbers):
    """Numbers of 64 bits -> exponentially distributed ones, as in the sampler."""
    exponent = ((numbers & (2**23 - 1)) | 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    rest = ((numbers >> 23) & (2**41 - 1)) | 1
    x = rest >> 21
    log = ((20484697 * x) >> 20) - 15056127
    log = ((log * x) >> 20) + 39049523
    log = ((log * x) >> 20) + 60738888
    log = ((log * x) >> 20) + 193981894
    log = ((log * x) >> 20) + 774535977
    return ((149 - exponent).to(tl.int64) << 44) + ((rest * (log >> 10)) >> 17)


@triton.jit
def finishes_of(fixed_probs, ids, uniform):
    """When ids of these probabilities reach the goal of the race, as in the sampler: float64."""
    ids = ids.to(tl.int64)
    of_group = number_of(uniform, (ids >> 8) + 2**32)
    after = exponential(number_of(uniform, ids)) * GROUP
    after = tl.where(((of_group >> 23) & (GROUP - 1)) == (ids & (GROUP - 1)), 0, after)
    time = (exponential(of_group) + after).to(tl.float64)
    return tl.where(fixed_probs > 0, time / tl.maximum(fixed_probs, 1).to(tl.float64), float("inf"))


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
def row_tops(maxima, places, row_max, ids, n, CHECKED: tl.constexpr, N: tl.constexpr):
    """Of each row, from those of its blocks."""
    row = tl.program_id(0)
    blocks = tl.arange(0, N)
    x = tl.load(maxima + row * n + blocks, mask=blocks < n, other=-float("inf"))
    is_nan = x != x
    top = tl.max(tl.where(is_nan, -float("inf"), x), 0)
    first = tl.min(tl.where((x == top) & (blocks < n), blocks, n), 0)
    place = tl.load(places + row * n + tl.minimum(first, n - 1)).to(tl.int64)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    if CHECKED:
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
    logits, row_max, rules, sums, maxima, bins, finishes, firsts, stride, v, BLOCK: tl.constexpr,
    BINS: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    """Of each block of a row that draws: without filters, who is first in the race, and when; with
    some, the sum of probabilities, the largest as a float, and how many tokens there are in each
    bin of probability: a quarter of what lies between two powers of 2.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top, rate = tl.load(row_max + row), rate_of(rules, row)
    if is_sampled(top, rate):
        cols = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + cols, mask=cols < v, other=-float("inf"))
        probs = probs_of(x, top, rate)
        at = row * tl.num_programs(1) + block
        floor, top_k, top_p = filters_of(rules, row)
        if (floor == 0) & (top_k == 0) & (top_p >= ALL):
            finish = finishes_of(to_fixed(probs), cols, uniform_of(rules, row))
            best, first = first_of(finish, cols, v)
            tl.store(finishes + at, best)
            tl.store(firsts + at, first)
        elif FILTERS:
            tl.store(sums + at, tl.sum(to_fixed(probs), 0))
            tl.store(maxima + at, tl.max(probs, 0))
            own = tl.maximum((probs.to(tl.int32, bitcast=True) >> 21) - FIRST_BIN, 0)
            found = tl.histogram(own, BINS)
            own_bins = bins + row * BINS + tl.arange(0, BINS)
            tl.atomic_add(own_bins, found, mask=found > 0, sem="relaxed")


@triton.jit
def pick_of_all(row_max, rules, finishes, firsts, ids, v, n, N: tl.constexpr):
    """The id of a row that draws and has no filters: of those that are first in their blocks."""
    row = tl.program_id(0).to(tl.int64)
    floor, top_k, top_p = filters_of(rules, row)
    is_drawn = is_sampled(tl.load(row_max + row), rate_of(rules, row))
    if is_drawn & (floor == 0) & (top_k == 0) & (top_p >= ALL):
        blocks = tl.arange(0, N)
        at = row * n + blocks
        finish = tl.load(finishes + at, mask=blocks < n, other=float("inf"))
        first = tl.load(firsts + at, mask=blocks < n, other=v - 1)
        _best, winner = first_of(finish, first, v)
        tl.store(ids + row, winner.to(tl.int64))
