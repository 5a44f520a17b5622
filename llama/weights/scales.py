"""The scales and offsets of a quantized weight, in the order in which the CPU kernels read them.

In: float32 scales and offsets of groups of columns. Out: the same in blocks of 32 rows, in the
smallest format that changes none of them, and back. packed_weight.h describes the layouts. What the
scales multiply must not be known here.

Shapes: N outputs, K inputs, G groups of K / G columns.
"""

import torch
from torch import Tensor

from llama.kernels.cpu import native
from llama.kernels.cpu.constants import ScaleFormat
from llama.ops.formats import N_BLOCK
from llama.weights.blocks import in_whole_blocks
from llama.weights.coded import Coded

EIGHT = 10 * N_BLOCK  # bytes of a block's scales of 8 groups: a float16 per row, then 8 codes each
SCALE_FORMATS = {
    torch.float32: ScaleFormat.FLOAT32.value,
    torch.float16: ScaleFormat.FLOAT16.value,
    torch.uint8: ScaleFormat.EIGHTS.value,
}


def pack_scales(coded: Coded, element_factor: float = 1) -> Tensor:
    """Return scales and offsets in blocks, in the smallest format that changes none.

    Args:
        coded: The matrix.
        element_factor: What the kernels multiply elements by; scales are divided by it.
    """
    parts = [coded.scale / element_factor]
    if coded.offset is not None:
        parts.append(coded.offset)
    blocks = [torch.unflatten(in_whole_blocks(part), 0, (-1, N_BLOCK)).mT for part in parts]
    scales = torch.stack(blocks, 2)
    return in_smallest_format(scales)


def in_smallest_format(scales: Tensor) -> Tensor:
    """Return float32 scales (N/32, G, 1 or 2, 32) in the smallest format that changes none."""
    halves = scales.half()
    if torch.equal(halves.float(), scales):
        return halves
    blocks, groups, per_group, _ = scales.shape
    if groups % 8 or native.kernels() is None:
        return scales
    # The k-quants of GGUF have such scales: small integers times a float16 per 8 groups.
    shape = (blocks, groups // 8, per_group * EIGHT)
    eights = torch.empty(shape, dtype=torch.uint8)
    is_same = torch.ones((), dtype=torch.int64)
    native.call("pack_scales", scales, eights, is_same, blocks, groups, per_group)
    return eights if is_same else scales


def unpack_scales(scales: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return scales in float32.

    Args:
        scales: The scales in any format.
        ids: The rows (...) that are wanted, by default all.

    Returns:
        (..., G, 1 or 2) for the rows, or (N/32, G, 1 or 2, 32) for all of them.
    """
    if scales.dtype is not torch.uint8:
        return _scales_of_rows(scales, ids).float()
    num_step_bytes = scales.shape[-1] // 5  # two bytes of ten, the others are codes
    step_bytes, code_bytes = scales.tensor_split([num_step_bytes], -1)
    steps = step_bytes.view(torch.float16)
    steps = torch.unflatten(steps, -1, (1, -1, N_BLOCK))
    steps = _scales_of_rows(steps, ids)
    codes = torch.unflatten(code_bytes, -1, (8, -1, N_BLOCK))
    codes = _scales_of_rows(codes, ids) ^ 128  # a signed byte plus 128
    unpacked = steps.float() * (codes.float() - 128)
    first_dim = 1 if ids is None else ids.dim()
    return unpacked.flatten(first_dim, first_dim + 1)


def _scales_of_rows(scales: Tensor, ids: Tensor | None) -> Tensor:
    """Return the scales of some rows, or all of them as they are.

    Args:
        scales: (N/32, ..., 32).
        ids: The rows; None for all.
    """
    if ids is None:
        return scales
    block = ids // N_BLOCK
    row = ids % N_BLOCK
    rows = scales.movedim(-1, 1)
    return rows[block, row]
