"""How the layers of a model run: module by module, as a sequence of ops, or in one native call.

In: the layers, as modules. Out: an executor of their weights, or None where somebody wants to see
or change what happens inside (a hook, another forward or module, `use_modules`). The modules are
the definition; an executor gives the same bytes.

The step's `Batch` is a `ForwardContext`: it reaches every product, and carries the kernels that the
operators may run and whatever else belongs to its rows. The executors hand it to each weight. The
modules hand it on by keyword (see `llama.model.layers.apply`), so that Meta's `forward(tokens,
start_pos)`, hooks and modules with Meta's signatures work as they do there. `Transformer` puts its
kernels into the batch of each step; nothing else holds them.

Shapes: L layers, T tokens, E model dim, H query heads, K kv heads, D head dim, F ffn, P pages, S
slots per page. H, K and F are this rank's.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from llama.model.kinds import HalfKind, HalfLayer
from llama.model.layers import RMSNorm, WatchedModule
from llama.model.plan import LayerPlan
from llama.ops.adapters import native_adapters
from llama.ops.batch import Batch
from llama.ops.cpu import native
from llama.ops.cpu.constants import MAX_HEAD_DIM
from llama.ops.kv_cache import NATIVE
from llama.ops.norm import add_norm, rms_norm
from llama.ops.triton.kernels import KernelSet
from llama.ranks.parallel import Parallel
from llama.weights.weight import Weight

# Bytes of workspace that stay allocated between calls: new memory costs a page fault per page.
_KEPT_BYTES = 16 << 20
_has_global_hook: Callable[[], bool] = _has_any_global_hook
# Functions in C, as a step calls them once for each module of each layer.
_count_of = attrgetter("num_changes")
_forward_of = attrgetter("forward")
Forwards = Mapping[type[nn.Module], Callable[..., Any]]  # the forward of each class of a layer


@dataclass(frozen=True, eq=False)
class Watched:
    """The hidden states of a step that somebody wants to see.

    Attributes:
        layers: Their numbers: i is the residual stream that enters layer i, L the one that leaves
            the last of L layers, and L + 1 its normalised form.
        states: The states that were seen, by number: (R, E) of the rows that have results.
    """

    layers: frozenset[int] = frozenset()
    states: dict[int, Tensor] = field(default_factory=dict)

    def see(self, layer: int, x: Tensor, batch: Batch) -> None:
        """Keep a copy of a state (T, E), if it is wanted; x may be changed in place later."""
        if layer in self.layers:
            self.states[layer] = x.clone() if batch.wants_all else x[batch.logit_rows]


NOTHING_WATCHED = Watched()


@dataclass(frozen=True)
class SubLayer:
    """The weights of a half layer: x + second(body(first(norm(x)) + bias)).

    Attributes:
        kind: The kind, which says whether the CPU's kernels have its body.
        half: The module, which computes the body and has the further weights that this reads.
        norm: The norm, (E).
        first: wqkv ((H + 2K) D, E), or w13 (2F, E).
        second: wo (E, H D), or w2 (E, F).
        bias: What is added to the rows of the first product, (N); None: nothing.
        kv_plane: The index of its layer's keys and values in the KV cache, if it has some.
        begins: The number of the layer whose first half it is; None for other halves.
    """

    kind: HalfKind
    half: HalfLayer
    norm: RMSNorm
    first: Weight
    second: Weight
    bias: Tensor | None
    kv_plane: int | None
    begins: int | None = None


@dataclass(eq=False)
class OpLayers:
    """The layers as a sequence of operators called from Python, on any device and in any format.

    The bytes are those of the modules: the same operators in the same order.
    """

    plan: LayerPlan
    sublayers: Sequence[SubLayer]
    parallel: Parallel

    def supports(self, kv_cache: Tensor) -> bool:
        """Return whether `run` takes this KV cache."""
        return _is_cache(self.plan, kv_cache, self.sublayers[0].norm.weight.dtype)

    def run(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        kv_cache: Tensor,
        batch: Batch,
        watched: Watched = NOTHING_WATCHED,
    ) -> Tensor:
        """Run the layers: x (T, E) -> (T, E).

        Args:
            x: The residual stream.
            freqs_cis: The rotations of the tokens' positions, (T, D/2).
            kv_cache: (L, 2, P, S, K, W), which it `supports`, written in place.
            batch: The tokens of the step.
            watched: The states that are wanted.
        """
        planes = kv_cache.unbind()
        kernels = batch.kernels
        first = self.sublayers[0].norm
        normed = rms_norm(x, first.weight, first.eps, kernels)
        following = [sublayer.norm for sublayer in self.sublayers[1:]]
        for sublayer, norm in zip(self.sublayers, [*following, None], strict=True):
            if sublayer.begins is not None:
                watched.see(sublayer.begins, x, batch)
            updates = batch.updates_of(sublayer.half.first.names)
            part = sublayer.first.linear(normed, context=batch, updates=updates)
            if sublayer.bias is not None:
                part = part + sublayer.bias
            plane = None if sublayer.kv_plane is None else planes[sublayer.kv_plane]
            part = sublayer.half.body(part, freqs_cis, batch, plane)
            updates = batch.updates_of(sublayer.half.second.names)
            part = sublayer.second.linear(part, context=batch, updates=updates)
            part = self.parallel.all_reduce(part)
            if norm is None:
                return x + part
            x, normed = add_norm(x, part, norm.weight, norm.eps, kernels)
        raise AssertionError("a model has at least one layer")


class NativeLayers:
    """The layers as one call of layers.cpp, if the CPU kernels take all weights.

    One thread at a time may run it.
    """

    def __init__(self, plan: LayerPlan, sublayers: Sequence[SubLayer], parallel: Parallel) -> None:
        """Describe the half layers to the kernels.

        Raises:
            ValueError: The kernels do not take the weights, or their sizes.
        """
        self.plan = plan
        self.parallel = parallel
        self.sublayers = sublayers  # they keep the tensors alive whose addresses the table has
        self._eps = float(sublayers[0].norm.eps)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._sizes = (plan.dim, plan.n_heads, plan.n_kv_heads, plan.head_dim, plan.ffn_dim)
        rows = [_native_row(sublayer, plan.dim) for sublayer in sublayers]
        if any(sublayer.norm.eps != self._eps for sublayer in sublayers):
            raise ValueError("the CPU's kernels take one epsilon for all norms")
        is_aligned = not any(size % 32 for size in (plan.head_dim, plan.dim, plan.ffn_dim))
        has_whole_groups = plan.n_heads % plan.n_kv_heads == 0
        if not is_aligned or not has_whole_groups or plan.head_dim > MAX_HEAD_DIM:
            raise ValueError("these sizes are not for the CPU's kernels")
        self._table = torch.tensor(rows)

    def supports(self, kv_cache: Tensor) -> bool:
        """Return whether `run` takes this KV cache."""
        is_usable = kv_cache.device.type == "cpu" and kv_cache.is_contiguous()
        has_kernels = kv_cache.dtype in NATIVE
        return is_usable and has_kernels and _is_cache(self.plan, kv_cache, torch.bfloat16)

    def run(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        kv_cache: Tensor,
        batch: Batch,
        watched: Watched = NOTHING_WATCHED,
    ) -> Tensor:
        """Run the layers, with the arguments and the result of `OpLayers.run`.

        The native call is split where the stream is seen. Between ranks there are two native calls
        per layer, each followed by a sum. Neither changes a bit.
        """
        x = x.clone(memory_format=torch.contiguous_format)
        num_tokens, _ = x.shape
        num_seqs, table_width = batch.page_table.shape
        num_pages, page_size = kv_cache.shape[2:4]
        self._check(x, freqs_cis, batch, page_size)
        starts = batch.query_starts
        lens = batch.seq_lens
        kv_format = NATIVE[kv_cache.dtype]
        scale = self.plan.head_dim**-0.5
        sizes = (num_tokens, num_seqs, *self._sizes)
        workspace = self._allocate(starts, lens, sizes)
        segments, middle = native_adapters(batch.adapters)
        num_segments = len(segments)
        normed = torch.empty_like(x) if num_segments else x

        def run_sublayers(out: Tensor, first: int, end: int) -> None:
            native.call(
                "layers_bf16", self._table, x, out, freqs_cis, kv_cache, batch.slots,
                batch.page_table, starts, lens, workspace, segments, normed, middle,
                num_segments, first, end, *sizes, num_pages, page_size, table_width, kv_format,
                self._eps, scale,
            )  # fmt: skip

        if self.parallel.size == 1:
            begin = 0
            for i, layer in self._starts(watched):
                if begin < i:
                    run_sublayers(x, begin, i)
                watched.see(layer, x, batch)
                begin = i
            run_sublayers(x, begin, len(self.sublayers))
        else:
            part = torch.empty_like(x)
            layers = dict(self._starts(watched))
            for i in range(len(self.sublayers)):
                if i in layers:
                    watched.see(layers[i], x, batch)
                run_sublayers(part, i, i + 1)
                x += self.parallel.all_reduce(part)
        return x

    def _starts(self, watched: Watched) -> list[tuple[int, int]]:
        """Return the indices of the half layers at which watched layers begin, and these layers."""
        if not watched.layers:
            return []
        starts = []
        for i, sublayer in enumerate(self.sublayers):
            if sublayer.begins is not None and sublayer.begins in watched.layers:
                starts.append((i, sublayer.begins))
        return starts

    def _check(self, x: Tensor, freqs_cis: Tensor, batch: Batch, page_size: int) -> None:
        """Check the shapes that the kernels rely on: a wrong one would read or write anywhere."""
        num_tokens, dim = x.shape
        num_seqs, table_width = batch.page_table.shape
        assert len(batch.seq_lens_cpu) == num_seqs, (batch.seq_lens_cpu, num_seqs)
        assert max(batch.seq_lens_cpu) <= table_width * page_size, table_width
        assert dim == self.plan.dim, (x.shape, self.plan.dim)
        assert freqs_cis.shape == (num_tokens, self.plan.head_dim // 2), freqs_cis.shape
        lengths = (len(batch.slots), len(batch.query_starts), len(batch.seq_lens))
        assert lengths == (num_tokens, num_seqs + 1, num_seqs), (lengths, num_tokens, num_seqs)

    def _allocate(self, starts: Tensor, lens: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return the workspace of a step; a small one is kept for the next step."""
        threads = torch.get_num_threads()
        num_bytes = native.call("layers_workspace", starts, lens, *sizes, threads)
        workspace = self._workspace
        if len(workspace) < num_bytes:
            workspace = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes <= _KEPT_BYTES:
            self._workspace = workspace
        return workspace


def _native_row(sublayer: SubLayer, dim: int) -> list[int]:
    """Describe a half layer as `Half` in layers.cpp does.

    The addresses are of tensors that live as long as the sublayer.
    """
    first = sublayer.first.native_matrix()
    second = sublayer.second.native_matrix()
    norm = sublayer.norm.weight
    bias = sublayer.bias
    is_taken = _is_vector(norm, dim) and (bias is None or _is_vector(bias, sublayer.first.shape[0]))
    if sublayer.kind.native is None or first is None or second is None or not is_taken:
        raise ValueError("these weights are not for the CPU's kernels")
    bias_address = 0 if bias is None else bias.data_ptr()
    head = [sublayer.kind.native, sublayer.kv_plane or 0, norm.data_ptr(), bias_address]
    return [*head, *first, *second]


def _is_vector(x: Tensor, size: int) -> bool:
    """Return whether the CPU kernels can read a vector of this size."""
    is_bf16 = x.dtype is torch.bfloat16 and x.device.type == "cpu"
    return is_bf16 and x.is_contiguous() and x.shape == (size,)


def _is_cache(plan: LayerPlan, kv_cache: Tensor, dtype: torch.dtype) -> bool:
    """Return whether it has the shape and type of the KV cache of a model in `dtype`."""
    shape = tuple(kv_cache.shape)
    return len(shape) == 6 and (shape, kv_cache.dtype) == plan.kv_cache(*shape[2:4], dtype)


Executor = OpLayers | NativeLayers


def _may_be_native(weight: Tensor) -> bool:
    """Return whether the CPU kernels may run; a model on a GPU must not have them compiled."""
    return weight.is_cpu and native.kernels() is not None


class LayerExecution:
    """Finds the executor of the layers, and makes it again when they have changed.

    Attributes:
        uses_modules: Run the modules in any case, see `Transformer.use_modules`.
    """

    def __init__(
        self, plan: LayerPlan, layers: nn.ModuleList, parallel: Parallel, definitions: Forwards
    ) -> None:
        """Start without an executor.

        Args:
            plan: What the layers are.
            layers: The modules; those that the plan lists have `sublayers`.
            parallel: The rank among its peers.
            definitions: The forward of each class of module that a layer is made of.
        """
        self.uses_modules = False
        self._plan = plan
        self._layers = layers
        self._parallel = parallel
        self._definitions = definitions
        self._executor: Executor | None = None
        self._state_at_making: list[object] = []  # the state that the executor was made from
        self._watched: list[WatchedModule] = []  # modules within the layers
        self._hooks: list[Mapping[int, Any]] = []  # their forward hooks
        self._parameters: list[Mapping[str, Tensor | None]] = []  # their parameters

    def find(self, kernels: KernelSet) -> Executor | None:
        """Return the executor that is valid now, or None if the modules must run.

        It is called at each step, and looks only at what may have changed.
        """
        if self.uses_modules:
            return None
        if self._state(kernels) != self._state_at_making:
            self._executor = self._make(kernels)
            self._state_at_making = self._state(kernels)
        forwards = [*map(_forward_of, self._definitions)]
        is_defined = forwards == [*self._definitions.values()]
        is_hooked = any(self._hooks) or _has_global_hook()
        return self._executor if is_defined and not is_hooked else None

    def _state(self, kernels: KernelSet) -> list[object]:
        """Return what an executor depends on: layers, counts of changes, addresses of weights."""
        tensors: list[Any] = []
        for parameters in self._parameters:
            if parameters:  # most modules have none of their own
                tensors += parameters.values()
        is_native = bool(tensors) and _may_be_native(tensors[0])
        changes = map(_count_of, self._watched)
        addresses = map(Tensor.data_ptr, tensors)
        return [kernels, is_native, *self._layers, *changes, *addresses]

    def _make(self, kernels: KernelSet) -> Executor | None:
        modules = list(self._layers.modules())[1:]
        called = [module for module in modules if not isinstance(module, Weight)]
        self._watched = [module for module in called if isinstance(module, WatchedModule)]
        self._hooks = []
        for module in called:
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        self._parameters = [module._parameters for module in modules]
        for module in called:
            if type(module) not in self._definitions or "forward" in vars(module):
                return None
        sublayers: list[SubLayer] = []
        for spec in self._plan.layers:
            layer: Any = self._layers[spec.index]
            first, *others = layer.sublayers(spec.kv_plane)
            sublayers += [replace(first, begins=spec.index), *others]
        if sublayers[0].norm.weight.is_cuda or kernels.names:
            return OpLayers(self._plan, sublayers, self._parallel)
        if not _may_be_native(sublayers[0].norm.weight):
            return None
        with contextlib.suppress(ValueError):
            return NativeLayers(self._plan, sublayers, self._parallel)
        return None
