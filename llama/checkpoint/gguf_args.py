"""The sizes of a model in a GGUF file, as params.json would have them.

In: the headers of a model. Out: a `ModelArgs`. What this runtime does not compute (other
architectures, experts, other RoPE scalings) is an error here, which names file and key.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama.checkpoint import huggingface as hf
from llama.checkpoint.gguf import Header, TensorInfo
from llama.checks import brief
from llama.model.args import ModelArgs
from llama.ops.rope import rope_frequencies

_ARCHITECTURE = "llama"
KEYS = {  # as config.json has them; what a file may leave out
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
ROPE = "rope_freqs.weight"


def args_of(headers: list[Header]) -> ModelArgs:
    first, path = headers[0].metadata, headers[0].file
    tensors = {name: (header, info) for header in headers for name, info in header.tensors.items()}
    found = first.get("general.architecture"), first.get("general.type", "model")
    if found != (_ARCHITECTURE, "model"):
        raise ValueError(
            f"{path} holds a {brief(found[1])} of the architecture {brief(found[0])}: this runtime "
            "runs models of 'llama' only: give the file of a Llama 3, or run this with llama.cpp"
        )
    config: dict[str, Any] = {"model_type": "llama"}
    for name, key in KEYS.items():
        config[name] = first.get(f"{_ARCHITECTURE}.{key}")
        if config[name] is None and name not in _OPTIONAL:
            raise ValueError(f"{path}: the key {_ARCHITECTURE}.{key} is missing: download it again")
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{path}: token_embd.weight is missing: download the file again")
    config["vocab_size"] = tensors["token_embd.weight"][1].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if isinstance(config["rms_norm_eps"], float):  # 1e-5 was rounded to float32
        config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    args = hf.args_of(config, str(path))
    wanted = {
        "expert_count": (None, 0),
        "rope.scaling.type": (None, "none"),
        "rope.dimension_count": (None, args.head_dim),
        "attention.value_length": (None, args.head_dim),
    }
    for key, allowed in wanted.items():
        if (value := first.get(f"{_ARCHITECTURE}.{key}")) not in allowed:
            raise ValueError(
                f"{path}: {_ARCHITECTURE}.{key} is {brief(value)}: this runtime needs "
                f"{allowed[1]!r}, as Llama 3 has it"
            )
    if ROPE in tensors:
        factor = _rope_factor(*tensors[ROPE], args)
        args = replace(args, use_scaled_rope=True, rope_scale_factor=factor)
    return args


def _rope_factor(header: Header, info: TensorInfo, args: ModelArgs) -> float:
    """What the file divides the slow rotations by: its divisors must be those of Llama 3.1."""
    if info.kind.name == "F32" and info.shape == (args.head_dim // 2,):
        data = np.fromfile(header.file, "<f4", args.head_dim // 2, offset=info.offset)
        divisors = torch.from_numpy(data)
        factor = divisors[-1].item()
        if torch.allclose(divisors, rope_divisors(args, factor), rtol=1e-5, atol=0):
            return factor
    raise ValueError(
        f"{header.file}: {ROPE} does not hold the divisors of Llama 3.1's RoPE scaling, the only "
        "ones that this runtime knows: get the file from who published the model"
    )


def rope_divisors(args: ModelArgs, factor: float) -> Tensor:
    """(D/2): what Llama 3.1's scaling divides the turns of each pair by."""
    plain = rope_frequencies(args.head_dim, args.rope_theta, None)
    return plain / rope_frequencies(args.head_dim, args.rope_theta, factor)
