"""Paged attention by the interpreted Triton kernels, against float64 and PyTorch."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from helpers.batches import batch_of
from helpers.kernels import INTERPRETED
from helpers.rounding import HALF, SINGLE, sum_bound
from llama.kernels.cuda import attention
from llama.ops.attention import paged_attention
from llama.ops.batch import Batch
from llama.ops.kernels import NO_KERNELS, Kernels
from llama.ops.kv_cache import pick_kv_format

CPU = torch.device("cpu")
SHAPES = [  # (H, K, D), S, parts of the keys in decode
    ((4, 1, 32), 4, 8), ((2, 2, 16), 16, 1), ((6, 2, 64), 100, 40), ((17, 1, 16), 1, 3),
]  # fmt: skip
TYPED = [  # the choice of tiles does not depend on the dtype
    *((*shape, torch.float32) for shape in SHAPES),
    *((*shape, torch.float16) for shape in SHAPES[:2]),
]  # fmt: skip


class Case:
    """Queries and pages of sequences with `lens` tokens, of which the last `query_lens` are new.

    Memory that no query may see is NaN: free pages, and slots past a sequence's end.
    """

    def __init__(
        self, lens, query_lens, dtype, shape=(4, 1, 32), page_size=4, in_8_bits=False
    ) -> None:
        n_heads, n_kv_heads, head_dim = shape
        generator = torch.Generator().manual_seed(sum(lens))
        held = [-(-n // page_size) for n in lens]
        order = torch.randperm(sum(held) + 2, generator=generator).tolist()
        pages = [[order.pop() for _ in range(n)] for n in held]
        starts = [n - new for n, new in zip(lens, query_lens, strict=True)]
        _, self.batch = Batch.pack([], starts, query_lens, pages, page_size, [], CPU)
        shape = (2, sum(held) + 2, page_size, n_kv_heads, head_dim)
        self.kv_cache = torch.full(shape, float("nan"), dtype=dtype)
        for row, length in zip(self.batch.page_table, lens, strict=True):
            slots = (row[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
            shape = (2, length, n_kv_heads, head_dim)
            self.kv_cache.flatten(1, 2)[:, slots] = torch.randn(shape, generator=generator).to(
                dtype
            )
        self.numbers = self.kv_cache.flatten(1, 2).double()
        if in_8_bits:
            self._round(self.numbers)
        shape = (sum(query_lens), n_heads, head_dim)
        self.queries = torch.randn(shape, generator=generator).to(dtype)

    def _round(self, numbers: Tensor) -> None:
        """Quantize the cache and its values to 8 bits; NaN becomes bytes that stand for NaN."""
        kv_format, dtype = pick_kv_format("int8", torch.device("cuda")), self.kv_cache.dtype
        (*sizes, head_dim), slots = self.kv_cache.shape, torch.arange(numbers.shape[1])
        self.kv_cache = torch.full((*sizes, kv_format.row(head_dim, dtype)[0]), -1).char()
        for plane, x in zip(self.kv_cache, numbers, strict=True):
            is_there = ~x.isnan().flatten(1).any(1)
            kv_format.store(plane, slots[is_there], x[is_there])
            x.copy_(kv_format.load(plane, slots, x.dtype))

    def run(self, kernels: Kernels = INTERPRETED) -> Tensor:
        return paged_attention(self.queries, self.kv_cache, self.batch.with_kernels(kernels))

    def exact(self) -> tuple[Tensor, Tensor]:
        """Return the answer in float64 and the bound of its error, one query at a time.

        In float32, an error of the scores changes weights and their sum, and sums are rounded; four
        more roundings are those of exponential and quotient. In float16, the weights are rounded,
        and the result.
        """
        group = self.queries.shape[1] // self.kv_cache.shape[3]
        size, out, bounds, row = self.kv_cache.shape[2], [], [], 0
        lens = zip(self.batch.query_lens_cpu, self.batch.seq_lens_cpu, strict=True)
        for seq, (new, length) in enumerate(lens):
            for seen in range(length - new + 1, length + 1):
                at = torch.arange(seen)
                slots = self.batch.page_table[seq, at // size] * size + at % size
                keys, values = self.numbers[:, slots].repeat_interleave(group, 2)
                scores = torch.einsum("hd,lhd->hl", self.queries[row].double(), keys)
                weights = (scores / keys.shape[2] ** 0.5).softmax(-1)
                out.append(torch.einsum("hl,lhd->hd", weights, values))
                sizes = torch.einsum("hl,lhd->hd", weights, values.abs())
                query, head_dim = self.queries[row].double(), keys.shape[2]
                terms = torch.einsum("hd,lhd->hl", query.abs(), keys.abs()) / head_dim**0.5
                in_scores = 2 * sum_bound(terms.amax(1)[:, None] * sizes, head_dim)
                bound = in_scores + sum_bound(sizes, seen) + 4 * SINGLE * sizes
                if self.queries.dtype is torch.float16:
                    bound += HALF * (sizes + out[-1].abs())
                bounds.append(bound)
                row += 1
        return torch.stack(out), torch.stack(bounds)


def check(case: Case, poisoned) -> None:
    want, bound = case.exact()
    with poisoned():
        got = case.run()
    assert got.dtype is case.queries.dtype
    assert ((got - want).abs() <= bound).all()


def set_parts(monkeypatch, parts: int) -> None:
    """Let decode split the keys of a step into so many parts of equal size."""
    monkeypatch.setattr(attention, "num_parts", lambda *_: parts)


@pytest.mark.parametrize("shape, page_size, parts, dtype", TYPED)
def test_decode(monkeypatch, poisoned, launches, dtype, shape, page_size, parts):
    set_parts(monkeypatch, parts)
    check(Case([1, 15, 16, 17, 330], [1] * 5, dtype, shape, page_size), poisoned)
    assert launches == ["decode_kernel", "merge_kernel"]


@pytest.mark.parametrize("parts", [1, 9])
@pytest.mark.parametrize("counts", [[1, 1, 3, 4], [1, 2, 5], [1, 16]], ids=str)
def test_several_queries_of_a_sequence(monkeypatch, poisoned, launches, counts, parts):
    """Drafts that are verified, and short prompts, are rows of the tile of their sequence.

    The tile has 32 or 64 rows. Some of the queries see nothing of the last part.
    """
    set_parts(monkeypatch, parts)
    lens = [70, 130, 258, 17][: len(counts)]
    check(Case(lens, counts, torch.float32), poisoned)
    assert launches == ["decode_kernel", "merge_kernel"]


@pytest.mark.parametrize("shape, page_size, _, dtype", TYPED)
def test_prefill(monkeypatch, poisoned, launches, dtype, shape, page_size, _):
    """Prefill is right for whole prompts and chunks, longer and shorter than a block of queries.

    The last query of 128 sees whole blocks of keys alone.
    """
    check(Case([65, 17, 63, 130, 128], [65, 2, 63, 40, 17], dtype, shape, page_size), poisoned)
    assert launches == ["prefill_kernel"]


def test_both_in_one_batch(monkeypatch, poisoned, launches, dtype):
    lens, query_lens = [1, 40, 255, 40, 17, 70, 2], [1, 1, 1, 40, 16, 33, 2]
    set_parts(monkeypatch, 12)
    check(Case(lens, query_lens, dtype, (4, 2, 32)), poisoned)
    assert launches == ["decode_kernel", "merge_kernel", "prefill_kernel"]


def test_blocks_of_queries_fall_to_their_sequences(monkeypatch, poisoned):
    """Blocks of queries are assigned to their sequences.

    With lengths around a block of queries, in every order, each sequence has all of its blocks.
    """
    monkeypatch.setattr(attention, "prefill_tile", lambda *_: attention.Tile(16, 64, 4, 2))
    for lens in ([4, 4, 4], [3, 5, 8], [9, 2, 2, 2, 2], [8, 7, 2], [2, 31]):  # 4 queries per block
        monkeypatch.setattr(attention, "most_queries", lambda _: 1)
        check(Case([9, *lens], [1, *lens], torch.float32), poisoned)


def test_queries_that_are_not_in_one_piece(monkeypatch, poisoned, dtype):
    set_parts(monkeypatch, 3)
    case = Case([37, 20], [1, 20], dtype)
    case.queries = case.queries.transpose(0, 1).contiguous().transpose(0, 1)
    check(case, poisoned)


@pytest.mark.parametrize("parts", [1, 6])
def test_a_nan_is_not_hidden(monkeypatch, parts):
    """A NaN is not hidden.

    It is in one part of a sequence's keys, which the merge must not leave out: a request with NaN
    must end with an error, not with text.
    """
    set_parts(monkeypatch, parts)
    for plane in range(2):
        case = Case([255, 40, 20], [1, 1, 20], torch.float32, (2, 2, 16))
        for seq, position in ((0, 70), (2, 3)):
            page = case.batch.page_table[seq, position // 4]
            case.kv_cache[plane, page, position % 4, 1] = float("nan")
        out = case.run().isnan().all(-1).tolist()
        assert out[:2] == [[False, True], [False, False]]
        assert [is_nan for _, is_nan in out[5:]] == [True] * 17


def test_offsets_of_64_bits(monkeypatch, poisoned, dtype):
    set_parts(monkeypatch, 3)
    monkeypatch.setattr(attention, "_MAX_OFFSET", 0)
    check(Case([37, 20], [1, 20], dtype), poisoned)


def test_a_static_batch_with_padding(monkeypatch, poisoned, dtype):
    """A padded static batch is computed as a captured step needs it.

    The host has upper bounds of the lengths and of the queries of a sequence, the device has both.
    A sequence without tokens gets zeros, one without queries nothing, and page tables are part of a
    wider buffer.
    """
    case = Case([37, 64, 5], [1, 1, 3], dtype)
    want, bound = case.exact()
    b, wide = case.batch, torch.zeros(7, 40, dtype=torch.int64)
    wide[:3, : b.page_table.shape[1]] = b.page_table
    queries = torch.cat((case.queries, torch.ones(2, 4, 32, dtype=dtype)))
    lens, limits = [37, 64, 5, 0, 0, 9, 0], ([4] * 7, [30 * 4] * 7)
    padded = batch_of(wide[:, :30], [0, 1, 2, 5, 6, 7, 7, 7], lens, *limits)
    for parts in (1, 8):
        set_parts(monkeypatch, parts)
        with poisoned():
            got = paged_attention(queries, case.kv_cache, padded.with_kernels(INTERPRETED))
        assert ((got[:5] - want).abs() <= bound).all()
        assert (got[5:] == 0).all()
    got = paged_attention(queries, case.kv_cache, padded)
    assert ((got[:5] - want).abs() <= bound).all(), "the torch body"


def test_a_cache_in_8_bits(monkeypatch, poisoned, launches):
    """Attention adds no rounding to that of an 8-bit cache, and PyTorch agrees."""
    set_parts(monkeypatch, 6)
    dtype = torch.float32
    case = Case([1, 40, 130, 17, 23], [1, 1, 1, 17, 5], dtype, (4, 2, 16), in_8_bits=True)
    check(case, poisoned)
    assert launches == ["decode_kernel", "merge_kernel", "prefill_kernel"]
    want, bound = case.exact()
    assert ((case.run(NO_KERNELS) - want).abs() <= bound).all()
    case = Case([37, 9], [1, 9], torch.float16, in_8_bits=True)
    check(case, poisoned)


def test_the_torch_body_agrees(monkeypatch, dtype):
    set_parts(monkeypatch, 6)
    case = Case([1, 40, 255, 16, 70], [1, 1, 1, 16, 33], dtype, (2, 2, 16))
    want, bound = case.exact()
    for got in (case.run(), case.run(NO_KERNELS)):
        assert ((got - want).abs() <= bound).all()


@pytest.mark.parametrize("head_dim", [8, 24, 512])
def test_other_sizes_stay_with_torch(launches, head_dim):
    case = Case([5, 9], [1, 9], torch.float32, (4, 2, head_dim))
    want, bound = case.exact()
    assert ((case.run() - want).abs() <= bound).all()
    assert launches == []


def test_parts_fill_the_device_and_their_number_depends_on_the_batch_alone():
    """The number of parts fills the device and depends on the shape of the batch alone.

    With 8 kv heads, a single sequence has 32 parts, and many sequences have 128 together, which
    are 1,024 programs. With a single kv head, as on one of eight ranks, a sequence has 64 parts.
    """
    assert [attention.num_parts(n, 8) for n in (1, 2, 3, 4, 64, 512)] == [32, 64, 96, 128, 128, 128]
    assert [attention.num_parts(n, 1) for n in (1, 4, 5, 64)] == [64, 256, 255, 1024]
    assert [attention.decode_variants(group) for group in (1, 4, 6, 8, 17, 128)] == [
        [1, 16], [1, 8, 16], [1, 5, 10], [1, 4, 8], [1, 3], [1],
    ]  # fmt: skip


@triton.jit
def found_kernel(
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    found: tl.tensor,
    num_sequences: tl.tensor,
    wanted: tl.tensor,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Write what `_find_part` finds for each part: (parts, 3)."""
    part = tl.program_id(0)
    seq, first, size = attention._find_part(
        part, query_starts, seq_lens, num_sequences, wanted, KEYS, LANES
    )
    tl.store(found + 3 * part, seq)
    tl.store(found + 3 * part + 1, first)
    tl.store(found + 3 * part + 2, size)


@pytest.mark.parametrize(
    "lens",
    [[1], [64, 0, 65], [2048] * 9, [32_768, *[200] * 11], [0, 0, 7, 100_000, 7, 3_000]],
    ids=["one", "an empty one", "alike", "a long one", "many kinds"],
)
def test_parts_have_about_the_same_size(lens):
    """No part has more than its share of the step's blocks, and all are found in order.

    A sequence without queries, as graphs have them, has no part; one without keys has one.
    """
    counts = [int(i != 1) for i in range(len(lens))]
    starts = torch.tensor([0, *itertools.accumulate(counts)])
    blocks = [max(1, -(-n // 64)) if count else 0 for n, count in zip(lens, counts, strict=True)]
    for wanted in (1, 8, 33):
        found = torch.full((wanted + len(lens), 3), -1, dtype=torch.int32)
        arguments = (starts, torch.tensor(lens), found, len(lens), wanted)
        found_kernel[(len(found),)](*arguments, KEYS=64, LANES=4)
        size = -(-sum(blocks) // wanted)
        assert set(found[:, 2].tolist()) == {size}
        expected = list[tuple[int, int]]()
        for seq, count in enumerate(blocks):
            expected += [(seq, len(expected))] * -(-count // size)
        assert found[: len(expected), :2].tolist() == [[*pair] for pair in expected]
        assert set(found[len(expected) :, 0].tolist()) <= {len(lens)}
