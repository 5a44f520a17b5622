"""The table of the Triton kernels that one model may run on its GPU.

In: the names of kernels that agreed with their ops, the model's dtype, and the tiles of products.
Out: for each operator a function that launches its kernel, or returns None for tensors that it does
not take. The module of a kernel is imported at its first launch, so that making a table does not
need Triton. Tests make tables for the CPU, where TRITON_INTERPRET=1 runs the kernels in Triton's
interpreter.

Shapes: M rows, N outputs and K inputs of a product.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from llama.kernels.cuda.launch import Blocks, Sizes, Tile, most_queries
from llama.ops.adapters import NumberedUpdates
from llama.ops.batch import Batch
from llama.ops.formats import N_BLOCK
from llama.ops.kernels import Kernel, Kernels
from llama.ops.kv_cache import SCALED_DTYPE
from llama.ops.linear import linear
from llama.ops.sample import SamplingRow, on_device_of, pack_params
from llama.ops.scaled import ScaledRows

NAMES = ("attention", "add_norm", "rope_and_store", "silu_mul", "linear", "adapters", "sample")
# Listed besides NAMES where activations are rounded to e4m3. The first one is PyTorch's product
# of e4m3, which some GPUs or versions refuse. Without the others it multiplies any number of rows,
# and norm, SwiGLU and rounding are kernels of their own, or PyTorch's.
SCALED = "scaled"
SCALED_NAMES = (SCALED, "scaled_few_rows", "round_rows", "round_fused")
GRAPH = "graph"  # listed besides the kernels where steps may be CUDA graphs
MAX_VOCAB = 2**19  # the limit of sample.py, whose blocks are at most 128 per row
_CHUNK_ELEMENTS = 1 << 27  # elements made plain per chunk: each matrix of the 8B's layers at once
_TILES: Mapping[Sizes, Tile] = {}


def table(
    names: Iterable[str] = (),
    dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16),
    tiles: Mapping[Sizes, Tile] = _TILES,
) -> Kernels:
    """Return the table of some kernels.

    Args:
        names: Some of NAMES and SCALED_NAMES, and GRAPH where steps may be CUDA graphs.
        dtypes: The dtypes of a model's tensors that they take. float32 is for tests: a GPU would
            round products to TF32. Sampling takes float32 logits whatever the model's dtype is.
        tiles: The tile for M rows times a weight (N, K). M is a power of 2 up to 256, to which the
            rows are filled up. Where there is no tile, PyTorch's library multiplies.
    """
    chosen = frozenset(names)
    launchers = _Launchers(frozenset(dtypes), tiles)
    functions_of: dict[str, list[Callable[..., object]]] = {
        "attention": [launchers.paged_attention],
        "add_norm": [launchers.add_norm, launchers.rms_norm],
        "rope_and_store": [launchers.rope_and_store],
        "silu_mul": [launchers.silu_mul],
        "linear": [launchers.linear, launchers.grouped_linear],
        "adapters": [launchers.add_updates],
        "sample": [launchers.choose_ids, launchers.top_tokens],
        SCALED: [launchers.scaled_linear],
        "scaled_few_rows": [launchers.few_scaled_linear],
        "round_rows": [launchers.round_rows],
        "round_fused": [launchers.round_norm, launchers.round_silu_mul],
        GRAPH: [],
    }
    if unknown := sorted(chosen - functions_of.keys()):
        raise ValueError(f"unknown kernels {unknown}: there are {', '.join(functions_of)}")
    functions: dict[str, Kernel] = {
        function.__name__: function for name in chosen for function in functions_of[name]
    }
    return Kernels(functions, chosen)


class _Launchers:
    """A launcher for each operator, with the operator's name and arguments."""

    def __init__(self, dtypes: frozenset[torch.dtype], tiles: Mapping[Sizes, Tile]) -> None:
        self._dtypes = dtypes
        self._tiles = tiles

    def _takes(self, *tensors: Tensor) -> bool:
        """Return whether tensors are of one of the dtypes, and on one device."""
        first = tensors[0]
        if first.dtype not in self._dtypes:
            return False
        return all(x.device == first.device and x.dtype is first.dtype for x in tensors[1:])

    def _tile_for(self, kind: int, n: int, k: int, m: int) -> Tile | None:
        """Return the tile for M rows times a weight (N, K), or None where PyTorch multiplies."""
        if m == 0:
            return None
        padded = 1 << (m - 1).bit_length()
        return self._tiles.get((kind, n, k, padded))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Return normalized rows; see `llama.ops.norm.rms_norm`."""
        if not self._takes(x, weight):
            return None
        from llama.kernels.cuda import elementwise

        return elementwise.add_norm(x, None, weight, eps)[1]

    def add_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Return a sum and its norm; see `llama.ops.norm.add_norm`."""
        if not self._takes(x, delta, weight):
            return None
        from llama.kernels.cuda import elementwise

        return elementwise.add_norm(x, delta, weight, eps)

    def silu_mul(self, x: Tensor) -> Tensor | None:
        """Return silu(gate) * up; see `llama.ops.swiglu.silu_mul`."""
        if not self._takes(x):
            return None
        from llama.kernels.cuda import elementwise

        return elementwise.silu_mul(x)

    def rope_and_store(
        self, qkv: Tensor, freqs_cis: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> Tensor | None:
        """Rotate, store and return the queries; see `llama.ops.rope.rope_and_store`."""
        if not self._takes(qkv) or not suits_tiles(qkv, kv_cache):
            return None
        from llama.kernels.cuda import elementwise

        return elementwise.rope_and_store(qkv, freqs_cis, kv_cache, slots)

    def paged_attention(
        self, queries: Tensor, kv_cache: Tensor, batch: Batch, is_causal: bool
    ) -> Tensor | None:
        """Return what each query attends to; see `llama.ops.attention.paged_attention`.

        The kernels are causal, so that PyTorch computes the other case.
        """
        if not is_causal or not self._takes(queries) or not suits_tiles(queries, kv_cache):
            return None
        from llama.kernels.cuda import attention

        return attention.paged_attention(queries, kv_cache, batch)

    def linear(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the product with a plain weight; see `llama.ops.linear.linear`."""
        if not self._takes(x, weight):
            return None
        n, k = weight.shape
        tile = self._tile_for(0, n, k, x.numel() // k)
        if tile is None:
            return None
        from llama.kernels.cuda import linear as few_rows

        return few_rows.run(x, weight, tile, dtype)

    def grouped_linear(self, x: Tensor, weight: Blocks, dtype: torch.dtype | None) -> Tensor | None:
        """Return the product with a quantized weight; see `llama.weights.groups`.

        For more rows than there are tiles for, parts of the weight are made plain, and PyTorch's
        library multiplies them.
        """
        if not self._takes(x):
            return None
        from llama.kernels.cuda import quantized

        n, k = weight.shape
        tile = self._tile_for(weight.kind, n, k, x.numel() // k)
        if tile is not None:
            return quantized.run(x, weight, tile, dtype)
        products = []
        for begin, end in _chunks(weight):
            plain = quantized.plain(weight, begin, end, x.dtype)
            products.append(linear(x, plain, dtype=dtype))
        return _side_by_side(products)

    def few_scaled_linear(
        self, x: ScaledRows, weight: ScaledRows, dtype: torch.dtype
    ) -> Tensor | None:
        """Return the product of few rows in e4m3; see `llama.ops.scaled.linear`."""
        if dtype not in self._dtypes:
            return None
        from llama.kernels.cuda import scaled

        tiles = scaled.candidates(*weight.codes.shape)
        if not (tiles and 0 < len(x.codes) < scaled.MIN_LIBRARY_ROWS):
            return None
        return scaled.few_rows(x, weight, tiles[0], dtype)

    def scaled_linear(self, x: ScaledRows, weight: ScaledRows, dtype: torch.dtype) -> Tensor | None:
        """Return the product of rows in e4m3 by PyTorch; see `llama.ops.scaled.linear`."""
        if dtype is not torch.bfloat16 or not len(x.codes):
            return None
        from llama.kernels.cuda import scaled

        return scaled.library(x, weight)

    def round_rows(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return rows in e4m3 and their scales; see `llama.ops.scaled.round_rows`."""
        if not self._takes(x):
            return None
        from llama.kernels.cuda import scaled

        return scaled.round_rows(x)

    def round_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return a sum and its norm in e4m3; see `llama.ops.scaled.round_norm`."""
        if not self._takes(x, weight) or not (delta is None or self._takes(x, delta)):
            return None
        from llama.kernels.cuda import scaled

        return scaled.round_norm(x, delta, weight, eps)

    def round_silu_mul(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return SwiGLU in e4m3; see `llama.ops.scaled.round_silu_mul`."""
        if not self._takes(x):
            return None
        from llama.kernels.cuda import scaled

        return scaled.round_silu_mul(x) if x.shape[-1] <= 2 * scaled.MAX_GATED else None

    def add_updates(self, out: Tensor, x: Tensor, updates: NumberedUpdates) -> Tensor | None:
        """Add the updates of adapters; see `llama.ops.adapters.ProductUpdates.add_to`."""
        if not self._takes(out, x):
            return None
        from llama.kernels.cuda import adapters

        return adapters.add_updates(out, x, updates)

    def choose_ids(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow | None],
        seeds: Sequence[int],
        positions: Sequence[int],
    ) -> Tensor | None:
        """Return the next id of each row; see `llama.ops.sample.choose_ids`."""
        if not _are_logits(logits):
            return None
        from llama.kernels.cuda import sample

        if not any(rows):
            return sample.top_tokens(logits)[1]
        draws = list(zip(seeds, positions, strict=True))
        params = pack_params(rows, draws)
        is_filtered = any(row is not None and row.is_filtered for row in rows)
        packed_params = on_device_of(logits, params)
        return sample.choose(logits, packed_params, is_filtered=is_filtered)

    def top_tokens(self, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the largest logit of each row, and its id; see `llama.ops.sample.top_tokens`."""
        if not _are_logits(logits):
            return None
        from llama.kernels.cuda import sample

        return sample.top_tokens(logits)


def suits_tiles(heads: Tensor, kv_cache: Tensor) -> bool:
    """Return whether sizes and types are those of the kernels for attention.

    Their tiles are powers of two.

    Args:
        heads: Heads (T, H, D).
        kv_cache: The cache.
    """
    head_dim = heads.shape[-1]
    if not 16 <= head_dim <= 256:
        return False
    if head_dim & (head_dim - 1):
        return False
    if not kv_cache.is_contiguous():
        return False
    return kv_cache.dtype is SCALED_DTYPE or kv_cache.dtype is heads.dtype


def has_attention(kernels: Kernels) -> bool:
    """Return whether a GPU's kernel computes attention, which reads lengths on the device."""
    return "attention" in kernels.names and kernels.has("paged_attention")


def queries_at_once(kernels: Kernels, heads: Tensor, kv_cache: Tensor) -> int:
    """Return for how many queries of a sequence a decode step reads its keys once.

    Args:
        kernels: The kernels in use.
        heads: Heads (T, H, D).
        kv_cache: The cache of one layer (2, P, S, K, W).
    """
    if not has_attention(kernels) or not suits_tiles(heads, kv_cache):
        return 1
    return most_queries(heads.shape[1] // kv_cache.shape[3])


def _are_logits(logits: Tensor) -> bool:
    """Return whether the sampling kernels take these logits (B, V)."""
    if logits.dtype is not torch.float32:
        return False
    num_rows, vocab_size = logits.shape
    return 0 < vocab_size <= MAX_VOCAB and num_rows > 0


def _chunks(weight: Blocks) -> list[tuple[int, int]]:
    """Return the bounds of parts of the rows of a weight, in whole blocks."""
    n, k = weight.shape
    step = max(_CHUNK_ELEMENTS // k // N_BLOCK, 1) * N_BLOCK
    return [(begin, min(begin + step, n)) for begin in range(0, n, step)]


def _side_by_side(products: list[Tensor]) -> Tensor:
    """Return products (..., N) side by side; a single one is not copied."""
    return products[0] if len(products) == 1 else torch.cat(products, -1)
