"""A `Batch` for attention alone, whose tokens are not stored and need no logits; a KV cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from llama.ops.batch import Batch
from llama.ops.kv_cache import FORMATS


def batch_of(
    page_table: Tensor,
    query_starts: Sequence[int],
    seq_lens: Sequence[int],
    query_lens_cpu: Sequence[int],
    seq_lens_cpu: Sequence[int],
) -> Batch:
    """Make a batch from page_table (B, M).

    The host's lengths may be upper bounds, as those of a static batch are.
    """
    device = page_table.device
    none = torch.empty(0, dtype=torch.int64, device=device)
    starts, lens = (torch.tensor(list(x), device=device) for x in (query_starts, seq_lens))
    return Batch(
        none, none, page_table, starts, lens, none, list(query_lens_cpu), list(seq_lens_cpu)
    )


def in_8_bits(kv_cache: Tensor) -> Tensor:
    """Quantize a cache (..., P, S, K, D) of floats to the 8-bit format (..., P, S, K, W)."""
    *sizes, p, s, k, d = kv_cache.shape
    width, dtype = FORMATS["int8"].row(d, kv_cache.dtype)
    packed = torch.zeros(*sizes, p, s, k, width, dtype=dtype)
    for plane, elements in zip(packed.flatten(0, -5), kv_cache.flatten(0, -5), strict=True):
        FORMATS["int8"].store(plane, torch.arange(p * s), elements.flatten(0, 1))
    return packed
