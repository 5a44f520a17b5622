"""What the self-check compares: for each kernel, calls of its op at a model's own sizes.

In: sizes, a type and a device. Out: cases, each an op and its inputs; check.py runs each op with
its kernel and without. Nothing here knows how a kernel works. The inputs are random, but the same
in every process.

Shapes: T tokens, B sequences, E model dim, H query heads, K kv heads, D head dim, F ffn, V
vocabulary, P pages, S slots per page, M pages per sequence. H, K and F are one rank's.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llama.ops import norm
from llama.ops.attention import paged_attention
from llama.ops.batch import Batch
from llama.ops.rope import precompute_freqs_cis, rope_and_store
from llama.ops.sample import SamplingRow, choose_ids
from llama.ops.swiglu import silu_mul
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet

LENGTHS = (1, 15, 16, 17, 255, 4097)
_PADDING_ROWS = 2
_PLANE = 2**31  # numbers of keys in a layer's cache, from which on an offset needs 64 bits


@dataclass(frozen=True)
class Sizes:
    """Of a model on one rank, and the lengths of sequences to try."""

    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    vocab_rows: int  # of the head on this rank
    page_size: int
    eps: float
    lengths: tuple[int, ...] = LENGTHS


class Case(NamedTuple):
    """An op and what it is called with. Its results are what it returns, and tensors it writes to.

    reference: inputs for the torch body that give the same results with less memory; then what the
    op writes to is not compared.
    """

    what: str
    op: Callable[..., Any]
    inputs: Sequence[Any]
    reference: Sequence[Any] | None = None


class Place(NamedTuple):
    """Where a case's tensors lie, their type, and the generator of their numbers."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, device=self.device)
        return values.to(dtype or self.dtype)

    def whole(self, values: Iterable[Any]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)


def attention(sizes: Sizes, place: Place) -> Iterator[Case]:
    """Decode with padding, decode as a static batch, mixed with prefill, and far into a cache."""
    lengths = [*sizes.lengths, *[1] * _PADDING_ROWS]
    pages, num_pages = _pages(lengths, sizes.page_size)
    cache = place.normal(2, num_pages, sizes.page_size, sizes.n_kv_heads, sizes.head_dim)
    table = place.whole(pages)
    full = [table.shape[1] * sizes.page_size] * len(lengths)
    ones = [1] * len(lengths)
    news = [min(n, 1 + 37 * i) for i, n in enumerate(lengths)]  # single-token sequences first
    order = sorted(range(len(lengths)), key=lambda i: news[i] > 1)
    mixed = [lengths[i] for i in order], [news[i] for i in order]
    for what, rows, (lens, counts), shown in (
        ("decode", table, (lengths, ones), lengths),
        ("a static batch", table, (lengths, ones), full),
        ("prefill", table[order], mixed, mixed[0]),
    ):
        queries = place.normal(sum(counts), sizes.n_heads, sizes.head_dim)
        starts = place.whole([0, *itertools.accumulate(counts)])
        inputs = (queries, cache, rows, starts, place.whole(lens), counts, shown)
        yield Case(what, _attend, inputs)
    for large, offset in _large_caches(cache, place):
        queries = place.normal(len(lengths), sizes.n_heads, sizes.head_dim)
        rest = (place.whole(range(len(lengths) + 1)), place.whole(lengths), ones, lengths)
        yield Case(
            f"a cache of {large.shape[1]:,} pages", _attend,
            (queries, large, table + offset, *rest), (queries, cache, table, *rest),
        )  # fmt: skip


def _attend(
    queries: Tensor,
    kv_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    *lens: Any,
    kernels: KernelSet = TORCH_ONLY,
) -> Tensor:
    none = table.new_empty(0)
    batch = Batch(none, none, table, starts, lens[0], none, *lens[1:])
    return paged_attention(queries, kv_cache, batch, kernels)


def _pages(lengths: Sequence[int], page_size: int) -> tuple[list[list[int]], int]:
    """Pages of each sequence in a mixed order, unused entries 0, the last page for padding rows."""
    held = [-(-n // page_size) for n in lengths]
    width, total = max(held), sum(held[:-_PADDING_ROWS]) + 1
    order = random.Random(1).sample(range(total - 1), total - 1)
    rows = [[order.pop() for _ in range(n)] for n in held[:-_PADDING_ROWS]]
    rows += [[total - 1]] * _PADDING_ROWS
    return [row + [0] * (width - len(row)) for row in rows], total


def _large_caches(small: Tensor, place: Place) -> Iterator[tuple[Tensor, int]]:
    """Caches a little below and above _PLANE with `small` in their last pages, if they have room.

    Each with the number of its first such page.
    """
    if place.device.type != "cuda":
        return
    per_page = math.prod(small.shape[2:])
    for num_pages in (_PLANE // per_page - 1, _PLANE // per_page + small.shape[1]):
        num_bytes = 2 * num_pages * per_page * small.element_size()
        if num_pages < small.shape[1] or num_bytes > torch.cuda.mem_get_info(place.device)[0] // 2:
            continue
        large = small.new_empty(2, num_pages, *small.shape[2:])
        offset = num_pages - small.shape[1]
        large[:, offset:] = small
        yield large, offset
        del large
        torch.cuda.empty_cache()


def add_norm(sizes: Sizes, place: Place) -> Iterator[Case]:
    weight = place.normal(sizes.dim)
    for rows in (1, 17):
        x, delta = place.normal(rows, sizes.dim), place.normal(rows, sizes.dim)
        yield Case(f"{rows} rows", norm.rms_norm, (x, weight, sizes.eps))
        add = getattr(norm, "add_norm", None)
        if add is not None:
            yield Case(f"{rows} rows, with a residual", add, (x, delta, weight, sizes.eps))


def rope(sizes: Sizes, place: Place) -> Iterator[Case]:
    """A step's tokens, two padding rows among them, into a cache and far into a large one."""
    heads, num_pages, tokens = sizes.n_heads + 2 * sizes.n_kv_heads, 9, 17
    cache = place.normal(2, num_pages, sizes.page_size, sizes.n_kv_heads, sizes.head_dim)
    freqs = precompute_freqs_cis(sizes.head_dim, max(sizes.lengths) + tokens, 5e5, None)
    positions = torch.arange(tokens) + max(sizes.lengths) - 5
    freqs = freqs[positions].to(place.device)
    last = (num_pages - 1) * sizes.page_size
    slots = place.whole([*random.Random(2).sample(range(last), tokens - 2), last, last + 1])
    qkv = place.normal(tokens, heads, sizes.head_dim)
    yield Case(f"{tokens} tokens", rope_and_store, (qkv, freqs, cache, slots))
    for large, offset in _large_caches(cache, place):
        yield Case(
            f"a cache of {large.shape[1]:,} pages", _rope_and_read,
            (qkv, freqs, large, slots + offset * sizes.page_size), (qkv, freqs, cache, slots),
        )  # fmt: skip


def _rope_and_read(
    qkv: Tensor, freqs: Tensor, cache: Tensor, slots: Tensor, kernels: KernelSet = TORCH_ONLY
) -> tuple[Tensor, Tensor]:
    """The queries, and what the slots hold afterwards."""
    queries = rope_and_store(qkv, freqs, cache, slots, kernels)
    return queries, torch.stack([plane.flatten(0, 1)[slots] for plane in cache])


def silu(sizes: Sizes, place: Place) -> Iterator[Case]:
    for rows in (1, 17):
        yield Case(f"{rows} rows", silu_mul, (place.normal(rows, 2 * sizes.ffn_dim),))


def sample(sizes: Sizes, place: Place) -> Iterator[Case]:
    """Ids must be equal. Filters that keep few tokens, where one too many shows, and many; ties;
    peaked and flat rows, greedy, plain and filtered, and rows without a finite maximum."""
    kinds = [
        None, SamplingRow(), SamplingRow(0.7), SamplingRow(top_p=0.9), SamplingRow(0.6, top_p=0.95),
        SamplingRow(2.0, top_k=2), SamplingRow(2.0, top_k=3, top_p=0.5), SamplingRow(top_p=0.2),
        SamplingRow(top_k=40), SamplingRow(min_p=0.3), SamplingRow(1.3, 0.01, 64, 0.8),
        SamplingRow(3.0, top_k=1), SamplingRow(3.0, top_k=4), SamplingRow(3.0, top_k=5),
    ]  # fmt: skip
    repeats = 8 if place.device.type == "cuda" else 1  # Triton's interpreter is slow
    for rows in (1, repeats * len(kinds) + 2):
        logits = place.normal(rows, sizes.vocab_size, dtype=torch.bfloat16).float()
        logits[::2] *= 4
        logits[-1, ::7] = -math.inf
        if rows > 1:
            logits[0, 0], logits[1] = math.nan, -math.inf
        chosen = [kinds[(i + 5) % len(kinds)] for i in range(rows)]
        inputs = (logits, chosen, [2**40 + 7 * i for i in range(rows)], list(range(rows)))
        yield Case(f"{rows} rows", choose_ids, inputs)
        yield Case(f"{rows} greedy rows", choose_ids, (logits, [None] * rows, *inputs[2:]))


CASES: dict[str, Callable[[Sizes, Place], Iterator[Case]]] = {
    "attention": attention,
    "add_norm": add_norm,
    "rope_and_store": rope,
    "silu_mul": silu,
    "sample": sample,
}
