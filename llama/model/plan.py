"""What the layers of a model are, on one rank: the one description that all who run them share.

In: the sizes of a model and a rank's `Placement`. Out: a `LayerPlan`. The modules are built from
it; the executors and the memory estimate read it. It holds no weights.
"""

from dataclasses import dataclass

import torch

from llama.model.args import ModelArgs
from llama.model.shares import RankShare
from llama.ops.kv_cache import AS_COMPUTED, KVFormat
from llama.ranks.placement import WHOLE, Placement

ATTENTION, FEED_FORWARD = "attention", "feed_forward"  # the names of Meta's blocks


@dataclass(frozen=True)
class LayerPlan:
    """dim and head_dim are the model's; the rest is what this rank holds, its `share`."""

    share: RankShare
    dim: int
    head_dim: int
    eps: float
    kinds: tuple[str, ...] = (ATTENTION, FEED_FORWARD)  # of a layer, in order: x + kind(norm(x))
    kv_format: KVFormat = AS_COMPUTED

    @classmethod
    def of(
        cls,
        args: ModelArgs,
        placement: Placement = WHOLE,
        kv_format: KVFormat = AS_COMPUTED,
    ) -> "LayerPlan":
        """Plan the layers that a rank with this placement holds; by default, all of them."""
        return cls(
            share=RankShare.of(args, placement),
            dim=args.dim,
            head_dim=args.head_dim,
            eps=args.norm_eps,
            kv_format=kv_format,
        )

    @property
    def n_layers(self) -> int:
        """Layers of this rank's pipeline stage."""
        return len(self.share.layers)

    @property
    def n_heads(self) -> int:
        """Query heads of this rank."""
        return len(self.share.heads)

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads of this rank."""
        return len(self.share.kv_heads)

    @property
    def ffn_dim(self) -> int:
        """Feed-forward columns of this rank."""
        return len(self.share.ffn)

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
