"""The tensors of a model: their names in all layouts, and the shape that each rank holds.

In: a `ModelArgs` and a `Placement`. Out: names, shapes and ranges of rows. No file is opened, and
no tensor or module is made: shapes follow from params.json and from the entries of the kinds of
half layers, which load, reshard and convert all use.
"""

from collections.abc import Iterable

from torch import Size

from llama.checkpoint.gguf.args import ROPE_DIVISORS
from llama.model.args import ModelArgs
from llama.model.kinds import KINDS, HalfKind, TensorEntry
from llama.model.plan import LayerPlan
from llama.model.shares import RankShare
from llama.ranks.placement import WHOLE, Placement
from llama.vision import tensors as vision


def _in_layer(kinds: Iterable[HalfKind | type[HalfKind]]) -> dict[str, TensorEntry]:
    """Return the tensors of a layer, by Meta's name within it: those of the halves, then norms."""
    entries = {
        f"{kind.name}.{name}": entry for kind in kinds for name, entry in kind.tensors.items()
    }
    return entries | {f"{kind.norm_name}.weight": kind.norm for kind in kinds}


_OF_LAYERS = _in_layer(KINDS)
_EMBEDDING = "tok_embeddings.weight"
_NORM = "norm.weight"
_LM_HEAD = "output.weight"
_OTHERS = {
    _EMBEDDING: TensorEntry("model.embed_tokens.weight", "token_embd.weight", "VE", 0),
    _NORM: TensorEntry("model.norm.weight", "output_norm.weight", "E", None),
    _LM_HEAD: TensorEntry("lm_head.weight", "output.weight", "VE", 0),
}


def _entry(name: str) -> TensorEntry:
    if name.startswith("layers."):
        return _OF_LAYERS[name.split(".", 2)[2]]
    return vision.entry_of(name) or _OTHERS[name]


def name_in(layout: str, name: str) -> str:
    """Return the name in files of `layout` of a tensor with Meta's name.

    Args:
        layout: "meta", "hf" or "gguf".
        name: Meta's name, or that of a tensor which GGUF alone has.
    """
    if layout not in ("hf", "gguf") or name == ROPE_DIVISORS or vision.entry_of(name):
        return name
    entry = _entry(name)
    prefix = ""
    if name.startswith("layers."):
        number = name.split(".")[1]
        prefix = f"model.layers.{number}." if layout == "hf" else f"blk.{number}."
    return prefix + (entry.hf if layout == "hf" else entry.gguf)


def is_rotated(name: str) -> bool:
    """Return whether the rows of a tensor have another order in Hugging Face's layout."""
    return _entry(name).is_rotated


def whole_shapes(params: ModelArgs) -> dict[str, Size]:
    """Return the shapes of the whole tensors, by Meta's name, in the order of the layers.

    A tied lm_head is left out.
    """
    plan = LayerPlan.of(params)
    entries = {_EMBEDDING: _OTHERS[_EMBEDDING]}
    for layer in plan.layers:
        for name, entry in _in_layer(layer.kinds).items():
            entries[f"layers.{layer.index}.{name}"] = entry
    entries[_NORM] = _OTHERS[_NORM]
    if not params.tied_output:
        entries[_LM_HEAD] = _OTHERS[_LM_HEAD]
    sizes = {letter: len(plan.share.rows(letter)) for letter in "VEFQK"}
    shapes = {
        name: Size(sizes[letter] for letter in entry.shape) for name, entry in entries.items()
    }
    for name, entry in vision.entries(params):
        whole = vision.VisionShare.of(params, WHOLE)
        shapes[name] = Size(len(whole.rows(letter)) for letter in entry.shape)
    return shapes


def share(params: ModelArgs, name: str, placement: Placement) -> tuple[int, range]:
    """Return the dimension of a tensor that ranks divide, and the rows or columns of one rank.

    A tensor that every rank holds whole is given as dimension 0 with all its rows.
    """
    entry = _entry(name)
    dim = entry.dim or 0
    if entry.dim is None:  # the letters of divided dimensions also name whole ones
        placement = WHOLE
    return dim, _share_of(params, name, placement).rows(entry.shape[dim])


def _share_of(params: ModelArgs, name: str, placement: Placement) -> RankShare | vision.VisionShare:
    """Return the part of each dimension of a tensor that a rank holds."""
    of = RankShare.of if vision.entry_of(name) is None else vision.VisionShare.of
    return of(params, placement)


def rank_shapes(params: ModelArgs, placement: Placement) -> dict[str, Size]:
    """Return the shapes that one rank holds, by Meta's name, in the order of the layers."""
    rank_share = RankShare.of(params, placement)
    shapes = {}
    for name, shape in whole_shapes(params).items():
        is_of_images = vision.entry_of(name) is not None
        if not (
            vision.is_held(params, rank_share, name) if is_of_images else _has(rank_share, name)
        ):
            continue
        entry = _entry(name)
        sizes = list(shape)
        if entry.dim is not None:
            own_share = _share_of(params, name, placement)
            sizes[entry.dim] = len(own_share.rows(entry.shape[entry.dim]))
        shapes[name] = Size(sizes)
    return shapes


def num_elements(shapes: dict[str, Size]) -> int:
    """Return the elements of all these tensors."""
    return sum(shape.numel() for shape in shapes.values())


def part_of(params: ModelArgs, placement: Placement) -> float:
    """Return the part of a model's elements that one rank holds; 1 for all of them."""
    if placement == WHOLE:
        return 1.0
    return num_elements(rank_shapes(params, placement)) / num_elements(whole_shapes(params))


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
