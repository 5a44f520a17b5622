"""What the layers of a model are, on one rank: the one description that all who run them share.

In: the sizes of a model and the number of ranks that divide it. Out: a `LayerPlan`. The modules are
built from it; the executors and the memory estimate read it. It holds no weights.
"""

from dataclasses import dataclass

import torch

from llama.model.args import ModelArgs
from llama.ops.kv_cache import AS_COMPUTED, KVFormat

ATTENTION, FEED_FORWARD = "attention", "feed_forward"  # the names of Meta's blocks


@dataclass(frozen=True)
class LayerPlan:
    """dim and head_dim are the model's; heads and ffn_dim are this rank's share."""

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    eps: float
    kinds: tuple[str, ...] = (ATTENTION, FEED_FORWARD)  # of a layer, in order: x + kind(norm(x))
    kv_format: KVFormat = AS_COMPUTED

    @classmethod
    def of(cls, args: ModelArgs, num_ranks: int, kv_format: KVFormat = AS_COMPUTED) -> "LayerPlan":
        return cls(
            n_layers=args.n_layers,
            dim=args.dim,
            n_heads=args.n_heads // num_ranks,
            n_kv_heads=max(1, args.kv_heads // num_ranks),  # replicated beyond kv_heads ranks
            head_dim=args.head_dim,
            ffn_dim=args.ffn_dim // num_ranks,
            eps=args.norm_eps,
            kv_format=kv_format,
        )

    @property
    def qkv_dim(self) -> int:
        """Queries, keys and values of one token."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    def kv_cache(
        self, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape (L, 2, P, S, K, W) and type of the KV cache of a model in `dtype`."""
        num_attending = self.n_layers * self.kinds.count(ATTENTION)
        width, row_dtype = self.kv_format.row(self.head_dim, dtype)
        return (num_attending, 2, num_pages, page_size, self.n_kv_heads, width), row_dtype

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        shape, row_dtype = self.kv_cache(1, 1, dtype)
        return torch.Size(shape).numel() * row_dtype.itemsize
