"""Products of rows and weights in e4m3, against PyTorch's own scaled product on the CPU."""

import math

import pytest
import torch
from torch import Tensor

from helpers.kernels import KERNELS_RUN
from llama.ops import scaled
from llama.weights.bytes import Fp8Weight
from llama.weights.choice import (
    check_activations,
    default_activations,
    on_gpu,
    packed,
    round_activations,
)

CPU = torch.device("cpu")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(n: int = 64, k: int = 128) -> Fp8Weight:
    found = on_gpu(numbers(n, k, seed=1).bfloat16(), "fp8", CPU)
    assert isinstance(found, Fp8Weight)
    return found


def test_the_definition_is_pytorch_s_product():
    x = scaled.round_rows(numbers(20, 64))
    w = scaled.round_rows(numbers(48, 64, seed=1))
    ours = scaled.linear(x, w, torch.float32)
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


@pytest.mark.parametrize("is_on_cpu", [False, True])
def test_every_row_is_rounded_by_itself(is_on_cpu):
    """A row has the bits that it has alone, in the layout of a CPU and in that of a GPU."""
    plain = numbers(64, 128, seed=1).bfloat16()
    found = packed(plain.clone(), "fp8") if is_on_cpu else weight()
    assert isinstance(found, Fp8Weight)
    exact = found.exact()
    assert found.round_to_e4m3() and torch.equal(found.exact(), exact)
    assert torch.equal(found.plain(), exact.bfloat16())
    x = numbers(300, 128).bfloat16().view(1, 300, 128)
    x[0, 7] *= 1e6
    got = found.linear(x, torch.float32)
    assert got.shape == (1, 300, 64)
    rows = scaled.round_rows(x[0])
    expected = (rows.codes.double() * rows.scales.double()) @ exact.double().T
    torch.testing.assert_close(got[0].double(), expected, rtol=2**-14, atol=1e-5)
    assert (got[0] - x[0].float() @ exact.T)[:7].norm() > 0.01 * got[0, :7].norm()
    if KERNELS_RUN and is_on_cpu:  # PyTorch's product of one row may add in another order
        assert torch.equal(got[:, 7:8], found.linear(x[:, 7:8], torch.float32))
    assert torch.equal(got[0], found.product(rows, torch.float32))
    again = found.refilled(plain.float()) if is_on_cpu else found
    assert torch.equal(got, again.linear(x, torch.float32)), "also after other weights are loaded"


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
    assert default_activations("fp8", gpu) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert default_activations("fp8", gpu) == "fp8"
    assert default_activations("fp8", CPU) is None and check_activations("fp8", CPU, is_plain=False)
    with pytest.raises(
        ValueError, match="activations='fp8' is for CPUs and NVIDIA GPUs, not for mps: leave"
    ):
        check_activations("fp8", torch.device("mps"), is_plain=False)
    found = weight()
    round_activations({"wo": found, "w2": packed(numbers(32, 64).bfloat16())}, "fp8")
    assert found.rounds_to_e4m3
    in_int8 = {"wo": packed(numbers(32, 64).bfloat16(), "int8")}
    round_activations(in_int8, "fp8", where_possible=True)
    with pytest.raises(ValueError, match="needs matrices in e4m3 with one scale per row"):
        round_activations(in_int8, "fp8")
