"""Checkpoints on disk for tests: the expected weights of each rank, and files of other libraries.

The expectations have independent sources: `checkpoints.py` cuts shards by its own rules, and
transformers writes and reads its own layout.
"""

from __future__ import (
    annotations,
)  # transformers imports its models lazily, when these names are first used

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from helpers.checkpoints import random_state, shard_of
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.loader import load
from llama.checkpoint.table import shard_shapes
from llama.model import Transformer
from llama.model.args import ModelArgs
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement

PARAMS = {
    "dim": 64, "n_layers": 2, "n_heads": 16, "n_kv_heads": 4, "vocab_size": 128,
    "multiple_of": 32, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip


WIDE_HEADS = PARAMS | {
    "n_heads": 4,
    "n_kv_heads": 2,
}  # heads of 16, large enough for RoPE scaling to have an effect


STATE = random_state(PARAMS)


def loaded(
    found: Checkpoint, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32
) -> Transformer:
    parallel = Parallel(Placement(rank=rank, size=size))
    model = Transformer(found.params, parallel=parallel, dtype=dtype)
    for shard in model.named_shards().values():
        shard.fill_(float("nan"))
    load(found, model)
    return model


def expect_shards(model: Transformer, state: dict[str, Tensor], params: dict) -> None:
    """Check that every weight is, bit for bit, what the test's own sharding gives its rank."""
    rank, size = model.parallel.rank, model.parallel.size
    shards = model.named_shards()
    assert shards.keys() == state.keys()
    for name, shard in shards.items():
        expected = shard_of(name, state[name], params, rank, size).to(shard.dtype)
        assert torch.equal(shard, expected), (name, rank, size)


def expect_files(folder: Path, state: dict[str, Tensor], params: dict, count: int) -> None:
    """Check that the folder has exactly the shards that the test's own sharding gives."""
    paths = sorted(folder.glob("*.pth"))
    assert [path.name for path in paths] == [f"consolidated.{i:02d}.pth" for i in range(count)]
    for i, path in enumerate(paths):
        shard = torch.load(path, weights_only=True)
        assert shard.keys() == state.keys()
        for name, tensor in shard.items():
            expected = shard_of(name, state[name], params, i, count)
            assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), (name, i)


def flip_a_bit(path: Path, name: str) -> None:
    """Flip a bit of a tensor in a .pth, whose bytes occur in no other."""
    data = torch.load(path, weights_only=True)[name].numpy().tobytes()
    content = path.read_bytes()
    at = content.index(data)
    assert content.count(data) == 1
    path.write_bytes(content[:at] + bytes([data[0] ^ 1]) + content[at + 1 :])


def shapes_of(params: dict) -> dict[str, torch.Size]:
    return shard_shapes(ModelArgs.from_params(params, ""), 1)


def hf_model(**changes) -> transformers.LlamaForCausalLM:
    config: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    } | changes  # fmt: skip
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()


# Llama 3.1's, whatever its factor.
LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def scaled_rope(factor: float, rope_type: str = "llama3", **changes: Any) -> dict:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 500000.0, "factor": factor}
    if rope_type == "llama3":
        rope |= LLAMA3_SCALING
    return {"rope_parameters": rope | changes}


def hf_logits(model: transformers.LlamaForCausalLM, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(tokens).logits.float()


def from_hf(folder: Path) -> transformers.LlamaForCausalLM:
    """Return the model as transformers reads it; a tensor that it had to initialize is an error."""
    read: Any = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = read
    assert not any(report.values()), report
    return model.eval()


def metas_state(model: transformers.LlamaForCausalLM) -> dict[str, Tensor]:
    """Return the weights under Meta's names and in Meta's row order, computed from the model
    itself.
    """
    head_dim = model.config.head_dim
    assert head_dim is not None
    state = {"tok_embeddings.weight": model.model.embed_tokens.weight}
    for i, layer in enumerate(model.model.layers):
        q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
        state |= {
            f"layers.{i}.attention.wq.weight": interleaved(q, head_dim),
            f"layers.{i}.attention.wk.weight": interleaved(k, head_dim),
            f"layers.{i}.attention.wv.weight": layer.self_attn.v_proj.weight,
            f"layers.{i}.attention.wo.weight": layer.self_attn.o_proj.weight,
            f"layers.{i}.feed_forward.w1.weight": layer.mlp.gate_proj.weight,
            f"layers.{i}.feed_forward.w2.weight": layer.mlp.down_proj.weight,
            f"layers.{i}.feed_forward.w3.weight": layer.mlp.up_proj.weight,
            f"layers.{i}.attention_norm.weight": layer.input_layernorm.weight,
            f"layers.{i}.ffn_norm.weight": layer.post_attention_layernorm.weight,
        }
    state |= {"norm.weight": model.model.norm.weight, "output.weight": model.lm_head.weight}
    return {name: tensor.detach() for name, tensor in state.items()}


def interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder rows: element i of the first half goes to 2i, of the second half to 2i + 1."""
    out = torch.empty_like(rows)
    for row in range(len(rows)):
        head, at = divmod(row, head_dim)
        second, i = divmod(at, head_dim // 2)
        out[head * head_dim + 2 * i + second] = rows[row]
    return out


def sylvester(size: int) -> Tensor:
    """Return Sylvester's orthogonal Hadamard matrix (size, size) in float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64), matrix)
    return matrix / size**0.5


def tokens_of(length: int = 100) -> Tensor:
    return torch.randint(128, (1, length), generator=torch.Generator().manual_seed(7))


def change_json(path: Path, **changes) -> None:
    """Rewrite a JSON file; a value of None removes the key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def change_shard(path: Path, **changes: Tensor | None) -> None:
    """Rewrite a .pth; "__" in a keyword stands for "."; None removes the tensor."""
    shard = torch.load(path, weights_only=True)
    shard |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    torch.save({name: tensor for name, tensor in shard.items() if tensor is not None}, path)


def change_safetensors(folder: Path, name: str, tensor: Tensor | None) -> None:
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as content:
        tensors = {key: content.get_tensor(key).clone() for key in content.keys()}  # noqa: SIM118
    tensors |= {name: tensor}
    kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})
