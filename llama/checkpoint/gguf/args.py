"""The sizes of a model in a GGUF file, as params.json would have them.

In: the headers of a model. Out: a `ModelArgs`. What this runtime does not compute (other
architectures, experts, other RoPE scalings) is a ValueError that names the file and the key.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama.checkpoint.hf import config as hf
from llama.common.checks import brief
from llama.model.args import ModelArgs
from llama.ops.rope import rope_frequencies
from llama.storage.gguf import Header, TensorInfo

_ARCHITECTURE = "llama"
# By the key of config.json: the key in the file, after "llama.".
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
_OPTIONAL = ("num_key_value_heads", "head_dim")
ROPE_DIVISORS = "rope_freqs.weight"
_EMBEDDING = "token_embd.weight"


def args_of(headers: list[Header]) -> ModelArgs:
    """Return the sizes of the model in the files with these headers.

    Raises:
        ValueError: A key is missing, or this runtime cannot compute the model.
    """
    metadata = headers[0].metadata
    path = headers[0].file
    files = {name: header for header in headers for name in header.tensors}
    _check_architecture(headers[0])
    config: dict[str, Any] = {"model_type": "llama"}
    for name, key in KEYS.items():
        config[name] = metadata.get(f"{_ARCHITECTURE}.{key}")
        if config[name] is None and name not in _OPTIONAL:
            raise ValueError(f"{path}: the key {_ARCHITECTURE}.{key} is missing: download it again")
    if _EMBEDDING not in files:
        raise ValueError(f"{path}: {_EMBEDDING} is missing: download the file again")
    config["vocab_size"] = files[_EMBEDDING].tensors[_EMBEDDING].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in files
    if isinstance(config["rms_norm_eps"], float):
        # The file has 1e-5 rounded to float32, which is 9.99999974737875e-06.
        config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    args = hf.args_of(config, str(path))
    _check_fixed_values(headers[0], args)
    if ROPE_DIVISORS not in files:
        return args
    header = files[ROPE_DIVISORS]
    factor = _rope_factor(header, header.tensors[ROPE_DIVISORS], args)
    return replace(args, use_scaled_rope=True, rope_scale_factor=factor)


def _check_architecture(header: Header) -> None:
    """Raise ValueError unless the file holds a whole model of the architecture "llama"."""
    architecture = header.metadata.get("general.architecture")
    content = header.metadata.get("general.type", "model")
    if (architecture, content) != (_ARCHITECTURE, "model"):
        raise ValueError(
            f"{header.file} holds a {brief(content)} of the architecture {brief(architecture)}: "
            "this runtime runs models of 'llama' only: give the file of a Llama 3, or run this one "
            "with llama.cpp"
        )


def _check_fixed_values(header: Header, args: ModelArgs) -> None:
    """Raise ValueError where a key has another value than every Llama 3 has."""
    allowed_values = {
        "expert_count": (None, 0),
        "rope.scaling.type": (None, "none"),
        "rope.dimension_count": (None, args.head_dim),
        "attention.value_length": (None, args.head_dim),
    }
    for key, allowed in allowed_values.items():
        value = header.metadata.get(f"{_ARCHITECTURE}.{key}")
        if value not in allowed:
            raise ValueError(
                f"{header.file}: {_ARCHITECTURE}.{key} is {brief(value)}: this runtime needs "
                f"{allowed[1]!r}, which every Llama 3 has"
            )


def _rope_factor(header: Header, info: TensorInfo, args: ModelArgs) -> float:
    """Return the factor of Llama 3.1's RoPE scaling that gives the divisors in a file.

    Raises:
        ValueError: No factor gives these divisors.
    """
    if info.type.name == "F32" and info.shape == (args.head_dim // 2,):
        data = np.fromfile(header.file, "<f4", args.head_dim // 2, offset=info.offset)
        divisors = torch.from_numpy(data)
        factor = divisors[-1].item()
        if torch.allclose(divisors, rope_divisors(args, factor), rtol=1e-5, atol=0):
            return factor
    raise ValueError(
        f"{header.file}: {ROPE_DIVISORS} does not hold the divisors of Llama 3.1's RoPE scaling, "
        "the only ones that this runtime computes: get the file from the model's publisher"
    )


def rope_divisors(args: ModelArgs, factor: float) -> Tensor:
    """Return what Llama 3.1's scaling divides the frequency of each pair by: (D/2) float32."""
    plain = rope_frequencies(args.head_dim, args.rope_theta, None)
    return plain / rope_frequencies(args.head_dim, args.rope_theta, factor)
