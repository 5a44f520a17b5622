"""Root-mean-square normalisation (Zhang and Sennrich, 2019): rows in, rows of the same type out.

bf16 on the CPU has a kernel, in elementwise.cpp.
"""

import torch
from torch import Tensor

from llama.ops.cpu import native


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., E), weight (E) -> (..., E) in x's type; the mean of squares is taken in float32."""
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
