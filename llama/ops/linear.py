"""Rows times a plain weight: x (M, K), weight (N, K) -> (M, N). torch does the product.

For a few rows on a GPU there are kernels in triton/linear.py, which run where they were found to be
faster. Packed and quantized weights have their products in `llama.weights`.

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
    """x (M, K), weight (N, K) of the same type -> (M, N) in `dtype`, by default x's."""
    dtype = dtype or x.dtype
    n, k = weight.shape
    if kernels.has("linear", x, weight):
        tile = kernels.tile_for(0, n, k, x.numel() // k)
        if tile is not None:
            from llama.ops.triton import linear as gpu

            return gpu.run(x, weight, tile, dtype)
    if x.is_cuda and dtype is torch.float32 and x.dtype in (torch.bfloat16, torch.float16):
        # The sums as they are: rounded to 16 bits, 3 % of rows of logits tie at the top.
        sums = torch.mm(x.reshape(-1, k), weight.t(), out_dtype=dtype)
        return sums.view(*x.shape[:-1], n)
    out = F.linear(x, weight)
    return out if out.dtype is dtype else out.to(dtype)
