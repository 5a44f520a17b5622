"""Layers of a model over one step's batch in one native call, which layers.cpp makes of the ops.

In: the packed weights of the layers, then rows and a step's batch. Out: the rows behind the layers,
in the bytes that the single ops give. It knows nothing of modules: `llama.model.fused` decides when
this runs in their place.

Shapes: L layers, T tokens, E model dim, H query heads, K kv heads, D head dim, F ffn, B sequences,
P pages, S slots per page, M pages per sequence. H, K and F are this rank's.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from llama.ops.attention import MAX_HEAD_DIM
from llama.ops.batch import Batch
from llama.ops.cpu import native
from llama.ops.linear import N_BLOCK

_KEPT_BYTES = 16 << 20  # of workspace between calls: new memory costs a fault per page


@dataclass(frozen=True)
class Packed:
    """A weight as `pack` or `pack_int8` leaves it; scales (N) where it is int8."""

    weight: Tensor
    scales: Tensor | None

    def is_packed(self, n: int, k: int) -> bool:
        """Whether it is an (N, K) that the kernels take."""
        dtype = torch.bfloat16 if self.scales is None else torch.int8
        shape = (n // N_BLOCK, k // 2, N_BLOCK, 2)
        has_scales = self.scales is None or _is_plain(self.scales, torch.float32, (n,))
        return n % N_BLOCK == 0 and has_scales and _is_plain(self.weight, dtype, shape)

    def addresses(self) -> list[int]:
        return [self.weight.data_ptr(), 0 if self.scales is None else self.scales.data_ptr()]


@dataclass(frozen=True)
class LayerWeights:
    """One layer's; the matrices may also be plain (N, K) where `OpStack` runs them."""

    attention_norm: Tensor  # (E)
    wqkv: Packed  # ((H + 2K) D, E)
    wo: Packed  # (E, H D)
    ffn_norm: Tensor  # (E)
    w13: Packed  # (2F, E)
    w2: Packed  # (E, F)

    def addresses(self) -> list[int]:
        """A row of the table that layers.cpp reads, see `Layer` there."""
        attention = [self.attention_norm.data_ptr(), *self.wqkv.addresses(), *self.wo.addresses()]
        return attention + [
            self.ffn_norm.data_ptr(), *self.w13.addresses(), *self.w2.addresses()
        ]  # fmt: skip


def _is_plain(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    is_there = x.dtype is dtype and x.device.type == "cpu" and x.is_contiguous()
    return is_there and tuple(x.shape) == shape


class LayerStack:
    """Layers whose weights stay where they are. One thread at a time may run them."""

    def __init__(
        self,
        weights: Seq[LayerWeights],
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        ffn: int,
        eps: float,
    ) -> None:
        """ValueError where the kernels do not take the weights."""
        self.weights = weights  # kept, as the table has their addresses
        self.dim = len(weights[0].attention_norm)
        self.heads, self.ffn, self.eps = (n_heads, n_kv_heads, head_dim), ffn, float(eps)
        if not self._can_run():
            raise ValueError("these weights, or their sizes, are not for the CPU's kernels")
        self._table = torch.tensor([layer.addresses() for layer in weights])
        self._workspace: Tensor | None = None

    def _can_run(self) -> bool:
        n_heads, n_kv_heads, d = self.heads
        e, f, q = self.dim, self.ffn, n_heads * d
        if d > MAX_HEAD_DIM or d % 32 or e % 32 or f % 32 or n_heads % n_kv_heads:
            return False
        for x in self.weights:
            norms = (x.attention_norm, x.ffn_norm)
            matrices = [
                (x.wqkv, q + 2 * n_kv_heads * d, e), (x.wo, e, q), (x.w13, 2 * f, e), (x.w2, e, f)
            ]  # fmt: skip
            if not all(_is_plain(norm, torch.bfloat16, (e,)) for norm in norms):
                return False
            if not all(matrix.is_packed(n, k) for matrix, n, k in matrices):
                return False
        return True

    def takes(self, kv_cache: Tensor) -> bool:
        """Whether it can run on this cache, which must be (L, 2, P, S, K, D), and the shape is."""
        _, n_kv_heads, d = self.heads
        shape = (len(self.weights), 2, *kv_cache.shape[2:4], n_kv_heads, d)
        return kv_cache.dim() == 6 and _is_plain(kv_cache, torch.bfloat16, shape)

    def run(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        kv_cache: Tensor,
        batch: Batch,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """x (T, E), freqs_cis (T, D/2), kv_cache (L, 2, P, S, K, D), written in place -> (T, E).

        all_reduce: sums over the ranks in place, where each has a share of the weights; then there
        are two native calls a layer, with a sum after each.
        """
        (t, e), (b, width) = x.shape, batch.page_table.shape
        x = x.clone(memory_format=torch.contiguous_format)
        num_pages, page_size = kv_cache.shape[2:4]
        fits = len(batch.seq_lens_cpu) == b and max(batch.seq_lens_cpu) <= width * page_size
        assert self.takes(kv_cache) and fits, (kv_cache.shape, batch.page_table.shape)
        assert e == self.dim and freqs_cis.shape == (t, self.heads[2] // 2), (x.shape, e)
        lengths = len(batch.slots), len(batch.query_starts), len(batch.seq_lens)
        assert lengths == (t, b + 1, b), (lengths, t, b)
        freqs_cis, slots, page_table, query_starts, seq_lens = (
            part.contiguous()
            for part in (
                freqs_cis, batch.slots, batch.page_table, batch.query_starts, batch.seq_lens
            )
        )  # fmt: skip
        sizes = (t, b, e, *self.heads, self.ffn)
        threads = torch.get_num_threads()
        num_bytes = native.call("layers_workspace", query_starts, seq_lens, *sizes, threads)
        workspace = self._take_workspace(num_bytes)

        def run_halves(out: Tensor, first: int, last: int) -> None:
            native.call(
                "layers_bf16", self._table, x, out, freqs_cis, kv_cache, slots, page_table,
                query_starts, seq_lens, workspace, first, last, *sizes, num_pages, page_size,
                width, self.eps, self.heads[2] ** -0.5,
            )  # fmt: skip

        if all_reduce is None:
            run_halves(x, 0, 2 * len(self.weights))
        else:
            part = torch.empty_like(x)
            for half in range(2 * len(self.weights)):
                run_halves(part, half, half + 1)
                x += all_reduce(part)
        self._workspace = workspace if num_bytes <= _KEPT_BYTES else None
        return x

    def _take_workspace(self, num_bytes: int) -> Tensor:
        """The last one if it is large enough; nobody else has it until the call has ended."""
        kept, self._workspace = self._workspace, None
        if kept is not None and len(kept) >= num_bytes:
            return kept
        return torch.empty(num_bytes, dtype=torch.uint8)
