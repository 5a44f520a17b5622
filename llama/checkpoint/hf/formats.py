"""The quantized formats of Hugging Face's folders and of Meta's INT4_EO8, one function for each.

In: the tensors of one matrix, by the last parts of their names, and the quantization_config. Out: a
`CodedMatrix`, which reads rows and columns of them. A function removes the tensors that it uses
from the dict, so that its caller sees whether any is left. If the tensors do not fit one another,
it raises one of MISFITS, and the caller adds the names of the file and the matrix.

The formats are those of compressed-tensors, FP8 of several programs, AutoAWQ (gemm and gemv), GPTQ
and bitsandbytes' int8; and INT4_EO8 of llama-models' quantization/loader.py.

Shapes: N outputs, K inputs, G groups along K.
"""

from dataclasses import dataclass

import torch
from torch import Size, Tensor

from llama.checkpoint.hf.bit_packing import PackedAcrossRows, PackedInRows
from llama.checkpoint.hf.coded_matrix import (
    Adapter,
    CodedMatrix,
    Config,
    Parts,
    check_fits,
    size_per_scale,
)
from llama.checkpoint.hf.quantization import (
    UnknownLayoutError,
    block_sizes,
    group_sizes,
    stores_zeros_less_one,
)
from llama.common.checks import brief

INT4_EO8_SCHEME = "int4_weight_int8_dynamic_activation"
_E4M3_TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_INT8_TABLE = torch.arange(-128.0, 128)
_INT4_TABLE = torch.arange(-8.0, 8)
_GPTQ_BITS = (2, 3, 4, 8)  # With other numbers, the bits of a code lie apart.
_AWQ_BITS = 4
_GEMV_PADDING = 32  # Rows of scales are padded to a multiple of 8, 16 or 32.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the four bits of an int32 that hold neighbours 0 to 7


@dataclass(frozen=True, eq=False)
class _ByteCodes(CodedMatrix):
    """A matrix with a code in each byte.

    Attributes:
        data: (N, K) uint8.
        sign_bit: What is flipped in a byte to make its code: 128 for signed bytes, else 0.
        zeros: The zero points, less `sign_bit`, in the shape of the scales.
    """

    data: Tensor
    sign_bit: int
    zeros: Tensor | None

    def codes(self, rows: slice, columns: slice) -> Tensor:
        return self.data[rows, columns] ^ self.sign_bit

    def zero_points(self, rows: slice) -> Tensor | None:
        if self.zeros is None:
            return None
        zeros = self.zeros[torch.arange(rows.start, rows.stop) // self.rows_per_scale]
        return zeros.float() + self.sign_bit


def eight_bits(parts: Parts, config: Config) -> CodedMatrix:
    """Build a matrix in FP8 (e4m3) or int8, of compressed-tensors, bitsandbytes and others.

    It has one scale, or one for each row, group of columns, or block of rows and columns, and in
    int8 as many zero points.
    """
    weight = parts.pop("weight")
    n, k = weight.shape
    is_fp8 = weight.dtype is torch.float8_e4m3fn
    check_fits(is_fp8 or weight.dtype is torch.int8)
    weight_format = parts.pop("weight_format", None)  # bitsandbytes: 0 is row by row
    check_fits(weight_format is None or not weight_format.any())
    scale = _scale_of_bytes(parts, config)
    num_rows, num_columns = scale.shape
    zeros = None if is_fp8 else parts.pop("weight_zero_point", None)
    if zeros is not None:
        check_fits(zeros.dtype is torch.int8)
        check_fits(zeros.numel() == scale.numel())
        zeros = zeros.reshape(scale.shape)
    blocks = block_sizes(config)
    rows = {rows for rows, _ in blocks}
    columns = {columns for _, columns in blocks} | group_sizes(config)
    return _ByteCodes(
        weight.shape,
        _E4M3_TABLE if is_fp8 else _INT8_TABLE,
        scale,
        weight.view(torch.uint8),
        sign_bit=0 if is_fp8 else 128,
        zeros=zeros,
        rows_per_scale=size_per_scale(n, num_rows, rows),
        columns_per_scale=size_per_scale(k, num_columns, columns),
    )


def _scale_of_bytes(parts: Parts, config: Config) -> Tensor:
    """Return the scales of a matrix in 8 bits, by blocks of rows and columns.

    A name that ends in `_inv` tells nothing: the factor is stored, unless the config calls it the
    inverse.
    """
    if "SCB" in parts:
        # SCB, of bitsandbytes, has the largest magnitude of each row.
        scale = parts.pop("SCB") / 127
    elif "weight_scale_inv" in parts:
        scale = parts.pop("weight_scale_inv")
        if config.get("weight_scale_semantics") == "inverse":
            scale = scale.float().reciprocal()
    else:
        scale = parts.pop("weight_scale")
    if scale.dtype is torch.uint8 and config.get("scale_fmt") == "ue8m0":
        scale = scale.view(torch.float8_e8m0fnu)
    if scale.dtype is torch.float8_e8m0fnu:
        scale = scale.float()
    num_rows = len(scale) if scale.dim() else 1
    return scale.reshape(num_rows, -1)


@dataclass(frozen=True, eq=False)
class _PackedMatrix(CodedMatrix):
    """A matrix of codes, and of zero points (N, G), that int32s hold."""

    packed: PackedInRows | PackedAcrossRows
    zeros: PackedInRows | PackedAcrossRows | None

    def codes(self, rows: slice, columns: slice) -> Tensor:
        return self.packed.read(rows, columns)

    def zero_points(self, rows: slice) -> Tensor | None:
        if self.zeros is None:
            return None
        return self.zeros.read(rows, slice(0, self.scale.shape[1]))


def _packed_matrix(
    bits: int,
    packed: Tensor,
    scale: Tensor,
    zeros: PackedAcrossRows | None,
    parts: Parts,
    config: Config,
) -> CodedMatrix:
    """Build a matrix from int32s with codes along K.

    Args:
        bits: Bits per code.
        packed: (N, K * bits / 32) int32.
        scale: (N, G).
        zeros: The zero points (N, G).
        parts: The other tensors. One of them may be the group of each column.
        config: The quantization_config.
    """
    n = len(packed)
    k, rest = divmod(32 * packed.shape[1], bits)
    num_groups = scale.shape[1]
    check_fits(rest == 0)
    check_fits(packed.dtype is torch.int32)
    check_fits(len(scale) == n)
    check_fits(zeros is None or zeros.fits(*scale.shape))
    group_of = parts.pop("weight_g_idx", parts.pop("g_idx", None))
    if group_of is None:
        check_fits(not config.get("desc_act"))  # else their order would be lost
        columns = size_per_scale(k, num_groups, group_sizes(config))
    else:
        check_fits(group_of.shape == (k,))
        check_fits(group_of.dtype in (torch.int32, torch.int64))
        check_fits(bool((group_of >= 0).all()))
        check_fits(bool((group_of < num_groups).all()))
        columns = int((group_of == 0).sum()) or 1
        if torch.equal(group_of, (torch.arange(k) // columns).to(group_of.dtype)):
            group_of = None  # groups of neighbours, which need no table
    half = 1 << bits - 1
    return _PackedMatrix(
        Size((n, k)),
        torch.arange(-half, half).float(),
        scale,
        PackedInRows(packed, bits),
        zeros,
        columns_per_scale=columns,
        group_of=group_of,
    )


def compressed_tensors(parts: Parts, config: Config) -> CodedMatrix:
    """Build a matrix of compressed-tensors in the format pack-quantized."""
    packed = parts.pop("weight_packed")
    zeros = parts.pop("weight_zero_point", None)
    shape = parts.pop("weight_shape").tolist()
    scale = parts.pop("weight_scale")
    bits = packed.shape[1] * 32 // shape[1]  # modules of one model may differ
    check_fits(2 <= bits <= 8)
    packed_zeros = None if zeros is None else PackedAcrossRows(zeros.t(), bits)
    matrix = _packed_matrix(bits, packed, scale, packed_zeros, parts, config)
    check_fits(matrix.shape == Size(shape))
    return matrix


def is_awq(parts: Parts) -> bool:
    """Return whether the tensors of a matrix with a qweight are packed as AutoAWQ's gemm are.

    AutoAWQ packs codes and zero points along N, and GPTQ codes along K. Other versions, which are
    not read, have int16s.
    """
    qweight = parts["qweight"]
    is_other = qweight.dtype is torch.int16
    return is_other or ("qzeros" in parts and qweight.shape[1:] == parts["qzeros"].shape[1:])


def is_awq_gemv(parts: Parts) -> bool:
    """Return whether the tensors of a matrix with a qweight are packed as AutoAWQ's gemv are.

    Each has a row for each output.
    """
    return "qzeros" in parts and len(parts["qweight"]) == len(parts["qzeros"])


def gptq(parts: Parts, config: Config) -> CodedMatrix:
    """Build a matrix of GPTQ, whose version 1 stores each zero point less one.

    The bits follow from the tensors: modules of one model may differ.
    """
    zeros = parts.pop("qzeros")
    scale = parts.pop("scales").t()
    bits, rest = divmod(32 * zeros.shape[1], len(scale))
    check_fits(rest == 0)
    if bits not in _GPTQ_BITS:
        raise UnknownLayoutError(f"it has {bits} bits, and 2, 3, 4 and 8 are read")
    is_less = stores_zeros_less_one(config)
    if is_less and 32 % bits == 0:
        # The subtraction borrowed from the next field of an int32; this addition carries back.
        zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))
        is_less = False
    packed_zeros = PackedAcrossRows(zeros, bits, less=int(is_less))
    return _packed_matrix(bits, parts.pop("qweight").t(), scale, packed_zeros, parts, config)


def awq(parts: Parts, config: Config) -> CodedMatrix:
    """Build a matrix of AutoAWQ, version gemm."""
    int32s = parts.pop("qweight")
    k = int32s.shape[0]
    n = int32s.shape[1] * 32 // _AWQ_BITS
    scale = parts.pop("scales").t()
    version = config.get("version") or config.get("format") or "gemm"
    if config.get("backend") == "llm-awq":
        version = "llm-awq"
    if n != len(scale) or str(version).lower() not in ("gemm", "gemv"):
        raise UnknownLayoutError(f"it is {brief(version)}, and gemm and gemv of 4 bits are read")
    packed = PackedAcrossRows(int32s, _AWQ_BITS, _AWQ_ORDER)
    zeros = PackedAcrossRows(parts.pop("qzeros"), _AWQ_BITS, _AWQ_ORDER)
    check_fits(packed.fits(n, k))
    check_fits(zeros.fits(*scale.shape))
    columns = size_per_scale(k, scale.shape[1], group_sizes(config))
    return _PackedMatrix(Size((n, k)), _INT4_TABLE, scale, packed, zeros, columns_per_scale=columns)


def awq_gemv(parts: Parts, config: Config) -> CodedMatrix:
    """Build a matrix of AutoAWQ, version gemv.

    Codes and zero points are packed along K. Rows of scales and zero points are padded, so that
    the config must name the columns per scale.
    """
    packed = PackedInRows(parts.pop("qweight"), _AWQ_BITS)
    zeros = PackedInRows(parts.pop("qzeros"), _AWQ_BITS)
    scale = parts.pop("scales")
    n = len(packed.packed)
    k = packed.packed.shape[1] * 32 // _AWQ_BITS
    check_fits(packed.fits(n, k))
    check_fits(zeros.fits(*scale.shape))
    sizes = group_sizes(config) or {k}
    check_fits(len(sizes) == 1)
    columns = sizes.pop()
    num_groups, rest = divmod(k, columns)
    check_fits(rest == 0)
    check_fits(num_groups <= scale.shape[1] < num_groups + _GEMV_PADDING)
    return _PackedMatrix(
        Size((n, k)), _INT4_TABLE, scale[:, :num_groups], packed, zeros, columns_per_scale=columns
    )


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
    return _Int4EO8Matrix(
        weight.shape,
        _INT4_TABLE,
        in_eight_bits.scale,
        weight,
        zeros,
        columns_per_scale=in_eight_bits.columns_per_scale,
        adapter=adapter,
    )
