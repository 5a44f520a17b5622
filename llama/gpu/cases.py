"""The inputs on which the self-check compares each kernel with the op that defines it.

In: a `Job`. Out: for each kernel its cases, and for products the tiles that they may use. A large
cache is allocated only where half of the GPU's free memory suffices for it.

The file has over 400 lines because the cases of all kernels share the sizes of a job, and its
inputs.

Shapes: E model dim, H query heads, K KV heads, D head dim, F FFN dim, V vocabulary, P pages, S
slots per page, W elements of a row of the cache; N outputs and K inputs of a weight, M rows. H, K
and F are those of one rank.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llama.common.device import DTYPES
from llama.gpu.job import Job
from llama.kernels.cuda.launch import Sizes, Tile
from llama.kernels.cuda.table import table
from llama.ops import scaled
from llama.ops.attention import paged_attention
from llama.ops.batch import Batch, ForwardContext
from llama.ops.kernels import Kernels
from llama.ops.kv_cache import FORMATS, format_of
from llama.ops.norm import add_norm, rms_norm
from llama.ops.rope import precompute_freqs_cis, rope_and_store
from llama.ops.sample import SamplingRow, choose_ids, top_tokens
from llama.ops.swiglu import silu_mul
from llama.weights.bytes import MAX_EXACT_ROWS
from llama.weights.choice import packed, random_weight
from llama.weights.groups import GroupedWeight, QuantKey
from llama.weights.plain import PlainWeight
from llama.weights.weight import Weight

Results = tuple[Tensor, ...]
Op = Callable[..., Tensor | Results]  # it also takes `kernels=`, and returns all that it writes

_PACKED_ROWS = 33 * 32  # an odd number of blocks: no power of two leads to an equal block
_PADDING_ROWS = 2
# For products of e4m3: Hopper's matrix units add them in about 14 bits, and the result is in
# bf16. Both sides multiply the same codes.
_E4M3_TOLERANCE = 2**-5
_ROPE_PAGES = 9  # pages of the cache that keys and values are stored in
_PLANE = 2**31  # elements of the keys of a layer's cache from which on offsets need 64 bits
# Rows of sampling with few tokens kept, where one too many shows, and with many.
_SAMPLING_ROWS = (
    None,
    SamplingRow(),
    SamplingRow(0.7),
    SamplingRow(top_p=0.9),
    SamplingRow(0.6, top_p=0.95),
    SamplingRow(2.0, top_k=2),
    SamplingRow(2.0, top_k=3, top_p=0.5),
    SamplingRow(top_p=0.2),
    SamplingRow(top_k=40),
    SamplingRow(min_p=0.3),
    SamplingRow(1.3, 0.01, 64, 0.8),
    SamplingRow(3.0, top_k=1),
    SamplingRow(3.0, top_k=4),
    SamplingRow(3.0, top_k=5),
)


class Case(NamedTuple):
    """An op and its inputs.

    Attributes:
        name: What errors call it.
        op: The op.
        inputs: Its inputs, beside `kernels=`.
        small: Other inputs with the same results. Where they are given, only the kernel runs, on
            both, as the torch body would take too much memory for `inputs`.
        tolerance: The largest error of a row relative to its norm; None for that of the type.
        is_optional: Whether the kernel can be used although it does not fit the GPU here, as other
            tiles may.
    """

    name: str
    op: Op
    inputs: Sequence[Any]
    small: Sequence[Any] | None = None
    is_optional: bool = False
    tolerance: float | None = None


class LargeCache(NamedTuple):
    """A KV cache with a copy of a small one in its last pages, from `first_page` on."""

    name: str
    cache: Tensor
    first_page: int


class Product(NamedTuple):
    """A weight, the sizes of a product with it, and the tiles that the product may use."""

    weight: Weight
    sizes: Sizes
    tiles: list[Tile]


class Cases:
    """The cases of a job: each kernel has a method of its name that yields its cases."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = torch.device(job.device)
        self.dtype = DTYPES[job.dtype]
        self._generator = torch.Generator(self.device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw a tensor of normally distributed numbers."""
        values = torch.randn(*shape, generator=self._generator, device=self.device)
        return values.to(dtype or self.dtype)

    def _cache(self, num_pages: int) -> Tensor:
        """Return a filled cache of one layer: (2, P, S, K, W)."""
        job = self.job
        kv_format = FORMATS[job.kv_format]
        width, dtype = kv_format.row(job.head_dim, self.dtype)
        shape = (2, num_pages, job.page_size, job.n_kv_heads, width)
        empty = torch.empty(shape, dtype=dtype, device=self.device)
        return fill_cache(empty, job.head_dim, self.normal)

    def _large_caches(self, small: Tensor) -> Iterator[LargeCache]:
        """Yield caches a little below and above _PLANE, if there is enough memory for them."""
        if self.device.type != "cuda":
            return
        page_shape = small.shape[2:]
        page_elements = math.prod(page_shape)
        plane_pages = _PLANE // page_elements
        small_pages = small.shape[1]
        for num_pages in (plane_pages - 1, plane_pages + small_pages):
            num_bytes = 2 * num_pages * page_elements * small.element_size()
            free_bytes, _total = torch.cuda.mem_get_info(self.device)
            if num_bytes > free_bytes // 2:
                continue
            large = small.new_empty(2, num_pages, *page_shape)
            first_page = num_pages - small_pages
            large[:, first_page:] = small
            yield LargeCache(f"a cache of {num_pages:,} pages", large, first_page)
            del large
            torch.cuda.empty_cache()

    def attention(self) -> Iterator[Case]:
        """Yield decode steps, decode mixed with prefill, and steps far into a large cache.

        Decode has padding rows, which share a page. It runs with each number of parts that keys
        are split into: a kernel is compiled for each.
        """
        from llama.kernels.cuda.attention import decode_variants

        job = self.job
        sequences = _Sequences.of(job)
        cache = self._cache(sequences.num_pages)

        def inputs(rows: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor, Batch]:
            batch = sequences.batch(rows, counts, self.device)
            num_tokens = len(batch.slots)
            queries = self.normal(num_tokens, job.n_heads, job.head_dim)
            return queries, cache, batch

        lengths = sequences.lengths
        every = range(len(lengths))
        ones = [1] * len(lengths)
        decode = inputs(every, ones)
        yield Case("decode", _attend, decode)
        counts = [min(n, 1 + 37 * i) for i, n in enumerate(lengths)]
        decodes_first = sorted(every, key=lambda i: counts[i] > 1)
        yield Case("prefill", _attend, inputs(decodes_first, counts))
        longest = max(lengths)
        short = [i for i, n in enumerate(lengths) if n < longest]
        for count in decode_variants(job.n_kv_heads):
            rows = [short[i % len(short)] for i in range(count)]
            yield Case(f"decode of {count} rows", _attend, inputs(rows, ones))
        queries, _, batch = decode
        for large in self._large_caches(cache):
            far_pages = batch.page_table + large.first_page
            far_batch = replace(batch, page_table=far_pages)
            inputs_far = (queries, large.cache, far_batch)
            yield Case(large.name, _attend, inputs_far, decode)

    def add_norm(self) -> Iterator[Case]:
        """Yield RMSNorm with and without a residual."""
        weight = self.normal(self.job.dim)
        for rows in (1, 17):
            x = self.normal(rows, self.job.dim)
            delta = self.normal(rows, self.job.dim)
            yield Case(f"{rows} rows", rms_norm, (x, weight, 1e-5))
            yield Case(f"{rows} rows, with a residual", add_norm, (x, delta, weight, 1e-5))

    def rope_and_store(self) -> Iterator[Case]:
        """Yield a step's tokens, two padding rows among them, into a cache and far into others."""
        job = self.job
        tokens = 17
        first = max(job.lengths) - 5
        all_freqs = precompute_freqs_cis(job.head_dim, first + tokens, 5e5, None)
        freqs = all_freqs[first:].to(self.device)
        padding_slot = (_ROPE_PAGES - 1) * job.page_size
        draw = random.Random(2)
        slots = draw.sample(range(padding_slot), tokens - 2)
        slots += [padding_slot, padding_slot + 1]
        num_heads = job.n_heads + 2 * job.n_kv_heads
        qkv = self.normal(tokens, num_heads, job.head_dim)
        cache = self._cache(_ROPE_PAGES)
        slot_tensor = torch.tensor(slots, device=self.device)
        small = (qkv, freqs, cache, slot_tensor)
        yield Case(f"{tokens} tokens", _rope_and_read, small)
        for large in self._large_caches(cache):
            far_slots = slot_tensor + large.first_page * job.page_size
            inputs = (qkv, freqs, large.cache, far_slots)
            yield Case(large.name, _rope_and_read, inputs, small)

    def silu_mul(self) -> Iterator[Case]:
        """Yield SwiGLU of one row and of several."""
        for rows in (1, 17):
            x = self.normal(rows, 2 * self.job.ffn_dim)
            yield Case(f"{rows} rows", silu_mul, (x,))

    def sample(self) -> Iterator[Case]:
        """Yield greedy, plain and filtered rows: peaked, flat, with ties, or without a maximum."""
        repeats = 8 if self.device.type == "cuda" else 1  # Triton's interpreter is slow
        for rows in (1, repeats * len(_SAMPLING_ROWS) + 2):
            narrow = self.normal(rows, self.job.vocab_size, dtype=torch.bfloat16)
            logits = narrow.float()  # it has ties, like the logits of a model in bf16
            logits[::2] *= 4
            logits[-1, ::7] = -math.inf
            if rows > 1:
                logits[0, 0] = math.nan
                logits[1] = -math.inf
            kinds = itertools.cycle(_SAMPLING_ROWS)
            chosen = list(itertools.islice(kinds, 5, 5 + rows))
            seeds = [2**40 + 7 * i for i in range(rows)]
            positions = list(range(rows))
            yield Case(f"{rows} rows", choose_ids, (logits, chosen, seeds, positions))
            greedy = [None] * rows
            yield Case(f"{rows} greedy rows", choose_ids, (logits, greedy, seeds, positions))
            if self.job.vocab_rows < self.job.vocab_size:  # several ranks
                share = logits[rows - 1 :, : self.job.vocab_rows].contiguous()
                yield Case(f"{len(share)} rows of a rank's share", _top_tokens, (share,))

    def linear(self) -> Iterator[Case]:
        """Yield every tile of every product, and quantized weights that are made plain."""
        for weight, sizes, tiles in self.products():
            kind, n, k, m = sizes
            choices: list[Tile | None] = [*tiles]
            if kind:
                choices.append(None)
            for tile in choices:
                name = f"{m} rows times {n} x {k} of kind {kind} with {tile and tuple(tile)}"
                op = partial(_multiply, weight, tile, self.out_dtype(n))
                x = self.normal(m, k)
                yield Case(name, op, (x,), is_optional=tile is not None)
        if self.job.activations == "fp8":
            yield from self._products_in_e4m3()

    def _products_in_e4m3(self) -> Iterator[Case]:
        """Yield products of rows that are rounded to e4m3."""
        for n, k in self._weight_shapes():
            weight = self._weight("fp8", n, k)
            if not weight.round_to_e4m3():
                continue
            m = MAX_EXACT_ROWS + 44
            name = f"{m} rows in e4m3 times {n} x {k}"
            op = partial(_multiply, weight, None, self.dtype)
            yield Case(name, op, (self.normal(m, k),), tolerance=_E4M3_TOLERANCE)

    def round_rows(self) -> Iterator[Case]:
        """Yield rows of each width that are rounded to e4m3, among them a row of zeros."""
        for k in sorted({k for _, k in self._weight_shapes()}):
            x = self.normal(MAX_EXACT_ROWS + 1, k)
            x[0] = 0
            yield Case(f"{len(x)} rows of {k}", _round_rows, (x,))

    def out_dtype(self, n: int) -> torch.dtype:
        """Return the dtype of a product with N outputs: logits are float32."""
        return torch.float32 if n == self.job.vocab_rows else self.dtype

    def products(self) -> Iterator[Product]:
        """Yield the products with wqkv, wo, w13, w2 and lm_head, in each of the job's formats."""
        from llama.kernels.cuda import linear, quantized

        shapes = self._weight_shapes()
        for format, shape in itertools.product(self.job.formats, shapes):
            weight = self._weight(format, *shape)
            for m in quantized.BUCKETS if weight.kind else linear.BUCKETS:
                sizes = (weight.kind, *shape, m)
                if weight.kind:
                    tiles = quantized.candidates(*sizes)
                else:
                    tiles = linear.candidates(*shape, m)
                if tiles:
                    yield Product(weight, sizes, tiles)

    def _weight(self, format: str | QuantKey | None, n: int, k: int) -> Weight:
        """Return a random weight (N, K) in a format.

        Of a quantized one the CPU packs a few rows, which the GPU repeats: all rows of the 8B's
        matrices would take the CPU minutes.
        """
        if format is not None and n > _PACKED_ROWS:
            few = self._weight(format, _PACKED_ROWS, k)
            if isinstance(few, GroupedWeight):
                return few.repeated(n)
            format = None
        if isinstance(format, QuantKey):
            return random_weight(format, n, k, self.device)
        return packed(self.normal(n, k), format, self.device)

    def _weight_shapes(self) -> list[tuple[int, int]]:
        job = self.job
        attention_dim = job.n_heads * job.head_dim
        qkv_dim = attention_dim + 2 * job.n_kv_heads * job.head_dim
        shapes = {
            (qkv_dim, job.dim),
            (job.dim, attention_dim),
            (2 * job.ffn_dim, job.dim),
            (job.dim, job.ffn_dim),
            (job.vocab_rows, job.dim),
        }
        return sorted(shapes)


class _Sequences(NamedTuple):
    """The sequences of the attention cases, on random pages; padding rows share the last page."""

    lengths: list[int]
    pages: list[list[int]]
    page_size: int

    @classmethod
    def of(cls, job: Job) -> "_Sequences":
        page_counts = [-(-n // job.page_size) for n in job.lengths]
        num_pages = sum(page_counts)
        draw = random.Random(1)
        order = draw.sample(range(num_pages), num_pages)
        pages = []
        for count in page_counts:
            pages.append(order[:count])
            del order[:count]
        pages += [[num_pages]] * _PADDING_ROWS
        lengths = [*job.lengths, *[1] * _PADDING_ROWS]
        return cls(lengths, pages, job.page_size)

    @property
    def num_pages(self) -> int:
        return self.pages[-1][0] + 1

    def batch(self, rows: Sequence[int], counts: Sequence[int], device: torch.device) -> Batch:
        """Return a batch of some of the sequences, with counts[i] new tokens of sequence i."""
        starts = [self.lengths[i] - counts[i] for i in rows]
        row_counts = [counts[i] for i in rows]
        tables = [self.pages[i] for i in rows]
        _ids, batch = Batch.pack(
            tokens=[],
            starts=starts,
            query_lens=row_counts,
            pages=tables,
            page_size=self.page_size,
            logit_rows=[],
            device=device,
        )
        return batch


def fill_cache(kv_cache: Tensor, head_dim: int, draw: Callable[..., Tensor]) -> Tensor:
    """Fill a cache (..., P, S, K, W) with keys and values that `draw` returns for a shape."""
    *_, p, s, k, _ = kv_cache.shape
    for plane in kv_cache.flatten(0, -5):
        slots = torch.arange(p * s, device=plane.device)
        values = draw(p * s, k, head_dim)
        kv_format = format_of(plane)
        kv_format.store(plane, slots, values)
    return kv_cache


def read_cache(kv_cache: Tensor) -> Tensor:
    """Return a float32 copy (..., P * S, K, D) of what a cache (..., P, S, K, W) stores."""
    *_, p, s, _k, _w = kv_cache.shape
    slots = torch.arange(p * s, device=kv_cache.device)
    planes = []
    for plane in kv_cache.flatten(0, -5):
        kv_format = format_of(plane)
        values = kv_format.load(plane, slots, torch.float32)
        planes.append(values)
    return torch.stack(planes)


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


def _round_rows(x: Tensor, kernels: Kernels) -> Results:
    """Return the bits of the codes and of the scales."""
    rows = scaled.round_rows(x, kernels)
    return rows.codes.view(torch.uint8), rows.scales.view(torch.int32)


def _multiply(
    weight: Weight, tile: Tile | None, dtype: torch.dtype, x: Tensor, kernels: Kernels
) -> Tensor:
    """Multiply x by a weight with this tile, or with none."""
    n, k = weight.shape
    sizes = (weight.kind, n, k, len(x))
    tiles = {sizes: tile} if tile else {}
    if not weight.kind:
        plain = weight.plain().to(x.dtype)
        weight = PlainWeight.pack(plain)
    context = ForwardContext(kernels=table(kernels.names, {x.dtype}, tiles))
    return weight.linear(x, dtype, context)
