"""Layers of a model over one step's batch, as a sequence of ops called from Python.

In and out: as `llama.ops.layers.LayerStack`, which does the same in one native call of the CPU. On
a GPU a layer is four products and five kernels here. The bytes are those of the modules: the same
ops in the same order, but that a residual and the norm after it are one op. It knows nothing of
modules: `llama.model.fused` decides when this runs in their place.

Shapes: L layers, T tokens, E model dim, H query heads, K kv heads, D head dim, F ffn, B sequences,
P pages, S slots per page, M pages per sequence. H, K and F are this rank's.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from torch import Tensor

from llama.ops.attention import paged_attention
from llama.ops.batch import Batch
from llama.ops.layers import LayerWeights, Packed
from llama.ops.linear import linear
from llama.ops.norm import add_norm, rms_norm
from llama.ops.rope import rope_and_store
from llama.ops.swiglu import silu_mul
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet


class OpStack:
    """Layers whose weights stay where they are, on any device and in any layout."""

    def __init__(
        self,
        weights: Seq[LayerWeights],
        *,
        n_kv_heads: int,
        head_dim: int,
        eps: float,
        kernels: KernelSet = TORCH_ONLY,
    ) -> None:
        self.weights, self.kernels = weights, kernels
        self.n_kv_heads, self.head_dim, self.eps = n_kv_heads, head_dim, eps

    def takes(self, kv_cache: Tensor) -> bool:
        """Whether the cache is one for these layers: (L, 2, P, S, K, D)."""
        sizes = kv_cache.shape
        wanted = (len(self.weights), 2, self.n_kv_heads, self.head_dim)
        return kv_cache.dim() == 6 and (*sizes[:2], *sizes[4:]) == wanted

    def run(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        kv_cache: Tensor,
        batch: Batch,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """x (T, E), freqs_cis (T, D/2), kv_cache (L, 2, P, S, K, D), written in place -> (T, E).

        all_reduce: sums over the ranks, in place or not, where each has a share of the weights.
        """
        assert self.takes(kv_cache), kv_cache.shape
        reduced, kernels = all_reduce or (lambda part: part), self.kernels
        following = [*(layer.attention_norm for layer in self.weights[1:]), None]
        normed = rms_norm(x, self.weights[0].attention_norm, self.eps, kernels)
        for layer, pages, next_norm in zip(self.weights, kv_cache.unbind(), following, strict=True):
            qkv = self._linear(normed, layer.wqkv).unflatten(-1, (-1, self.head_dim))
            queries = rope_and_store(qkv, freqs_cis, pages, batch.slots, kernels)
            out = paged_attention(queries, pages, batch, kernels).flatten(1)
            part = reduced(self._linear(out, layer.wo))
            x, normed = add_norm(x, part, layer.ffn_norm, self.eps, kernels)
            gated = silu_mul(self._linear(normed, layer.w13), kernels)
            part = reduced(self._linear(gated, layer.w2))
            if next_norm is None:
                return x + part
            x, normed = add_norm(x, part, next_norm, self.eps, kernels)
        raise AssertionError("a stack has at least one layer")

    def _linear(self, x: Tensor, weight: Packed) -> Tensor:
        return linear(x, weight.weight, weight.scales, kernels=self.kernels)
