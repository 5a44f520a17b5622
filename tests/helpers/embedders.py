"""Tiny models for embeddings and scores as transformers writes them, with the model itself.

A folder has the tokenizer of the demo model, with the begin-of-text token before each text of a
pair, as in Llama 3's releases.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from helpers.fine_tunes import make_tokenizer

BEGIN = "<|begin_of_text|>"


def write_model(
    folder: Path,
    model_class: type[transformers.PreTrainedModel],
    *,
    sentence_transformers: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    ends: tuple[str, ...] = (),
    **config: Any,
) -> Any:
    """Write a random model, and return it.

    Args:
        folder: Where it is written.
        model_class: A class of transformers.
        sentence_transformers: By name, the content of further files.
        changes: Keys of config.json that are changed afterwards.
        ends: Special tokens after each text.
        config: Values of config.json.
    """
    rows = make_tokenizer(folder, "meta")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    ids = {x["content"]: x["id"] for x in content["added_tokens"]}
    single: list[Any] = [_special(BEGIN), _text("A"), *map(_special, ends)]
    second: list[Any] = [_special(BEGIN, 1), _text("B", 1), *(_special(x, 1) for x in ends)]
    content["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
            {
                "type": "TemplateProcessing",
                "single": single,
                "pair": single + second,
                "special_tokens": {
                    name: {"id": name, "ids": [ids[name]], "tokens": [name]}
                    for name in (BEGIN, *ends)
                },
            },
        ],
    }  # fmt: skip
    path.write_text(json.dumps(content))
    sizes: dict[str, Any] = {
        "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": rows,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "pad_token_id": 4,
    } | config  # fmt: skip
    torch.manual_seed(7)
    # The eager body masks by itself; sdpa would be causal without a mask.
    sizes["attn_implementation"] = "eager"
    made = transformers.LlamaConfig(**sizes)
    model: Any = model_class(made).eval()
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (changes or {})))
    for name, value in (sentence_transformers or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    return model


def pooling_files(mode: str, *, include_prompt: bool = True, **prompts: str) -> dict[str, Any]:
    """Return the files of sentence-transformers for a pooling mode such as "mean_tokens"."""
    modules = ["Transformer", "Pooling", "Normalize"]
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    return {
        "modules.json": [
            {"idx": i, "name": str(i), "path": "", "type": f"sentence_transformers.models.{name}"}
            for i, name in enumerate(modules)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": 128,
            "include_prompt": include_prompt,
            **{f"pooling_mode_{name}": name == mode for name in modes},
        },
        "config_sentence_transformers.json": {"prompts": prompts, "default_prompt_name": None},
    }


def last_states(model: Any, ids: list[int]) -> Tensor:
    """Return the normalised states of a model of transformers, (T, E)."""
    base = getattr(model, "model", model)
    with torch.inference_mode():
        states: Tensor = base(torch.tensor([ids])).last_hidden_state[0]
    return states


def _special(name: str, kind: int = 0) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": kind}}


def _text(name: str, kind: int = 0) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": kind}}
