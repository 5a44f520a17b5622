"""Sampling on a GPU in Triton: rows of logits and their parameters in, one id per row out.

The ids are those of the torch body in llama/ops/sample.py, which has the definition: probabilities
are whole numbers, so that every sum is exact in any order, and programs may add up as they come.
Nothing here waits for the device, and no shape depends on a value: two launches for the top tokens,
two more for a draw, two more where rows have filters. There a row that needs less leaves early.

Filters need no sort. A histogram says how many tokens of a row there are of each probability; from
it follows a bound below which no token is kept, and what reaches it is gathered, in any order.
One program per row then finds the thresholds of top_k and of top_p, and the id of the last kept
tie, by radix select, 4 bits at a time; then what is kept races. Where more than SLOTS tokens reach
the bound it reads the whole row instead: slower, the same id.

Shapes: B rows, V vocabulary, N blocks per row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.ops.triton.sample_rows import (
    ALL,
    NUM_PARAMS,
    block_sums,
    block_tops,
    edge_of,
    filters_of,
    finishes_of,
    first_of,
    is_sampled,
    pick_of_all,
    probs_of,
    rate_of,
    row_tops,
    share_of,
    to_fixed,
    uniform_of,
)

SLOTS = 4096  # tokens per row that filters look at together

_MAX_BLOCKS, _MIN_BLOCK = 128, 1024  # per row, tokens
_BINS = 256  # of probability, and one place more
_DIGITS = tl.constexpr(11)  # of a probability: the most is 2**40
_CHUNK = 512  # tokens that are compared with the 16 bounds of a digit at once


def top_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(B, V) float32 -> (B) maxima, NaN where there is one, and (B) int64 first places of them, -1
    where the maximum is not finite."""
    logits = _rows_in_one_piece(logits)
    (b, v), (block, n) = logits.shape, _blocks(logits)
    maxima = logits.new_empty(b, n)
    places = logits.new_empty(b, n, dtype=torch.int32)
    row_max, ids = logits.new_empty(b), logits.new_empty(b, dtype=torch.int64)
    block_tops[b, n](logits, maxima, places, logits.stride(0), v, BLOCK=block)
    row_tops[b,](maxima, places, row_max, ids, n, N=_padded(n))
    return row_max, ids


def choose(logits: Tensor, rules: Tensor, *, has_filters: bool) -> Tensor:
    """(B, V) float32 logits, rules (B, 6) of `pack_params`, on the device -> (B) int64 ids.

    Greedy rows take the top token, the others a draw; -1 as in `Sampled`. has_filters: whether any
    row may have some; without, their kernels are not launched.
    """
    logits = _rows_in_one_piece(logits)
    row_max, ids = top_tokens(logits)
    (b, v), (block, n) = logits.shape, _blocks(logits)
    assert rules.shape == (b, NUM_PARAMS.value) and rules.is_contiguous(), rules.shape
    sums = logits.new_empty(b, n, dtype=torch.int64)
    maxima = logits.new_empty(b, n)
    finishes = logits.new_empty(b, n, dtype=torch.float64)
    firsts = logits.new_empty(b, n, dtype=torch.int32)
    row = logits, row_max, rules  # what each kernel reads of its row
    # Of each row with filters: tokens by probability; in the last place, how many are gathered.
    bins = logits.new_zeros(b if has_filters else 0, _BINS, dtype=torch.int32)
    block_sums[b, n](
        *row, sums, maxima, bins, finishes, firsts, logits.stride(0), v, BLOCK=block, BINS=_BINS,
        FILTERS=has_filters,
    )  # fmt: skip
    sizes = {"N": _padded(n)}
    pick_of_all[b,](row_max, rules, finishes, firsts, ids, v, n, **sizes)
    if has_filters:
        slots = logits.new_empty(b, SLOTS, dtype=torch.int32)
        gather[b, n](
            *row, sums, maxima, bins, slots, logits.stride(0), v, n, **sizes, BLOCK=block,
            BINS=_BINS, SLOTS=SLOTS, num_warps=8,
        )  # fmt: skip
        pick_of_kept[b,](
            *row, sums, bins, slots, ids, logits.stride(0), v, n, **sizes, BINS=_BINS, SLOTS=SLOTS,
            CHUNK=_CHUNK, ID_DIGITS=-(-(v - 1).bit_length() // 4), num_warps=8,
        )  # fmt: skip
    return ids


def _rows_in_one_piece(logits: Tensor) -> Tensor:
    assert logits.dtype is torch.float32, logits.dtype
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _blocks(logits: Tensor) -> tuple[int, int]:
    """The size of a row's blocks, a power of 2, and how many there are."""
    v = logits.shape[1]
    block = max(_MIN_BLOCK, triton.next_power_of_2(-(-v // _MAX_BLOCKS)))
    return block, -(-v // block)


def _padded(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


@triton.jit
def _lower_bound(bins, total, floor, top_k, top_p, BINS: tl.constexpr):
    """A probability of at least 1 below which no token is kept, from how many each bin has.

    The k-th largest is in the last bin that k tokens reach. Without min_p and top_k, the least
    tokens that together have less than the mass beyond top_p are outside, if at their bins' ends.
    """
    nth = tl.arange(0, BINS)
    counts = tl.load(bins + nth, mask=nth < BINS - 1, other=0).to(tl.int64)
    reaching = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    below = tl.cumsum(counts * edge_of(nth + 1), 0) - counts * edge_of(nth + 1)
    least = (top_k > 0) & (reaching >= top_k)
    least |= (top_k == 0) & (floor == 0) & (below < total - share_of(total, top_p))
    bound = tl.max(tl.where(least & (nth < BINS - 1), edge_of(nth), 0), 0)
    return tl.maximum(tl.maximum(bound, floor), 1)


@triton.jit
def gather(
    logits, row_max, rules, sums, maxima, bins, slots, stride, v, n, N: tl.constexpr,
    BLOCK: tl.constexpr, BINS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Of each row with filters: the ids of what reaches its bound, in any order, and how many."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top, rate = tl.load(row_max + row), rate_of(rules, row)
    floor, top_k, top_p = filters_of(rules, row)
    if is_sampled(top, rate) & ((floor > 0) | (top_k > 0) | (top_p < ALL)):
        blocks = tl.arange(0, N)
        total = tl.sum(tl.load(sums + row * n + blocks, mask=blocks < n, other=0), 0)
        bins += row * BINS
        bound = _lower_bound(bins, total, floor, top_k, top_p, BINS)
        if to_fixed(tl.load(maxima + row * n + block)) >= bound:
            cols = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + row * stride + cols, mask=cols < v, other=-float("inf"))
            reaches = to_fixed(probs_of(x, top, rate)) >= bound
            nth = tl.cumsum(reaches.to(tl.int32), 0)
            start = tl.atomic_add(bins + BINS - 1, tl.sum(reaches.to(tl.int32), 0), sem="relaxed")
            at = start + nth - 1
            tl.store(slots + row * SLOTS + at, cols, mask=reaches & (at < SLOTS))


@triton.jit
def _listed(logits, slots, first, count, is_whole, top, rate, CHUNK: tl.constexpr):
    """Probabilities and ids of a chunk of a row's candidates, 0 behind the last one."""
    nth = first + tl.arange(0, CHUNK)
    inside = nth < count
    ids = tl.load(slots + nth, mask=inside & (is_whole == 0), other=0)
    ids = tl.where(is_whole != 0, nth, ids)
    x = tl.load(logits + ids, mask=inside, other=-float("inf"))
    return to_fixed(probs_of(x, top, rate)), ids


@triton.jit
def _threshold(
    logits, slots, count, is_whole, top, rate, floor, limit, OF: tl.constexpr, DIGITS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The least t such that of the candidates of at least `floor` those above t sum to at most
    `limit` ("mass"), or are at most so many ("count"); or of those of just `floor` at most so many
    have an id above t ("ids")."""
    found = limit * 0
    shift = found + 4 * (DIGITS - 1)  # where the first digit begins
    for _digit in range(0, DIGITS):
        bounds = found + ((tl.arange(0, 16) + 1).to(tl.int64) << shift)
        amounts = tl.zeros((16,), tl.int64)
        for first in range(0, count, CHUNK):
            probs, ids = _listed(logits, slots, first, count, is_whole, top, rate, CHUNK)
            if OF == "ids":
                counted = (probs == floor)[:, None] & (ids[:, None] >= bounds[None, :])
            else:
                counted = (probs >= floor)[:, None] & (probs[:, None] >= bounds[None, :])
            if OF == "mass":
                amounts += tl.sum(tl.where(counted, probs[:, None], 0), 0)
            else:
                amounts += tl.sum(counted.to(tl.int32), 0)
        found += tl.sum((amounts > limit).to(tl.int64), 0) << shift
        shift -= 4
    return found


@triton.jit
def _sum_above(
    logits, slots, count, is_whole, top, rate, above, CHUNK: tl.constexpr
):  # fmt: skip
    """The sum of all candidates above a probability."""
    total = above * 0
    for first in range(0, count, CHUNK):
        probs, _ids = _listed(logits, slots, first, count, is_whole, top, rate, CHUNK)
        total += tl.sum(tl.where(probs > above, probs, 0), 0)
    return total


@triton.jit
def pick_of_kept(
    logits, row_max, rules, sums, bins, slots, ids, stride, v, n,
    N: tl.constexpr, BINS: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
    ID_DIGITS: tl.constexpr,
):  # fmt: skip
    """The id of a row that draws and has filters, of what `gather` found or of the whole row."""
    row = tl.program_id(0).to(tl.int64)
    top, rate = tl.load(row_max + row), rate_of(rules, row)
    floor, top_k, top_p = filters_of(rules, row)
    if is_sampled(top, rate) & ((floor > 0) | (top_k > 0) | (top_p < ALL)):
        logits += row * stride
        slots += row * SLOTS
        count = tl.load(bins + row * BINS + BINS - 1)
        is_whole = (count > SLOTS).to(tl.int32)
        count = tl.where(is_whole != 0, v, count)
        has_floor = (floor > 0) | (top_k > 0)
        floor = tl.maximum(floor, 1)
        if top_k > 0:
            kth = _threshold(
                logits, slots, count, is_whole, top, rate, floor, top_k - 1, "count", _DIGITS, CHUNK
            )
            floor = tl.maximum(floor, kth)
        if has_floor:
            mass = _sum_above(logits, slots, count, is_whole, top, rate, floor - 1, CHUNK)
        else:  # what is outside the bound counts too
            blocks = tl.arange(0, N)
            mass = tl.sum(tl.load(sums + row * n + blocks, mask=blocks < n, other=0), 0)
        # The last kept probability, and the last id kept of it; without top_p nothing is cut.
        limit = share_of(mass, top_p)
        last, last_id = floor - 1, (mass * 0).to(tl.int32) - 1
        if limit < mass:
            last = _threshold(
                logits, slots, count, is_whole, top, rate, floor, limit, "mass", _DIGITS, CHUNK
            )
            above = _sum_above(logits, slots, count, is_whole, top, rate, last - 1, CHUNK)
            beyond = (above - limit - 1) // last  # of those as likely as the last one
            last_id = _threshold(
                logits, slots, count, is_whole, top, rate, last, beyond, "ids", ID_DIGITS, CHUNK
            ).to(tl.int32)
        uniform = uniform_of(rules, row)
        best = tl.full((CHUNK,), float("inf"), tl.float64)
        winners = tl.full((CHUNK,), 0, tl.int32) + v - 1
        for first in range(0, count, CHUNK):
            probs, listed = _listed(logits, slots, first, count, is_whole, top, rate, CHUNK)
            is_kept = (probs > last) | ((probs == last) & (listed <= last_id))
            finish = finishes_of(tl.where(is_kept, probs, 0), listed, uniform)
            is_first = (finish < best) | ((finish == best) & (listed < winners))
            best = tl.where(is_first, finish, best)
            winners = tl.where(is_first, listed, winners)
        _best, winner = first_of(best, winners, v)
        tl.store(ids + row, winner.to(tl.int64))
