"""The blocks in which GGUF stores quantized rows, unpacked without changing a value.

In: the bytes of a file, and the tensor type. Out: a `GGUFMatrix`, whose rows become a `Coded`, or a
packed weight of `llama.weights` without an intermediate. Each type has one function that unpacks
its blocks, and a table of what its codes stand for. The layouts are those of ggml-common.h and of
gguf-py's quants.py in https://github.com/ggml-org/llama.cpp.

Shapes: N rows, K columns, n blocks.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from llama.checkpoint.quantized_matrix import PackTarget, QuantizedMatrix
from llama.kernels.cpu import native
from llama.kernels.cpu.constants import PackState
from llama.ops.formats import num_blocks
from llama.storage.downloads import broken
from llama.storage.gguf import TensorInfo, TensorType
from llama.weights.coded import Coded


class Unpacked(NamedTuple):
    """The codes, scales and offsets of n blocks.

    Attributes:
        codes: (n, elements of a block) uint8.
        scales: (n, groups of a block) float32.
        offsets: The same shape, or None where the type has no offsets.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None


def _float16(field: Tensor) -> Tensor:
    """Return the float16 in two bytes of each block: (n, 2) -> (n, 1) float32."""
    return field.contiguous().view(torch.float16).float()


def _bit_fields(data: Tensor, bits: int, run: int) -> Tensor:
    """Split bytes into fields of a few bits: (n, bytes) -> (n, bytes * 8 / bits).

    `run` bytes give `run` fields from their lowest bits, then `run` from the next ones. For
    example, with 4 bits and a run of 2, the bytes 0x21 0x43 give 1 3 2 4.
    """
    runs = data.reshape(len(data), -1, run)
    mask = (1 << bits) - 1
    fields = [runs >> shift & mask for shift in range(0, 8, bits)]
    return torch.stack(fields, 2).flatten(1)


def _unpack_32(blocks: Tensor, has_offset: bool = False, has_fifth_bit: bool = False) -> Unpacked:
    """Unpack Q4_0, Q4_1, Q5_0, Q5_1 and IQ4_NL.

    A block is the scale, the offset, the fifth bits and the lower four bits of 32 codes.
    """
    sizes = [2, 2 if has_offset else 0, 4 if has_fifth_bit else 0, 16]
    scale, offset, fifth_bits, low_bits = torch.split(blocks, sizes, 1)
    codes = _bit_fields(low_bits, 4, 16)
    if has_fifth_bit:
        codes |= _bit_fields(fifth_bits, 1, 1) << 4
    return Unpacked(codes, _float16(scale), _float16(offset) if has_offset else None)


def _unpack_q8_0(blocks: Tensor) -> Unpacked:
    scale, signed_codes = torch.split(blocks, [2, 32], 1)
    return Unpacked(signed_codes ^ 128, _float16(scale), None)  # codes count from -128 on


def _unpack_q2_k(blocks: Tensor) -> Unpacked:
    group_fields, code_fields, scale, min_scale = torch.split(blocks, [16, 64, 2, 2], 1)
    codes = _bit_fields(code_fields, 2, 32)
    groups = _bit_fields(group_fields, 4, 16).float()
    scales, minima = groups.chunk(2, 1)
    offsets = -(_float16(min_scale) * minima)
    return Unpacked(codes, _float16(scale) * scales, offsets)


def _unpack_q3_k(blocks: Tensor) -> Unpacked:
    high_bits, low_bits, low_scales, high_scales, scale = torch.split(blocks, [32, 64, 8, 4, 2], 1)
    codes = _bit_fields(low_bits, 2, 32)
    codes |= _bit_fields(high_bits, 1, 32) << 2
    scales = _bit_fields(low_scales, 4, 8)
    scales |= _bit_fields(high_scales, 2, 4) << 4
    signed_scales = scales.float() - 32
    return Unpacked(codes, _float16(scale) * signed_scales, None)


def _unpack_q4_k(blocks: Tensor, has_fifth_bit: bool = False) -> Unpacked:
    """Unpack Q4_K and Q5_K, with eight scales and eight minima of six bits each."""
    sizes = [2, 2, 4, 4, 4, 32 if has_fifth_bit else 0, 128]
    scale, min_scale, low, middle, high, fifth_bits, low_bits = torch.split(blocks, sizes, 1)
    codes = _bit_fields(low_bits, 4, 32)
    if has_fifth_bit:
        codes |= _bit_fields(fifth_bits, 1, 32) << 4
    # The last four scales and minima have their lower four bits in `high`.
    last_scales = high & 15 | low >> 6 << 4
    last_minima = high >> 4 | middle >> 6 << 4
    scales = torch.cat([low & 63, last_scales], 1)
    minima = torch.cat([middle & 63, last_minima], 1)
    offsets = -(_float16(min_scale) * minima)
    return Unpacked(codes, _float16(scale) * scales, offsets)


def _unpack_q6_k(blocks: Tensor) -> Unpacked:
    low_bits, high_bits, signed_scales, scale = torch.split(blocks, [128, 64, 16, 2], 1)
    codes = _bit_fields(low_bits, 4, 64)
    codes |= _bit_fields(high_bits, 2, 32) << 4
    scales = (signed_scales ^ 128).float() - 128
    return Unpacked(codes, _float16(scale) * scales, None)


def _unpack_iq4_xs(blocks: Tensor) -> Unpacked:
    scale, high_scales, low_scales, code_fields = torch.split(blocks, [2, 2, 4, 128], 1)
    codes = _bit_fields(code_fields, 4, 16)
    scales = _bit_fields(low_scales, 4, 1)
    scales |= _bit_fields(high_scales, 2, 1) << 4
    signed_scales = scales.float() - 32
    return Unpacked(codes, _float16(scale) * signed_scales, None)


class _Layout(NamedTuple):
    """How the blocks of a type are read: what its codes stand for, and the function in PyTorch."""

    table: Sequence[int]
    unpack: Callable[[Tensor], Unpacked]


_unpack_q4_1 = functools.partial(_unpack_32, has_offset=True)
_unpack_q5_0 = functools.partial(_unpack_32, has_fifth_bit=True)
_unpack_q5_1 = functools.partial(_unpack_32, has_offset=True, has_fifth_bit=True)
_unpack_q5_k = functools.partial(_unpack_q4_k, has_fifth_bit=True)
_IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_LAYOUTS = {
    "Q4_0": _Layout(range(-8, 8), _unpack_32),
    "Q4_1": _Layout(range(16), _unpack_q4_1),
    "Q5_0": _Layout(range(-16, 16), _unpack_q5_0),
    "Q5_1": _Layout(range(32), _unpack_q5_1),
    "Q8_0": _Layout(range(-128, 128), _unpack_q8_0),
    "Q2_K": _Layout(range(4), _unpack_q2_k),
    "Q3_K": _Layout(range(-4, 4), _unpack_q3_k),
    "Q4_K": _Layout(range(16), _unpack_q4_k),
    "Q5_K": _Layout(range(32), _unpack_q5_k),
    "Q6_K": _Layout(range(-32, 32), _unpack_q6_k),
    "IQ4_NL": _Layout(_IQ4_TABLE, _unpack_32),
    "IQ4_XS": _Layout(_IQ4_TABLE, _unpack_iq4_xs),
}


@dataclass(frozen=True, eq=False)
class GGUFMatrix(QuantizedMatrix):
    """A quantized matrix of a GGUF file.

    Attributes:
        file: The file.
        info: Where the matrix lies in the file, and how.
        data: (N, bytes of a row) uint8, mapped from the file.
    """

    file: Path
    info: TensorInfo
    data: Tensor

    @property
    def layout_key(self) -> Hashable:
        """Blocks of one type have the same table and groups everywhere."""
        return self.info.type.name, self.shape

    def read(self, rows: slice, columns: slice, device: torch.device) -> Coded:
        """Return some rows and columns; of each row only the blocks that hold them are read."""
        tensor_type = self.info.type
        block_size = tensor_type.block_size
        begin = columns.start // block_size * block_size
        end = -(-columns.stop // block_size) * block_size
        first_byte = tensor_type.bytes_of(begin)
        end_byte = tensor_type.bytes_of(end)
        blocks = self.data[rows, first_byte:end_byte].to(device)
        coded = _unpack(blocks, tensor_type)
        return coded.columns(columns.start - begin, columns.stop - begin)

    def pack(self, rows: range, columns: slice, target: PackTarget) -> bool:
        """Fill the tensors of a packed weight by a CPU kernel, without an intermediate."""
        if not self._can_pack(rows, columns, target):
            return False
        tensor_type = self.info.type
        row_bytes = self.info.num_bytes // self.info.shape[0]
        first_byte = rows.start * row_bytes + tensor_type.bytes_of(columns.start)
        table = _LAYOUTS[tensor_type.name].table
        state = torch.zeros((), dtype=torch.int64)
        with self.file.open("rb") as source:
            native.call(
                "pack_gguf",
                target.values,
                target.scales,
                torch.tensor(table, dtype=torch.float32),
                state,
                source.fileno(),
                self.info.offset + first_byte,
                row_bytes,
                len(rows),
                columns.stop - columns.start,
                target.like.group,
                1 if target.like.offset is None else 2,
                _native_type(tensor_type.name),
                len(table),
                target.weight_kind,
                int(target.like.table[0]),
            )
        if state == PackState.FILE_TOO_SHORT:
            raise broken(self.file, "became shorter while it was read")
        return state.item() == PackState.PACKED

    def _can_pack(self, rows: range, columns: slice, target: PackTarget) -> bool:
        """Return whether the kernel can fill tensors of these sizes and types."""
        block_size = self.info.type.block_size
        num_columns = columns.stop - columns.start
        blocks = num_blocks(len(rows))
        # The kernel copies scales as they are: a float16, or several bytes and a float16.
        scale_dtype = torch.uint8 if block_size > 32 else torch.float16
        return (
            columns.start % block_size == 0
            and num_columns % block_size == 0
            and num_columns == target.like.shape[1]
            and len(target.values) == blocks
            and len(target.scales) == blocks
            and target.scales.dtype is scale_dtype
        )


def _native_type(name: str) -> int:
    """Return the number by which the CPU kernels know a tensor type."""
    number = native.call("gguf_type", name)
    assert number >= 0, name
    return number


def _unpack(rows: Tensor, tensor_type: TensorType) -> Coded:
    """Unpack whole rows (N, bytes) on their device, by the CPU kernels where they run."""
    layout = _LAYOUTS[tensor_type.name]
    blocks = rows.reshape(-1, tensor_type.block_bytes).contiguous()
    if rows.device.type == "cpu" and native.kernels() is not None:
        unpacked = _unpack_natively(blocks, tensor_type.name)
    else:
        unpacked = layout.unpack(blocks)
    n = len(rows)
    return Coded(
        codes=unpacked.codes.view(n, -1),
        table=torch.tensor(layout.table, dtype=torch.float32, device=rows.device),
        scale=unpacked.scales.view(n, -1),
        offset=None if unpacked.offsets is None else unpacked.offsets.view(n, -1),
    )


def _unpack_natively(blocks: Tensor, name: str) -> Unpacked:
    n = len(blocks)
    sample = _LAYOUTS[name].unpack(blocks[:1])  # it has the shapes and types of the result
    codes = sample.codes.new_empty(n, sample.codes.shape[1])
    scales = sample.scales.new_empty(n, sample.scales.shape[1])
    offsets = None if sample.offsets is None else torch.empty_like(scales)
    written_offsets = scales if offsets is None else offsets  # not written without offsets
    native.call("unpack_gguf", blocks, codes, scales, written_offsets, _native_type(name), n)
    return Unpacked(codes, scales, offsets)
