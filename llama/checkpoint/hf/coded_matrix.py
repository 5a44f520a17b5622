"""A matrix of codes in a Hugging Face folder, whatever its format: the base of all of them.

In: rows and columns. Out: their codes with table, scales and offsets, as `Coded`. A format gives
the codes. How many neighbouring rows and columns share a scale follows from the shapes, and from
the sizes that the quantization_config names.

Shapes: N outputs, K inputs, G groups along K.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from llama.checkpoint.quantized_matrix import QuantizedMatrix
from llama.weights.coded import Coded

Parts = dict[str, Tensor]
Config = dict[str, Any]

# Errors that tensors of other sizes and types, or other values in the configuration, can raise.
MISFITS = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    AttributeError,
)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: up @ down * factor is added to a matrix.

    Attributes:
        down: (R, K), R being the adapter's rank.
        up: (N, R).
        factor: What the product is multiplied with.
    """

    down: Tensor
    up: Tensor
    factor: float


@dataclass(frozen=True, eq=False)
class CodedMatrix(QuantizedMatrix):
    """A matrix of codes with a scale for each group of columns: weight = scale * table[code].

    With zero points, weight = scale * (code - zero point), and the table has 0 in its middle.

    Attributes:
        table: What the codes stand for, at most 256 elements.
        scale: (N / rows_per_scale, G), rounded up.
        rows_per_scale: How many neighbouring rows share scales. The last ones may be fewer.
        columns_per_scale: How many neighbouring columns share a scale. The last may be fewer.
        group_of: (K) the group of each column, where groups are not neighbours.
        adapter: An adapter that is added.
    """

    table: Tensor
    scale: Tensor
    rows_per_scale: int = field(default=1, kw_only=True)
    columns_per_scale: int = field(default=1, kw_only=True)
    group_of: Tensor | None = field(default=None, kw_only=True)
    adapter: Adapter | None = field(default=None, kw_only=True)

    def codes(self, rows: slice, columns: slice) -> Tensor:
        """Return the codes of some rows and columns: (n, k) uint8."""
        raise NotImplementedError

    def zero_points(self, rows: slice) -> Tensor | None:
        """Return the codes that stand for 0 in some rows, (n, G), or None where all have 0."""
        return None

    def scales(self, rows: slice) -> Tensor:
        """Return the scales of some rows: (n, G), of any float type."""
        return self.scale[torch.arange(rows.start, rows.stop) // self.rows_per_scale]

    def read(self, rows: slice, columns: slice, device: torch.device) -> Coded:
        """Return some rows and columns, given with both ends, on a device."""
        scales = self.scales(rows).float()
        offsets = self._offsets(rows, scales)
        groups = self._groups(columns)
        coded = Coded(
            codes=self.codes(rows, columns).to(device),
            table=self.table.to(device),
            scale=scales[:, groups].to(device),
            offset=None if offsets is None else offsets[:, groups].to(device),
            is_rotated=self.is_rotated,
        )
        if self.adapter is None:
            return coded
        down = self.adapter.down[:, columns].float().to(device)
        up = self.adapter.up[rows].float().to(device)
        return replace(coded, down=down, up=up * self.adapter.factor)

    def _offsets(self, rows: slice, scales: Tensor) -> Tensor | None:
        """Return what is added to the weights of each group, or None where it is 0 in all."""
        zero_points = self.zero_points(rows)
        if zero_points is None:
            return None
        shift = zero_points.float() - len(self.table) // 2
        return -scales * shift if shift.any() else None

    def _groups(self, columns: slice) -> Tensor:
        """Return the group of each run of columns that has one scale, as `Coded` wants them."""
        if self.group_of is not None:
            return self.group_of[columns]
        step = math.gcd(self.columns_per_scale, columns.start, columns.stop)
        return torch.arange(columns.start, columns.stop, step) // self.columns_per_scale


def size_per_scale(total: int, num_scales: int, named: Collection[int]) -> int:
    """Return how many neighbouring rows, or columns, share a scale.

    Args:
        total: The rows or columns.
        num_scales: The scales for them.
        named: Sizes that the quantization_config names for some matrix. Where none of them gives
            so many scales, the size is a power of two that divides `total`. Another size would be a
            guess: 192 rows with two scales have blocks of 128 and 64 rows as a rule, not of 96.

    Raises:
        ValueError: The size cannot be told.
    """
    if num_scales == 1:
        return total
    fitting = {size for size in named if -(-total // size) == num_scales}
    if len(fitting) == 1:
        return fitting.pop()
    size = total // num_scales
    check_fits(not fitting and size * num_scales == total and size.bit_count() == 1)
    return size


def check_fits(fits: bool) -> None:
    """Raise the ValueError for tensors that are not those of a format unless they fit."""
    if not fits:
        raise ValueError("its tensors do not fit one another, or are of another version")
