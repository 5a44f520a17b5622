"""The interface of a quantized matrix in a file, whatever its format.

In: rows and columns. Out: their codes, or a packed weight that is filled from the file. It knows no
format: `gguf_blocks` and `hf_formats` have a subclass for each.

Shapes: N outputs (rows), K inputs (columns).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Size, Tensor

from llama.weights.coded import Coded


class PackTarget(NamedTuple):
    """The tensors of a packed weight that is filled from a file.

    Attributes:
        like: Rows of the weight that were read; all its rows have their table and groups.
        weight_kind: The `kind` of the weight's class.
        values: The codes of the weight.
        scales: The scales of the weight.
    """

    like: Coded
    weight_kind: int
    values: Tensor
    scales: Tensor


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix (N, K) that a file stores quantized.

    Attributes:
        shape: (N, K).
        is_rotated: Whether the rows are those of a matrix times the Hadamard matrix. All columns
            must then be read at once.
    """

    shape: Size
    is_rotated: bool = field(default=False, kw_only=True)

    @property
    def layout_key(self) -> Hashable | None:
        """A key that is equal for matrices with the same table, groups and types of scales.

        None where only reading the matrix tells these.
        """
        return None

    def read(self, rows: slice, columns: slice, device: torch.device) -> Coded:
        """Return some rows and columns, given with both ends, on a device."""
        raise NotImplementedError

    def pack(self, rows: range, columns: slice, target: PackTarget) -> bool:
        """Fill the tensors of a packed weight with some rows and columns, if that is possible.

        Args:
            rows: The rows of the matrix.
            columns: The columns, with both ends given.
            target: The tensors, written in place.

        Returns:
            Whether they were filled. False where the format cannot be packed into such tensors, or
            an element is not finite: the rows must then be read.

        Raises:
            ValueError: The file became shorter.
        """
        return False
