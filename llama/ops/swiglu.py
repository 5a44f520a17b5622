"""The gate of the feed-forward block (SwiGLU; Shazeer, 2020): gate and up in, their product out.

bf16 on the CPU has a kernel, in elementwise.cpp; bf16 and fp16 on a GPU in triton/elementwise.py.
"""

import torch.nn.functional as F
from torch import Tensor

from llama.ops.cpu import native
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet


def silu_mul(x: Tensor, kernels: KernelSet = TORCH_ONLY) -> Tensor:
    """x (..., 2F), the gate's columns first -> silu(gate) * up (..., F)."""
    if kernels.has("silu_mul", x):
        from llama.ops.triton import elementwise

        return elementwise.silu_mul(x)
    if native.has_kernel(x) and x.shape[-1] % 64 == 0:
        x = x.contiguous()
        width = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], width)
        native.call("silu_mul_bf16", x, out, out.numel() // width, width)
        return out
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
