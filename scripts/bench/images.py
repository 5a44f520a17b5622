"""Measure the image encoder of Llama 3.2 Vision and the first token after an image.

In: the shape of a text model, of which some layers are taken, and numbers of tiles. Out: a table of
seconds and one JSON line. The encoder is that of the published models, with random weights, as
those of the text are. With `--vs llama_models` Meta's own modules follow in the same process, once
ours are gone, as both may not fit the memory.
"""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from bench.report import Column
from bench.run import Bench, Row, whole
from llama import ModelArgs, Transformer
from llama.assembly import assemble
from llama.checkpoint.packing import pack_model
from llama.engine.request import ImageSpan, SequenceSpec
from llama.engine.sequence import SequenceState
from llama.model.args import VisionArgs
from llama.options.engine_options import EngineOptions
from llama.vision.encoder import normalized
from llama.vision.parts import with_image_parts

_GRIDS = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2)}
_TEXT = 32  # tokens after the image
_VOCABULARY = 16384  # rows of both ends, which are no part of what is measured
_COLUMNS: list[Column] = [
    ("engine", "engine", ""), ("tiles", "tiles", ""), ("encode s", "encode_s", ".2f"),
    ("TFLOP/s", "tflop_per_s", ".3f"), ("first token s", "first_s", ".2f"),
    ("to ours", "to_ours", ".2f"),
]  # fmt: skip
# Returns the seconds of the encoder and those of the first token for tiles (r, T, T, 3) of a grid.
Measure = Callable[[np.ndarray, tuple[int, int]], tuple[float, float]]


def images(tiles: tuple[int, ...] = (1, 4), layers: int = 4, **flags: Any) -> None:
    """Time the image encoder with its projector, and the first token of an image and 32 tokens.

    Every fourth of the layers has a cross-attention layer before it. "to ours" divides the seconds
    of the encoder. TFLOP/s counts what Meta's code computes for four tiles, whatever an engine
    leaves out.
    """
    bench = Bench(**flags)
    if bench.dtype != "bf16" or set(bench.pythons) - {"ours", "llama_models"}:
        raise ValueError("images measures bf16, with --vs llama_models at most")
    vision = VisionArgs(num_cross_layers=max(1, whole("layers", layers) // 4))
    args = replace(bench.args, n_layers=layers, vocab_size=_VOCABULARY, vision=vision)
    args = replace(args, max_seq_len=64, max_batch_size=1)
    made = {"ours": _ours, "llama_models": _metas}
    found: list[Row] = []
    for engine in bench.pythons:
        print(f"... {engine}", file=sys.stderr, flush=True)
        measure = made[engine](args)
        for count in tiles:
            rows, columns = _GRIDS[count]
            draw = np.random.default_rng(bench.seed)
            shape = (count, vision.chunk_size, vision.chunk_size, 3)
            pixels = draw.integers(0, 256, shape, np.uint8)
            encode, first = measure(pixels, (rows, columns))
            line = f"... tiles {count}: encode {encode:.2f} s, first token {first:.2f} s"
            print(line, file=sys.stderr, flush=True)
            found.append({"engine": engine, "tiles": count, "encode_s": encode, "first_s": first})
        del measure
        gc.collect()
    ours = {row["tiles"]: row["encode_s"] for row in found if row["engine"] == "ours"}
    for row in found:
        row["to_ours"] = row["encode_s"] / ours[row["tiles"]]
        row["tflop_per_s"] = _metas_flop(args) / row["encode_s"] / 1e12
    bench.report(_COLUMNS, found, None)


def _metas_flop(args: ModelArgs) -> float:
    """Return the operations of Meta's encoder, which always computes four padded tiles."""
    vision = args.vision
    assert vision is not None
    num_rows = vision.max_tiles * (vision.tokens_per_tile + 8 - vision.tokens_per_tile % 8)
    per_row = 4 * vision.width**2 + 2 * vision.width * vision.ffn_dim + 2 * num_rows * vision.width
    blocks = vision.n_layers + vision.n_global_layers
    return 2.0 * num_rows * (blocks * per_row + vision.features_dim * args.dim)


def _fill(tensors: Any) -> None:
    """Fill tensors with small random values, which repeat."""
    noise = (torch.rand(1 << 20) - 0.5) * 0.04
    for tensor in tensors:
        flat = tensor.data.view(-1)
        for part in flat.split(len(noise)):
            part.copy_(noise[: len(part)])


def _timed(part: nn.Module) -> list[float]:
    """Return a list that gets the seconds of each call of a module."""
    seconds: list[float] = []
    began: list[float] = []

    def note(*_: Any) -> None:
        seconds.append(time.perf_counter() - began.pop())

    part.register_forward_pre_hook(lambda *_: began.append(time.perf_counter()))
    part.register_forward_hook(note)
    return seconds


def _ours(args: ModelArgs) -> Measure:
    model = with_image_parts(Transformer(args, dtype=torch.bfloat16))
    for part, views in model.loading_order():
        _fill(views.values())
        pack_model(model, part)
    core = assemble(model, EngineOptions(num_pages=160)).core
    parts: Any = model.image_parts
    seconds = _timed(parts.vision_model)

    def first_token(tokens: list[int], images: tuple[ImageSpan, ...], pixels: Any) -> float:
        seq = SequenceState(SequenceSpec(tuple(tokens), len(tokens) + 1, seed=1, images=images))
        seq.pixels = pixels
        began = time.perf_counter()
        core.step([seq])
        while not seq.finished:
            core.step()
        return time.perf_counter() - began

    first_token([1] * _TEXT, (), {})

    def measure(pixels: np.ndarray, grid: tuple[int, int]) -> tuple[float, float]:
        digest = bytes([len(pixels)])
        tokens = [args.vocab_size, *range(1, 1 + _TEXT)]
        first = first_token(tokens, (ImageSpan(0, digest, *grid),), {digest: pixels})
        return seconds[-1], first

    return measure


def _metas(args: ModelArgs) -> Measure:
    model = _metas_model(args)
    seconds = _timed(model.vision_model)

    def measure(pixels: np.ndarray, grid: tuple[int, int]) -> tuple[float, float]:
        tiles = normalized(torch.from_numpy(pixels)).to(torch.bfloat16)
        model.image_transform = lambda _: (tiles, grid)
        tokens = torch.tensor([[args.vocab_size, *range(1, 1 + _TEXT)]])
        total = tokens.shape[1]
        began = time.perf_counter()
        with torch.inference_mode():
            caches, seen, full = model.compute_vision_tokens_masks(
                [[None]], [[[0, -1]]], total, torch.device("cpu")
            )
            logits: Tensor = model(torch.arange(total), tokens, seen, full, caches)
        logits[0, -1].argmax().item()
        return seconds[-1], time.perf_counter() - began

    return measure


def _metas_model(args: ModelArgs) -> Any:
    """Return Meta's model, whose module imports torchvision for a transform that is not used."""
    import fairscale.nn.model_parallel.initialize as groups
    import torch.distributed as dist
    from llama_models.llama3.args import ModelArgs as MetasArgs

    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    sys.modules |= {name: mock.MagicMock() for name in names}
    from llama_models.llama3.multimodal import model as module

    for name in names:
        del sys.modules[name]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups.initialize_model_parallel(1)
    vision = args.vision
    assert vision is not None
    torch.set_default_dtype(torch.bfloat16)
    model = module.CrossAttentionTransformer(
        MetasArgs(
            dim=args.dim, n_layers=args.n_layers, n_heads=args.n_heads, n_kv_heads=args.n_kv_heads,
            vocab_size=args.vocab_size, multiple_of=args.multiple_of,
            ffn_dim_multiplier=args.ffn_dim_multiplier, norm_eps=args.norm_eps,
            rope_theta=args.rope_theta, use_scaled_rope=args.use_scaled_rope,
            vision_chunk_size=vision.chunk_size, vision_max_num_chunks=vision.max_tiles,
            vision_num_cross_attention_layers=vision.num_cross_layers, max_seq_len=64,
            max_batch_size=1,
        )
    )  # fmt: skip
    model.setup_cache(1, torch.device("cpu"), torch.bfloat16)
    _fill(model.parameters())
    return model.eval()
