"""A quantized matrix as its file has it, in one form for all files: codes and what they stand for.

In: what a reader has unpacked. Out: a `Coded`, from which a format of `llama.weights` packs its
own, or the plain numbers. No value is rounded here.

Shapes: N outputs, K inputs, G groups of K / G neighbours along K, R the rank of an adaptor.
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
    """weight[n, k] = scale[n, k // (K / G)] * table[codes[n, k]] + offset[n, k // (K / G)]

    codes: (N, K) uint8, each below len(table). table: at most 256 numbers, float32.
    scale and offset: (N, G) float32; offset None: nothing is added.
    down (R, K) and up (N, R) float32: an adaptor, whose product up @ down is added (LoRA; Hu et
    al., 2021). is_rotated: then the rows are multiplied with `hadamard`, or x is.
    """

    codes: Tensor
    table: Tensor
    scale: Tensor
    offset: Tensor | None = None
    down: Tensor | None = None
    up: Tensor | None = None
    is_rotated: bool = False

    def __post_init__(self) -> None:
        (n, k), (rows, groups) = self.codes.shape, self.scale.shape
        assert rows == n and k % groups == 0, (self.codes.shape, self.scale.shape)
        assert self.offset is None or self.offset.shape == self.scale.shape, self.offset

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    @property
    def group(self) -> int:
        """How many neighbours along K share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def columns(self, begin: int, end: int, group: int = 0) -> "Coded":
        """Some of the K inputs, in groups that divide `group`; what is cut becomes several of the
        same scale."""
        step = math.gcd(self.group, begin, end, group)
        if (begin, end, step) == (0, self.shape[1], self.group):
            return self
        groups = torch.arange(begin, end, step, device=self.scale.device) // self.group
        offset = None if self.offset is None else self.offset[:, groups]
        down = None if self.down is None else self.down[:, begin:end]
        codes, scale = self.codes[:, begin:end], self.scale[:, groups]
        return replace(self, codes=codes, scale=scale, offset=offset, down=down)

    def in_order(self, fill: Callable[[Tensor, Tensor], object]) -> "Coded":
        """With the rows in the order in which `fill` puts them into another tensor."""
        moved: dict[str, Any] = {}
        for name in ("codes", "scale", "offset", "up"):
            if (rows := getattr(self, name)) is not None:
                moved[name] = torch.empty_like(rows)
                fill(moved[name], rows)
        return replace(self, **moved)

    def is_finite(self) -> bool:
        """Are all numbers finite that the codes stand for, and the scales and offsets?"""
        odd = ~self.table.isfinite()
        if odd.any() and odd.index_select(0, self.codes.flatten().int()).any():
            return False
        numbers = (self.scale, self.offset, self.down, self.up)
        return all(x is None or bool(x.isfinite().all()) for x in numbers)

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers (N, K): in float32 the product, then the sum; then rounded to `dtype`."""
        numbers = self.table.index_select(0, self.codes.flatten().int())
        numbers = numbers.view(*self.scale.shape, self.group).mul_(self.scale[..., None])
        if self.offset is not None:
            numbers += self.offset[..., None]
        numbers = numbers.view(self.shape)
        if self.down is not None and self.up is not None:
            numbers += self.up @ self.down
        return (hadamard(numbers) if self.is_rotated else numbers).to(dtype)


@dataclass(frozen=True)
class CodedRows:
    """A matrix of N rows of a file. first: some of them, in the form of all. read: all. pack: with
    `first`, fill a weight of a kind, values and scales, from the file; False where it cannot."""

    n: int
    first: Coded
    read: Callable[[], Coded]
    pack: Callable[[Coded, int, Tensor, Tensor], bool]

    def plain(self, dtype: torch.dtype) -> Tensor:
        return self.read().plain(dtype)


def hadamard(x: Tensor) -> Tensor:
    """x (..., K), a power of two, times Sylvester's Hadamard matrix over sqrt(K), which is its own
    inverse: the rotation R4 of SpinQuant (Liu et al., 2024)."""
    k = x.shape[-1]
    for _ in range(k.bit_length() - 1):  # for each bit of a column's number, which goes round
        first, second = x.chunk(2, -1)
        x = torch.stack((first + second, first - second), -1).flatten(-2)
    return x * k**-0.5


def alike(parts: list[Coded]) -> list[Coded] | None:
    """Exactly these with one table and group, all with offsets or none. Where tables differ, codes
    become those of the whole numbers of 6 bits, or of 8; None where a table has others."""
    table, group = parts[0].table, math.gcd(*(part.group for part in parts))
    if not all(part.table is table or torch.equal(part.table, table) for part in parts):
        each = torch.cat([part.table for part in parts])
        tables = torch.arange(-32.0, 32), torch.arange(-128.0, 128)
        if not (holding := [x for x in tables if torch.isin(each, x).all()]):
            return None
        table = holding[0]
        codes = [(x.table - table[0]).byte()[x.codes.int()] for x in parts]
        parts = [replace(x, codes=y, table=table) for x, y in zip(parts, codes, strict=True)]
    parts = [part.columns(0, part.shape[1], group) for part in parts]
    if all(x.offset is None for x in parts):
        return parts
    return [replace(x, offset=torch.zeros_like(x.scale)) if x.offset is None else x for x in parts]


def joined(parts: list[Coded], dim: int = 0) -> Coded | None:
    """Rows below one another, or with `dim` 1 columns side by side; None if not `alike`."""
    if (same := alike(parts)) is None:
        return None
    codes, scale = (torch.cat([getattr(x, of) for x in same], dim) for of in ("codes", "scale"))
    offsets = [x.offset for x in same if x.offset is not None]
    offset = torch.cat(offsets, dim) if offsets else None
    return Coded(codes, same[0].table, scale, offset, *_adaptors(same), same[0].is_rotated)


def _adaptors(parts: list[Coded]) -> tuple[Tensor | None, Tensor | None]:
    """down and up of all rows. Neighbours with the same `down` are parts of one matrix."""
    downs = [x.down for x in parts if x.down is not None]
    ups = [x.up for x in parts if x.up is not None]
    firsts = [i for i, x in enumerate(downs) if not (i and torch.equal(x, downs[i - 1]))]
    if not firsts:
        return None, None
    of_each = [torch.cat(ups[i:end]) for i, end in pairwise([*firsts, len(ups)])]
    return torch.cat([downs[i] for i in firsts]), torch.block_diag(*of_each)
