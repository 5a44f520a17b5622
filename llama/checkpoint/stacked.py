"""Quantized tensors of a checkpoint that the model stacks to one matrix, kept in their codes.

In: the part of each tensor that a rank reads, and a function that reads it. Out: the stacked rows
as `Coded`, or packed straight from the files.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from llama.checkpoint.quantized_matrix import PackTarget, QuantizedMatrix
from llama.checkpoint.table import as_slice
from llama.ops.formats import N_BLOCK, num_blocks
from llama.weights.coded import Coded, joined


class Part(NamedTuple):
    """The part of a quantized tensor that a rank reads.

    Attributes:
        name: Meta's name of the tensor.
        matrix: The tensor in the first shard.
        rows: Rows of the whole tensor.
        columns: Columns of the whole tensor.
    """

    name: str
    matrix: QuantizedMatrix
    rows: range
    columns: range


ReadRows = Callable[[Part, int | None], list[Coded]]  # a part, or so many rows of it


class StackedParts:
    """A rank's parts of several quantized tensors, stacked to one matrix of the model."""

    def __init__(self, parts: list[Part], head_dim: int, read_rows: ReadRows) -> None:
        """Stack the parts.

        Args:
            parts: The parts, in the order of their rows.
            head_dim: The number of rows of a head.
            read_rows: Reads a part, or its first rows.
        """
        self.parts = parts
        self._head_dim = head_dim
        self._read_rows = read_rows
        self.row_counts = [len(part.rows) for part in parts]

    @property
    def num_rows(self) -> int:
        """The rows of the stacked matrix."""
        return sum(self.row_counts)

    def layout_key(self) -> tuple[object, ...]:
        """Return a key that is equal where the first rows have the same table, groups and types."""
        keys: list[object] = [part.matrix.layout_key for part in self.parts]
        if None in keys:
            keys = [part.name for part in self.parts]
        return *self.row_counts, *keys

    def read(self) -> Coded:
        """Read all rows."""
        coded = self._read(None)
        assert coded is not None, self.parts  # the first rows could be joined
        return coded

    def read_first(self) -> Coded | None:
        """Read the first rows of each part, or all if they are few; None if they do not join."""
        if not self._has_whole_blocks():
            return self._read(None)
        return self._read(math.lcm(N_BLOCK, self._head_dim))

    def _has_whole_blocks(self) -> bool:
        """Return whether each part begins with a block of the stacked matrix."""
        return not any(count % N_BLOCK for count in self.row_counts[:-1])

    def _read(self, max_rows: int | None) -> Coded | None:
        rows: list[Coded] = []
        for part in self.parts:
            rows += self._read_rows(part, max_rows)
        return joined(rows)

    def pack(self, first: Coded, weight_kind: int, values: Tensor, scales: Tensor) -> bool:
        """Fill a packed weight from the files, as `CodedRows` has it."""
        if not self._has_whole_blocks():
            return False
        begin = 0
        for part, count in zip(self.parts, self.row_counts, strict=True):
            end = begin + num_blocks(count)
            target = PackTarget(first, weight_kind, values[begin:end], scales[begin:end])
            if not part.matrix.pack(part.rows, as_slice(part.columns), target):
                return False
            begin = end
        return True
