"""GGUF files for tests, written and read back by llama.cpp's package `gguf`."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from helpers.checkpoints import ffn_dim, random_state
from llama import Tokenizer

# Offsets of the float16 numbers in a block, from ggml-common.h.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
    "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip
PARAMS = {
    "dim": 256, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2, "vocab_size": 512,
    "multiple_of": 256, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "output": "Q6_K", "token_embd": "Q8_0"}


def random_blocks(kind: str, n: int, k: int, std: float, seed: int = 0) -> np.ndarray:
    """Return (n, bytes per row) random blocks, with scales that give a deviation of about `std`."""
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n * k // block, size), dtype=np.uint8)
    for at in SCALES[kind]:
        drawn = rng.uniform(5e-4, 1e-3, len(blocks)) * rng.choice([-1, 1], len(blocks))
        drawn = drawn.astype("<f2")
        blocks[:, at : at + 2] = drawn.view(np.uint8).reshape(-1, 2)
    now = gguf.quants.dequantize(blocks, Kind[kind]).std()
    for at in SCALES[kind]:
        scaled = blocks[:, at : at + 2].copy().view("<f2") * np.float16(std / now)
        blocks[:, at : at + 2] = scaled.view(np.uint8)
    return blocks.reshape(n, -1)


def write_gguf(
    path: Path,
    params: dict,
    kinds: dict[str, str] | str = "F32",
    default: str = "Q4_K",
    tokenizer: Path | None = None,
    parts: int = 1,
    metadata: dict[str, Any] | None = None,
    **tensors: np.ndarray,
) -> dict[str, Tensor]:
    """Write a model of random numbers; return its tensors under Meta's names, as gguf reads them.

    Args:
        kinds: the block type of each matrix by llama.cpp's name, where `default` names that of all
            others; or one type for all of them.
        metadata: values that replace what a converter writes.
        tensors: tensors that are added or replaced (`__` stands for `.`).
    """
    state = random_state(params)
    if params.get("tied_output"):
        del state["output.weight"]
    every = len(state) // parts + 1 if parts > 1 else 0
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=every)
    head_dim = params.get("head_size") or params["dim"] // params["n_heads"]
    if "head_size" in params:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_context_length(params.get("context_length", 8192))
    writer.add_embedding_length(params["dim"])
    writer.add_block_count(params["n_layers"])
    writer.add_feed_forward_length(ffn_dim(params))
    writer.add_head_count(params["n_heads"])
    writer.add_head_count_kv(params["n_kv_heads"])
    writer.add_layer_norm_rms_eps(params["norm_eps"])
    writer.add_rope_freq_base(params["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(params["vocab_size"])
    if tokenizer is not None:
        add_vocabulary(writer, Tokenizer(tokenizer, llama_3_0=True))
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        each = GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, GGUFValueType.get_type(value), each)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, params["n_layers"])
    for i, (name, whole) in enumerate(state.items()):
        to = names.get_name(name, try_suffixes=(".weight",))
        assert to is not None
        part = to.removesuffix(".weight").split(".")[-1]
        kind = kinds if isinstance(kinds, str) else kinds.get(part, default)
        if whole.dim() == 1 or kind == "F32":
            writer.add_tensor(to, whole.numpy())
        elif kind in ("F16", "BF16"):
            data = gguf.quants.quantize(whole.numpy(), Kind[kind])
            state[name] = torch.from_numpy(gguf.quants.dequantize(data, Kind[kind]))
            writer.add_tensor(to, data, raw_dtype=Kind[kind])
        else:
            data = random_blocks(kind, len(whole), whole.shape[1], whole.std().item(), seed=i)
            state[name] = torch.from_numpy(gguf.quants.dequantize(data, Kind[kind]))
            writer.add_tensor(to, data, raw_dtype=Kind[kind])
    for key, array in tensors.items():
        writer.add_tensor(key.replace("__", "."), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


def add_vocabulary(writer: gguf.GGUFWriter, of: Tokenizer) -> None:
    """Add Llama 3's vocabulary as llama.cpp's converter does: the id of each token is its rank."""
    letter_of = bytes_to_unicode()
    ranked = [
        of.model.decode_single_token_bytes(i) for i in range(len(of.model.token_byte_values()))
    ]
    known = set(ranked)
    pairs = [(t[:i], t[i:]) for t in ranked for i in range(1, len(t)) if {t[:i], t[i:]} <= known]
    tokens = ["".join(letter_of[b] for b in token) for token in ranked]
    merges = [" ".join("".join(letter_of[b] for b in x) for x in pair) for pair in pairs]
    specials = sorted(of.special_tokens, key=of.special_tokens.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens + specials)
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(specials)
    )
    if merges:
        writer.add_token_merges(merges)
    writer.add_bos_token_id(of.bos_id)
    writer.add_eos_token_id(of.eos_id)
