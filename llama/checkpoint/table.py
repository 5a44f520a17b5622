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
    """One tensor of the table.

    Attributes:
        hf: Hugging Face's name.
        shape: A letter for each dimension: V vocabulary, E model dim, F feed-forward, Q and K query
            and key-value heads times head dim.
        dim: The dimension that the ranks of a group divide; None if each holds the whole.
    """

    hf: str
    shape: str
    dim: int | None


# By Meta's name; N is the index of a layer.
TABLE = {
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
# The rows of these have another order in Hugging Face's layout: see `huggingface.copy_rows`.
ROTATED = ("attention.wq.weight", "attention.wk.weight")
# llama.cpp's names of the parts that have another name than Meta's.
_GGUF = {
    "tok_embeddings": "token_embd",
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "attention_norm": "attn_norm",
    "norm": "output_norm",
}


def _entry(name: str) -> Entry:
    return TABLE[re.sub(r"^layers\.\d+", "layers.N", name)]


def name_in(layout: str, name: str) -> str:
    """Return the name in files of `layout` of a tensor with Meta's name.

    Args:
        layout: "meta", "hf" or "gguf".
        name: Meta's name.
    """
    number = name.split(".")[1]
    if layout == "hf":
        return _entry(name).hf.replace("N", number)
    if layout == "gguf":
        part = re.sub(r"^layers\.\d+\.|\.weight$", "", name)
        prefix = f"blk.{number}." if name.startswith("layers.") else ""
        return f"{prefix}{_GGUF.get(part, part)}.weight"
    return name


def whole_shapes(params: ModelArgs) -> dict[str, Size]:
    """Return the shapes of the whole tensors, by Meta's name, in the order of the layers.

    A tied lm_head is left out.
    """
    whole_model = RankShare.of(params, WHOLE)
    shapes = {}
    for name, entry in TABLE.items():
        shapes[name] = Size(len(whole_model.rows(letter)) for letter in entry.shape)
    embedding, *layer, norm, lm_head = shapes
    whole = {embedding: shapes[embedding]}
    for i in range(params.n_layers):
        for name in layer:
            whole[name.replace("N", str(i))] = shapes[name]
    whole[norm] = shapes[norm]
    if not params.tied_output:
        whole[lm_head] = shapes[lm_head]
    return whole


def share(params: ModelArgs, name: str, placement: Placement) -> tuple[int, range]:
    """Return the dimension of a tensor that ranks divide, and the rows or columns of one rank.

    A tensor that every rank holds whole is given as dimension 0 with all its rows.
    """
    entry = _entry(name)
    dim = entry.dim or 0
    return dim, RankShare.of(params, placement).rows(entry.shape[dim])


def rank_shapes(params: ModelArgs, placement: Placement) -> dict[str, Size]:
    """Return the shapes that one rank holds, by Meta's name, in the order of the layers."""
    rank_share = RankShare.of(params, placement)
    shapes = {}
    for name, shape in whole_shapes(params).items():
        if not _has(rank_share, name):
            continue
        entry = _entry(name)
        sizes = list(shape)
        if entry.dim is not None:
            sizes[entry.dim] = len(rank_share.rows(entry.shape[entry.dim]))
        shapes[name] = Size(sizes)
    return shapes


def part_of(params: ModelArgs, placement: Placement) -> float:
    """Return the part of a model's elements that one rank holds; 1 for all of them."""
    if placement == WHOLE:
        return 1.0
    own, whole = (
        sum(shape.numel() for shape in shapes.values())
        for shapes in (rank_shapes(params, placement), whole_shapes(params))
    )
    return own / whole


def _has(rank_share: RankShare, name: str) -> bool:
    """Return whether a rank's pipeline stage holds a tensor. Every stage holds the last norm."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) in rank_share.layers
    if name == "tok_embeddings.weight":
        return rank_share.has_embedding
    return rank_share.has_lm_head if name == "output.weight" else True


def shard_shapes(params: ModelArgs, count: int) -> dict[str, Size]:
    """Return the shapes in each of `count` shards of Meta's layout, by Meta's name.

    Raises:
        ValueError: The model cannot be divided into so many shards.
    """
    params.check_shards(count)
    return rank_shapes(params, Placement(size=count))


def as_slice(indices: range) -> slice:
    """Return the slice of a tensor's dimension that consecutive indices are."""
    return slice(indices.start, indices.stop)
