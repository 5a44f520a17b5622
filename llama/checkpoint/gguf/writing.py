"""A model as a GGUF file, for llama.cpp and the programs built on it.

In: the tensors of a checkpoint and its tokenizer. Out: the bytes of one file, some rows at a time.
Norms are stored in float32, and matrices in bf16 or quantized; embedding and lm_head have 8 bits
where the others have fewer.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor

from llama.checkpoint.chat_templates import GGUF_KEY
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.gguf.args import KEYS, ROPE_DIVISORS, rope_divisors
from llama.checkpoint.hf import config as hf
from llama.checkpoint.hf.tokenizer import tokenizer_config, tokenizer_json
from llama.checkpoint.reader import CheckpointReader
from llama.checkpoint.table import name_in
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.checkpoint.write.quantize import GGUF_FORMATS, finite_rows
from llama.checkpoint.write.settings_files import gguf_settings
from llama.storage.gguf import DEFAULT_ALIGNMENT, MAGIC, TENSOR_TYPES, VERSION, TensorInfo
from llama.storage.token_files import AddedToken
from llama.tokenizer import Tokenizer

_FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "BF16": 32}  # values of general.file_type
_TYPE_IDS = {tensor_type.name: number for number, tensor_type in TENSOR_TYPES.items()}
_NORMAL_TOKEN = 1
_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4
_UNUSED_TOKEN = 5
# Types of metadata values.
_UINT32 = 4
_INT32 = 5
_FLOAT32 = 6
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True)
class GGUFContent:
    """The content of a GGUF file that is to be written.

    Attributes:
        reader: Reads the tensors.
        header: The bytes before the first tensor.
        tensors: By Meta's names, in the order of the file; offsets begin after the header.
    """

    reader: CheckpointReader
    header: bytes
    tensors: dict[str, TensorInfo]

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        sizes = [_aligned(info.num_bytes) for info in self.tensors.values()]
        return len(self.header) + sum(sizes)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the file in order, a few megabytes at a time.

        Raises:
            ValueError: An element is not finite; its tensor is named.
        """
        yield self.header
        for name, info in self.tensors.items():
            quantize = GGUF_FORMATS.get(info.type.name.lower(), Tensor.contiguous)
            for rows in finite_rows(name, self._plain(name, info)):
                yield quantize(rows).view(torch.uint8).numpy().tobytes()
            yield bytes(_aligned(info.num_bytes) - info.num_bytes)

    def _plain(self, name: str, info: TensorInfo) -> Tensor:
        """Return a tensor in float32 or bf16."""
        params = self.reader.params
        if name == ROPE_DIVISORS:
            return rope_divisors(params, params.rope_factor or 1)
        dtype = torch.float32 if len(info.shape) == 1 else torch.bfloat16
        plain = torch.empty(info.shape, dtype=dtype)
        self.reader.copy(name, plain)
        return plain


def gguf_content(
    checkpoint: Checkpoint, reader: CheckpointReader, names: list[str], quantize: str | None
) -> GGUFContent:
    """Return what the GGUF file of a checkpoint holds; no tensor is read.

    Args:
        checkpoint: The checkpoint.
        reader: Its reader.
        names: Meta's names of the tensors to write.
        quantize: One of GGUF_FORMATS, or None for bf16.

    Raises:
        FileNotFoundError: The checkpoint has no tokenizer, without which llama.cpp reads no file.
    """
    params = checkpoint.params
    matrix_type = (quantize or "bf16").upper()
    shapes = {name: reader.shapes[name] for name in names}
    if params.use_scaled_rope:
        shapes[ROPE_DIVISORS] = Size([params.head_dim // 2])
    tensors = {}
    offset = 0
    for name, shape in shapes.items():
        if len(shape) == 1:
            type_name = "F32"
        elif quantize and not name.startswith("layers."):
            type_name = "Q8_0"
        else:
            type_name = matrix_type
        tensor_type = TENSOR_TYPES[_TYPE_IDS[type_name]]
        num_bytes = tensor_type.bytes_of(shape.numel())
        tensors[name] = TensorInfo(tuple(shape), tensor_type, offset, num_bytes)
        offset += _aligned(num_bytes)
    metadata = _metadata(checkpoint) | {"general.file_type": _FILE_TYPES[matrix_type]}
    return GGUFContent(reader, _header(metadata, tensors), tensors)


def _aligned(size: int) -> int:
    """Round a size up to where the next tensor may begin."""
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what llama.cpp asks of a model of the architecture "llama", with its tokenizer."""
    params = checkpoint.params
    tokenizer = load_tokenizer(checkpoint)
    bpe = tokenizer_json(tokenizer)["model"]
    tokens = list(bpe["vocab"])
    token_types = [_NORMAL_TOKEN] * len(tokens)
    for name, token_id in tokenizer.special_tokens.items():
        if token_id >= tokenizer.num_ranks:
            tokens.append(name)
            token_types.append(_token_type(tokenizer.added_tokens.get(name)))
    config = hf.config_of(params, tied=False, dtype=torch.bfloat16, ids={})
    settings = gguf_settings(checkpoint)
    if checkpoint.layout == "meta":
        # Meta's files hold no template; that of their format gives way to one beside them.
        template = tokenizer_config(tokenizer, params, is_guard=checkpoint.is_guard)
        settings = {GGUF_KEY: template["chat_template"]} | settings
    return {
        "general.architecture": "llama",
        "general.name": checkpoint.weights_path.resolve().stem,
        **{f"llama.{key}": config[name] for name, key in KEYS.items()},
        "llama.rope.dimension_count": params.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": token_types,
        "tokenizer.ggml.merges": bpe["merges"],
        **_special_ids(tokenizer),
        **settings,
    }


def _token_type(token: AddedToken | None) -> int:
    """Return the type of an added token, or that of a row without a token."""
    if token is None:
        return _UNUSED_TOKEN
    return _CONTROL_TOKEN if token.special else _USER_DEFINED_TOKEN


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the metadata that says which tokens begin, end and pad texts."""
    ids = {
        "bos": tokenizer.bos_id,
        "eos": tokenizer.roles.get("eos_token", tokenizer.eos_id),
        "eot": tokenizer.eot_id,
        "padding": tokenizer.roles.get("pad_token"),
    }
    named = {key: token_id for key, token_id in ids.items() if token_id is not None}
    return {f"tokenizer.ggml.{key}_token_id": token_id for key, token_id in named.items()}


def _header(metadata: dict[str, Any], tensors: dict[str, TensorInfo]) -> bytes:
    """Return a header as `llama.storage.gguf` reads it, up to the first tensor."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _typed_value(value)]
    for name, info in tensors.items():
        parts.append(_string(name_in("gguf", name)))
        parts.append(struct.pack("<I", len(info.shape)))
        parts += [struct.pack("<Q", size) for size in reversed(info.shape)]
        parts.append(struct.pack("<IQ", _TYPE_IDS[info.type.name], info.offset))
    header = b"".join(parts)
    return header.ljust(_aligned(len(header)), b"\0")


def _typed_value(value: str | int | float | Sequence[str] | Sequence[int]) -> bytes:
    """Return the number of a metadata value's type, and the value."""
    match value:
        case str():
            return struct.pack("<I", _STRING) + _string(value)
        case int():
            return struct.pack("<II", _UINT32, value)
        case float():
            return struct.pack("<If", _FLOAT32, value)
    is_text = all(isinstance(item, str) for item in value)
    array = struct.pack("<IIQ", _ARRAY, _STRING if is_text else _INT32, len(value))
    items = [_string(x) if isinstance(x, str) else struct.pack("<i", x) for x in value]
    return array + b"".join(items)


def _string(text: str) -> bytes:
    """Return a string as GGUF stores it: its length in bytes, then UTF-8."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
