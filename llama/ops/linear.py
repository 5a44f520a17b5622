"""The product of rows and a plain weight: x (M, K), weight (N, K) -> (M, N).

Packed and quantized weights have their products in `llama.weights`. They and kernels must not be
known here.

Shapes: M rows, in any leading dimensions; N outputs, K inputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.ops.kernels import NO_KERNELS, Kernels


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    dtype: torch.dtype | None = None,
    kernels: Kernels = NO_KERNELS,
) -> Tensor:
    """Return the product of rows and a weight.

    Args:
        x: The rows (M, K).
        weight: The weight (N, K), of the type of x.
        dtype: The type of the result, by default that of x.
        kernels: The kernels that may run.

    Returns:
        The products (M, N).
    """
    dtype = dtype or x.dtype
    product: Tensor | None = kernels.run("linear", x, weight, dtype)
    if product is not None:
        return product
    n, k = weight.shape
    if x.is_cuda and dtype is torch.float32 and x.dtype in (torch.bfloat16, torch.float16):
        # The sums are not rounded: in 16 bits, 3 % of rows of logits would tie at the top.
        rows = x.reshape(-1, k)
        sums = torch.mm(rows, weight.t(), out_dtype=dtype)
        leading = x.shape[:-1]
        return sums.view(*leading, n)
    out = F.linear(x, weight)
    return out if out.dtype is dtype else out.to(dtype)
