"""The inputs on which each kernel is compared with the op that defines it: the one list of cases.

In: what a rank computes, and whether every case is wanted. Out: for each kernel its cases. A build
takes a small one for each variant of a kernel that its model runs. `llama doctor --gpu` and
`pytest -m gpu` take all: every tile, long sequences and whole weights.

Shapes: E model dim, H query heads, K KV heads, D head dim, F FFN dim, V vocabulary, P pages, S
slots per page, W elements of a row of the cache; N outputs and K inputs of a weight, M rows. H, K
and F are those of one rank.

Over 400 lines: it is the one list of cases, a method for each kernel.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llama.engine.core import PAGE_SIZE
from llama.kernels.cuda.launch import Sizes, Tile
from llama.kernels.cuda.table import NAMES, SCALED_NAMES, table
from llama.model.plan import LayerPlan
from llama.ops import scaled
from llama.ops.adapters import AdapterRows, AdapterTable, AdapterWeights, Delta, DeltaPart
from llama.ops.attention import paged_attention
from llama.ops.batch import Batch, ForwardContext
from llama.ops.cache_values import fill_cache, read_cache
from llama.ops.kernels import Kernels
from llama.ops.norm import add_norm, rms_norm
from llama.ops.rope import precompute_freqs_cis, rope_and_store
from llama.ops.sample import SamplingRow, choose_ids, top_tokens
from llama.ops.swiglu import silu_mul
from llama.weights.choice import packed, random_weight
from llama.weights.groups import GroupedWeight, QuantKey
from llama.weights.plain import PlainWeight
from llama.weights.weight import Weight

Results = tuple[Tensor, ...]
Op = Callable[..., Tensor | Results]  # it also takes `kernels=`, and returns all that it writes
Formats = tuple[str | QuantKey | None, ...]  # formats of weights, as `quantize=` or a file has them

_LENGTHS = (1, 15, 16, 17, 255, 4097)  # sequence lengths around the edges of pages and blocks
_FEW_LENGTHS = (1, 17, 130)
_LONG = 1024  # tokens of a sequence that is in few cases, as the torch body takes memory for it
_FEW_ROWS = 33 * 32  # an odd number of blocks: no power of two leads to an equal block
_PADDING_ROWS = 2
# For products of e4m3: Hopper's matrix units add them in about 14 bits, and the result is in
# bf16. Both sides multiply the same codes.
_E4M3_TOLERANCE = 2**-5
# For rows that are rounded to e4m3 after the norm or SwiGLU. One element in 30 is so near to a tie
# between two codes, which are an eighth apart, that the rounding to bf16 before decides.
_ROUNDED_TOLERANCE = 2**-4
_MANY_SCALED_ROWS = 300
_ROPE_PAGES = 9  # pages of the cache that keys and values are stored in
# Rows of sampling with few tokens kept, where one too many shows, and with many.
_SAMPLING_ROWS = (
    None, SamplingRow(), SamplingRow(0.7), SamplingRow(top_p=0.9), SamplingRow(0.6, top_p=0.95),
    SamplingRow(2.0, top_k=2), SamplingRow(2.0, top_k=3, top_p=0.5), SamplingRow(top_p=0.2),
    SamplingRow(top_k=40), SamplingRow(min_p=0.3), SamplingRow(1.3, 0.01, 64, 0.8),
    SamplingRow(3.0, top_k=1), SamplingRow(3.0, top_k=4), SamplingRow(3.0, top_k=5),
)  # fmt: skip


@dataclass(frozen=True)
class Computed:
    """The part of a model that one rank computes on its device.

    Attributes:
        plan: The layers of the rank.
        vocab_size: Outputs of lm_head on all ranks.
        device: Its device.
        dtype: The dtype of the model.
        formats: The formats of its weights.
        activations: How products round their inputs, None where they do not.
    """

    plan: LayerPlan
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    formats: Formats = (None,)
    activations: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The kernels that the model can run."""
        # Products of float32 stay with torch: the kernels would round them to TF32.
        names = ("sample",) if self.dtype is torch.float32 else NAMES
        rounds = self.activations == "fp8" and "linear" in names
        return (*names, *SCALED_NAMES) if rounds else names

    @property
    def vocab_rows(self) -> int:
        """Outputs of lm_head on this rank."""
        return len(self.plan.share.vocab)

    @property
    def weight_shapes(self) -> list[tuple[int, int]]:
        """The shapes (N, K) of wqkv, wo, w13, w2 and lm_head, ascending."""
        plan = self.plan
        attention_dim = plan.n_heads * plan.head_dim
        qkv_dim = attention_dim + 2 * plan.n_kv_heads * plan.head_dim
        inward = ((n, plan.dim) for n in (qkv_dim, 2 * plan.ffn_dim, self.vocab_rows))
        return sorted({*inward, (plan.dim, attention_dim), (plan.dim, plan.ffn_dim)})


class Case(NamedTuple):
    """An op and its inputs.

    Attributes:
        name: What errors call it.
        op: The op.
        inputs: Its inputs, besides `kernels=`.
        tolerance: The largest error of a row relative to its norm; None for that of the type.
        tile: The tile of a product. It may not fit the GPU, whose other tiles are then used.
        serves: The products of the model that the same variant of the kernel computes.
    """

    name: str
    op: Op
    inputs: Sequence[Any]
    tolerance: float | None = None
    tile: Tile | None = None
    serves: tuple[Sizes, ...] = ()


class Cases:
    """The cases of what a rank computes: each kernel has a method of its name that yields its own.

    Args:
        computed: What the rank computes.
        every: Whether all cases are wanted, or those of a build.
        lengths: The lengths of the sequences that attention runs on.
    """

    def __init__(
        self, computed: Computed, *, every: bool = False, lengths: Sequence[int] = ()
    ) -> None:
        self.computed = computed
        self.plan = computed.plan
        self.device = computed.device
        self.dtype = computed.dtype
        self.every = every
        self._lengths = lengths or (_LENGTHS if every else _FEW_LENGTHS)
        self._num_rows = (1, 17) if every else (17,)
        self._generator = torch.Generator(self.device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw a tensor of normally distributed numbers."""
        values = torch.randn(*shape, generator=self._generator, device=self.device)
        return values.to(dtype or self.dtype)

    def _cache(self, num_pages: int) -> Tensor:
        """Return a filled cache of one layer: (2, P, S, K, W)."""
        plan = self.plan
        width, dtype = plan.kv_format.row(plan.head_dim, self.dtype)
        shape = (2, num_pages, PAGE_SIZE, plan.n_kv_heads, width)
        empty = torch.empty(shape, dtype=dtype, device=self.device)
        return fill_cache(empty, plan.head_dim, self.normal)

    def attention(self) -> Iterator[Case]:
        """Yield decode steps, and decode mixed with prefill.

        Decode has padding rows, which share a page. It runs with as many queries of a sequence as
        fit into each tile: a kernel is compiled for each. One sequence is so much longer that its
        keys have several parts.
        """
        from llama.kernels.cuda.attention import decode_variants

        plan = self.plan
        lengths, pages = _sequences(self._lengths)
        cache = self._cache(1 + pages[-1][0])

        def inputs(rows: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor, Batch]:
            """Return queries for the last counts[i] tokens of each sequence i of `rows`."""
            starts = [lengths[i] - counts[i] for i in rows]
            new = [counts[i] for i in rows]
            tables = [pages[i] for i in rows]
            _ids, batch = Batch.pack([], starts, new, tables, PAGE_SIZE, [], self.device)
            queries = self.normal(len(batch.slots), plan.n_heads, plan.head_dim)
            return queries, cache, batch

        every = range(len(lengths))
        counts = [min(n, 1 + 37 * i) for i, n in enumerate(lengths)]
        decodes_first = sorted(every, key=lambda i: counts[i] > 1)
        yield Case("prefill", _attend, inputs(decodes_first, counts))
        for most in decode_variants(plan.n_heads // plan.n_kv_heads):
            counts = [min(n, most) for n in lengths]
            single_first = sorted(every, key=lambda i: lengths[i] > 1)
            yield Case(f"decode of {most} queries each", _attend, inputs(single_first, counts))

    def add_norm(self) -> Iterator[Case]:
        """Yield RMSNorm with and without a residual."""
        weight = self.normal(self.plan.dim)
        for rows in self._num_rows:
            x = self.normal(rows, self.plan.dim)
            delta = self.normal(rows, self.plan.dim)
            yield Case(f"{rows} rows", rms_norm, (x, weight, 1e-5))
            yield Case(f"{rows} rows, with a residual", add_norm, (x, delta, weight, 1e-5))

    def rope_and_store(self) -> Iterator[Case]:
        """Yield a step's tokens, two padding rows among them."""
        plan = self.plan
        tokens = 17
        first = max(self._lengths) - 5
        freqs = precompute_freqs_cis(plan.head_dim, first + tokens, 5e5)[first:]
        padding_slot = (_ROPE_PAGES - 1) * PAGE_SIZE
        slots = random.Random(2).sample(range(padding_slot), tokens - 2)
        slots += [padding_slot, padding_slot + 1]
        qkv = self.normal(tokens, plan.n_heads + 2 * plan.n_kv_heads, plan.head_dim)
        cache = self._cache(_ROPE_PAGES)
        inputs = (qkv, freqs.to(self.device), cache, torch.tensor(slots, device=self.device))
        yield Case(f"{tokens} tokens", _rope_and_read, inputs)

    def silu_mul(self) -> Iterator[Case]:
        """Yield SwiGLU of some rows."""
        for rows in self._num_rows:
            x = self.normal(rows, 2 * self.plan.ffn_dim)
            yield Case(f"{rows} rows", silu_mul, (x,))

    def sample(self) -> Iterator[Case]:
        """Yield greedy, plain and filtered rows: peaked, flat, with ties, or without a maximum."""
        computed = self.computed
        repeats = 8 if self.every and self.device.type == "cuda" else 1
        many = repeats * len(_SAMPLING_ROWS) + 2
        for rows in (1, many) if self.every else (many,):
            narrow = self.normal(rows, computed.vocab_size, dtype=torch.bfloat16)
            logits = narrow.float()  # it has ties, like the logits of a model in bf16
            logits[::2] *= 4
            logits[-1, ::7] = -math.inf
            if rows > 1:
                logits[0, 0] = math.nan
                logits[1] = -math.inf
            kinds = itertools.cycle(_SAMPLING_ROWS)
            chosen = list(itertools.islice(kinds, 5, 5 + rows))
            draws = ([2**40 + 7 * i for i in range(rows)], list(range(rows)))
            yield Case(f"{rows} rows", choose_ids, (logits, chosen, *draws))
            yield Case(f"{rows} greedy rows", choose_ids, (logits, [None] * rows, *draws))
            unfiltered = [SamplingRow(0.7)] * rows
            yield Case(f"{rows} unfiltered rows", choose_ids, (logits, unfiltered, *draws))
            if computed.vocab_rows < computed.vocab_size:  # several ranks
                share = logits[rows - 1 :, : computed.vocab_rows].contiguous()
                yield Case(f"{len(share)} rows of a rank's share", _top_tokens, (share,))

    def linear(self) -> Iterator[Case]:
        """Yield products in each format, and quantized weights that are made plain.

        A build takes the first rows of a weight, as a kernel is compiled for K and not for N.
        """
        shapes: dict[tuple[int, int], list[int]] = {}
        for n, k in self.computed.weight_shapes:
            # Whether N is a multiple of 16 is known to the compiler.
            num_rows = n if self.every else min(n, _FEW_ROWS + n % 16)
            shapes.setdefault((num_rows, k), []).append(n)
        for format, (shape, outputs) in itertools.product(self.computed.formats, shapes.items()):
            weight = self._weight(format, *shape)
            yield from self._products(weight, outputs)
            if isinstance(weight, GroupedWeight) and weight.blocks() is not None:
                op = partial(_made_plain, weight, self.dtype)
                yield Case(f"{shape[0]} x {shape[1]} of kind {weight.kind} made plain", op, ())

    def _products(self, weight: Weight, outputs: list[int]) -> Iterator[Case]:
        """Yield the products with a weight that has the first rows of those with `outputs` rows."""
        from llama.kernels.cuda.tiles import all_tiles, buckets, compiled_rows, tiles_for

        kind = weight.kind
        k = weight.shape[1]
        is_grouped = isinstance(weight, GroupedWeight) and weight.groups > 1
        variants: dict[tuple[torch.dtype, int, tuple[Tile, ...]], list[Sizes]] = {}
        for n, m in itertools.product(outputs, buckets(kind)):
            if self.every:
                variant = (self.out_dtype(n), m, tuple(all_tiles(kind, n, k, m)))
            else:
                tiles = tiles_for(kind, n, k, m, is_grouped=is_grouped)
                variant = (self.out_dtype(n), compiled_rows(kind, m), tuple(tiles))
            variants.setdefault(variant, []).append((kind, n, k, m))
        for (out_dtype, _, tiles_in_order), serves in variants.items():
            m = max(sizes[-1] for sizes in serves)
            # A build fills the rows up, as most steps do.
            x = self.normal(m if self.every or m == 1 else m - 1, k)
            for tile in tiles_in_order:
                name = (
                    f"{len(x)} rows times {weight.shape[0]} x {k} of kind {kind} with {tuple(tile)}"
                )
                op = partial(_multiply, weight, tile, out_dtype)
                yield Case(name, op, (x,), tile=tile, serves=tuple(serves))

    def scaled(self) -> Iterator[Case]:
        """Yield products of rows that are rounded to e4m3 with each shape of weight."""
        yield from self._scaled_products((_MANY_SCALED_ROWS, 1))

    def scaled_few_rows(self) -> Iterator[Case]:
        """Yield products of few rows in e4m3: a kernel is compiled for each power of two."""
        yield from self._scaled_products((1, 15, 31))

    def _scaled_products(self, counts: Sequence[int]) -> Iterator[Case]:
        shapes = {
            (n if self.every else min(n, _FEW_ROWS + n % 16), k)
            for n, k in self.computed.weight_shapes
        }
        for n, k in sorted(shapes):
            weight = self._weight("fp8", n, k)
            if weight.round_to_e4m3():
                for m in counts:
                    op = partial(_multiply, weight, None, self.dtype)
                    what = f"{m} rows in e4m3 times {n} x {k}"
                    yield Case(what, op, (self.normal(m, k),), tolerance=_E4M3_TOLERANCE)

    def adapters(self) -> Iterator[Case]:
        """Yield products of rows with two adapters and with none: wqkv and w2.

        They update some of the matrices that are stored as one. A tile of rows has both.
        """
        plan = self.plan
        q_dim, kv_dim = plan.n_heads * plan.head_dim, plan.n_kv_heads * plan.head_dim
        shapes = ((plan.dim, [q_dim, kv_dim, kv_dim]), (plan.ffn_dim, [plan.dim]))
        for k, outputs in shapes:
            firsts = [0, *itertools.accumulate(outputs)]
            adapters = []
            for rank in (16, 48):
                parts = [
                    DeltaPart(first, self.normal(n, rank), self.normal(rank, k), 0.5 / rank)
                    for first, n in zip(firsts, outputs, strict=False)
                ]
                adapters.append(AdapterWeights({"product": Delta(parts[-2:])}))
            numbers = [-1] * 16 + [0, 1, -1, 0, 0, 1, 1]
            x = self.normal(len(numbers), k)
            out = self.normal(len(numbers), firsts[-1]) * k**0.5
            inputs = (out, x, adapters, numbers)
            yield Case(f"{len(x)} rows of {k} columns", _update, inputs)

    def round_rows(self) -> Iterator[Case]:
        """Yield rows of each width that are rounded to e4m3, among them a row of zeros."""
        for k in sorted({k for _, k in self.computed.weight_shapes}):
            x = self.normal(17, k)
            x[0] = 0
            yield Case(f"{len(x)} rows of {k}", _round_rows, (x,))

    def round_fused(self) -> Iterator[Case]:
        """Yield norms and SwiGLU whose rows are rounded to e4m3."""
        plan = self.plan
        weight = self.normal(plan.dim)
        x, delta = self.normal(17, plan.dim), self.normal(17, plan.dim)
        for what, inputs in {
            "a norm": (x, None, weight, 1e-5),
            "a norm with a residual": (x, delta, weight, 1e-5),
        }.items():
            yield Case(f"{what} in e4m3", _round_norm, inputs, tolerance=_ROUNDED_TOLERANCE)
        gated = (self.normal(17, 2 * plan.ffn_dim),)
        yield Case("SwiGLU in e4m3", _round_silu_mul, gated, tolerance=_ROUNDED_TOLERANCE)

    def out_dtype(self, n: int) -> torch.dtype:
        """Return the dtype of a product with N outputs: logits are float32."""
        return torch.float32 if n == self.computed.vocab_rows else self.dtype

    def _weight(self, format: str | QuantKey | None, n: int, k: int) -> Weight:
        """Return a random weight (N, K) in a format.

        Of a quantized one the CPU packs a few rows, which the GPU repeats: all rows of the 8B's
        matrices would take the CPU minutes.
        """
        if format is not None and n > _FEW_ROWS + 15:
            few = self._weight(format, _FEW_ROWS, k)
            if isinstance(few, GroupedWeight):
                return few.repeated(n)
            format = None
        if isinstance(format, QuantKey):
            return random_weight(format, n, k, self.device)
        return packed(self.normal(n, k), format, self.device)


def _sequences(lengths: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Return the lengths and the random pages of sequences, and of padding rows on one page."""
    counts = [-(-n // PAGE_SIZE) for n in lengths]
    num_pages = sum(counts)
    order = random.Random(1).sample(range(num_pages), num_pages)
    ends = itertools.accumulate(counts)
    pages = [order[end - count : end] for count, end in zip(counts, ends, strict=True)]
    pages += [[num_pages]] * _PADDING_ROWS
    return [*lengths, *[1] * _PADDING_ROWS], pages


def _attend(queries: Tensor, cache: Tensor, batch: Batch, kernels: Kernels) -> Tensor:
    batch = batch.with_kernels(kernels)
    return paged_attention(queries, cache, batch)


def _top_tokens(logits: Tensor, kernels: Kernels) -> Results:
    """Return the top ids, and the bits of their logits."""
    row_max, ids = top_tokens(logits, kernels)
    return ids, row_max.view(torch.int32)


def _rope_and_read(
    qkv: Tensor, freqs: Tensor, cache: Tensor, slots: Tensor, kernels: Kernels
) -> Results:
    """Return the queries, and what the cache's last pages store; then restore the pages."""
    last_pages = cache[:, -_ROPE_PAGES:]
    before = last_pages.clone()
    queries = rope_and_store(qkv, freqs, cache, slots, kernels)
    after = read_cache(last_pages)
    last_pages.copy_(before)
    return queries, after


def _update(
    out: Tensor,
    x: Tensor,
    adapters: list[AdapterWeights],
    numbers: list[int],
    kernels: Kernels,
) -> Tensor:
    """Return products with the updates of each row's adapter, by its number."""
    table = AdapterTable(["product"], len(adapters), x.device)
    segments = []
    for row, number in enumerate(numbers):
        if number >= 0:
            segments.append((row, 1, adapters[number]))
    for number, adapter in enumerate(adapters):
        table.put(number, adapter)
    rows = AdapterRows(segments, torch.tensor(numbers, device=x.device), table)
    updates = rows.of("product", kernels)
    assert updates is not None, "rows have adapters"
    return updates.add_to(out.clone(), x)


def _round_rows(x: Tensor, kernels: Kernels) -> Results:
    """Return the bits of the codes and of the scales."""
    rows = scaled.round_rows(x, kernels)
    return rows.codes.view(torch.uint8), rows.scales.view(torch.int32)


def _round_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, kernels: Kernels
) -> Results:
    """Return the sum, and the norm as its codes and scales stand for it."""
    total, rows = scaled.round_norm(x, delta, weight, eps, kernels)
    return total, rows.codes.float() * rows.scales


def _round_silu_mul(x: Tensor, kernels: Kernels) -> Tensor:
    """Return SwiGLU as its codes and scales stand for it."""
    rows = scaled.round_silu_mul(x, kernels)
    return rows.codes.float() * rows.scales


def _made_plain(weight: GroupedWeight, dtype: torch.dtype, kernels: Kernels) -> Tensor:
    """Return all elements of a quantized weight."""
    blocks = weight.blocks()
    if not kernels.names or blocks is None:
        return weight.exact()
    from llama.kernels.cuda import quantized

    return quantized.plain(blocks, 0, weight.shape[0], dtype)


def _multiply(
    weight: Weight, tile: Tile | None, dtype: torch.dtype, x: Tensor, kernels: Kernels
) -> Tensor:
    """Multiply x by a weight with this tile, or with none."""
    n, k = weight.shape
    sizes = (weight.kind, n, k, 1 << (len(x) - 1).bit_length())
    tiles = {sizes: tile} if tile else {}
    if not weight.kind:
        plain = weight.plain().to(x.dtype)
        weight = PlainWeight.pack(plain)
    context = ForwardContext(kernels=table(kernels.names, {x.dtype}, tiles))
    return weight.linear(x, dtype, context)
