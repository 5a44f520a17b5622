"""The text model in a vision checkpoint, such as Llama 3.2 11B Vision and 90B Vision.

In: the content of params.json or config.json, and the tensors of a file. Out: the same of the text
model. Its cross-attention layers attend to images only. Without an image Meta's code leaves them
out, so that the other layers alone are a Llama; the image encoder, the projector of its results and
the embeddings of image tokens are left out as well. Names and numbers follow Meta's
llama_models/llama3/multimodal and the conversion of transformers. No file is opened here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llama.checkpoint.files import MappedTensor
from llama.common.checks import brief, errors_in, whole_number

_MAX_LAYERS = 2**13
_NUM_CROSS_LAYERS = "vision_num_cross_attention_layers"
_META_KEYS = (_NUM_CROSS_LAYERS, "vision_chunk_size", "vision_max_num_chunks", "vision_model")
_META_PREFIX = "text_model."
_META_LEFT_OUT = (
    "vision_model.",
    "text_model.cross_attention_layers.",
    "text_model.learnable_embedding.",
)
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
_HF_EMBEDDING = "model.embed_tokens.weight"
# The rows that Hugging Face's embedding has behind those of the vocabulary.
_NUM_IMAGE_ROWS = 8
# The model type of a vision model, and that of its text model if it was saved alone.
_MODEL_TYPES = ("mllama", "mllama_text_model")


@dataclass(frozen=True)
class VisionParts:
    """The parts of a vision checkpoint beside its text model.

    Attributes:
        num_cross_layers: The number of cross-attention layers.
        layers: In Hugging Face's layout, which numbers all layers together: the number in the text
            model of each of its layers, by the number in the files. Empty in Meta's layout.
        vocab_size: In Hugging Face's layout, the rows of the embedding that are tokens of text.
    """

    num_cross_layers: int
    layers: Mapping[int, int] = field(default_factory=dict)
    vocab_size: int = 0

    def describe(self) -> str:
        """Return which part of the checkpoint is loaded, for reports."""
        return (
            f"the text model of a vision checkpoint, without its {self.num_cross_layers} "
            "cross-attention layers and its image encoder: images are refused"
        )

    def text_tensors(self, tensors: dict[str, MappedTensor]) -> dict[str, MappedTensor]:
        """Return the tensors of the text model, under the names that a Llama's have."""
        text: dict[str, MappedTensor] = {}
        for name, tensor in tensors.items():
            text_name = self._hf_name(name) if self.layers else _meta_name(name)
            if text_name is None:
                continue
            rows = tensor.data
            has_image_rows = len(rows) == self.vocab_size + _NUM_IMAGE_ROWS
            if text_name == _HF_EMBEDDING and rows.dim() == 2 and has_image_rows:
                tensor = tensor._replace(data=rows[: self.vocab_size])
            text[text_name] = tensor
        return text

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
            return None
        return f"model.layers.{self.layers[number]}.{name[match.end() :]}"


def _meta_name(name: str) -> str | None:
    """Return the name in a Llama of a tensor of Meta's layout; None: it has none."""
    if name.startswith(_META_LEFT_OUT):
        return None
    return name.removeprefix(_META_PREFIX)


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
        return text, VisionParts(whole_number(_NUM_CROSS_LAYERS, count, 1, _MAX_LAYERS))


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
    parts = VisionParts(count - len(layers), layers, vocab_size)
    return text | {"model_type": "llama", "num_hidden_layers": len(layers)}, parts
