"""What every format of a weight can do: one matrix of the model, or this rank's share of it.

In: a plain matrix (N, K). Out: products and rows of it. A format is a class in a file of its own,
and knows all of itself; nothing else in the package knows how numbers lie in memory.

Shapes: M rows of x, in any leading dimensions; N outputs, K inputs.
"""

from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from llama.ops.batch import DEFAULT_CONTEXT, ForwardContext
from llama.ops.cpu.constants import ElementFormat


class Weight(nn.Module):
    """A matrix (N, K) in one format; `values` holds its numbers, other tensors what they need.

    `shape` is (N, K), whatever the shape of the tensors. A model's state dict shows it plain.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()  # of matrices that it can be made from
    kind: ClassVar[int] = ElementFormat.BF16.value  # the format of its elements for kernels
    values: nn.Parameter
    is_finite: bool = True  # False where packing it came upon NaN or infinity
    has_empty_row: bool = False  # where it came upon a row of zeros

    def __init__(self, shape: tuple[int, int], values: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.values = nn.Parameter(values, requires_grad=False)

    @classmethod
    def fits(cls, plain: Tensor) -> bool:
        """Whether a matrix can be put into this format on this machine."""
        raise NotImplementedError

    @classmethod
    def pack(cls, plain: Tensor) -> Self:
        """A matrix (N, K) that `fits`, in this format. It may use the memory of `plain`, which must
        not be used afterwards."""
        raise NotImplementedError

    def linear(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        context: ForwardContext = DEFAULT_CONTEXT,
    ) -> Tensor:
        """x (M, K) -> (M, N) in `dtype`, by default x's; float32 keeps the sums before they are
        rounded. context: of the rows, such as the step's `Batch`."""
        raise NotImplementedError

    def rows(self, ids: Tensor) -> Tensor:
        """ids (...) -> rows (..., K), for an embedding: it may be tied to the output's weight."""
        raise NotImplementedError

    def plain(self) -> Tensor:
        """The matrix (N, K) that this stands for: itself where it is plain, else a copy."""
        raise NotImplementedError

    def refilled(self, plain: Tensor) -> "Weight":
        """This format with other numbers, (N, K) of any float type."""
        return self.pack(torch.empty(plain.shape, dtype=self.dtypes[0]).copy_(plain))

    def part(self, rows: list[slice], columns: slice) -> "Weight | None":
        """Some rows, in order, and columns, in the same memory; None where that cannot be."""
        return None

    def native_matrix(self) -> list[int] | None:
        """As `Matrix` in kernels.h has it; None where the CPU's kernels cannot read it. The
        addresses are of tensors that live as long as this does."""
        return None

    def tensors(self) -> dict[str, Tensor]:
        """All that it holds, by the names of its constructor's arguments."""
        return {"values": self.values.data}

    def is_whole(self) -> bool:
        """Whether these tensors are those of such a matrix: a file may hold others."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.parameters(), *self.buffers()))

    def _save_to_state_dict(self, *_: object) -> None:
        """The layer that holds it does, under Meta's name."""

    def _load_from_state_dict(self, *_: object) -> None:
        """As `_save_to_state_dict`."""
