"""A model as a GGUF file, for llama.cpp and the programs built on it.

In: the tensors of a checkpoint and its tokenizer. Out: the bytes of one file, some rows at a time.
Norms are float32 there, matrices bf16; or rounded, then output and embedding have eight bits.
"""

import itertools
import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llama.checkpoint import huggingface as hf
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.gguf import KINDS, MAGIC, TensorInfo
from llama.checkpoint.gguf_args import KEYS, ROPE, rope_divisors
from llama.checkpoint.quantize import BLOCKS, finite_rows
from llama.checkpoint.reader import CheckpointReader
from llama.checkpoint.table import name_in
from llama.checkpoint.tokenizer_files import load_tokenizer, tokenizer_config, tokenizer_json

_STEP = 32  # a tensor begins at a multiple of it
_FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "BF16": 32}
_NUMBERS = {kind.name: number for number, kind in KINDS.items()}
_NORMAL, _CONTROL = 1, 3  # types of tokens


def content(
    checkpoint: Checkpoint, reader: CheckpointReader, names: list[str], quantize: str | None
) -> tuple[int, Iterator[bytes]]:
    """How many bytes the file takes, and these. names: Meta's, of the tensors. quantize: one of
    BLOCKS. FileNotFoundError without a tokenizer: llama.cpp reads no file without one."""
    params, matrix, at = checkpoint.params, (quantize or "bf16").upper(), 0
    shapes = {name: tuple(reader.shapes[name]) for name in names}
    if params.use_scaled_rope:
        shapes[ROPE] = (params.head_dim // 2,)
    tensors = {}
    for name, shape in shapes.items():
        of_end = "Q8_0" if quantize and not name.startswith("layers.") else matrix
        kind = KINDS[_NUMBERS["F32" if len(shape) == 1 else of_end]]
        num_bytes = torch.Size(shape).numel() // kind.block * kind.num_bytes
        tensors[name] = TensorInfo(shape, kind, at, num_bytes)
        at += num_bytes + -num_bytes % _STEP
    metadata = _metadata(checkpoint) | {"general.file_type": _FILE_TYPES[matrix]}
    head = _header(metadata, {name_in("gguf", name): info for name, info in tensors.items()})
    each = (_bytes_of(reader, name, info) for name, info in tensors.items())
    return len(head) + at, itertools.chain([head], *each)


def _metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    params = checkpoint.params
    tokenizer = load_tokenizer(checkpoint.tokenizer_path(), params)
    written = tokenizer_json(tokenizer)["model"]
    words, special = list(written["vocab"]), list(tokenizer.special_tokens)
    config = hf.config_of(params, tied=False, dtype=torch.bfloat16, ids={})
    template = tokenizer_config(tokenizer, params, is_guard=checkpoint.is_guard)["chat_template"]
    return {
        "general.architecture": "llama",
        "general.name": checkpoint.weights_path.resolve().stem,
        **{f"llama.{key}": config[name] for name, key in KEYS.items()},
        "llama.rope.dimension_count": params.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": words + special,
        "tokenizer.ggml.token_type": [_NORMAL] * len(words) + [_CONTROL] * len(special),
        "tokenizer.ggml.merges": written["merges"],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_id,
        "tokenizer.ggml.eot_token_id": tokenizer.eot_id,
        "tokenizer.chat_template": template,
    }


def _header(metadata: dict[str, Any], tensors: dict[str, TensorInfo]) -> bytes:
    """As `llama.checkpoint.gguf` reads it, up to the first tensor."""
    parts = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), _value(value)]
    for name, (shape, kind, offset, _) in tensors.items():
        numbers = len(shape), *reversed(shape), _NUMBERS[kind.name], offset
        parts += [_text(name), struct.pack(f"<I{len(shape)}QIQ", *numbers)]
    head = b"".join(parts)
    return head + bytes(-len(head) % _STEP)


def _value(value: Any) -> bytes:
    """The number of its type, and it."""
    if isinstance(value, list):
        is_text = all(isinstance(x, str) for x in value)
        data = b"".join(map(_text, value)) if is_text else struct.pack(f"<{len(value)}i", *value)
        return struct.pack("<IIQ", 9, 8 if is_text else 5, len(value)) + data
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    form, number = ("<If", 6) if isinstance(value, float) else ("<II", 4)
    return struct.pack(form, number, value)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _bytes_of(reader: CheckpointReader, name: str, info: TensorInfo) -> Iterator[bytes]:
    """Of a tensor, and up to where the next one begins."""
    if name == ROPE:
        plain = rope_divisors(reader.params, reader.params.rope_factor or 1)
    else:
        dtype = torch.float32 if len(info.shape) == 1 else torch.bfloat16
        plain = torch.empty(info.shape, dtype=dtype)
        reader.copy(name, plain)
    encode = BLOCKS.get(info.kind.name.lower(), Tensor.contiguous)
    for rows in finite_rows(name, plain):
        yield encode(rows).view(torch.uint8).numpy().tobytes()
    yield bytes(-info.num_bytes % _STEP)
