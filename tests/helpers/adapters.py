"""LoRA adapters in folders, written without PEFT, and the weights that they should give.

The expectations are computed in float64 by the formulas of the papers, on whole matrices in Hugging
Face's row order, and import nothing from `llama`.
"""

from __future__ import (
    annotations,
)  # transformers imports its models lazily, when these names are first used

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from helpers.weights import metas_state

PREFIX = "base_model.model."
QUERY = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": "some regular expression",
    "bias": "none",
    "base_model_name_or_path": "/home/someone/base",
    "peft_version": "0.21.2",
}


def weight_of(model: transformers.LlamaForCausalLM, name: str) -> Tensor:
    return model.get_parameter(f"{name}.weight")


def update_of(
    model: transformers.LlamaForCausalLM, *modules: str, rank: int = 4, dora: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of an adapter for modules of a model, by PEFT's names."""
    draw = torch.Generator().manual_seed(11)
    tensors = {}
    for name in modules:
        rows, columns = weight_of(model, name).shape
        is_embedding = name == EMBEDDING
        shapes = (
            ((rank, rows), (columns, rank)) if is_embedding else ((rank, columns), (rows, rank))
        )
        for part, shape in zip("AB", shapes, strict=True):
            title = f"lora_embedding_{part}" if is_embedding else f"lora_{part}.weight"
            values = torch.randn(shape, generator=draw) * 0.2
            tensors[f"{PREFIX}{name}.{title}"] = values
        if dora:
            count = columns if is_embedding else rows
            values = 1 + torch.rand(count, generator=draw)
            tensors[f"{PREFIX}{name}.lora_magnitude_vector"] = values
    return tensors


def write_adapter(
    folder: Path, tensors: dict[str, Tensor], *, suffix: str = "safetensors", **config: Any
) -> Path:
    """Write an adapter's folder; a key of the configuration that is None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in (CONFIG | config).items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    path = folder / f"adapter_model.{suffix}"
    if suffix == "bin":
        torch.save(tensors, path)
    else:
        save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    return folder


def merged_state(
    model: transformers.LlamaForCausalLM, tensors: dict[str, Tensor], scale: float = 2.0
) -> dict[str, Tensor]:
    """Return the weights of a model with an adapter, under Meta's names, in float64."""
    merged = transformers.LlamaForCausalLM(model.config).double()
    merged.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    if model.config.tie_word_embeddings:
        merged.lm_head.weight = torch.nn.Parameter(merged.lm_head.weight.detach().clone())
    wide = {name.removeprefix(PREFIX): x.double() for name, x in tensors.items()}
    for name in sorted({name.partition(".lora_")[0] for name in wide if ".lora_" in name}):
        weight = weight_of(merged, name).data
        is_embedding = name == EMBEDDING
        if is_embedding:
            a, b = wide[f"{name}.lora_embedding_A"], wide[f"{name}.lora_embedding_B"]
            weight += scale * (b @ a).T
        else:
            a, b = wide[f"{name}.lora_A.weight"], wide[f"{name}.lora_B.weight"]
            weight += scale * b @ a
        magnitude = wide.get(f"{name}.lora_magnitude_vector")
        if magnitude is not None and is_embedding:
            weight *= magnitude / weight.norm(dim=0)
        elif magnitude is not None:
            weight *= (magnitude / weight.norm(dim=1))[:, None]
    for name, tensor in wide.items():
        if ".lora_" not in name:
            merged.get_parameter(name).data.copy_(tensor)
    return metas_state(merged)


def write_demo_adapter(folder: Path, seed: int, scale: float = 1.0) -> Path:
    """Write an adapter of rank 4 for the demo model: queries and values of its first layer."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for part, rows in (("q", 256), ("v", 128)):
        name = f"{PREFIX}model.layers.0.self_attn.{part}_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn((4, 256), generator=draw) * scale
        tensors[f"{name}.lora_B.weight"] = torch.randn((rows, 4), generator=draw) * scale
    return write_adapter(folder, tensors)
