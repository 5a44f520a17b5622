"""The kernels for ARM, compiled here and run by QEMU: some tests of the kernels, on other CPUs.

Each test is one of another file, with each instruction set of ARM. Integer products have the bits
of the definition in PyTorch, as on each machine; other results are within the tolerances that hold
on x86.
"""

import pytest
import torch
from ops import test_attention, test_elementwise, test_grouped, test_linear, test_rounded
from ops.test_linear import (  # noqa: F401 - run with the fixture `kernels` of this file
    test_infinities_and_nans_pass_through,
    test_rounding_is_to_the_nearest_and_to_even_at_ties,
    test_the_kernels_pack_as_torch_does,
)
from ops.test_rounded import (  # noqa: F401
    test_the_largest_products_are_those_of_rows_that_are_not_rounded,
    test_the_largest_sums_do_not_overflow,
)
from test_fused import make_model, run, run_modules, same

from helpers import emulated
from llama.weights.blocks import BlockedWeight
from llama.weights.choice import packed

EACH = pytest.mark.parametrize


@pytest.fixture(params=emulated.ARM)
def kernels(request, monkeypatch) -> str:
    """Run a test with each instruction set of ARM; the value is its name."""
    if not emulated.CAN_EMULATE:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64")
    emulated.use(request.param, monkeypatch)
    return request.param


@pytest.fixture
def integer_kernels(kernels: str) -> str:
    return kernels


@EACH("number, per_token", [*enumerate([False, True] * 5), (7, False)])
def test_an_integer_product_has_the_bits_of_the_definition(
    integer_kernels, number, per_token, monkeypatch
):
    which = test_rounded.INTEGERS[number]
    test_rounded.test_a_product_has_the_bits_of_the_definition(
        integer_kernels, which, per_token, monkeypatch
    )


@EACH("m, n, k", [*test_linear.SHAPES[:7], (13, 33, 2050), (257, 32, 34)])
def test_a_product_of_bf16(kernels, m, n, k):
    test_linear.test_a_packed_product_is_the_product(kernels, m, n, k)


@EACH("quantize", [None, "int8", "fp8", "int4"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(kernels, quantize):
    """Products of one row, of pairs of rows, of odd rows and of a K that has no fours of k."""
    for k in (130, 1088) if quantize is None else (1088,):
        weight = packed(test_linear.numbers(64, k, seed=1), quantize)
        assert not isinstance(weight, test_linear.PlainWeight)
        x = test_linear.numbers(26, k)
        x[3] *= 2.0**-124  # its products are subnormal
        whole = weight.linear(x, torch.float32)
        for m in (1, 2, 3, 5, 6, 7, 12, 13):
            assert torch.equal(weight.linear(x[:m], torch.float32), whole[:m]), m
        assert torch.equal(weight.linear(x[3:4], torch.float32), whole[3:4])


def test_threads_give_the_same_bits(kernels):
    product = BlockedWeight.pack(test_linear.numbers(320, 64, seed=1)).linear
    x = test_linear.numbers(20, 64)
    alone = product(x)
    torch.set_num_threads(2)  # conftest restores the number
    assert torch.equal(product(x), alone)


@EACH("which", [test_grouped.FORMATS[i] for i in (0, 3, 5, 8, 9, 11, 13)], ids=str)
def test_a_product_of_quantized_weights(kernels, which):
    file = test_grouped.coded(*which)
    held, weight = packed(file), file.plain()
    assert isinstance(held, test_grouped.GroupedWeight)
    assert torch.equal(held.exact(), weight)
    x = test_grouped.rows(14, weight.shape[1])
    whole = test_grouped.check(held, weight, x, is_rounded=False)
    assert torch.equal(held.linear(x[:1], torch.float32), whole[:1])
    ids = torch.tensor([0, 31])
    assert torch.equal(held.rows(ids), weight[ids].bfloat16())


@EACH("number", [0, 1, 8, 12])
def test_attention_over_pages(kernels, number):
    test_attention.test_paged_attention_is_attention(kernels, number, 1)
    test_attention.test_a_cache_in_8_bits(kernels, number)


def test_what_stands_between_products(kernels, monkeypatch):
    test_elementwise.test_rms_norm(kernels, monkeypatch, 3, 2048)
    test_elementwise.test_silu_mul(kernels, monkeypatch, 3, 2048)
    test_elementwise.test_rope_and_store(kernels, monkeypatch, 37, 96)
    test_elementwise.test_a_store_in_8_bits(kernels, 37, 96)


@EACH("quantize", [None, "int4"])
def test_a_step_of_all_layers_gives_the_bytes_of_the_modules(kernels, quantize):
    model, sequences = make_model(quantize=quantize), [(5, 1), (17, 20)]
    assert same(run(model, sequences), run_modules(model, sequences))
