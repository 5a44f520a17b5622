"""The Llama 3 model: token ids and a `Batch` in, hidden states and logits out.

It must not know of requests, scheduling or sampling. `Transformer.hidden_states` runs the flat
ragged batch of the engine; `Transformer.forward` has Meta's signature and runs the same modules.

Shapes: T tokens of the flat batch, B sequences, R rows that want logits, E model dim, H query heads
and K kv heads of this rank, D head dim, F ffn of this rank, V vocabulary, P pages, S slots per
page, M pages per sequence, L layers.

The file has over 400 lines because the two ways to run a model share its modules, and Meta's
scripts expect the whole model in this one class.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from llama.common.allocation import zeros
from llama.common.device import current
from llama.model.args import ModelArgs
from llama.model.execution import (
    NOTHING_WATCHED,
    Executor,
    ImageLayers,
    LayerExecution,
    SubLayer,
    Watched,
)
from llama.model.forward_cache import PAGE_SIZE, ForwardCache
from llama.model.kinds import KINDS, Attention, FeedForward
from llama.model.layers import (
    ColumnParallelLinear,
    Matrix,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    WatchedList,
    WatchedModule,
    allocate,
    apply,
    name_matrices,
)
from llama.model.plan import LayerPlan, LayerSpec
from llama.model.shares import vocab_widths
from llama.ops.batch import Batch, ForwardContext
from llama.ops.kernels import Kernels, default_kernels
from llama.ops.kv_cache import AS_COMPUTED, KVFormat
from llama.ops.rope import precompute_freqs_cis
from llama.ranks.parallel import Parallel
from llama.weights.plain import PlainWeight


class TransformerBlock(WatchedModule):
    """A layer: the residual stream, and to it the halves of its kinds, one after the other."""

    attention: Attention
    feed_forward: FeedForward
    attention_norm: RMSNorm
    ffn_norm: RMSNorm

    def __init__(self, spec: LayerSpec, plan: LayerPlan, parallel: Parallel) -> None:
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
            sublayer = SubLayer(
                kind=kind,
                half=half,
                norm=getattr(self, kind.norm_name),
                first=half.first.weight,
                second=half.second.weight,
                bias=half.bias,
                kv_plane=kv_plane,
            )
            sublayers.append(sublayer)
        return sublayers


class AbsentLayer(nn.Module):
    """Stands where another pipeline stage holds the layer, so that Meta's numbering stays."""


_LAYER_CLASSES: tuple[type[nn.Module], ...] = (
    TransformerBlock,
    AbsentLayer,
    *(kind.module for kind in KINDS),
    RMSNorm,
    ColumnParallelLinear,
    RowParallelLinear,
)
_LAYER_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    module_class: module_class.forward for module_class in _LAYER_CLASSES
}


def _rotations(params: ModelArgs) -> Tensor:
    """Return the rotation of each pair at each position, (max_seq_len, D/2) complex64.

    The type does not depend on that of the weights.
    """
    return precompute_freqs_cis(
        params.head_dim, params.max_seq_len, params.rope_theta, params.rope_scaling
    )


class Transformer(nn.Module):
    """One rank's share of a Llama 3 model, uninitialised until `loading_order` is filled.

    Attributes:
        tok_embeddings: The token embedding, on the stages that hold it.
        output: The lm_head, on the last stage.
        quantization: The format that the weights were rounded to; None: none.
        kernels: The kernels that the operators may run.
        plan: What the layers of this rank are.
        image_parts: The parts that read images, see `llama.vision`; None for a model of text.
    """

    tok_embeddings: VocabParallelEmbedding
    output: ColumnParallelLinear
    quantization: str | None = None
    image_parts: ImageLayers | None

    def __init__(
        self,
        params: ModelArgs,
        *,
        parallel: Parallel | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kv_format: KVFormat = AS_COMPUTED,
        fills_late: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        """Build the modules.

        Args:
            params: The sizes of the model and of the run.
            parallel: This rank among its peers; by default a process alone.
            device: Where the weights are; "meta" allocates nothing.
            dtype: The type of the weights.
            kv_format: How the KV cache stores keys and values.
            fills_late: Allocate the matrices of a layer when `loading_order` comes to it.
            kernels: What the operators may run; by default this machine's kernels for CPUs.
        """
        super().__init__()
        parallel = parallel or Parallel()
        placement = parallel.placement
        params.check("params")
        params.check_ranks(placement.size)
        self.params = params
        self.parallel = parallel
        self.plan = plan = LayerPlan.of(params, placement, kv_format)
        self.vocab_size = params.vocab_size
        self.n_layers = params.n_layers
        self.image_parts = None
        share = plan.share
        if share.has_embedding:
            self.tok_embeddings = VocabParallelEmbedding(share.vocab, params.dim, parallel)
        specs = {spec.index: spec for spec in plan.layers}
        self.layers = WatchedList(
            TransformerBlock(specs[i], plan, parallel) if i in specs else AbsentLayer()
            for i in range(params.n_layers)
        )
        self.use_kernels(default_kernels() if kernels is None else kernels)
        self._execution = LayerExecution(plan, self.layers, parallel, _LAYER_FORWARDS)
        self.norm = RMSNorm(params.dim, params.norm_eps)
        if share.has_lm_head:
            self.output = ColumnParallelLinear(
                params.dim, len(share.vocab), parallel, widths=vocab_widths(params, placement)
            )
        late: set[nn.Module] = set()
        if fills_late:
            late = {module for module in self.layers.modules() if isinstance(module, Matrix)}
        allocate(self, device, dtype, late)
        name_matrices(self)
        self.tie()
        module: Any = self  # PyTorch does not annotate this method
        module.register_load_state_dict_post_hook(_tie_again)
        self.freqs_cis = _rotations(params).to(device)
        self._forward_cache = self._new_forward_cache()

    def blocks(self) -> list[TransformerBlock]:
        """Return the layers that this rank's stage holds, in order."""
        layers = [cast(TransformerBlock, layer) for layer in self.layers]
        return [layers[i] for i in self.plan.share.layers]

    def loading_order(self) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
        """Yield each part of the model with the views that hold this rank's share of it.

        The views are by Meta's names. Parts come one after the other, so that one can be packed
        before the next takes memory.
        """
        matrices = [module for module in self.modules() if isinstance(module, Matrix)]
        assert all(isinstance(x.weight, PlainWeight) for x in matrices), "the weights are packed"
        share = self.plan.share
        if share.has_embedding:
            embedding = self.tok_embeddings.weight.plain()
            yield self.tok_embeddings, {"tok_embeddings.weight": embedding}
        for i, layer in zip(share.layers, self.blocks(), strict=True):
            for module in layer.modules():
                if isinstance(module, Matrix) and module.weight.values.is_meta:
                    like = self.norm.weight
                    module.weight = PlainWeight.empty(*module.weight.shape, like.device, like.dtype)
            yield layer, layer.state_dict(prefix=f"layers.{i}.")
        yield self.norm, {"norm.weight": self.norm.weight.data}
        if share.has_lm_head:
            tied = self.params.tied_output
            yield self.output, {} if tied else {"output.weight": self.output.weight.plain()}
        if self.image_parts is not None:
            yield from self.image_parts.loading_order()

    def named_shards(self) -> dict[str, Tensor]:
        """Return the view that holds this rank's share of each weight, by Meta's name."""
        shards: dict[str, Tensor] = {}
        for _, views in self.loading_order():
            shards |= views
        return shards

    def tie(self) -> None:
        """Give both ends one weight, if the checkpoint has one for both."""
        if self.is_tied:
            self.tok_embeddings.weight = self.output.weight

    @property
    def is_tied(self) -> bool:
        """Return whether this rank holds both ends and they share one weight."""
        share = self.plan.share
        return self.params.tied_output and share.has_embedding and share.has_lm_head

    def use_kernels(self, kernels: Kernels) -> None:
        """Let the operators of this model run these kernels, and no others."""
        self.kernels = kernels
        self._context = ForwardContext(kernels=kernels)

    def new_kv_cache(self, num_pages: int, page_size: int) -> Tensor:
        """Allocate zeroed keys and values of all layers: (L, 2, P, S, K, W)."""
        weight = self.norm.weight
        return zeros(*self.plan.kv_cache(num_pages, page_size, weight.dtype), weight.device)

    def _new_forward_cache(self) -> ForwardCache:
        """Return the KV cache of `forward`, which takes no memory yet.

        On the CPU a page holds a whole sequence: memory becomes resident only where it is written.
        """
        length = self.params.max_seq_len
        page_size = length if self.norm.weight.is_cpu else PAGE_SIZE
        return ForwardCache(page_size, self.params.max_batch_size * -(-length // page_size))

    def hidden_states(
        self,
        tokens: Tensor,
        batch: Batch,
        kv_cache: Tensor,
        watched: Watched = NOTHING_WATCHED,
    ) -> Tensor:
        """Run the model on the tokens of a step.

        Args:
            tokens: (T) ids.
            batch: Where each token is, and what it may attend to.
            kv_cache: (L, 2, P, S, K, W), written in place.
            watched: Further states that are wanted, which it gets.

        Returns:
            (R, E): the normalised hidden states of the batch's `logit_rows`.
        """
        x = self.run_layers(self.embed(tokens, batch), batch, kv_cache, watched)
        return self.normalize(x, batch, watched)

    def embed(self, tokens: Tensor, batch: Batch) -> Tensor:
        """Return the embeddings of the tokens of a step: (T) -> (T, E)."""
        if batch.cross is None:
            x: Tensor = self.tok_embeddings(tokens)
            return x
        assert self.image_parts is not None, "images, and a model of text"
        return self.image_parts.embed(self.tok_embeddings, tokens)

    def run_layers(
        self, x: Tensor, batch: Batch, kv_cache: Tensor, watched: Watched = NOTHING_WATCHED
    ) -> Tensor:
        """Run the layers of this rank's stage on the tokens of a step.

        Args:
            x: (T, E), the embeddings of the tokens, or what the stage before has returned.
            batch: Where each token is, and what it may attend to.
            kv_cache: (L, 2, P, S, K, W), written in place.
            watched: Further states that are wanted, which it gets.

        Returns:
            (T, E): the hidden states, which are not normalised.
        """
        batch = batch.with_kernels(self.kernels)
        images = self.image_parts
        if images is not None and batch.cross is not None:
            images.store(batch.cross, batch, kv_cache)
        executor = self._execution.find(self.kernels)
        if executor is None or not executor.supports(kv_cache):
            return self._run_modules(x, batch, kv_cache, watched)
        freqs_cis = self.freqs_cis[batch.positions]
        if images is None or batch.cross is None:
            return executor.run(x, freqs_cis, kv_cache, batch, watched)
        for layer, part in self._execution.parts(images.layers):
            x = images.run_before(layer, x, batch, kv_cache)
            x = part.run(x, freqs_cis, kv_cache, batch, watched)
        return x

    def normalize(self, x: Tensor, batch: Batch, watched: Watched = NOTHING_WATCHED) -> Tensor:
        """Normalise the `logit_rows` of a step's hidden states: x (T, E) -> (R, E).

        Args:
            x: The hidden states after the last layer.
            batch: The tokens of the step.
            watched: Further states that are wanted; it gets those after the last layer.
        """
        watched.see(self.n_layers, x, batch)
        context = batch.with_kernels(self.kernels)
        rows = x if batch.wants_all else x[batch.logit_rows]
        normed: Tensor = apply(self.norm, rows, context)
        number = self.n_layers + 1
        if number in watched.of_tokens and rows is not x:
            watched.states[number] = apply(self.norm, x, context)
        elif number in watched.layers:
            watched.states[number] = normed
        return normed

    def _run_modules(
        self, x: Tensor, batch: Batch, kv_cache: Tensor, watched: Watched = NOTHING_WATCHED
    ) -> Tensor:
        """Run the layers as modules: x (T, E), or (B, S, E) with the same T tokens in all."""
        freqs_cis = self.freqs_cis[batch.positions]
        planes = kv_cache.unbind()
        for spec, layer in zip(self.plan.layers, self.blocks(), strict=True):
            if self.image_parts is not None:
                x = self.image_parts.run_before(spec.index, x, batch, kv_cache)
            watched.see(spec.index, x, batch)
            plane = None if spec.kv_plane is None else planes[spec.kv_plane]
            x = layer(x, freqs_cis, batch, plane)
        return x

    def use_modules(self, wanted: bool = True) -> None:
        """Run the layers module by module from now on, as they run while a hook exists; or not.

        Hooks, and attributes that are set on parts of the model, are seen without this call. What
        is changed in another way, such as the `forward` of a class, is seen after it.

        Args:
            wanted: Whether to run the modules in any case.
        """
        self._execution.uses_modules = wanted
        self._execution.make_again()

    def execution_path(self) -> Executor | None:
        """Return what `hidden_states` runs now; None if a hook or another forward sees a part.

        The same object means the same operators on the same weights.
        """
        for name, part in self._modules.items():
            if part is None or name == "layers":
                continue
            if part._forward_hooks or part._forward_pre_hooks:
                return None
        return self._execution.find(self.kernels)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: hidden (..., E) -> (..., V) float32, whole on every rank."""
        logits: Tensor = self.output(hidden, context=self._context, dtype=torch.float32)
        return logits

    def logits_share(self, hidden: Tensor) -> Tensor:
        """Compute this rank's logits, of the ids `plan.share.vocab`: hidden (..., E), float32."""
        return self.output.share(hidden, self._context, dtype=torch.float32)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        """Run the model with Meta's signature. Hooks see (B, S, E).

        The keys and values of all sequences are kept from call to call.

        Args:
            tokens: (B, S) ids.
            start_pos: The position of the first of them.

        Returns:
            (B, S, V) float32 logits.

        Raises:
            ValueError: B or start_pos + S is larger than the model was made for, or the model is
                one stage of a pipeline.
        """
        max_batch_size = self.params.max_batch_size
        max_seq_len = self.params.max_seq_len
        n, count = tokens.shape
        if self.parallel.placement.stages > 1:
            raise ValueError("a stage of a pipeline has no logits of its own: call the engine")
        if n > max_batch_size or start_pos + count > max_seq_len or start_pos < 0:
            raise ValueError(
                f"tokens of shape {(n, count)} at start_pos={start_pos} do not fit "
                f"max_batch_size={max_batch_size} and max_seq_len={max_seq_len}"
            )
        cache = self._forward_cache
        pages = cache.pages_of(n, start_pos + count, self.new_kv_cache)
        _, batch = Batch.pack(
            tokens=[],
            starts=[start_pos] * n,
            query_lens=[count] * n,
            pages=pages,
            page_size=cache.page_size,
            logit_rows=[],
            device=tokens.device,
        )
        with current(tokens.device):  # Triton launches kernels on the current device
            batch = batch.with_kernels(self.kernels)
            x = self._run_modules(self.tok_embeddings(tokens), batch, cache.kv_cache)
            return self.logits(apply(self.norm, x, batch))


def _tie_again(model: Transformer, _: object) -> None:
    model.tie()
