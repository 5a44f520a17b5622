"""The sizes of a model in a GGUF file, as params.json would have them.

In: the headers of a model. Out: a `ModelArgs`. What this runtime does not compute (other
architectures, experts, other RoPE scalings) is a ValueError that names the file and the key.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama.checkpoint.hf import config as hf
from llama.common.checks import brief, errors_in, number
from llama.model.args import ModelArgs
from llama.ops.rope import rope_frequencies, turns_of
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
ATTENTION_FACTOR = "rope.scaling.attn_factor"
# By the parameter of YaRN in config.json: the key in the file.
YARN = {
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "attention_factor": ATTENTION_FACTOR,
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
            raise ValueError(
                f"{path}: the key {_ARCHITECTURE}.{key} is missing, which every Llama has"
            )
    if _EMBEDDING not in files:
        raise ValueError(f"{path}: {_EMBEDDING} is missing, which every Llama has")
    config["vocab_size"] = files[_EMBEDDING].tensors[_EMBEDDING].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in files
    if isinstance(config["rms_norm_eps"], float):
        # The file has 1e-5 rounded to float32, which is 9.99999974737875e-06.
        config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    with errors_in(str(path)):
        config |= _rope_scaling(headers[0])
    args = hf.args_of(config, str(path))
    _check_fixed_values(headers[0], args)
    if ROPE_DIVISORS not in files:
        return args
    header = files[ROPE_DIVISORS]
    return _with_divisors(header, header.tensors[ROPE_DIVISORS], args)


def _rope_scaling(header: Header) -> dict[str, Any]:
    """Return the RoPE scaling as config.json has it.

    As in llama.cpp a factor without a type is linear, and `rope.scale_linear` is its older name.
    """
    keys = (f"{_ARCHITECTURE}.rope.scaling.factor", f"{_ARCHITECTURE}.rope.scale_linear")
    factor = next((header.metadata[key] for key in keys if key in header.metadata), 0)
    scaling_type = header.metadata.get(f"{_ARCHITECTURE}.rope.scaling.type", "linear")
    is_yarn = scaling_type == "yarn"
    if scaling_type == "none" or not (factor or is_yarn):
        return {}
    scaling = {"rope_type": scaling_type, "factor": factor or 1.0}
    if is_yarn:
        own = {key: header.metadata.get(f"{_ARCHITECTURE}.{name}") for key, name in YARN.items()}
        scale = number(ATTENTION_FACTOR, own["attention_factor"] or 1.0, 0, 1e6)
        # The file has what remains after this factor.
        own["attention_factor"] = scale * _yarn_magnitude(number("factor", factor or 1.0, 0, 1e6))
        scaling |= own
    return {"rope_scaling": scaling}


def _yarn_magnitude(factor: float) -> float:
    """Return what llama.cpp multiplies queries and keys by for a factor of YaRN."""
    return 1.0 + 0.1 * math.log(factor)


def yarn_keys(args: ModelArgs) -> dict[str, str | float]:
    """Return the metadata of a model with YaRN, without the name of the architecture.

    Raises:
        ValueError: llama.cpp has no key for this scaling.
    """
    assert args.yarn is not None
    if not args.yarn.truncate:
        raise ValueError(
            "GGUF has no key for the scaling of this model, YaRN with truncate=false: convert it "
            "to another layout, such as a folder"
        )
    own = {
        "original_max_position_embeddings": args.rope_original_context,
        "beta_fast": args.rope_beta_fast,
        "beta_slow": args.rope_beta_slow,
        "attention_factor": args.rope_attention_factor / _yarn_magnitude(args.yarn.factor),
    }
    keys = {YARN[key]: value for key, value in own.items()}
    return {"rope.scaling.type": "yarn", "rope.scaling.factor": args.yarn.factor, **keys}


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
    allowed_values: dict[str, tuple[Any, ...]] = {
        "expert_count": (None, 0),
        "rope.scaling.type": (None, "none", "linear", "yarn"),
        "rope.scaling.yarn_ext_factor": (None, 1.0, -1.0),
        "rope.scaling.yarn_attn_factor": (None, 1.0),
        "rope.scaling.yarn_log_multiplier": (None, 0.0),
        "rope.dimension_count": (None, args.head_dim),
        "attention.value_length": (None, args.head_dim),
        "attention.causal": (None, True),
        "attention.scale": (None, 0.0),
        "attention.clamp_kqv": (None, 0.0),
        "attention.max_alibi_bias": (None, 0.0),
        "attention.sliding_window": (None, 0),
        "attn_logit_softcapping": (None, 0.0),
        "final_logit_softcapping": (None, 0.0),
        "logit_scale": (None, 0.0, 1.0),
        "residual_scale": (None, 0.0, 1.0),
        "embedding_scale": (None, 0.0, 1.0),
        "use_parallel_residual": (None, False),
    }
    if header.metadata.get(f"{_ARCHITECTURE}.rope.scaling.type") != "yarn":
        allowed_values[ATTENTION_FACTOR] = (None, 1.0)
    for key, allowed in allowed_values.items():
        value = header.metadata.get(f"{_ARCHITECTURE}.{key}")
        if value not in allowed:
            raise ValueError(
                f"{header.file}: {_ARCHITECTURE}.{key} is {brief(value)}: this runtime needs "
                f"{allowed[1]!r}, which every Llama 3 has"
            )


def _with_divisors(header: Header, info: TensorInfo, args: ModelArgs) -> ModelArgs:
    """Return the sizes of a model with the RoPE scaling that gives the divisors in a file.

    Raises:
        ValueError: No scaling that is computed here gives these divisors.
    """
    is_scaled_twice = args.rope_linear_factor != 1 or args.yarn is not None
    is_vector = info.type.name == "F32" and info.shape == (args.head_dim // 2,)
    if is_vector and not is_scaled_twice:
        data = np.fromfile(header.file, "<f4", args.head_dim // 2, offset=info.offset)
        divisors = torch.from_numpy(data)
        factor = divisors[-1].item()
        llama3 = replace(args, use_scaled_rope=True, rope_scale_factor=factor)
        linear = replace(args, rope_linear_factor=factor)
        for each in (llama3, linear, _fitted(llama3, divisors)) if factor > 0 else ():
            if torch.allclose(divisors, rope_divisors(each), rtol=1e-5, atol=0):
                return each
    raise ValueError(
        f"{header.file}: {ROPE_DIVISORS} does not hold the divisors of Llama 3.1's RoPE scaling, "
        "the only ones that this runtime computes: get the file from the model's publisher"
    )


def _fitted(args: ModelArgs, divisors: Tensor) -> ModelArgs:
    """Return sizes with the bounds of Llama 3.1's RoPE scaling to which divisors (D/2) fit best.

    Between the bounds, what is kept of a frequency grows with its turns in a straight line. The
    file does not say the original context; another one only moves the bounds.
    """
    assert args.rope_factor is not None
    plain = rope_frequencies(args.head_dim, args.rope_theta).double()
    turns = turns_of(plain, args.rope_original_context)
    smallest = 1.0 / args.rope_factor
    keep = (1.0 / divisors.double() - smallest) / (1.0 - smallest)
    blended = ((keep > 1e-5) & (keep < 1 - 1e-5)).nonzero().flatten().tolist()
    if len(blended) < 2:
        return args
    fast = blended[0]
    slow = blended[-1]
    per_turn = ((keep[fast] - keep[slow]) / (turns[fast] - turns[slow])).item()
    low = turns[slow].item() - keep[slow].item() / per_turn
    high = low + 1.0 / per_turn
    if not 0 < low < high:
        return args
    # The divisors are rounded to float32.
    bounds = [float(f"{bound:.6g}") for bound in (low, high)]
    return replace(args, rope_low_freq_factor=bounds[0], rope_high_freq_factor=bounds[1])


def rope_divisors(args: ModelArgs) -> Tensor:
    """Return what the RoPE scaling divides the frequency of each pair by: (D/2) float32."""
    plain = rope_frequencies(args.head_dim, args.rope_theta)
    return plain / rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling)
