"""The gate of the feed-forward block (SwiGLU; Shazeer, 2020): gate and up in, their product out.

The products around it, and kernels, must not be known here.
"""

import torch.nn.functional as F
from torch import Tensor

from llama.ops.kernels import NO_KERNELS, Kernels


def silu_mul(x: Tensor, kernels: Kernels = NO_KERNELS) -> Tensor:
    """Return silu(gate) * up.

    Args:
        x: The rows (..., 2F): the columns of the gate, then those of up.
        kernels: The kernels that may run.

    Returns:
        The rows (..., F).
    """
    product: Tensor | None = kernels.run("silu_mul", x)
    if product is not None:
        return product
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
