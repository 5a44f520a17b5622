"""Weights of 4 and 8 bits against the values of a file and float64, with each kernel variant."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.coded import TABLES, coded
from helpers.weights import sylvester
from llama.kernels.cpu import native
from llama.weights.bytes import BytesWeight, Fp8Weight
from llama.weights.choice import check_quantize, packed
from llama.weights.coded import Coded, hadamard
from llama.weights.groups import GroupedWeight
from llama.weights.nibbles import NibblesWeight
from llama.weights.plain import PlainWeight

FORMATS = [  # table, (N, K), group size, offsets, type of the stored scales: bytes are k-quants'
    ("symmetric", (64, 1056), 32, False, torch.float16),  # Q4_0
    ("unsigned", (64, 1056), 32, True, torch.float16),  # Q4_1
    ("unsigned", (64, 1024), 32, True, torch.uint8),  # Q4_K
    ("curved", (32, 2048), 32, False, torch.uint8),  # IQ4_XS
    ("unsigned", (96, 1024), 128, True, torch.float32),  # AWQ
    ("symmetric", (32, 1056), 16, False, torch.float16),  # Q3_K
    ("symmetric", (32, 3072), 3072, False, torch.float32),
    ("six bits", (64, 2048), 16, False, torch.uint8),  # Q6_K
    ("six bits", (64, 2080), 16, False, torch.float32),
    ("bytes", (64, 576), 192, True, torch.float16),  # groups across the edge of a K block
    ("bytes", (64, 3072), 1536, True, torch.float32),  # a group longer than a K block
    ("e4m3", (96, 1088), 1088, False, torch.float32),
    ("e4m3", (32, 2048), 1024, False, torch.float32),
    ("unsigned", (34, 1024), 32, True, torch.uint8),  # rows that do not fill the last block
    ("six bits", (50, 2048), 16, False, torch.uint8),
    ("bytes", (63, 576), 192, True, torch.float16),
    ("e4m3", (100, 1088), 1088, False, torch.float32),
]


def rows(m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(4)).bfloat16()


def check(held: GroupedWeight, weight: Tensor, x: Tensor, *, is_rounded: bool) -> Tensor:
    """Check that sums are within the loss of float32 additions or, with tiles, of bf16 weights."""
    out = held.linear(x, torch.float32)
    size = x.double().abs() @ weight.double().abs().T
    off = (out - x.double() @ weight.double().T).abs()
    assert (off <= size * (2**-8 if is_rounded else 2e-6)).all()
    return out


@pytest.mark.parametrize("which", FORMATS, ids=str)
def test_a_product_is_that_with_the_weights_of_the_file(kernels, request, which):
    file = coded(*which)
    held, weight = packed(file), file.plain()
    assert isinstance(held, GroupedWeight)
    assert torch.equal(held.exact(), weight)  # bit for bit: no value is changed
    assert held.scales.dtype is which[-1]
    x, groups = rows(300, weight.shape[1]), file.scale.shape[1] + 2 * (file.offset is not None)
    is_rounded = "amx" in request.node.callspec.params["kernels"] and groups > 1
    whole = check(held, weight, x, is_rounded=is_rounded)
    for m in (1, 2, 5, 14, 15, 16, 33, 257):  # a row alone has the bits of any batch
        assert torch.equal(held.linear(x[:m], torch.float32), whole[:m]), m
    torch.set_num_threads(3)  # conftest restores the number
    assert torch.equal(held.linear(x, torch.float32), whole)
    torch.set_num_threads(1)
    ids = torch.tensor([[0, 31], [weight.shape[0] - 1, 5]])
    assert torch.equal(held.rows(ids), weight[ids].bfloat16())
    for outside in (-1, weight.shape[0]):
        with pytest.raises(IndexError):
            held.rows(torch.tensor([0, outside]))


ADDED = [  # rank of an adapter, whether x is rotated, (N, K): each case and both at once
    (16, False, (96, 1056)), (5, False, (32, 64)), (48, False, (64, 2080)), (256, False, (32, 512)),
    (0, True, (64, 2048)), (0, True, (32, 32)), (16, True, (64, 256)),
    (5, False, (33, 64)), (200, True, (71, 256)),
]  # fmt: skip


@pytest.mark.parametrize(("rank", "is_rotated", "shape"), ADDED, ids=str)
def test_an_adapter_is_added_and_x_is_rotated(kernels, request, rank, is_rotated, shape):
    """An adapter is added and x is rotated, both in float32 sums; only a rotated x is rounded."""
    (n, k), file = shape, coded("symmetric", shape, 32, False, torch.float32)
    weight = file.plain().double()
    if rank:
        down, up = (rows(rank, k) / k**0.5).float(), rows(n, rank).float()
        file = replace(file, down=down, up=up)
        weight += up.double() @ down.double()
    x, rotation = rows(70, k), sylvester(k) if is_rotated else torch.eye(k).double()
    held = packed(replace(file, is_rotated=is_rotated))
    assert isinstance(held, NibblesWeight)
    torch.testing.assert_close(held.exact(), (weight @ rotation).float(), rtol=1e-4, atol=1e-4)
    out, turned = held.linear(x, torch.float32), x.double() @ rotation
    size = turned.abs() @ (weight.abs() if not rank else weight.abs() + up.abs() @ down.abs()).T
    loses = 2**-8 if is_rotated or "amx" in request.node.callspec.params["kernels"] else 3e-6
    assert ((out - turned @ weight.T).abs() <= size * loses).all()
    for m in (1, 3, 5, 16, 17, 33):  # a row alone has the bits of any batch
        assert torch.equal(held.linear(x[:m], torch.float32), out[:m]), m
    torch.set_num_threads(3)  # conftest restores the number
    assert torch.equal(held.linear(x, torch.float32), out)
    assert torch.equal(held.linear(x[:7]), out[:7].bfloat16())


def test_a_rotation_is_sympys_walsh_hadamard_transform():
    from sympy import fwht  # the import takes half a second

    x = rows(3, 64).float()
    theirs = [[float(number) for number in fwht(row)] for row in x.tolist()]
    torch.testing.assert_close(hadamard(x), torch.tensor(theirs) / 8)


def test_an_adapter_that_bf16_cannot_hold_is_merged(kernels):
    file = coded("symmetric", (32, 64), 32, False, torch.float32)
    for down, up in (
        (torch.randn(4, 64), torch.ones(32, 4)),
        (torch.ones(300, 64), torch.ones(32, 300)),
    ):
        held = packed(replace(file, down=down, up=up))
        assert not isinstance(held, GroupedWeight)
        assert torch.equal(held.plain(), (file.plain() + up @ down).bfloat16())


def test_codes_lie_as_packed_weight_describes(kernels):
    """Codes are laid out as PackedWeight describes: the words of a row, and the bytes of scales."""
    codes = (torch.arange(64 * 256) % 8).view(64, 256).byte()
    scale = torch.full((64, 8), 0.25)
    held = packed(Coded(codes, torch.arange(-8.0, 8), scale))
    assert isinstance(held, NibblesWeight)
    assert held.values[1, 3, 7].item() == 0x75316420 and held.values.shape == (2, 32, 32)
    assert held.scales.dtype is torch.float16 and held.scales.shape == (2, 8, 1, 32)
    odd = packed(Coded(codes, torch.arange(-8.0, 8), scale + 2**-20))
    assert odd.scales.dtype is torch.float32


@pytest.mark.parametrize(
    "changes",
    [
        {"codes": (32, 60)}, {"group": 8},
        {"table": torch.linspace(0, 1, 17)}, {"table": torch.arange(200.0)},
    ],
    ids=["columns", "group", "fractions", "range"],
)  # fmt: skip
def test_codes_that_fit_no_format_become_bf16(changes, kernels):
    asked: dict[str, Any] = {"codes": (32, 64), "group": 32, "table": TABLES["bytes"]} | changes
    n, k = asked["codes"]
    codes = torch.randint(0, len(asked["table"]), (n, k), dtype=torch.uint8)
    file = Coded(codes, asked["table"], torch.ones(n, k // min(asked["group"], k // 2)))
    held = packed(file)
    assert not isinstance(held, GroupedWeight)
    assert torch.equal(held.plain(), file.plain(torch.bfloat16))


def test_without_kernels_codes_become_bf16(no_kernels):
    file = coded(*FORMATS[0])
    held = packed(file)
    assert isinstance(held, PlainWeight) and torch.equal(held.plain(), file.plain(torch.bfloat16))


def least_squares(plain: Tensor) -> Tensor:
    """Fit groups of 32 by their smallest and largest value: the error that a search must beat."""
    groups = plain.float().unflatten(1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    scale = ((high - low) / 15).masked_fill(high == low, 1)
    return (((groups - low) / scale).round() * scale + low).flatten(1)


@pytest.mark.parametrize(("k", "bits"), [(512, 4.625), (96, 5)])
def test_four_bits_are_closer_than_those_between_the_extremes(kernels, k, bits):
    plain = rows(64, k) * torch.logspace(-3, 1, 64)[:, None].bfloat16()
    plain[3], plain[4], plain[5, :32] = 0, 0.5, -0.25
    held = packed(plain.clone(), "int4")
    assert type(held) is NibblesWeight
    assert held.nbytes * 8 == bits * 64 * k == 8 * NibblesWeight.num_bytes(64, k)
    exact, weight = held.exact(), plain.float()
    assert (exact[3] == 0).all() and torch.allclose(exact[4], weight[4], rtol=2e-3)
    assert torch.allclose(exact[5, :32], weight[5, :32], rtol=1e-2)
    ours, theirs = ((x - weight).square().sum(1) for x in (exact, least_squares(plain)))
    assert ours[6:].sum() < 0.9 * theirs[6:].sum() and (ours[6:] < 1.1 * theirs[6:]).all()
    check(held, held.exact(), rows(20, k), is_rounded=True)


def test_fp8_is_off_by_a_sixteenth_at_most(kernels):
    plain = rows(64, 128)
    held = packed(plain.clone(), "fp8")
    assert type(held) is Fp8Weight and held.nbytes == Fp8Weight.num_bytes(64, 128)
    off = (held.exact() - plain.float()).abs()
    largest = plain.float().abs().amax(1, keepdim=True)
    assert (off <= plain.float().abs() / 16 + largest / 448 / 1024).all()
    assert torch.allclose(held.exact().abs().amax(1, keepdim=True), largest, rtol=1e-6)
    check(held, held.exact(), rows(20, 128), is_rounded=False)


@pytest.mark.parametrize("quantize", ["int8", "fp8", "int4"])
def test_rows_that_do_not_fill_a_block_are_rounded_as_in_whole_blocks(kernels, quantize):
    whole = torch.cat([rows(50, 256), rows(64, 256)[50:]])
    expected, held = packed(whole.clone(), quantize), packed(whole[:50].clone(), quantize)
    assert isinstance(held, GroupedWeight) and isinstance(expected, GroupedWeight)
    assert held.shape == (50, 256) and held.is_whole() and held.is_finite
    assert torch.equal(held.exact(), expected.exact()[:50]) and not held.has_empty_row
    x = rows(7, 256)
    assert torch.equal(held.linear(x), expected.linear(x)[:, :50])


def test_four_bits_need_the_kernels(no_kernels):
    told = "quantize='int4' needs this project's CPU kernels"
    with pytest.raises(ValueError, match=told):
        check_quantize("int4", torch.bfloat16, torch.device("cpu"))
    assert check_quantize("int8", torch.bfloat16, torch.device("cpu")) == "int8"
    held, faulty = (packed(x, "int8") for x in (rows(32, 64), rows(32, 64) / 0))
    assert type(held) is BytesWeight
    assert (held.is_finite, faulty.is_finite) == (True, False)
    assert native.kernels() is None
