"""Root-mean-square normalization (Zhang and Sennrich, 2019): rows in, rows of the same type out.

Layers and kernels must not be known here.
"""

import torch
from torch import Tensor

from llama.ops.kernels import NO_KERNELS, Kernels


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    kernels: Kernels = NO_KERNELS,
) -> Tensor:
    """Return normalized rows; the mean of squares is computed in float32.

    Args:
        x: The rows (..., E).
        weight: The weight (E).
        eps: What is added to the mean of squares.
        kernels: The kernels that may run.

    Returns:
        The rows (..., E) in the type of x.
    """
    normed: Tensor | None = kernels.run("rms_norm", x, weight, eps)
    if normed is not None:
        return normed
    wide = x.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    scale = torch.rsqrt(mean_square + eps)
    return (wide * scale).type_as(x) * weight


def add_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    kernels: Kernels = NO_KERNELS,
) -> tuple[Tensor, Tensor]:
    """Return x + delta, and its `rms_norm`.

    Args:
        x: The rows (..., E).
        delta: What is added to them, (..., E).
        weight: The weight (E) of the norm.
        eps: What is added to the mean of squares.
        kernels: The kernels that may run.

    Returns:
        The sum and its norm, (..., E), both in the type of x.
    """
    both: tuple[Tensor, Tensor] | None = kernels.run("add_norm", x, delta, weight, eps)
    if both is not None:
        return both
    x = x + delta
    return x, rms_norm(x, weight, eps, kernels)
