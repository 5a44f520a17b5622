"""The tensors of the parts that read images, and what one rank holds of each dimension.

In: the sizes of a model and a `Placement`. Out: the entry of each tensor by Meta's name, and ranges
of rows. The names are those of Meta's files without `text_model.`; `llama.checkpoint.vision` gives
the tensors of all layouts these names and shapes. No tensor is made here.

Letters of dimensions: E, F, Q and K as in `llama.model.shares`; d elements of a text head, w width
of the encoder, h its heads, f its feed-forward columns, p elements of a patch, n tokens of a tile,
t tiles, i elements that the projector takes, o those that it returns, s further ids, 1 one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from llama.model.args import ModelArgs, VisionArgs
from llama.model.kinds import FeedForwardKind, TensorEntry
from llama.model.shares import RankShare
from llama.ops.formats import N_BLOCK
from llama.ranks.placement import Placement

CROSS = "cross_attention_layers."
ENCODER = "vision_model."
IMAGE_ROWS = "learnable_embedding.weight"  # embeddings of further ids: the first is an image's
NUM_IMAGE_ROWS = 8
_CHANNELS = 3


def _entry(shape: str, dim: int | None = None) -> TensorEntry:
    return TensorEntry("", "", shape, dim)


# The tensors of a cross-attention layer.
_CROSS_LAYER = {
    "attention.wq.weight": _entry("QE", 0),
    "attention.wk.weight": _entry("KE", 0),
    "attention.wv.weight": _entry("KE", 0),
    "attention.wo.weight": _entry("EQ", 1),
    "attention.q_norm.weight": _entry("d"),
    "attention.k_norm.weight": _entry("d"),
    **{f"feed_forward.{name}": entry for name, entry in FeedForwardKind.tensors.items()},
    "attention_norm.weight": _entry("E"),
    "ffn_norm.weight": _entry("E"),
    "gate_attn": _entry("1"),
    "gate_ffwd": _entry("1"),
}
# The tensors of a block of the encoder; the gates are those of global blocks.
_BLOCK = {
    "attn.wq.weight": _entry("hw", 0),
    "attn.wk.weight": _entry("hw", 0),
    "attn.wv.weight": _entry("hw", 0),
    "attn.wo.weight": _entry("wh", 1),
    "mlp.c_fc.weight": _entry("fw", 0),
    "mlp.c_fc.bias": _entry("f", 0),
    "mlp.c_proj.weight": _entry("wf", 1),
    "mlp.c_proj.bias": _entry("w"),
    "ln_1.weight": _entry("w"),
    "ln_1.bias": _entry("w"),
    "ln_2.weight": _entry("w"),
    "ln_2.bias": _entry("w"),
}
_GATES = {"gate_attn": _entry("1"), "gate_ffn": _entry("1")}
# The other tensors of the encoder, and the projector.
_ENCODER = {
    "vision_encoder.conv1._linear.weight": _entry("wp", 0),
    "vision_encoder.class_embedding": _entry("w"),
    "vision_encoder.positional_embedding": _entry("nw"),
    "vision_encoder.gated_positional_embedding": _entry("ttnw"),
    "vision_encoder.gated_positional_embedding_gate": _entry("1"),
    "vision_encoder.pre_tile_pos_embed.embedding": _entry("tt1w"),
    "vision_encoder.pre_tile_pos_embed.gate": _entry("1"),
    "vision_encoder.post_tile_pos_embed.embedding": _entry("tt1w"),
    "vision_encoder.post_tile_pos_embed.gate": _entry("1"),
    "vision_encoder.ln_pre.weight": _entry("w"),
    "vision_encoder.ln_pre.bias": _entry("w"),
    "vision_encoder.ln_post.weight": _entry("w"),
    "vision_encoder.ln_post.bias": _entry("w"),
    "vision_projection.weight": _entry("oi", 0),
    "vision_projection.bias": _entry("o", 0),
}


def entries(params: ModelArgs) -> Iterator[tuple[str, TensorEntry]]:
    """Yield Meta's name and the entry of each tensor of the parts that read images."""
    vision = params.vision
    if vision is None:
        return
    yield IMAGE_ROWS, _entry("sE")
    for layer in range(vision.num_cross_layers):
        for name, entry in _CROSS_LAYER.items():
            yield f"{CROSS}{layer}.{name}", entry
    for name, entry in _ENCODER.items():
        yield f"{ENCODER}{name}", entry
    blocks = {"transformer": (vision.n_layers, _BLOCK)}
    blocks["global_transformer"] = (vision.n_global_layers, _BLOCK | _GATES)
    for transformer, (count, names) in blocks.items():
        for block in range(count):
            for name, entry in names.items():
                yield f"{ENCODER}vision_encoder.{transformer}.resblocks.{block}.{name}", entry


def entry_of(name: str) -> TensorEntry | None:
    """Return the entry of a tensor by Meta's name; None for a tensor of the text model."""
    if name == IMAGE_ROWS:
        return _entry("sE")
    if name.startswith(CROSS):
        return _CROSS_LAYER[name.split(".", 2)[2]]
    if not name.startswith(ENCODER):
        return None
    rest = name.removeprefix(ENCODER)
    if rest in _ENCODER:
        return _ENCODER[rest]
    within = rest.split(".", 4)[4]
    return (_BLOCK | _GATES)[within]


def is_held(params: ModelArgs, share: RankShare, name: str) -> bool:
    """Return whether a rank holds a tensor of these parts, or a share of it.

    Every pipeline stage has the encoder, and the cross-attention layers among its layers.
    """
    if name == IMAGE_ROWS:
        return share.has_embedding
    if not name.startswith(CROSS):
        return True
    vision = params.vision
    assert vision is not None
    before = vision.cross_layers(params.n_layers)[int(name.split(".")[1])]
    return before in share.layers


@dataclass(frozen=True)
class VisionShare:
    """The part of every dimension of these parts that one rank holds.

    Attributes:
        args: The sizes.
        text: The part of the text model's dimensions.
        heads: The heads of the encoder.
        width: The elements of a token that the rank computes of the patches.
        ffn: The feed-forward columns of the encoder.
        out: The elements that it computes of the projector's results.
    """

    args: VisionArgs
    text: RankShare
    heads: range
    width: range
    ffn: range
    out: range

    @classmethod
    def of(cls, params: ModelArgs, placement: Placement) -> "VisionShare":
        """Compute what a rank with this placement holds."""
        vision = params.vision
        assert vision is not None, "the model reads text alone"
        return cls(
            args=vision,
            text=RankShare.of(params, placement),
            heads=placement.span(vision.n_heads),
            width=placement.blocks(vision.width, N_BLOCK),
            ffn=placement.blocks(vision.ffn_dim, N_BLOCK),
            out=placement.blocks(params.dim, N_BLOCK),
        )

    def rows(self, dimension: str) -> range:
        """Return the rows or columns of a dimension by its letter, see the head of this file."""
        args = self.args
        if dimension in "EFQK":
            return self.text.rows(dimension)
        if dimension == "h":
            heads = self.heads
            return range(heads.start * args.head_dim, heads.stop * args.head_dim)
        return {
            "d": range(self.text.head_dim),
            "w": self.width,
            "f": self.ffn,
            "p": range(_CHANNELS * args.patch_size**2),
            "n": range(args.tokens_per_tile),
            "t": range(args.max_tiles),
            "i": range(args.features_dim),
            "o": self.out,
            "s": range(NUM_IMAGE_ROWS),
            "1": range(1),
        }[dimension]
