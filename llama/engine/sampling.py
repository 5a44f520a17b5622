"""The next token of each sequence: one batched call a step, whatever the rows ask for.

Logits and sequences in, ids and log-probabilities out; no text, no model, no generator to carry.
A token's probability becomes a whole number, so sums are exact in any order: the id drawn depends
on its own row, seed and position alone, not on the batch, the padding or how a device adds up.

Shapes: B rows, one a sequence; V vocabulary; C candidates of a nucleus; K likeliest tokens.
"""

import math
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from llama.engine.params import SamplingParams
from llama.engine.sequence import Sequence

_UNIT = 2**40  # weight of the likeliest token; one under 2**-40 of it weighs 0 and is never drawn
_LOW_31 = 2**31 - 1
_LOW_32 = 2**32 - 1


@dataclass(frozen=True)
class Sampled:
    """One step's choice. Log-probabilities are the model's own: before bias, temperature, filters.

    A row that has no token to choose (all banned), or whose logits hold NaN or +inf, has the id -1.
    It is a value and no exception so that nothing here waits for the device, and that the ranks of
    a group, which learn the ids by broadcast, all learn of it: one that raised alone would leave
    the others waiting. `chosen` makes it an error, after the broadcast.
    """

    ids: Tensor  # (B) int64
    logprobs: Tensor | None = None  # (B) float32; None if no sequence asked
    top_ids: Tensor | None = None  # (B, K) int64, likeliest first, K the most that one asked for
    top_logprobs: Tensor | None = None  # (B, K) float32


def sample(logits: Tensor, sequences: Seq[Sequence]) -> Sampled:
    """Choose the next token of each sequence; logits (B, V) float32 are left as they are.

    In this order, each only if some row asks for it: logit_bias, bad_words, min_tokens; repetition,
    then presence and frequency penalty; temperature; min_p, top_k, top_p; one draw by inverse
    transform, in the order of ids. That is vLLM's order. transformers has the same but for min_p,
    which comes last there, so that top_p counts the mass that min_p is about to remove. As there, a
    bad word may begin in the prompt (vLLM looks at the output only), and top_k keeps what equals
    the k-th. Of tokens as likely as the last one of a nucleus, those with the lowest ids are kept.
    """
    assert logits.shape[0] == len(sequences)
    adjusted = _added(logits, [_biases(seq) for seq in sequences])
    adjusted = _repetition_penalised(adjusted, sequences)
    adjusted = _added(adjusted, [_deductions(seq) for seq in sequences])
    ids = _choose(adjusted, sequences)
    wanted = [s.params.logprobs for s in sequences if s.params.logprobs is not None]
    if not wanted:
        return Sampled(ids)
    return Sampled(ids, *score(logits, ids.clamp(min=0), max(wanted)))


def chosen(ids: Tensor) -> list[int]:
    """The ids (B) on the host (a sync). ValueError names the rows that have none: see `Sampled`."""
    found = ids.tolist()
    if -1 in found:
        rows = [row for row, token in enumerate(found) if token == -1]
        raise ValueError(
            f"rows {rows} of {len(found)} have no token to choose: logit_bias, bad_words and "
            "min_tokens ban the whole vocabulary there, or the model's logits hold NaN or inf"
        )
    return found


def score(logits: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities of `targets` (N) under logits (N, V), and the k likeliest of each row.

    Returns (N) float32, (N, K) ids and (N, K) float32 with K = min(k, V); None, None where k is 0.
    """
    norm = logits.logsumexp(dim=-1, keepdim=True)
    logprobs = (logits.gather(-1, targets[:, None]) - norm).squeeze(-1)
    if not k:
        return logprobs, None, None
    top = logits.topk(min(k, logits.shape[-1]))
    return logprobs, top.indices, top.values - norm


def sample_top_p(probs: Tensor, p: float) -> Tensor:
    """Meta's public nucleus sampling: probs (B, V) -> ids (B, 1), from torch's global generator.

    A token is kept while the mass of those likelier than it is at most p, so the top one always is
    (Holtzman et al. 2020). The engine does not use it: see `sample`.
    """
    ordered, ids = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    nucleus = ordered.masked_fill(before > p, 0)
    return ids.gather(-1, torch.multinomial(nucleus, num_samples=1))


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """A number in [0, 1) for each (seed, position), by counter: no state, on every device the same.

    seeds (B) int64 from 0, positions (B) int64 below 2**32 -> (B, 2) int64, two words h and l of 31
    bits that stand for (h * 2**31 + l) / 2**62. Philox2x32-10 (Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", SC 2011), the counter (position, seed's high word), the key its
    low word. The product may wrap: its low 64 bits are all that is used.
    """
    left, right, key = positions, (seeds >> 32) & _LOW_32, seeds & _LOW_32
    for _ in range(10):
        product = left * 0xD256D193
        left, right = ((product >> 32) ^ key ^ right) & _LOW_32, product & _LOW_32
        key = key + 0x9E3779B9
    return torch.stack((left >> 1, right >> 1), dim=-1)


def _added(logits: Tensor, amounts: Seq[dict[int, float]]) -> Tensor:
    """Logits (B, V) plus each row's amounts, by token id; the same tensor if no row has any."""
    if not any(amounts):
        return logits
    values = [amount for row in amounts for amount in row.values()]
    return logits.index_put(_cells(logits, amounts), _beside(logits, values), accumulate=True)


def _biases(seq: Sequence) -> dict[int, float]:
    """The request's own, and -inf for what must not come now."""
    params = seq.params
    banned = [word[-1] for word in params.bad_words_ids if _ends_with(seq.tokens, word[:-1])]
    if seq.num_output < params.min_tokens:
        banned += sorted(seq.stop_ids)
    return dict(params.logit_bias or ()) | dict.fromkeys(banned, -math.inf)


def _ends_with(tokens: list[int], end: Seq[int]) -> bool:
    return not end or tuple(tokens[-len(end) :]) == tuple(end)


def _repetition_penalised(logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """Logits (B, V), of tokens that occur divided (or if negative multiplied) by their row's."""
    penalties = [seq.params.repetition_penalty for seq in sequences]
    if all(penalty == 1 for penalty in penalties):
        return logits
    occurring = zip(penalties, sequences, strict=True)
    cells = _cells(logits, [() if penalty == 1 else seq.tokens for penalty, seq in occurring])
    penalty, old = _beside(logits, penalties)[cells[0]], logits[cells]
    return logits.index_put(cells, torch.where(old > 0, old / penalty, old * penalty))


def _deductions(seq: Sequence) -> dict[int, float]:
    """What presence and frequency penalty take off, below zero, of each token in the output."""
    presence, frequency = seq.params.presence_penalty, seq.params.frequency_penalty
    if not (presence or frequency):
        return {}
    return {token: -(presence + frequency * n) for token, n in Counter(seq.output).items()}


def _cells(logits: Tensor, ids: Seq[Collection[int]]) -> tuple[Tensor, Tensor]:
    """Row and column of each id listed for each row."""
    rows = np.repeat(np.arange(len(ids)), [len(found) for found in ids])
    return _beside(logits, rows), _beside(logits, list(chain.from_iterable(ids)))


def _choose(logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """(B, V) -> (B) ids: the first of the top ones in greedy rows, a draw in the others."""
    greedy = [seq.params.greedy for seq in sequences]
    if any(greedy):
        peak, ids = logits.max(dim=-1)
    else:
        peak = logits.amax(dim=-1)  # on a CPU it costs a sixth of what it does with the index
    if not all(greedy):
        drawn = _drawn(logits, peak, sequences)
        ids = ids.where(_beside(logits, greedy), drawn) if any(greedy) else drawn
    return ids.where(peak.isfinite(), -1)


def _drawn(logits: Tensor, peak: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """(B, V) logits and their row maxima (B) -> (B) ids drawn from what the filters keep."""
    params = [seq.params for seq in sequences]
    seeds = torch.tensor([seq.seed for seq in sequences])
    positions = torch.tensor([len(seq.tokens) for seq in sequences])
    number = uniform(seeds, positions)  # some 70 tiny operations: on the host, while the model runs
    number = number.to(logits.device, non_blocking=True)
    weights = _weights(logits, peak, params)
    narrow = [p.top_p < 1 or p.min_p > 0 or p.top_k > 0 for p in params]
    if not any(narrow):
        return _inverse(weights, number)
    filtered = _beside(logits, narrow)
    kept, kept_ids = _filtered(weights, params, filtered)
    drawn = kept_ids.gather(1, _inverse(kept, number)[:, None]).squeeze(1)
    if all(is_narrow or p.greedy for is_narrow, p in zip(narrow, params, strict=True)):
        return drawn
    return drawn.where(filtered, _inverse(weights, number))


def _weights(logits: Tensor, peak: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """(B, V) int64: probabilities after temperature, the top one's being _UNIT."""
    scores = logits - peak[:, None]  # from 0 down: no temperature makes them overflow
    if any(p.temperature != 1 for p in params):
        scores /= _beside(logits, [1.0 if p.greedy else p.temperature for p in params])[:, None]
    return scores.exp_().mul_(_UNIT).long()


def _filtered(weights: Tensor, params: Seq[SamplingParams], rows: Tensor) -> tuple[Tensor, Tensor]:
    """The weights (B, C) of what min_p, top_k and top_p keep, 0 for the rest, and ids, ascending.

    Only `rows` (B) bool have any. Each filter has a floor, so that few tokens are sorted: min_p and
    top_k are nothing else, and no V tokens that weigh less than a V-th of the mass beyond top_p can
    reach into the nucleus.
    """
    floor = _floor(weights, params)
    total = weights.sum(dim=-1)
    shares = _beside(weights, [divmod(int(p.top_p * 2**62), 2**31) for p in params])
    beyond = total - _part(total, shares)
    lowest = torch.where(floor > 0, floor, beyond // weights.shape[1]).clamp(min=1)
    kept, ids = _gathered(weights, lowest.where(rows, 2 * _UNIT))
    if all(p.top_p == 1 for p in params):
        return kept, ids
    ordered, order = kept.sort(dim=-1, descending=True, stable=True)
    limit = _part(torch.where(floor > 0, kept.sum(dim=-1), total), shares)
    before = ordered.cumsum(dim=-1) - ordered
    ordered.masked_fill_(before > limit[:, None], 0)
    return kept.scatter_(1, order, ordered), ids


def _floor(weights: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """(B) the least weight that both min_p and top_k keep; 0 in rows that ask for neither."""
    floor = _beside(weights, [math.ceil(p.min_p * _UNIT) for p in params])
    sizes = [min(max(p.top_k, 0), weights.shape[1]) for p in params]
    if not any(sizes):
        return floor
    last = _beside(weights, sizes)
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
    """(B, C) weights, overwritten, and (B, 2) of `uniform` -> (B) columns, none of weight 0.

    Column i has the whole numbers from the sum before it up to, not with, the sum to it, and the
    one drawn is below the sum of all. (The clamp: a row without a finite peak holds anything.)
    """
    sums = weights.cumsum_(dim=-1)
    drawn = _part(sums[:, -1], number)
    columns = torch.searchsorted(sums, drawn[:, None], right=True).squeeze(1)
    return columns.clamp(max=weights.shape[1] - 1)


def _part(whole: Tensor, words: Tensor) -> Tensor:
    """floor(whole * f): whole (B) below 2**60; f in [0, 1] as two words (B, 2), see `uniform`."""
    high, low = words.unbind(dim=-1)
    a, b = whole >> 31, whole & _LOW_31
    return high * a + ((high * b + low * a + (low * b >> 31)) >> 31)


def _beside(tensor: Tensor, values: Seq | np.ndarray) -> Tensor:
    """A list of numbers on the tensor's device, without a sync; floats become float32."""
    dtype = np.float32 if isinstance(values[0], float) else None
    # Through NumPy: a long list becomes a tensor several times as fast.
    return torch.from_numpy(np.array(values, dtype)).to(tensor.device, non_blocking=True)
