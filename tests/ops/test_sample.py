"""Sampling, with each kernel and without, against the rule computed in Python's integers."""

import functools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.kernels import KERNELS_RUN
from helpers.race import exponential, split_mix, winners
from llama.kernels.cpu import native
from llama.kernels.cpu.table import KERNELS
from llama.ops import sample as op
from llama.ops.sample import FIXED_ONE, SamplingRow

choose_ids = functools.partial(op.choose_ids, kernels=KERNELS)
sample_ids = functools.partial(op.sample_ids, kernels=KERNELS)
# Sizes around the kernel's blocks of 256 tokens, and one with more blocks than most top_k.
SIZES = (1, 2, 40, 255, 256, 257, 700, 5000)
SPREADS = (0.0, 0.3, 2.0, 8.0)


def by_hand(probs: Tensor, rule: SamplingRow) -> list[tuple[int, int]]:
    """Return the ids and weights that the definition keeps, found by sorting.

    `probs` (V) are relative to that of the most probable token.
    """
    weights = [int(p * FIXED_ONE) for p in probs.tolist()]
    floor = max(1, math.ceil(rule.min_p * FIXED_ONE))
    if rule.top_k > 0:
        floor = max(floor, sorted(weights, reverse=True)[: rule.top_k][-1])
    ordered = sorted((-w, i) for i, w in enumerate(weights) if w >= floor)
    limit = -sum(w for w, _ in ordered) * int(rule.top_p * 2**62) >> 62
    before, nucleus = 0, []
    for negative, i in ordered:
        if before <= limit:
            nucleus.append((i, -negative))
        before -= negative
    return nucleus


def random_rule(rng: random.Random, vocab: int) -> SamplingRow:
    return SamplingRow(
        temperature=rng.choice([1.0, 0.6, 2.0, rng.uniform(0.01, 3)]),
        min_p=rng.choice([0.0, 0.0, rng.random() ** 4, 1.0, 1e-13]),
        top_k=rng.choice([0, 0, -1, 1, 20, rng.randint(1, vocab + 3)]),
        top_p=rng.choice([1.0, 0.9, 0.0, rng.random(), 1 - 2**-40]),
    )


def random_case(
    rng: random.Random, vocab: int, rows: int
) -> tuple[Tensor, list[SamplingRow], list[int]]:
    """Return logits with many ties, rules, and uniforms."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    logits = torch.randn(rows, vocab, generator=generator) * rng.choice(SPREADS)
    rules = [random_rule(rng, vocab) for _ in range(rows)]
    uniforms = [rng.choice([0, 2**62 - 1, rng.getrandbits(62)]) for _ in range(rows)]
    return logits.bfloat16().float(), rules, uniforms


def check(logits: Tensor, rules: list[SamplingRow], uniforms: list[int]) -> None:
    peaks = logits.amax(-1)
    ids = sample_ids(logits, peaks, rules, torch.tensor(uniforms)).tolist()
    probs = op.relative_probs(logits, peaks, rules).cpu().numpy().tobytes()
    allowed = allowed_ids(probs, tuple(rules), tuple(uniforms))
    for row in zip(ids, allowed, rules, uniforms, strict=True):
        assert row[0] in row[1], row


@functools.cache  # each variant of the kernels gets the same rows
def allowed_ids(
    probs: bytes, rules: tuple[SamplingRow, ...], uniforms: tuple[int, ...]
) -> list[set[int]]:
    """Return the ids that each row may draw, given the bytes of its float32 weights (rows, V)."""
    rows = torch.frombuffer(bytearray(probs), dtype=torch.float32).view(len(rules), -1)
    return [winners(by_hand(*row[:2]), row[2]) for row in zip(rows, rules, uniforms, strict=True)]


@pytest.mark.parametrize("vocab", SIZES)
def test_a_draw_is_the_definitions(kernels, vocab):
    rng = random.Random(vocab)
    for _ in range(20 if vocab < 1000 else 5):
        check(*random_case(rng, vocab, 8))


@pytest.mark.parametrize("vocab", SIZES)
def test_torch_body(no_kernels, device, vocab):
    rng = random.Random(vocab)
    for _ in range(20 if vocab < 1000 else 5):
        logits, rows, uniforms = random_case(rng, vocab, 8)
        check(logits.to(device), rows, uniforms)


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.999999])
@pytest.mark.parametrize("slope", [0.0, 0.01, 1.0, 2.0])
def test_a_nucleus_that_lies_anywhere(kernels, slope, top_p):
    """A nucleus is found wherever it is: spread over all blocks, in a few of them, or in one.

    The weights follow Zipf's law.
    """
    ranks = torch.arange(1.0, 3001)
    shuffled = torch.randperm(3000, generator=torch.Generator().manual_seed(0))
    for order in (torch.arange(3000), shuffled):
        logits = (-slope * ranks.log())[order].repeat(5, 1)
        check(logits, [SamplingRow(top_p=top_p)] * 5, [i * 2**60 for i in range(4)] + [2**62 - 1])


@pytest.mark.parametrize("top_k", [1, 4, 5, 6, 1023, 1024, 1025])
def test_top_k_with_fewer_and_with_more_than_there_are_blocks(kernels, top_k):
    """top_k works with less and with more than the number of blocks.

    1,281 tokens are five blocks and a token. All the likely ones are in the third block.
    """
    logits = torch.full((4, 1281), -20.0)
    logits[:, 600:610] = torch.arange(10.0)
    logits[2:] = torch.randn(2, 1281, generator=torch.Generator().manual_seed(top_k))
    check(logits, [SamplingRow(top_k=top_k)] * 4, [0, 2**62 - 1, 2**61, 2**62 - 1])


def test_the_whole_vocabulary_as_likely_as_can_be(kernels):
    """A whole vocabulary of equal weights is exact.

    The sums of 128,256 maximal weights fit, and ties are cut at the right place.
    """
    logits = torch.zeros(3, 128_256)
    rules = [SamplingRow(), SamplingRow(top_p=0.5), SamplingRow(top_k=7, top_p=0.5)]
    uniforms = [2**62 - 1, 5, 7]
    ids = sample_ids(logits, logits[:, 0], rules, torch.tensor(uniforms)).tolist()
    for token, kept, uniform in zip(ids, (128_256, 64_129, 64_129), uniforms, strict=True):
        assert token in first_of_equals(kept, uniform)


@functools.cache
def first_of_equals(count: int, uniform: int) -> set[int]:
    return winners(((i, 1) for i in range(count)), uniform)


def test_with_each_kernel_an_id_is_that_of_torch(kernels, monkeypatch):
    """Each kernel gives the ids of PyTorch, as every race time has the same bits."""
    rng = random.Random(3)
    for vocab in (9, 300, 4000):
        logits, rules, uniforms = random_case(rng, vocab, 64)
        given = logits, logits.amax(-1), rules, torch.tensor(uniforms)
        found = sample_ids(*given)
        with monkeypatch.context() as patch:
            patch.setattr(native, "kernels", lambda: None)
            assert torch.equal(sample_ids(*given), found)


def test_times_are_those_of_the_generators_author():
    """Random times equal those of the generator's author.

    Vigna's splitmix64.c starts at 1234567, and ours is tested at the extremes of a row's start.
    """
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert split_mix(1234567, range(3)).tolist() == known
    for uniform in (0, 1234567, 2**62 - 1):
        n = torch.tensor([0, 1, 127, 2**19, 2**32, 2**32 + 500])
        found = [x % 2**64 for x in op.split_mix(torch.tensor(uniform), n).tolist()]
        assert found == split_mix(uniform, n).tolist()


@pytest.mark.parametrize("number", [0, 2**23 - 1, 2**64 - 2**23, 2**64 - 1, 2**63, 12345 << 23])
def test_a_time_is_exponential_at_both_ends(number):
    """A time is exponential at both ends.

    It is above 0 and within a few millionths of a logarithm. A tiny one is a multiple of 2**-44.
    """
    found = int(op._exponential(torch.tensor([number - (number >> 63 << 64)])))
    (exact,) = exponential(np.array([number], np.uint64)).tolist()
    assert found > 0 and abs(found / 2**44 - exact) <= 2**-44 + 1e-5 * found / 2**44


def test_any_number_of_threads_and_rows_gives_the_same_ids(kernels):
    """Any number of threads and rows gives the same ids.

    Rows with thousands of candidates take long enough for the threads to run at the same time. The
    ids are exact, as a row's weights are integers.
    """
    logits = torch.randn(64, 20_000, generator=torch.Generator().manual_seed(1)) * 0.3
    rules = [
        SamplingRow(),
        SamplingRow(top_p=0.9),
        SamplingRow(top_k=9000),
        SamplingRow(top_k=12_000, top_p=0.8),
    ] * 16
    peaks, numbers = logits.amax(-1), torch.tensor([i << 56 for i in range(64)])
    ids = sample_ids(logits, peaks, rules, numbers)
    for threads in (2, 2, 2, 3, 20):
        torch.set_num_threads(threads)
        assert torch.equal(sample_ids(logits, peaks, rules, numbers), ids)
    for row in range(8):
        alone = slice(row, row + 1)
        found = sample_ids(logits[alone], peaks[alone], rules[alone], numbers[alone])
        assert torch.equal(found, ids[alone])


def test_what_is_a_little_less_likely_than_min_p_is_not_kept(kernels):
    """A token slightly less likely than min_p is not kept.

    The weights are powers of 2 from 0 to -0.2, with a min_p between each two of them.
    """
    logits = torch.tensor([[0.0, -0.1, -0.1, -0.2, -0.2]]).expand(200, -1) * math.log(2)
    for min_p, kept in [(2**-0.25, {0, 1, 2, 3, 4}), (2**-0.15, {0, 1, 2}), (2**-0.05, {0})]:
        rules = [SamplingRow(min_p=min_p)] * 200
        assert {*sample_ids(logits, logits[:, 0], rules, torch.arange(200)).tolist()} == kept


@pytest.mark.parametrize(
    "rule", [SamplingRow(), SamplingRow(top_p=0.9), SamplingRow(top_k=3), SamplingRow(min_p=0.5)]
)
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_maximum_ends_and_harms_no_other(kernels, fault, rule):
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(0))
    peaks, numbers = logits.amax(-1), torch.tensor([2**61] * 3)
    ids = sample_ids(logits, peaks, [rule] * 3, numbers)
    broken = logits.clone()
    broken[1, 300:] = fault
    if fault == -math.inf:
        broken[1] = fault
    found = sample_ids(broken, broken.amax(-1), [rule] * 3, numbers)
    assert found[[0, 2]].tolist() == ids[[0, 2]].tolist()
    assert 0 <= found[1] < 600


def test_logits_in_any_layout_are_left_as_they_are(kernels):
    logits = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).T
    before, rules = logits.clone(), [SamplingRow(0.7, top_p=0.8)] * 3
    for rows in (logits, logits[:1].expand(3, -1)):
        assert not rows.is_contiguous()
        check(rows, rules, [2**60, 2**61, 2**62 - 1])
    assert torch.equal(logits, before)


@given(st.integers(0, 2**60 - 1), st.integers(0, 2**62))
def test_a_fixed_point_share_of_a_whole_number_is_exact(whole, share):
    assert int(op.share(torch.tensor([whole]), torch.tensor([share]))) == whole * share >> 62


@pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++")
def test_the_kernel_is_what_a_cpu_runs(monkeypatch):
    called = []

    def call(name: str, *args) -> int:
        called.append(name)
        return 0

    monkeypatch.setattr(native, "call", call)
    sample_ids(torch.zeros(1, 9), torch.zeros(1), [SamplingRow()], torch.tensor([0]))
    assert called == ["sample_workspace", "sample_ids"]


def test_the_top_token_is_the_first_of_the_largest(kernels):
    rng, inf, nan = random.Random(6), math.inf, math.nan
    for size in SIZES:
        rows = torch.tensor([rng.choices([-inf, -2.5, -0.0, 0.0, 1.25], k=size) for _ in range(7)])
        rows[1], rows[2, -1], rows[3, size // 2] = -inf, inf, nan
        row_max, ids = op.top_tokens(rows, KERNELS)
        wanted = [max(row) if not any(map(math.isnan, row)) else nan for row in rows.tolist()]
        torch.testing.assert_close(row_max, torch.tensor(wanted), rtol=0, atol=0, equal_nan=True)
        tops = zip(rows.tolist(), wanted, strict=True)
        assert ids.tolist() == [row.index(x) if math.isfinite(x) else -1 for row, x in tops]


@pytest.mark.parametrize(("top_p", "num_kept", "limit"), [(0.9, 13, 32.9), (1.0, 50, 85.4)])
@pytest.mark.parametrize("num_positions", [1, 1000])
def test_frequencies_are_those_of_the_distribution(num_positions, top_p, num_kept, limit):
    """Sampled frequencies follow the distribution.

    Chi-square of 20,000 draws, by seed alone and by 20 seeds x 1,000 positions. Of 50 tokens in
    three groups 13 are kept; with 12 degrees of freedom, chance exceeds 32.9 once in 1,000 cases,
    with 49 it exceeds 85.4.
    """
    num_draws = 20_000
    logits = torch.full((541,), -math.inf)
    logits[::11] = torch.tensor([i * 37 % 50 for i in range(50)]) * 0.15
    rule = SamplingRow(temperature=0.8, top_p=top_p)
    draws = range(num_draws)
    seeds = [i // num_positions for i in draws]
    positions = [1 + i % num_positions for i in draws]
    rows = logits.expand(num_draws, -1)
    ids = choose_ids(rows, [rule] * num_draws, seeds, positions)
    counts = ids.bincount(minlength=541).double()
    probs = (logits.double() / rule.temperature).softmax(0)
    kept = dict(by_hand(probs / probs.max(), rule))
    weights = torch.tensor([kept.get(i, 0) for i in range(541)]).double()
    assert len(kept) == num_kept
    assert not counts[weights == 0].any()
    expected = weights / weights.sum() * num_draws
    assert ((counts - expected) ** 2 / expected)[weights > 0].sum() < limit


@pytest.mark.parametrize(
    "rule",
    [
        SamplingRow(top_p=0.5),
        SamplingRow(top_k=20),
        SamplingRow(min_p=0.1),
        SamplingRow(top_p=0.8, top_k=30, min_p=0.02),
    ],
)
def test_nothing_filtered_is_ever_drawn(rule):
    logits = torch.randn(500, generator=torch.Generator().manual_seed(3)) * 2
    kept = {token for token, _ in by_hand((logits - logits.max()).exp(), rule)}
    assert 1 < len(kept) < 100
    ids = choose_ids(logits.expand(4000, -1), [rule] * 4000, range(4000), [1] * 4000)
    assert set(ids.tolist()) <= kept
