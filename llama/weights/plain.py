"""A weight as the checkpoint has it: (N, K) in bf16, fp16 or fp32, on any device.

In: the matrix. Out: products that torch computes, or on a GPU a kernel where `llama.ops.linear`
knows a faster one. Other formats must not be known here.
"""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.ops.adapters import ProductUpdates
from llama.ops.batch import DEFAULT_CONTEXT, ForwardContext
from llama.ops.formats import N_BLOCK, num_blocks
from llama.ops.linear import linear
from llama.weights.weight import Weight


def all_finite(x: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinity; it is read once, by all threads."""
    extremes = torch.stack(x.aminmax())  # NaN propagates
    return bool(extremes.isfinite().all())


class PlainWeight(Weight):
    """A matrix whose `values` are (N, K), with rows of padding after them if `empty` made it."""

    dtypes = (torch.bfloat16, torch.float16, torch.float32)

    @classmethod
    def empty(cls, n: int, k: int, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Return a weight without elements whose memory can be packed in place.

        The values have whole blocks of rows, as the CPU kernels store a matrix.
        """
        return cls((n, k), torch.empty(num_blocks(n) * N_BLOCK, k, device=device, dtype=dtype))

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
        updates: ProductUpdates | None = None,
    ) -> Tensor:
        """Return the product of rows and this weight; see `Weight.linear`."""
        product = linear(x, self._rows(), dtype=dtype, kernels=context.kernels)
        return product if updates is None else updates.add_to(product, x)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows (..., K) of ids (...)."""
        return F.embedding(ids, self._rows())

    def plain(self) -> Tensor:
        """Return the matrix (N, K) itself."""
        return self._rows().data

    def _rows(self) -> Tensor:
        """Return the values without padding, which are a view where there is any."""
        n, _ = self.shape
        return self.values if len(self.values) == n else self.values[:n]

    def part(self, rows: list[slice], columns: slice) -> Weight:
        """Return a copy of a part of the matrix."""
        parts = [self.plain()[some, columns] for some in rows]
        if len(parts) == 1:
            return self.pack(parts[0].contiguous())
        return self.pack(torch.cat(parts))

    def is_whole(self) -> bool:
        """Return whether the values have the shape of the matrix and a type of the format."""
        has_shape = self.values.shape == self.shape
        return has_shape and self.values.dtype in self.dtypes

    def refilled(self, plain: Tensor) -> Weight:
        """Copy other elements into this weight, and return it."""
        self.plain().copy_(plain)
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Return the values without padding."""
        return {"values": self.plain()}
