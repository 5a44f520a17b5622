"""The layers of a model on one rank: the description that all code that runs them shares.

In: the sizes of a model and a rank's `Placement`. Out: a `LayerPlan`, which lists the kinds of each
layer. The modules are built from it; the executors and the memory estimate read it. It holds no
weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from llama.model.args import ModelArgs
from llama.model.kinds import (
    AttentionKind,
    BidirectionalAttentionKind,
    FeedForwardKind,
    HalfKind,
    KVShape,
)
from llama.model.shares import RankShare
from llama.ops.kv_cache import AS_COMPUTED, KVFormat
from llama.ranks.placement import WHOLE, Placement


@dataclass(frozen=True)
class LayerSpec:
    """One layer: its halves in the order in which they run.

    Attributes:
        index: Its number in the whole model.
        kinds: The kind of each half; at most one of them stores keys and values.
        kv_plane: The index of its keys and values in the KV cache of this rank; None if it stores
            none.
    """

    index: int
    kinds: tuple[HalfKind, ...]
    kv_plane: int | None


@dataclass(frozen=True)
class LayerPlan:
    """The layers of one rank.

    Attributes:
        layers: The layers of this rank's pipeline stage, in order.
        share: What this rank holds of each dimension.
        dim: The model dimension.
        head_dim: Elements of one head.
        eps: The epsilon of the norms.
        kv_format: How the KV cache stores keys and values.
        image_ratio: The tokens of an image that a page holds for each token of text; 0 for a model
            of text. Each cross-attention layer has as many planes of the KV cache, on every stage.
    """

    layers: tuple[LayerSpec, ...]
    share: RankShare
    dim: int
    head_dim: int
    eps: float
    kv_format: KVFormat = AS_COMPUTED
    image_ratio: int = 0

    @classmethod
    def of(
        cls,
        args: ModelArgs,
        placement: Placement = WHOLE,
        kv_format: KVFormat = AS_COMPUTED,
    ) -> "LayerPlan":
        """Plan the layers that a rank with this placement holds; by default, all of them."""
        share = RankShare.of(args, placement)
        kind = AttentionKind if args.is_causal else BidirectionalAttentionKind
        attention = kind(len(share.heads), len(share.kv_heads), args.head_dim)
        feed_forward = FeedForwardKind(len(share.ffn))
        kinds = dict.fromkeys(share.layers, (attention, feed_forward))
        return cls(
            layers=_with_kv_planes(kinds),
            share=share,
            dim=args.dim,
            head_dim=args.head_dim,
            eps=args.norm_eps,
            kv_format=kv_format,
            image_ratio=_image_ratio(args, placement),
        )

    @cached_property
    def n_heads(self) -> int:
        """Query heads of this rank."""
        return len(self.share.heads)

    @cached_property
    def n_kv_heads(self) -> int:
        """Key-value heads of this rank."""
        return len(self.share.kv_heads)

    @cached_property
    def ffn_dim(self) -> int:
        """Feed-forward columns of this rank."""
        return len(self.share.ffn)

    @property
    def kinds(self) -> frozenset[HalfKind]:
        """The different kinds of half layers on this rank."""
        return frozenset(kind for layer in self.layers for kind in layer.kinds)

    @cached_property
    def num_kv_planes(self) -> int:
        """Layers that store keys and values. Every step asks, so it is computed once."""
        return sum(layer.kv_plane is not None for layer in self.layers)

    @cached_property
    def kv_shape(self) -> KVShape:
        """The keys and values that a layer stores for each token.

        The planes of all layers are one tensor, so that kinds which store any store alike.
        """
        (shape,) = {kind.kv_shape for kind in self.kinds if kind.kv_shape is not None}
        return shape

    def elements_per_token(self) -> int:
        """Return the elements of one token that a step holds at once.

        These are the residual stream and its norm, twice each, and what every kind of half layer
        needs between its products.
        """
        return 4 * self.dim + sum(kind.elements_per_token() for kind in self.kinds)

    def kv_cache(
        self, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape (L, 2, P, S, K, W) and type of the KV cache of a model in `dtype`.

        L counts the layers that store keys and values.
        """
        heads = self.kv_shape.n_heads
        width, row_dtype = self.kv_format.row(self.kv_shape.head_dim, dtype)
        return (self.num_kv_planes, 2, num_pages, page_size, heads, width), row_dtype

    def is_cache(self, kv_cache: Tensor, dtype: torch.dtype) -> bool:
        """Return whether it has the shape and type of the KV cache of a model in `dtype`."""
        shape = tuple(kv_cache.shape)
        return len(shape) == 6 and (shape, kv_cache.dtype) == self.kv_cache(*shape[2:4], dtype)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes that the keys and values of one token take on this rank."""
        shape, row_dtype = self.kv_cache(1, 1, dtype)
        return torch.Size(shape).numel() * row_dtype.itemsize


def _image_ratio(args: ModelArgs, placement: Placement) -> int:
    """Return how many planes of the KV cache each cross-attention layer of any stage can have."""
    if args.vision is None:
        return 0
    cross_layers = args.vision.cross_layers(args.n_layers)
    ratios = []
    for stage in range(placement.stages):
        layers = RankShare.of(args, replace(placement, stage=stage)).layers
        num_cross = sum(layer in layers for layer in cross_layers)
        if num_cross:
            ratios.append(len(layers) // num_cross)
    return min(ratios)


def _with_kv_planes(kinds: Mapping[int, tuple[HalfKind, ...]]) -> tuple[LayerSpec, ...]:
    """Number the planes of the KV cache in the order of the layers that need one."""
    layers = []
    num_planes = 0
    for index, halves in kinds.items():
        stores = any(kind.kv_shape is not None for kind in halves)
        layers.append(LayerSpec(index, halves, num_planes if stores else None))
        num_planes += stores
    return tuple(layers)
