"""Root-mean-square normalization (Zhang and Sennrich, 2019): rows in, rows of the same type out.

bf16 on the CPU has a kernel, in elementwise.cpp; bf16 and fp16 on a GPU have one in
triton/elementwise.py. Layers must not be known here.
"""

import torch
from torch import Tensor

from llama.ops.cpu import native
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    kernels: KernelSet = TORCH_ONLY,
) -> Tensor:
    """Return normalized rows; the mean of squares is computed in float32.

    Args:
        x: The rows (..., E).
        weight: The weight (E).
        eps: What is added to the mean of squares.
        kernels: The Triton kernels that may run.

    Returns:
        The rows (..., E) in the type of x.
    """
    if kernels.has("add_norm", x, weight):
        from llama.ops.triton import elementwise

        return elementwise.add_norm(x, None, weight, eps)[1]
    if native.has_kernel(x, weight):
        x = x.contiguous()
        weight = weight.contiguous()
        width = x.shape[-1]
        num_rows = x.numel() // width
        out = torch.empty_like(x)
        native.call("rms_norm_bf16", x, weight, out, num_rows, width, float(eps))
        return out
    wide = x.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    scale = torch.rsqrt(mean_square + eps)
    return (wide * scale).type_as(x) * weight


def add_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    kernels: KernelSet = TORCH_ONLY,
) -> tuple[Tensor, Tensor]:
    """Return x + delta, and its `rms_norm`.

    Args:
        x: The rows (..., E).
        delta: What is added to them, (..., E).
        weight: The weight (E) of the norm.
        eps: What is added to the mean of squares.
        kernels: The Triton kernels that may run.

    Returns:
        The sum and its norm, (..., E), both in the type of x.
    """
    if kernels.has("add_norm", x, delta, weight):
        from llama.ops.triton import elementwise

        return elementwise.add_norm(x, delta, weight, eps)
    x = x + delta
    return x, rms_norm(x, weight, eps, kernels)
