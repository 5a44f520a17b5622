"""RMSNorm, rotary embedding with store, and SwiGLU: each kernel against PyTorch."""

from functools import partial

import pytest
import torch
from torch import Tensor

from helpers.batches import batch_of, in_8_bits
from llama.kernels.cpu import native
from llama.kernels.cpu.table import KERNELS
from llama.ops import norm, swiglu
from llama.ops import rope as rotary
from llama.ops.attention import paged_attention
from llama.ops.kv_cache import quantize
from llama.ops.rope import precompute_freqs_cis

CPU = torch.device("cpu")
rms_norm = partial(norm.rms_norm, kernels=KERNELS)
rope_and_store = partial(rotary.rope_and_store, kernels=KERNELS)
silu_mul = partial(swiglu.silu_mul, kernels=KERNELS)
# (T, elements): the last is large enough for threads
SHAPES = [(1, 32), (1, 2048), (3, 96), (40, 2048)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def torch_body(op, *args, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(native, "kernels", lambda: None)
        return op(*args)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16).int()


def same(a: Tensor, b: Tensor) -> bool:
    """Check that results are equal bit for bit.

    Our kernels add the values of a row in one order, wherever the row is.
    """
    return torch.equal(bits(a), bits(b))


def check_rounding(a: Tensor, b: Tensor, most: int = 1) -> None:
    """Check that bf16 results are equal, except one in a thousand within `most` bf16 steps."""
    assert a.shape == b.shape and a.dtype is b.dtype is torch.bfloat16
    a, b = (torch.where(bits(x) < 0, -(bits(x) & 0x7FFF), bits(x)) for x in (a, b))
    assert (a - b).abs().max() <= most
    assert (a != b).sum() <= max(1, a.numel() // 1000)


class Rope:
    """qkv of T tokens at positions from 5 on, 6 query heads and 2 kv heads, and their pages."""

    def __init__(self, count: int, head_dim: int, device: torch.device = CPU) -> None:
        self.qkv = numbers(count, 10, head_dim).to(device)
        self.freqs_cis = precompute_freqs_cis(head_dim, count + 5, 5e5)[5:].to(device)
        self.kv_cache = numbers(2, 7, 8, 2, head_dim, seed=1).to(device)
        self.slots = torch.randperm(56, generator=torch.Generator().manual_seed(2))[:count].to(
            device
        )

    def run(self) -> tuple[Tensor, Tensor]:
        pages = self.kv_cache.clone()
        return rope_and_store(self.qkv, self.freqs_cis, pages, self.slots), pages


@pytest.mark.parametrize("rows, width", SHAPES)
def test_rms_norm(kernels, monkeypatch, rows, width):
    x, weight = numbers(rows, width) * 3, numbers(width, seed=1)
    plain = torch_body(rms_norm, x, weight, 1e-5, monkeypatch=monkeypatch)
    # A value that is rounded twice may be two bf16 steps off, where torch adds in another order.
    check_rounding(rms_norm(x, weight, 1e-5), plain, most=2)
    tiny = x * 1e-4  # the mean of squares is below eps
    plain = torch_body(rms_norm, tiny, weight, 1e-5, monkeypatch=monkeypatch)
    check_rounding(rms_norm(tiny, weight, 1e-5), plain, most=2)


def test_the_norm_is_rounded_before_its_weight(kernels):
    """The normalized value is rounded before it is multiplied by the weight, as in Meta's code.

    1.0039 is rounded to 1 or 1.0078 first, and is then multiplied by 257 / 256.
    """
    x = torch.ones(1, 32).bfloat16()
    x[0, :16] = 1.0078125
    weight = torch.full((32,), 1.0078125).bfloat16()
    scale = (x.float().pow(2).mean() + 1e-5).rsqrt()
    expected = (x.float() * scale).bfloat16().float() * weight.float()
    assert not torch.equal(expected.bfloat16(), (x.float() * scale * weight.float()).bfloat16())
    # The results are exact because no value is near the middle between two bf16 numbers.
    assert torch.equal(rms_norm(x, weight, 1e-5), expected.bfloat16())


@pytest.mark.parametrize("rows, width", SHAPES)
def test_silu_mul(kernels, monkeypatch, rows, width):
    x = numbers(rows, 2 * width) * 4
    check_rounding(silu_mul(x), torch_body(silu_mul, x, monkeypatch=monkeypatch))


def test_silu_mul_at_every_gate_that_bf16_has(kernels, monkeypatch):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = torch.cat([every, torch.ones(2**16).bfloat16()])[None]
    out, plain = silu_mul(x)[0], torch_body(silu_mul, x, monkeypatch=monkeypatch)[0]
    assert torch.equal(out.isnan(), plain.isnan())
    normal = ~plain.isnan() & ((plain.abs() > 1e-36) | (plain == 0))
    check_rounding(out[normal], plain[normal])
    assert (out[~normal & ~plain.isnan()].abs() <= 1e-36).all()


@pytest.mark.parametrize("count, head_dim", [(1, 64), (3, 32), (37, 96), (56, 128)])
def test_rope_and_store(kernels, monkeypatch, count, head_dim):
    rope = Rope(count, head_dim)
    queries, pages = rope.run()
    plain_queries, plain_pages = torch_body(rope.run, monkeypatch=monkeypatch)
    check_rounding(queries, plain_queries)
    check_rounding(pages[0], plain_pages[0])
    assert same(pages[1], plain_pages[1])
    untouched = torch.ones(56, dtype=torch.bool)
    untouched[rope.slots] = False
    assert same(pages.flatten(1, 2)[:, untouched], rope.kv_cache.flatten(1, 2)[:, untouched])


@pytest.mark.parametrize("count, head_dim", [(3, 32), (37, 96), (20, 256)])
def test_a_store_in_8_bits(kernels, count, head_dim):
    """A store in 8 bits writes the bytes of the definition, from keys and values rounded to bf16.

    No other slot is written. Rows of zeros, tiny and huge values are among them.
    """
    rope = Rope(count, head_dim)
    for row, size in enumerate((0.0, 2.0**-120, 3e36)):
        rope.qkv[row] *= size
    queries, plain = rope.run()
    rope.kv_cache = in_8_bits(rope.kv_cache)
    found_queries, found = rope.run()
    assert same(found_queries, queries) and torch.equal(found, in_8_bits(plain))


def test_numbers_in_8_bits_are_off_by_half_a_unit():
    x = numbers(40, 3, 64) * torch.logspace(-25, 30, 40)[:, None, None].bfloat16()
    whole, units = quantize(x)
    found, largest = whole * units.double(), x.double().abs().amax(-1, keepdim=True)
    assert ((found - x.double()).abs() <= largest / 127 * 0.503).all()  # the scale is a bf16
    again = quantize(found.float())
    assert torch.equal(again[0], whole) and torch.equal(again[1], units)
    whole, units = quantize(torch.zeros(2, 32))
    assert not whole.any() and units.isfinite().all()
    x[0, 0, 5] = float("nan")
    assert quantize(x)[1].isnan().nonzero().tolist() == [[0, 0, 0]]


def test_torch_bodies(no_kernels, device):
    """The PyTorch norm and gate agree with float64, in float32."""
    x, weight = numbers(9, 96).float().to(device) * 3, numbers(96, seed=1).float().to(device)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, rtol=1e-5, atol=1e-6)
    gate, up = x.double().chunk(2, dim=-1)
    exact = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(silu_mul(x).double(), exact, rtol=1e-5, atol=1e-6)


def test_rope_and_store_by_hand(no_kernels, device):
    """Rotation equals complex multiplication in float64, one number per pair, for its position."""
    rope = Rope(3, 32, device)
    rope.qkv, rope.kv_cache = rope.qkv.float(), rope.kv_cache.float()
    queries, pages = rope.run()
    pairs = torch.view_as_complex(rope.qkv.double().unflatten(-1, (-1, 2)))
    frequencies = 5e5 ** (-torch.arange(0, 32, 2, device=device).double() / 32)
    angles = torch.arange(5, 8, device=device)[:, None] * frequencies
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None])
    exact = turned.flatten(-2)
    torch.testing.assert_close(queries.double(), exact[:, :6], rtol=1e-5, atol=1e-5)
    keys, values = pages.flatten(1, 2)[:, rope.slots]
    torch.testing.assert_close(keys.double(), exact[:, 6:8], rtol=1e-5, atol=1e-5)
    assert torch.equal(values, rope.qkv[:, 8:])  # values are copied


def test_a_row_gives_the_same_bytes_alone_in_a_batch_and_on_any_number_of_threads(kernels):
    x, weight, rope = numbers(70, 2048), numbers(2048, seed=1), Rope(56, 128)
    normed, gated, (queries, pages) = rms_norm(x, weight, 1e-5), silu_mul(x), rope.run()
    for row in range(0, 56, 7):
        one = x[row : row + 1]
        assert same(rms_norm(one, weight, 1e-5), normed[row : row + 1])
        assert same(silu_mul(one), gated[row : row + 1])
    for threads in (2, 3):
        torch.set_num_threads(threads)  # conftest restores the number
        assert same(rms_norm(x, weight, 1e-5), normed)
        assert same(silu_mul(x), gated)
        for mine, before in zip(rope.run(), (queries, pages), strict=True):
            assert same(mine, before)


def test_rows_that_are_not_contiguous(kernels):
    wide, weight = numbers(5, 300), numbers(64, seed=1)
    x = wide[:, 11:75]
    assert same(rms_norm(x, weight, 1e-5), rms_norm(x.contiguous(), weight, 1e-5))
    assert same(silu_mul(x), silu_mul(x.contiguous()))
    rope = Rope(5, 32)
    before = rope.run()
    rope.qkv = torch.stack([rope.qkv, rope.qkv], -1)[..., 0]
    rope.freqs_cis = torch.stack([rope.freqs_cis, rope.freqs_cis], 1)[:, 0]
    for mine, plain in zip(rope.run(), before, strict=True):
        assert same(mine, plain)


@pytest.mark.parametrize(
    "width, dtype", [(20, torch.bfloat16), (32, torch.float32), (64, torch.float16)]
)
def test_what_has_no_kernel_goes_to_the_torch_body(kernels, monkeypatch, width, dtype):
    x, weight = numbers(3, width).to(dtype), numbers(width, seed=1).to(dtype)
    # Results are equal bit for bit: both sides are the same PyTorch calls of the same sizes.
    plain = torch_body(rms_norm, x, weight, 1e-5, monkeypatch=monkeypatch)
    assert torch.equal(rms_norm(x, weight, 1e-5), plain)
    assert torch.equal(silu_mul(x), torch_body(silu_mul, x, monkeypatch=monkeypatch))
    rope = Rope(3, width)
    rope.qkv, rope.kv_cache = rope.qkv.to(dtype), rope.kv_cache.to(dtype)
    for mine, other in zip(rope.run(), torch_body(rope.run, monkeypatch=monkeypatch), strict=True):
        assert torch.equal(mine, other)


def test_what_fits_goes_to_the_kernels(kernels, monkeypatch):
    called = []

    def call(name: str, *args) -> int:
        called.append(name)
        return 0

    monkeypatch.setattr(native, "call", call)
    x, rope = numbers(2, 64), Rope(2, 64)
    rms_norm(x, x[0], 1e-5)
    silu_mul(x)
    queries, pages = rope.run()
    batch = batch_of(torch.tensor([[0]]), [0, 1], [1], [1], [1])
    paged_attention(queries[:1], pages, batch.with_kernels(KERNELS))
    names = ["rms_norm_bf16", "silu_mul_bf16", "rope_and_store_bf16"]
    assert called == [*names, "attention_workspace", "paged_attention_bf16"]
