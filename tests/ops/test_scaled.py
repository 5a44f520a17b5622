"""Products of rows and weights in e4m3, against PyTorch's own scaled product on the CPU."""

import math

import pytest
import torch
from torch import Tensor

from llama.ops import scaled
from llama.weights.bytes import MAX_EXACT_ROWS, Fp8Weight
from llama.weights.choice import check_activations, on_gpu, packed, round_activations

CPU = torch.device("cpu")
MANY = MAX_EXACT_ROWS + 3


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(n: int = 64, k: int = 128) -> Fp8Weight:
    found = on_gpu(numbers(n, k, seed=1).bfloat16(), "fp8", CPU)
    assert isinstance(found, Fp8Weight)
    return found


def test_the_definition_is_pytorch_s_product():
    x = scaled.round_rows(numbers(20, 64))
    w = scaled.round_rows(numbers(48, 64, seed=1))
    ours = scaled.multiply(x, w, torch.float32)
    try:
        theirs = torch._scaled_mm(
            x.codes, w.codes.t(), scale_a=x.scales, scale_b=w.scales.t().contiguous(),
            out_dtype=torch.bfloat16,
        )  # fmt: skip
    except RuntimeError:
        pytest.skip("this torch has no scales per row on the CPU")
    torch.testing.assert_close(ours.bfloat16(), theirs)


def test_rows_are_rounded_with_a_scale_each():
    x = torch.tensor(
        [[1.0, -0.5, 0.3, 0.0], [0.0] * 4, [1e30, 1.0, 0.0, -1e30], [math.nan, 1, 2, 3]]
    )
    rows = scaled.round_rows(x)
    assert rows.codes[:3].float().tolist() == [[448, -224, 128, 0], [0] * 4, [448, 0, 0, -448]]
    assert rows.scales.flatten()[:3].tolist() == pytest.approx([1 / 448, 1, 1e30 / 448])
    assert rows.scales[3].isnan() and rows.codes[3].float().isnan().any()


@pytest.mark.parametrize("m", [3, MANY])
def test_only_many_rows_are_rounded(m):
    """A weight multiplies exact rows up to MAX_EXACT_ROWS, and rounded ones beyond."""
    rounding, exact = weight(), weight()
    assert rounding.round_to_e4m3()
    x = numbers(m, 128).view(1, m, 128)
    got, right = rounding.linear(x), exact.linear(x)
    assert got.shape == (1, m, 64) and torch.equal(got, right) == (m <= MAX_EXACT_ROWS)
    rows = scaled.round_rows(x[0])
    rounded = rows.codes.float() * rows.scales
    torch.testing.assert_close(rounded @ exact.exact().T if m > 3 else right[0], got[0])
    assert (got - right).norm() < 0.04 * right.norm()


def test_what_cannot_be_rounded_is_an_error(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert check_activations("fp8", gpu, is_plain=False) == "fp8"
    with pytest.raises(
        ValueError, match=r"activations='fp8' needs matrices in e4m3 .* quantize='fp8'"
    ):
        check_activations("fp8", gpu, is_plain=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(
        ValueError, match=r"products in e4m3, but this GPU has none \(compute cap.* 8\.6"
    ):
        check_activations("fp8", gpu, is_plain=False)
    with pytest.raises(
        ValueError, match="activations='fp8' is for NVIDIA GPUs, not for cpu: leave"
    ):
        check_activations("fp8", CPU, is_plain=False)
    found = weight()
    round_activations({"wo": found, "w2": packed(numbers(32, 64).bfloat16())}, "fp8")
    assert found.row_scales is not None
    with pytest.raises(ValueError, match="needs matrices in e4m3 with one scale per row"):
        round_activations({"wo": packed(numbers(32, 64).bfloat16(), "int8")}, "fp8")
