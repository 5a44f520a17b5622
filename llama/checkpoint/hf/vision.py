"""The encoder of a vision checkpoint in Hugging Face's layout, under Meta's names and shapes.

In: vision_config of config.json, and the tensors of a file. Out: the sizes, and the name and shape
of each tensor in Meta's layout; and the reverse, what Hugging Face's files have of a vision model.
The tables of places of tiles have a row for each grid of tiles in
Hugging Face's layout, and in Meta's an entry for each place. No file is opened here.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llama.checkpoint.table import name_in
from llama.common.checks import brief
from llama.model.args import ModelArgs, VisionArgs
from llama.vision.encoder import DEVIATION, MEAN
from llama.vision.tensors import CROSS, ENCODER

# The names of sizes in vision_config.
_SIZES = {
    "chunk_size": "image_size",
    "max_tiles": "max_num_tiles",
    "patch_size": "patch_size",
    "width": "hidden_size",
    "n_heads": "attention_heads",
    "ffn_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_global_layers": "num_global_layers",
    "features": "intermediate_layers_indices",
}
# What the encoder does here; other values would be computed wrongly.
_FIXED = {"hidden_act": "gelu", "norm_eps": 1e-5, "num_channels": 3}
_CHUNK_SIZE = 448  # the value of image_size in transformers where a file has none
_BILINEAR = 2  # Pillow's number of the filter
# The keys of the text model's config.json that are those of the whole model.
_OF_THE_WHOLE = ("architectures", "torch_dtype")
# The tables of places of tiles, by the ends of Meta's names.
_TABLES = ("gated_positional_embedding", "tile_pos_embed.embedding")
# Parts of names in Hugging Face's layout, and in Meta's.
_PARTS = {
    "vision_model.": "vision_encoder.",
    "multi_modal_projector.": "vision_projection.",
    "patch_embedding.weight": "conv1._linear.weight",
    "gated_positional_embedding.embedding": "positional_embedding",
    "gated_positional_embedding.gate": "gated_positional_embedding_gate",
    "gated_positional_embedding.tile_embedding.weight": "gated_positional_embedding",
    "_tile_positional_embedding.embedding.weight": "_tile_pos_embed.embedding",
    "_tile_positional_embedding.gate": "_tile_pos_embed.gate",
    "layernorm_pre.": "ln_pre.",
    "layernorm_post.": "ln_post.",
    "transformer.layers.": "transformer.resblocks.",
    "self_attn.q_proj.": "attn.wq.",
    "self_attn.k_proj.": "attn.wk.",
    "self_attn.v_proj.": "attn.wv.",
    "self_attn.o_proj.": "attn.wo.",
    "mlp.fc1.": "mlp.c_fc.",
    "mlp.fc2.": "mlp.c_proj.",
    "input_layernorm.": "ln_1.",
    "post_attention_layernorm.": "ln_2.",
}
_CROSS_PARTS = {
    "cross_attn.q_proj.": "attention.wq.",
    "cross_attn.k_proj.": "attention.wk.",
    "cross_attn.v_proj.": "attention.wv.",
    "cross_attn.o_proj.": "attention.wo.",
    "cross_attn.q_norm.": "attention.q_norm.",
    "cross_attn.k_norm.": "attention.k_norm.",
    "cross_attn_attn_gate": "gate_attn",
    "cross_attn_mlp_gate": "gate_ffwd",
    "input_layernorm.": "attention_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.down_proj.": "feed_forward.w2.",
    "mlp.up_proj.": "feed_forward.w3.",
}


_TEXT_PREFIX = "language_model."
_NEWER_PREFIXES = {
    "language_model.model.": "model.language_model.",
    "language_model.": "",
    "vision_model.": "model.vision_model.",
    "multi_modal_projector": "model.multi_modal_projector",
}
_OF_CROSS = {metas: name for name, metas in _CROSS_PARTS.items()}
_OF_ENCODER = {metas: name for name, metas in _PARTS.items()}


def _replacer(parts: Mapping[str, str]) -> re.Pattern[str]:
    longest_first = sorted(parts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


_PATTERN = _replacer(_PARTS)
_CROSS_PATTERN = _replacer(_CROSS_PARTS)
_ENCODER_BACK = _replacer(_OF_ENCODER)
_CROSS_BACK = _replacer(_OF_CROSS)


def args_of(config: Mapping[str, Any], num_cross_layers: int) -> VisionArgs:
    """Return the sizes that a vision_config gives, or those of Meta's models.

    Raises:
        ValueError: The encoder is another one than that of Llama 3.2 Vision.
    """
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            raise ValueError(f"vision_config: {key} is {brief(config[key])}, and must be {value}")
    given = {name: config[key] for name, key in _SIZES.items() if key in config}
    given.setdefault("chunk_size", _CHUNK_SIZE)
    if "features" in given:
        given["features"] = tuple(given["features"])
    args = VisionArgs(num_cross_layers, **given)
    grids = config.get("supported_aspect_ratios")
    if grids is not None and [tuple(grid) for grid in grids] != grids_of(args.max_tiles):
        raise ValueError(
            f"vision_config: supported_aspect_ratios is {brief(grids)}, and must have all grids of "
            f"up to {args.max_tiles} tiles"
        )
    return args


def grids_of(max_tiles: int) -> list[tuple[int, int]]:
    """Return rows and columns of each grid of tiles, in the order of Hugging Face's numbers."""
    sides = range(1, max_tiles + 1)
    return [(rows, columns) for rows in sides for columns in sides if rows * columns <= max_tiles]


def cross_name(name: str) -> str:
    """Return Meta's name within a cross-attention layer of a tensor."""
    return _CROSS_PATTERN.sub(lambda match: _CROSS_PARTS[match[0]], name)


def metas_tensor(name: str, data: Tensor, config: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Return the name and the elements of a tensor of the encoder as Meta's layout has them.

    Args:
        name: Its name, without the prefix `model.`.
        data: Its elements.
        config: The vision_config.

    Raises:
        ValueError: A table has other entries for a place in one grid of tiles than in another.
    """
    metas_name = ENCODER + _PATTERN.sub(lambda match: _PARTS[match[0]], name)
    if metas_name.endswith("conv1._linear.weight") and data.dim() == 4:
        return metas_name, data.flatten(1)
    if metas_name.endswith(_TABLES):
        args = args_of(config, 1)
        return metas_name, _by_place(name, data, args)
    return metas_name, data


def file_name(name: str, params: ModelArgs) -> str:
    """Return the name in Hugging Face's files of a tensor of a vision model, by Meta's name.

    All layers have one row of numbers there: the text model's, and before some of them one of
    cross-attention. The names are those of the published files, which all versions of transformers
    read.
    """
    vision = params.vision
    assert vision is not None, "the model reads text alone"
    if name.startswith(ENCODER):
        return _ENCODER_BACK.sub(lambda match: _OF_ENCODER[match[0]], name.removeprefix(ENCODER))
    before = vision.cross_layers(params.n_layers)
    if name.startswith(CROSS):
        index, within = name.removeprefix(CROSS).split(".", 1)
        number = before[int(index)] + int(index)
        within = _CROSS_BACK.sub(lambda match: _OF_CROSS[match[0]], within)
        return f"{_TEXT_PREFIX}model.layers.{number}.{within}"
    file_name = name_in("hf", name)
    if name.startswith("layers."):
        layer = int(name.split(".")[1])
        number = layer + sum(other <= layer for other in before)
        file_name = file_name.replace(f"layers.{layer}.", f"layers.{number}.", 1)
    return _TEXT_PREFIX + file_name


def newer_name(name: str) -> str:
    """Return the name that transformers gives in memory, since 4.52, to what a file's name says."""
    for old, new in _NEWER_PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def file_tensor(name: str, tensor: Tensor, args: VisionArgs) -> Tensor:
    """Return a tensor of a vision model as Hugging Face's files have it.

    Args:
        name: Meta's name.
        tensor: Its elements in Meta's layout.
        args: The sizes.
    """
    if name.endswith("conv1._linear.weight"):
        side = args.patch_size
        patches: Tensor = tensor.unflatten(1, (-1, side, side))
        return patches
    return _by_grid(tensor, args) if name.endswith(_TABLES) else tensor


def config_of(text: dict[str, Any], params: ModelArgs) -> dict[str, Any]:
    """Return the config.json of a vision model.

    Args:
        text: That of its text model, as a Llama.
        params: The sizes of the whole model.
    """
    args = params.vision
    assert args is not None, "the model reads text alone"
    layers = args.cross_layers(params.n_layers)
    text_config = {key: value for key, value in text.items() if key not in _OF_THE_WHOLE}
    text_config |= {
        "model_type": "mllama_text_model",
        "num_hidden_layers": params.n_layers + args.num_cross_layers,
        "cross_attention_layers": [before + number for number, before in enumerate(layers)],
    }
    vision_config = {key: getattr(args, name) for name, key in _SIZES.items()}
    vision_config |= _FIXED | {
        "model_type": "mllama_vision_model",
        "vision_output_dim": args.features_dim,
        "supported_aspect_ratios": grids_of(args.max_tiles),
    }
    return {key: text[key] for key in _OF_THE_WHOLE if key in text} | {
        "architectures": ["MllamaForConditionalGeneration"],
        "model_type": "mllama",
        "image_token_index": params.vocab_size,
        "text_config": text_config,
        "vision_config": vision_config,
    }


def processor_config(args: VisionArgs) -> dict[str, Any]:
    """Return the preprocessor_config.json with which transformers reads images for the model."""
    return {
        "image_processor_type": "MllamaImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_pad": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": MEAN,
        "image_std": DEVIATION,
        "max_image_tiles": args.max_tiles,
        "resample": _BILINEAR,
        "size": {"height": args.chunk_size, "width": args.chunk_size},
    }


def _by_place(name: str, rows: Tensor, args: VisionArgs) -> Tensor:
    """Return a table with a row for each grid as one with an entry for each place.

    Args:
        name: The name that errors have.
        rows: (grids + 1, t N W): the tiles of each grid, one after the other; the first is unused.
        args: The sizes.

    Returns:
        (t, t, N, W). Places that no grid has are zeros.
    """
    tiles: Tensor = rows.unflatten(1, (args.max_tiles, -1, args.width))
    places: Tensor = tiles.new_zeros(args.max_tiles, *tiles.shape[1:])
    is_known = torch.zeros(args.max_tiles, args.max_tiles, dtype=torch.bool)
    for number, (height, width) in enumerate(grids_of(args.max_tiles), 1):
        grid = tiles[number, : height * width].unflatten(0, (height, width))
        for row in range(height):
            for column in range(width):
                if is_known[row, column] and not places[row, column].equal(grid[row, column]):
                    raise ValueError(
                        f"{name}: the place ({row}, {column}) has other elements in a grid of "
                        f"{height} x {width} tiles than in others: a tuned encoder of this kind "
                        "cannot be run"
                    )
                places[row, column] = grid[row, column]
                is_known[row, column] = True
    return places


def _by_grid(places: Tensor, args: VisionArgs) -> Tensor:
    """Return a table with an entry for each place as one with a row for each grid of tiles.

    Args:
        places: (t, t, N, W).
        args: The sizes.

    Returns:
        (grids + 1, t N W). The first row, which stands for no image, and missing tiles are zeros.
    """
    grids = grids_of(args.max_tiles)
    tiles = places.new_zeros(len(grids) + 1, args.max_tiles, *places.shape[2:])
    for number, (height, width) in enumerate(grids, 1):
        tiles[number, : height * width] = places[:height, :width].flatten(0, 1)
    return tiles.flatten(1)
