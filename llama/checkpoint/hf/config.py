"""Hugging Face's config.json and row order of Llama models, to Meta's and back.

In: the content of a config.json, or a `ModelArgs`. Out: the other. What this runtime does not
compute (other activations, biases, other RoPE scalings) is a ValueError.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from llama.common.checks import brief, errors_in, whole_number
from llama.model.args import MAX_SIZE, ModelArgs

# Values that config.json must have, or leave out, so that Meta's equations are the model's.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
# The parameters of Llama 3.1's RoPE scaling that are constants in `llama.ops.rope`.
ROPE_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_3_VOCAB = 128256
_MODEL_TYPES = ("llama", "llama_bidirec")  # the second is that of NVIDIA's embedding models
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


def args_of(config: dict[str, Any], source: str) -> ModelArgs:
    """Return the sizes of the model that a config.json describes.

    Args:
        config: The content of config.json.
        source: What errors name.

    Raises:
        ValueError: This runtime would compute the model wrongly, or a value is missing or wrong.
    """
    with errors_in(source):
        _check_config(config)
        sizes = {key: whole_number(key, config[key], 1, MAX_SIZE) for key in _SIZES}
        dim = sizes["hidden_size"]
        n_heads = sizes["num_attention_heads"]
        if config.get("head_dim") not in (None, dim / n_heads):
            raise ValueError(
                f"head_dim is {brief(config['head_dim'])}: this runtime needs hidden_size={dim} / "
                f"num_attention_heads={n_heads}"
            )
        params = {
            "dim": dim,
            "n_layers": sizes["num_hidden_layers"],
            "n_heads": n_heads,
            "n_kv_heads": config.get("num_key_value_heads"),
            "vocab_size": sizes["vocab_size"],
            "norm_eps": config["rms_norm_eps"],
            "context_length": config.get("max_position_embeddings"),
            "tied_output": config.get("tie_word_embeddings", False),
        }
        params |= _ffn_params(dim, sizes["intermediate_size"])
        params |= _rope_params(config)
    return ModelArgs.from_params(params, source)


def _check_config(config: dict[str, Any]) -> None:
    """Raise ValueError unless the model is a Llama and every size is there."""
    if config.get("model_type") not in _MODEL_TYPES:
        raise ValueError(
            f"model_type is {brief(config.get('model_type'))}: this is a model of another family, "
            "and this runtime runs 'llama' only: give the folder of a Llama 3, or run this one "
            "with transformers"
        )
    for key, wanted in _FIXED.items():
        if config.get(key, wanted) != wanted:
            raise ValueError(f"{key} is {brief(config[key])}: this runtime needs {wanted!r}")
    for key in ("rms_norm_eps", *_SIZES):
        if key not in config:
            raise ValueError(f"the key {key!r} is missing: fetch the file again")


def _ffn_params(dim: int, ffn_dim: int) -> dict[str, Any]:
    """Return multiple_of and ffn_dim_multiplier for which `ModelArgs.ffn_dim` is `ffn_dim`.

    Anything from 1 to ffn_dim is rounded up to the multiple ffn_dim; the multiplier reduces larger
    sizes to that range.
    """
    params: dict[str, Any] = {"multiple_of": ffn_dim}
    unscaled = int(2 * (4 * dim) / 3)
    if unscaled > ffn_dim:
        params["ffn_dim_multiplier"] = ffn_dim / unscaled
    return params


def _rope_params(config: dict[str, Any]) -> dict[str, Any]:
    """Return rope_theta and the RoPE scaling.

    They are in rope_scaling up to transformers 4, and in rope_parameters since version 5.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{key} must be an object, not {brief(rope)}")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("the key 'rope_theta' is missing: fetch the file again")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    described = ("rope_theta", "rope_type", "type")
    scaling = {k: v for k, v in rope.items() if k not in described}
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
    """Return ids of special tokens as config.json and generation_config.json spell them.

    Args:
        bos: The token that begins a text.
        eos: The tokens that end an answer.
        pad: The token that fills the rows of a batch.
    """
    return {"bos_token_id": bos, "eos_token_id": sorted(eos), "pad_token_id": pad}


def default_special_ids(args: ModelArgs) -> dict[str, Any]:
    """Return the special ids of Llama 3's own vocabulary.

    For another vocabulary the result is empty: only its tokenizer knows them.
    """
    if args.vocab_size != _LLAMA_3_VOCAB:
        return {}
    if args.use_scaled_rope:
        return special_ids(128000, [128001, 128008, 128009], 128004)
    return special_ids(128000, [128001, 128009], 128001)


def config_of(
    args: ModelArgs, *, tied: bool, dtype: torch.dtype, ids: dict[str, Any]
) -> dict[str, Any]:
    """Return the config.json of a model, with RoPE as every version of transformers reads it.

    Args:
        args: The sizes.
        tied: Whether lm_head and embedding are one matrix.
        dtype: The type of the weights.
        ids: The result of `special_ids`, or nothing.
    """
    scaling = {"rope_type": "llama3", "factor": args.rope_factor, **ROPE_SCALING}
    # Without ids, transformers would take Llama 2's 1 and 2.
    token_ids = ids or {"bos_token_id": None, "eos_token_id": None}
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
        **token_ids,
        **_FIXED,
    }


def copy_rows(into: Tensor, rows: Tensor, head_dim: int, to: str) -> None:
    """Copy the rows of wq or wk, (H * D, E), from one layout to the other.

    RoPE rotates element i of a head with i + D/2 in Hugging Face's layout, and 2i with 2i + 1 in
    Meta's: rows 0 1 2 3 of a head of size 4 are 0 2 1 3 there.

    Args:
        into: Where the rows are written, in the layout `to`.
        rows: The rows in the other layout.
        head_dim: D.
        to: "hf" or "meta".
    """
    num_heads = len(rows) // head_dim
    halves = (num_heads, 2, head_dim // 2, *rows.shape[1:])
    pairs = (num_heads, head_dim // 2, 2, *rows.shape[1:])
    if to == "hf":
        source = rows.view(pairs)
        target = into.view(halves)
    else:
        source = rows.view(halves)
        target = into.view(pairs)
    target.copy_(source.transpose(1, 2))
