"""The gate of the feed-forward block (SwiGLU; Shazeer, 2020): gate and up in, their product out.

bf16 on the CPU has a kernel, in elementwise.cpp; bf16 and fp16 on a GPU have one in
triton/elementwise.py. The products around it must not be known here.
"""

import torch.nn.functional as F
from torch import Tensor

from llama.ops.cpu import native
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet


def silu_mul(x: Tensor, kernels: KernelSet = TORCH_ONLY) -> Tensor:
    """Return silu(gate) * up.

    Args:
        x: The rows (..., 2F): the columns of the gate, then those of up.
        kernels: The Triton kernels that may run.

    Returns:
        The rows (..., F).
    """
    if kernels.has("silu_mul", x):
        from llama.ops.triton import elementwise

        return elementwise.silu_mul(x)
    if native.has_kernel(x) and x.shape[-1] % 64 == 0:
        x = x.contiguous()
        width = x.shape[-1] // 2
        leading = x.shape[:-1]
        out = x.new_empty(*leading, width)
        num_rows = out.numel() // width
        native.call("silu_mul_bf16", x, out, num_rows, width)
        return out
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
