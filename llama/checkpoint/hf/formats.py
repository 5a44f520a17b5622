"""The quantized formats of Hugging Face's folders and of Meta's INT4_EO8, one function for each.

In: the tensors of one matrix, by the last parts of their names, and the quantization_config. Out: a
`CodedMatrix`, which reads rows and columns of them. A function removes the tensors that it uses
from the dict, so that its caller sees whether any is left. If the tensors do not fit one another,
it raises one of MISFITS, and the caller adds the names of the file and the matrix.

The formats are those of compressed-tensors, fbgemm_fp8 and modelopt (FP8), AutoAWQ (gemm), GPTQ and
bitsandbytes; and INT4_EO8 of llama-models' quantization/loader.py. The file has over 400 lines
because the functions of all formats share its helpers.

Shapes: N outputs, K inputs, G groups along K.
"""

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Size, Tensor

from llama.checkpoint.hf.bit_packing import PackedAcrossRows, covering, unpack_int32
from llama.checkpoint.quantized_matrix import QuantizedMatrix
from llama.common.checks import brief
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
INT4_EO8_SCHEME = "int4_weight_int8_dynamic_activation"
NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
_E4M3_TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_INT8_TABLE = torch.arange(-128.0, 128)
_INT4_TABLE = torch.arange(-8.0, 8)
_AWQ_BITS = 4
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the four bits of an int32 that hold neighbours 0 to 7


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
        scale: (N / r, G), where r neighbouring rows share the scales.
        group_of: (K) the group of each column, where groups are not neighbours.
        adapter: An adapter that is added.
    """

    table: Tensor
    scale: Tensor
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
        indices = torch.arange(rows.start, rows.stop)
        return self.scale[indices * len(self.scale) // self.shape[0]]

    def read(self, rows: slice, columns: slice, device: torch.device) -> Coded:
        """Return some rows and columns, given with both ends, on a device."""
        scales = self.scales(rows).float()
        offsets = self._offsets(rows, scales)
        groups = self._groups(columns, scales.shape[1])
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

    def _groups(self, columns: slice, num_groups: int) -> Tensor:
        """Return the group of each run of columns that has one scale, as `Coded` wants them."""
        if self.group_of is not None:
            return self.group_of[columns]
        group_size = self.shape[1] // num_groups
        step = math.gcd(group_size, columns.start, columns.stop)
        return torch.arange(columns.start, columns.stop, step) // group_size


@dataclass(frozen=True, eq=False)
class _ByteCodes(CodedMatrix):
    """A matrix with a code in each byte.

    Attributes:
        data: (N, K) uint8.
        sign_bit: What is flipped in a byte to make its code: 128 for signed bytes, else 0.
    """

    data: Tensor
    sign_bit: int

    def codes(self, rows: slice, columns: slice) -> Tensor:
        return self.data[rows, columns] ^ self.sign_bit


def eight_bits(parts: Parts, _: Config) -> CodedMatrix:
    """Build a matrix in FP8 (e4m3) or int8, of compressed-tensors, bitsandbytes and others."""
    weight = parts.pop("weight")
    n, k = weight.shape
    is_fp8 = weight.dtype is torch.float8_e4m3fn
    check_fits(is_fp8 or weight.dtype is torch.int8)
    weight_format = parts.pop("weight_format", None)  # bitsandbytes: 0 is row by row
    check_fits(weight_format is None or not weight_format.any())
    # SCB, of bitsandbytes, has the largest magnitude of each row.
    scale = parts.pop("SCB") / 127 if "SCB" in parts else parts.pop("weight_scale")
    num_scales = len(scale) if scale.dim() else 1
    scale = scale.reshape(num_scales, -1)
    check_fits(n % num_scales == 0)
    check_fits(k % scale.shape[1] == 0)
    data = weight.view(torch.uint8)
    if is_fp8:
        return _ByteCodes(weight.shape, _E4M3_TABLE, scale, data, sign_bit=0)
    return _ByteCodes(weight.shape, _INT8_TABLE, scale, data, sign_bit=128)


@dataclass(frozen=True, eq=False)
class _PackedMatrix(CodedMatrix):
    """A matrix of which each int32 holds several codes along K.

    Attributes:
        packed: (N, K * bits / 32) int32.
        bits: Bits per code.
        zeros: The zero points (N, G), packed across rows.
    """

    packed: Tensor
    bits: int
    zeros: PackedAcrossRows | None

    def codes(self, rows: slice, columns: slice) -> Tensor:
        items, within = covering(columns, 32 // self.bits)
        codes = unpack_int32(self.packed[rows, items], self.bits)
        return codes[:, within]

    def zero_points(self, rows: slice) -> Tensor | None:
        if self.zeros is None:
            return None
        return self.zeros.read(rows, slice(0, self.scale.shape[1]))


def _packed_matrix(
    bits: int, packed: Tensor, scale: Tensor, zeros: Tensor | None, group_of: Tensor | None
) -> CodedMatrix:
    """Build a matrix from int32s with codes along K.

    Args:
        bits: Bits per code.
        packed: (N, K * bits / 32) int32.
        scale: (N, G).
        zeros: (G, N * bits / 32) int32, the zero points.
        group_of: (K) the group of each column.
    """
    if bits not in (2, 4, 8):
        raise ValueError(f"it has {bits} bits, and 2, 4 and 8 are read")
    per_int32 = 32 // bits
    n = len(packed)
    k = packed.shape[1] * per_int32
    num_groups = scale.shape[1]
    check_fits(packed.dtype is torch.int32)
    check_fits(len(scale) == n)
    check_fits(k % num_groups == 0)
    if group_of is not None:
        check_fits(group_of.shape == (k,))
        check_fits(group_of.dtype in (torch.int32, torch.int64))
        check_fits(bool((group_of >= 0).all()))
        check_fits(bool((group_of < num_groups).all()))
        neighbours = torch.arange(k) // (k // num_groups)
        if torch.equal(group_of, neighbours):
            group_of = None  # groups of neighbours, which need no table
    packed_zeros = None
    if zeros is not None:
        packed_zeros = PackedAcrossRows(zeros, bits, range(per_int32))
        check_fits(packed_zeros.fits(*scale.shape))
    half = 1 << bits - 1
    table = torch.arange(-half, half).float()
    return _PackedMatrix(Size((n, k)), table, scale, packed, bits, packed_zeros, group_of=group_of)


def compressed_tensors(parts: Parts, _: Config) -> CodedMatrix:
    """Build a matrix of compressed-tensors in the format pack-quantized."""
    packed = parts.pop("weight_packed")
    zeros = parts.pop("weight_zero_point", None)
    shape = parts.pop("weight_shape").tolist()
    group_of = parts.pop("weight_g_idx", None)
    scale = parts.pop("weight_scale")
    bits = packed.shape[1] * 32 // shape[1]  # modules of one model may differ
    if zeros is not None:
        zeros = zeros.t()
    matrix = _packed_matrix(bits, packed, scale, zeros, group_of)
    check_fits(matrix.shape == Size(shape))
    return matrix


def gptq(parts: Parts, config: Config) -> CodedMatrix:
    """Build a matrix of GPTQ, whose version 1 stores each zero point less one."""
    bits = config["bits"]
    zeros = parts.pop("qzeros")
    version = config.get("checkpoint_format") or "gptq"
    check_fits(version in ("gptq", "gptq_v2"))
    if version == "gptq":
        # The subtraction borrowed from the next field of an int32; this addition carries back.
        zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))
    packed = parts.pop("qweight").t()
    scale = parts.pop("scales").t()
    return _packed_matrix(bits, packed, scale, zeros, parts.pop("g_idx", None))


@dataclass(frozen=True, eq=False)
class _AwqMatrix(CodedMatrix):
    """A matrix of AutoAWQ, with codes and zero points packed across rows."""

    packed: PackedAcrossRows
    zeros: PackedAcrossRows

    def codes(self, rows: slice, columns: slice) -> Tensor:
        return self.packed.read(rows, columns)

    def zero_points(self, rows: slice) -> Tensor:
        return self.zeros.read(rows, slice(0, self.scale.shape[1]))


def awq(parts: Parts, config: Config) -> CodedMatrix:
    """Build a matrix of AutoAWQ, version gemm."""
    version = config.get("version", "gemm")
    bits = config["bits"]
    if str(version).lower() != "gemm" or bits != _AWQ_BITS:
        raise ValueError(f"it is {brief(version)} of {brief(bits)} bits, not gemm of 4")
    int32s = parts.pop("qweight")
    k = int32s.shape[0]
    n = int32s.shape[1] * 32 // _AWQ_BITS
    scale = parts.pop("scales").t()
    packed = PackedAcrossRows(int32s, _AWQ_BITS, _AWQ_ORDER)
    zeros = PackedAcrossRows(parts.pop("qzeros"), _AWQ_BITS, _AWQ_ORDER)
    check_fits(len(scale) == n)
    check_fits(k % scale.shape[1] == 0)
    check_fits(packed.fits(n, k))
    check_fits(zeros.fits(*scale.shape))
    return _AwqMatrix(Size((n, k)), _INT4_TABLE, scale, packed, zeros)


@dataclass(frozen=True)
class _NestedScales:
    """Scales that are quantized themselves ("double quantization").

    Attributes:
        scale: A scale for each block of `block_size` codes, counted through the whole matrix.
        table: (256) what the codes stand for.
        block_size: Codes that share a scale.
        offset: What is added to each.
    """

    scale: Tensor
    table: Tensor
    block_size: int
    offset: float

    def read(self, codes: Tensor, first: int) -> Tensor:
        """Return the scales of codes (n, G), the first of which is number `first` of all."""
        indices = torch.arange(first, first + codes.numel())
        scale = self.scale[indices // self.block_size].view(codes.shape)
        return self.table[codes.int()] * scale + self.offset


@dataclass(frozen=True, eq=False)
class _Nf4Matrix(CodedMatrix):
    """A matrix of bitsandbytes in NF4.

    Attributes:
        data: (N, K / 2) uint8, two codes in a byte, the first in the upper four bits.
        nested: How `scale`, which then has codes, becomes scales; None where it has scales.
    """

    data: Tensor
    nested: _NestedScales | None

    def codes(self, rows: slice, columns: slice) -> Tensor:
        items, within = covering(columns, 2)
        pairs = self.data[rows, items]
        codes = torch.stack([pairs >> 4, pairs & 15], -1)
        return codes.flatten(1)[:, within]

    def scales(self, rows: slice) -> Tensor:
        scale = self.scale[rows]
        if self.nested is None:
            return scale
        return self.nested.read(scale, rows.start * self.scale.shape[1])


def nf4(parts: Parts, _: Config) -> CodedMatrix:
    """Build a matrix of bitsandbytes in NF4."""
    state = json.loads(bytes(parts.pop(NF4_STATE).tolist()))
    n, k = state["shape"]
    data = parts.pop("weight").view(n, k // 2)
    scale = parts.pop("weight.absmax").view(n, -1)
    check_fits(state["quant_type"] == "nf4")
    check_fits(scale.shape[1] * state["blocksize"] == k)
    table = parts.pop("weight.quant_map")
    check_fits(table.shape == (16,))
    nested = None
    if "weight.nested_absmax" in parts and "weight.nested_quant_map" in parts:
        nested = _NestedScales(
            parts.pop("weight.nested_absmax"),
            parts.pop("weight.nested_quant_map"),
            state["nested_blocksize"],
            state["nested_offset"],
        )
        check_fits(len(nested.scale) * nested.block_size >= scale.numel())
        check_fits(len(nested.table) == 256)
    return _Nf4Matrix(Size((n, k)), table, scale, data, nested)


@dataclass(frozen=True, eq=False)
class _Int4EO8Matrix(CodedMatrix):
    """A matrix of Meta's INT4_EO8, with a number from -8 to 7 in each signed byte.

    Attributes:
        data: (N, K) int8.
        zeros: (N, G) the zero points, less 8, or a view of a single 0.
    """

    data: Tensor
    zeros: Tensor

    def codes(self, rows: slice, columns: slice) -> Tensor:
        codes = (self.data[rows, columns] + 8).view(torch.uint8)
        if codes.max() > 15:
            raise ValueError("an element does not fit in 4 bits")
        return codes

    def zero_points(self, rows: slice) -> Tensor:
        return self.zeros[rows].float() + 8


def int4_eo8(parts: Parts, config: Config) -> CodedMatrix:
    """Build a matrix of INT4_EO8: 4 bits, or 8 where each row has one scale.

    The embedding and lm_head have 8 bits.
    """
    weight = parts.pop("weight")
    scale = parts.pop("scales")
    n, k = weight.shape
    in_eight_bits = eight_bits({"weight": weight, "weight_scale": scale}, {})
    check_fits(weight.dtype is torch.int8)
    check_fits(len(scale) == n)
    if scale.numel() == n:
        return in_eight_bits
    zeros = parts.pop("zeros", torch.zeros(()).expand(scale.shape))
    check_fits(zeros.shape == scale.shape)
    adapter = None
    if "rank" in config:
        # Meta's files spell these names so.
        down = parts.pop("adaptor.A.weight")
        up = parts.pop("adaptor.B.weight")
        check_fits(down.shape == (config["rank"], k))
        check_fits(up.shape == (n, config["rank"]))
        adapter = Adapter(down, up, config["scale"])
    scale = in_eight_bits.scale
    return _Int4EO8Matrix(weight.shape, _INT4_TABLE, scale, weight, zeros, adapter=adapter)


def check_fits(fits: bool) -> None:
    """Raise the ValueError for tensors that are not those of a format unless they fit."""
    if not fits:
        raise ValueError("its tensors do not fit one another, or are of another version")
