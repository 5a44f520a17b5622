"""Matrices of 4-bit floats with scales for groups of columns: NVFP4 and MXFP4.

In: the tensors of one matrix, by the last parts of their names. Out: a `CodedMatrix`. An element is
E2M1: a sign, two bits of an exponent and one of a mantissa. NVFP4 has a scale in e4m3 for each 16
elements, and one in float32 for the matrix, by which compressed-tensors divides and NVIDIA's
ModelOpt multiplies. MXFP4 (Open Compute Project, 2023) has a power of two for each 32 elements.

Shapes: N outputs, K inputs, G groups along K.
"""

from dataclasses import dataclass

import torch
from torch import Size, Tensor

from llama.checkpoint.hf.bit_packing import covering
from llama.checkpoint.hf.coded_matrix import (
    CodedMatrix,
    Config,
    Parts,
    check_fits,
    size_per_scale,
)
from llama.checkpoint.hf.quantization import group_sizes

_MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_TABLE = torch.cat([_MAGNITUDES, -_MAGNITUDES])


@dataclass(frozen=True, eq=False)
class _Fp4Matrix(CodedMatrix):
    """A matrix of 4-bit floats.

    Attributes:
        data: (N, K / 2) uint8, two codes in a byte, the first in the lower four bits.
        divisor: What all scales are divided by, in one element.
        factor: What all scales are multiplied by, in one element.
    """

    data: Tensor
    divisor: Tensor | None
    factor: Tensor | None

    def codes(self, rows: slice, columns: slice) -> Tensor:
        items, within = covering(columns, 2)
        pairs = self.data[rows, items]
        codes = torch.stack([pairs & 15, pairs >> 4], -1)
        return codes.flatten(1)[:, within]

    def scales(self, rows: slice) -> Tensor:
        scales = super().scales(rows).float()
        if self.divisor is not None:
            scales /= self.divisor
        if self.factor is not None:
            scales *= self.factor
        return scales


def is_fp4(parts: Parts) -> bool:
    """Return whether tensors are those of a matrix of compressed-tensors or ModelOpt in FP4."""
    packed = parts.get("weight_packed", parts.get("weight"))
    is_named = "weight_packed" in parts or "weight_scale_2" in parts
    return is_named and packed is not None and packed.dtype is torch.uint8


def fp4(parts: Parts, config: Config) -> CodedMatrix:
    """Build a matrix in NVFP4 or MXFP4."""
    if "weight_packed" in parts:
        data = parts.pop("weight_packed")
        divisor, factor = parts.pop("weight_global_scale", None), None
    else:
        data = parts.pop("weight")
        divisor, factor = None, parts.pop("weight_scale_2")
    scale = parts.pop("weight_scale")
    if divisor is None and factor is None:
        check_fits(scale.dtype is torch.uint8)  # the exponents of MXFP4
        scale = scale.view(torch.float8_e8m0fnu)
    for of_all in (divisor, factor):
        check_fits(of_all is None or of_all.numel() == 1)
    n = len(data)
    k = 2 * data.shape[1]
    check_fits(len(scale) == n)
    columns = size_per_scale(k, scale.shape[1], group_sizes(config))
    return _Fp4Matrix(Size((n, k)), _TABLE, scale, data, divisor, factor, columns_per_scale=columns)
