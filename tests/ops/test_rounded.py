"""Activations in int8: the definition against exact arithmetic, and the kernels against it."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from helpers.coded import TABLES, coded
from llama.kernels.cpu import native
from llama.ops import rounded
from llama.weights.choice import packed
from llama.weights.coded import Coded, hadamard
from llama.weights.groups import GroupedWeight


def rows(m: int, k: int, seed: int = 4) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_rounding_is_to_the_nearest_code_of_the_largest_magnitude():
    x = torch.zeros(1, 64)
    x[0, :3] = torch.tensor([1, -0.5, 0.25])
    x[0, 32:35] = torch.tensor([-2.0, 2.0, -0.0])
    result = rounded.round_rows(x, 32)
    assert result.codes[0, :4].tolist() == [127, -64, 32, 0]  # -63.5 becomes the even code
    assert result.codes[0, 32:36].tolist() == [-127, 127, 0, 0]
    scales = (torch.tensor([1.0, 2.0]) / 127).tolist()
    assert result.scales[0].tolist() == scales


def test_a_code_is_off_by_half_at_most_and_a_token_may_have_one_scale():
    x = rows(7, 96) * torch.logspace(-20, 20, 7)[:, None].bfloat16()
    for group in (32, 96):
        result = rounded.round_rows(x, group)
        groups = x.double().unflatten(1, (-1, group))
        exact = 127 * groups / groups.abs().amax(-1, keepdim=True)
        codes = result.codes.double().unflatten(1, (-1, group))
        assert (codes - exact).abs().max() <= 0.5 + 1e-5
        assert codes.abs().amax(-1).eq(127).all()
        assert result.scales.shape == (7, 96 // group)


def test_tiny_groups_are_zero_and_others_pass_on_what_is_not_finite():
    x = torch.ones(4, 32)
    x[0] = 2.0**-101
    x[1, 3] = torch.inf
    x[2, 5] = torch.nan
    x[3] = 0
    codes, scales = rounded.round_rows(x, 32)
    assert scales[0].item() == 0 == scales[3].item() and not codes[0].any() and not codes[3].any()
    assert scales[1].item() == torch.inf and scales[2].isnan().all()
    assert codes.isfinite().all()
    weight = rounded.IntegerWeight(torch.ones(2, 32), torch.ones(2, 1))
    out = rounded.multiply(rounded.RoundedRows(codes, scales), weight)
    assert out.isfinite().tolist() == [[True] * 2, [False] * 2, [False] * 2, [True] * 2]


def test_the_worked_example_of_four_bits():
    x = rounded.RoundedRows(torch.zeros(1, 32), torch.tensor([[0.01]]))
    x.codes[0, :2] = torch.tensor([127.0, -64.0])
    elements = torch.zeros(1, 32)
    elements[0, :2] = torch.tensor([3.0, -8.0])
    product = rounded.multiply(x, rounded.IntegerWeight(elements, torch.tensor([[0.5]])))
    assert product.item() == pytest.approx(4.465)
    offsets = torch.tensor([[2.0]])
    weight = rounded.IntegerWeight(elements, torch.tensor([[0.5]]), offsets)
    assert rounded.multiply(x, weight).item() == pytest.approx(4.465 + 63 * 0.01 * 2)


def test_a_fused_multiply_add_rounds_once():
    """It equals the exact value, rounded once, also where two roundings would differ."""
    random = torch.Generator().manual_seed(1)
    a, b, c = torch.randn(3, 400, generator=random).unbind()
    c *= torch.logspace(-12, 12, 400)
    # The product is 1 + 2**-11 + 2**-24, a tie in float32 that the sign of the addend decides.
    a[:2] = b[:2] = 1 + 2**-12
    c[0], c[1] = 2.0**-80, -(2.0**-80)
    a[2], b[2], c[2] = 1.5, 2.0, -3.0
    result = rounded.fused_multiply_add(a, b, c)
    for i, value in enumerate(result):
        exact = Fraction(a[i].item()) * Fraction(b[i].item()) + Fraction(c[i].item())
        below = torch.nextafter(value, torch.tensor(-torch.inf)).item()
        above = torch.nextafter(value, torch.tensor(torch.inf)).item()
        error = abs(Fraction(value.item()) - exact)
        assert error <= abs(Fraction(below) - exact), i
        assert error <= abs(Fraction(above) - exact), i
    assert result[0] > result[1]
    infinite = rounded.fused_multiply_add(torch.tensor(torch.inf), b[:1], c[:1])
    assert infinite.isinf().all()


@pytest.mark.parametrize("group", [16, 32, 96, 192])
@pytest.mark.parametrize("has_offsets", [False, True])
def test_a_product_is_that_of_the_rounded_rows(group, has_offsets):
    n, k = 8, 192
    random = torch.Generator().manual_seed(2)
    elements = torch.randint(-128, 128, (n, k), generator=random).float()
    scales, offsets = torch.rand(2, n, k // group, generator=random)
    weight = rounded.IntegerWeight(elements, scales, offsets if has_offsets else None)
    exact = elements.unflatten(1, (-1, group)) * scales[..., None].double()
    if has_offsets:
        exact = exact + offsets[..., None]
    for x_group in (32, k):
        x = rounded.round_rows(rows(5, k), x_group)
        values = x.codes.unflatten(1, (-1, x_group)) * x.scales[..., None].double()
        out = rounded.multiply(x, weight)
        sizes = values.flatten(1).abs() @ exact.flatten(1).abs().t()
        expected = values.flatten(1) @ exact.flatten(1).t()
        assert ((out - expected).abs() <= 4e-7 * sizes).all()
        alone = rounded.multiply(rounded.RoundedRows(x.codes[2:3], x.scales[2:3]), weight)
        assert torch.equal(alone, out[2:3])


def test_integer_sums_over_a_long_row_are_exact():
    """One scale per token and per row adds integers over all columns, up to 405B's widths."""
    k = 53248
    x = rounded.RoundedRows(torch.full((1, k), 127.0), torch.ones(1, 1))
    weight = rounded.IntegerWeight(torch.full((1, k), -128.0), torch.ones(1, 1))
    sums = rounded.multiply(x, weight)
    assert sums.item() == float(torch.tensor(-128 * 127 * k).float())


def test_sizes_that_have_no_pieces_are_refused():
    assert rounded.can_multiply(64, 16) and rounded.can_multiply(6656, 6656)
    assert not rounded.can_multiply(48, 16)
    assert not rounded.can_multiply(192, 48)


INTEGERS = [  # a format of test_grouped.py: table, (N, K), group, offsets, type of the scales
    ("symmetric", (64, 1056), 32, False, torch.float16),  # Q4_0
    ("unsigned", (34, 1024), 32, True, torch.uint8),  # Q4_K, rows that do not fill a block
    ("curved", (32, 2048), 32, False, torch.uint8),  # IQ4_XS
    ("unsigned", (32, 512), 16, True, torch.float16),
    ("unsigned", (96, 1024), 128, True, torch.float32),  # AWQ
    ("six bits", (64, 2080), 16, False, torch.float32),  # Q6_K
    ("bytes", (64, 2048), 32, False, torch.float16),  # Q8_0
    ("bytes", (33, 2080), 2080, False, torch.float32),
    ("bytes", (64, 3072), 1536, True, torch.float32),  # groups across the edge of a K block
    ("bytes", (32, 32), 32, False, torch.float32),
]


def activations(m: int, k: int) -> Tensor:
    """Return rows with outliers, ties, zeros, subnormal numbers and numbers that are not finite."""
    x = rows(m, k) * torch.logspace(-3, 3, m)[:, None].bfloat16()
    x[::5, 7] = 1000
    x[1::7] = 0
    x[2::7, :32] = 2.0**-120
    x[3::7, ::2] = -0.0
    x[4::7, :4] = torch.tensor([127, 0.5, 1.5, -2.5]).bfloat16()
    if m > 30:
        x[20, 5], x[21, 6], x[22, k - 1] = torch.inf, torch.nan, -torch.inf
    return x


@pytest.mark.parametrize("which", INTEGERS, ids=str)
@pytest.mark.parametrize("per_token", [False, True])
def test_a_product_has_the_bits_of_the_definition(integer_kernels, which, per_token, monkeypatch):
    """So it is with each instruction set, for a row alone and in any batch, on several threads."""
    held = packed(coded(*which))
    assert isinstance(held, GroupedWeight) and held.round_activations(per_token)
    x = activations(40, which[1][1])
    with monkeypatch.context() as patch:
        patch.setattr(native, "kernels", lambda: None)
        expected = held.linear(x, torch.float32)
    for m in (1, 2, 3, 4, 5, 6, 8, 14, 15, 40):
        out = held.linear(x[:m], torch.float32)
        assert torch.equal(out.nan_to_num(), expected[:m].nan_to_num()), m
        assert torch.equal(out.isnan(), expected[:m].isnan())
    many = held.linear(x[:15].repeat(18, 1), torch.float32)  # more than an M block
    assert torch.equal(many, expected[:15].repeat(18, 1))
    torch.set_num_threads(3)  # conftest restores the number
    assert torch.equal(held.linear(x[:15]), expected[:15].bfloat16())
    alone = held.linear(x[6:7], torch.float32)
    assert torch.equal(alone, expected[6:7])


def test_the_blocks_with_the_largest_products_come_first():
    products = torch.zeros(2, 1000)
    products[0, 999], products[0, 64], products[0, 70] = 3, 2, 1
    products[1] = -torch.inf
    products[1, 500], products[1, 900] = torch.nan, -5
    blocks = rounded.top_blocks(products)
    assert blocks.shape == (2, rounded.TOP_BLOCKS)
    assert blocks[0, :5].tolist() == [31, 2, 0, 1, 3]  # of equal ones, the first
    assert blocks[1, :3].tolist() == [28, 0, 1]
    assert rounded.top_blocks(products[:, :40])[0].tolist() == [0, 1]


TOPS = [  # which, (N, K), group, offsets, type of the scales
    ("symmetric", (1000, 96), 32, False, torch.float16),
    ("unsigned", (1000, 128), 16, True, torch.uint8),
    ("six bits", (544, 1056), 16, False, torch.float32),
    ("bytes", (545, 1056), 1056, False, torch.float32),
    ("bytes", (96, 2112), 1056, True, torch.float32),  # a group across the edge of a K block
]


@pytest.mark.parametrize("which", TOPS, ids=str)
def test_the_largest_products_are_those_of_rows_that_are_not_rounded(kernels, which, monkeypatch):
    """So it is with each instruction set, for a row alone and in any batch, on several threads."""
    n, k = which[1]
    held, plain = packed(coded(*which)), packed(coded(*which))
    assert isinstance(held, GroupedWeight) and held.round_activations(exact_top=True)
    assert plain.round_activations()
    x = rows(3, k)
    products = plain.linear(x, torch.float32)
    assert torch.equal(held.linear(x), plain.linear(x)), "only in float32"
    out = held.linear(x, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(native, "kernels", lambda: None)
        assert torch.equal(out, held.linear(x, torch.float32))
    blocks = torch.arange(n) // rounded.BLOCK
    is_top = (blocks == rounded.top_blocks(products)[..., None]).any(1)
    assert is_top.sum(1).max() <= rounded.TOP_BLOCKS * rounded.BLOCK
    assert torch.equal(out[~is_top], products[~is_top])
    exact = (x.double() @ held.exact().double().t()).float()
    assert ((out - exact)[is_top].abs() < 1e-3 * (products - exact).abs().max()).all()
    torch.set_num_threads(3)  # conftest restores the number
    assert torch.equal(held.linear(x[2:], torch.float32), out[2:])
    assert torch.equal(held.linear(x.repeat(4, 1), torch.float32), out.repeat(4, 1))


@pytest.mark.parametrize("table", ["unsigned", "six bits", "bytes"])
def test_the_largest_sums_do_not_overflow(integer_kernels, table):
    """All codes and all activations have their largest magnitude, in each combination of signs."""
    elements = TABLES[table]
    n, k = 32, 4096
    codes = torch.full((n, k), len(elements) - 1, dtype=torch.uint8)
    codes[::2] = 0
    group = k if table == "bytes" else 32
    file = Coded(codes, elements, torch.ones(n, k // group))
    x = torch.ones(2, k).bfloat16()
    x[1] = -1
    for per_token in (False, True):
        held = packed(file)
        assert isinstance(held, GroupedWeight) and held.round_activations(per_token)
        out = held.linear(x, torch.float32)
        expected = x.float() @ file.plain().t()
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("table", ["bytes", "symmetric"])
def test_parts_of_the_columns_have_the_codes_of_the_whole(integer_kernels, table):
    """Groups of 32 do not depend on the rank that has them; scales per token do."""
    group = 1024 if table == "bytes" else 32
    x = rows(20, 1024)
    x[:, 5] = 100
    for per_token in (False, True):
        whole = packed(coded(table, (64, 1024), group, False, torch.float32))
        found = torch.zeros(20, 64)
        for i in (0, 512):
            part = whole.part([slice(0, 64)], slice(i, i + 512))
            assert part is not None and part.round_activations(per_token)
            found += part.linear(x[:, i : i + 512].contiguous(), torch.float32)
        assert whole.round_activations(per_token)
        expected = whole.linear(x, torch.float32)
        error = (found - expected).norm() / expected.norm()
        assert error > 1e-3 if per_token else error < 1e-6


def test_an_adapter_reads_rows_that_are_not_rounded(integer_kernels):
    file = coded("symmetric", (64, 256), 32, False, torch.float32)
    down, up = rows(16, 256).float(), rows(64, 16).float()
    x = rows(20, 256)
    for is_rotated in (False, True):
        plain = packed(replace(file, is_rotated=is_rotated))
        adapted = packed(replace(file, is_rotated=is_rotated, down=down, up=up))
        assert plain.round_activations() and adapted.round_activations(exact_top=True)
        assert not adapted.exact_top
        turned = hadamard(x.float()).bfloat16() if is_rotated else x
        added = turned.double() @ down.double().t() @ up.double().t()
        difference = adapted.linear(x, torch.float32) - plain.linear(x, torch.float32)
        torch.testing.assert_close(difference.double(), added, rtol=1e-3, atol=2e-3)


def test_fractions_and_other_sizes_keep_their_activations(integer_kernels):
    for which in (
        ("e4m3", (32, 1024), 1024, False, torch.float32),
        ("symmetric", (32, 1056), 48, False, torch.float32),
        ("symmetric", (32, 1040), 16, False, torch.float32),
    ):
        held = packed(coded(*which))
        x = rows(3, which[1][1])
        before = held.linear(x)
        assert not held.round_activations()
        assert torch.equal(held.linear(x), before)
    halves = Coded(torch.zeros(32, 64).byte(), torch.arange(16) / 2, torch.ones(32, 2))
    assert not packed(halves).round_activations()
    assert not packed(rows(32, 64)).round_activations()
