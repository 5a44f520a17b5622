"""All layers of a rank in one native call, see layers.cpp.

In: the half layers of a model, as the table's kernel "layers" gets them. Out: an executor, or None
where the kernels do not take the weights. What it reads of them is listed in the protocols below;
modules and plans must not be known here.

Shapes: L layers, T tokens, E model dim, H query heads, K kv heads, D head dim, F ffn, P pages, S
slots per page, W elements of a row of the cache.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from llama.kernels.cpu import native
from llama.kernels.cpu.adapters import step_segments
from llama.kernels.cpu.constants import MAX_HEAD_DIM, BodyKind
from llama.kernels.cpu.operators import CACHE_FORMATS
from llama.ops.batch import Batch

# Bytes of workspace that stay allocated between calls: new memory costs a page fault per page.
_KEPT_BYTES = 16 << 20
# What layers.cpp computes between two products, by the names that kinds of half layers have.
_BODIES = {
    "causal_attention": BodyKind.ATTENTION.value,
    "bidirectional_attention": BodyKind.BIDIRECTIONAL_ATTENTION.value,
    "swiglu": BodyKind.FEED_FORWARD.value,
}


class Plan(Protocol):
    """The sizes of a rank's layers: E, H, K, D and F."""

    @property
    def dim(self) -> int:
        """Return E."""

    @property
    def head_dim(self) -> int:
        """Return D."""

    @property
    def n_heads(self) -> int:
        """Return H."""

    @property
    def n_kv_heads(self) -> int:
        """Return K."""

    @property
    def ffn_dim(self) -> int:
        """Return F."""

    def is_cache(self, kv_cache: Tensor, dtype: torch.dtype) -> bool:
        """Return whether it is a KV cache of such a model."""


class Half(Protocol):
    """A half layer: the kind, norm, two products and bias of `llama.model.execution.SubLayer`."""

    @property
    def kind(self) -> Any:
        """Return the kind, which has a `body_name`."""

    @property
    def norm(self) -> Any:
        """Return the norm."""

    @property
    def first(self) -> Any:
        """Return the weight of the first product."""

    @property
    def second(self) -> Any:
        """Return the weight of the second product."""

    @property
    def bias(self) -> Tensor | None:
        """Return what is added to the first product, if anything is."""

    @property
    def kv_plane(self) -> int | None:
        """Return the index of its keys and values in the cache."""

    @property
    def begins(self) -> int | None:
        """Return the layer whose first half it is."""


class Ranks(Protocol):
    """The ranks among which the products are split."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks."""


class Watched(Protocol):
    """The hidden states that somebody wants to see."""

    @property
    def layers(self) -> frozenset[int]:
        """Return the layers that are wanted."""

    def see(self, layer: int, x: Tensor, batch: Batch) -> None:
        """Keep a copy of a state (T, E), if it is wanted."""


def native_layers(plan: Plan, halves: Sequence[Half], parallel: Ranks) -> "NativeLayers | None":
    """Return the layers as one native call; None where the kernels do not take them.

    Args:
        plan: The sizes.
        halves: The half layers, in the order in which they run.
        parallel: The rank among its peers.
    """
    # A model on a GPU must not have the kernels compiled.
    if not halves[0].norm.weight.is_cpu or native.kernels() is None:
        return None
    with contextlib.suppress(ValueError):
        return NativeLayers(plan, halves, parallel)
    return None


class NativeLayers:
    """The layers as one call of layers.cpp, if the CPU kernels take all weights.

    One thread at a time may run it.
    """

    def __init__(self, plan: Plan, sublayers: Sequence[Half], parallel: Ranks) -> None:
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
        self._tensors: list[Mapping[str, Tensor | None]] = []
        for sublayer in sublayers:
            for module in (sublayer.norm, sublayer.first, sublayer.second):
                self._tensors += [module._parameters, module._buffers]
        self._addresses = self._find_addresses()

    def is_current(self) -> bool:
        """Return whether the tensors lie where the kernels will read them.

        PyTorch moves a parameter to other memory where its `data` is set.
        """
        return self._find_addresses() == self._addresses

    def _find_addresses(self) -> list[int]:
        return [
            x.data_ptr() for tensors in self._tensors for x in tensors.values() if x is not None
        ]

    def supports(self, kv_cache: Tensor) -> bool:
        """Return whether `run` takes this KV cache."""
        is_usable = kv_cache.device.type == "cpu" and kv_cache.is_contiguous()
        has_kernels = kv_cache.dtype in CACHE_FORMATS
        return is_usable and has_kernels and self.plan.is_cache(kv_cache, torch.bfloat16)

    def run(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        kv_cache: Tensor,
        batch: Batch,
        watched: Watched,
    ) -> Tensor:
        """Run the layers: x (T, E) -> (T, E).

        The native call is split where the stream is seen. Between ranks there are two native calls
        per layer, each followed by a sum. Neither changes a bit.

        Args:
            x: The residual stream.
            freqs_cis: The rotations of the tokens' positions, (T, D/2).
            kv_cache: (L, 2, P, S, K, W), which it `supports`, written in place.
            batch: The tokens of the step.
            watched: Gets the states that somebody wants to see.
        """
        x = x.clone(memory_format=torch.contiguous_format)
        num_tokens, _ = x.shape
        num_seqs, table_width = batch.page_table.shape
        num_pages, page_size = kv_cache.shape[2:4]
        self._check(x, freqs_cis, batch, page_size)
        starts = batch.query_starts
        lens = batch.seq_lens
        kv_format = CACHE_FORMATS[kv_cache.dtype]
        scale = self.plan.head_dim**-0.5
        sizes = (num_tokens, num_seqs, *self._sizes)
        workspace = self._allocate(starts, lens, sizes)
        segments, middle = step_segments(batch.adapters)
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


def _native_row(sublayer: Half, dim: int) -> list[int]:
    """Describe a half layer as `Half` in layers.cpp does.

    The addresses are of tensors that live as long as the sublayer.
    """
    rounds = sublayer.first.rounds_to_e4m3 or sublayer.second.rounds_to_e4m3
    first = None if rounds else sublayer.first.native_matrix()
    second = None if rounds else sublayer.second.native_matrix()
    norm = sublayer.norm.weight
    bias = sublayer.bias
    is_taken = _is_vector(norm, dim) and (bias is None or _is_vector(bias, sublayer.first.shape[0]))
    body = _BODIES.get(sublayer.kind.body_name)
    if body is None or first is None or second is None or not is_taken:
        raise ValueError("these weights are not for the CPU's kernels")
    bias_address = 0 if bias is None else bias.data_ptr()
    head = [body, sublayer.kv_plane or 0, norm.data_ptr(), bias_address]
    return [*head, *first, *second]


def _is_vector(x: Tensor, size: int) -> bool:
    """Return whether the CPU kernels can read a vector of this size."""
    is_bf16 = x.dtype is torch.bfloat16 and x.device.type == "cpu"
    return is_bf16 and x.is_contiguous() and x.shape == (size,)
