"""The cross-attention layers of Llama 3.2 Vision: rows of text attend to the tokens of images.

The mathematics and names are those of Meta's llama_models/llama3/multimodal/model.py. A layer runs
before one of the text model's layers, on the rows that see an image and on no others, which a gate
of 0 would leave as they are. Its keys and values are computed once for each image.

They lie in the pages of the KV cache. A page has a plane of keys and one of values for each layer
of text. A cross-attention layer uses those of `ratio` layers of text, so that a page of S tokens of
text holds `ratio` S tokens of an image: see `plane_of`.

Shapes: T rows that see an image, I tokens of an image, E model dim, H query heads and K kv heads of
this rank, D head dim, P pages, S slots of a page.
"""

import torch
from torch import Tensor, nn

from llama.model.kinds import FeedForward, FeedForwardKind
from llama.model.layers import (
    ColumnParallelLinear,
    FusedBlock,
    RMSNorm,
    RowParallelLinear,
    apply,
    unfilled,
)
from llama.model.plan import LayerPlan
from llama.ops.attention import paged_attention
from llama.ops.batch import Batch, ForwardContext
from llama.ops.kv_cache import format_of
from llama.ranks.parallel import Parallel


def plane_of(kv_cache: Tensor, first: int, ratio: int) -> Tensor:
    """Return the keys and values of a cross-attention layer as a plane (2, N, S, K, W).

    Entry p + 2 P j has the keys of part j of page p, which lie in the plane of layer first + j; its
    values are those of the same entry. N is the number of entries. The keys of one part lie where
    the values of the one before would have further entries, which none has.

    Args:
        kv_cache: The KV cache (L, 2, P, S, K, W), one block of memory.
        first: The first of the layers of text whose planes it has.
        ratio: The number of these.
    """
    layers = kv_cache[first : first + ratio]
    num_pages = layers.shape[2]
    entry, *inner = layers.stride()[2:]
    size = (2, (2 * ratio - 1) * num_pages, *layers.shape[3:])
    return layers.as_strided(size, (num_pages * entry, entry, *inner))


def entries_of(pages: Tensor, num_pages: int, ratio: int) -> Tensor:
    """Return the entries of `plane_of` that the parts of pages are, in order: (M) -> (ratio M).

    Args:
        pages: Pages of an image.
        num_pages: P.
        ratio: The number of parts of a page.
    """
    parts = torch.arange(ratio, device=pages.device) * (2 * num_pages)
    return (pages[:, None] + parts).flatten()


class CrossAttention(FusedBlock):
    """Grouped-query attention of rows of text to an image; wk and wv are one matrix."""

    def __init__(self, plan: LayerPlan, parallel: Parallel) -> None:
        q = plan.n_heads * plan.head_dim
        kv = plan.n_kv_heads * plan.head_dim
        super().__init__("wkv", {"wk": kv, "wv": kv})
        self.head_dim = plan.head_dim
        self.wkv = ColumnParallelLinear(plan.dim, 2 * kv, parallel)
        self.wq = ColumnParallelLinear(plan.dim, q, parallel)
        self.wo = RowParallelLinear(q, plan.dim, parallel)
        self.q_norm = RMSNorm(plan.head_dim, plan.eps)
        self.k_norm = RMSNorm(plan.head_dim, plan.eps)

    def keys_values(self, tokens: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return the keys and values of an image's tokens: (I, E) -> (I, K, D) each."""
        both = apply(self.wkv, tokens, context).unflatten(-1, (2, -1, self.head_dim))
        return apply(self.k_norm, both[:, 0].contiguous(), context), both[:, 1]

    def forward(self, x: Tensor, batch: Batch, plane: Tensor) -> Tensor:
        """Attend: x (T, E) -> (T, E).

        Args:
            x: The normalised rows.
            batch: What they see: each of its sequences are rows that see the same tokens.
            plane: The keys and values of this layer, see `plane_of`.
        """
        heads = apply(self.wq, x, batch).unflatten(-1, (-1, self.head_dim))
        queries = apply(self.q_norm, heads.contiguous(), batch)
        attended = paged_attention(queries, plane, batch, is_causal=False)
        return apply(self.wo, attended.flatten(1), batch)


class CrossBlock(nn.Module):
    """A cross-attention layer.

    Attributes:
        before: The layer of the text model that runs after it.
        first_plane: The first of the planes of the KV cache that hold its keys and values.
    """

    def __init__(
        self, plan: LayerPlan, parallel: Parallel, *, before: int, first_plane: int
    ) -> None:
        super().__init__()
        self.before = before
        self.first_plane = first_plane
        self.attention = CrossAttention(plan, parallel)
        self.feed_forward = FeedForward(FeedForwardKind(plan.ffn_dim), plan.dim, parallel)
        self.attention_norm = RMSNorm(plan.dim, plan.eps)
        self.ffn_norm = RMSNorm(plan.dim, plan.eps)
        self.gate_attn = unfilled(1)
        self.gate_ffwd = unfilled(1)

    def store(self, tokens: Tensor, slots: Tensor, plane: Tensor, context: ForwardContext) -> None:
        """Store the keys and values of an image.

        Args:
            tokens: The image's tokens (I, E).
            slots: Where the key and value of each go (I), entry * S + offset.
            plane: The keys and values of this layer, see `plane_of`.
            context: The kernels that may run.
        """
        keys, values = self.attention.keys_values(tokens, context)
        kv_format = format_of(plane)
        kv_format.store(plane[0], slots, keys)
        kv_format.store(plane[1], slots, values.contiguous())

    def forward(self, x: Tensor, batch: Batch, plane: Tensor) -> Tensor:
        """Run the layer: x (T, E) -> (T, E); see `CrossAttention.forward`."""
        normed = apply(self.attention_norm, x, batch)
        x = x + self.gate_attn.tanh() * self.attention(normed, batch, plane)
        part = apply(self.feed_forward, apply(self.ffn_norm, x, batch), batch)
        return x + self.gate_ffwd.tanh() * part
