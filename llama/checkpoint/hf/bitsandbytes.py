"""Matrices of bitsandbytes in 4 bits: NF4 and FP4.

In: the tensors of one matrix, by the last parts of their names. Out: a `CodedMatrix`. The packed
bytes may be stored as any type (`bnb_4bit_quant_storage`). Blocks of codes that share a scale are
counted through the whole matrix, row after row, and their scales may be quantized themselves.

Shapes: N outputs, K inputs.
"""

import json
import math
from dataclasses import dataclass

import torch
from torch import Size, Tensor

from llama.checkpoint.hf.bit_packing import covering
from llama.checkpoint.hf.coded_matrix import CodedMatrix, Config, Parts, check_fits

_STATE = "weight.quant_state.bitsandbytes__"
_TYPES = ("nf4", "fp4")


@dataclass(frozen=True)
class _NestedScales:
    """Scales that are quantized themselves ("double quantization").

    Attributes:
        scale: A scale for each block of `block_size` codes of scales.
        table: (256) what these codes stand for.
        block_size: Codes that share a scale.
        offset: What is added to each.
    """

    scale: Tensor
    table: Tensor
    block_size: int
    offset: float

    def read(self, codes: Tensor, indices: Tensor) -> Tensor:
        """Return the scales that codes stand for, given which of all codes they are."""
        return self.table[codes.int()] * self.scale[indices // self.block_size] + self.offset


@dataclass(frozen=True, eq=False)
class _FourBitMatrix(CodedMatrix):
    """A matrix in NF4 or FP4. `scale` has one dimension: a scale, or its code, for each block.

    Attributes:
        data: (N, K / 2) uint8, two codes in a byte, the first in the upper four bits.
        block_size: Codes that share a scale.
        nested: How `scale`, which then has codes, becomes scales; None where it has scales.
    """

    data: Tensor
    block_size: int
    nested: _NestedScales | None

    def codes(self, rows: slice, columns: slice) -> Tensor:
        items, within = covering(columns, 2)
        pairs = self.data[rows, items]
        codes = torch.stack([pairs >> 4, pairs & 15], -1)
        return codes.flatten(1)[:, within]

    def scales(self, rows: slice) -> Tensor:
        k = self.shape[1]
        first_codes = torch.arange(rows.start * k, rows.stop * k, self.columns_per_scale)
        indices = first_codes.view(-1, k // self.columns_per_scale) // self.block_size
        scale = self.scale[indices]
        return scale if self.nested is None else self.nested.read(scale, indices)


def is_four_bits(parts: Parts) -> bool:
    """Return whether tensors are those of a matrix of bitsandbytes in 4 bits."""
    return any(_STATE + name in parts for name in _TYPES)


def four_bits(parts: Parts, _: Config) -> CodedMatrix:
    """Build a matrix of bitsandbytes in NF4 or FP4."""
    name = next(name for name in _TYPES if _STATE + name in parts)
    state = json.loads(bytes(parts.pop(_STATE + name).tolist()))
    n, k = state["shape"]
    block_size = state["blocksize"]
    data = parts.pop("weight").view(torch.uint8).view(n, k // 2)
    scale = parts.pop("weight.absmax").flatten()
    table = parts.pop("weight.quant_map")
    check_fits(state["quant_type"] == name)
    check_fits(k % 2 == 0)
    check_fits(len(scale) == -(-n * k // block_size))
    check_fits(table.shape == (16,))
    nested = None
    if "weight.nested_absmax" in parts and "weight.nested_quant_map" in parts:
        nested = _NestedScales(
            parts.pop("weight.nested_absmax"),
            parts.pop("weight.nested_quant_map"),
            state["nested_blocksize"],
            state["nested_offset"],
        )
        check_fits(len(nested.scale) * nested.block_size >= len(scale))
        check_fits(len(nested.table) == 256)
    # A block may begin within a row, where the columns of a row do not fill blocks.
    step = math.gcd(k, block_size)
    shape = Size((n, k))
    return _FourBitMatrix(shape, table, scale, data, block_size, nested, columns_per_scale=step)
