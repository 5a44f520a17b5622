"""Descriptions of a model of this server, as Ollama's API has them.

In: a `Serving` whose model is loaded. Out: JSON objects of /api/tags, /api/show and /api/ps.
"""

import hashlib
import json
from typing import Any

from llama.api import ModelArgs, part_of
from llama.common.device import dtype_name
from llama.server.ollama.answers import timestamp
from llama.server.serving import Serving

_NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded
_FLOAT_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_SUFFIXES = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


def tagged(name: str) -> str:
    """Return the name of a model with a tag, which Ollama's clients expect in lists."""
    has_tag = ":" in name.rpartition("/")[2]
    return name if has_tag else f"{name}:latest"


def listed(serving: Serving) -> dict[str, Any]:
    """Return the entry of the model in /api/tags."""
    name = tagged(serving.name)
    details = _details(serving)
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(serving.created),
        "size": _size(serving),
        "digest": _digest(name, details),
        "details": details,
    }


def running(serving: Serving) -> dict[str, Any]:
    """Return the entry of the model in /api/ps."""
    entry = listed(serving)
    del entry["modified_at"]
    model = serving.loaded().model
    is_on_gpu = model.norm.weight.device.type == "cuda"
    return {
        **entry,
        "expires_at": _NEVER,
        "size_vram": entry["size"] if is_on_gpu else 0,
        "context_length": model.params.max_seq_len,
    }


def shown(serving: Serving) -> dict[str, Any]:
    """Return the answer of /api/show."""
    llama = serving.loaded()
    params = llama.model.params
    dialog_format = serving.dialog_format
    capabilities = [] if llama.llm_engine.why_silent else ["completion"]
    if llama.pooler.settings.kind is not None:
        capabilities.append("embedding")
    if capabilities[:1] == ["completion"]:
        capabilities += ["tools"] * dialog_format.has_tools
        capabilities += ["thinking"] * (dialog_format.reasoning is not None)
    return {
        "modelfile": f"FROM {serving.name}\nPARAMETER num_ctx {params.max_seq_len}\n",
        "parameters": f"num_ctx {params.max_seq_len}",
        "template": dialog_format.jinja_template(),
        "details": _details(serving),
        "model_info": _model_info(params),
        "capabilities": capabilities,
        "modified_at": timestamp(serving.created),
    }


def _details(serving: Serving) -> dict[str, Any]:
    model = serving.loaded().model
    dtype = dtype_name(model.norm.weight.dtype)
    return {
        "parent_model": "",
        "format": "",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": _abbreviated(_num_parameters(model.params)),
        "quantization_level": (model.quantization or _FLOAT_NAMES[dtype]).upper(),
    }


def _model_info(params: ModelArgs) -> dict[str, Any]:
    """Return the sizes of the model under the names of GGUF's metadata.

    The context is what this server takes, which may be less than the model was trained for.
    """
    return {
        "general.architecture": "llama",
        "general.parameter_count": _num_parameters(params),
        "llama.context_length": params.max_seq_len,
        "llama.embedding_length": params.dim,
        "llama.block_count": params.n_layers,
        "llama.feed_forward_length": params.ffn_dim,
        "llama.attention.head_count": params.n_heads,
        "llama.attention.head_count_kv": params.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": params.norm_eps,
        "llama.rope.freq_base": params.rope_theta,
        "llama.vocab_size": params.vocab_size,
    }


def _num_parameters(params: ModelArgs) -> int:
    """Return the number of parameters of the whole model, on all ranks together."""
    attention = params.dim * (2 * params.n_heads + 2 * params.kv_heads) * params.head_dim
    feed_forward = 3 * params.dim * params.ffn_dim
    norms = 2 * params.dim
    embeddings = params.vocab_size * params.dim * (1 if params.tied_output else 2)
    return params.n_layers * (attention + feed_forward + norms) + params.dim + embeddings


def _abbreviated(count: int) -> str:
    """Return a number as in the names of models, such as 8.0B."""
    for divisor, suffix in _SUFFIXES:
        if count >= divisor:
            return f"{count / divisor:.1f}{suffix}"
    return str(count)


def _size(serving: Serving) -> int:
    """Return the bytes of the weights in memory, on all ranks together."""
    model = serving.loaded().model
    own_bytes = sum(weight.nbytes for weight in [*model.parameters(), *model.buffers()])
    return int(own_bytes / part_of(model.params, model.parallel.placement))


def _digest(name: str, details: dict[str, Any]) -> str:
    """Return an id of the model; it is not a hash of the weights, which would have to be read."""
    return hashlib.sha256(json.dumps([name, details]).encode()).hexdigest()
