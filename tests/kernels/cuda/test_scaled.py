"""Rounding to e4m3, and products of rounded rows: Triton kernels against PyTorch."""

import math

import pytest
import torch
from torch import Tensor

from helpers.kernels import KERNELS_RUN, interpreted
from llama.kernels.cuda import quantized
from llama.kernels.cuda.table import table
from llama.ops import scaled
from llama.ops.batch import ForwardContext
from llama.ops.kernels import NO_KERNELS
from llama.weights import bytes as byte_weights
from llama.weights.bytes import Fp8Weight
from llama.weights.choice import on_gpu

KERNELS = interpreted(dtypes={torch.float16, torch.float32, torch.bfloat16})


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


@pytest.mark.skipif(not KERNELS_RUN, reason="the CPU's kernels pack the weights")
@pytest.mark.parametrize("chunk", [None, 32 * 128])
def test_products_of_rounded_rows(launches, monkeypatch, chunk):
    """Products are those of the definition, with as few launches as possible.

    A weight in one chunk needs no copy of the product, and its scales are ready.
    """
    plain = numbers(96, 128, seed=1).bfloat16()
    found, right = (on_gpu(plain, "fp8", torch.device("cpu")) for _ in range(2))
    assert isinstance(found, Fp8Weight) and isinstance(right, Fp8Weight)
    blocks = found.blocks()
    assert blocks is not None
    elements = quantized.codes(blocks, 32, 96).view(scaled.E4M3).float()
    assert torch.equal(elements, found.elements(torch.arange(32, 96)) / found.element_factor)
    assert found.round_to_e4m3() and right.round_to_e4m3()
    monkeypatch.setattr(byte_weights, "MAX_EXACT_ROWS", 4)
    x = numbers(5, 128)
    want = right.linear(x, context=ForwardContext(kernels=NO_KERNELS))
    launches.clear()
    context = ForwardContext(kernels=interpreted({}))
    with monkeypatch.context() as patch:
        if chunk is None:
            patch.setattr(torch, "cat", None)
            patch.setattr(byte_weights, "unpack_scales", None)
        else:
            patch.setattr("llama.kernels.cuda.table._CHUNK_ELEMENTS", chunk)
        got = found.linear(x, context=context)
    torch.testing.assert_close(got, want)
    assert launches == ["round_rows_kernel", *["codes_kernel"] * (1 if chunk is None else 3)]
