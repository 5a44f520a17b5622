"""Write a checkpoint again: Meta's in another number of shards, or in the other layout.

In: a folder that `find` understands. Out: a new folder, complete or not there at all, with the same
values. Each file is first put together in scratch files on the same disk, so that memory holds one
tensor at most, and a laptop converts a model larger than its memory.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from llama.args import ModelArgs
from llama.checkpoint import huggingface as hf
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.shapes import ROTATED, name_in, shard_shapes
from llama.checkpoint.weights import Weights
from llama.checks import whole_number
from llama.downloads import check_utf8

_FILE_BYTES = 5_000_000_000  # of one .safetensors, at most, unless one tensor is larger
_MAX_SHARDS = 4096


def reshard(
    ckpt_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    model_parallel_size: SupportsIndex,
    *,
    progress: bool = False,
) -> list[str]:
    """Write a checkpoint of Meta's layout again, in `model_parallel_size` shards.

    With more shards than kv heads, each head is written to several. Returns a line for each file
    written and one for all; `progress` draws a bar on stderr. TypeError, ValueError or OSError,
    before anything is written, where the size does not divide the model or `out_dir` holds
    something.
    """
    size = whole_number("model_parallel_size", model_parallel_size, 1, _MAX_SHARDS)
    checkpoint = find(ckpt_dir)
    if checkpoint.layout != "meta":
        raise ValueError(f"{checkpoint.folder} is in Hugging Face's layout: convert it first")
    checkpoint.params.check_ranks(size)
    weights = Weights(checkpoint)
    with _new_folder(out_dir) as folder:
        _write_shards(weights, folder, size, progress)
        shutil.copyfile(checkpoint.params_path, folder / "params.json")
        _copy_tokenizer(checkpoint, folder)
    return _written(out_dir)


def convert(
    ckpt_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    progress: bool = False,
) -> list[str]:
    """Write Meta's layout as Hugging Face's, or Hugging Face's as Meta's (one shard).

    Returns a line for each file written and one for all; `progress` draws a bar on stderr.
    ValueError or OSError, before anything is written, for a bad checkpoint or an `out_dir` that
    holds something.
    """
    checkpoint = find(ckpt_dir)
    weights = Weights(checkpoint)
    with _new_folder(out_dir) as folder:
        if checkpoint.layout == "meta":
            _write_hf(weights, folder, progress)
        else:
            _write_shards(weights, folder, 1, progress)
            _write_json(folder / "params.json", _meta_params(checkpoint.params))
        _copy_tokenizer(checkpoint, folder)
    return _written(out_dir)


def _write_shards(weights: Weights, folder: Path, size: int, progress: bool) -> None:
    """consolidated.NN.pth for each of `size` ranks.

    A tied output is written as Meta writes it: a second name for the embedding's bytes.
    """
    shapes = shard_shapes(weights.params, size)
    one = sum(shape.numel() * weights.dtype(name).itemsize for name, shape in shapes.items())
    _check_room(folder, one * (size + 1))  # all, and the scratch of one
    for rank in tqdm(range(size), desc="Writing", unit="file", disable=not progress):
        shard: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            shard[name] = _scratch(folder, shape, weights.dtype(name))
            weights.copy(name, shard[name], rank, size)
        shard.setdefault("output.weight", shard["tok_embeddings.weight"])
        torch.save(shard, folder / f"consolidated.{rank:02d}.pth")


def _write_hf(weights: Weights, folder: Path, progress: bool) -> None:
    """The .safetensors files, their index where there are several, and config.json."""
    tied = weights.params.tied_output or weights.are_equal("output.weight", "tok_embeddings.weight")
    names = [name for name in weights.shapes if not (tied and name == "output.weight")]
    sizes = {n: weights.shapes[n].numel() * weights.dtype(n).itemsize for n in names}
    files = _by_size(sizes, _FILE_BYTES)
    total = sum(sizes.values())
    _check_room(folder, total + max(sum(sizes[n] for n in file) for file in files))
    index: dict[str, str] = {}
    for i, file in enumerate(tqdm(files, desc="Writing", unit="file", disable=not progress)):
        title = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        path = folder / (title if len(files) > 1 else "model.safetensors")
        _write_hf_file(weights, file, path)
        index |= {name_in("hf", name): path.name for name in file}
    if len(files) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": index}
        _write_json(folder / "model.safetensors.index.json", content)
    dtype = weights.dtype("tok_embeddings.weight")
    _write_json(folder / "config.json", hf.config_of(weights.params, tied=tied, dtype=dtype))


def _write_hf_file(weights: Weights, names: list[str], path: Path) -> None:
    tensors = {name_in("hf", name): _whole_hf(weights, name, path.parent) for name in names}
    save_file(tensors, path, metadata={"format": "pt"})


def _whole_hf(weights: Weights, name: str, folder: Path) -> Tensor:
    shape, dtype = weights.shapes[name], weights.dtype(name)
    whole = _scratch(folder, shape, dtype)
    weights.copy(name, whole, 0, 1)
    if not name.endswith(ROTATED):
        return whole
    halves = _scratch(folder, shape, dtype)
    hf.copy_halves(halves, whole, weights.params.head_dim)
    return halves


def _by_size(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """The names in order, in groups of at most `limit` bytes (or of one name)."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


def _meta_params(args: ModelArgs) -> dict[str, Any]:
    """The params.json of a model: Meta's keys, and our own only where Meta's do not say enough.

    Meta's package refuses keys that it does not know; the sizes that Meta released need none.
    """
    keys = (
        "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of",
        "ffn_dim_multiplier", "norm_eps", "rope_theta", "use_scaled_rope",
    )  # fmt: skip
    params = {key: getattr(args, key) for key in keys if getattr(args, key) is not None}
    inferred = ModelArgs(**params)
    if inferred.rope_factor != args.rope_factor:
        params["rope_scale_factor"] = args.rope_factor
    if inferred.longest_context != args.longest_context:
        params["context_length"] = args.longest_context
    return params


def _scratch(folder: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor in a file that is already unlinked: it uses disk, not memory, while it exists."""
    path = folder / "scratch"
    flat = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype)
    path.unlink()
    return flat.view(shape)


def _check_room(folder: Path, needed: int) -> None:
    """OSError unless the disk has `needed` bytes: a mapped file that runs out of disk kills us."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, and writing takes {needed / 1e9:.1f} "
            "GB: free some, or give a folder on another disk"
        )


@contextlib.contextmanager
def _new_folder(out_dir: str | os.PathLike[str]) -> Iterator[Path]:
    """A draft folder beside `out_dir`: renamed to it at the end, removed if the block fails."""
    check_utf8(Path(out_dir))
    out = Path(out_dir).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} holds something: give a new folder, nothing is overwritten")
    draft = out.with_name(out.name + ".partial")
    if draft.exists():
        raise FileExistsError(f"{draft} was left by a run that was cut off: remove it")
    draft.mkdir(parents=True)
    try:
        yield draft
        draft.replace(out)
    except BaseException:
        shutil.rmtree(draft)
        raise


def _copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # weights alone are a checkpoint too
        path = checkpoint.tokenizer_path()
        shutil.copyfile(path, folder / path.name)


def _written(out_dir: str | os.PathLike[str]) -> list[str]:
    """What lies in a folder just written: a line for each file and one for all."""
    folder = Path(out_dir).resolve()
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    lines = [f"{name}: {size:,} bytes" for name, size in sizes.items()]
    return [*lines, f"{folder}: {len(sizes)} files, {sum(sizes.values()):,} bytes written"]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
