"""A checkpoint as llama.cpp reads it: one GGUF file with the weights as they are, no vocabulary.

In: a folder that `llama.checkpoint.find` understands, and a dtype. Out: a file, complete or absent.
It is written by `gguf`, llama.cpp's own package, which also knows the tensors' names. Memory holds
one tensor.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llama import ModelArgs
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.gguf.args import rope_divisors
from llama.checkpoint.reader import CheckpointReader

try:
    import gguf
except ImportError as e:
    raise ImportError("GGUF files are written by llama.cpp's package: pip install gguf") from e

_TYPES = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}


def write_gguf(found: Checkpoint, path: Path, dtype: torch.dtype) -> None:
    """Write all matrices in `dtype` and the norms in float32, which llama.cpp asks for.

    Rows of wq and wk stay in Meta's order: GGUF's llama rotates neighbours, as Meta's does.
    """
    weights = CheckpointReader(found)
    args = found.params
    dtypes = {name: torch.float32 if len(shape) == 1 else dtype
              for name, shape in weights.shapes.items()}  # fmt: skip
    if "output.weight" in dtypes and weights.are_equal("output.weight", "tok_embeddings.weight"):
        del dtypes["output.weight"]  # llama.cpp then takes the embedding
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(draft, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    _add_metadata(writer, args)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, args.n_layers)
    for name, wanted in dtypes.items():
        to = names.get_name(name, try_suffixes=(".weight",))
        assert to is not None, name
        _add_tensor(writer, to, weights.shapes[name], wanted)
    divisors = None if args.rope_factor is None else rope_divisors(args)
    if divisors is not None:
        _add_tensor(writer, "rope_freqs.weight", divisors.shape, divisors.dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, wanted in dtypes.items():
        whole = torch.empty(weights.shapes[name], dtype=wanted)
        weights.copy(name, whole)
        writer.write_tensor_data(_bytes(whole))
    if divisors is not None:
        writer.write_tensor_data(_bytes(divisors))
    writer.close()
    draft.replace(path)


def _add_metadata(writer: gguf.GGUFWriter, args: ModelArgs) -> None:
    """Add the metadata that llama.cpp needs for the architecture "llama" without a vocabulary."""
    writer.add_context_length(args.longest_context)
    writer.add_embedding_length(args.dim)
    writer.add_block_count(args.n_layers)
    writer.add_feed_forward_length(args.ffn_dim)
    writer.add_head_count(args.n_heads)
    writer.add_head_count_kv(args.kv_heads)
    writer.add_layer_norm_rms_eps(float(args.norm_eps))
    writer.add_rope_dimension_count(args.head_dim)
    writer.add_rope_freq_base(float(args.rope_theta))
    writer.add_vocab_size(args.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _add_tensor(writer: gguf.GGUFWriter, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
    # numpy has no bfloat16: the type of the file is given alongside a numpy type, which is not
    # used.
    size = shape.numel() * dtype.itemsize
    writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=_TYPES[dtype])


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().flatten().view(torch.uint8).numpy()
