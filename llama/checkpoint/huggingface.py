"""Hugging Face's Llama config.json and row order, to Meta's and back.

In: the contents of a config.json, or a `ModelArgs`. Out: the other. What this runtime does not
compute (other activations, biases, other RoPE scalings) is an error here.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from llama.checks import brief, errors_in, whole_number
from llama.model.args import MAX_SIZE, ModelArgs

# What a config.json must say, or leave out, for Meta's mathematics to be the model's.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
# The three numbers of Llama 3.1's RoPE scaling that `llama.ops.rope` holds as constants.
ROPE_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_3_VOCAB = 128256
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
)  # fmt: skip


def args_of(config: dict[str, Any], source: str) -> ModelArgs:
    """What a config.json says of a model; ValueError, naming `source`, where this runtime would
    compute it wrongly."""
    with errors_in(source):
        if config.get("model_type") != "llama":
            raise ValueError(
                f"model_type is {brief(config.get('model_type'))}: this is a model of another "
                "family, and this runtime runs 'llama' only: give the folder of a Llama 3, or run "
                "this one with transformers"
            )
        for key, wanted in _FIXED.items():
            if config.get(key, wanted) != wanted:
                raise ValueError(f"{key} is {brief(config[key])}: this runtime needs {wanted!r}")
        for key in ("rms_norm_eps", *_SIZES):
            if key not in config:
                raise ValueError(f"the key {key!r} is missing: fetch the file again")
        dim, ffn, n_layers, n_heads, vocab_size = (
            whole_number(key, config[key], 1, MAX_SIZE) for key in _SIZES
        )
        if config.get("head_dim") not in (None, dim / n_heads):
            raise ValueError(
                f"head_dim is {brief(config['head_dim'])}: this runtime needs hidden_size={dim} / "
                f"num_attention_heads={n_heads}"
            )
        params = {
            "dim": dim,
            "n_layers": n_layers,
            "n_heads": n_heads,
            "n_kv_heads": config.get("num_key_value_heads"),
            "vocab_size": vocab_size,
            "norm_eps": config["rms_norm_eps"],
            "context_length": config.get("max_position_embeddings"),
            "tied_output": config.get("tie_word_embeddings", False),
        }
        params |= _ffn_rule(dim, ffn) | _rope_params(config)
    return ModelArgs.from_params(params, source)


def _ffn_rule(dim: int, ffn: int) -> dict[str, Any]:
    """multiple_of and ffn_dim_multiplier for which `ModelArgs.ffn_dim` is exactly `ffn`.

    Anything from 1 to ffn rounds up to the multiple ffn; the multiplier brings larger sizes down.
    """
    wide = int(2 * (4 * dim) / 3)
    return {"multiple_of": ffn} | ({"ffn_dim_multiplier": ffn / wide} if wide > ffn else {})


def _rope_params(config: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and the scaling: in rope_scaling up to transformers 4, rope_parameters since 5."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{key} must be an object, not {brief(rope)}")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("the key 'rope_theta' is missing: fetch the file again")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type", "type")}
    if rope_type == "default" and not scaling:
        return {"rope_theta": theta, "use_scaled_rope": False}
    factor = scaling.pop("factor", None)
    if rope_type != "llama3" or scaling != ROPE_SCALING or factor is None:
        raise ValueError(
            f"{key} is {brief(rope)}: this runtime knows rope_type 'default', and 'llama3' with a "
            f"factor and {', '.join(f'{k} {v}' for k, v in ROPE_SCALING.items())}"
        )
    return {"rope_theta": theta, "use_scaled_rope": True, "rope_scale_factor": factor}


def special_ids(bos: int, eos: Iterable[int], pad: int) -> dict[str, Any]:
    """The ids that programs must know, as config.json and generation_config.json spell them: what
    begins a text, what ends an answer, what fills a batch."""
    return {"bos_token_id": bos, "eos_token_id": sorted(eos), "pad_token_id": pad}


def metas_special_ids(args: ModelArgs) -> dict[str, Any]:
    """Those of Llama 3's own vocabulary; none for another one, which only its tokenizer knows."""
    if args.vocab_size != _LLAMA_3_VOCAB:
        return {}
    if args.use_scaled_rope:
        return special_ids(128000, [128001, 128008, 128009], 128004)
    return special_ids(128000, [128001, 128009], 128001)


def config_of(
    args: ModelArgs, *, tied: bool, dtype: torch.dtype, ids: dict[str, Any]
) -> dict[str, Any]:
    """The config.json of a model; RoPE in the form that every transformers reads."""
    scaling = {"rope_type": "llama3", "factor": args.rope_factor, **ROPE_SCALING}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": scaling if args.use_scaled_rope else None,
        "max_position_embeddings": args.longest_context,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        # Without ids, transformers would take Llama 2's 1 and 2.
        **(ids or {"bos_token_id": None, "eos_token_id": None}),
        **_FIXED,
    }


def copy_rows(into: Tensor, rows: Tensor, head_dim: int, to: str) -> None:
    """Copy rows of q or k, (H * D, E), from one layout to the other, `to`.

    Rotation pairs element i of a head with i + D/2 in Hugging Face's, and 2i with 2i + 1 in Meta's:
    rows 0 1 2 3 of a head of size 4 are 0 2 1 3 there.
    """
    halves, pairs = (-1, 2, head_dim // 2), (-1, head_dim // 2, 2)
    source, target = (pairs, halves) if to == "hf" else (halves, pairs)
    into.unflatten(0, target).copy_(rows.unflatten(0, source).transpose(1, 2))
