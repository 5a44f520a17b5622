"""The mathematics of Llama 3 and nothing else: token ids and a `Batch` in, hidden states out.

It knows nothing of requests, scheduling or sampling. `Transformer.hidden_states` runs the flat
ragged batch of the engine; `Transformer.forward` is Meta's own signature, an adapter over it.

Shapes: T tokens of the flat batch, B sequences, R rows that want logits, E model dim, H query heads
and K kv heads of this rank, D head dim, F ffn of this rank, V vocabulary, P pages, S slots per
page, M pages per sequence, L layers.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from llama import weights
from llama.device import current, use_huge_pages, zeros
from llama.model.args import ModelArgs
from llama.model.execution import Executor, LayerExecution, SubLayer
from llama.model.kinds import Attention, FeedForward
from llama.model.layers import (
    ColumnParallelLinear,
    Linear,
    Matrix,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    WatchedModule,
    apply,
    unfilled,
)
from llama.model.plan import LayerPlan, LayerSpec
from llama.ops.batch import DEFAULT_CONTEXT, Batch, ForwardContext
from llama.ops.kv_cache import AS_COMPUTED, KVFormat
from llama.ops.rope import precompute_freqs_cis
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet
from llama.ranks.collectives import ModelParallel
from llama.weights import PlainWeight
from llama.weights.coded import CodedRows


class TransformerBlock(WatchedModule):
    """A layer: the residual stream, and to it the halves of its kinds, one after the other."""

    attention: Attention
    feed_forward: FeedForward
    attention_norm: RMSNorm
    ffn_norm: RMSNorm

    def __init__(self, spec: LayerSpec, plan: LayerPlan, parallel: ModelParallel) -> None:
        super().__init__()
        self.kinds = spec.kinds
        for kind in spec.kinds:
            self.add_module(kind.name, kind.build(plan.dim, parallel))
        for kind in spec.kinds:
            self.add_module(kind.norm_name, RMSNorm(plan.dim, plan.eps))

    def forward(
        self, x: Tensor, freqs_cis: Tensor, batch: Batch, kv_cache: Tensor | None
    ) -> Tensor:
        """Run the layer: x (..., E) of T tokens, kv_cache (2, P, S, K, W) -> (..., E)."""
        for kind in self.kinds:
            half: Any = getattr(self, kind.name)
            normed = apply(getattr(self, kind.norm_name), x, batch)
            x = x + kind.run(half, normed, freqs_cis, batch, kv_cache)
        return x

    def sublayers(self, kv_plane: int | None) -> list[SubLayer]:
        """Return the weights of the halves, as an executor needs them."""
        sublayers = []
        for kind in self.kinds:
            half: Any = getattr(self, kind.name)
            norm: Any = getattr(self, kind.norm_name)
            first, second = half.first.weight, half.second.weight
            sublayers.append(SubLayer(kind, norm, first, second, half.bias, kv_plane))
        return sublayers


class AbsentLayer(nn.Module):
    """Stands where another pipeline stage holds the layer, so that Meta's numbering stays."""


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
        specs = {spec.index: spec for spec in plan.layers}
        self.layers = nn.ModuleList(
            TransformerBlock(specs[i], plan, parallel) if i in specs else AbsentLayer()
            for i in range(params.n_layers)
        )
        self.kernels = TORCH_ONLY
        self._context = DEFAULT_CONTEXT  # of rows outside the layers
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
                module.pack(weights.lm_head_format(quantize) if module is lm_head else quantize)
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
        self._context = ForwardContext(kernels=kernels)

    def new_kv_cache(self, num_pages: int, page_size: int) -> Tensor:
        """Zeroed keys and values of all layers: (L, 2, P, S, K, W), in the plan's format."""
        weight = self.norm.weight
        return zeros(*self.plan.kv_cache(num_pages, page_size, weight.dtype), weight.device)

    def hidden_states(self, tokens: Tensor, batch: Batch, kv_cache: Tensor) -> Tensor:
        """tokens (T), kv_cache (L, 2, P, S, K, W), written in place -> (R, E) at logit_rows."""
        batch = batch.with_kernels(self.kernels)
        executor = self._execution.find(self.kernels)
        if executor is None or not executor.supports(kv_cache):
            h = self._through_layers(tokens, batch, kv_cache)
        else:
            freqs_cis = self.freqs_cis[batch.positions]
            h = executor.run(self.tok_embeddings(tokens), freqs_cis, kv_cache, batch)
        return apply(self.norm, h if batch.wants_all else h[batch.logit_rows], batch)

    def _through_layers(self, tokens: Tensor, batch: Batch, kv_cache: Tensor) -> Tensor:
        """tokens (T), or (B, S) with the same T tokens in all -> (T, E) or (B, S, E)."""
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis[batch.positions]
        planes = kv_cache.unbind()
        for spec, layer in zip(self.plan.layers, self.blocks(), strict=True):
            plane = None if spec.kv_plane is None else planes[spec.kv_plane]
            h = layer(h, freqs_cis, batch, plane)
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
        return self._execution.find(self.kernels)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., E) -> (..., V) float32, whole on every rank."""
        return self.output(hidden, context=self._context, dtype=torch.float32)

    def logits_share(self, hidden: Tensor) -> Tensor:
        """hidden (..., E) -> (..., V of this rank) float32: for the ids `plan.share.vocab`."""
        return self.output.share(hidden, self._context, dtype=torch.float32)

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
            batch = batch.with_kernels(self.kernels)
            h = self._through_layers(tokens, batch, self._raw_pages)
            return self.logits(apply(self.norm, h, batch))


def _tie_again(model: Transformer, _: object) -> None:
    model.tie()
