"""Products of rows with a weight in e4m3, where the rows are rounded to e4m3 as well.

In: rows of activations, and the codes of a weight (N, K), both with one scale per row. Out: the
product. On a GPU, PyTorch's scaled product multiplies the codes, twice as fast as bf16; elsewhere,
and in other types, the definition does:

    scale = max|x| / 448, and 1 for a row of zeros
    code = x / scale, rounded to the nearest number of e4m3
    out = the sum of the products of codes, times the scale of x and that of the weight

How weights are stored, and kernels, must not be known here.

Shapes: M rows, in any leading dimensions; N outputs, K inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llama.ops.kernels import NO_KERNELS, Kernels

E4M3 = torch.float8_e4m3fn
MAX_E4M3 = 448.0
STEP = 16  # N and K must be multiples of it for PyTorch's product


class ScaledRows(NamedTuple):
    """Rows, or a weight, in e4m3.

    Attributes:
        codes: (M, K) e4m3.
        scales: (M, 1) float32. An element is its code times the scale of its row.
    """

    codes: Tensor
    scales: Tensor


def round_rows(x: Tensor, kernels: Kernels = NO_KERNELS) -> ScaledRows:
    """Return rows (M, K) in e4m3; a row with NaN or infinity becomes NaN.

    Args:
        x: The rows.
        kernels: The kernels that may run.
    """
    rounded: tuple[Tensor, Tensor] | None = kernels.run("round_rows", x)
    if rounded is not None:
        return ScaledRows(*rounded)
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    # By a tensor: on a GPU, PyTorch multiplies by the inverse of a Python number.
    scales = largest / torch.full_like(largest, MAX_E4M3)
    scales = scales.masked_fill(scales == 0, 1)
    codes = (wide / scales).clamp(-MAX_E4M3, MAX_E4M3).to(E4M3)
    return ScaledRows(codes, scales)


def multiply(x: ScaledRows, weight: ScaledRows, dtype: torch.dtype) -> Tensor:
    """Return the product (M, N) of rows and a weight of N rows.

    Args:
        x: The rows.
        weight: The weight, whose N and K are multiples of `STEP`.
        dtype: The type of the result. PyTorch's product has bf16; in others, or on a CPU, the
            definition is computed.
    """
    if not x.codes.is_cuda or dtype is not torch.bfloat16:
        return multiply_exactly(x, weight.codes.float(), weight.scales, dtype)
    out: Tensor = torch._scaled_mm(
        x.codes,
        weight.codes.t(),
        scale_a=x.scales,
        scale_b=weight.scales.t().contiguous(),
        out_dtype=dtype,
    )
    return out


def multiply_exactly(x: ScaledRows, elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product (M, N) of rows and a weight as it is defined, with sums in float32.

    Args:
        x: The rows.
        elements: The codes of the weight (N, K), in float32.
        scales: The scales of its rows (N, 1), in float32.
        dtype: The type of the result.
    """
    sums = x.codes.float() @ elements.t()
    return (sums * x.scales * scales.t()).to(dtype)
