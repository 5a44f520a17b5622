"""Rounding to e4m3, and products of rounded rows: Triton kernels against PyTorch."""

import math

import pytest
import torch
from torch import Tensor

from helpers.kernels import KERNELS_RUN, interpreted
from llama.kernels.cuda import scaled as gpu
from llama.kernels.cuda.launch import Tile
from llama.kernels.cuda.table import NAMES, table
from llama.ops import scaled
from llama.ops.batch import ForwardContext
from llama.ops.kernels import NO_KERNELS
from llama.weights.bytes import Fp8Weight
from llama.weights.choice import on_gpu

DTYPES = (torch.float16, torch.float32, torch.bfloat16)
KERNELS = interpreted(dtypes=DTYPES)
TWO_KERNELS = table({*NAMES, "round_rows"}, DTYPES)  # norm and SwiGLU are written, then rounded


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(rows: scaled.ScaledRows) -> tuple[Tensor, Tensor]:
    """Return the bits of codes and scales, where each NaN has the same."""
    codes = rows.codes.view(torch.uint8)
    is_nan = codes & 127 == 127
    return codes.where(~is_nan, 127), rows.scales.nan_to_num(-1.0).view(torch.int32)


def all_sizes(k: int, dtype: torch.dtype) -> Tensor:
    """Return rows of all magnitudes of a type, of zeros, of ties, and with NaN and infinities."""
    finite = torch.finfo(dtype)
    exponents = torch.linspace(math.log2(finite.smallest_normal) - 9, math.log2(finite.max) - 3, 20)
    sizes = torch.cat([2**exponents, torch.zeros(1), torch.ones(6)])
    x = (numbers(len(sizes), k).clamp(-4, 4) * sizes[:, None]).to(dtype)
    # The scale is 1, and all elements lie halfway between two codes.
    positive = torch.arange(126, dtype=torch.uint8).view(scaled.E4M3).float()
    ties = (positive[1:] + positive[:-1]) / 2
    x[-6] = torch.cat([ties, -ties]).repeat(-(-k // 250))[:k].to(dtype)
    x[-6, k // 2] = 448
    x[-5, 3], x[-4, 3], x[-3, -1] = math.nan, math.inf, -math.inf
    x[-2, 1:3] = torch.tensor([math.nan, math.inf])
    x[-1] = -0.0
    return x


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("k", [32, 96, 1000])
def test_rows_are_rounded_to_the_bits_of_pytorch(poisoned, launches, dtype, k):
    x = all_sizes(k, dtype)
    with poisoned():
        got = scaled.round_rows(x, KERNELS)
    assert launches == ["round_rows_kernel"]
    want = scaled.round_rows(x)
    assert torch.equal(bits(got)[0], bits(want)[0])
    assert torch.equal(bits(got)[1], bits(want)[1])
    assert got.scales[-5:-1].isfinite().sum() == 0 and want.codes[-6].float().unique().numel() > 15
    assert got.scales[-1] == 1


def test_rows_that_are_not_in_one_piece(launches):
    x = numbers(4, 2, 64).half()[:, 1]
    for found, right in zip(
        scaled.round_rows(x, KERNELS), scaled.round_rows(x.clone()), strict=True
    ):
        assert torch.equal(found.float(), right.float())
    none = scaled.round_rows(x[:0], KERNELS)
    assert none.codes.shape == (0, 64) and none.scales.shape == (0, 1)
    assert launches == ["round_rows_kernel"]
    # Where the kernel is not in use, PyTorch rounds.
    scaled.round_rows(x, table({"linear"}, {x.dtype}))
    assert launches == ["round_rows_kernel"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [96, 1000])
def test_a_norm_is_rounded_as_if_it_were_written_first(poisoned, launches, dtype, k):
    """The bits are those of two kernels, which round to the type of the model in between."""
    x, delta = numbers(9, k).to(dtype), numbers(9, k, seed=1).to(dtype)
    x[2], delta[2] = 0, 0
    x[5, 3] = math.nan
    weight = numbers(k, seed=2).to(dtype)
    for change in (delta, None):
        launches.clear()
        with poisoned():
            total, got = scaled.round_norm(x, change, weight, 1e-5, KERNELS)
        assert launches == ["round_norm_kernel"]
        right, want = scaled.round_norm(x, change, weight, 1e-5, TWO_KERNELS)
        assert launches[1:] == ["norm_kernel", "round_rows_kernel"]
        assert torch.equal(total.nan_to_num(9.0), right.nan_to_num(9.0))
        assert all(map(torch.equal, bits(got), bits(want)))
        assert got.scales.isnan().flatten().tolist() == [i == 5 for i in range(9)]
        exact = x.float() if change is None else x.float() + change.float()
        exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.float()
        found = got.codes.float() * got.scales
        # Half of a step of e4m3, or of its subnormal numbers, and the roundings before.
        bound = exact.abs() * (2**-4 + 2**-6) + exact.abs().amax(-1, keepdim=True) * 2**-18
        assert (((found - exact).abs() <= bound) | exact.isnan()).all()


@pytest.mark.parametrize("f", [96, 1000])
def test_swiglu_is_rounded_as_if_it_were_written_first(poisoned, launches, monkeypatch, f):
    x = numbers(7, 2 * f).half()
    x[3, :f] = 0
    with poisoned():
        got = scaled.round_silu_mul(x, KERNELS)
    want = scaled.round_silu_mul(x, TWO_KERNELS)
    assert launches == ["round_silu_mul_kernel", "silu_mul_kernel", "round_rows_kernel"]
    assert all(map(torch.equal, bits(got), bits(want)))
    gate, up = x.float().chunk(2, -1)
    exact = gate.sigmoid() * gate * up
    found = got.codes.float() * got.scales
    bound = exact.abs() * (2**-4 + 2**-8) + exact.abs().amax(-1, keepdim=True) * 2**-18
    assert ((found - exact).abs() <= bound).all()
    monkeypatch.setattr(gpu, "MAX_GATED", 64)  # wider rows have a kernel for each step
    assert all(map(torch.equal, bits(scaled.round_silu_mul(x, KERNELS)), bits(want)))
    assert launches[3:] == ["silu_mul_kernel", "round_rows_kernel"]


@pytest.mark.parametrize("m", [1, 15, 31])
@pytest.mark.parametrize("tile", [*gpu.candidates(4096, 1024), Tile(32, 128, 2, 2)], ids=str)
def test_few_rows_in_e4m3_are_multiplied(poisoned, tile, m):
    """Products of codes are exact, so that sums differ by the rounding of float32 alone.

    The last programs have rows beyond those of the weight.
    """
    n, k = 80, 1024
    x, weight = scaled.round_rows(numbers(m, k)), scaled.round_rows(numbers(n, k, seed=1))
    with poisoned():
        got = gpu.few_rows(x, weight, tile, torch.float32)
    codes, others = x.codes.double(), weight.codes.double()
    scales = x.scales.double() * weight.scales.double().T
    bound = (codes.abs() @ others.abs().T) * scales * 2 * k * 2**-24
    assert ((got - codes @ others.T * scales).abs() <= bound).all()


@pytest.mark.skipif(not KERNELS_RUN, reason="the CPU's kernels pack the weights")
def test_how_many_rows_decides_which_product_runs(launches, monkeypatch):
    """Fewer than 32 rows have a kernel, others PyTorch's product with fast sums; all are rounded.

    A weight is put into rows once, not at each product.
    """
    calls = []

    def library(*codes: Tensor, scale_a, scale_b, out_dtype, use_fast_accum) -> Tensor:
        calls.append(use_fast_accum)
        x, weight = (part.float() for part in codes)
        return (x @ weight * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", library)
    held = on_gpu(numbers(96, 256, seed=1).bfloat16(), "fp8", torch.device("cpu"))
    assert isinstance(held, Fp8Weight) and held.round_to_e4m3() and held.blocks() is None
    for m, expected in ((0, 0), (1, 0), (31, 0), (32, 1), (300, 1)):
        x = numbers(m, 256).bfloat16()
        want = held.linear(x, context=ForwardContext(kernels=NO_KERNELS))
        launches.clear()
        calls.clear()
        got = held.linear(x, context=ForwardContext(kernels=KERNELS))
        torch.testing.assert_close(got, want)
        assert calls == [True] * expected
        few = ["few_scaled_rows_kernel"] * (m > 0 and not expected)
        assert launches == ["round_rows_kernel", *few][m == 0 :]
    x = numbers(3, 256).bfloat16()
    held.linear(x, context=ForwardContext(kernels=table({"scaled"}, {x.dtype})))
    assert calls == [True, True], "without the kernel the library multiplies few rows, too"
