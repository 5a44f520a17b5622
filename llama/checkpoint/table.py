"""The tensors of a model: their names in both layouts, and the shape that each rank holds.

In: a `ModelArgs`. Out: names, shapes and ranges of rows. No file is opened, and no tensor or module
is made: shapes follow from params.json and from one table.

Shapes: V vocabulary, E model dim, F ffn, K kv heads, D head dim.
"""

from torch import Size

from llama.model.args import ModelArgs

# Meta's name, without "layers.N." -> Hugging Face's, and the dimension that the ranks of a group
# divide among them (None: each holds the whole). Load, reshard and convert all use this table.
TABLE: dict[str, tuple[str, int | None]] = {
    "tok_embeddings.weight": ("model.embed_tokens.weight", 0),
    "attention.wq.weight": ("self_attn.q_proj.weight", 0),
    "attention.wk.weight": ("self_attn.k_proj.weight", 0),
    "attention.wv.weight": ("self_attn.v_proj.weight", 0),
    "attention.wo.weight": ("self_attn.o_proj.weight", 1),
    "feed_forward.w1.weight": ("mlp.gate_proj.weight", 0),
    "feed_forward.w2.weight": ("mlp.down_proj.weight", 1),
    "feed_forward.w3.weight": ("mlp.up_proj.weight", 0),
    "attention_norm.weight": ("input_layernorm.weight", None),
    "ffn_norm.weight": ("post_attention_layernorm.weight", None),
    "norm.weight": ("model.norm.weight", None),
    "output.weight": ("lm_head.weight", 0),
}
ROTATED = ("attention.wq.weight", "attention.wk.weight")  # rows in another order in the hf layout
_KV = ("attention.wk.weight", "attention.wv.weight")


def name_in(layout: str, name: str) -> str:
    """What a tensor of Meta's name is called in files of `layout`, "meta" or "hf"."""
    if layout == "meta":
        return name
    if name.startswith("layers."):
        _, number, rest = name.split(".", 2)
        return f"model.layers.{number}.{TABLE[rest][0]}"
    return TABLE[name][0]


def sharded_dim(name: str) -> int | None:
    """The dimension of a tensor, by Meta's name, that ranks divide among them."""
    return TABLE[name.split(".", 2)[2] if name.startswith("layers.") else name][1]


def whole_shapes(params: ModelArgs) -> dict[str, Size]:
    """Meta's names -> shapes of the whole tensors; a tied output is left out."""
    dim, ffn, vocab = params.dim, params.ffn_dim, params.vocab_size
    kv = params.kv_heads * params.head_dim
    block = {
        "attention.wq.weight": Size((dim, dim)),
        "attention.wk.weight": Size((kv, dim)),  # (K * D, E)
        "attention.wv.weight": Size((kv, dim)),
        "attention.wo.weight": Size((dim, dim)),
        "feed_forward.w1.weight": Size((ffn, dim)),  # (F, E)
        "feed_forward.w2.weight": Size((dim, ffn)),
        "feed_forward.w3.weight": Size((ffn, dim)),
        "attention_norm.weight": Size((dim,)),
        "ffn_norm.weight": Size((dim,)),
    }
    shapes = {"tok_embeddings.weight": Size((vocab, dim))}  # (V, E)
    for i in range(params.n_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
    shapes["norm.weight"] = Size((dim,))
    if not params.tied_output:
        shapes["output.weight"] = Size((vocab, dim))
    return shapes


def shard_range(params: ModelArgs, name: str, length: int, rank: int, size: int) -> tuple[int, int]:
    """Which rows (or columns), from and to, one of `size` ranks holds of the `length` in all.

    With more ranks than kv heads, each head is on several: for 2 heads and 4 ranks, heads 0, 0, 1
    and 1.
    """
    if size > params.kv_heads and name.endswith(_KV):
        head = rank * params.kv_heads // size
        return head * params.head_dim, (head + 1) * params.head_dim
    each = length // size
    return rank * each, (rank + 1) * each


def shard_shapes(params: ModelArgs, size: int) -> dict[str, Size]:
    """Meta's names -> the shapes that one of `size` ranks holds; ValueError if `size` cannot be."""
    params.check_ranks(size)
    shapes = whole_shapes(params)
    for name, shape in shapes.items():
        dim = sharded_dim(name)
        if dim is not None:
            start, end = shard_range(params, name, shape[dim], 0, size)
            shapes[name] = Size((*shape[:dim], end - start, *shape[dim + 1 :]))
    return shapes
