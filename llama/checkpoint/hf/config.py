"""Hugging Face's config.json and row order of Llama models, to Meta's and back.

In: the content of a config.json, or a `ModelArgs`. Out: the other. What this runtime does not
compute (other activations, biases, other RoPE scalings) is a ValueError.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from llama.common.checks import brief, errors_in, number, whole_number
from llama.model.args import MAX_SIZE, ModelArgs

# What config.json must have, or leave out, so that Meta's equations are the model's.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
# Keys of other models and of variants of Llama, and the values with which they change nothing. None
# is such a value for each of them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_ratio": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_parallel_residual": (False,),
    "alibi": (False,),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
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
        head_dim = whole_number("head_dim", config.get("head_dim"), 2, 2**16, optional=True)
        params = {
            "dim": dim,
            "n_layers": sizes["num_hidden_layers"],
            "n_heads": n_heads,
            "n_kv_heads": config.get("num_key_value_heads"),
            "head_size": None if head_dim == dim / n_heads else head_dim,
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
    for key in ("rms_norm_eps", *_SIZES):
        if key not in config:
            raise ValueError(f"the key {key!r} is missing, which every Llama has")
    _check_neutral(config)


def _check_neutral(config: dict[str, Any]) -> None:
    """Raise ValueError where a key asks for something that this runtime does not compute."""
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            wanted = repr(neutral[0]) if neutral else "null"
            raise ValueError(f"{key} is {brief(value)}: this runtime needs {wanted}")
    layers = config.get("layer_types") or []
    if not isinstance(layers, list) or any(kind != "full_attention" for kind in layers):
        raise ValueError(f"layer_types is {brief(layers)}: this runtime needs full_attention")
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return
    context = config.get("max_position_embeddings")
    is_number = isinstance(window, int) and isinstance(context, int)
    if not is_number or window < context:
        raise ValueError(
            f"sliding_window is {brief(window)}: this runtime attends to the whole context of "
            f"max_position_embeddings={brief(context)}; remove the key if the model was trained so"
        )


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
        raise ValueError("the key 'rope_theta' is missing, which every Llama has")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    described = ("rope_theta", "rope_type", "type")
    scaling = {k: v for k, v in rope.items() if k not in described and v is not None}
    if scaling.get("partial_rotary_factor") == 1:
        del scaling["partial_rotary_factor"]
    params = _scaling_params(rope_type, scaling, config)
    if params is None:
        raise ValueError(
            f"{key} is {brief(rope)}: this runtime knows rope_type 'default', 'linear', 'dynamic' "
            "and 'yarn' with a factor, and 'llama3' with a factor, low_freq_factor, "
            "high_freq_factor and original_max_position_embeddings"
        )
    return {"rope_theta": theta, "use_scaled_rope": False, **params}


def _scaling_params(
    rope_type: object, scaling: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the sizes that a RoPE scaling gives; None if this runtime does not compute it.

    Args:
        rope_type: Its type.
        scaling: Its parameters.
        config: The content of config.json.
    """
    original_key = "original_max_position_embeddings"
    factor = scaling.pop("factor", None)
    original = scaling.pop(original_key, config.get("max_position_embeddings"))
    if config.get(original_key) is not None:  # As in transformers it comes first.
        original = config[original_key]
    if rope_type == "yarn":
        return _yarn_params(factor, original, scaling, config)
    if scaling.get("attention_factor") == 1:
        del scaling["attention_factor"]
    if rope_type == "default":
        is_plain = not scaling and factor in (None, 1)
        return {} if is_plain else None
    if factor is None:
        return None
    if rope_type == "llama3":
        bounds = ("low_freq_factor", "high_freq_factor")
        if scaling.keys() != set(bounds) or original is None:
            return None
        return {
            "use_scaled_rope": True,
            "rope_scale_factor": factor,
            "rope_original_context": original,
            **{f"rope_{name}": scaling[name] for name in bounds},
        }
    if scaling:
        return None
    if factor == 1:
        return {}
    if rope_type == "linear":
        return {"rope_linear_factor": factor}
    # Dynamic scaling changes nothing up to max_position_embeddings, which is the context here.
    return {} if rope_type == "dynamic" else None


def _yarn_params(
    factor: object, original: object, scaling: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the sizes of YaRN's scaling; None where it has an unknown parameter.

    Args:
        factor: The factor; None: how much longer the context is than the original one.
        original: The original context, in tokens.
        scaling: The other parameters, with the names and defaults of transformers.
        config: The content of config.json.
    """
    context = whole_number("original_max_position_embeddings", original, 1, 2**40)
    if factor is None:
        factor = number("max_position_embeddings", config.get("max_position_embeddings"), 1, 2**40)
        factor /= context
    ratio = number("factor", factor, 0, 1e6, above=True)
    names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    numbers = {name: number(name, scaling.pop(name, 0), 0, 1e6) for name in names}
    attention_factor = scaling.pop("attention_factor", None)
    truncate = scaling.pop("truncate", True)
    scaling.pop("finetuned", None)  # It says how the model was made.
    if scaling:
        return None
    if attention_factor is None:
        mscale, mscale_all = numbers["mscale"], numbers["mscale_all_dim"]
        is_ratio = bool(mscale and mscale_all)
        attention_factor = _mscale(ratio, mscale if is_ratio else 1.0)
        attention_factor /= _mscale(ratio, mscale_all) if is_ratio else 1.0
    if ratio == 1 and attention_factor == 1:
        return {}
    return {
        "rope_attention_factor": attention_factor,
        "rope_yarn_factor": ratio,
        "rope_original_context": context,
        "rope_beta_fast": numbers["beta_fast"] or 32.0,
        "rope_beta_slow": numbers["beta_slow"] or 1.0,
        "rope_truncate": truncate,
    }


def _mscale(factor: float, weight: float) -> float:
    """Return YaRN's factor of queries and keys for a factor of the context."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


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
    scaling: dict[str, Any] | None = None
    if args.use_scaled_rope:
        scaling = {
            "rope_type": "llama3",
            "factor": args.rope_factor,
            "original_max_position_embeddings": args.rope_original_context,
            "low_freq_factor": float(args.rope_low_freq_factor),
            "high_freq_factor": float(args.rope_high_freq_factor),
        }
    elif args.rope_linear_factor != 1:
        scaling = {"rope_type": "linear", "factor": args.rope_linear_factor}
    elif args.yarn is not None:
        scaling = {
            "rope_type": "yarn",
            "factor": args.yarn.factor,
            "original_max_position_embeddings": args.rope_original_context,
            "beta_fast": args.rope_beta_fast,
            "beta_slow": args.rope_beta_slow,
            "truncate": args.rope_truncate,
            "attention_factor": float(args.rope_attention_factor),
        }
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
        "rope_scaling": scaling,
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
