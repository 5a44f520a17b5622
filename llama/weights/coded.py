"""A quantized matrix as its file has it, in one form for all files: codes and what they stand for.

In: what a reader has unpacked. Out: a `Coded`, from which a format of `llama.weights` packs its
own, or the plain numbers. No value is rounded here.

Shapes: N outputs, K inputs, G groups of K / G neighbours along K.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Coded:
    """weight[n, k] = scale[n, k // (K / G)] * table[codes[n, k]] + offset[n, k // (K / G)]

    codes: (N, K) uint8, each below len(table). table: at most 256 numbers, float32.
    scale and offset: (N, G) float32; offset None: nothing is added.
    """

    codes: Tensor
    table: Tensor
    scale: Tensor
    offset: Tensor | None = None

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
        groups = torch.arange(begin, end, step, device=self.scale.device) // self.group
        offset = None if self.offset is None else self.offset[:, groups]
        return Coded(self.codes[:, begin:end], self.table, self.scale[:, groups], offset)

    def in_order(self, fill: Callable[[Tensor, Tensor], object]) -> "Coded":
        """With the rows in the order in which `fill` puts them into another tensor."""
        moved = [self.codes, self.scale] + ([] if self.offset is None else [self.offset])
        for i, rows in enumerate(moved):
            moved[i] = torch.empty_like(rows)
            fill(moved[i], rows)
        return Coded(moved[0], self.table, *moved[1:])

    def is_finite(self) -> bool:
        """Are all numbers finite that the codes stand for, and the scales and offsets?"""
        odd = ~self.table.isfinite()
        if odd.any() and odd.index_select(0, self.codes.flatten().int()).any():
            return False
        return all(x is None or bool(x.isfinite().all()) for x in (self.scale, self.offset))

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers (N, K): in float32 the product, then the sum; then rounded to `dtype`."""
        numbers = self.table.index_select(0, self.codes.flatten().int())
        numbers = numbers.view(*self.scale.shape, self.group).mul_(self.scale[..., None])
        if self.offset is not None:
            numbers += self.offset[..., None]
        return numbers.view(self.shape).to(dtype)


def joined(parts: list[Coded], dim: int = 0) -> Coded | None:
    """The rows of several matrices below one another, or with `dim` 1 their columns side by side,
    exactly. Where their tables differ, codes become those of the whole numbers from -128 to 127;
    None where a table has others."""
    table, group = parts[0].table, math.gcd(*(part.group for part in parts))
    if not all(part.table is table or torch.equal(part.table, table) for part in parts):
        table = torch.arange(-128.0, 128)
        if not all(torch.isin(part.table, table).all() for part in parts):
            return None
        parts = [replace(part, codes=_in_bytes(part), table=table) for part in parts]
    parts = [part.columns(0, part.shape[1], group) for part in parts]
    codes, scale = (torch.cat([getattr(x, of) for x in parts], dim) for of in ("codes", "scale"))
    if all(part.offset is None for part in parts):
        return Coded(codes, table, scale)
    offsets = [torch.zeros_like(x.scale) if x.offset is None else x.offset for x in parts]
    return Coded(codes, table, scale, torch.cat(offsets, dim))


def _in_bytes(coded: Coded) -> Tensor:
    places = (coded.table + 128).byte()
    return places.index_select(0, coded.codes.flatten().int()).view(coded.shape)
