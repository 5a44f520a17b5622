"""The mathematics of Llama 3 and nothing else: token ids and a `Batch` in, hidden states out.

It knows nothing of requests, scheduling or sampling. `Transformer.hidden_states` runs the flat
ragged batch of the engine; `Transformer.forward` is Meta's own signature, an adapter over it.

Shapes: T tokens of the flat batch, B sequences, R rows that want logits, E model dim, H query heads
and K kv heads of this rank, D head dim, F ffn of this rank, V vocabulary, P pages, S slots per
page, M pages per sequence, L layers.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from llama import weights
from llama.device import current, use_huge_pages, zeros
from llama.model.args import ModelArgs
from llama.model.execution import Executor, LayerExecution, SubLayer
from llama.model.layers import (
    ColumnParallelLinear,
    FusedBlock,
    Linear,
    Matrix,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    WatchedModule,
    unfilled,
)
from llama.model.plan import ATTENTION, FEED_FORWARD, LayerPlan
from llama.ops.attention import paged_attention
from llama.ops.batch import Batch
from llama.ops.kv_cache import AS_COMPUTED, KVFormat
from llama.ops.rope import precompute_freqs_cis, rope_and_store
from llama.ops.swiglu import silu_mul
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet
from llama.ranks.collectives import ModelParallel
from llama.weights import PlainWeight
from llama.weights.coded import CodedRows

_NO_CACHE = (
    "keys and values are not kept in the layers: the engine's are in "
    "llama.engine.runner.kv_cache, by page, and those of Transformer.forward stay between its calls"
)


class Attention(FusedBlock):
    """Grouped-query attention; wq, wk and wv are one matrix, their rows in that order."""

    elsewhere: ClassVar[dict[str, str]] = {"cache_k": _NO_CACHE, "cache_v": _NO_CACHE}

    def __init__(self, plan: LayerPlan, parallel: ModelParallel) -> None:
        q, kv = plan.n_heads * plan.head_dim, plan.n_kv_heads * plan.head_dim
        super().__init__("wqkv", {"wq": q, "wk": kv, "wv": kv})
        self.n_heads, self.n_kv_heads = plan.n_heads, plan.n_kv_heads
        self.head_dim = plan.head_dim
        self.wqkv = ColumnParallelLinear(plan.dim, q + 2 * kv, parallel)
        self.wo = RowParallelLinear(q, plan.dim, parallel)

    def forward(self, x: Tensor, freqs_cis: Tensor, batch: Batch, kv_cache: Tensor) -> Tensor:
        rows = self.wqkv(x).flatten(0, -2)
        qkv = rows.unflatten(-1, (-1, self.head_dim))  # (T, H + 2K, D)
        q = rope_and_store(qkv, freqs_cis, kv_cache, batch.slots, self.kernels)
        out = paged_attention(q, kv_cache, batch, self.kernels)
        return self.wo(out.view(*x.shape[:-1], -1))


class FeedForward(FusedBlock):
    """SwiGLU; w1 (gate) and w3 (up) are one matrix, the gate's rows first."""

    def __init__(self, plan: LayerPlan, parallel: ModelParallel) -> None:
        super().__init__("w13", {"w1": plan.ffn_dim, "w3": plan.ffn_dim})
        self.w13 = ColumnParallelLinear(plan.dim, 2 * plan.ffn_dim, parallel)
        self.w2 = RowParallelLinear(plan.ffn_dim, plan.dim, parallel)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu_mul(self.w13(x), self.kernels))


class TransformerBlock(WatchedModule):
    def __init__(self, plan: LayerPlan, parallel: ModelParallel) -> None:
        super().__init__()
        assert plan.kinds == (ATTENTION, FEED_FORWARD), plan.kinds
        self.attention = Attention(plan, parallel)
        self.feed_forward = FeedForward(plan, parallel)
        self.attention_norm = RMSNorm(plan.dim, plan.eps)
        self.ffn_norm = RMSNorm(plan.dim, plan.eps)

    def forward(self, x: Tensor, freqs_cis: Tensor, batch: Batch, kv_cache: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis, batch, kv_cache)
        return h + self.feed_forward(self.ffn_norm(h))

    def sublayers(self) -> list[SubLayer]:
        """What an executor needs of it."""
        attention, ffn = self.attention, self.feed_forward
        return [
            SubLayer(ATTENTION, self.attention_norm, attention.wqkv.weight, attention.wo.weight),
            SubLayer(FEED_FORWARD, self.ffn_norm, ffn.w13.weight, ffn.w2.weight),
        ]


class AbsentLayer(nn.Module):
    """Stands where another pipeline stage holds the layer, so that Meta's numbering stays."""

    def sublayers(self) -> list[SubLayer]:
        """Return nothing: an executor skips this layer."""
        return []


_KINDS = (
    TransformerBlock,
    AbsentLayer,
    Attention,
    FeedForward,
    RMSNorm,
    ColumnParallelLinear,
    RowParallelLinear,
)
_LAYER_FORWARDS: dict[type[nn.Module], Callable] = {kind: kind.forward for kind in _KINDS}


class Transformer(nn.Module):
    """One rank's share of a Llama 3 model, uninitialised until `loading_order` is filled. With
    device="meta" nothing is allocated, with fills_late no matrix of a layer before its turn.

    Attributes:
        tok_embeddings: The token embedding, on the stages that hold it.
        output: The lm_head, on the last stage.
    """

    tok_embeddings: VocabParallelEmbedding
    output: ColumnParallelLinear
    quantization: str | None = None  # the format that the weights were rounded to, if they were

    def __init__(
        self,
        params: ModelArgs,
        *,
        parallel: ModelParallel | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kv_format: KVFormat = AS_COMPUTED,
        fills_late: bool = False,
    ) -> None:
        super().__init__()
        parallel = parallel or ModelParallel()
        placement = parallel.placement
        params.check("params")
        params.check_ranks(placement.size)
        self.params = params
        self.parallel = parallel
        self.plan = plan = LayerPlan.of(params, placement, kv_format)
        self.vocab_size = params.vocab_size
        self.n_layers = params.n_layers
        share = plan.share
        if share.has_embedding:
            self.tok_embeddings = VocabParallelEmbedding(share.vocab, params.dim, parallel)
        self.layers = nn.ModuleList(
            TransformerBlock(plan, parallel) if i in share.layers else AbsentLayer()
            for i in range(params.n_layers)
        )
        self.kernels = TORCH_ONLY
        self._execution = LayerExecution(plan, self.layers, parallel, _LAYER_FORWARDS)
        self.norm = RMSNorm(params.dim, params.norm_eps)
        if share.has_lm_head:
            self.output = ColumnParallelLinear(
                params.dim, len(share.vocab), parallel, gather_output=True
            )
        late = {x for x in self.layers.modules() if fills_late and isinstance(x, PlainWeight)}
        for module in list(self.modules()):
            place = "meta" if module in late else device
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, unfilled(*weight.shape, device=place, dtype=dtype))
                use_huge_pages(getattr(module, name))  # before the first touch, which settles it
        self._name_matrices()
        self.tie()
        self.register_load_state_dict_post_hook(_tie_again)
        sizes = params.head_dim, params.max_seq_len, params.rope_theta, params.rope_factor
        # (max_seq_len, D/2) complex64, whatever the weights' type
        self.freqs_cis = precompute_freqs_cis(*sizes).to(device)
        self._raw_pages: Tensor | None = None  # of `forward`, made at its first call

    def _name_matrices(self) -> None:
        modules = dict(self.named_modules())
        for path, module in modules.items():
            if isinstance(module, Matrix):
                block, _, own = path.rpartition(".")
                fused = getattr(modules[block], "fused", None) == own
                rows = modules[block].rows if fused else [own]
                module.names = [f"{block}.{name}.weight".removeprefix(".") for name in rows]

    def blocks(self) -> list[TransformerBlock]:
        """Return the layers that this rank's stage holds, in order."""
        return [cast(TransformerBlock, self.layers[i]) for i in self.plan.share.layers]

    def loading_order(self) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
        """Each part of the model, and Meta's names -> the views that hold this rank's share of it:
        one after the other, so that a part can be packed before the next takes memory."""
        matrices = [module for module in self.modules() if isinstance(module, Matrix)]
        assert all(isinstance(x.weight, PlainWeight) for x in matrices), "the weights are packed"
        share = self.plan.share
        if share.has_embedding:
            embedding = self.tok_embeddings.weight.plain()
            yield self.tok_embeddings, {"tok_embeddings.weight": embedding}
        for i, layer in zip(share.layers, self.blocks(), strict=True):
            for module in layer.modules():
                if isinstance(module, Matrix) and module.weight.values.is_meta:
                    values = self.norm.weight.new_empty(module.weight.shape)
                    module.weight = PlainWeight.pack(values)
            yield layer, layer.state_dict(prefix=f"layers.{i}.")
        yield self.norm, {"norm.weight": self.norm.weight.data}
        if share.has_lm_head:
            tied = self.params.tied_output
            yield self.output, {} if tied else {"output.weight": self.output.weight.plain()}

    def named_shards(self) -> dict[str, Tensor]:
        """Meta's name of each weight -> the view that holds this rank's share of it."""
        return {name: share for _, slots in self.loading_order() for name, share in slots.items()}

    def pack(
        self,
        part: nn.Module | None = None,
        coded: Mapping[str, CodedRows] = MappingProxyType({}),
        *,
        quantize: str | None = None,
    ) -> None:
        """Put one part of `loading_order`, or all, in the format asked for, once it is filled; by
        default in this machine's fastest. The views of `loading_order` are invalid afterwards.
        coded: of matrices that were not filled, by the first of their names."""
        self.quantization = quantize or self.quantization
        lm_head = self.output if self.plan.share.has_lm_head else None
        for module in (part or self).modules():
            if isinstance(module, Matrix) and module.names[0] in coded:
                device = self.norm.weight.device
                module.weight = weights.packed(coded[module.names[0]], None, device)
                if self._is_tied and module is self.tok_embeddings:
                    self.output.weight = module.weight
            elif isinstance(module, Linear):
                module.pack(weights.of_output(quantize) if module is lm_head else quantize)
            if module is lm_head:
                self.tie()

    def tie(self) -> None:
        """One weight for both ends, where the checkpoint has one."""
        if self._is_tied:
            self.tok_embeddings.weight = self.output.weight

    @property
    def _is_tied(self) -> bool:
        """Whether this rank holds both ends, and they share one weight."""
        share = self.plan.share
        return self.params.tied_output and share.has_embedding and share.has_lm_head

    def use_kernels(self, kernels: KernelSet) -> None:
        """From now on the ops of this model run these kernels of Triton's, and no others."""
        self.kernels = kernels
        for module in self.modules():
            if isinstance(module, Linear | RMSNorm | FusedBlock):
                module.kernels = kernels
        self._execution.kernels = kernels

    def new_kv_cache(self, num_pages: int, page_size: int) -> Tensor:
        """Zeroed keys and values of all layers: (L, 2, P, S, K, W), in the plan's format."""
        weight = self.norm.weight
        return zeros(*self.plan.kv_cache(num_pages, page_size, weight.dtype), weight.device)

    def hidden_states(self, tokens: Tensor, batch: Batch, kv_cache: Tensor) -> Tensor:
        """tokens (T), kv_cache (L, 2, P, S, K, W), written in place -> (R, E) at logit_rows."""
        executor = self._execution.find()
        if executor is None or not executor.supports(kv_cache):
            h = self._through_layers(tokens, batch, kv_cache)
        else:
            freqs_cis = self.freqs_cis[batch.positions]
            h = executor.run(self.tok_embeddings(tokens), freqs_cis, kv_cache, batch)
        return self.norm(h if batch.wants_all else h[batch.logit_rows])

    def _through_layers(self, tokens: Tensor, batch: Batch, kv_cache: Tensor) -> Tensor:
        """tokens (T), or (B, S) with the same T tokens in all -> (T, E) or (B, S, E)."""
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis[batch.positions]
        for layer, pages in zip(self.blocks(), kv_cache.unbind(), strict=True):
            h = layer(h, freqs_cis, batch, pages)
        return h

    def use_modules(self, wanted: bool = True) -> None:
        """Run the layers module by module from now on, as a hook does while it is there; or not."""
        self._execution.uses_modules = wanted

    def execution_path(self) -> Executor | None:
        """What `hidden_states` runs now: None where a hook, or another forward, sees a part of it.
        The same object means the same operators on the same weights."""
        ends = [module for name, module in self.named_children() if name != "layers"]
        if any(x._forward_hooks or x._forward_pre_hooks for x in ends):
            return None
        return self._execution.find()

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., E) -> (..., V) float32, whole on every rank."""
        return self.output(hidden, dtype=torch.float32)

    def logits_share(self, hidden: Tensor) -> Tensor:
        """hidden (..., E) -> (..., V of this rank) float32: for the ids `plan.share.vocab`."""
        return self.output.share(hidden, dtype=torch.float32)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        """Meta's signature: tokens (B, S) at start_pos on -> float32 logits (B, S, V). Hooks see
        (B, S, E). Keys and values of max_batch_size x max_seq_len tokens are kept from call to
        call; ValueError where B or start_pos + S is beyond them."""
        p, (n, count) = self.params, tokens.shape
        if n > p.max_batch_size or start_pos + count > p.max_seq_len or start_pos < 0:
            raise ValueError(
                f"tokens of shape {(n, count)} at start_pos={start_pos} do not fit "
                f"max_batch_size={p.max_batch_size} and max_seq_len={p.max_seq_len}"
            )
        if self._raw_pages is None:  # one page holds one sequence
            self._raw_pages = self.new_kv_cache(p.max_batch_size, p.max_seq_len)
        starts, query_lens, pages = [start_pos] * n, [count] * n, [[row] for row in range(n)]
        _, batch = Batch.pack([], starts, query_lens, pages, p.max_seq_len, [], tokens.device)
        with current(tokens.device):  # Triton's kernels go there
            h = self._through_layers(tokens, batch, self._raw_pages)
            return self.logits(self.norm(h))


def _tie_again(model: Transformer, _: object) -> None:
    model.tie()
