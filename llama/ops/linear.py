"""The product of rows and a plain weight: x (M, K), weight (N, K) -> (M, N).

PyTorch computes it. For a few rows on a GPU there are kernels in triton/linear.py, which run where
they were measured to be faster. Packed and quantized weights have their products in
`llama.weights`, and must not be known here.

Shapes: M rows, in any leading dimensions; N outputs, K inputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.ops.triton.kernels import TORCH_ONLY, KernelSet


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    dtype: torch.dtype | None = None,
    kernels: KernelSet = TORCH_ONLY,
) -> Tensor:
    """Return the product of rows and a weight.

    Args:
        x: The rows (M, K).
        weight: The weight (N, K), of the type of x.
        dtype: The type of the result, by default that of x.
        kernels: The Triton kernels that may run.

    Returns:
        The products (M, N).
    """
    dtype = dtype or x.dtype
    n, k = weight.shape
    if kernels.has("linear", x, weight):
        m = x.numel() // k
        tile = kernels.tile_for(0, n, k, m)
        if tile is not None:
            from llama.ops.triton import linear as gpu

            return gpu.run(x, weight, tile, dtype)
    if x.is_cuda and dtype is torch.float32 and x.dtype in (torch.bfloat16, torch.float16):
        # The sums are not rounded: in 16 bits, 3 % of rows of logits would tie at the top.
        rows = x.reshape(-1, k)
        sums = torch.mm(rows, weight.t(), out_dtype=dtype)
        leading = x.shape[:-1]
        return sums.view(*leading, n)
    out = F.linear(x, weight)
    return out if out.dtype is dtype else out.to(dtype)
