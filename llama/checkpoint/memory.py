"""The memory that a checkpoint's weights will take, known before they are loaded.

In: a `Checkpoint`, a `Placement`, and the types that a build asks for. Out: bytes and formats.
Where matrices keep the codes of their file, the first rows of each are read and packed; nothing
else is read.
"""

import math
from typing import NamedTuple

import torch

from llama.checkpoint.find import Checkpoint
from llama.checkpoint.loader import matrices_in
from llama.checkpoint.reader import CheckpointReader
from llama.checkpoint.table import rank_shapes
from llama.model.args import ModelArgs
from llama.model.transformer import Transformer
from llama.ops.formats import num_blocks
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.vision.parts import with_image_parts
from llama.vision.tensors import ENCODER, IMAGE_ROWS
from llama.weights import choice
from llama.weights.groups import GroupedWeight, QuantKey
from llama.weights.weight import Weight


def bytes_of(
    checkpoint: Checkpoint,
    placement: Placement,
    dtype: torch.dtype,
    quantize: str | None,
    device: torch.device,
) -> int:
    """Return the bytes of the weights that a rank holds, without loading them.

    Norms are not quantized, and neither is an embedding that is not tied. Where matrices keep the
    codes of their file, some rows of each are read and packed.

    Args:
        checkpoint: The checkpoint.
        placement: The rank.
        dtype: The type of what is not quantized.
        quantize: The format of `build`.
        device: Where the weights lie.
    """
    if checkpoint.in_codes:
        return _weights_in_codes(checkpoint, placement, dtype, device.type == "cuda").num_bytes
    return bytes_of_params(checkpoint.params, placement, dtype, quantize)


def bytes_of_params(
    params: ModelArgs, placement: Placement, dtype: torch.dtype, quantize: str | None
) -> int:
    """Return the bytes of the weights that a rank holds of a model of these sizes.

    Args:
        params: The model's sizes.
        placement: The rank.
        dtype: The type of what is not quantized.
        quantize: The format of `build`.
    """
    lm_head = choice.lm_head_format(quantize)
    ends = {
        "output.weight": lm_head,
        "tok_embeddings.weight": lm_head if params.tied_output else None,
    }
    num_bytes = 0
    for name, shape in rank_shapes(params, placement).items():
        is_plain = name.startswith((ENCODER, IMAGE_ROWS))
        weight_format = None if is_plain else ends.get(name, quantize)
        num_bytes += choice.bytes_of(shape, dtype, weight_format)
    return num_bytes


def gpu_formats(checkpoint: Checkpoint, placement: Placement) -> list[QuantKey]:
    """Return the formats in which a GPU holds a rank's matrices that keep their codes."""
    return sorted(_weights_in_codes(checkpoint, placement, torch.bfloat16, is_gpu=True).formats)


class _WeightsInCodes(NamedTuple):
    """The bytes of a rank's weights, and the formats of the matrices that keep their codes."""

    num_bytes: int
    formats: set[QuantKey]


def _weights_in_codes(
    checkpoint: Checkpoint, placement: Placement, dtype: torch.dtype, is_gpu: bool
) -> _WeightsInCodes:
    """Read and pack the first rows of each matrix that keeps its codes.

    Args:
        checkpoint: The checkpoint.
        placement: The rank.
        dtype: The type of the other weights.
        is_gpu: Whether matrices are packed for a GPU.
    """
    reader = CheckpointReader(checkpoint)
    parallel = Parallel(placement)
    model = with_image_parts(
        Transformer(checkpoint.params, parallel=parallel, device="meta", dtype=dtype)
    )
    num_bytes = 0.0
    formats = set()
    for module, shards in model.loading_order():
        if shards:  # a tied matrix is counted once
            num_bytes += sum(weight.nbytes for weight in module.parameters())
        for matrix in matrices_in(module, shards):
            names = matrix.names
            coded = reader.coded(names, placement)
            if coded is None:
                continue
            pack = choice.on_gpu if is_gpu else choice.packed
            packed = pack(coded.first)
            num_bytes += _scaled_bytes(packed, coded.n)
            num_bytes -= matrix.weight.nbytes
            if isinstance(packed, GroupedWeight):
                formats.add(packed.quant_key)
    return _WeightsInCodes(math.ceil(num_bytes), formats)


def _scaled_bytes(packed: Weight, num_rows: int) -> float:
    """Return the bytes of a weight of `num_rows` rows, of which the first are packed.

    Elements and scales grow with the rows; an adapter has a row for each row and each column.
    """
    n, k = packed.shape
    adapter = packed.tensors().get("adaptor")
    adapter_bytes = 0 if adapter is None else adapter.nbytes
    grown = (packed.nbytes - adapter_bytes) * num_blocks(num_rows) / num_blocks(n)
    return grown + adapter_bytes * (num_rows + k) / (n + k)
