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
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from llama.model.kinds import HalfKind
from llama.model.layers import RMSNorm, WatchedModule
from llama.model.plan import LayerPlan
from llama.ops.batch import Batch
from llama.ops.cpu import native
from llama.ops.cpu.constants import MAX_HEAD_DIM
from llama.ops.kv_cache import NATIVE
from llama.ops.norm import add_norm, rms_norm
from llama.ops.triton.kernels import KernelSet
from llama.ranks.collectives import ModelParallel
from llama.weights import Weight

_KEPT_BYTES = 16 << 20  # of workspace between calls: new memory costs a fault per page
_count_of = attrgetter("num_changes")
Forwards = Mapping[type[nn.Module], Callable]  # the kinds of modules in a layer, as defined


@dataclass(frozen=True)
class SubLayer:
    """The weights of a half layer: x + second(body(first(norm(x)) + bias)).

    Attributes:
        kind: What its body is.
        norm: The norm, (E).
        first: wqkv ((H + 2K) D, E), or w13 (2F, E).
        second: wo (E, H D), or w2 (E, F).
        bias: What is added to the rows of the first product, (N); None: nothing.
        kv_plane: The index of its layer's keys and values in the KV cache, if it has some.
    """

    kind: HalfKind
    norm: RMSNorm
    first: Weight
    second: Weight
    bias: Tensor | None
    kv_plane: int | None


@dataclass(eq=False)
class OpLayers:
    """A sequence of ops called from Python, on any device and in any format. The bytes are those of
    the modules: the same ops in the same order."""

    plan: LayerPlan
    sublayers: Sequence[SubLayer]
    parallel: ModelParallel

    def supports(self, kv_cache: Tensor) -> bool:
        return _is_cache(self.plan, kv_cache, self.sublayers[0].norm.weight.dtype)

    def run(self, x: Tensor, freqs_cis: Tensor, kv_cache: Tensor, batch: Batch) -> Tensor:
        """x (T, E), freqs_cis (T, D/2), kv_cache (L, 2, P, S, K, W) that it `supports`, written in
        place -> (T, E)."""
        planes = kv_cache.unbind()
        kernels = batch.kernels
        first = self.sublayers[0].norm
        normed = rms_norm(x, first.weight, first.eps, kernels)
        following = [sublayer.norm for sublayer in self.sublayers[1:]]
        for sublayer, norm in zip(self.sublayers, [*following, None], strict=True):
            part = sublayer.first.linear(normed, context=batch)
            if sublayer.bias is not None:
                part = part + sublayer.bias
            plane = None if sublayer.kv_plane is None else planes[sublayer.kv_plane]
            part = sublayer.kind.body(part, freqs_cis, batch, plane)
            part = self.parallel.all_reduce(sublayer.second.linear(part, context=batch))
            if norm is None:
                return x + part
            x, normed = add_norm(x, part, norm.weight, norm.eps, kernels)
        raise AssertionError("a model has at least one layer")


class NativeLayers:
    """One call of layers.cpp, where the CPU's kernels take all weights; one thread at a time."""

    def __init__(
        self, plan: LayerPlan, sublayers: Sequence[SubLayer], parallel: ModelParallel
    ) -> None:
        """ValueError where the kernels do not take the weights, or their sizes."""
        self.plan, self.parallel, p = plan, parallel, plan
        self.sublayers = sublayers  # kept, as the table has their addresses
        self._eps = float(sublayers[0].norm.eps)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._sizes = (p.dim, p.n_heads, p.n_kv_heads, p.head_dim, p.ffn_dim)
        rows = [_native_row(sublayer, p.dim) for sublayer in sublayers]
        if any(sublayer.norm.eps != self._eps for sublayer in sublayers):
            raise ValueError("the CPU's kernels take one epsilon for all norms")
        has_odd_rows = any(size % 32 for size in (p.head_dim, p.dim, p.ffn_dim))
        if has_odd_rows or p.head_dim > MAX_HEAD_DIM or p.n_heads % p.n_kv_heads:
            raise ValueError("these sizes are not for the CPU's kernels")
        self._table = torch.tensor(rows)

    def supports(self, kv_cache: Tensor) -> bool:
        is_there = kv_cache.device.type == "cpu" and kv_cache.is_contiguous()
        return (
            is_there and kv_cache.dtype in NATIVE and _is_cache(self.plan, kv_cache, torch.bfloat16)
        )

    def run(self, x: Tensor, freqs_cis: Tensor, kv_cache: Tensor, batch: Batch) -> Tensor:
        """As `OpLayers.run`. Between ranks there are two native calls a layer, with a sum after
        each."""
        p, (t, e), (b, width) = self.plan, x.shape, batch.page_table.shape
        x = x.clone(memory_format=torch.contiguous_format)
        num_pages, page_size = kv_cache.shape[2:4]
        assert len(batch.seq_lens_cpu) == b and max(batch.seq_lens_cpu) <= width * page_size, width
        assert e == p.dim and freqs_cis.shape == (t, p.head_dim // 2), (x.shape, e)
        lengths = len(batch.slots), len(batch.query_starts), len(batch.seq_lens)
        assert lengths == (t, b + 1, b), (lengths, t, b)
        starts, lens, kv_format = batch.query_starts, batch.seq_lens, NATIVE[kv_cache.dtype]
        sizes = (t, b, *self._sizes)
        threads = torch.get_num_threads()
        num_bytes = native.call("layers_workspace", starts, lens, *sizes, threads)
        workspace = self._workspace
        if len(workspace) < num_bytes:
            workspace = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes <= _KEPT_BYTES:
            self._workspace = workspace

        def run_sublayers(out: Tensor, first: int, last: int) -> None:
            native.call(
                "layers_bf16", self._table, x, out, freqs_cis, kv_cache, batch.slots,
                batch.page_table, starts, lens, workspace, first, last, *sizes, num_pages,
                page_size, width, kv_format, self._eps, p.head_dim**-0.5,
            )  # fmt: skip

        if self.parallel.size == 1:
            run_sublayers(x, 0, len(self.sublayers))
        else:
            part = torch.empty_like(x)
            for i in range(len(self.sublayers)):
                run_sublayers(part, i, i + 1)
                x += self.parallel.all_reduce(part)
        return x


def _native_row(sublayer: SubLayer, dim: int) -> list[int]:
    """Describe a half layer as `Half` in layers.cpp does.

    The addresses are of tensors that live as long as the sublayer.
    """
    first, second = sublayer.first.native_matrix(), sublayer.second.native_matrix()
    norm, bias = sublayer.norm.weight, sublayer.bias
    is_taken = _is_vector(norm, dim) and (bias is None or _is_vector(bias, sublayer.first.shape[0]))
    if sublayer.kind.native is None or first is None or second is None or not is_taken:
        raise ValueError("these weights are not for the CPU's kernels")
    address = 0 if bias is None else bias.data_ptr()
    head = [sublayer.kind.native, sublayer.kv_plane or 0, norm.data_ptr(), address]
    return [*head, *first, *second]


def _is_vector(x: Tensor, size: int) -> bool:
    """Whether the CPU's kernels can read a vector of this size."""
    is_ours = x.dtype is torch.bfloat16 and x.device.type == "cpu"
    return is_ours and x.is_contiguous() and x.shape == (size,)


def _is_cache(plan: LayerPlan, kv_cache: Tensor, dtype: torch.dtype) -> bool:
    """Whether it is that of such a model in `dtype`."""
    shape = tuple(kv_cache.shape)
    return len(shape) == 6 and (shape, kv_cache.dtype) == plan.kv_cache(*shape[2:4], dtype)


Executor = OpLayers | NativeLayers


class LayerExecution:
    """Finds the executor of the layers, and makes it again when they have changed. definitions: the
    forward of each kind of module that a layer is made of; a layer has `sublayers`."""

    def __init__(
        self, plan: LayerPlan, layers: nn.ModuleList, parallel: ModelParallel, definitions: Forwards
    ) -> None:
        self.uses_modules = False  # whatever is found: see `Transformer.use_modules`
        self._plan, self._layers, self._parallel = plan, layers, parallel
        self._definitions = definitions
        self._executor: Executor | None = None
        self._made_of: list[object] = []  # the state that it, or None, was made of
        self._watched: list[WatchedModule] = []  # the modules in the layers,
        self._hooks: list[Mapping] = []  # theirs, by whoever looks into them,
        self._parameters: list[Mapping[str, Tensor]] = []  # and theirs

    def find(self, kernels: KernelSet) -> Executor | None:
        """Asked at each step: what has not changed is not looked at twice."""
        if self.uses_modules:
            return None
        if self._state(kernels) != self._made_of:
            self._executor = self._make(kernels)
            self._made_of = self._state(kernels)
        is_defined = all(kind.forward is forward for kind, forward in self._definitions.items())
        is_watched = any(self._hooks) or _has_any_global_hook()
        return self._executor if is_defined and not is_watched else None

    def _state(self, kernels: KernelSet) -> list[object]:
        """All that an executor depends on: the layers, their changes so far, where numbers are."""
        tensors = chain.from_iterable(x.values() for x in self._parameters)
        changes, addresses = map(_count_of, self._watched), map(Tensor.data_ptr, tensors)
        return [kernels, native.kernels() is None, *self._layers, *changes, *addresses]

    def _make(self, kernels: KernelSet) -> Executor | None:
        modules = list(self._layers.modules())[1:]
        called = [x for x in modules if not isinstance(x, Weight)]
        self._watched = [x for x in called if isinstance(x, WatchedModule)]
        self._hooks = [h for x in called for h in (x._forward_hooks, x._forward_pre_hooks)]
        self._parameters = [x._parameters for x in modules]  # type: ignore[misc]
        if any(type(x) not in self._definitions or "forward" in vars(x) for x in called):
            return None
        sublayers: list[SubLayer] = []
        for spec in self._plan.layers:
            layer: Any = self._layers[spec.index]
            sublayers += layer.sublayers(spec.kv_plane)
        made_of = self._plan, sublayers, self._parallel
        if sublayers[0].norm.weight.is_cuda or kernels.names:
            return OpLayers(*made_of)
        with contextlib.suppress(ValueError):
            return NativeLayers(*made_of) if native.kernels() is not None else None
        return None
