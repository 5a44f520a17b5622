"""Descriptions of a model of this server, as Ollama's API has them.

In: a `Serving` whose model is loaded. Out: JSON objects of /api/tags, /api/show and /api/ps.
"""

import hashlib
import json
from typing import Any

from llama.api import ModelCard
from llama.server.ollama.answers import timestamp
from llama.server.serving import Serving

_NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded
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
        "size": serving.loaded().card.num_bytes,
        "digest": _digest(name, details),
        "details": details,
    }


def running(serving: Serving) -> dict[str, Any]:
    """Return the entry of the model in /api/ps."""
    entry = listed(serving)
    del entry["modified_at"]
    card = serving.loaded().card
    return {
        **entry,
        "expires_at": _NEVER,
        "size_vram": entry["size"] if card.is_on_gpu else 0,
        "context_length": card.max_seq_len,
    }


def shown(serving: Serving) -> dict[str, Any]:
    """Return the answer of /api/show."""
    llama = serving.loaded()
    card = llama.card
    dialog_format = serving.dialog_format
    capabilities = [] if card.why_silent else ["completion"]
    if llama.pooler.settings.kind is not None:
        capabilities.append("embedding")
    if capabilities[:1] == ["completion"]:
        capabilities += ["tools"] * dialog_format.has_tools
        capabilities += ["thinking"] * (dialog_format.reasoning is not None)
    return {
        "modelfile": f"FROM {serving.name}\nPARAMETER num_ctx {card.max_seq_len}\n",
        "parameters": f"num_ctx {card.max_seq_len}",
        "template": dialog_format.jinja_template(),
        "details": _details(serving),
        "model_info": _model_info(card),
        "capabilities": capabilities,
        "modified_at": timestamp(serving.created),
    }


def _details(serving: Serving) -> dict[str, Any]:
    card = serving.loaded().card
    return {
        "parent_model": "",
        "format": "",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": _abbreviated(_num_parameters(card)),
        "quantization_level": card.weight_format,
    }


def _model_info(card: ModelCard) -> dict[str, Any]:
    """Return the sizes of the model under the names of GGUF's metadata.

    The context is what this server takes, which may be less than the model was trained for.
    """
    return {
        "general.architecture": "llama",
        "general.parameter_count": _num_parameters(card),
        "llama.context_length": card.max_seq_len,
        "llama.embedding_length": card.dim,
        "llama.block_count": card.n_layers,
        "llama.feed_forward_length": card.ffn_dim,
        "llama.attention.head_count": card.n_heads,
        "llama.attention.head_count_kv": card.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": card.norm_eps,
        "llama.rope.freq_base": card.rope_theta,
        "llama.vocab_size": card.vocab_size,
    }


def _num_parameters(card: ModelCard) -> int:
    """Return the number of parameters of the whole model, on all ranks together."""
    attention = card.dim * (2 * card.n_heads + 2 * card.kv_heads) * card.head_dim
    feed_forward = 3 * card.dim * card.ffn_dim
    norms = 2 * card.dim
    embeddings = card.vocab_size * card.dim * (1 if card.tied_output else 2)
    return card.n_layers * (attention + feed_forward + norms) + card.dim + embeddings


def _abbreviated(count: int) -> str:
    """Return a number as in the names of models, such as 8.0B."""
    for divisor, suffix in _SUFFIXES:
        if count >= divisor:
            return f"{count / divisor:.1f}{suffix}"
    return str(count)


def _digest(name: str, details: dict[str, Any]) -> str:
    """Return an id of the model; it is not a hash of the weights, which would have to be read."""
    return hashlib.sha256(json.dumps([name, details]).encode()).hexdigest()
