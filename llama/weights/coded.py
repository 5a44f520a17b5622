"""A quantized matrix as its file has it, in one representation for the formats of all files.

In: what a reader has unpacked. Out: a `Coded`, from which a format of `llama.weights` packs its own
layout, or the plain elements. No value is rounded here. Files and layouts must not be known here.

Shapes: N outputs, K inputs, G groups of K / G neighbouring columns, R the rank of an adapter.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Coded:
    """A quantized matrix (N, K): codes, a table of the elements they stand for, and scales.

    weight[n, k] = scale[n, k // (K / G)] * table[codes[n, k]] + offset[n, k // (K / G)]

    Attributes:
        codes: (N, K) uint8, each below len(table).
        table: The element of each code: at most 256, float32.
        scale: (N, G) float32.
        offset: (N, G) float32; None where nothing is added.
        down: (R, K) float32. With `up` it is an adapter, whose product up @ down is added (LoRA; Hu
            et al., 2021).
        up: (N, R) float32.
        is_rotated: Whether rows are stored rotated: they, or x, must be multiplied by `hadamard`.
    """

    codes: Tensor
    table: Tensor
    scale: Tensor
    offset: Tensor | None = None
    down: Tensor | None = None
    up: Tensor | None = None
    is_rotated: bool = False

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        num_rows, groups = self.scale.shape
        assert num_rows == n, (num_rows, n)
        assert k % groups == 0, (k, groups)
        if self.offset is not None:
            assert self.offset.shape == self.scale.shape, self.offset

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K)."""
        n, k = self.codes.shape
        return n, k

    @property
    def group(self) -> int:
        """Return how many neighbouring columns share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def columns(self, begin: int, end: int, group: int = 0) -> "Coded":
        """Return some of the columns. A group that is cut becomes several of the same scale.

        Args:
            begin: The first column.
            end: The end of the columns.
            group: A size that the new groups must divide.
        """
        step = math.gcd(self.group, begin, end, group)
        is_all = begin == 0 and end == self.shape[1]
        if is_all and step == self.group:
            return self
        device = self.scale.device
        first_columns = torch.arange(begin, end, step, device=device)
        groups = first_columns // self.group
        changes: dict[str, Any] = {
            "codes": self.codes[:, begin:end],
            "scale": self.scale[:, groups],
        }
        if self.offset is not None:
            changes["offset"] = self.offset[:, groups]
        if self.down is not None:
            changes["down"] = self.down[:, begin:end]
        return replace(self, **changes)

    def in_order(self, fill: Callable[[Tensor, Tensor], object]) -> "Coded":
        """Return the rows in the order in which `fill` copies them from one tensor to another."""
        moved: dict[str, Any] = {}
        for name in ("codes", "scale", "offset", "up"):
            rows = getattr(self, name)
            if rows is not None:
                moved[name] = torch.empty_like(rows)
                fill(moved[name], rows)
        return replace(self, **moved)

    def is_finite(self) -> bool:
        """Return whether all elements that occur, all scales and all offsets are finite."""
        is_odd = ~self.table.isfinite()
        if is_odd.any():
            codes = self.codes.flatten().int()
            if is_odd.index_select(0, codes).any():
                return False
        for factor in (self.scale, self.offset, self.down, self.up):
            if factor is not None and not factor.isfinite().all():
                return False
        return True

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix (N, K) in `dtype`.

        Products and sums are computed in float32, in this order, and then rounded.
        """
        codes = self.codes.flatten().int()
        elements = self.table.index_select(0, codes)
        del codes  # four bytes per element
        n, groups = self.scale.shape
        elements = elements.view(n, groups, self.group)
        elements *= self.scale[..., None]
        if self.offset is not None:
            elements += self.offset[..., None]
        elements = elements.view(self.shape)
        if self.down is not None and self.up is not None:
            elements += self.up @ self.down
        if self.is_rotated:
            elements = hadamard(elements)
        return elements.to(dtype)


@dataclass(frozen=True)
class CodedRows:
    """A matrix of a file, of which some rows have been read.

    Attributes:
        n: The number of all rows.
        first: Some rows. All of them have its table and its groups.
        read: A function that reads all rows.
        pack: A function that fills a weight from the file. It takes `first`, an `ElementFormat`,
            and the tensors of values and scales, and returns False where it cannot do so.
    """

    n: int
    first: Coded
    read: Callable[[], Coded]
    pack: Callable[[Coded, int, Tensor, Tensor], bool]

    def plain(self, dtype: torch.dtype) -> Tensor:
        """Read all rows, and return the matrix (N, K) in `dtype`."""
        return self.read().plain(dtype)


def hadamard(x: Tensor) -> Tensor:
    """Return x (..., K) times Sylvester's Hadamard matrix over sqrt(K); K is a power of two.

    The matrix is its own inverse. This is the rotation R4 of SpinQuant (Liu et al., 2024).
    """
    k: int = x.shape[-1]
    num_bits = k.bit_length() - 1
    for _ in range(num_bits):  # every pass rotates the bits of the column index by one
        first, second = x.chunk(2, -1)
        pairs = torch.stack((first + second, first - second), -1)
        x = pairs.flatten(-2)
    scale: float = k**-0.5
    return x * scale


def alike(parts: list[Coded]) -> list[Coded] | None:
    """Return the same matrices with one table and one group, and all with offsets or none.

    No value changes. Where tables differ, the codes become those of a table of all integers of 6
    bits, or of 8.

    Args:
        parts: The matrices.

    Returns:
        The matrices; None where a table has other elements than these integers.
    """
    table = parts[0].table
    group = math.gcd(*(part.group for part in parts))
    if not all(_has_table(part, table) for part in parts):
        integers = _integer_table(parts)
        if integers is None:
            return None
        parts = [_with_table(part, integers) for part in parts]
    parts = [_with_group(part, group) for part in parts]
    if all(part.offset is None for part in parts):
        return parts
    return [_with_offset(part) for part in parts]


def _has_table(part: Coded, table: Tensor) -> bool:
    """Return whether the table of a matrix is this one."""
    return part.table is table or torch.equal(part.table, table)


def _integer_table(parts: list[Coded]) -> Tensor | None:
    """Return the smaller table of integers that has all elements of the parts, if there is one."""
    elements = torch.cat([part.table for part in parts])
    tables = (
        torch.arange(-32.0, 32),
        torch.arange(-128.0, 128),
    )
    for table in tables:
        if torch.isin(elements, table).all():
            return table
    return None


def _with_table(part: Coded, table: Tensor) -> Coded:
    """Return the same matrix with a table of consecutive integers."""
    code_of_code = (part.table - table[0]).byte()
    codes = code_of_code[part.codes.int()]
    return replace(part, codes=codes, table=table)


def _with_group(part: Coded, group: int) -> Coded:
    """Return the same matrix with groups whose size divides `group`."""
    num_columns = part.shape[1]
    return part.columns(0, num_columns, group)


def _with_offset(part: Coded) -> Coded:
    """Return the same matrix with offsets, of zero where it has none."""
    if part.offset is not None:
        return part
    return replace(part, offset=torch.zeros_like(part.scale))


def joined(parts: list[Coded], dim: int = 0) -> Coded | None:
    """Return the concatenation of matrices; None if they cannot be made `alike`.

    Args:
        parts: The matrices.
        dim: 0 to put rows below one another, 1 to put columns side by side.
    """
    same = alike(parts)
    if same is None:
        return None
    first = same[0]
    codes = [part.codes for part in same]
    scales = [part.scale for part in same]
    offsets = [part.offset for part in same if part.offset is not None]
    down, up = _adapters(same)
    return Coded(
        codes=torch.cat(codes, dim),
        table=first.table,
        scale=torch.cat(scales, dim),
        offset=torch.cat(offsets, dim) if offsets else None,
        down=down,
        up=up,
        is_rotated=first.is_rotated,
    )


def _adapters(parts: list[Coded]) -> tuple[Tensor | None, Tensor | None]:
    """Return `down` and `up` of all rows; neighbours with the same `down` are one matrix."""
    downs = [part.down for part in parts if part.down is not None]
    ups = [part.up for part in parts if part.up is not None]
    firsts = []
    for i in range(len(downs)):
        is_new = i == 0 or not torch.equal(downs[i], downs[i - 1])
        if is_new:
            firsts.append(i)
    if not firsts:
        return None, None
    bounds = pairwise([*firsts, len(ups)])
    downs_of_matrices = [downs[i] for i in firsts]
    ups_of_matrices = [torch.cat(ups[begin:end]) for begin, end in bounds]
    block_diag: Callable[..., Tensor] = torch.block_diag  # PyTorch does not annotate it
    down = torch.cat(downs_of_matrices)
    up = block_diag(*ups_of_matrices)
    return down, up
