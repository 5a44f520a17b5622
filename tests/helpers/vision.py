"""A tiny Llama 3.2 Vision: Meta's own modules from llama-models, and files of the same tensors.

`MetasVision` computes logits in float32. Its encoder, text model, masks and image transform are
Meta's; only the sizes, which are constants in Meta's class for both, are given here.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from helpers import meta
from helpers.checkpoints import write_byte_tokenizer

PARAMS: dict[str, Any] = {
    "dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
    "multiple_of": 32, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "width": 32, "n_heads": 4, "ffn_dim": 128, "n_layers": 3, "n_global_layers": 2,
    "features": [1, 2],
}  # fmt: skip
KEYS: dict[str, Any] = {
    "vision_chunk_size": 28, "vision_max_num_chunks": 4, "vision_num_cross_attention_layers": 2,
}  # fmt: skip
IMAGE_ID = PARAMS["vocab_size"]


class _Functional(ModuleType):
    """What Meta's image transform calls of torchvision, as torchvision does it for PIL images."""

    @staticmethod
    def resize(image: Image.Image, size: tuple[int, int], interpolation: Any) -> Image.Image:
        return image.resize((size[1], size[0]), interpolation)


def _to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)


class _Normalize:
    def __init__(self, mean: Any, std: Any, inplace: bool) -> None:
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]

    def __call__(self, image: Tensor) -> Tensor:
        return image.sub_(self.mean).div_(self.std)


@contextlib.contextmanager
def metas_modules() -> Iterator[Any]:
    """Import llama-models' vision model, with stand-ins for torchvision."""
    functional = _Functional("torchvision.transforms.functional")
    transforms: Any = ModuleType("torchvision.transforms")
    transforms.functional = functional
    transforms.ToTensor = lambda: _to_tensor
    transforms.Normalize = _Normalize
    transforms.InterpolationMode = Image.Resampling
    with pytest.MonkeyPatch.context() as patch:
        for module in (ModuleType("torchvision"), transforms, functional):
            patch.setitem(sys.modules, module.__name__, module)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # its products are tiny
        meta.join_a_world_of_one()
        yield importlib.import_module("llama_models.llama3.multimodal.model")
        meta.leave_the_world()
        torch.set_num_threads(num_threads)


class _Encoder(nn.Module):
    """Meta's `CrossAttentionTransformerVision` with other sizes."""

    def __init__(self, module: Any, dim: int) -> None:
        super().__init__()
        self.image_res = KEYS["vision_chunk_size"]
        self.patch_size = 14
        self.vision_encoder = module.VisionEncoder(
            max_num_tiles=4, image_size=self.image_res, patch_size=self.patch_size,
            width=SIZES["width"], layers=SIZES["n_layers"], heads=SIZES["n_heads"],
            n_global_layers=SIZES["n_global_layers"], global_model=True,
            return_intermediate=SIZES["features"],
        )  # fmt: skip
        num_features = 1 + len(SIZES["features"])
        self.vision_projection = nn.Linear(num_features * SIZES["width"], dim)

    def forward(self, images: Tensor, grids: Tensor) -> Tensor:
        out: Tensor = self.vision_projection(self.vision_encoder(images, grids))
        return out


class MetasVision:
    """Meta's model with random weights; to be used within `metas_modules`."""

    def __init__(self, module: Any, seed: int = 5) -> None:
        from llama_models.llama3.args import ModelArgs

        args = ModelArgs(**PARAMS, **KEYS, max_seq_len=128, max_batch_size=1)
        text = module.CrossAttentionTransformerText(args)
        text.setup_cache(1, torch.device("cpu"), dtype=torch.float32)
        self.model = module.CrossAttentionTransformer.__new__(module.CrossAttentionTransformer)
        nn.Module.__init__(self.model)
        self.model.params = args
        self.model.model_dim = args.dim
        self.model.text_model = text
        self.model.vision_model = _Encoder(module, args.dim)
        self.model.image_res = args.vision_chunk_size
        self.model.max_num_chunks = args.vision_max_num_chunks
        transform = module.VariableSizeImageTransform(size=args.vision_chunk_size)
        self.transform = transform
        self.model.image_transform = lambda image: transform(image, max_num_chunks=4)
        draw = torch.Generator().manual_seed(seed)
        for name, weight in self.model.named_parameters():
            scale = weight.shape[-1] ** -0.5 if weight.dim() == 2 else 0.3
            values = torch.randn(weight.shape, generator=draw) * scale
            is_gain = name.endswith("weight") and weight.dim() == 1
            weight.data = values + (1 if is_gain or "gate" in name else 0)
        self.model.text_model.output.weight.data *= 3

    def state(self) -> dict[str, Tensor]:
        """Return the tensors as Meta's file has them."""
        return {name: x.clone() for name, x in self.model.state_dict().items()}

    @torch.inference_mode()
    def run(
        self, tokens: list[int], images: list[Image.Image], count: int
    ) -> tuple[Tensor, list[int]]:
        """Return the logits after each token of a prompt, (T, V), and a greedy answer.

        Of several images, the last ones are seen by the answer. Meta's masks of several images end
        with the prompt, so that an answer would see none.
        """
        from llama_models.llama3.chat_format import create_vision_mask

        total = len(tokens) + count
        masks = create_vision_mask(tokens, IMAGE_ID)
        masks = [[begin, -1 if end == len(tokens) else end] for begin, end in masks]
        caches, seen, full = self.model.compute_vision_tokens_masks(
            [images], [masks], total, torch.device("cpu")
        )
        known = torch.zeros(1, total, dtype=torch.long)
        known[0, : len(tokens)] = torch.tensor(tokens)
        found = []
        begin = 0
        for end in range(len(tokens), total):
            positions = torch.arange(begin, end)
            logits = self.model.forward(positions, known, seen, full, caches, not images)
            known[0, end] = logits[0, -1].argmax()
            found.append(logits[0])
            begin = end
        return found[0], known[0, len(tokens) :].tolist()


def write_metas(folder: Path, state: dict[str, Tensor]) -> Path:
    """Write a checkpoint in Meta's layout, in one shard, with a tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    params = PARAMS | KEYS | {"vision_sizes": SIZES}
    (folder / "params.json").write_text(json.dumps(params))
    torch.save(state, folder / "consolidated.00.pth")
    write_byte_tokenizer(folder)
    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of random colors."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)
