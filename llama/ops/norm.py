"""Root-mean-square normalisation (Zhang and Sennrich, 2019): rows in, rows of the same type out.

bf16 on the CPU has a kernel, in elementwise.cpp; bf16 and fp16 on a GPU in triton/elementwise.py.
"""

import torch
from torch import Tensor

from llama.ops.cpu import native
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet


def rms_norm(x: Tensor, weight: Tensor, eps: float, kernels: KernelSet = TORCH_ONLY) -> Tensor:
    """x (..., E), weight (E) -> (..., E) in x's type; the mean of squares is taken in float32."""
    if kernels.has("add_norm", x, weight):
        from llama.ops.triton import elementwise

        return elementwise.add_norm(x, None, weight, eps)[1]
    if native.has_kernel(x, weight):
        x, width = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        native.call(
            "rms_norm_bf16", x, weight.contiguous(), out, x.numel() // width, width, float(eps)
        )
        return out
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).type_as(x) * weight


def add_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, kernels: KernelSet = TORCH_ONLY
) -> tuple[Tensor, Tensor]:
    """x and delta (..., E), weight (E) -> x + delta, and its `rms_norm`, both in x's type."""
    if kernels.has("add_norm", x, delta, weight):
        from llama.ops.triton import elementwise

        return elementwise.add_norm(x, delta, weight, eps)
    x = x + delta
    return x, rms_norm(x, weight, eps, kernels)
