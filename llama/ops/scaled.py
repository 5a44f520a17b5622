"""Products of rows with a weight in e4m3, where the rows are rounded to e4m3 as well.

In: rows of activations, and the codes of a weight (N, K), both with one scale per row. Out: the
product. This is the definition, which also runs where there are no kernels:

    scale = max|x| / 448, and 1 for a row of zeros
    code = x / scale, rounded to the nearest number of e4m3
    out = the sum of the products of codes, times the scale of x and that of the weight

Whether and how a row is rounded depends on nothing but the row. How weights are stored, and
kernels, must not be known here.

Shapes: M rows; N outputs, K inputs; E model dim, F FFN dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llama.ops.kernels import NO_KERNELS, Kernels
from llama.ops.norm import add_norm, rms_norm
from llama.ops.swiglu import silu_mul

E4M3 = torch.float8_e4m3fn
MAX_E4M3 = 448.0


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


def round_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    kernels: Kernels = NO_KERNELS,
) -> tuple[Tensor, ScaledRows]:
    """Return x + delta, and the rounded rows of its `llama.ops.norm.rms_norm`.

    Args:
        x: The rows (M, E).
        delta: What is added to them, (M, E), if anything is.
        weight: The weight (E) of the norm.
        eps: What is added to the mean of squares.
        kernels: The kernels that may run.
    """
    both: tuple[Tensor, Tensor, Tensor] | None = kernels.run("round_norm", x, delta, weight, eps)
    if both is not None:
        total, *rounded = both
        return total, ScaledRows(*rounded)
    if delta is None:
        return x, round_rows(rms_norm(x, weight, eps, kernels), kernels)
    total, normed = add_norm(x, delta, weight, eps, kernels)
    return total, round_rows(normed, kernels)


def round_silu_mul(x: Tensor, kernels: Kernels = NO_KERNELS) -> ScaledRows:
    """Return the rounded rows (M, F) of `llama.ops.swiglu.silu_mul` of rows (M, 2F).

    Args:
        x: The rows: the columns of the gate, then those of up.
        kernels: The kernels that may run.
    """
    rounded: tuple[Tensor, Tensor] | None = kernels.run("round_silu_mul", x)
    if rounded is not None:
        return ScaledRows(*rounded)
    return round_rows(silu_mul(x, kernels), kernels)


def linear(
    x: ScaledRows, weight: ScaledRows, dtype: torch.dtype, kernels: Kernels = NO_KERNELS
) -> Tensor:
    """Return the product (M, N) of rows and a weight of N rows, with sums in float32.

    Args:
        x: The rows.
        weight: The weight.
        dtype: The type of the result.
        kernels: The kernels that may run.
    """
    for name in ("few_scaled_linear", "scaled_linear"):
        out: Tensor | None = kernels.run(name, x, weight, dtype)
        if out is not None:
            return out
    sums = x.codes.float() @ weight.codes.float().t()
    return (sums * x.scales * weight.scales.t()).to(dtype)
