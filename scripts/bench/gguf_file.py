"""A checkpoint as llama.cpp reads it: one GGUF file, of the weights as they are and no vocabulary.

In: a folder that `llama.checkpoint.find` understands, and a dtype. Out: a file of GGUF version 3,
complete or not there at all. Memory holds one tensor. The format is that of ggml's docs/gguf.md.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from llama import ModelArgs
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.weights import Weights
from llama.ops.rope import scale_frequencies

_ALIGNMENT = 32  # bytes: where tensors begin, unless a file says otherwise
_UINT32, _FLOAT32, _STRING = 4, 6, 8  # types of metadata
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # of tensors
_NAMES = {
    "tok_embeddings.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "output.weight": "output.weight",
    "attention.wq.weight": "attn_q.weight",
    "attention.wk.weight": "attn_k.weight",
    "attention.wv.weight": "attn_v.weight",
    "attention.wo.weight": "attn_output.weight",
    "attention_norm.weight": "attn_norm.weight",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "ffn_norm.weight": "ffn_norm.weight",
}


def write_gguf(found: Checkpoint, path: Path, dtype: torch.dtype) -> None:
    """Rows of wq and wk stay in Meta's order: GGUF's llama turns neighbours, as Meta's does."""
    weights, args = Weights(found), found.params
    names = {name: gguf_name(name) for name in weights.shapes}
    if "output.weight" in names and weights.are_equal("output.weight", "tok_embeddings.weight"):
        del names["output.weight"]  # where there is none, llama.cpp takes the embedding
    extra = {} if args.rope_factor is None else {"rope_freqs.weight": rope_divisors(args)}
    infos = {
        to: (weights.shapes[of], _map_file(weights.shapes[of], dtype)) for of, to in names.items()
    }
    infos |= {name: (tensor.shape, tensor.dtype) for name, tensor in extra.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".partial")
    with draft.open("wb") as file:
        file.write(_header(metadata(args), infos))
        for of, to in names.items():
            whole = torch.empty(infos[to][0], dtype=infos[to][1])
            weights.copy(of, whole, 0, 1)
            _write_tensor(file, whole)
        for tensor in extra.values():
            _write_tensor(file, tensor)
    draft.replace(path)


def gguf_name(name: str) -> str:
    """layers.3.attention.wq.weight -> blk.3.attn_q.weight"""
    if not name.startswith("layers."):
        return _NAMES[name]
    _, layer, part = name.split(".", 2)
    return f"blk.{layer}.{_NAMES[part]}"


def metadata(args: ModelArgs) -> dict[str, int | float | str]:
    """What llama.cpp asks of a model of the architecture "llama" whose tokens are ids only."""
    return {
        "general.architecture": "llama",
        "llama.context_length": args.longest_context,
        "llama.embedding_length": args.dim,
        "llama.block_count": args.n_layers,
        "llama.feed_forward_length": args.ffn_dim,
        "llama.attention.head_count": args.n_heads,
        "llama.attention.head_count_kv": args.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": float(args.norm_eps),
        "llama.rope.dimension_count": args.head_dim,
        "llama.rope.freq_base": float(args.rope_theta),
        "llama.vocab_size": args.vocab_size,
        "tokenizer.ggml.model": "no_vocab",
    }


def rope_divisors(args: ModelArgs) -> Tensor:
    """(D/2) float32: what llama.cpp divides each rotary frequency by."""
    exponents = torch.arange(0, args.head_dim, 2, dtype=torch.float32) / args.head_dim
    frequencies = 1.0 / args.rope_theta**exponents
    assert args.rope_factor is not None
    return frequencies / scale_frequencies(frequencies, args.rope_factor)


def _map_file(shape: torch.Size, dtype: torch.dtype) -> torch.dtype:
    """Norms are float32 in every GGUF: llama.cpp multiplies by nothing else."""
    return torch.float32 if len(shape) == 1 else dtype


def _header(told: dict[str, Any], infos: dict[str, tuple[torch.Size, torch.dtype]]) -> bytes:
    """All before the first tensor: counts, metadata, and where each tensor lies."""
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(infos), len(told))]
    parts += [_string(key) + _value(value) for key, value in told.items()]
    offset = 0
    for name, (shape, dtype) in infos.items():
        sizes = tuple(reversed(shape))  # the one that changes fastest comes first
        place = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, _TYPES[dtype], offset)
        parts.append(_string(name) + place)
        offset += _aligned(shape.numel() * dtype.itemsize)
    header = b"".join(parts)
    return header.ljust(_aligned(len(header)), b"\0")


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy()
    file.write(data.data)
    file.write(bytes(_aligned(len(data)) - len(data)))


def _value(value: int | float | str) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    return struct.pack("<II", _UINT32, value)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
