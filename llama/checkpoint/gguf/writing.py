"""A model as a GGUF file, for llama.cpp and the programs built on it.

In: the tensors of a checkpoint and its tokenizer. Out: a file whose header and blocks are made by
llama.cpp's package `gguf` (extra `gguf`), a few megabytes at a time: its writer would hold whole
tensors. Norms are stored in float32, and matrices in bf16 or quantized; embedding and lm_head have
8 bits where the others have fewer.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as BlockType
from gguf import GGUFValueType, GGUFWriter, LlamaFileType, TokenType
from torch import Size, Tensor

from llama.checkpoint.chat_templates import GGUF_KEY
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.gguf.args import KEYS, ROPE_DIVISORS, rope_divisors, yarn_keys
from llama.checkpoint.hf import config as hf
from llama.checkpoint.hf.tokenizer import tokenizer_config, tokenizer_json
from llama.checkpoint.reader import CheckpointReader
from llama.checkpoint.table import name_in
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.checkpoint.write.quantize import finite_rows
from llama.checkpoint.write.settings_files import gguf_settings
from llama.storage.token_files import AddedToken
from llama.tokenizer import Tokenizer


@dataclass(frozen=True)
class GGUFContent:
    """The content of a GGUF file that is to be written.

    Attributes:
        reader: Reads the tensors.
        writer: Has the metadata, and the sizes of the tensors in the order of the file.
        types: How each tensor is stored, by Meta's names in the order of the file.
    """

    reader: CheckpointReader
    writer: GGUFWriter
    types: dict[str, BlockType]

    @property
    def num_bytes(self) -> int:
        """The bytes after the header."""
        return sum(_aligned(info.nbytes) for info in self.writer.tensors[0].values())

    def write_header(self, path: Path) -> None:
        """Write what comes before the first tensor."""
        with contextlib.closing(self.writer):
            self.writer.write_header_to_file(path)
            self.writer.write_kv_data_to_file()
            self.writer.write_ti_data_to_file()
        size = path.stat().st_size
        with path.open("ab") as file:
            file.write(bytes(_aligned(size) - size))

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes after the header in order, a few megabytes at a time.

        Raises:
            ValueError: An element is not finite; its tensor is named.
        """
        for name, block_type in self.types.items():
            size = 0
            for rows in finite_rows(name, self._plain(name)):
                if block_type is BlockType.BF16:
                    blocks = rows.view(torch.uint8).numpy()  # the package is three times slower
                else:
                    blocks = gguf.quants.quantize(rows.float().numpy(), block_type)
                size += blocks.nbytes
                yield blocks.tobytes()
            yield bytes(_aligned(size) - size)

    def _plain(self, name: str) -> Tensor:
        """Return a tensor in float32 or bf16."""
        params = self.reader.params
        if name == ROPE_DIVISORS:
            return rope_divisors(params)
        shape = self.reader.shapes[name]
        plain = torch.empty(shape, dtype=torch.float32 if len(shape) == 1 else torch.bfloat16)
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
    matrix_type = BlockType[(quantize or "bf16").upper()]
    writer = GGUFWriter(None, "llama")
    file_type = LlamaFileType[f"MOSTLY_{matrix_type.name}"]
    for key, value in (_metadata(checkpoint) | {"general.file_type": file_type}).items():
        value_type = GGUFValueType.get_type(value)
        if value_type is GGUFValueType.INT32:
            value_type = GGUFValueType.UINT32
        if value != []:  # the package writes no empty list
            writer.add_key_value(key, value, value_type)
    shapes = {name: reader.shapes[name] for name in names}
    if params.use_scaled_rope or params.rope_linear_factor != 1:
        shapes[ROPE_DIVISORS] = Size([params.head_dim // 2])
    types = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            types[name] = BlockType.F32
        elif quantize and not name.startswith("layers."):
            types[name] = BlockType.Q8_0
        else:
            types[name] = matrix_type
        size = math.prod(gguf.quant_shape_to_byte_shape(shape, types[name]))
        title = name_in("gguf", name)
        writer.add_tensor_info(title, shape, np.dtype(np.float32), size, types[name])
    return GGUFContent(reader, writer, types)


def _aligned(size: int) -> int:
    """Round a size up to where the next tensor may begin."""
    return GGUFWriter.ggml_pad(size, gguf.GGUF_DEFAULT_ALIGNMENT)


def _metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what llama.cpp asks of a model of the architecture "llama", with its tokenizer."""
    params = checkpoint.params
    tokenizer = load_tokenizer(checkpoint)
    bpe = tokenizer_json(tokenizer)["model"]
    tokens = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
    types = {i: _token_type(tokenizer.added_tokens.get(name)) for i, name in tokens.items()}
    tokens |= {token_id: token for token, token_id in bpe["vocab"].items()}
    types |= dict.fromkeys(tokenizer.ranks.values(), TokenType.NORMAL)
    config = hf.config_of(params, tied=False, dtype=torch.bfloat16, ids={})
    settings = gguf_settings(checkpoint)
    if checkpoint.layout == "meta":
        # Meta's files hold no template; that of their format gives way to one alongside them.
        template = tokenizer_config(tokenizer, params, is_guard=checkpoint.is_guard)
        settings = {GGUF_KEY: template["chat_template"]} | settings
    yarn = {}
    if params.yarn is not None:
        yarn = {f"llama.{key}": value for key, value in yarn_keys(params).items()}
    return {
        "general.name": checkpoint.weights_path.resolve().stem,
        **{f"llama.{key}": config[name] for name, key in KEYS.items()},
        "llama.attention.value_length": params.head_dim,
        "llama.rope.dimension_count": params.head_dim,
        **yarn,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [tokens[i] for i in range(tokenizer.n_words)],
        "tokenizer.ggml.token_type": [types[i] for i in range(tokenizer.n_words)],
        "tokenizer.ggml.merges": bpe["merges"],
        **_special_ids(tokenizer),
        **settings,
    }


def _token_type(token: AddedToken | None) -> TokenType:
    """Return the type of an added token, or that of a row without a token."""
    if token is None:
        return TokenType.UNUSED
    return TokenType.CONTROL if token.special else TokenType.USER_DEFINED


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
