"""The tensors of a model: their names in all layouts, and the shape that each rank holds.

In: a `ModelArgs` and a `Placement`. Out: names, shapes and ranges of rows. No file is opened, and
no tensor or module is made: shapes follow from params.json and from one table, which load, reshard
and convert all use.
"""

import re
from typing import NamedTuple

from torch import Size

from llama.model.args import ModelArgs
from llama.model.shares import RankShare
from llama.ranks.placement import WHOLE, Placement


class Entry(NamedTuple):
    hf: str  # Hugging Face's name
    shape: str  # V vocabulary, E model dim, F ffn, Q and K query and kv heads x head dim
    dim: int | None  # that the ranks of a group divide; None: each holds the whole


TABLE = {  # by Meta's name; N is the number of a layer
    "tok_embeddings.weight": Entry("model.embed_tokens.weight", "VE", 0),
    "layers.N.attention.wq.weight": Entry("model.layers.N.self_attn.q_proj.weight", "QE", 0),
    "layers.N.attention.wk.weight": Entry("model.layers.N.self_attn.k_proj.weight", "KE", 0),
    "layers.N.attention.wv.weight": Entry("model.layers.N.self_attn.v_proj.weight", "KE", 0),
    "layers.N.attention.wo.weight": Entry("model.layers.N.self_attn.o_proj.weight", "EQ", 1),
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
    whole_model = RankShare.of(params, WHOLE)
    sizes = {letter: len(whole_model.rows(letter)) for letter in "VEFQK"}
    shapes = {name: Size(sizes[x] for x in entry.shape) for name, entry in TABLE.items()}
    first, *block, norm, output = shapes
    whole = {first: shapes[first]}
    for i in range(params.n_layers):
        whole |= {name.replace("N", str(i)): shapes[name] for name in block}
    whole[norm] = shapes[norm]
    return whole if params.tied_output else whole | {output: shapes[output]}


def share(params: ModelArgs, name: str, placement: Placement) -> tuple[int, range]:
    """Return the dimension of a tensor that ranks divide, and the rows or columns of one rank.

    A tensor that every rank holds whole is given as dimension 0 with all its rows.
    """
    entry = _entry(name)
    dim = entry.dim or 0
    return dim, RankShare.of(params, placement).rows(entry.shape[dim])


def rank_shapes(params: ModelArgs, placement: Placement) -> dict[str, Size]:
    """Return the shapes that one rank holds, by Meta's name, in the order of the layers."""
    held = RankShare.of(params, placement)
    shapes = {}
    for name, shape in whole_shapes(params).items():
        if not _is_held(name, held):
            continue
        dim, rows = share(params, name, placement)
        shapes[name] = Size((*shape[:dim], len(rows), *shape[dim + 1 :]))
    return shapes


def _is_held(name: str, held: RankShare) -> bool:
    """Whether a rank's pipeline stage holds a tensor. Every stage holds the last norm."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) in held.layers
    if name == "tok_embeddings.weight":
        return held.has_embedding
    return held.has_lm_head if name == "output.weight" else True


def shard_shapes(params: ModelArgs, count: int) -> dict[str, Size]:
    """Return the shapes in each of `count` shards of Meta's layout, by Meta's name.

    Raises:
        ValueError: The model cannot be divided into so many shards.
    """
    params.check_ranks(count)
    return rank_shapes(params, Placement(size=count))
