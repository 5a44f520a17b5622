"""How the layers of a model run: module by module, as a sequence of ops, or in one kernel.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from llama.model.kinds import HalfKind, HalfLayer
from llama.model.layers import Changes, RMSNorm, WatchedList, WatchedModule
from llama.model.plan import LayerPlan
from llama.ops.batch import Batch, CrossRows
from llama.ops.kernels import Kernels
from llama.ranks.parallel import Parallel
from llama.weights.weight import Weight

_has_global_hook: Callable[[], bool] = _has_any_global_hook
Forwards = Mapping[type[nn.Module], Callable[..., Any]]  # the forward of each class of a layer


@dataclass(frozen=True, eq=False)
class Watched:
    """The hidden states of a step that somebody wants to see.

    The number i means the residual stream that enters layer i, L the one that leaves the last of L
    layers, and L + 1 its normalised form.

    Attributes:
        of_rows: The numbers of the states that are wanted of the rows that have results.
        of_tokens: The numbers of those that are wanted of all tokens.
        states: The states that were seen, by number: (T, E) if the number is in `of_tokens`, else
            (R, E).
    """

    of_rows: frozenset[int] = frozenset()
    of_tokens: frozenset[int] = frozenset()
    states: dict[int, Tensor] = field(default_factory=dict)

    @property
    def layers(self) -> frozenset[int]:
        """Return all numbers that are wanted."""
        return self.of_rows | self.of_tokens

    def see(self, layer: int, x: Tensor, batch: Batch) -> None:
        """Keep a copy of a state (T, E), if it is wanted; x may be changed in place later."""
        if layer in self.of_tokens or (layer in self.of_rows and batch.wants_all):
            self.states[layer] = x.clone()
        elif layer in self.of_rows:
            self.states[layer] = x[batch.logit_rows]


NOTHING_WATCHED = Watched()


@dataclass(frozen=True)
class SubLayer:
    """The weights of a half layer: x + after_sum(second(body(first(norm(x)) + bias))).

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

    def is_current(self) -> bool:
        """Return True: the operators read the weights where they are at each step."""
        return True

    def supports(self, kv_cache: Tensor) -> bool:
        """Return whether `run` takes this KV cache."""
        return self.plan.is_cache(kv_cache, self.sublayers[0].norm.weight.dtype)

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
        first = self.sublayers[0]
        _, rows = first.first.normed(x, None, first.norm.weight, first.norm.eps, batch)
        for sublayer, following in zip(self.sublayers, [*self.sublayers[1:], None], strict=True):
            if sublayer.begins is not None:
                watched.see(sublayer.begins, x, batch)
            updates = batch.updates_of(sublayer.half.first.names)
            part = sublayer.first.product(rows, x.dtype, batch, updates)
            if sublayer.bias is not None:
                part = part + sublayer.bias
            plane = None if sublayer.kv_plane is None else planes[sublayer.kv_plane]
            rows = sublayer.half.body(part, freqs_cis, batch, plane)
            updates = batch.updates_of(sublayer.half.second.names)
            part = sublayer.second.product(rows, x.dtype, batch, updates)
            part = self.parallel.all_reduce(part)
            part = sublayer.kind.after_sum(sublayer.half, part, batch)
            if following is None:
                return x + part
            norm = following.norm
            x, rows = following.first.normed(x, part, norm.weight, norm.eps, batch)
        raise AssertionError("a model has at least one layer")


class Executor(Protocol):
    """An executor runs all layers of a rank: `OpLayers`, or the kernel "layers" of a table."""

    def is_current(self) -> bool:
        """Return whether the weights are those that it was made from."""

    def supports(self, kv_cache: Tensor) -> bool:
        """Return whether `run` takes this KV cache."""

    def run(
        self, x: Tensor, freqs_cis: Tensor, kv_cache: Tensor, batch: Batch, watched: Watched
    ) -> Tensor:
        """Run the layers, with the arguments and the result of `OpLayers.run`."""


class ImageLayers(Protocol):
    """The parts of a rank's model that read images: `llama.vision.parts.ImageParts`."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the layers of text before which a cross-attention layer runs, in order."""

    def loading_order(self) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
        """Yield each part with its tensors, as `Transformer.loading_order` does."""

    def embed(self, embedding: nn.Module, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens (T), among which are positions of images, (T, E)."""

    def store(self, cross: CrossRows, batch: Batch, kv_cache: Tensor) -> None:
        """Encode the images that are new in a step, and store their keys and values."""

    def run_before(self, layer: int, x: Tensor, batch: Batch, kv_cache: Tensor) -> Tensor:
        """Run the cross-attention layer before a layer of text, if there is one, on (T, E)."""


class LayerExecution:
    """Finds the executor of the layers, and makes it again when they have changed.

    Attributes:
        uses_modules: Run the modules in any case, see `Transformer.use_modules`.
    """

    def __init__(
        self, plan: LayerPlan, layers: WatchedList, parallel: Parallel, definitions: Forwards
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
        self._changes = Changes()
        self._kernels: Kernels | None = None  # the kernels of the executor
        self._executor: Executor | None = None
        self._sublayers: list[SubLayer] = []  # what the executor runs
        self._parts: list[tuple[int, Executor]] = []
        self._hooks: list[Mapping[int, Any]] = []  # the forward hooks of all modules

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which makes an executor of its own weights."""
        return {**self.__dict__, "_kernels": None, "_executor": None, "_parts": [], "_hooks": []}

    def find(self, kernels: Kernels) -> Executor | None:
        """Return the executor that is valid now, or None if the modules must run.

        It is called at each step. A module says itself that it has changed, and torch holds the
        hooks in dictionaries.
        """
        if self.uses_modules:
            return None
        is_stale = self._executor is not None and not self._executor.is_current()
        if is_stale or self._changes.has_any or kernels is not self._kernels:
            self._kernels = kernels
            self._executor = self._make(kernels)
        if any(self._hooks) or _has_global_hook():
            return None
        return self._executor

    def parts(self, layers: Sequence[int]) -> list[tuple[int, Executor]]:
        """Return executors of the layers between some, each with the first layer that it runs.

        Args:
            layers: Layers of this rank with which an executor begins; the same at each call.
        """
        if not self._parts:
            assert self._kernels is not None and self._sublayers
            begins = [sublayer.begins for sublayer in self._sublayers]
            first = begins[0]
            starts = [0, *(begins.index(layer) for layer in layers if layer != first)]
            ends = [*starts[1:], len(begins)]
            for start, end in zip(starts, ends, strict=True):
                layer = begins[start]
                assert layer is not None
                part = self._executor_of(self._sublayers[start:end], self._kernels)
                self._parts.append((layer, part))
        return self._parts

    def _executor_of(self, sublayers: list[SubLayer], kernels: Kernels) -> Executor:
        executor: Executor | None = kernels.run("layers", self._plan, sublayers, self._parallel)
        return executor or OpLayers(self._plan, sublayers, self._parallel)

    def make_again(self) -> None:
        """Look at all modules again before the next step."""
        self._changes.has_any = True

    def _make(self, kernels: Kernels) -> Executor | None:
        modules = self._layers.modules()
        called = [x for x in modules if x is not self._layers and not isinstance(x, Weight)]
        self._hooks = []
        self._parts = []
        self._layers.report_to(self._changes)
        for module in called:
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]
            if isinstance(module, WatchedModule):
                module.report_to(self._changes)
        self._changes.has_any = False
        for module in called:
            definition = self._definitions.get(type(module))
            if definition is not type(module).forward or "forward" in vars(module):
                return None
        sublayers: list[SubLayer] = []
        for spec in self._plan.layers:
            layer: Any = self._layers[spec.index]
            first, *others = layer.sublayers(spec.kv_plane)
            sublayers += [replace(first, begins=spec.index), *others]
        self._sublayers = sublayers
        return self._executor_of(sublayers, kernels)
