"""Root-mean-square normalisation (Zhang and Sennrich, 2019): rows in, rows of the same type out."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (T, E), weight (E) -> (T, E) in x's type; the mean of squares is taken in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).type_as(x) * weight
