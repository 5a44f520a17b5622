"""The next token of each row: logits and how to choose in, ids drawn at random out.

A token's probability becomes a whole number, its weight, so that sums are exact in any order: the
id depends on its own row, rule and number alone, not on the batch, nor on how a device adds up. The
torch body is the definition; on a CPU, draw.cpp gives the same ids without sorting anything.

Shapes: B rows; V vocabulary; C candidates of a nucleus.
"""

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llama.ops.cpu import native

UNIT = 2**40  # weight of the likeliest token; one under 2**-40 of it weighs 0 and is never drawn
_BLOCK = 256  # tokens that the kernel adds up together
_LOW_31 = 2**31 - 1


class Rule(NamedTuple):
    """How the token of one row is drawn: see `draw`. The defaults draw from all, as they are."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def narrow(self) -> bool:
        return self.top_p < 1 or self.min_p > 0 or self.top_k > 0


def draw(logits: Tensor, peaks: Tensor, rules: Seq[Rule], numbers: Tensor) -> Tensor:
    """(B, V) float32 logits, left as they are, and their row maxima (B) -> (B) ids.

    A row's number in [0, 1) chooses by inverse transform, in the order of ids: two words h and l of
    31 bits, (B, 2) int64 on the host, that stand for (h * 2**31 + l) / 2**62.

    temperature divides the logits. min_p keeps what is at least min_p times as likely as the top
    token; top_k the k likeliest, and what equals the k-th; top_p, of what those leave, a token
    while the mass before it, from the likeliest down, is at most top_p. Of tokens as likely as the
    last one, those with the lowest ids are kept. A row without a finite maximum gets any id.
    """
    assert logits.dtype is torch.float32, logits.dtype
    if logits.device.type == "cpu" and native.kernels() is not None:
        return _draw_natively(logits, peaks, rules, numbers)
    numbers = numbers.to(logits.device, non_blocking=logits.device.type == "cuda")
    weights = _probs(logits, peaks, rules).mul_(UNIT).long()
    narrow = [rule.narrow for rule in rules]
    if not any(narrow):
        return _inverse(weights, numbers)
    filtered = on_device_of(weights, narrow)
    kept, kept_ids = _filtered(weights, rules, filtered)
    drawn = kept_ids.gather(1, _inverse(kept, numbers)[:, None]).squeeze(1)
    return drawn if all(narrow) else drawn.where(filtered, _inverse(weights, numbers))


def on_device_of(tensor: Tensor, values: Seq | np.ndarray) -> Tensor:
    """A list of numbers on the tensor's device, without a sync; floats become float32."""
    dtype = np.float32 if isinstance(values[0], float) else None
    # Through NumPy: a long list becomes a tensor several times as fast. A copy to mps must not be
    # asynchronous: the memory may be freed before it is read (pytorch #189690).
    is_cuda = tensor.device.type == "cuda"
    return torch.from_numpy(np.array(values, dtype)).to(tensor.device, non_blocking=is_cuda)


def _draw_natively(logits: Tensor, peaks: Tensor, rules: Seq[Rule], numbers: Tensor) -> Tensor:
    b, v = logits.shape
    rows = [
        (math.ceil(r.min_p * UNIT), max(r.top_k, 0), int(r.top_p * 2**62), (high << 31) + low)
        for r, (high, low) in zip(rules, numbers.tolist(), strict=True)
    ]
    ids = torch.empty(b, dtype=torch.int64)
    # For one row a thread, and touched only as far as a row has candidates.
    room = torch.empty(
        min(b, torch.get_num_threads()), 3 * v + 2 * -(-v // _BLOCK), dtype=torch.int64
    )
    probs = _probs(logits, peaks, rules).contiguous()
    native.call("draw", probs, torch.tensor(rows), ids, room, b, v)
    return ids


def _probs(logits: Tensor, peaks: Tensor, rules: Seq[Rule]) -> Tensor:
    """(B, V) float32: probabilities after temperature, over that of the likeliest token."""
    rates = [math.log2(math.e) / rule.temperature for rule in rules]
    scores = logits - peaks[:, None]  # from 0 down: no temperature makes them overflow
    # A power of 2: on a CPU, torch's exp takes three times as long.
    return scores.mul_(on_device_of(logits, rates)[:, None]).exp2_()


def _filtered(weights: Tensor, rules: Seq[Rule], rows: Tensor) -> tuple[Tensor, Tensor]:
    """The weights (B, C) of what min_p, top_k and top_p keep, 0 for the rest, and ids, ascending.

    Only `rows` (B) bool have any. Each filter has a floor, so that few tokens are sorted: min_p and
    top_k are nothing else, and no V tokens that weigh less than a V-th of the mass beyond top_p can
    reach into the nucleus.
    """
    floor = _floor(weights, rules)
    total = weights.sum(dim=-1)
    shares = on_device_of(weights, [divmod(int(rule.top_p * 2**62), 2**31) for rule in rules])
    beyond = total - _part(total, shares)
    lowest = torch.where(floor > 0, floor, beyond // weights.shape[1]).clamp(min=1)
    kept, ids = _gathered(weights, lowest.where(rows, 2 * UNIT))
    if all(rule.top_p == 1 for rule in rules):
        return kept, ids
    ordered, order = kept.sort(dim=-1, descending=True, stable=True)
    limit = _part(torch.where(floor > 0, kept.sum(dim=-1), total), shares)
    before = ordered.cumsum(dim=-1) - ordered
    ordered.masked_fill_(before > limit[:, None], 0)
    return kept.scatter_(1, order, ordered), ids


def _floor(weights: Tensor, rules: Seq[Rule]) -> Tensor:
    """(B) the least weight that both min_p and top_k keep; 0 in rows that ask for neither."""
    floor = on_device_of(weights, [math.ceil(rule.min_p * UNIT) for rule in rules])
    sizes = [min(max(rule.top_k, 0), weights.shape[1]) for rule in rules]
    if not any(sizes):
        return floor
    last = on_device_of(weights, sizes)
    kth = weights.topk(max(sizes)).values.gather(1, (last - 1).clamp(min=0)[:, None]).squeeze(1)
    return torch.where(last > 0, floor.maximum(kth), floor)


def _gathered(weights: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (B, V) of at least floor (B), and their ids, as (B, C); 0 fills the shorter rows.

    Syncs, as C depends on the values: tens for a sure model, V where all are equally likely.
    """
    rows, ids = (weights >= floor[:, None]).nonzero(as_tuple=True)
    counts = rows.bincount(minlength=len(weights))
    column = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = (len(weights), max(1, int(counts.max())))
    packed, packed_ids = weights.new_zeros(shape), weights.new_zeros(shape)
    packed[rows, column] = weights[rows, ids]
    packed_ids[rows, column] = ids
    return packed, packed_ids


def _inverse(weights: Tensor, number: Tensor) -> Tensor:
    """(B, C) weights, overwritten, and (B, 2) numbers -> (B) columns, none of weight 0.

    Column i has the whole numbers from the sum before it up to, not with, the sum to it, and the
    one drawn is below the sum of all. (The clamp: a row without a finite peak holds anything.)
    """
    sums = weights.cumsum_(dim=-1)
    drawn = _part(sums[:, -1], number)
    columns = torch.searchsorted(sums, drawn[:, None], right=True).squeeze(1)
    return columns.clamp(max=weights.shape[1] - 1)


def _part(whole: Tensor, words: Tensor) -> Tensor:
    """floor(whole * f): whole (B) below 2**60; f in [0, 1] as two words (B, 2), see `draw`."""
    high, low = words.unbind(dim=-1)
    a, b = whole >> 31, whole & _LOW_31
    return high * a + ((high * b + low * a + (low * b >> 31)) >> 31)
