"""A `Batch` for attention alone: of tokens that go nowhere and want no logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from llama.ops.batch import Batch


def batch_of(
    page_table: Tensor,
    query_starts: Sequence[int],
    seq_lens: Sequence[int],
    query_lens_cpu: Sequence[int],
    seq_lens_cpu: Sequence[int],
) -> Batch:
    """page_table (B, M); the lengths on the host may be limits, as those of a static batch are."""
    device = page_table.device
    none = torch.empty(0, dtype=torch.int64, device=device)
    starts, lens = (torch.tensor(list(x), device=device) for x in (query_starts, seq_lens))
    return Batch(
        none, none, page_table, starts, lens, none, list(query_lens_cpu), list(seq_lens_cpu)
    )
