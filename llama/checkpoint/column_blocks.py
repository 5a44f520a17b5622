"""The columns of quantized matrices that lie together in files, which ranks should not divide.

In: a `Checkpoint`. Out: a number of columns. Only what `find` has read is looked at: the header of
a GGUF file, a quantization_config, or the metadata of packed weights. A rank whose part begins
within such a block is right all the same, but loads more slowly and may need more memory.
"""

from typing import Any

from llama.checkpoint.find import Checkpoint
from llama.checkpoint.hf.quantization import block_sizes, group_sizes
from llama.weights.choice import QUANTIZED

_NF4_BLOCK = 64  # columns per scale that bitsandbytes uses by default
_SUPERBLOCK = 256  # columns of the largest blocks of GGUF; no usual group is larger
_MAX_GROUP = 1024  # Larger groups are divided, and ranks have copies of their scales.


def columns_per_block(checkpoint: Checkpoint) -> int:
    """Return the columns that a block of the files holds, or that have a scale in common.

    Returns:
        The number; 1 where there are no blocks, or a whole row has one scale.
    """
    if checkpoint.packed is not None:  # The metadata do not say it.
        is_own = checkpoint.file_type is None or checkpoint.file_type in QUANTIZED
        return 1 if is_own else _SUPERBLOCK
    if checkpoint.header is not None:
        sizes = (info.type.block_size for info in checkpoint.header.tensors.values())
        return max(sizes, default=_SUPERBLOCK)  # The first part may have no tensors.
    return 1 if checkpoint.quantization is None else _group_size(checkpoint.quantization)


def _group_size(config: dict[str, Any]) -> int:
    """Return the columns of the largest group with one scale."""
    if config.get("quant_method") == "bitsandbytes":
        return _NF4_BLOCK if config.get("load_in_4bit") else 1
    columns = group_sizes(config) | {columns for _, columns in block_sizes(config)}
    return min(max(columns, default=1), _MAX_GROUP)
