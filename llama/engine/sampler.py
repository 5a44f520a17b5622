"""The next token of each sequence: logits and sequences in, ids and log-probabilities out.

An id drawn depends on its own row, seed and position alone, not on the batch, the padding or how a
device adds up: `llama.ops.sample` sees to that. Where the vocabulary is divided among ranks, greedy
rows need no more of each share than its largest logit: `top_of_share`, `top_of_all`.

Shapes: B rows, one a sequence; V vocabulary; K likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llama.engine.constraints import TokenMask
from llama.engine.processors import LogitsProcessors, is_short
from llama.engine.sequence import SequenceState
from llama.model.transformer import Transformer
from llama.ops.sample import choose_ids, top_tokens
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet


@dataclass(frozen=True)
class Sampled:
    """One step's choice. Log-probabilities are the model's own: before bias, temperature, filters.
    A row that has no token to choose (all banned), or whose logits hold NaN or +inf, has the id -1:
    an exception would need a sync, and end the other rows. `SequenceState.append` reports it."""

    ids: Tensor  # (B) int64
    logprobs: Tensor | None = None  # (B) float32; None if no sequence asked
    top_ids: Tensor | None = None  # (B, K) int64, likeliest first, K the most that one asked for
    top_logprobs: Tensor | None = None  # (B, K) float32


def sample(
    logits: Tensor,
    sequences: Sequence[SequenceState],
    mask: TokenMask | None = None,
    kernels: KernelSet = TORCH_ONLY,
    processors: LogitsProcessors | None = None,
) -> Sampled:
    """Choose the next token of each sequence; logits (B, V) float32 are left as they are.

    In this order, each only if some row asks for it: what its constraint excludes; logit_bias,
    bad_words, min_tokens; repetition, then presence and frequency penalty; temperature; min_p,
    top_k, top_p; one draw, by a race (see `llama.ops.sample`). That is vLLM's order.
    transformers has the same but for min_p, which comes last there, so that top_p counts the mass
    that min_p is about to remove. As there, a bad word may begin in the prompt (vLLM looks at the
    output only), and top_k keeps what equals the k-th. Of tokens as likely as the last one of a
    nucleus, those with the lowest ids are kept.
    """
    assert logits.shape[0] == len(sequences)
    processors = processors or LogitsProcessors()
    adjusted = logits if mask is None else mask(logits)
    adjusted = processors.apply(adjusted, sequences)
    draws = processors.rows, processors.seeds, processors.positions
    ids = choose_ids(adjusted, *draws, kernels)
    processors.count(ids)
    if processors.logprobs is None:
        return Sampled(ids)
    return Sampled(ids, *score(logits, ids.clamp(min=0), processors.logprobs))


def needs_top_only(sequences: Sequence[SequenceState]) -> bool:
    """Whether `sample` would take the top token of each row as the logits are, and say no more:
    what filters a draw (top_p, top_k, min_p) never removes that."""
    return all(
        p.takes_top
        and not p.is_constrained
        and not (p.bad_words or (p.min_tokens and is_short(seq) and p.stop_ids))
        for seq in sequences
        for p in (seq.spec,)
    )


def top_of_ranks(model: Transformer, hidden: Tensor) -> Tensor:
    """hidden (B, E) -> (B) the ids that `sample` would choose, by an exchange of 8 bytes a row. All
    ranks hold the same pairs then, and only compare them, also on unlike machines."""
    share = model.logits_share(hidden)
    own = top_of_share(share, model.plan.share.vocab.start, model.kernels)
    return top_of_all(model.parallel.all_gather(own))


def top_of_share(logits: Tensor, first: int, kernels: KernelSet = TORCH_ONLY) -> Tensor:
    """A rank's share of the logits (B, V / ranks) float32, from id `first` on -> (B, 2) int32: of
    each row the bits of its largest logit, NaN where there is one, and that logit's lowest id."""
    row_max, ids = top_tokens(logits, kernels)
    return torch.stack((row_max.view(torch.int32), (ids + first).int()), dim=-1)


def top_of_all(pairs: Tensor) -> Tensor:
    """What `top_of_share` gave on each rank, (B, 2 * ranks) in order -> (B) ids, as `sample`'s. It
    compares and does not compute: the same pairs are the same ids on any machine."""
    values, ids = pairs.unflatten(-1, (-1, 2)).unbind(dim=-1)
    row_max, rank = values.contiguous().view(torch.float32).max(dim=-1)  # of equal ones the first
    return ids.gather(-1, rank[:, None]).squeeze(-1).long().where(row_max.isfinite(), -1)


def score(logits: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities of `targets` (N) under logits (N, V), and the k likeliest of each row: (N)
    float32, (N, K) ids and (N, K) float32 with K = min(k, V); None, None where k is 0."""
    norm = logits.logsumexp(dim=-1, keepdim=True)
    logprobs = (logits.gather(-1, targets[:, None]) - norm).squeeze(-1)
    if not k:
        return logprobs, None, None
    top = logits.topk(min(k, logits.shape[-1]))
    return logprobs, top.indices, top.values - norm


def sample_top_p(probs: Tensor, p: float) -> Tensor:
    """Meta's public nucleus sampling (Holtzman et al. 2020): probs (B, V) -> ids (B, 1), from
    torch's global generator. The engine does not use it: see `sample`."""
    ordered, ids = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    nucleus = ordered.masked_fill(before > p, 0)
    return ids.gather(-1, torch.multinomial(nucleus, num_samples=1))
