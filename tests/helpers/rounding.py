"""Bounds of the rounding of sums, for tests that compare with an exact result.

In: the terms of sums. Out: the largest error that float32 may cause, whatever the order in which a
machine adds. A difference that was measured on one machine is no bound: libraries add in an order
that depends on the processor. No kernel may be known here.
"""

import torch
from torch import Tensor

HALF = 2.0**-11  # the largest relative error of a rounding to float16
SINGLE = 2.0**-24  # the largest relative error of a rounding to float32


def sum_bound(sizes: Tensor, length: int) -> Tensor:
    """Return the bound of the error of sums in float32.

    Rounding errors of K terms have signs of their own and add up to about sqrt(K) of them: Higham
    and Mary, "A New Approach to Probabilistic Rounding Error Analysis" (2019).

    Args:
        sizes: The sums of the absolute values of the terms.
        length: K, the number of terms in a sum.
    """
    return length**0.5 * SINGLE * sizes


def product_bound(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the bound (..., N) of the error of x (..., K) @ weight (N, K).T, added in float32.

    Args:
        x: The rows.
        weight: The weight.
        dtype: The type of the product: float32, or float16, to which its sums are then rounded.
    """
    x, weight = x.double(), weight.double()
    bound = sum_bound(x.abs() @ weight.abs().T, x.shape[-1])
    if dtype is torch.float16:
        bound = bound + HALF * (x @ weight.T).abs()
    return bound
