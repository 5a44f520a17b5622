"""LoRA adapters in the layouts of the CPU's kernels, see adapters.h.

In: the updates of products as plain matrices, and the rows of a step that have adapters. Out: the
same updates packed, and segments of rows as integers that describe them to the kernels. Files,
ranks and modules must not be known here.

Shapes: N outputs and K inputs of a product, R the rank, S segments.
"""

import struct
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.common.allocation import use_huge_pages
from llama.kernels.cpu.constants import DELTA_FIELDS, RANK_BLOCK, SHRINK_COLUMNS
from llama.ops.adapters import (
    MAX_PARTS,
    AdapterRows,
    AdapterWeights,
    Delta,
    DeltaPart,
    ProductUpdates,
)
from llama.ops.formats import N_BLOCK, num_blocks

_PART_FIELDS = 6
_ALIGNMENT = 32  # elements of a cache line
_NO_SEGMENTS = torch.empty(0, dtype=torch.int64)
_NO_MIDDLE = torch.empty(0)


class PackedDelta(Delta):
    """An update in the layouts of adapters.h.

    Attributes:
        fields: The fields of `Delta` in kernels.h, whose addresses live as long as this object.
        middle_width: The elements of down * x of one row, for all chunks of columns.
    """

    def __init__(self, parts: Sequence[DeltaPart], memory: Tensor) -> None:
        """Pack an update.

        Args:
            parts: The parts of the outputs that it changes.
            memory: The bf16 elements that it takes, at the beginning of a cache line.
        """
        k = parts[0].down.shape[1]
        self._k = k
        self._scales = [part.scale for part in parts]
        self._outputs = [(part.first, len(part.up)) for part in parts]
        self._ranks = [len(part.down) for part in parts]
        down = torch.cat([_packed_down(part.down) for part in parts])
        tensors = [down, *map(_packed_up, parts)]
        pieces = memory.split([_aligned(tensor.numel()) for tensor in tensors])
        copies = []
        for tensor, piece in zip(tensors, pieces, strict=True):
            copies.append(piece[: tensor.numel()].view(tensor.shape).copy_(tensor))
        self._down, *self._ups = copies
        ranks = len(self._down) * RANK_BLOCK
        self.middle_width = ranks * -(-k // SHRINK_COLUMNS)
        fields = [self._down.data_ptr(), ranks]
        offset = 0
        for part, up in zip(parts, self._ups, strict=True):
            (scale_bits,) = struct.unpack("q", struct.pack("d", part.scale))
            rank = 2 * up.shape[1]
            first_block = part.first // N_BLOCK
            fields += [up.data_ptr(), first_block, len(up), rank, offset, scale_bits]
            offset += -(-len(part.down) // RANK_BLOCK) * RANK_BLOCK
        fields += [0] * (_PART_FIELDS * (MAX_PARTS - len(parts)))
        self.fields = torch.tensor(fields)

    @property
    def parts(self) -> Sequence[DeltaPart]:  # type: ignore[override]
        """Return the parts as plain matrices, for PyTorch: copies."""
        parts = []
        blocks_of_parts = [-(-rank // RANK_BLOCK) for rank in self._ranks]
        downs = self._down.split(blocks_of_parts)
        for i, (first, n) in enumerate(self._outputs):
            rank = self._ranks[i]
            down = downs[i].transpose(1, 2).reshape(-1, self._k)[:rank]
            up = self._ups[i].transpose(1, 2).flatten(0, 1).flatten(1)
            begin = first % N_BLOCK
            up = up[begin : begin + n, :rank]
            parts.append(DeltaPart(first, up, down, self._scales[i]))
        return parts

    @property
    def nbytes(self) -> int:
        """Return the bytes of its matrices."""
        num_bytes: int = self._down.nbytes + sum(up.nbytes for up in self._ups)
        return num_bytes


def packed_deltas(parts_of: Mapping[str, Sequence[DeltaPart]]) -> dict[str, PackedDelta]:
    """Return the updates of products in the layouts of adapters.h, by the products' names.

    They lie in one allocation, which has huge pages: small pages cost a step up to 1 % of its time.
    """
    sizes = [_num_packed(parts) for parts in parts_of.values()]
    memory = use_huge_pages(torch.empty(sum(sizes), dtype=torch.bfloat16))
    deltas = {}
    for name, piece in zip(parts_of, memory.split(sizes), strict=True):
        deltas[name] = PackedDelta(parts_of[name], piece)
    return deltas


def _num_packed(parts: Sequence[DeltaPart]) -> int:
    """Return the number of elements that an update takes."""
    num_down: int = 0
    num_up: int = 0
    for part in parts:
        rank, k = part.down.shape
        num_down += -(-rank // RANK_BLOCK) * RANK_BLOCK * k
        num_rows = num_blocks(part.first % N_BLOCK + len(part.up)) * N_BLOCK
        num_up += _aligned(num_rows * (rank + rank % 2))
    total: int = _aligned(num_down) + num_up
    return total


def _aligned(num_elements: int) -> int:
    """Return a number of bf16 that fills whole cache lines."""
    return -(-num_elements // _ALIGNMENT) * _ALIGNMENT


def _packed_down(down: Tensor) -> Tensor:
    """Return down (R, K) as (R / 16, K / 2, 16, 2) bf16; rows of zeros fill the last block."""
    rank, k = down.shape
    padded = F.pad(down.bfloat16(), (0, 0, 0, -rank % RANK_BLOCK))
    return padded.view(-1, RANK_BLOCK, k // 2, 2).transpose(1, 2).contiguous()


def _packed_up(part: DeltaPart) -> Tensor:
    """Return up (N, R) as (blocks, R / 2, 32, 2) bf16, in the blocks of the whole product."""
    n, rank = part.up.shape
    before = part.first % N_BLOCK
    num_rows = num_blocks(before + n) * N_BLOCK
    after = num_rows - before - n
    padded = F.pad(part.up.bfloat16(), (0, rank % 2, before, after))
    return padded.view(-1, N_BLOCK, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


class PackedAdapter(AdapterWeights):
    """The packed updates of all products of a model by one adapter, on one rank.

    Attributes:
        table: (products, DELTA_FIELDS), the fields of all products in the order of the layers, with
            zeros where the adapter leaves a product as it is.
        max_width: The largest `middle_width` of an update.
    """

    def __init__(
        self, parts_of: Mapping[str, Sequence[DeltaPart]], products: Sequence[str]
    ) -> None:
        """Pack the updates of a model.

        Args:
            parts_of: The parts of each update, by the name of the product's first matrix.
            products: The names of all products, in the order of the layers.
        """
        packed = packed_deltas(parts_of)
        super().__init__(packed)
        self.max_width = max((delta.middle_width for delta in packed.values()), default=0)
        absent = torch.zeros(DELTA_FIELDS, dtype=torch.int64)
        rows = [packed[name].fields if name in packed else absent for name in products]
        self.table = torch.stack(rows)


def product_segments(updates: ProductUpdates | None) -> tuple[Tensor, Tensor]:
    """Return the segments (S, SEGMENT_FIELDS) of a product, and the memory that the kernels need.

    Both are empty where there are no updates.
    """
    if updates is None:
        return _NO_SEGMENTS, _NO_MIDDLE
    fields = []
    num_elements = 0
    for first, count, delta in updates.segments:
        assert isinstance(delta, PackedDelta), "the adapter is not packed for the CPU kernels"
        fields.append([first, count, delta.fields.data_ptr()])
        num_elements += count * delta.middle_width
    return torch.tensor(fields), torch.empty(num_elements)


def step_segments(adapters: AdapterRows | None) -> tuple[Tensor, Tensor]:
    """Return the segments (S, SEGMENT_FIELDS) of a step, and the memory for the largest product.

    Both are empty where no row has an adapter.
    """
    if adapters is None:
        return _NO_SEGMENTS, _NO_MIDDLE
    fields = []
    num_elements = 0
    for first, count, adapter in adapters.segments:
        assert isinstance(adapter, PackedAdapter), "the adapter is not packed for the CPU kernels"
        fields.append([first, count, adapter.table.data_ptr()])
        num_elements += count * adapter.max_width
    return torch.tensor(fields), torch.empty(num_elements)
