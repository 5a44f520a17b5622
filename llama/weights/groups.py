"""What the formats of codes share: scales and offsets, in the order in which the CPU reads them.

In: a `Coded`. Out: a weight of which each group of neighbouring k has a scale, or a scale and an
offset, and is number * scale + offset; the numbers are the subclass's. Nothing is rounded but on a
CPU with AMX, which takes the weights of rows with several groups in bf16; adaptors are not merged.
packed_weight.h has the layouts.

Shapes: N outputs, K inputs, G groups of K / G, R the rank of an adaptor.
"""

from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from llama.device import use_huge_pages
from llama.ops.batch import DEFAULT_CONTEXT, ForwardContext
from llama.ops.cpu import native
from llama.ops.cpu.constants import MAX_RANK, MIN_GROUP, N_BLOCK, ElementFormat, ScaleFormat
from llama.ops.linear import linear
from llama.ops.triton.kernels import Blocks
from llama.weights.blocks import BlockedWeight, can_pack, in_blocks
from llama.weights.coded import Coded, CodedRows, hadamard
from llama.weights.weight import Weight

_PLAIN = 1 << 26  # numbers that are made plain at once
_SCALE_FORMATS = {
    torch.float32: ScaleFormat.FLOAT32.value,
    torch.float16: ScaleFormat.FLOAT16.value,
    torch.uint8: ScaleFormat.EIGHTS.value,
}
_TABLE_FORMATS = (ElementFormat.NIBBLES, ElementFormat.SIX_BITS)  # codes are looked up in a table
EIGHT = 10 * N_BLOCK  # bytes of a block's scales of 8 groups: a float16 a row, then a byte for each


class Form(NamedTuple):
    """What a kernel of a GPU is compiled for, beside K. group: 0 if it is all of K."""

    kind: int
    first: int
    group: int
    per_group: int
    scale_type: int


class GroupedWeight(BlockedWeight):
    """values: codes in blocks, as the subclass has them; scales: (N/32, G, 1 or 2, 32) float32 or
    float16, or the same numbers as (N/32, G/8, 1 or 2 times EIGHT) bytes; table: what the codes of
    nibbles stand for; adaptor: down (R, K), then up (N, R), bf16 in blocks; rotated: if x is."""

    pack_codes: ClassVar[str]  # the function that puts codes into the layout
    scales: Tensor
    adaptor: Tensor | None
    rotated: Tensor | None

    def __init__(
        self,
        shape: tuple[int, int],
        values: Tensor,
        scales: Tensor,
        table: Tensor | None = None,
        adaptor: Tensor | None = None,
        rotated: Tensor | None = None,
    ) -> None:
        super().__init__(shape, values)
        for name, held in {"scales": scales, "adaptor": adaptor, "rotated": rotated}.items():
            self.register_buffer(name, held, persistent=False)
        _, self.groups, self.per_group, _ = _unpack_scales(scales[:1]).shape
        self.rank = 0 if adaptor is None else adaptor.numel() // sum(shape)
        self.table, self.first = torch.zeros(16), None if self.kind in _TABLE_FORMATS else 0
        if table is not None:
            self.table[: len(table)] = table.bfloat16()
            consecutive = int(table[0]) + torch.arange(len(table))
            if self.kind == ElementFormat.NIBBLES and torch.equal(table, consecutive):
                self.first = int(table[0])

    @classmethod
    def can_hold(cls, table: Tensor) -> bool:
        """Whether it has codes for these numbers."""
        raise NotImplementedError

    @classmethod
    def empty(cls, n: int, k: int) -> Tensor:
        dtype, step, tail = cls.layout
        return use_huge_pages(torch.empty(n // N_BLOCK, k // step, *tail, dtype=dtype))

    @classmethod
    def of(cls, coded: Coded) -> Self:
        """What it `takes`, in this format."""
        values = cls.empty(*coded.shape)
        native.call(cls.pack_codes, coded.codes.contiguous(), values, *coded.shape)
        table = coded.table[:16]
        return cls(coded.shape, values, pack_scales(coded), table, **pack_extras(coded))

    @classmethod
    def of_rows(cls, matrix: CodedRows) -> Self:
        """As `of` all its rows."""
        few, shape = cls.of(matrix.first), (matrix.n, matrix.first.shape[1])
        values, of_few = cls.empty(*shape), few.scales
        scales = use_huge_pages(of_few.new_empty(matrix.n // N_BLOCK, *of_few.shape[1:]))
        if not matrix.pack(matrix.first, cls.kind, values, scales):
            return cls.of(matrix.read())
        few.shape, few.values.data, few.scales = shape, values, scales
        return few

    @property
    def form(self) -> Form:
        group = self.shape[1] // self.groups if self.groups > 1 else 0
        scale_type = _SCALE_FORMATS[self.scales.dtype]
        return Form(self.kind, self.first or 0, group, self.per_group, scale_type)

    @classmethod
    def takes(cls, coded: Coded) -> bool:
        """Whether it can hold these very weights, and the CPU's kernels read them."""
        (n, k), is_here = coded.shape, coded.codes.device.type == "cpu" and native.kernels()
        fits = n % N_BLOCK == 0 and k % 8 == 0 and coded.group % MIN_GROUP == 0
        thin = [x for x in (coded.down, coded.up) if x is not None]
        fits = fits and all(torch.equal(x.bfloat16().float(), x) for x in thin)
        fits = fits and (not thin or len(thin[0]) <= MAX_RANK)
        return bool(fits and is_here) and cls.can_hold(coded.table)

    @classmethod
    def fits(cls, plain: Tensor) -> bool:
        return can_pack(plain)

    def numbers(self, ids: Tensor) -> Tensor:
        """ids (...) -> rows (..., K) float32, before they are scaled."""
        raise NotImplementedError

    def exact_rows(self, ids: Tensor) -> Tensor:
        """ids (...) -> rows (..., K) float32: the product is rounded, then the sum."""
        ids = self.placed(ids)
        scales = _unpack_scales(self.scales, ids)
        rows = self.numbers(ids).unflatten(-1, (scales.shape[-2], -1)) * scales[..., :1]
        rows = (rows + scales[..., 1:] if scales.shape[-1] > 1 else rows).flatten(-2)
        if self.adaptor is not None:
            (n, k), r = self.shape, self.rank
            down, up = self.adaptor.split([r * k, r * n])
            down = BlockedWeight((r, k), down.view(-1, k // 2, N_BLOCK, 2)).plain()
            up = BlockedWeight((n, r), up.view(-1, r // 2, N_BLOCK, 2)).plain()
            rows += up[ids].float() @ down.float()
        return rows if self.rotated is None else hadamard(rows)

    def blocks(self) -> Blocks | None:
        """What the kernels of a GPU read; None where they do not take it."""
        k, group = self.shape[1], self.shape[1] // self.groups
        is_more = self.adaptor is not None or self.rotated is not None
        if is_more or self.first is None or k % 128 or (128 % group and group % 128):
            return None
        sizes = self.kind, self.first, group, self.per_group
        return Blocks(self.values.data, self.scales, self.shape, *sizes)

    def linear(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        context: ForwardContext = DEFAULT_CONTEXT,
    ) -> Tensor:
        """On a GPU numbers are rounded to the type of x. For more rows than there are tiles for,
        the library multiplies by parts of the weight that were made plain."""
        n, k = self.shape
        kernels = context.kernels
        weight = self.blocks() if kernels.has("linear", x) else None
        if weight is None:
            if x.dtype is torch.bfloat16 and not x.is_cuda:
                return super().linear(x, dtype, context)
            return linear(x, self.exact().to(x.dtype), dtype=dtype)
        from llama.ops.triton import linear as gpu

        tile = kernels.tile_for(self.kind, n, k, x.numel() // k)
        if tile is not None:
            return gpu.run(x, weight, tile, dtype)
        rows = max(_PLAIN // k // N_BLOCK, 1) * N_BLOCK
        parts = (gpu.plain(weight, i, min(i + rows, n), x.dtype) for i in range(0, n, rows))
        return torch.cat([linear(x, part, dtype=dtype) for part in parts], -1)

    def rows(self, ids: Tensor) -> Tensor:
        is_more = self.adaptor is not None or self.rotated is not None
        if native.kernels() is None or self.values.is_cuda or is_more:
            return self.exact_rows(ids).bfloat16()
        return super().rows(ids)

    def exact(self) -> Tensor:
        return self.exact_rows(torch.arange(self.shape[0], device=self.values.device))

    def plain(self) -> Tensor:
        return self.exact().bfloat16()

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"table": self.table} | dict(self.named_buffers())

    def is_whole(self) -> bool:
        n, k = self.shape
        rows = _unpack_scales(self.scales[:1]).shape[-1]
        fits = len(self.scales) == n // N_BLOCK and rows == N_BLOCK and self.per_group in (1, 2)
        fits = fits and k % (self.groups * MIN_GROUP) == 0 and self.scales.dtype in _SCALE_FORMATS
        if (x := self.adaptor) is not None:
            fits = fits and self.rank in range(N_BLOCK, MAX_RANK + 1, N_BLOCK)
            fits = fits and (x.dtype, x.shape) == (torch.bfloat16, (self.rank * (n + k),))
        is_odd = self.rotated is not None and (k & (k - 1) or k % N_BLOCK)
        return fits and not is_odd and super().is_whole()

    def part(self, rows: list[slice], columns: slice, **more: Tensor) -> Weight | None:
        k, ends = self.shape[1], slice(rows[0].start // N_BLOCK, rows[-1].stop // N_BLOCK)
        scales = self.scales[ends]
        if columns != slice(0, k) and (floats := _unpack_scales(scales)).shape[1] > 1:
            group = k // floats.shape[1]
            if columns.start % group or columns.stop % group:
                return None
            kept = slice(columns.start // group, columns.stop // group)
            scales = _smallest(floats[:, kept].contiguous())
        if self.adaptor is not None or self.rotated is not None:
            return None
        return super().part(rows, columns, scales=scales, table=self.table)

    def native_matrix(self) -> list[int]:
        addresses = [x.data_ptr() for x in (self.values, self.scales, self.table)]
        scale_type = _SCALE_FORMATS[self.scales.dtype]
        numbers = [self.kind, scale_type, self.per_group, self.shape[1] // self.groups]
        adaptor = 0 if self.adaptor is None else self.adaptor.data_ptr()
        more = [self.rotated is not None, adaptor, self.rank]
        return [*addresses, *numbers, *more, *super().native_matrix()[10:]]


def pack_extras(coded: Coded) -> dict[str, Tensor]:
    """What a weight may have beside codes and scales, by the names of its arguments."""
    extras = {"rotated": torch.ones(1, dtype=torch.uint8)} if coded.is_rotated else {}
    if coded.down is not None and coded.up is not None:
        more = -len(coded.down) % N_BLOCK
        pad = nn.functional.pad
        parts = pad(coded.down, (0, 0, 0, more)), pad(coded.up, (0, more))
        extras["adaptor"] = torch.cat([in_blocks(x.bfloat16()).flatten() for x in parts])
    return extras


def pack_scales(coded: Coded, unit: float = 1) -> Tensor:
    """Its scales in units, and its offsets, in the smallest type that changes none."""
    parts = [coded.scale / unit] if coded.offset is None else [coded.scale / unit, coded.offset]
    return _smallest(torch.stack([x.unflatten(0, (-1, N_BLOCK)).mT for x in parts], 2))


def _smallest(scales: Tensor) -> Tensor:
    if torch.equal(scales.half().float(), scales):
        return scales.half()
    blocks, groups, per_group, _ = scales.shape
    if groups % 8 == 0 and native.kernels() is not None:  # those of the k-quants
        eights = torch.empty(blocks, groups // 8, per_group * EIGHT, dtype=torch.uint8)
        is_same = torch.ones((), dtype=torch.int64)
        native.call("pack_scales", scales, eights, is_same, blocks, groups, per_group)
        return eights if is_same else scales
    return scales


def _unpack_scales(scales: Tensor, ids: Tensor | None = None) -> Tensor:
    """(blocks, G, 1 or 2, 32) float32, or (..., G, 1 or 2) of rows `ids` (...)."""

    def wanted(x: Tensor) -> Tensor:
        return x if ids is None else x.movedim(-1, 1)[ids // N_BLOCK, ids % N_BLOCK]

    if scales.dtype is not torch.uint8:
        return wanted(scales).float()
    units, codes = scales.tensor_split([scales.shape[-1] // 5], -1)  # of each eight groups
    units = wanted(units.view(torch.float16).unflatten(-1, (1, -1, N_BLOCK)))
    # Of signed bytes: what they are above -128.
    codes = wanted(codes.unflatten(-1, (8, -1, N_BLOCK))) ^ 128
    first = 1 if ids is None else ids.dim()
    return (units.float() * (codes.float() - 128)).flatten(first, first + 1)
