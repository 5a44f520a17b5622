"""A weight as the checkpoint has it: (N, K) in bf16, fp16 or fp32, on any device.

torch does the product, or on a GPU a kernel where `llama.ops.linear` knows a faster one.
"""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.ops.batch import DEFAULT_CONTEXT, ForwardContext
from llama.ops.linear import linear
from llama.weights.weight import Weight


class PlainWeight(Weight):
    """values: (N, K)."""

    dtypes = (torch.bfloat16, torch.float16, torch.float32)

    @classmethod
    def fits(cls, plain: Tensor) -> bool:
        return True

    @classmethod
    def pack(cls, plain: Tensor) -> Self:
        n, k = plain.shape
        return cls((n, k), plain)

    def linear(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        context: ForwardContext = DEFAULT_CONTEXT,
    ) -> Tensor:
        return linear(x, self.values, dtype=dtype, kernels=context.kernels)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.values)

    def plain(self) -> Tensor:
        return self.values.data

    def part(self, rows: list[slice], columns: slice) -> Weight:
        parts = [self.values.data[each, columns] for each in rows]
        return self.pack(torch.cat(parts) if parts[1:] else parts[0].contiguous())

    def is_whole(self) -> bool:
        return self.values.shape == self.shape and self.values.dtype in self.dtypes

    def refilled(self, plain: Tensor) -> Weight:
        self.values.data.copy_(plain)
        return self
