"""RMSNorm, rotary embedding with store, and SwiGLU: Triton kernels against PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.kernels import INTERPRETED
from helpers.rounding import SINGLE
from llama.kernels.cuda import elementwise
from llama.ops.kernels import NO_KERNELS, Kernels
from llama.ops.kv_cache import FORMATS
from llama.ops.norm import add_norm, rms_norm
from llama.ops.rope import RopeScaling, precompute_freqs_cis, rope_and_store
from llama.ops.swiglu import silu_mul

OPS = ("add_norm", "rope_and_store", "silu_mul")


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def both(monkeypatch, poisoned) -> Callable[[Callable[[Kernels], Any]], tuple[Any, Any]]:
    """A function both(run) that returns the results of `run` with the kernels and with PyTorch."""

    def run_both(run: Callable[[Kernels], Any]) -> tuple[Any, Any]:
        with poisoned():
            got = run(INTERPRETED)
        with monkeypatch.context() as patch:
            for name in OPS:
                patch.setattr(elementwise, name, None)  # a call of the PyTorch function would fail
            return got, run(NO_KERNELS)

    return run_both


def check(got: Tensor, want: Tensor) -> None:
    """Check results up to the order of a sum and the last bit of an exponential.

    Sums have at most 1,000 terms, none of them negative. In fp16 the differences are rounded away,
    except for one value and one in a thousand, which may be rounded the other way twice.
    """
    assert got.dtype is want.dtype and got.shape == want.shape
    if got.dtype is torch.float16:
        torch.testing.assert_close(got, want, rtol=2**-9, atol=0)
        assert (got != want).sum() <= 1 + got.numel() / 1000
    else:
        torch.testing.assert_close(got, want, rtol=1000**0.5 * SINGLE, atol=1e-7)


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (2, 2, 64), (5, 1000), (0, 64)])
def test_norms(both, dtype, shape):
    x, delta = (numbers(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = numbers(shape[-1], dtype=dtype, seed=2)
    for eps in (1e-5, 0.5):
        got, want = both(lambda kernels, eps=eps: add_norm(x, delta, weight, eps, kernels))
        assert torch.equal(got[0], want[0])  # one sum of two values each
        check(got[1], want[1])
        check(*both(lambda kernels, eps=eps: rms_norm(x, weight, eps, kernels)))


def test_rows_that_are_not_in_one_piece(both, dtype):
    x, weight = numbers(4, 2, 64, dtype=dtype), numbers(64, dtype=dtype)
    rows = x[:, 1]
    check(*both(lambda kernels: rms_norm(rows, weight, 1e-5, kernels)))
    check(*both(lambda kernels: add_norm(rows, rows, weight, 1e-5, kernels)[1]))
    check(*both(lambda kernels: silu_mul(rows, kernels)))


@pytest.mark.parametrize(
    "count, heads, head_dim", [(1, (4, 2), 32), (7, (6, 3), 64), (3, (8, 1), 16)]
)
def test_rope_and_store(both, dtype, count, heads, head_dim):
    """Rotary embedding with store has the bits of PyTorch.

    Both make the same four products and two sums in float32, in the slots to be written and no
    others.
    """
    n_heads, n_kv_heads = heads
    qkv = numbers(count, n_heads + 2 * n_kv_heads, head_dim, dtype=dtype)
    freqs_cis = precompute_freqs_cis(head_dim, 5000, 5e5, RopeScaling(8.0))[
        4000 : 4000 + 9 * count : 9
    ]
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(2))[:count]
    before = numbers(2, 6, 4, n_kv_heads, head_dim, dtype=dtype, seed=1)

    def run(kernels: Kernels) -> tuple[Tensor, Tensor]:
        kv_cache = before.clone()
        return rope_and_store(qkv, freqs_cis, kv_cache, slots, kernels), kv_cache

    got, want = both(run)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_store_in_8_bits_hides_no_nan(both):
    qkv = numbers(2, 3, 16, dtype=torch.float32)
    qkv[0, 2, 5] = float("nan")
    freqs_cis, slots = precompute_freqs_cis(16, 2, 5e5), torch.tensor([3, 1])

    def run(kernels: Kernels) -> Tensor:
        kv_cache = torch.zeros(2, 1, 4, 1, 18, dtype=torch.int8)
        rope_and_store(qkv, freqs_cis, kv_cache, slots, kernels)
        return FORMATS["int8"].load(kv_cache[1], slots, torch.float32).isnan().flatten(1)

    for found in both(run):
        assert found.all(1).tolist() == [True, False] and not found[1].any()


@pytest.mark.parametrize("n_kv_heads, head_dim", [(2, 32), (1, 64)])
def test_a_store_in_8_bits(both, dtype, n_kv_heads, head_dim):
    """A store in 8 bits has the bytes of PyTorch.

    Rows of zeros, and of the smallest and largest values, are among them.
    """
    qkv = numbers(7, 4 + 2 * n_kv_heads, head_dim, dtype=dtype)
    for row, size in enumerate((0.0, torch.finfo(dtype).tiny, torch.finfo(dtype).max / 8)):
        qkv[row] *= size
    freqs_cis = precompute_freqs_cis(head_dim, 7, 5e5)
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(2))[:7]
    before = torch.arange(2 * 24 * n_kv_heads * (head_dim + 2)) % 251

    def run(kernels: Kernels) -> tuple[Tensor, Tensor]:
        kv_cache = before.char().view(2, 6, 4, n_kv_heads, head_dim + 2)
        return rope_and_store(qkv, freqs_cis, kv_cache, slots, kernels), kv_cache

    got, want = both(run)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("shape", [(1, 160), (3, 2, 64), (2, 2 * 1030), (0, 64)])
def test_silu_mul(both, dtype, shape):
    x = numbers(*shape, dtype=dtype) * 4
    x[..., :2] = torch.tensor([-80.0, 80.0])  # the extremes of the exponential
    check(*both(lambda kernels: silu_mul(x, kernels)))


def test_what_the_kernels_do_not_take_stays_with_torch(monkeypatch):
    """Inputs that the kernels do not support are computed by PyTorch.

    They are another dtype, a cache that is not contiguous, and a head dim that is not a power of
    two.
    """
    for name in OPS:
        monkeypatch.setattr(elementwise, name, None)
    x = numbers(3, 64, dtype=torch.bfloat16)
    add_norm(x, x, x[0], 1e-5, INTERPRETED)
    rms_norm(x.half(), x[0].float(), 1e-5, INTERPRETED)
    silu_mul(x, INTERPRETED)
    kv_cache = numbers(2, 12, 4, 1, 32, dtype=torch.float32)
    qkv, slots = numbers(3, 6, 32, dtype=torch.float32), torch.arange(3)
    freqs = precompute_freqs_cis(32, 3, 5e5)
    rope_and_store(qkv, freqs, kv_cache[:, ::2], slots, INTERPRETED)
    kv_cache, qkv = kv_cache[..., :24].contiguous(), qkv[..., :24]
    freqs = precompute_freqs_cis(24, 3, 5e5)
    rope_and_store(qkv, freqs, kv_cache, slots, INTERPRETED)
