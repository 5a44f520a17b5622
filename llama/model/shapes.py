"""The sizes of the models that Meta has released, by the usual name of each.

In: a name such as "8b". Out: the contents of its params.json, or a `ModelArgs`. No file is opened.
"""

from typing import Any

from llama.model.args import ModelArgs, VisionArgs

_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "n_kv_heads": 8,
    "use_scaled_rope": True,
}
# `tied_output` is not Meta's: the file of a tied model names the matrix twice.
_LLAMA_3_2 = _LLAMA_3 | {"multiple_of": 256, "tied_output": True}

SHAPES: dict[str, dict[str, Any]] = {
    "1b": _LLAMA_3_2 | {"dim": 2048, "n_layers": 16, "n_heads": 32, "ffn_dim_multiplier": 1.5},
    "3b": _LLAMA_3_2 | {"dim": 3072, "n_layers": 28, "n_heads": 24, "ffn_dim_multiplier": 1.0},
    "8b": {
        **_LLAMA_3,
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "ffn_dim_multiplier": 1.3,
        "multiple_of": 1024,
    },
    "70b": {
        **_LLAMA_3,
        "dim": 8192,
        "n_layers": 80,
        "n_heads": 64,
        "ffn_dim_multiplier": 1.3,
        "multiple_of": 4096,
    },
    "405b": {
        **_LLAMA_3,
        "dim": 16384,
        "n_layers": 126,
        "n_heads": 128,
        "ffn_dim_multiplier": 1.2,
        "multiple_of": 4096,
    },
}
# The text model of a vision model, and its number of cross-attention layers.
_VISION = {"11b-vision": ("8b", 8), "90b-vision": ("70b", 20)}
NAMES = (*SHAPES, *_VISION)


def args_of(name: str) -> ModelArgs:
    """Return the sizes of a model, one of NAMES."""
    if name not in _VISION:
        return ModelArgs(**SHAPES[name])
    text, num_cross_layers = _VISION[name]
    return ModelArgs(**SHAPES[text], vision=VisionArgs(num_cross_layers))
