"""What the self-check runs: each op with inputs at a job's sizes, its kernel named with it.

In: a `Job`. Out: for each kernel its cases, and for products the tiles that may be used. Memory of
large caches is allocated only where the GPU has room for it.

Shapes: E model dim, H query heads, K kv heads, D head dim, F ffn, V vocabulary, P pages, S slots
per page; N outputs and K inputs of a weight, M rows. H, K and F are one rank's.
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

from llama.device import DTYPES
from llama.gpu.job import Job
from llama.ops.attention import paged_attention
from llama.ops.batch import Batch, ForwardContext
from llama.ops.kv_cache import FORMATS, format_of
from llama.ops.norm import add_norm, rms_norm
from llama.ops.rope import precompute_freqs_cis, rope_and_store
from llama.ops.sample import SamplingRow, choose_ids
from llama.ops.swiglu import silu_mul
from llama.ops.triton.kernels import KernelSet, Sizes, Tile
from llama.weights import PlainWeight, QuantKey, Weight, packed, random_weight

Results = tuple[Tensor, ...]

_PADDING_ROWS = 2
_ROPE_PAGES = 9  # of the cache that keys and values are stored in
_PLANE = 2**31  # numbers of keys in a layer's cache, from which on an offset needs 64 bits


class Case(NamedTuple):
    """An op, which is also given `kernels=` and returns all that it writes, and its inputs.

    small: inputs with the same results. Where they are given, only the kernel runs, on both.
    """

    what: str
    op: Callable[..., Tensor | Results]
    inputs: Sequence[Any]
    small: Sequence[Any] | None = None


class Cases:
    """A job's cases: a method for each kernel, by its name."""

    def __init__(self, job: Job) -> None:
        self.job, self.device, self.dtype = job, torch.device(job.device), DTYPES[job.dtype]
        self._generator = torch.Generator(self.device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*shape, generator=self._generator, device=self.device)
        return values.to(dtype or self.dtype)

    def _cache(self, num_pages: int) -> Tensor:
        job, kv_format = self.job, FORMATS[self.job.kv_format]
        width, dtype = kv_format.row(job.head_dim, self.dtype)
        sizes = 2, num_pages, job.page_size, job.n_kv_heads, width
        return filled(
            torch.empty(sizes, dtype=dtype, device=self.device), job.head_dim, self.normal
        )

    def _large_caches(self, small: Tensor) -> Iterator[tuple[str, Tensor, int]]:
        """Caches a little below and above _PLANE with `small` in their last pages, if they have
        room. Each with the number of its first such page."""
        if self.device.type != "cuda":
            return
        per_page = math.prod(small.shape[2:])
        for num_pages in (_PLANE // per_page - 1, _PLANE // per_page + small.shape[1]):
            num_bytes = 2 * num_pages * per_page * small.element_size()
            if num_bytes > torch.cuda.mem_get_info(self.device)[0] // 2:
                continue
            large = small.new_empty(2, num_pages, *small.shape[2:])
            offset = num_pages - small.shape[1]
            large[:, offset:] = small
            yield f"a cache of {num_pages:,} pages", large, offset
            del large
            torch.cuda.empty_cache()

    def attention(self) -> Iterator[Case]:
        """Decode with padding rows, which share a page, mixed with prefill, far into a cache, and
        with each number of parts that keys are divided into: a kernel is compiled for each."""
        from llama.ops.triton.attention import decode_variants

        job, lengths = self.job, [*self.job.lengths, *[1] * _PADDING_ROWS]
        held = [-(-n // job.page_size) for n in job.lengths]
        order = random.Random(1).sample(range(sum(held)), sum(held))
        pages = [[order.pop() for _ in range(n)] for n in held] + [[sum(held)]] * _PADDING_ROWS
        cache, ones = self._cache(sum(held) + 1), [1] * len(lengths)

        def batch_of(rows: Sequence[int], news: Sequence[int]) -> Batch:
            starts, tables = [lengths[i] - news[i] for i in rows], [pages[i] for i in rows]
            counts = [news[i] for i in rows]
            return Batch.pack([], starts, counts, tables, job.page_size, [], self.device)[1]

        def inputs(batch: Batch) -> tuple[Tensor, Tensor, Batch]:
            return self.normal(len(batch.slots), job.n_heads, job.head_dim), cache, batch

        decode = batch_of(range(len(lengths)), ones)
        news = [min(n, 1 + 37 * i) for i, n in enumerate(lengths)]
        mixed = sorted(range(len(lengths)), key=lambda i: news[i] > 1)  # those of one token first
        yield Case("decode", _attention, inputs(decode))
        yield Case("prefill", _attention, inputs(batch_of(mixed, news)))
        short = [i for i, n in enumerate(lengths) if n < max(lengths)]
        for count in decode_variants(job.n_kv_heads):
            rows = [short[i % len(short)] for i in range(count)]
            yield Case(f"decode of {count} rows", _attention, inputs(batch_of(rows, ones)))
        for what, large, offset in self._large_caches(cache):
            queries, *small = inputs(decode)
            far = replace(decode, page_table=decode.page_table + offset)
            yield Case(what, _attention, (queries, large, far), (queries, *small))

    def add_norm(self) -> Iterator[Case]:
        weight = self.normal(self.job.dim)
        for rows in (1, 17):
            x, delta = self.normal(rows, self.job.dim), self.normal(rows, self.job.dim)
            yield Case(f"{rows} rows", rms_norm, (x, weight, 1e-5))
            yield Case(f"{rows} rows, with a residual", add_norm, (x, delta, weight, 1e-5))

    def rope_and_store(self) -> Iterator[Case]:
        """A step's tokens, two padding rows among them, into a cache and far into a large one."""
        job, tokens = self.job, 17
        first = max(job.lengths) - 5
        freqs = precompute_freqs_cis(job.head_dim, first + tokens, 5e5, None)[first:]
        last = (_ROPE_PAGES - 1) * job.page_size
        slots = [*random.Random(2).sample(range(last), tokens - 2), last, last + 1]
        heads = job.n_heads + 2 * job.n_kv_heads
        rows = self.normal(tokens, heads, job.head_dim), freqs.to(self.device)
        small = *rows, self._cache(_ROPE_PAGES), torch.tensor(slots, device=self.device)
        yield Case(f"{tokens} tokens", _rope, small)
        for what, large, offset in self._large_caches(small[2]):
            inputs = *rows, large, small[3] + offset * job.page_size
            yield Case(what, _rope, inputs, small)

    def silu_mul(self) -> Iterator[Case]:
        for rows in (1, 17):
            yield Case(f"{rows} rows", silu_mul, (self.normal(rows, 2 * self.job.ffn_dim),))

    def sample(self) -> Iterator[Case]:
        """Filters that keep few tokens, where one too many shows, and many; ties; peaked and flat
        rows, greedy, plain and filtered, and rows without a finite maximum."""
        kinds = [
            None, SamplingRow(), SamplingRow(0.7), SamplingRow(top_p=0.9),
            SamplingRow(0.6, top_p=0.95),
            SamplingRow(2.0, top_k=2), SamplingRow(2.0, top_k=3, top_p=0.5), SamplingRow(top_p=0.2),
            SamplingRow(top_k=40), SamplingRow(min_p=0.3), SamplingRow(1.3, 0.01, 64, 0.8),
            SamplingRow(3.0, top_k=1), SamplingRow(3.0, top_k=4), SamplingRow(3.0, top_k=5),
        ]  # fmt: skip
        repeats = 8 if self.device.type == "cuda" else 1  # Triton's interpreter is slow
        for rows in (1, repeats * len(kinds) + 2):
            logits = self.normal(rows, self.job.vocab_size, dtype=torch.bfloat16).float()
            logits[::2] *= 4
            logits[-1, ::7] = -math.inf
            if rows > 1:
                logits[0, 0], logits[1] = math.nan, -math.inf
            chosen = [kinds[(i + 5) % len(kinds)] for i in range(rows)]
            seeds = [2**40 + 7 * i for i in range(rows)], list(range(rows))
            yield Case(f"{rows} rows", choose_ids, (logits, chosen, *seeds))
            yield Case(f"{rows} greedy rows", choose_ids, (logits, [None] * rows, *seeds))

    def linear(self) -> Iterator[Case]:
        """Every tile of every product, and quantized weights that are made plain."""
        for weight, (kind, n, k, m), tiles in self.products():
            for tile in [*tiles, None] if kind else tiles:
                what = f"{m} rows times {n} x {k} of kind {kind} with {tile and tuple(tile)}"
                op = partial(_product, weight, tile, self.out_dtype(n))
                yield Case(what, op, (self.normal(m, k),))

    def out_dtype(self, n: int) -> torch.dtype:
        """Of a product with N outputs: the head's are float32."""
        return torch.float32 if n == self.job.vocab_rows else self.dtype

    def products(self) -> Iterator[tuple[Weight, Sizes, list[Tile]]]:
        """Of wqkv, wo, w13, w2 and the head."""
        from llama.ops.triton.linear import BUCKETS, candidates

        job, inner = self.job, self.job.n_heads * self.job.head_dim
        qkv = inner + 2 * job.n_kv_heads * job.head_dim
        shapes = {
            (qkv, job.dim), (job.dim, inner), (2 * job.ffn_dim, job.dim), (job.dim, job.ffn_dim),
            (job.vocab_rows, job.dim),
        }  # fmt: skip
        for format, (n, k) in itertools.product(job.formats, sorted(shapes)):
            if isinstance(format, QuantKey):
                weight = random_weight(format, n, k, self.device)
            else:
                weight = packed(self.normal(n, k), format, self.device)
            for m in BUCKETS:
                if tiles := candidates(weight.kind, n, k, m):
                    yield weight, (weight.kind, n, k, m), tiles


def filled(kv_cache: Tensor, head_dim: int, draw: Callable[..., Tensor]) -> Tensor:
    """A cache (..., P, S, K, W), all of it what `draw` draws of a shape."""
    *_, p, s, k, _ = kv_cache.shape
    for plane in kv_cache.flatten(0, -5):
        slots = torch.arange(p * s, device=plane.device)
        format_of(plane).store(plane, slots, draw(p * s, k, head_dim))
    return kv_cache


def numbers_of(kv_cache: Tensor) -> Tensor:
    """A cache (..., P, S, K, W) -> a copy of what it holds, (..., P * S, K, D)."""
    slots = torch.arange(math.prod(kv_cache.shape[-4:-2]), device=kv_cache.device)
    planes = kv_cache.flatten(0, -5)
    return torch.stack([format_of(x).load(x, slots, torch.float32) for x in planes])


def _attention(queries: Tensor, cache: Tensor, batch: Batch, kernels: KernelSet) -> Tensor:
    return paged_attention(queries, cache, batch.with_kernels(kernels))


def _rope(qkv: Tensor, freqs: Tensor, cache: Tensor, slots: Tensor, kernels: KernelSet) -> Results:
    """The queries, and what the cache's last pages hold afterwards; then they are as before."""
    last = cache[:, -_ROPE_PAGES:]
    before = last.clone()
    queries = rope_and_store(qkv, freqs, cache, slots, kernels)
    after = numbers_of(last)
    last.copy_(before)
    return queries, after


def _product(
    weight: Weight, tile: Tile | None, dtype: torch.dtype, x: Tensor, kernels: KernelSet
) -> Tensor:
    tiles = {(weight.kind, *weight.shape, len(x)): tile} if tile else {}
    if not weight.kind:
        weight = PlainWeight.pack(weight.plain().to(x.dtype))
    return weight.linear(x, dtype, ForwardContext(kernels=replace(kernels, tiles=tiles)))
