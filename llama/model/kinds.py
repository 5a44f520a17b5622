"""The kinds of half layers: what stands between a norm and the residual sum.

A layer of Llama is two halves, x + half(norm(x)): attention, then the feed-forward block. A kind
describes one half completely: its module, which holds the weights and computes what stands between
its two products (its body), the names of its tensors in files, the keys and values that it stores,
and the name of its body. The layer plan lists the kinds of each layer; modules, executors, the
table of tensors, the memory estimate and kernels read them there.

To add a kind, write a `HalfKind` and its module here, name it in `KINDS` and in `LayerPlan.of`, and
either add its body to a kernel for whole layers or leave `body_name` None: such a layer then runs
operator by operator.

Shapes: T tokens, E model dim, H query heads, K kv heads, D head dim, F ffn columns; H, K and F are
those of this rank.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from llama.model.layers import (
    ColumnParallelLinear,
    FusedBlock,
    Linear,
    RowParallelLinear,
    apply,
)
from llama.ops.attention import paged_attention
from llama.ops.batch import DEFAULT_CONTEXT, Batch, ForwardContext
from llama.ops.rope import rope_and_store
from llama.ops.swiglu import silu_mul
from llama.ranks.parallel import Parallel
from llama.weights.weight import Rows

_NO_CACHE = (
    "keys and values are not kept in the layers: the engine's are in "
    "llama.engine.runner.kv_cache, by page, and those of Transformer.forward stay between its calls"
)


class TensorEntry(NamedTuple):
    """A tensor of a model, as files hold it.

    Attributes:
        hf: Its name in Hugging Face's layout; for a tensor of a layer, the name within the layer.
        gguf: Its name in GGUF files, likewise.
        shape: A letter for each dimension, see `RankShare.rows`.
        dim: The dimension that the ranks of a group divide; None if each holds the whole.
        is_rotated: Whether its rows have another order in Hugging Face's layout, see
            `llama.checkpoint.hf.config.copy_rows`.
    """

    hf: str
    gguf: str
    shape: str
    dim: int | None
    is_rotated: bool = False


class HalfLayer(FusedBlock):
    """The module of a half layer: first product, body, second product.

    Attributes:
        first: The fused product, as (N, E).
        second: The product whose sum over the ranks is added to the residual stream.
    """

    @property
    def first(self) -> Linear:
        """Return the module of the first product."""
        raise NotImplementedError

    @property
    def second(self) -> Linear:
        """Return the module of the second product."""
        raise NotImplementedError

    @property
    def bias(self) -> Tensor | None:
        """Return what is added to each row of the first product, (N), if anything is."""
        return None

    def body(self, part: Tensor, freqs_cis: Tensor, batch: Batch, kv_cache: Tensor | None) -> Rows:
        """Compute what stands between the two products. It may read further weights of the module.

        The rows are as the second weight multiplies them.

        Args:
            part: The rows of the first product, (T, N).
            freqs_cis: The rotations of the tokens' positions, (T, D/2).
            batch: The tokens of the step.
            kv_cache: The plane of the layer, (2, P, S, K, W), written in place; None if the layer
                stores no keys and values.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class KVShape:
    """The keys that a half layer stores for each token, and as many values.

    Attributes:
        n_heads: The key-value heads of this rank, K.
        head_dim: The elements of each, D.
    """

    n_heads: int
    head_dim: int


class HalfKind(ABC):
    """One kind of half layer, with the sizes of this rank.

    Attributes:
        name: The name of its module within a layer, as Meta calls it.
        norm_name: The name of the norm before it.
        module: The class of its module, made of the kind, E and the ranks.
        tensors: The tensors of its module, by Meta's name within the module.
        norm: The tensor of the norm.
        body_name: The name by which a kernel for whole layers knows its body; None if none does.
        takes_rows_alone: Whether its module takes no more than the rows, as Meta's feed-forward
            block does.
    """

    name: ClassVar[str]
    norm_name: ClassVar[str]
    module: ClassVar[type[Any]]
    tensors: ClassVar[dict[str, TensorEntry]]
    norm: ClassVar[TensorEntry]
    body_name: ClassVar[str | None] = None
    takes_rows_alone: ClassVar[bool] = False

    @property
    def kv_shape(self) -> KVShape | None:
        """Return the keys and values that it stores for each token; None if it stores none."""
        return None

    def build(self, dim: int, parallel: Parallel) -> HalfLayer:
        """Make the module, for a model of dimension `dim`."""
        made: HalfLayer = self.module(self, dim, parallel)
        return made

    def run(
        self,
        module: HalfLayer,
        x: Tensor,
        freqs_cis: Tensor,
        batch: Batch,
        kv_cache: Tensor | None,
    ) -> Tensor:
        """Call the module with the arguments that it takes; x (..., E) -> (..., E)."""
        if self.takes_rows_alone:
            return self.after_sum(module, apply(module, x, batch), batch)
        out: Tensor = module(x, freqs_cis, batch, kv_cache)
        return self.after_sum(module, out, batch)

    def after_sum(self, module: HalfLayer, part: Tensor, batch: Batch) -> Tensor:
        """Return what is added to the residual stream: the second product, or a gate times it.

        A kind that changes the product has no `body_name`.

        Args:
            module: The module, which may hold a gate.
            part: The second product, summed over the ranks, (..., E).
            batch: The tokens of the step.
        """
        return part

    @abstractmethod
    def elements_per_token(self) -> int:
        """Return the elements of one token that a step holds at once for this half."""


class Attention(HalfLayer):
    """Grouped-query attention; wq, wk and wv are one matrix, their rows in that order."""

    elsewhere: ClassVar[dict[str, str]] = {"cache_k": _NO_CACHE, "cache_v": _NO_CACHE}
    is_causal: ClassVar[bool] = True

    def __init__(self, kind: "AttentionKind", dim: int, parallel: Parallel) -> None:
        q = kind.n_heads * kind.head_dim
        kv = kind.n_kv_heads * kind.head_dim
        super().__init__("wqkv", {"wq": q, "wk": kv, "wv": kv})
        self.n_heads = kind.n_heads
        self.n_kv_heads = kind.n_kv_heads
        self.head_dim = kind.head_dim
        self.wqkv = ColumnParallelLinear(dim, q + 2 * kv, parallel)
        self.wo = RowParallelLinear(q, dim, parallel)

    @property
    def first(self) -> Linear:
        """Return wqkv."""
        return self.wqkv

    @property
    def second(self) -> Linear:
        """Return wo."""
        return self.wo

    def body(
        self, part: Tensor, freqs_cis: Tensor, batch: Batch, kv_cache: Tensor | None
    ) -> Tensor:
        """Rotate, store and attend: part (T, (H + 2K) D) -> (T, H D)."""
        assert kv_cache is not None
        qkv = part.view(len(part), -1, self.head_dim)
        queries = rope_and_store(qkv, freqs_cis, kv_cache, batch.slots, batch.kernels)
        return paged_attention(queries, kv_cache, batch, is_causal=self.is_causal).flatten(1)

    def forward(
        self, x: Tensor, freqs_cis: Tensor, batch: Batch, kv_cache: Tensor | None
    ) -> Tensor:
        """Attend: x (..., E) of T tokens -> (..., E)."""
        part = apply(self.wqkv, x, batch).flatten(0, -2)
        attended = self.body(part, freqs_cis, batch, kv_cache)
        return apply(self.wo, attended.view(*x.shape[:-1], -1), batch)


@dataclass(frozen=True)
class AttentionKind(HalfKind):
    """Grouped-query attention with rotary embedding over the paged KV cache."""

    name: ClassVar[str] = "attention"
    norm_name: ClassVar[str] = "attention_norm"
    module: ClassVar[type[Attention]] = Attention
    tensors: ClassVar[dict[str, TensorEntry]] = {
        "wq.weight": TensorEntry("self_attn.q_proj.weight", "attn_q.weight", "QE", 0, True),
        "wk.weight": TensorEntry("self_attn.k_proj.weight", "attn_k.weight", "KE", 0, True),
        "wv.weight": TensorEntry("self_attn.v_proj.weight", "attn_v.weight", "KE", 0),
        "wo.weight": TensorEntry("self_attn.o_proj.weight", "attn_output.weight", "EQ", 1),
    }
    norm: ClassVar[TensorEntry] = TensorEntry(
        "input_layernorm.weight", "attn_norm.weight", "E", None
    )
    body_name: ClassVar[str | None] = "causal_attention"

    n_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def kv_shape(self) -> KVShape:
        """Return the keys and values of this rank's heads."""
        return KVShape(self.n_kv_heads, self.head_dim)

    def elements_per_token(self) -> int:
        """Return queries, keys and values, twice: as multiplied and as rotated."""
        return 2 * (self.n_heads + 2 * self.n_kv_heads) * self.head_dim


class BidirectionalAttention(Attention):
    """Attention of each token to its whole sequence, all of which is in one step."""

    is_causal: ClassVar[bool] = False


@dataclass(frozen=True)
class BidirectionalAttentionKind(AttentionKind):
    """Grouped-query attention without a causal mask, of models that do not generate."""

    module: ClassVar[type[Attention]] = BidirectionalAttention
    body_name: ClassVar[str | None] = "bidirectional_attention"


class FeedForward(HalfLayer):
    """SwiGLU; w1 (gate) and w3 (up) are one matrix, the gate's rows first."""

    def __init__(self, kind: "FeedForwardKind", dim: int, parallel: Parallel) -> None:
        super().__init__("w13", {"w1": kind.ffn_dim, "w3": kind.ffn_dim})
        self.w13 = ColumnParallelLinear(dim, 2 * kind.ffn_dim, parallel)
        self.w2 = RowParallelLinear(kind.ffn_dim, dim, parallel)

    @property
    def first(self) -> Linear:
        """Return w13."""
        return self.w13

    @property
    def second(self) -> Linear:
        """Return w2."""
        return self.w2

    def body(self, part: Tensor, freqs_cis: Tensor, batch: Batch, kv_cache: Tensor | None) -> Rows:
        """Multiply by the gate: part (T, 2F) -> (T, F)."""
        return self.w2.weight.gated(part, batch)

    def forward(self, x: Tensor, context: ForwardContext = DEFAULT_CONTEXT) -> Tensor:
        """Run the block: x (..., E) -> (..., E)."""
        gated = silu_mul(apply(self.w13, x, context), context.kernels)
        return apply(self.w2, gated, context)


@dataclass(frozen=True)
class FeedForwardKind(HalfKind):
    """The feed-forward block with a gate (SwiGLU)."""

    name: ClassVar[str] = "feed_forward"
    norm_name: ClassVar[str] = "ffn_norm"
    module: ClassVar[type[FeedForward]] = FeedForward
    tensors: ClassVar[dict[str, TensorEntry]] = {
        "w1.weight": TensorEntry("mlp.gate_proj.weight", "ffn_gate.weight", "FE", 0),
        "w2.weight": TensorEntry("mlp.down_proj.weight", "ffn_down.weight", "EF", 1),
        "w3.weight": TensorEntry("mlp.up_proj.weight", "ffn_up.weight", "FE", 0),
    }
    norm: ClassVar[TensorEntry] = TensorEntry(
        "post_attention_layernorm.weight", "ffn_norm.weight", "E", None
    )
    body_name: ClassVar[str | None] = "swiglu"
    takes_rows_alone: ClassVar[bool] = True

    ffn_dim: int

    def elements_per_token(self) -> int:
        """Return gate and up with their product."""
        return 3 * self.ffn_dim


KINDS: tuple[type[HalfKind], ...] = (AttentionKind, BidirectionalAttentionKind, FeedForwardKind)
