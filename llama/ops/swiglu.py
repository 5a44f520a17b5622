"""The gate of the feed-forward block (SwiGLU; Shazeer, 2020): gate and up in, their product out."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(x: Tensor) -> Tensor:
    """x (T, 2F), the gate's columns first -> silu(gate) * up (T, F)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
