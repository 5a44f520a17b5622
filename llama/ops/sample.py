"""The next token of each row: logits and how to choose in, ids out, the top ones or sampled.

Fixed-point probabilities: each becomes a whole number, so that sums are exact in any order. The id
depends on its own row of logits, its filters, seed and position alone, not on the batch or on how a
device adds up. The torch body is the definition; on a CPU, sample.cpp gives the same ids by radix
select, without sorting.

A draw is an exponential race: each id has a random time, a whole number that follows from seed,
position and id, and the least time over probability wins. Two models that find the same ids likely
so draw the same one as often as is possible without a word between them (Daliri, Musco and Suresh,
2024, drafter-invariant speculative decoding).

Shapes: B rows; V vocabulary; C candidates of a race.
"""

import functools
import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llama.device import pinned
from llama.ops.cpu import native
from llama.ops.fixed_point import exponential, share, split_mix, uniform
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet

UNIT = 2**40  # of the likeliest token; one under 2**-40 of it becomes 0 and is never sampled
MAX_KERNEL_VOCAB = 2**19  # of triton/sample.py, whose blocks are at most 128 per row
_GROUP = 256  # neighbouring ids, the first of which to come is known by one number


class SamplingRow(NamedTuple):
    """The filters of one row: see `sample_ids`. The defaults sample from all tokens as they are."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def is_filtered(self) -> bool:
        return self.top_p < 1 or self.min_p > 0 or self.top_k > 0


def choose_ids(
    logits: Tensor,
    rows: Seq[SamplingRow | None],
    seeds: Seq[int],
    positions: Seq[int],
    kernels: KernelSet = TORCH_ONLY,
) -> Tensor:
    """(B, V) float32 logits -> (B) ids: in rows that are None the top token, else a sampled one.

    What is sampled follows from the row's seed, from 0, and position, below 2**32. A row without a
    finite maximum has the id -1: no token is allowed, or its logits hold NaN or +inf.
    """
    if _has_kernel(logits, kernels):
        from llama.ops.triton import sample

        if not any(rows):
            return sample.top_tokens(logits)[1]
        params = pack_params(rows, list(zip(seeds, positions, strict=True)))
        is_filtered = any(row is not None and row.is_filtered for row in rows)
        return sample.choose(logits, on_device_of(logits, params), is_filtered=is_filtered)
    row_max, ids = top_tokens(logits)
    if any(row is not None for row in rows):
        # Philox takes some 70 tiny operations: on the host, while the model runs.
        uniforms = uniform(torch.tensor(seeds), torch.tensor(positions))
        sampled = sample_ids(logits, row_max, [row or SamplingRow() for row in rows], uniforms)
        takes_top = on_device_of(logits, [row is None for row in rows])
        ids = ids.where(takes_top, sampled.where(row_max.isfinite(), -1))
    return ids


def top_tokens(logits: Tensor, kernels: KernelSet = TORCH_ONLY) -> tuple[Tensor, Tensor]:
    """(B, V) -> (B) maxima, NaN if there is one, and their first places, -1 of one not finite."""
    if _has_kernel(logits, kernels):
        from llama.ops.triton import sample

        return sample.top_tokens(logits)
    if _is_native(logits):
        row_max, ids = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
        native.call("top_tokens", logits.contiguous(), row_max, ids, *logits.shape)
        return row_max, ids
    row_max = logits.amax(dim=-1)
    return row_max, logits.argmax(dim=-1).where(row_max.isfinite(), -1)


def sample_ids(logits: Tensor, row_max: Tensor, rows: Seq[SamplingRow], uniforms: Tensor) -> Tensor:
    """(B, V) float32 logits, left as they are, and their row maxima (B) -> (B) ids.

    A row's uniform, of (B) int64 below 2**62 on the host, gives the random times of its ids.

    temperature divides the logits. min_p keeps what is at least min_p times as likely as the top
    token; top_k the k likeliest, and what equals the k-th; top_p, of what those leave, a token
    while the mass before it, from the likeliest down, is at most top_p. Of tokens as likely as the
    last one, those with the lowest ids are kept. A row without a finite maximum gets any id.
    """
    assert logits.dtype is torch.float32, logits.dtype
    if _is_native(logits):
        return _native(logits, row_max, rows, uniforms)
    uniforms = uniforms.to(logits.device, non_blocking=logits.device.type == "cuda")[:, None]
    fixed_probs = _probs(logits, row_max, rows).mul_(UNIT).long()
    kept, ids = _filtered(fixed_probs, rows, uniforms)
    return ids.gather(1, _finishes(kept, ids, uniforms).argmin(1, keepdim=True)).squeeze(1)


def on_device_of(tensor: Tensor, values: Seq | np.ndarray) -> Tensor:
    """A list of numbers on the tensor's device, without a sync; floats become float32."""
    dtype = np.float32 if isinstance(values[0], float) else None
    # Through NumPy: a long list becomes a tensor several times as fast. A copy to mps must not be
    # asynchronous: the memory may be freed before it is read (pytorch #189690).
    there = tensor.device
    host = pinned(np.asarray(values, dtype), there)
    return host.to(there, non_blocking=there.type == "cuda")


def _has_kernel(logits: Tensor, kernels: KernelSet) -> bool:
    if not kernels.has("sample", logits):
        return False
    return 0 < logits.shape[1] <= MAX_KERNEL_VOCAB and len(logits) > 0


def _is_native(logits: Tensor) -> bool:
    is_ours = logits.dtype is torch.float32 and logits.device.type == "cpu"
    return is_ours and native.kernels() is not None


def _native(logits: Tensor, row_max: Tensor, rows: Seq[SamplingRow], uniforms: Tensor) -> Tensor:
    b, v = logits.shape
    params = torch.from_numpy(pack_params(rows, uniforms[:, None].tolist())[:, 1:].copy())
    ids = torch.empty(b, dtype=torch.int64)
    num_bytes = native.call("sample_workspace", b, v, torch.get_num_threads())
    workspace = torch.empty(num_bytes, dtype=torch.uint8)  # touched as far as a row has candidates
    probs = _probs(logits, row_max, rows).contiguous()
    native.call("sample_ids", probs, params, ids, workspace, b, v)
    return ids


def pack_params(rows: Seq[SamplingRow | None], draws: Seq[Seq[int]]) -> np.ndarray:
    """What kernels read of each row, as one array: (B, 4 + N) int64.

    The bits of the float32 that turns logits into powers of 2, 0 for a greedy row, which is None;
    the least probability that min_p keeps; top_k; top_p of 2**62; and the N numbers of its draw:
    the uniform of 2**62, or the seed and the position of which a GPU makes it.
    """
    return np.hstack((_filters(tuple(rows)), np.array(draws, np.int64)))


@functools.lru_cache(16)
def _filters(rows: tuple[SamplingRow | None, ...]) -> np.ndarray:
    """Of `pack_params`, what is the same in each step: (B, 4)."""
    numbers = np.empty((len(rows), 4), np.int64)
    for i, row in enumerate(rows):
        rate = np.float32(math.log2(math.e) / row.temperature if row else 0).view(np.int32)
        row = row or SamplingRow()
        floor, share = math.ceil(row.min_p * UNIT), int(row.top_p * 2**62)
        numbers[i] = rate, floor, max(row.top_k, 0), share
    return numbers


def _probs(logits: Tensor, row_max: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """(B, V) float32: probabilities after temperature, over that of the likeliest token."""
    rates = on_device_of(logits, _filters(tuple(rows))[:, 0].astype(np.int32).view(np.float32))
    scores = logits - row_max[:, None]  # from 0 down: no temperature makes them overflow
    # A power of 2: on a CPU, torch's exp takes three times as long.
    return scores.mul_(rates[:, None]).exp2_()


def _filtered(
    fixed_probs: Tensor, rows: Seq[SamplingRow], uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """What min_p, top_k and top_p keep: (B, C) probabilities, 0 for the rest, and ids, ascending.
    Of rows without filters, what can win the race.

    Each filter has a lower bound, so that few tokens are sorted: min_p and top_k are nothing else,
    and V tokens that are each below a V-th of the mass beyond top_p cannot reach into the nucleus.
    """
    v, numbers = fixed_probs.shape[1], _filters(tuple(rows))
    floor, last, shares = on_device_of(fixed_probs, numbers[:, 1:]).unbind(1)
    if most := min(int(numbers[:, 2].max()), v):
        kth = fixed_probs.topk(most).values.gather(1, last.clamp(1, v)[:, None] - 1).squeeze(1)
        floor = torch.where(last > 0, floor.maximum(kth), floor)
    total = fixed_probs.sum(dim=-1)
    beyond = total - share(total, shares)
    lowest = torch.where(floor > 0, floor, beyond // v).clamp(min=1)
    is_kept, is_filtered = fixed_probs >= lowest[:, None], [row.is_filtered for row in rows]
    if not all(is_filtered):
        filtered = on_device_of(fixed_probs, is_filtered)[:, None]
        is_kept &= filtered | _can_win(fixed_probs, uniforms)
    kept, ids = _gathered(fixed_probs, is_kept)
    if all(row.top_p == 1 for row in rows):
        return kept, ids
    ordered, order = kept.sort(dim=-1, descending=True, stable=True)
    limit = share(torch.where(floor > 0, kept.sum(dim=-1), total), shares)
    before = ordered.cumsum(dim=-1) - ordered
    ordered.masked_fill_(before > limit[:, None], 0)
    return kept.scatter_(1, order, ordered), ids


def _gathered(fixed_probs: Tensor, is_kept: Tensor) -> tuple[Tensor, Tensor]:
    """What is kept (B, V) bool of probabilities (B, V), and ids, as (B, C); 0 fills shorter rows.

    Syncs, as C depends on the values: tens for a sure model, V where all are equally likely.
    """
    where, ids = is_kept.nonzero(as_tuple=True)
    counts = where.bincount(minlength=len(fixed_probs))
    column = torch.arange(len(where), device=where.device) - (counts.cumsum(0) - counts)[where]
    shape = (len(fixed_probs), max(1, int(counts.max())))
    packed, packed_ids = fixed_probs.new_zeros(shape), fixed_probs.new_zeros(shape)
    packed[where, column] = fixed_probs[where, ids]
    packed_ids[where, column] = ids
    return packed, packed_ids


def _finishes(fixed_probs: Tensor, ids: Tensor, uniforms: Tensor) -> Tensor:
    """When ids (B, C) of these probabilities (B, C) reach the goal, for uniforms (B, 1): float64.

    The first time in a group of ids has a number of its own, and so has each time after that one.
    Times are then exponential, and whether a group can win is known by one number: the first of so
    many comes so many times as early, and what is left to wait for is as long as ever.
    """
    of_group = split_mix(uniforms, ids // _GROUP + 2**32)
    after = _exponential(split_mix(uniforms, ids)) * _GROUP
    after.masked_fill_((of_group >> 23) % _GROUP == ids % _GROUP, 0)
    return (_exponential(of_group) + after).double() / fixed_probs


def _can_win(fixed_probs: Tensor, uniforms: Tensor) -> Tensor:
    """(B, V) bool: those whose group is early enough, next to the first ids of all groups."""
    v = fixed_probs.shape[1]
    groups = torch.arange(-(-v // _GROUP), device=fixed_probs.device)
    of_group = split_mix(uniforms, groups + 2**32)
    firsts = (groups * _GROUP + (of_group >> 23) % _GROUP).clamp(max=v - 1)
    best = _finishes(fixed_probs.gather(1, firsts), firsts, uniforms).amin(1, keepdim=True)
    earliest = _exponential(of_group).repeat_interleave(_GROUP, dim=1)[:, :v]
    return earliest.double() / fixed_probs <= best


def _exponential(numbers: Tensor) -> Tensor:
    """See `exponential`: the zeros are those of a float32's exponent."""
    exponent = (numbers & 2**23 - 1 | 1).float().view(torch.int32) >> 23
    return exponential(numbers, 149 - exponent.long())
