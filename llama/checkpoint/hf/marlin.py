"""Matrices in Marlin's layout, as AutoGPTQ writes them with `is_marlin_format`.

In: the tensors of one matrix, by the last parts of their names. Out: a `CodedMatrix`. The layout is
that of the GPU kernel of Frantar et al. (2024): tiles of 16 inputs and 64 outputs, in which the 128
int32s are those that the threads of a warp load. Codes have 4 bits and no zero points.

Shapes: N outputs, K inputs, G groups along K.
"""

from dataclasses import dataclass

import torch
from torch import Size, Tensor

from llama.checkpoint.hf.bit_packing import covering, unpack_int32
from llama.checkpoint.hf.coded_matrix import (
    CodedMatrix,
    Config,
    Parts,
    check_fits,
    size_per_scale,
)
from llama.checkpoint.hf.quantization import group_sizes

_TILE_K = 16
_TILE_N = 64
_BITS = 4
_TABLE = torch.arange(-8.0, 8)


@dataclass(frozen=True, eq=False)
class _MarlinMatrix(CodedMatrix):
    """A matrix in Marlin's layout.

    Attributes:
        packed: (K / 16, N / 64, 8, 4, 4) int32. In a tile, int32 (c, r, j) holds the codes of the
            columns 8 h + 2 r + l and the rows 16 j + 8 b + c, where l, b and h are the three bits
            of the code's position, l the highest.
    """

    packed: Tensor

    def codes(self, rows: slice, columns: slice) -> Tensor:
        tiles_n, within_n = covering(rows, _TILE_N)
        tiles_k, within_k = covering(columns, _TILE_K)
        codes = unpack_int32(self.packed[tiles_k, tiles_n], _BITS)
        by_bits = codes.view(*codes.shape[:4], 4, 2, 2, 2)
        # (tile of K, tile of N, c, r, j, l, b, h) to rows (tile, j, b, c), columns (tile, h, r, l)
        in_order = by_bits.permute(1, 4, 6, 2, 0, 7, 3, 5)
        num_rows = codes.shape[1] * _TILE_N
        return in_order.reshape(num_rows, -1)[within_n, within_k]


def marlin(parts: Parts, config: Config) -> CodedMatrix:
    """Build a matrix in Marlin's layout."""
    packed = parts.pop("B")
    scale = parts.pop("s")
    n = scale.shape[1]
    k = len(packed) * _TILE_K
    num_groups = len(scale)
    check_fits(packed.dtype is torch.int32)
    check_fits(n % _TILE_N == 0)
    check_fits(packed.shape[1] * 32 == n * _TILE_K * _BITS)
    # The scales are in another order where a row has only one.
    if num_groups == 1:
        in_order = scale.view(-1, 4, 4, 2).transpose(1, 2)
    else:
        in_order = scale.view(-1, 8, 8).transpose(1, 2)
    return _MarlinMatrix(
        Size((n, k)),
        _TABLE,
        in_order.reshape(num_groups, n).t(),
        packed.view(-1, n // _TILE_N, 8, 4, 4),
        columns_per_scale=size_per_scale(k, num_groups, group_sizes(config)),
    )
