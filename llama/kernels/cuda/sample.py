"""Sampling on a GPU in Triton: rows of logits and their parameters in, one id per row out.

The ids are those of the torch body in llama/ops/sample.py, which has the definition: probabilities
are whole numbers, so every sum is exact in any order, and programs may add as they come. Nothing
here waits for the device, and no shape depends on a value. There are two launches for the top
tokens, two more for a draw, and two more where rows have filters; a row that needs less leaves
early.

Filters need no sort, and top_p needs no threshold. A histogram counts the tokens of a row by their
probability. From it follows a bound below which no token is kept, and what reaches the bound takes
part in the race. If the winner is kept, it is the first of the kept tokens as well: one program per
row sums what comes before it, to find out. If the winner is not kept, all tokens from it on are
out, and the rest is asked again. This is rejection as in FlashInfer's sampling (Ye et al., 2025),
with one id whatever the order. It is rare, as the bound leaves hardly more than what is kept.
Blocks without a likely token are not read again.

Over 400 lines: the kernels of one draw depend on the same layouts and constants.

Shapes: B rows, V vocabulary, N blocks per row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.kernels.cuda.launch import launcher
from llama.kernels.cuda.sample_rows import (
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

_MAX_BLOCKS = 128  # blocks of a row
_MIN_BLOCK = 1024  # tokens of a block
_BINS = 256  # bins of a row's histogram of probabilities
_CHUNK = 8192  # tokens that one program reads at once


class _Blocks(NamedTuple):
    """How rows are divided: into `num_blocks` of `size` tokens, a power of 2."""

    size: int
    num_blocks: int

    @classmethod
    def of(cls, vocab_size: int) -> "_Blocks":
        min_size = -(-vocab_size // _MAX_BLOCKS)
        size = max(_MIN_BLOCK, triton.next_power_of_2(min_size))
        return cls(size, -(-vocab_size // size))

    @property
    def padded_count(self) -> int:
        return max(16, int(triton.next_power_of_2(self.num_blocks)))


@launcher
def top_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maxima of rows, and their first indices.

    Args:
        logits: (B, V) float32.

    Returns:
        (B) maxima, NaN where a row has one, and (B) int64 indices, -1 where the maximum is not
        finite.
    """
    logits = _with_contiguous_rows(logits)
    b, v = logits.shape
    blocks = _Blocks.of(v)
    maxima = logits.new_empty(b, blocks.num_blocks)
    indices = logits.new_empty(b, blocks.num_blocks, dtype=torch.int32)
    row_max = logits.new_empty(b)
    ids = logits.new_empty(b, dtype=torch.int64)
    n = blocks.num_blocks
    block_tops[b, n](
        logits,
        maxima,
        indices,
        logits.stride(0),
        v,
        BLOCK=blocks.size,
    )
    row_tops[b,](
        maxima,
        indices,
        row_max,
        ids,
        n,
        N=blocks.padded_count,
    )
    return row_max, ids


@launcher
def choose(logits: Tensor, packed_params: Tensor, *, is_filtered: bool) -> Tensor:
    """Choose a token for each row: the top one for greedy rows, a draw for the others.

    Args:
        logits: (B, V) float32.
        packed_params: (B, 6) int64 of `llama.ops.sample.pack_params`, on the device of the logits.
        is_filtered: Whether any row may have filters. If none has, their kernels do not run.

    Returns:
        (B) int64 ids, -1 where a row has no finite maximum.
    """
    logits = _with_contiguous_rows(logits)
    row_max, ids = top_tokens(logits)
    b, v = logits.shape
    blocks = _Blocks.of(v)
    n = blocks.num_blocks
    assert packed_params.shape == (b, NUM_PARAMS.value) and packed_params.is_contiguous(), (
        packed_params.shape
    )
    maxima = logits.new_empty(b, n)
    bins = logits.new_zeros(b if is_filtered else 0, _BINS, dtype=torch.int32)
    totals, bounds = logits.new_empty(2, b, dtype=torch.int64)
    row = (logits, row_max, packed_params)  # what each kernel reads of its row
    stride = logits.stride(0)
    if is_filtered:
        sums = logits.new_empty(b, n, dtype=torch.int64)
        block_sums[b, n](*row, sums, maxima, bins, stride, v, BLOCK=blocks.size, BINS=_BINS)
        row_bounds[b,](
            packed_params, sums, bins, totals, bounds, n, N=blocks.padded_count, BINS=_BINS
        )
    finishes = logits.new_empty(b, n, dtype=torch.float64)
    firsts = logits.new_empty(b, n, dtype=torch.int32)
    sizes = {"BLOCK": blocks.size, "FILTERS": is_filtered}
    block_races[b, n](*row, maxima, bounds, finishes, firsts, stride, v, **sizes)
    chunk = min(max(_CHUNK, blocks.size), blocks.size * triton.next_power_of_2(n))
    pick[b,](
        *row,
        maxima,
        bins,
        totals,
        finishes,
        firsts,
        ids,
        stride,
        v,
        n,
        **sizes,
        N=blocks.padded_count,
        BINS=_BINS,
        CHUNK=chunk,
        num_warps=max(4, chunk // 512),
    )
    return ids


def _with_contiguous_rows(logits: Tensor) -> Tensor:
    assert logits.dtype is torch.float32, logits.dtype
    return logits if logits.stride(1) == 1 else logits.contiguous()


@triton.jit
def _chunk(
    logits: tl.tensor, begin: tl.tensor, v: tl.tensor, CHUNK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load CHUNK logits of a row; return them and their ids."""
    cols = begin + tl.arange(0, CHUNK)
    return tl.load(logits + cols, mask=cols < v, other=-float("inf")), cols


@triton.jit
def _is_before(probs: tl.tensor, ids: tl.tensor, prob: tl.tensor, id: tl.tensor) -> tl.tensor:
    """Return which tokens come before one: the likelier, and of equal ones those of lower id."""
    return (probs > prob) | ((probs == prob) & (ids < id))


@triton.jit
def _race(
    logits: tl.tensor,
    block: tl.tensor,
    top: tl.tensor,
    rate: tl.tensor,
    uniform: tl.tensor,
    prob: tl.tensor,
    id: tl.tensor,
    v: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the earliest arrival among a block's tokens before a pivot, and that token.

    The pivot is a token by its probability and id. The arrival is infinity where there is none.
    """
    x, cols = _chunk(logits, block * BLOCK, v, BLOCK)
    probs = to_fixed(probs_of(x, top, rate))
    is_in = _is_before(probs, cols, prob, id)
    finishes = finishes_of(tl.where(is_in, probs, 0), block * BLOCK, uniform)
    best, first = first_of(finishes, cols, v)
    return best, first


@triton.jit
def block_races(
    logits: tl.tensor,
    row_max: tl.tensor,
    packed_params: tl.tensor,
    maxima: tl.tensor,
    bounds: tl.tensor,
    finishes: tl.tensor,
    firsts: tl.tensor,
    stride: tl.tensor,
    v: tl.tensor,
    BLOCK: tl.constexpr,
    FILTERS: tl.constexpr,
) -> None:
    """Write the earliest arrival and its token, among the tokens of a block that reach the bound.

    Rows that are not sampled, and blocks without such a token, take no part.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    top = tl.load(row_max + row)
    rate = rate_of(packed_params, row)
    at = row * tl.num_programs(1) + block
    bound = tl.full((), 1, tl.int64)
    is_in = rate > 0
    if FILTERS:
        bound = tl.load(bounds + row)
        is_in = to_fixed(tl.load(maxima + at)) >= bound
        tl.store(finishes + at, float("inf"))
    if is_sampled(top, rate) & is_in:
        row_logits = logits + row * stride
        uniform = uniform_of(packed_params, row)
        best, first = _race(row_logits, block, top, rate, uniform, bound, v, v, BLOCK)
        tl.store(finishes + at, best)
        tl.store(firsts + at, first)


@triton.jit
def _kth_index(counts: tl.tensor, k: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Find the k-th largest of a multiset, which is given as counts of ascending values.

    Returns:
        The index of its value, 0 where there are fewer, and its rank among its equals.
    """
    indices = tl.arange(0, counts.shape[0])
    reaching = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    index = tl.max(tl.where(reaching >= k, indices, 0), 0)
    larger = tl.where(indices > index, counts, 0)
    return index, k - tl.sum(larger, 0)


@triton.jit
def _kth(
    logits: tl.tensor,
    maxima: tl.tensor,
    bins: tl.tensor,
    top: tl.tensor,
    rate: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    n: tl.tensor,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the k-th largest probability of a row, 0 where fewer are counted.

    The bits of its float32 are found from above: 11 by the bins, then 7 at a time.
    """
    bin, k = _kth_index(tl.load(bins + tl.arange(0, BINS)), k)
    bits = bin + FIRST_BIN
    if bin > 0:
        for nth in range(0, 3):
            counts = tl.zeros((128,), tl.int32)
            for first in range(0, n, CHUNK // BLOCK):
                if _max_of_blocks(maxima, first, n, CHUNK // BLOCK) >= edge_of(bin):
                    x, _cols = _chunk(logits, first * BLOCK, v, CHUNK)
                    prob_bits = probs_of(x, top, rate).to(tl.int32, bitcast=True)
                    upper = prob_bits >> (14 - 7 * nth)
                    counts += tl.histogram(upper & 127, 128, (upper >> 7) == bits)
            digit, k = _kth_index(counts, k)
            bits = (bits << 7) + digit
    return tl.where(bin > 0, to_fixed(bits.to(tl.float32, bitcast=True)), 0)


@triton.jit
def _max_of_blocks(
    maxima: tl.tensor, first: tl.tensor, n: tl.tensor, COUNT: tl.constexpr
) -> tl.tensor:
    """Return the largest probability of COUNT blocks of a row."""
    blocks = first + tl.arange(0, COUNT)
    probs = tl.load(maxima + blocks, mask=blocks < n, other=0)
    return to_fixed(tl.max(probs, 0))


@triton.jit
def _sums(
    logits: tl.tensor,
    maxima: tl.tensor,
    top: tl.tensor,
    rate: tl.tensor,
    floor: tl.tensor,
    prob: tl.tensor,
    id: tl.tensor,
    v: tl.tensor,
    n: tl.tensor,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the sum of all probabilities of at least `floor`, and of those before a token.

    The token, given by its probability and id, reaches `floor` too.
    """
    mass = floor * 0
    before = floor * 0
    for first in range(0, n, CHUNK // BLOCK):
        if _max_of_blocks(maxima, first, n, CHUNK // BLOCK) >= floor:
            x, cols = _chunk(logits, first * BLOCK, v, CHUNK)
            probs = to_fixed(probs_of(x, top, rate))
            mass += tl.sum(tl.where(probs >= floor, probs, 0), 0)
            is_before = _is_before(probs, cols, prob, id)
            before += tl.sum(tl.where(is_before, probs, 0), 0)
    return mass, before


@triton.jit
def _first_kept(
    logits: tl.tensor,
    packed_params: tl.tensor,
    maxima: tl.tensor,
    bins: tl.tensor,
    totals: tl.tensor,
    row: tl.tensor,
    top: tl.tensor,
    rate: tl.tensor,
    finish: tl.tensor,
    first: tl.tensor,
    v: tl.tensor,
    n: tl.tensor,
    N: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the first token to arrive that the filters keep.

    A token that is not kept, and all after it, are out; its block then races without them.
    finish and first are the arrivals of the blocks and their tokens.
    """
    blocks = tl.arange(0, N)
    best, winner = first_of(finish, first, v)
    is_kept = has_filters(packed_params, row) == 0
    floor, top_k, top_p = filters_of(packed_params, row)
    has_floor = (floor > 0) | (top_k > 0)
    floor = tl.maximum(floor, 1)
    uniform = uniform_of(packed_params, row)
    if top_k > 0:
        k = top_k.to(tl.int32)
        kth = _kth(logits, maxima, bins, top, rate, k, v, n, BINS, CHUNK, BLOCK)
        floor = tl.maximum(floor, kth)
    pivot = floor
    pivot_id = v
    turns = 0
    while (is_kept == 0) & (best < float("inf")) & (turns < v):  # it ends, whatever is in memory
        turns += 1
        prob = to_fixed(probs_of(tl.load(logits + winner), top, rate))
        if _is_before(prob, winner, pivot, pivot_id):
            min_prob = tl.where(has_floor, floor, prob)
            mass, before = _sums(
                logits, maxima, top, rate, min_prob, prob, winner, v, n, CHUNK, BLOCK
            )
            mass = tl.where(has_floor, mass, tl.load(totals + row))
            is_kept = before <= share_of(mass, top_p)
            pivot = prob
            pivot_id = winner
        if is_kept == 0:
            block = winner // BLOCK
            again, next = _race(logits, block, top, rate, uniform, pivot, pivot_id, v, BLOCK)
            finish = tl.where(blocks == block, again, finish)
            first = tl.where(blocks == block, next, first)
            best, winner = first_of(finish, first, v)
    return winner


@triton.jit
def pick(
    logits: tl.tensor,
    row_max: tl.tensor,
    packed_params: tl.tensor,
    maxima: tl.tensor,
    bins: tl.tensor,
    totals: tl.tensor,
    finishes: tl.tensor,
    firsts: tl.tensor,
    ids: tl.tensor,
    stride: tl.tensor,
    v: tl.tensor,
    n: tl.tensor,
    N: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERS: tl.constexpr,
) -> None:
    """Write the id of a row that draws: the first of the blocks' first tokens that is kept."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(row_max + row)
    rate = rate_of(packed_params, row)
    if is_sampled(top, rate):
        blocks = tl.arange(0, N)
        finish = tl.load(finishes + row * n + blocks, mask=blocks < n, other=float("inf"))
        first = tl.load(firsts + row * n + blocks, mask=finish < float("inf"), other=v - 1)
        _best, winner = first_of(finish, first, v)
        if FILTERS:
            winner = _first_kept(
                logits + row * stride,
                packed_params,
                maxima + row * n,
                bins + row * BINS,
                totals,
                row,
                top,
                rate,
                finish,
                first,
                v,
                n,
                N,
                BINS,
                CHUNK,
                BLOCK,
            )
        tl.store(ids + row, winner.to(tl.int64))
