"""Sampling on a GPU in Triton: rows of logits and their parameters in, one id per row out.

The ids are those of the torch body in llama/ops/sample.py, which has the definition: probabilities
are whole numbers, so that every sum is exact in any order, and programs may add up as they come.
Nothing here waits for the device, and no shape depends on a value: two launches for the top tokens,
two more for a draw, two more where rows have filters. There a row that needs less leaves early.

Filters need no sort, and no threshold of top_p. A histogram says how many tokens of a row there are
of each probability; from it follows a bound below which no token is kept, and what reaches it
races. Who is first is the first of what is kept as well, if it is kept itself: one program per row
sums what comes before it. If not, all from it on are out, and the rest is asked again; rejection as
in FlashInfer's sampling (Ye et al., 2025), with one id whatever the order. That is rare, as the
bound leaves hardly more than is kept. Blocks without a likely token are not read again.

Shapes: B rows, V vocabulary, N blocks per row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.ops.triton.kernels import launcher
from llama.ops.triton.sample_rows import (
    FIRST_BIN,
    NUM_PARAMS,
    block_sums,
    block_tops,
    edge_of,
    filters_of,
    finishes_of,
    first_of,
    has_filters,
    is_sampled,
    probs_of,
    rate_of,
    row_bounds,
    row_tops,
    share_of,
    to_fixed,
    uniform_of,
)

_MAX_BLOCKS, _MIN_BLOCK = 128, 1024  # per row, tokens
_BINS = 256  # of probability
_CHUNK = 8192  # tokens that one program looks at together


@launcher
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


@launcher
def choose(logits: Tensor, rules: Tensor, *, is_filtered: bool) -> Tensor:
    """(B, V) float32 logits, rules (B, 6) of `pack_params`, on the device -> (B) int64 ids.

    Greedy rows take the top token, the others a draw; -1 as in `Sampled`. is_filtered: whether any
    row may have some; without, their kernels are not launched.
    """
    logits = _rows_in_one_piece(logits)
    row_max, ids = top_tokens(logits)
    (b, v), (block, n) = logits.shape, _blocks(logits)
    assert rules.shape == (b, NUM_PARAMS.value) and rules.is_contiguous(), rules.shape
    maxima = logits.new_empty(b, n)
    bins = logits.new_zeros(b if is_filtered else 0, _BINS, dtype=torch.int32)
    totals, bounds = logits.new_empty(2, b, dtype=torch.int64)
    row, stride = (logits, row_max, rules), logits.stride(0)  # what each kernel reads of its row
    if is_filtered:
        sums = logits.new_empty(b, n, dtype=torch.int64)
        block_sums[b, n](*row, sums, maxima, bins, stride, v, BLOCK=block, BINS=_BINS)
        row_bounds[b,](rules, sums, bins, totals, bounds, n, N=_padded(n), BINS=_BINS)
    finishes = logits.new_empty(b, n, dtype=torch.float64)
    firsts = logits.new_empty(b, n, dtype=torch.int32)
    sizes = {"BLOCK": block, "FILTERS": is_filtered}
    chunk = min(max(_CHUNK, block), block * triton.next_power_of_2(n))
    block_races[b, n](*row, maxima, bounds, finishes, firsts, stride, v, **sizes)
    pick[b,](
        *row, maxima, bins, totals, finishes, firsts, ids, stride, v, n, **sizes, N=_padded(n),
        BINS=_BINS, CHUNK=chunk, num_warps=max(4, chunk // 512),
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
def _chunk(logits, begin, v, CHUNK: tl.constexpr):
    cols = begin + tl.arange(0, CHUNK)
    return tl.load(logits + cols, mask=cols < v, other=-float("inf")), cols


@triton.jit
def _is_before(probs, ids, prob, id):
    """Which tokens come before one, from the likeliest down, of equal ones from the first up."""
    return (probs > prob) | ((probs == prob) & (ids < id))


@triton.jit
def _race(logits, block, top, rate, uniform, prob, id, v, BLOCK: tl.constexpr):
    """Of a block's tokens before a pivot: who is first, and when; infinity where there is none."""
    x, cols = _chunk(logits, block * BLOCK, v, BLOCK)
    probs = to_fixed(probs_of(x, top, rate))
    is_in = _is_before(probs, cols, prob, id)
    return first_of(finishes_of(tl.where(is_in, probs, 0), block * BLOCK, uniform), cols, v)


@triton.jit
def block_races(
    logits, row_max, rules, maxima, bounds, finishes, firsts, stride, v, BLOCK: tl.constexpr,
    FILTERS: tl.constexpr,
):  # fmt: skip
    """Of each row that draws: who of a block is first, of what reaches the row's bound."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top, rate = tl.load(row_max + row), rate_of(rules, row)
    at, bound, is_in = row * tl.num_programs(1) + block, tl.full((), 1, tl.int64), rate > 0
    if FILTERS:
        bound = tl.load(bounds + row)
        is_in = to_fixed(tl.load(maxima + at)) >= bound
        tl.store(finishes + at, float("inf"))
    if is_sampled(top, rate) & is_in:
        own, uniform = logits + row * stride, uniform_of(rules, row)
        best, first = _race(own, block, top, rate, uniform, bound, v, v, BLOCK)
        tl.store(finishes + at, best)
        tl.store(firsts + at, first)


@triton.jit
def _place_of(counts, k):
    """Of ascending numbers, counted: the k-th largest, 0 where there are fewer; and which it is of
    its equals."""
    places = tl.arange(0, counts.shape[0])
    reaching = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    place = tl.max(tl.where(reaching >= k, places, 0), 0)
    return place, k - tl.sum(tl.where(places > place, counts, 0), 0)


@triton.jit
def _kth(
    logits, maxima, bins, top, rate, k, v, n, BINS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The k-th largest probability of a row, 0 where fewer count: the bits of its float32 are found
    from above, 11 by the bins, then 7 at a time."""
    bin, k = _place_of(tl.load(bins + tl.arange(0, BINS)), k)
    bits = bin + FIRST_BIN
    if bin > 0:
        for nth in range(0, 3):
            counts = tl.zeros((128,), tl.int32)
            for first in range(0, n, CHUNK // BLOCK):
                if _top_of(maxima, first, n, CHUNK // BLOCK) >= edge_of(bin):
                    x, _cols = _chunk(logits, first * BLOCK, v, CHUNK)
                    own = probs_of(x, top, rate).to(tl.int32, bitcast=True) >> (14 - 7 * nth)
                    counts += tl.histogram(own & 127, 128, (own >> 7) == bits)
            digit, k = _place_of(counts, k)
            bits = (bits << 7) + digit
    return tl.where(bin > 0, to_fixed(bits.to(tl.float32, bitcast=True)), 0)


@triton.jit
def _top_of(maxima, first, n, MANY: tl.constexpr):
    """The largest probability of some blocks of a row."""
    some = first + tl.arange(0, MANY)
    return to_fixed(tl.max(tl.load(maxima + some, mask=some < n, other=0), 0))


@triton.jit
def _weighed(logits, maxima, top, rate, floor, prob, id, v, n, CHUNK: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """The sums of what is at least `floor` likely, and of all before a token, which is so too."""
    mass, before = floor * 0, floor * 0
    for first in range(0, n, CHUNK // BLOCK):
        if _top_of(maxima, first, n, CHUNK // BLOCK) >= floor:
            x, cols = _chunk(logits, first * BLOCK, v, CHUNK)
            probs = to_fixed(probs_of(x, top, rate))
            mass += tl.sum(tl.where(probs >= floor, probs, 0), 0)
            before += tl.sum(tl.where(_is_before(probs, cols, prob, id), probs, 0), 0)
    return mass, before


@triton.jit
def pick(
    logits, row_max, rules, maxima, bins, totals, finishes, firsts, ids, stride, v, n,
    N: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    FILTERS: tl.constexpr,
):  # fmt: skip
    """The id of a row that draws: of those that are first in their blocks, the first that is kept.
    One that is not kept, and all behind it, are out, and its block races anew."""
    row = tl.program_id(0).to(tl.int64)
    top, rate = tl.load(row_max + row), rate_of(rules, row)
    if is_sampled(top, rate):
        blocks = tl.arange(0, N)
        finish = tl.load(finishes + row * n + blocks, mask=blocks < n, other=float("inf"))
        first = tl.load(firsts + row * n + blocks, mask=finish < float("inf"), other=v - 1)
        best, winner = first_of(finish, first, v)
        if FILTERS:
            is_kept = has_filters(rules, row) == 0
            floor, top_k, top_p = filters_of(rules, row)
            has_floor = (floor > 0) | (top_k > 0)
            logits, maxima = logits + row * stride, maxima + row * n
            floor, uniform = tl.maximum(floor, 1), uniform_of(rules, row)
            if top_k > 0:
                kth = _kth(
                    logits, maxima, bins + row * BINS, top, rate, top_k.to(tl.int32), v, n, BINS,
                    CHUNK, BLOCK,
                )  # fmt: skip
                floor = tl.maximum(floor, kth)
            pivot, pivot_id, turns = floor, v, 0
            while (is_kept == 0) & (best < float("inf")) & (turns < v):  # it ends, come what may
                turns += 1
                prob = to_fixed(probs_of(tl.load(logits + winner), top, rate))
                if _is_before(prob, winner, pivot, pivot_id):
                    least = tl.where(has_floor, floor, prob)
                    mass, before = _weighed(
                        logits, maxima, top, rate, least, prob, winner, v, n, CHUNK, BLOCK
                    )
                    mass = tl.where(has_floor, mass, tl.load(totals + row))
                    is_kept = before <= share_of(mass, top_p)
                    pivot, pivot_id = prob, winner
                if is_kept == 0:
                    block = winner // BLOCK
                    again, next = _race(
                        logits, block, top, rate, uniform, pivot, pivot_id, v, BLOCK
                    )
                    finish = tl.where(blocks == block, again, finish)
                    first = tl.where(blocks == block, next, first)
                    best, winner = first_of(finish, first, v)
        tl.store(ids + row, winner.to(tl.int64))
