"""The gate of the feed-forward block (SwiGLU; Shazeer, 2020): gate and up in, their product out.

bf16 on the CPU has a kernel, in elementwise.cpp.
"""

import torch.nn.functional as F
from torch import Tensor

from llama.ops.cpu import native


def silu_mul(x: Tensor) -> Tensor:
    """x (T, 2F), the gate's columns first -> silu(gate) * up (T, F)."""
    if native.has_kernel(x) and x.shape[-1] % 64 == 0:
        x = x.contiguous()
        rows, width = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, width)
        native.call("silu_mul_bf16", x, out, rows, width)
        return out
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
