"""The text model in a vision checkpoint, such as Llama 3.2 11B Vision and 90B Vision, and the rest.

In: the content of params.json or config.json, and the tensors of files. Out: the same of the text
model, and with `reads_images` of the whole model, under Meta's names; and the reverse, what Meta's
files have of a whole model. The cross-attention layers
attend to images only. Without an image Meta's code leaves them out, so that the other layers alone
are a Llama. Names and numbers follow Meta's llama_models/llama3/multimodal and the conversion of
transformers; `llama.checkpoint.hf.vision` gives the encoder of Hugging Face's layout Meta's names
and shapes. No file is opened here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from llama.checkpoint.files import MappedTensor
from llama.checkpoint.hf import vision as hf
from llama.checkpoint.table import as_slice
from llama.common.checks import brief, errors_in, whole_number
from llama.model.args import VisionArgs
from llama.ranks.placement import Placement
from llama.vision.tensors import CROSS, ENCODER, IMAGE_ROWS, NUM_IMAGE_ROWS

_MAX_LAYERS = 2**13
_NUM_CROSS_LAYERS = "vision_num_cross_attention_layers"
# Meta's keys of sizes, and their names in `VisionArgs`.
_META_SIZES = {
    _NUM_CROSS_LAYERS: "num_cross_layers",
    "vision_chunk_size": "chunk_size",
    "vision_max_num_chunks": "max_tiles",
}
# The key of sizes that are constants in Meta's code, by their names in `VisionArgs`.
_SIZES = "vision_sizes"
_META_KEYS = (*_META_SIZES, _SIZES, "vision_model")
_META_PREFIX = "text_model."
_META_LEFT_OUT = (ENCODER, CROSS, IMAGE_ROWS)  # without the prefix
# Hugging Face's prefixes of the text model, and what follows in the names of a Llama. Those that
# begin with "model." are transformers' own since version 4.52.
_HF_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_HF_LEFT_OUT = (
    "vision_model.",
    "model.vision_model.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
)
_HF_ENCODER = re.compile(r"(?:model\.)?((?:vision_model|multi_modal_projector)\..*)")
_HF_EMBEDDING = "model.embed_tokens.weight"
# The model type of a vision model, and that of its text model if it was saved alone.
_MODEL_TYPES = ("mllama", "mllama_text_model")


@dataclass(frozen=True)
class VisionParts:
    """The parts of a vision checkpoint besides its text model.

    Attributes:
        num_cross_layers: The number of cross-attention layers.
        layers: In Hugging Face's layout, which numbers all layers together: the number in the text
            model of each of its layers, by the number in the files. Empty in Meta's layout.
        vocab_size: In Hugging Face's layout, the rows of the embedding that are tokens of text.
        settings: What the file says of the encoder: vision_config, or the keys of params.json.
        reads_images: Whether the other parts are loaded, too.
    """

    num_cross_layers: int
    layers: Mapping[int, int] = field(default_factory=dict)
    vocab_size: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    reads_images: bool = False

    def args(self, source: str) -> VisionArgs:
        """Return the sizes of the parts that read images.

        Args:
            source: What errors name.

        Raises:
            ValueError: They are not described as those of a vision model, or do not fit.
        """
        with errors_in(source):
            if not self.layers:
                return _meta_args(self.settings, self.num_cross_layers)
            args = hf.args_of(self.settings, self.num_cross_layers)
            expected = args.cross_layers(len(self.layers))
            before = tuple(self.layers[number + 1] for number in self._cross_numbers)
            if before != expected:
                raise ValueError(
                    f"the cross-attention layers run before layers {before} of text, and those of "
                    f"Llama 3.2 before {expected}"
                )
        return args

    @property
    def _cross_numbers(self) -> list[int]:
        """Return the numbers of the cross-attention layers in Hugging Face's layout."""
        count = len(self.layers) + self.num_cross_layers
        return [number for number in range(count) if number not in self.layers]

    def describe(self) -> str:
        """Return which part of the checkpoint is loaded, for reports."""
        if self.reads_images:
            return (
                f"a vision model with {self.num_cross_layers} cross-attention layers: it reads "
                "images"
            )
        return (
            f"the text model of a vision checkpoint, without its {self.num_cross_layers} "
            "cross-attention layers and its image encoder: images are refused"
        )

    def tensors(self, shards: list[dict[str, MappedTensor]]) -> list[dict[str, MappedTensor]]:
        """Return the tensors of the parts that are loaded, under their names here.

        Those of the text model have the names of a Llama in this layout, and the others Meta's.

        Args:
            shards: The tensors of each file.
        """
        if self.layers:
            return [self._hf_tensors(shard) for shard in shards]
        loaded = []
        image_rows = _joined_rows([shard.get(_META_PREFIX + IMAGE_ROWS) for shard in shards])
        for shard in shards:
            tensors = {name.removeprefix(_META_PREFIX): x for name, x in shard.items()}
            if not self.reads_images:
                names = [name for name in tensors if not name.startswith(_META_LEFT_OUT)]
                tensors = {name: tensors[name] for name in names}
            elif image_rows is not None:
                tensors[IMAGE_ROWS] = image_rows
            loaded.append(tensors)
        return loaded

    def _hf_tensors(self, tensors: dict[str, MappedTensor]) -> dict[str, MappedTensor]:
        loaded: dict[str, MappedTensor] = {}
        for name, tensor in tensors.items():
            text_name = self._hf_name(name)
            encoder_name = _HF_ENCODER.fullmatch(name)
            if text_name is None and encoder_name and self.reads_images:
                text_name, data = hf.metas_tensor(encoder_name[1], tensor.data, self.settings)
                is_same = data.data_ptr() == tensor.data.data_ptr()
                tensor = tensor._replace(data=data, offset=tensor.offset if is_same else None)
            if text_name is None:
                continue
            rows = tensor.data
            num_rows = self.vocab_size + NUM_IMAGE_ROWS
            if text_name == _HF_EMBEDDING and rows.dim() == 2 and len(rows) == num_rows:
                if self.reads_images:
                    image_rows = rows[self.vocab_size :]
                    loaded[IMAGE_ROWS] = tensor._replace(data=image_rows, offset=None)
                tensor = tensor._replace(data=rows[: self.vocab_size])
            loaded[text_name] = tensor
        return loaded

    def _hf_name(self, name: str) -> str | None:
        """Return the name in a Llama of a tensor of Hugging Face's layout; None: it has none."""
        if name.startswith(_HF_LEFT_OUT):
            return None
        for prefix, text_prefix in _HF_PREFIXES.items():
            if name.startswith(prefix):
                name = text_prefix + name.removeprefix(prefix)
                break
        match = re.match(r"model\.layers\.(\d{1,9})\.", name)
        if match is None:
            return name
        number = int(match[1])
        if number >= len(self.layers) + self.num_cross_layers:
            return name  # one layer too many, which the check of all names refuses
        if number not in self.layers:
            index = self._cross_numbers.index(number)
            within = hf.cross_name(name[match.end() :])
            return f"{CROSS}{index}.{within}" if self.reads_images else None
        return f"model.layers.{self.layers[number]}.{name[match.end() :]}"


def _joined_rows(parts: list[MappedTensor | None]) -> MappedTensor | None:
    """Return the embeddings of further ids, which Meta's shards divide where they can, as one.

    Args:
        parts: Those of each shard, whole in each or divided among them; None where one has none.
    """
    first = parts[0]
    if first is None or len(first.data) == NUM_IMAGE_ROWS:
        return first
    rows = torch.cat([part.data for part in parts if part is not None])
    return first._replace(data=rows, offset=None)


def _meta_args(params: Mapping[str, Any], num_cross_layers: int) -> VisionArgs:
    """Return the sizes of the encoder that params.json gives, or those of Meta's models."""
    given: dict[str, Any] = {}
    for key, name in _META_SIZES.items():
        if key != _NUM_CROSS_LAYERS and params.get(key, -1) != -1:
            given[name] = params[key]
    sizes = params.get(_SIZES, {})
    known = {each.name for each in fields(VisionArgs)}
    if not isinstance(sizes, dict) or not sizes.keys() <= known:
        raise ValueError(f"{_SIZES}={brief(sizes)} must have some of {', '.join(sorted(known))}")
    given |= sizes
    if "features" in given:
        given["features"] = tuple(given["features"])
    return VisionArgs(num_cross_layers, **given)


def file_name(name: str) -> str:
    """Return the name in Meta's files of a tensor of a vision model."""
    return name if name.startswith(ENCODER) else f"{_META_PREFIX}{name}"


def shard_of(name: str, tensor: Tensor, placement: Placement) -> Tensor:
    """Return what one of Meta's shards has of a tensor that a rank holds.

    The embeddings of further ids are divided among shards, of which Meta's code knows up to eight;
    where they cannot be, each shard has all of them.

    Args:
        name: The name here.
        tensor: What the rank holds.
        placement: The shard.
    """
    if name != IMAGE_ROWS or NUM_IMAGE_ROWS % placement.size:
        return tensor
    return tensor[as_slice(placement.span(NUM_IMAGE_ROWS))]


def params_of(args: VisionArgs) -> dict[str, Any]:
    """Return what params.json has besides the sizes of the text model."""
    params: dict[str, Any] = {key: getattr(args, name) for key, name in _META_SIZES.items()}
    others = [each for each in fields(VisionArgs) if each.name not in _META_SIZES.values()]
    sizes = {each.name: getattr(args, each.name) for each in others}
    changed = {each.name: sizes[each.name] for each in others if sizes[each.name] != each.default}
    return params | ({_SIZES: changed} if changed else {})


def split_params(params: dict[str, Any], source: str) -> tuple[dict[str, Any], VisionParts | None]:
    """Return the params.json of the text model, and what else the model has.

    Args:
        params: The content of params.json.
        source: What errors name.

    Returns:
        The keys of a text model; and the other parts, None for a model of text alone.

    Raises:
        ValueError: The number of layers is wrong.
    """
    text = {key: value for key, value in params.items() if key not in _META_KEYS}
    count = params.get(_NUM_CROSS_LAYERS, -1)
    older = params.get("vision_model")  # Earlier files have the number in here.
    if isinstance(older, dict) and isinstance(older.get("cross_attention_adapter"), dict):
        count = older["cross_attention_adapter"].get("num_layers", count)
    if count == -1:  # Meta's value for a model without images
        return text, None
    with errors_in(source):
        count = whole_number(_NUM_CROSS_LAYERS, count, 1, _MAX_LAYERS)
        settings = {key: params[key] for key in _META_KEYS if key in params}
        return text, VisionParts(count, settings=settings)


def split_config(config: dict[str, Any], source: str) -> tuple[dict[str, Any], VisionParts | None]:
    """Return the config.json of the text model as that of a Llama, and what else the model has.

    Args:
        config: The content of config.json.
        source: What errors name.

    Returns:
        The configuration; and the other parts, None for a model that is no vision model.

    Raises:
        ValueError: The layers are not described as those of a vision model.
    """
    if config.get("model_type") not in _MODEL_TYPES:
        return config, None
    text = config.get("text_config", config)
    with errors_in(source):
        if not isinstance(text, dict):
            raise ValueError(f"text_config must be an object, not {brief(text)}")
        count = whole_number("num_hidden_layers", text.get("num_hidden_layers"), 1, _MAX_LAYERS)
        cross = text.get("cross_attention_layers")
        cross_layers = cross if isinstance(cross, list) else [None]
        if not all(type(number) is int and 0 <= number < count for number in cross_layers):
            raise ValueError(
                f"cross_attention_layers is {brief(cross)}: it must be a list of numbers of layers "
                f"below num_hidden_layers={count}"
            )
        self_layers = [number for number in range(count) if number not in cross_layers]
        layers = {number: index for index, number in enumerate(self_layers)}
        vocab_size = whole_number("vocab_size", text.get("vocab_size"), 1, 2**24)
    settings = config.get("vision_config")
    parts = VisionParts(
        count - len(layers), layers, vocab_size, settings if isinstance(settings, dict) else {}
    )
    return text | {"model_type": "llama", "num_hidden_layers": len(layers)}, parts
