"""The tensors of a model: their names in all layouts, and the shape that each rank holds.

In: a `ModelArgs`. Out: names, shapes and ranges of rows. No file is opened, and no tensor or module
is made: shapes follow from params.json and from one table, which load, reshard and convert all use.
"""

import re
from typing import NamedTuple

from torch import Size

from llama.model.args import ModelArgs


class Entry(NamedTuple):
    hf: str  # Hugging Face's name
    shape: str  # V vocabulary, E model dim, F ffn, K kv heads x head dim
    dim: int | None  # that the ranks of a group divide; None: each holds the whole


TABLE = {  # by Meta's name; N is the number of a layer
    "tok_embeddings.weight": Entry("model.embed_tokens.weight", "VE", 0),
    "layers.N.attention.wq.weight": Entry("model.layers.N.self_attn.q_proj.weight", "EE", 0),
    "layers.N.attention.wk.weight": Entry("model.layers.N.self_attn.k_proj.weight", "KE", 0),
    "layers.N.attention.wv.weight": Entry("model.layers.N.self_attn.v_proj.weight", "KE", 0),
    "layers.N.attention.wo.weight": Entry("model.layers.N.self_attn.o_proj.weight", "EE", 1),
    "layers.N.feed_forward.w1.weight": Entry("model.layers.N.mlp.gate_proj.weight", "FE", 0),
    "layers.N.feed_forward.w2.weight": Entry("model.layers.N.mlp.down_proj.weight", "EF", 1),
    "layers.N.feed_forward.w3.weight": Entry("model.layers.N.mlp.up_proj.weight", "FE", 0),
    "layers.N.attention_norm.weight": Entry("model.layers.N.input_layernorm.weight", "E", None),
    "layers.N.ffn_norm.weight": Entry("model.layers.N.post_attention_layernorm.weight", "E", None),
    "norm.weight": Entry("model.norm.weight", "E", None),
    "output.weight": Entry("lm_head.weight", "VE", 0),
}
ROTATED = ("attention.wq.weight", "attention.wk.weight")  # rows in another order in the hf layout
_GGUF = {  # what llama.cpp calls the parts that it does not call as Meta does
    "tok_embeddings": "token_embd", "attention.wq": "attn_q", "attention.wk": "attn_k",
    "attention.wv": "attn_v", "attention.wo": "attn_output", "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up", "attention_norm": "attn_norm",
    "norm": "output_norm",
}  # fmt: skip
_KV = ("attention.wk.weight", "attention.wv.weight")


def _entry(name: str) -> Entry:
    return TABLE[re.sub(r"^layers\.\d+", "layers.N", name)]


def name_in(layout: str, name: str) -> str:
    """What a tensor of Meta's name is called in files of `layout`: "meta", "hf" or "gguf"."""
    number = name.split(".")[1]
    if layout == "hf":
        return _entry(name).hf.replace("N", number)
    if layout == "gguf":
        part = re.sub(r"^layers\.\d+\.|\.weight$", "", name)
        in_layer = f"blk.{number}." if name.startswith("layers.") else ""
        return f"{in_layer}{_GGUF.get(part, part)}.weight"
    return name


def whole_shapes(params: ModelArgs) -> dict[str, Size]:
    """Meta's names -> shapes of the whole tensors, layer by layer; a tied output is left out."""
    kv = params.kv_heads * params.head_dim
    sizes = {"V": params.vocab_size, "E": params.dim, "F": params.ffn_dim, "K": kv}
    shapes = {name: Size(sizes[x] for x in entry.shape) for name, entry in TABLE.items()}
    first, *block, norm, output = shapes
    whole = {first: shapes[first]}
    for i in range(params.n_layers):
        whole |= {name.replace("N", str(i)): shapes[name] for name in block}
    whole[norm] = shapes[norm]
    return whole if params.tied_output else whole | {output: shapes[output]}


def share(params: ModelArgs, name: str, shape: Size, rank: int, size: int) -> tuple[int, int, int]:
    """What one of `size` ranks holds of a tensor: a dimension, and from where to where in it. With
    more ranks than kv heads, each is on several: for 2 heads and 4 ranks, heads 0, 0, 1 and 1."""
    dim = _entry(name).dim
    if dim is None:
        return 0, 0, shape[0]
    if size > params.kv_heads and name.endswith(_KV):
        head = rank * params.kv_heads // size
        return dim, head * params.head_dim, (head + 1) * params.head_dim
    each = shape[dim] // size
    return dim, rank * each, (rank + 1) * each


def shard_shapes(params: ModelArgs, size: int) -> dict[str, Size]:
    """Meta's names -> the shapes that one of `size` ranks holds; ValueError if `size` cannot be."""
    params.check_ranks(size)
    shapes = whole_shapes(params)
    for name, shape in shapes.items():
        dim, start, end = share(params, name, shape, 0, size)
        shapes[name] = Size((*shape[:dim], end - start, *shape[dim + 1 :]))
    return shapes
