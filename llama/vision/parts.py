"""The parts of one rank's model that read images, besides its layers of text.

In: a `Transformer` whose params have `vision`. Out: the same model with `image_parts`, which its
loader fills, and which it runs for steps whose `Batch` has `cross`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from llama.model.layers import allocate, name_matrices, unfilled
from llama.model.transformer import Transformer
from llama.ops.batch import Batch, CrossRows
from llama.vision.cross import CrossBlock, entries_of, plane_of
from llama.vision.encoder import VisionModel
from llama.vision.tensors import CROSS, ENCODER, IMAGE_ROWS, VisionShare


class _ImageRows(nn.Module):
    """Embeddings of ids after the vocabulary, (8, E): the first is that of an image's position."""

    def __init__(self, share: VisionShare) -> None:
        super().__init__()
        self.weight = unfilled(len(share.rows("s")), len(share.rows("E")))


class ImageParts(nn.Module):
    """The parts of one rank that read images; see `llama.model.execution.ImageLayers`.

    Attributes:
        learnable_embedding: The embeddings of further ids, on the stages that embed tokens.
        cross_attention_layers: The layers of this rank's stage, by their number in the model.
        vision_model: The encoder and its projector.
        ratio: The layers of text whose planes hold what one of these layers stores.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        params = model.params
        plan = model.plan
        assert params.vision is not None, "the model reads text alone"
        self.vocab_size = params.vocab_size
        self.ratio = plan.image_ratio
        if plan.share.has_embedding:
            share = VisionShare.of(params, model.parallel.placement)
            self.learnable_embedding = _ImageRows(share)
        self.cross_attention_layers = nn.ModuleDict()
        layers = params.vision.cross_layers(params.n_layers)
        for number, before in enumerate(layers):
            if before in plan.share.layers:
                first_plane = len(self.cross_attention_layers) * self.ratio
                self.cross_attention_layers[str(number)] = CrossBlock(
                    plan, model.parallel, before=before, first_plane=first_plane
                )
        self.vision_model = VisionModel(params, model.parallel)
        self._before: dict[int, CrossBlock] = {block.before: block for block in self._blocks()}

    def _blocks(self) -> list[CrossBlock]:
        blocks: list[Any] = list(self.cross_attention_layers.values())
        return blocks

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the layers of text before which a cross-attention layer runs, in order."""
        return tuple(self._before)

    def loading_order(self) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
        """Yield each part with the views that hold this rank's share, by Meta's names."""
        if hasattr(self, "learnable_embedding"):
            yield self.learnable_embedding, {IMAGE_ROWS: self.learnable_embedding.weight.data}
        for number, layer in self.cross_attention_layers.items():
            yield layer, layer.state_dict(prefix=f"{CROSS}{number}.")
        yield self.vision_model, self.vision_model.state_dict(prefix=ENCODER)

    def embed(self, embedding: nn.Module, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, among which are positions of images: (T) -> (T, E).

        Args:
            embedding: The embedding of text.
            tokens: Ids; images have that of the vocabulary's size.
        """
        is_image = tokens >= self.vocab_size
        x: Tensor = embedding(tokens.masked_fill(is_image, 0))
        return torch.where(is_image[:, None], self.learnable_embedding.weight[0], x)

    def store(self, cross: CrossRows, batch: Batch, kv_cache: Tensor) -> None:
        """Encode the images that are new in a step, and store their keys and values.

        Args:
            cross: What the rows of the step see.
            batch: The step, for its kernels.
            kv_cache: (L, 2, P, S, K, W), written in place.
        """
        page_size = kv_cache.shape[3]
        offsets = torch.arange(page_size, device=kv_cache.device)
        for image in cross.new:
            tokens = self.vision_model(image.pixels, image.rows, image.columns, batch)
            entries = entries_of(image.pages, kv_cache.shape[2], self.ratio)
            slots = (entries[:, None] * page_size + offsets).flatten()
            slots = slots[image.first : image.first + len(tokens)]
            for block in self._blocks():
                plane = plane_of(kv_cache, block.first_plane, self.ratio)
                block.store(tokens, slots, plane, batch)

    def run_before(self, layer: int, x: Tensor, batch: Batch, kv_cache: Tensor) -> Tensor:
        """Run the cross-attention layer before a layer of text, if there is one: (T, E) -> (T, E).

        Args:
            layer: The layer of text.
            x: The residual stream.
            batch: The step, which has `cross`.
            kv_cache: (L, 2, P, S, K, W).
        """
        block = self._before.get(layer)
        cross = batch.cross
        if block is None or cross is None:
            return x
        plane = plane_of(kv_cache, block.first_plane, self.ratio)
        seen = block(x[cross.rows], cross.batch.with_kernels(batch.kernels), plane)
        return x.index_copy(0, cross.rows, seen)


def with_image_parts(model: Transformer) -> Transformer:
    """Return the model, with the parts that read images if its params have them."""
    if model.params.vision is not None:
        weight = model.norm.weight
        parts = ImageParts(model)
        allocate(parts, weight.device, weight.dtype)
        name_matrices(parts)
        model.image_parts = parts
    return model
