"""Sampling on a GPU in Triton: rows of logits and their parameters in, one id per row out.

The ids are those of the torch body in llama/ops/sample.py, which has the definition: probabilities
are whole numbers, so that every sum is exact in any order, and programs may add up as they come.
Nothing here waits for the device, and no shape depends on a value, so all of it can be captured in
a CUDA graph: two launches for the top tokens, two more for a draw, two more where rows have
filters. Inside those, a row that needs less leaves early.

Filters need no sort. Each block of a row says how much probability it holds and its largest; from
these follows a bound below which no token is kept, and what reaches it is gathered, in any order.
One program per row then finds the thresholds of top_k and of top_p by radix select, 4 bits at a
time, and the ids of the last kept tie and of the sampled token likewise, as ids in order are whole
numbers too. Where more than SLOTS tokens reach the bound, as for a flat distribution, it reads the
whole row instead: slower, the same id.

Shapes: B rows, V vocabulary, N blocks per row.
"""

import torch
import triton
from torch import Tensor

from llama.ops.triton.sample_filters import gather, pick_of_kept
from llama.ops.triton.sample_rows import NUM_PARAMS, block_sums, block_tops, pick_of_all, row_tops

SLOTS = 4096  # tokens per row that filters look at together

_MAX_BLOCKS, _MIN_BLOCK = 128, 1024  # per row, tokens
_CHUNK = 512  # tokens that are compared with the 16 bounds of a digit at once


def top_tokens(logits: Tensor, is_checked: bool = False) -> tuple[Tensor, Tensor]:
    """(B, V) float32 -> (B) maxima, NaN where there is one, and (B) int64 first places of them.

    is_checked: the place is -1 where the maximum is not finite.
    """
    logits = _rows_in_one_piece(logits)
    (b, v), (block, n) = logits.shape, _blocks(logits)
    maxima = logits.new_empty(b, n)
    places = logits.new_empty(b, n, dtype=torch.int32)
    row_max, ids = logits.new_empty(b), logits.new_empty(b, dtype=torch.int64)
    block_tops[b, n](logits, maxima, places, logits.stride(0), v, BLOCK=block)
    row_tops[b,](maxima, places, row_max, ids, n, CHECKED=is_checked, N=_padded(n))
    return row_max, ids


def choose(logits: Tensor, params: Tensor, *, has_draws: bool, has_filters: bool) -> Tensor:
    """(B, V) float32 logits, params (B, 6) of `pack_params`, on the device -> (B) int64 ids.

    Greedy rows take the top token, the others a draw; -1 as in `Sampled`. has_draws, has_filters:
    whether any row may have some; without, their kernels are not launched. For a graph say that
    there may be all.
    """
    row_max, ids = top_tokens(logits, is_checked=True)
    if has_draws:
        _sample_into(ids, logits, row_max, params, has_filters)
    return ids


def _sample_into(
    ids: Tensor, logits: Tensor, row_max: Tensor, params: Tensor, has_filters: bool
) -> None:
    """Write the ids of all rows that draw; leave the others."""
    logits = _rows_in_one_piece(logits)
    (b, v), (block, n) = logits.shape, _blocks(logits)
    assert params.shape == (b, NUM_PARAMS.value) and params.is_contiguous(), params.shape
    padded = _padded(n)
    sums = logits.new_empty(b, n, dtype=torch.int64)
    maxima = logits.new_empty(b, n)
    counts = logits.new_empty(b, dtype=torch.int32)
    row = logits, row_max, params  # what each kernel reads of its row
    block_sums[b, n](*row, sums, maxima, counts, logits.stride(0), v, BLOCK=block)
    sizes = {"N": padded, "BLOCK": block}
    pick_of_all[b,](*row, sums, ids, logits.stride(0), v, n, **sizes, num_warps=8)
    if not has_filters:
        return
    slots = logits.new_empty(b, SLOTS, dtype=torch.int32)
    gather[b, n](
        *row, sums, maxima, counts, slots, logits.stride(0), v, n, **sizes, SLOTS=SLOTS, num_warps=8
    )
    pick_of_kept[b,](
        *row, sums, counts, slots, ids, logits.stride(0), v, n, N=padded,
        SLOTS=SLOTS, CHUNK=_CHUNK, ID_DIGITS=-(-(v - 1).bit_length() // 4), num_warps=8,
    )  # fmt: skip


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
