"""Random tiny checkpoints in Meta's layout, for tests.

`random_state` makes the whole tensors of a model described by the contents of params.json;
`write_meta` writes them as a folder of shards. The sharding here is written independently from
Meta's rules, and imports nothing from `llama`: the loader is tested against it.
"""

import base64
import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from helpers.launch import DEMO


def ffn_dim(params: dict) -> int:
    hidden = int(2 * (4 * params["dim"]) / 3)
    if params.get("ffn_dim_multiplier") is not None:
        hidden = int(params["ffn_dim_multiplier"] * hidden)
    multiple = params.get("multiple_of", 256)
    return multiple * ((hidden + multiple - 1) // multiple)


def random_state(params: dict, seed: int = 0) -> dict[str, Tensor]:
    """Return Meta's name -> whole float32 tensor, scaled to logits with a deviation of about 3."""
    dim, vocab, ffn = params["dim"], params["vocab_size"], ffn_dim(params)
    head_dim = params.get("head_size") or dim // params["n_heads"]
    q = params["n_heads"] * head_dim
    kv = (params.get("n_kv_heads") or params["n_heads"]) * head_dim
    matrices = {
        "attention.wq": (q, dim), "attention.wk": (kv, dim), "attention.wv": (kv, dim),
        "attention.wo": (dim, q), "feed_forward.w1": (ffn, dim), "feed_forward.w2": (dim, ffn),
        "feed_forward.w3": (ffn, dim),
    }  # fmt: skip
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=draw) * std

    state = {"tok_embeddings.weight": normal(vocab, dim, std=0.2)}
    for i in range(params["n_layers"]):
        for name, shape in matrices.items():
            state[f"layers.{i}.{name}.weight"] = normal(*shape, std=shape[1] ** -0.5)
        for name in ("attention_norm", "ffn_norm"):
            state[f"layers.{i}.{name}.weight"] = 1 + normal(dim, std=0.1)
    state["norm.weight"] = 1 + normal(dim, std=0.1)
    state["output.weight"] = normal(vocab, dim, std=3 * dim**-0.5)
    return state


def shard_of(name: str, whole: Tensor, params: dict, index: int, count: int) -> Tensor:
    """Return the part of a tensor in shard or on rank `index` of `count`, in memory of its own.

    Ranks whose number does not divide a dimension hold whole groups of heads, and blocks of 32 rows
    or columns or of smaller ones; the first ranks hold one more than the others.
    """
    if whole.dim() == 1:
        return whole.clone()
    dim = 1 if "wo" in name or "w2" in name else 0
    if "attention" in name:
        heads = torch.arange(params["n_heads"])
        kv_heads = params.get("n_kv_heads") or params["n_heads"]
        if count <= kv_heads:  # every group of heads, (group, heads of it)
            parts = list(heads.view(kv_heads, -1).tensor_split(count))
        else:  # each group on several ranks, which divide its query heads
            ranks = [len(x) for x in torch.arange(count).tensor_split(kv_heads)]
            groups = zip(heads.view(kv_heads, -1), ranks, strict=True)
            parts = [part for group, n in groups for part in group.tensor_split(n)]
        own = parts[index].flatten()
        num_heads = len(heads)
        if "wk" in name or "wv" in name:
            own = (own // (len(heads) // kv_heads)).unique()
            num_heads = kv_heads
        head_dim = whole.shape[dim] // num_heads
        indices = (own[:, None] * head_dim + torch.arange(head_dim)).flatten()
        return whole.index_select(dim, indices)
    size = whole.shape[dim]
    if size % count == 0:
        return whole.chunk(count, dim)[index].clone()
    step = 32
    while size // step < count or size % step:
        step //= 2
    blocks = torch.arange(size).view(-1, step).tensor_split(count)
    return whole.index_select(dim, blocks[index].flatten())


def write_meta(
    folder: Path,
    params: dict,
    state: dict[str, Tensor],
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
    tokenizer: Path | None = None,
) -> Path:
    """Write consolidated.NN.pth, params.json and a copy of `tokenizer`; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params))
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.model")
    for i in range(num_shards):
        shard = {
            name: shard_of(name, whole, params, i, num_shards).to(dtype)
            for name, whole in state.items()
        }
        torch.save(shard, folder / f"consolidated.{i:02d}.pth")
    return folder


def write_byte_tokenizer(folder: Path, num_tokens: int = 512) -> None:
    """Write a tokenizer.model of the 256 bytes; the 256 special tokens make a vocabulary of 512.

    A larger vocabulary has tokens of two bytes after the bytes.
    """
    tokens = [bytes([i]) for i in range(256)]
    tokens += [bytes(divmod(i, 256)) for i in range(num_tokens - 512)]
    lines = [f"{base64.b64encode(token).decode()} {i}" for i, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")


def long_demo(folder: Path) -> Path:
    """Make the demo model without its context, so that it takes as many tokens as a build asks.

    Its answers are meaningless beyond the 512 tokens of its training.
    """
    folder.mkdir()
    for path in DEMO.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    change_params(folder, context_length=None)
    return folder


def change_params(folder: Path, **changes) -> None:
    """Rewrite params.json; a value of None removes the key."""
    path = folder / "params.json"
    params = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in params.items() if v is not None}))
