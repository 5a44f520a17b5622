"""The benchmark's models: shapes, random weights, and files of them.

In: a name of `SHAPES` or a folder with weights. Out: params, filled tensors, and a checkpoint in
Meta's layout with a made-up tokenizer. Nothing is timed here; `llama.model.cost` has the rooflines.
"""

import base64
import json
import random
from collections.abc import Callable
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama import ModelArgs, Transformer
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.write.convert import convert, reshard
from llama.model import shapes

# The params of each shape.
SHAPES: dict[str, dict[str, Any]] = {
    "demo": {
        "dim": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 2048,
        "multiple_of": 32, "norm_eps": 1e-5, "rope_theta": 500000.0,
    },
    **{name: shapes.SHAPES[name] for name in ("1b", "3b", "8b")},
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NUM_SPECIAL = 256  # the last ids of every vocabulary
_NOISE = 2**22 - 3  # prime: repeated down a matrix, it makes no two rows alike


def params_of(model: str) -> dict[str, Any]:
    """Return the params of a shape, or of the checkpoint in a folder or a GGUF file.

    Raises:
        ValueError: The name is none of these.
    """
    if model in SHAPES:
        return dict(SHAPES[model])
    if not Path(model).is_dir() and not is_gguf(model):
        raise ValueError(
            f"model={model!r} is neither a folder nor a GGUF file nor one of "
            f"{', '.join(SHAPES)}: give one of those"
        )
    args = find(model).params
    sizes = ("max_batch_size", "max_seq_len")
    return {k: v for k, v in vars(args).items() if k not in sizes and v is not None}


def is_gguf(model: str) -> bool:
    """Return whether `model` names a GGUF file, which our engine and llama.cpp run directly."""
    return Path(model).suffix == ".gguf" and Path(model).is_file()


def is_quantized_folder(model: str) -> bool:
    """Return whether `model` is a folder of Hugging Face's layout with quantized matrices."""
    if not Path(model).is_dir():
        return False
    found = find(model)
    return found.layout == "hf" and found.is_quantized


def random_model(params: dict[str, Any], dtype: torch.dtype, device: str) -> Transformer:
    """Return a Transformer with random weights, the same ones for the same shape."""
    model = Transformer(ModelArgs(**params), dtype=dtype, device=device)
    fill(model.named_shards())
    return model


def fill(weights: dict[str, Tensor], seed: int = 0) -> None:
    """Fill norms with ones, and all other weights with normal values of std 0.02.

    The values depend on seed, order and size. They repeat one block: to draw a billion of them
    would take longer than the benchmark.
    """
    draw = torch.Generator().manual_seed(seed)
    first = next(iter(weights.values()))
    noise = (torch.randn(_NOISE, generator=draw) * 0.02).to(first.device, first.dtype)
    for i, weight in enumerate(weights.values()):
        flat = weight.view(-1)
        if weight.dim() == 1:
            flat.fill_(1)
            continue
        turned = noise.roll(7919 * i)
        for start in range(0, len(flat), _NOISE):
            piece = flat[start : start + _NOISE]
            piece.copy_(turned[: len(piece)])


def write_checkpoint(folder: Path, params: dict[str, Any], dtype: torch.dtype) -> Path:
    """Write `random_model`'s weights in Meta's layout, unless the folder exists already."""
    file_params = {key: value for key, value in params.items() if key != "tied_output"}
    if folder.exists():
        if json.loads((folder / "params.json").read_text()) != file_params:
            raise ValueError(f"{folder} holds a model of another shape: remove it")
        return folder
    draft = folder.with_name(folder.name + ".partial")
    draft.mkdir(parents=True)
    slots = Transformer(ModelArgs(**params), device="meta").named_shards()
    weights = {name: torch.empty(slot.shape, dtype=dtype) for name, slot in slots.items()}
    fill(weights)
    if params.get("tied_output"):
        weights["output.weight"] = weights["tok_embeddings.weight"]
    torch.save(weights, draft / "consolidated.00.pth")
    (draft / "params.json").write_text(json.dumps(file_params))
    write_tokenizer(draft / "tokenizer.model", params["vocab_size"])
    return draft.replace(folder)


def layouts(found: Checkpoint, work_dir: Path) -> dict[str, str]:
    """Return a checkpoint in every layout: {"meta": one shard, "hf": safetensors}."""
    folders = {found.layout: found.folder}
    if found.layout == "hf":
        folders["meta"] = once(work_dir / "meta", convert, found.folder)
    elif len(found.shards) > 1:
        folders["meta"] = once(work_dir / "one_shard", reshard, found.folder, 1)
    if "hf" not in folders:
        folders["hf"] = once(work_dir / "hf", convert, folders["meta"])
    return {layout: str(folder) for layout, folder in folders.items()}


def once(out: Path, write: Callable, source: Any, *more: Any) -> Path:
    """Return `out`, which write(source, out, *more) makes where it does not exist."""
    if not out.exists():
        write(source, out, *more)
    return out


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write a tokenizer.model of that size: all bytes, then all pairs, then triples as needed."""
    if vocab_size < 512:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for 256 bytes and 256 special tokens"
        )
    spellings = (bytes(t) for length in (1, 2, 3) for t in product(range(256), repeat=length))
    tokens = islice(spellings, vocab_size - _NUM_SPECIAL)
    lines = (f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens))
    path.write_text("".join(lines))


def random_lengths(count: int, shortest: int, longest: int, seed: int) -> list[tuple[int, int]]:
    """Return the (prompt, answer) tokens of each of `count` requests."""
    draw = random.Random(seed)
    return [
        (draw.randint(shortest, longest), draw.randint(shortest, longest)) for _ in range(count)
    ]
