"""A weight as the checkpoint has it: (N, K) in bf16, fp16 or fp32, on any device.

In: the matrix. Out: products that torch computes, or on a GPU a kernel where `llama.ops.linear`
knows a faster one. Other formats must not be known here.
"""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.ops.batch import DEFAULT_CONTEXT, ForwardContext
from llama.ops.linear import linear
from llama.weights.weight import Weight


def all_finite(x: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinity; it is read once, by all threads."""
    extremes = torch.stack(x.aminmax())  # NaN propagates
    return bool(extremes.isfinite().all())


class PlainWeight(Weight):
    """A matrix whose `values` are (N, K)."""

    dtypes = (torch.bfloat16, torch.float16, torch.float32)

    @classmethod
    def fits(cls, plain: Tensor) -> bool:
        """Return True: any matrix is plain."""
        return True

    @classmethod
    def pack(cls, plain: Tensor) -> Self:
        """Return a weight of the matrix itself."""
        n, k = plain.shape
        return cls((n, k), plain)

    def linear(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        context: ForwardContext = DEFAULT_CONTEXT,
    ) -> Tensor:
        """Return the product of rows and this weight; see `Weight.linear`."""
        return linear(x, self.values, dtype=dtype, kernels=context.kernels)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows (..., K) of ids (...)."""
        return F.embedding(ids, self.values)

    def plain(self) -> Tensor:
        """Return the matrix (N, K) itself."""
        return self.values.data

    def part(self, rows: list[slice], columns: slice) -> Weight:
        """Return a copy of a part of the matrix."""
        parts = [self.values.data[some, columns] for some in rows]
        if len(parts) == 1:
            return self.pack(parts[0].contiguous())
        return self.pack(torch.cat(parts))

    def is_whole(self) -> bool:
        """Return whether the values have the shape of the matrix and a type of the format."""
        has_shape = self.values.shape == self.shape
        return has_shape and self.values.dtype in self.dtypes

    def refilled(self, plain: Tensor) -> Weight:
        """Copy other elements into this weight, and return it."""
        self.values.data.copy_(plain)
        return self
