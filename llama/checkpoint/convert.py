"""Checkpoints written anew: Meta's in another number of shards, or in the other layout.

In: a folder that `find` understands. Out: a new folder, complete or not there at all, with the same
values. What is written next is put together in scratch files on the same disk, so that memory holds
one tensor at most, and a laptop converts a model larger than its memory.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from llama.args import ModelArgs
from llama.checkpoint import huggingface as hf
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.weights import ROTATED, Weights, name_in, shard_shapes

_FILE_BYTES = 5_000_000_000  # of one .safetensors, at most, unless one tensor is larger


def reshard(
    ckpt_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    model_parallel_size: int,
    *,
    progress: bool = False,
) -> None:
    """Write a checkpoint of Meta's layout again, in `model_parallel_size` shards.

    With more shards than kv heads, each head is written to several. ValueError or OSError, before
    anything is written, where the size does not divide the model or `out_dir` holds something.
    """
    found, size = find(ckpt_dir), model_parallel_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"model_parallel_size={size!r}: give a whole number from 1")
    if found.layout != "meta":
        raise ValueError(f"{found.folder} is in Hugging Face's layout: convert it first")
    found.params.check_ranks(size)
    weights = Weights(found)
    with _new_folder(out_dir) as folder:
        _write_shards(weights, folder, size, found.params, progress)
        shutil.copyfile(found.params_path, folder / "params.json")
        _copy_tokenizer(found, folder)


def convert(
    ckpt_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    progress: bool = False,
) -> None:
    """Write Meta's layout as Hugging Face's, or Hugging Face's as Meta's (one shard).

    ValueError or OSError, before anything is written, for a bad checkpoint or an `out_dir` that
    holds something.
    """
    found = find(ckpt_dir)
    weights = Weights(found)
    with _new_folder(out_dir) as folder:
        if found.layout == "meta":
            _write_hf(weights, folder, progress)
        else:
            untied = replace(found.params, tied_output=False)  # Meta's files hold output.weight
            _write_shards(weights, folder, 1, untied, progress)
            _write_json(folder / "params.json", _meta_params(found.params))
        _copy_tokenizer(found, folder)


def _write_shards(
    weights: Weights, folder: Path, size: int, params: ModelArgs, progress: bool
) -> None:
    """consolidated.NN.pth for each of `size` ranks of the model of `params`."""
    slots = shard_shapes(params, size)
    source = {name: name if name in weights.shapes else "tok_embeddings.weight" for name in slots}
    one = sum(slots[n].numel() * weights.dtype(source[n]).itemsize for n in slots)
    _check_room(folder, one * (size + 1))  # all, and the scratch of one
    for part in tqdm(range(size), desc="Writing", unit="file", disable=not progress):
        shard: dict[str, Tensor] = {}
        for name, slot in slots.items():
            shard[name] = _scratch(folder, slot.shape, weights.dtype(source[name]))
            weights.copy(source[name], shard[name], part, size)
        torch.save(shard, folder / f"consolidated.{part:02d}.pth")


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
    turned = _scratch(folder, shape, dtype)
    hf.copy_halves(turned, whole, weights.params.head_dim)
    return turned


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
    """The params.json of a model: Meta's keys, and our own only where Meta's would not tell.

    Meta's package refuses keys that it does not know; the sizes that Meta released need none.
    """
    keys = (
        "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of",
        "ffn_dim_multiplier", "norm_eps", "rope_theta", "use_scaled_rope",
    )  # fmt: skip
    params = {key: getattr(args, key) for key in keys if getattr(args, key) is not None}
    told = ModelArgs(**params)
    if told.rope_factor != args.rope_factor:
        params["rope_scale_factor"] = args.rope_factor
    if told.longest_context != args.longest_context:
        params["context_length"] = args.longest_context
    return params


def _scratch(folder: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor in a file without a name: it takes disk, not memory, for as long as it lives."""
    path = folder / "scratch"
    flat = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype)
    path.unlink()
    return flat.view(shape)


def _check_room(folder: Path, needed: int) -> None:
    """OSError unless the disk has it; to find out by writing to a mapped file ends the process."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, and writing takes {needed / 1e9:.1f} "
            "GB: free some, or give a folder on another disk"
        )


@contextlib.contextmanager
def _new_folder(out_dir: str | os.PathLike[str]) -> Iterator[Path]:
    """A draft beside `out_dir`, which takes its place when the block ends, and goes if it fails."""
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


def _copy_tokenizer(found: Checkpoint, folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # weights alone are a checkpoint too
        path = found.tokenizer_path()
        shutil.copyfile(path, folder / path.name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
