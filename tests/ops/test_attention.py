"""Paged attention against float64; a query alone, in a batch, and as a row of a prefill."""

import functools
import random

import pytest
import torch
from torch import Tensor

from helpers.batches import batch_of, in_8_bits
from llama.kernels.cpu import native
from llama.kernels.cpu.table import KERNELS
from llama.ops import attention
from llama.ops.batch import Batch
from llama.ops.cache_values import read_cache

CPU = torch.device("cpu")
_rng = random.Random(3)


def paged_attention(
    queries: Tensor, kv_cache: Tensor, batch: Batch, *, is_causal: bool = True
) -> Tensor:
    """Run the operator with the kernels of the CPU, where they are in use."""
    batch = batch.with_kernels(KERNELS)
    return attention.paged_attention(queries, kv_cache, batch, is_causal=is_causal)


class Case:
    """Queries and pages of sequences with `lens` tokens, of which the last `query_lens` are new."""

    def __init__(
        self, lens, query_lens, shape=(8, 2, 64), page_size=16, seed=0, size=1.0, device=CPU
    ) -> None:
        n_heads, n_kv_heads, head_dim = shape
        generator = torch.Generator().manual_seed(seed)
        held = [-(-n // page_size) for n in lens]
        order = torch.randperm(sum(held) + 2, generator=generator).tolist()
        pages = [[order.pop() for _ in range(n)] for n in held]
        starts = [n - new for n, new in zip(lens, query_lens, strict=True)]
        _, self.batch = Batch.pack([], starts, query_lens, pages, page_size, [], device)
        shape = (2, sum(held) + 2, page_size, n_kv_heads, head_dim)
        self.kv_cache = torch.randn(shape, generator=generator).bfloat16().to(device)
        queries = torch.randn(sum(query_lens), n_heads, head_dim, generator=generator)
        self.queries = (queries * size).bfloat16().to(device)

    def run(self) -> Tensor:
        return paged_attention(self.queries, self.kv_cache, self.batch)

    def row(self, row: int, seq: int, length: int) -> Tensor:
        """Return one query as a decode step of its own, at a context of `length`."""
        table = self.batch.page_table[seq : seq + 1]
        batch = batch_of(table, [0, 1], [length], [1], [length])
        return paged_attention(self.queries[row : row + 1], self.kv_cache, batch)

    def rows(self) -> list[tuple[int, int, int]]:
        """Return (row, sequence, number of visible tokens) of every query."""
        lens = zip(self.batch.query_lens_cpu, self.batch.seq_lens_cpu, strict=True)
        each = [(s, n - new + i + 1) for s, (new, n) in enumerate(lens) for i in range(new)]
        return [(row, *rest) for row, rest in enumerate(each)]

    def slots(self, seq: int, length: int) -> Tensor:
        """Return the slots of the first `length` tokens of a sequence."""
        size = self.kv_cache.shape[2]
        positions = torch.arange(length, device=self.kv_cache.device)
        return self.batch.page_table[seq, positions // size] * size + positions % size

    def exact(self) -> tuple[Tensor, Tensor]:
        """Return the answer in float64, and the same sums of absolute values."""
        keys, values = self.kv_cache.flatten(1, 2).double()
        group = self.queries.shape[1] // keys.shape[1]
        out, size = [], []
        for row, seq, length in self.rows():
            slots = self.slots(seq, length)
            k = keys[slots].repeat_interleave(group, 1)
            v = values[slots].repeat_interleave(group, 1)
            scores = torch.einsum("hd,lhd->hl", self.queries[row].double(), k)
            weights = (scores / keys.shape[2] ** 0.5).softmax(-1)
            out.append(torch.einsum("hl,lhd->hd", weights, v))
            size.append(torch.einsum("hl,lhd->hd", weights, v.abs()))
        return torch.stack(out), torch.stack(size)


CASES = [  # lens, query lens, (H, K, D), S: around a chunk of 256 keys and a block of 56 rows
    ([1], [1], (4, 4, 32), 16),
    ([255, 256, 257, 513], [1, 1, 1, 1], (8, 2, 64), 16),
    ([600, 31, 40], [1, 1, 40], (8, 2, 64), 16),
    ([300], [300], (4, 1, 64), 16),
    ([270, 530], [14, 15], (4, 1, 128), 16),
    ([700, 20], [2, 20], (6, 2, 96), 700),
    ([33, 290], [1, 3], (60, 1, 32), 1),
    ([520], [9], (8, 8, 256), 5),
] + [
    (
        [q + _rng.choice([0, 1, 15, 241, 256]) for q in query_lens],
        query_lens,
        (k * _rng.choice([1, 2, 3, 4, 8]), k, _rng.choice([32, 64, 96, 128])),
        _rng.choice([1, 4, 16, 1000]),
    )
    for k in (1, 2, 4, 8)
    for query_lens in (
        [1] * _rng.randint(1, 4),
        sorted(_rng.choice([1, 2, 13, 70]) for _ in range(3)),
    )
]  # fmt: skip


def same(a: Tensor, b: Tensor) -> bool:
    """Check that results are equal bit for bit.

    Our kernels add a query's keys in one order, whatever else is in the batch.
    """
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def check(case: Case, out: Tensor, loss: float, known: tuple[Tensor, Tensor] | None = None) -> None:
    """Check the error: one rounding to bf16, and `loss` of the sums of absolute values."""
    exact, size = known or case.exact()
    assert out.dtype is case.queries.dtype
    assert ((out.double() - exact).abs() <= exact.abs() / 256 + size * loss).all()


def loss_of(body: str) -> float:
    """Return the loss of float32 sums; products of bf16 round the weights of the values to it."""
    return 1e-5 + (1 / 256 if body in ("avx512_bf16", "neon_bf16") else 0)


def case_of(number: int, size: float) -> Case:
    lens, query_lens, shape, page_size = CASES[number]
    return Case(lens, query_lens, shape, page_size, size=size)


@functools.cache
def exact_answer(number: int, size: float) -> tuple[Tensor, Tensor]:
    """Return the exact answer, cached: it takes longer than all kernel variants together."""
    return case_of(number, size).exact()


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("size", [1, 12])
def test_paged_attention_is_attention(kernels, number, size):
    case = case_of(number, size)
    check(case, case.run(), loss_of(kernels), exact_answer(number, size))


@pytest.mark.parametrize("shape", [(2, 300, 96), (3, 57, 32), (1, 9, 64), (2, 1, 128)])
def test_attention_without_a_mask(kernels, shape, monkeypatch):
    """As the image encoder computes it; PyTorch alone where it has AMX, or AVX2 and no more."""
    has_avx2_alone = kernels in ("avx2", "avx_vnni")
    monkeypatch.setenv(native.VARIABLE, kernels if has_avx2_alone else "")
    scale = 80**-0.5
    heads = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    queries, keys, values = heads.double()
    weights = (queries @ keys.transpose(1, 2) * scale).softmax(-1)
    exact, size = weights @ values, weights @ values.abs()
    out = attention.attention(heads, scale, KERNELS)
    assert out.dtype is torch.bfloat16
    assert ((out.double() - exact).abs() <= exact.abs() / 256 + size * (1e-5 + 1 / 256)).all()
    is_ours = not has_avx2_alone and "amx_bf16" not in native.cpu_flags()
    assert (KERNELS.run("attention", heads, scale) is not None) == is_ours


@functools.cache
def cased_in_8_bits(number: int) -> tuple[Case, tuple[Tensor, Tensor]]:
    """Return a case whose cache holds 8-bit integers, and the exact answer for their values."""
    case = case_of(number, 1)
    held, sizes = in_8_bits(case.kv_cache), case.kv_cache.shape
    case.kv_cache = read_cache(held).view(sizes)
    known = case.exact()
    case.kv_cache = held
    return case, known


@pytest.mark.parametrize("number", range(1, 8))
def test_a_cache_in_8_bits(kernels, number):
    """Attention adds no rounding to that of an 8-bit cache.

    A query alone has the bytes that it has in a batch and in a prefill.
    """
    case, known = cased_in_8_bits(number)
    whole = case.run()
    check(case, whole, loss_of(kernels), known)
    for row, seq, length in case.rows()[::9] + case.rows()[-1:]:
        assert same(case.row(row, seq, length), whole[row : row + 1]), row


def test_a_cache_in_8_bits_for_the_torch_body(no_kernels):
    for number in (2, 4):
        case, known = cased_in_8_bits(number)
        check(case, case.run(), 1 / 64, known)


@pytest.mark.parametrize("lens, query_lens, shape, page_size", CASES)
def test_torch_body(no_kernels, device, lens, query_lens, shape, page_size):
    case = Case(lens, query_lens, shape, page_size, device=device)
    check(case, case.run(), 1 / 64)  # weights of the values are rounded to bf16
    case.queries, case.kv_cache = case.queries.float(), case.kv_cache.float()
    check(case, case.run(), 1e-5)


def test_a_query_gives_the_same_bytes_alone_in_a_batch_and_in_a_prefill(kernels):
    for lens, query_lens, shape, page_size in CASES:
        case = Case(lens, query_lens, shape, page_size)
        whole = case.run()
        for row, seq, length in case.rows()[::3] + case.rows()[-1:]:
            assert same(case.row(row, seq, length), whole[row : row + 1]), (lens, shape, row)


def test_any_number_of_threads_gives_the_same_bytes(kernels):
    for lens, query_lens in (([2000], [1]), ([900, 40], [1, 1]), ([700], [130])):
        case = Case(lens, query_lens, (16, 4, 64))
        alone = case.run()
        for threads in (2, 3):
            torch.set_num_threads(threads)  # conftest restores the number
            assert same(case.run(), alone)
        torch.set_num_threads(1)


def check_unseen(dtype: torch.dtype) -> None:
    """Check that memory which no query sees has no effect.

    Slots past the end, free pages and those of a neighbour hold stale data, NaN in the worst case.
    """
    case = Case([37, 256, 300], [1, 1, 20])
    pack = in_8_bits if dtype is torch.int8 else lambda x: x.to(dtype)
    case.queries = case.queries.to(torch.float32 if dtype is torch.float32 else torch.bfloat16)
    plain, case.kv_cache = case.kv_cache, pack(case.kv_cache)
    before = case.run()
    seen = [case.slots(seq, n) for seq, n in enumerate(case.batch.seq_lens_cpu)]
    for worst in (float("nan"), float("inf")):
        for kept in (seen, seen[:2]):  # the third sequence contains NaN too
            mixed, slots = torch.full_like(plain, worst), torch.cat(kept)
            mixed.flatten(1, 2)[:, slots] = plain.flatten(1, 2)[:, slots]
            case.kv_cache = pack(mixed)
            rows = 22 if kept is seen else 2
            assert torch.equal(case.run()[:rows], before[:rows]), (worst, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_slots_that_a_query_may_not_see_are_never_read(kernels, dtype):
    check_unseen(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_the_torch_body_gives_nan_to_nobody_else(no_kernels, dtype):
    """The PyTorch implementation gives NaN to no other sequence.

    A past fault: it multiplied what a query may not see by 0, and an unused entry of a page table
    is page 0, so that NaN there spread to shorter neighbours.
    """
    check_unseen(dtype)


def test_a_nan_reaches_who_sees_it_and_nobody_else(kernels):
    case = Case([300, 270], [1, 8], (4, 2, 32))
    keys = case.kv_cache[0].flatten(0, 1)
    keys[case.slots(1, 270)[265], 1, 3] = float("nan")  # the second kv head: heads 2 and 3
    out = case.run().isnan().any(-1)
    assert not out[:4].any() and not out[:, :2].any()
    assert out[4:, 2:].all()
    case.queries[0, 1, 0] = float("nan")
    assert case.run()[0].isnan().all(-1).tolist() == [False, True, False, False]


def test_one_key_that_outweighs_all_others_gives_its_value(kernels):
    """One key that outweighs all others gives its value bit for bit.

    It is in the first chunk or in the last: the partial sums of the others are scaled to zero.
    """
    for position in (3, 610):
        case = Case([611], [1], (4, 2, 64))
        keys, values = case.kv_cache.flatten(1, 2)
        keys.mul_(0.01)
        case.queries[:] = keys[case.slots(0, 611)[position]].repeat_interleave(2, 0) * 3e5
        keys[case.slots(0, 611)[position]] *= 100
        expected = values[case.slots(0, 611)[position]].repeat_interleave(2, 0)
        assert torch.equal(case.run()[0], expected)


def test_queries_and_page_tables_that_are_not_contiguous(kernels):
    case = Case([300, 40], [1, 40])
    before = case.run()
    wide = torch.zeros(*case.queries.shape[:2], 100).bfloat16()
    wide[..., 7:71] = case.queries
    case.queries = wide[..., 7:71]
    object.__setattr__(case.batch, "page_table", case.batch.page_table.T.contiguous().T)
    assert same(case.run(), before)


@pytest.mark.parametrize(
    "shape, dtype, loss",
    [
        ((4, 2, 16), torch.bfloat16, 1 / 64),
        ((4, 2, 80), torch.bfloat16, 1 / 64),
        ((4, 2, 288), torch.bfloat16, 1 / 64),
        ((4, 2, 64), torch.float32, 1e-5),
        ((4, 2, 64), torch.float16, 1 / 64),
    ],
)
def test_what_has_no_kernel_goes_to_the_torch_body(kernels, shape, dtype, loss):
    case = Case([70, 300, 25], [1, 30, 25], shape)
    case.queries, case.kv_cache = case.queries.to(dtype), case.kv_cache.to(dtype)
    check(case, case.run(), loss)


def test_pages_that_are_not_contiguous_go_to_the_torch_body(kernels):
    case = Case([70, 300], [1, 30])
    case.kv_cache = torch.stack([case.kv_cache, case.kv_cache], -1)[..., 0]
    check(case, case.run(), 1 / 64)


def test_a_page_table_too_short_for_its_sequence_is_refused(kernels):
    case = Case([40], [1])
    object.__setattr__(case.batch, "seq_lens_cpu", [49])
    with pytest.raises(AssertionError):
        case.run()


def test_the_torch_body_copies_few_pages_at_once(no_kernels, monkeypatch):
    """The PyTorch implementation copies few pages at a time.

    Sequences one by one or all together give the same values within a bounded memory, except for
    rounding, since torch may add in another order for another batch.
    """
    case = Case([70, 1, 33, 200, 17], [1] * 5)
    whole = case.run()
    gathered = []
    sdpa = attention._sdpa

    def watched(queries, keys, *rest, **more):
        gathered.append(2 * keys.nbytes)
        return sdpa(queries, keys, *rest, **more)

    monkeypatch.setattr(attention, "_sdpa", watched)
    width = case.batch.page_table.shape[1] * case.kv_cache[0, 0].nbytes * 2
    monkeypatch.setattr(attention, "_GATHERED_BYTES", 2 * width + 1)
    torch.testing.assert_close(case.run(), whole, atol=2**-8, rtol=2**-7)
    assert gathered == [2 * width, 2 * width, width]


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("lens", [[1, 40, 300], [2, 57, 600]])
def test_without_a_causal_mask_each_query_sees_its_whole_sequence(lens, has_kernels, monkeypatch):
    """The queries of whole sequences get what each would get as the last token."""
    if not has_kernels:
        monkeypatch.setattr(native, "kernels", lambda: None)
    case = Case(lens, lens, (6, 2, 64))
    found = paged_attention(case.queries, case.kv_cache, case.batch, is_causal=False)
    for row, seq, _ in case.rows():
        assert (found[row].double() - case.row(row, seq, lens[seq]).double()).abs().max() < 0.02
    causal = case.run()
    assert not torch.equal(causal, found)
    last = torch.tensor(lens).cumsum(0) - 1
    assert (causal[last].double() - found[last].double()).abs().max() < 0.02
