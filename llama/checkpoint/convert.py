"""Write a checkpoint again: Meta's in another number of shards, in another layout, or quantized.

In: what `find` understands. Out: a new folder or GGUF file, complete or not there at all, with the
same values, those of quantized files in bfloat16; or with matrices that are rounded to fewer bits.
Each file of a folder is first put together in scratch files on the same disk, so that memory holds
one tensor at most, and a laptop converts a model larger than that.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from tqdm import tqdm

from llama.checkpoint import gguf_writing, packed, writing
from llama.checkpoint import huggingface as hf
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.quantize import BLOCKS, GROUP, encoded, quantization_config
from llama.checkpoint.reader import CheckpointReader, bytes_of
from llama.checkpoint.table import name_in, shard_shapes
from llama.checkpoint.tokenizer_files import (
    load_tokenizer,
    special_ids,
    tokenizer_config,
    tokenizer_json,
)
from llama.checks import brief, whole_number
from llama.model.args import HARMLESS_PARAMS, ModelArgs
from llama.ops.cpu import native
from llama.ranks.placement import WHOLE, Placement
from llama.weights import QUANTIZED, check_quantize

Weights = dict[str, list[str]]  # titles of files, and the tensors of each, by Meta's names
Files = dict[str, Path | dict[str, Any]]  # titles of the other files: copies of one, or JSON

_FILE_BYTES = 5_000_000_000  # of one .safetensors, at most, unless one tensor is larger
_MAX_SHARDS = 4096
_SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}  # Meta's defaults


def reshard(
    ckpt_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    model_parallel_size: SupportsIndex,
    *,
    progress: bool = False,
) -> list[str]:
    """Write a checkpoint of Meta's layout again, in `model_parallel_size` shards.

    With more shards than kv heads, each head is written to several. Returns and raises as
    `convert` does; TypeError or ValueError too where the size does not divide the model.
    """
    size = whole_number("model_parallel_size", model_parallel_size, 1, _MAX_SHARDS)
    checkpoint = find(ckpt_dir)
    reader = _Reader(checkpoint)
    if checkpoint.layout != "meta":
        raise ValueError(f"{checkpoint.weights_path} is not in Meta's layout: convert it first")
    checkpoint.params.check_ranks(size)
    files: Files = {x.name: x for x in (checkpoint.params_path, *_tokenizer(checkpoint))}
    files |= {"params.json": _meta_params(checkpoint.params)} if checkpoint.is_quantized else {}
    return _write(reader, "meta", _shards(reader, size), files, out_dir, progress)


def convert(
    ckpt_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    quantize: str | None = None,
    progress: bool = False,
) -> list[str]:
    """Write Meta's layout or GGUF as Hugging Face's, or Hugging Face's as Meta's (one shard).

    Hugging Face's folder has what `AutoTokenizer` and `AutoModelForCausalLM` of transformers read;
    without a tokenizer in `ckpt_dir`, the weights and their config. `quantize` writes such a folder
    from any layout, as compressed-tensors has it, the layers' matrices in a format of `build`. An
    `out_dir` that ends in .gguf becomes a file for llama.cpp: in bf16, or in "q8_0" or "q4_0".
    Returns a line for each file written and one for all; `progress` draws a bar on stderr.
    ValueError or OSError, before anything is written, for a bad checkpoint or tokenizer, or an
    `out_dir` that holds something.
    """
    to_gguf = Path(out_dir).suffix.lower() == ".gguf"
    if quantize not in (None, *(known := BLOCKS if to_gguf else QUANTIZED)):
        out = "an OUT that ends in .gguf" if to_gguf else "a folder OUT"
        raise ValueError(f"quantize={brief(quantize)}: give one of {', '.join(known)} for {out}")
    checkpoint = find(ckpt_dir)
    reader, tokenizer = _Reader(checkpoint, quantize), _tokenizer(checkpoint)
    if to_gguf:
        total, content = gguf_writing.content(checkpoint, reader, _names(reader), quantize)
        with writing.new_folder(out_dir) as folder, _bar(total, progress) as bar:
            writing.save_bytes(folder / Path(out_dir).name, total, content, bar.update)
        return writing.written(out_dir)
    files: Files = {path.name: path for path in tokenizer}
    if checkpoint.layout != "hf" or quantize:
        layout, weights = "hf", _hf_weights(reader)
        files = _hf_files(checkpoint, reader, weights, tokenizer)
    else:
        layout, weights = "meta", _shards(reader, 1)
        files["params.json"] = _meta_params(checkpoint.params)
    missing = [] if tokenizer else [f"no tokenizer is in {checkpoint.folder}: none was written"]
    return missing + _write(reader, layout, weights, files, out_dir, progress)


def pack(
    ckpt_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    quantize: str | None = None,
    progress: bool = False,
) -> list[str]:
    """Write a checkpoint as `build` holds it on a CPU, so that it is mapped and neither read nor
    packed, by any number of ranks.

    `quantize` is that of `build`. Codes of quantized files stay, where it is None. Returns and
    raises as `convert` does.
    """
    check_quantize(quantize, torch.bfloat16, torch.device("cpu"))
    if Path(out_dir).suffix.lower() == ".gguf":
        raise ValueError(f"{Path(out_dir)}: packed weights are a folder: give it another name")
    if native.kernels() is None:
        raise ValueError(
            "packed weights are for this project's CPU kernels, which do not run here (`llama "
            "doctor` tells why)"
        )
    checkpoint = find(ckpt_dir)
    checkpoint = replace(checkpoint, in_codes=checkpoint.is_quantized and quantize is None)
    tied = {"tied_output": True} if checkpoint.params.tied_output else {}
    files: Files = {"params.json": _meta_params(checkpoint.params) | tied}
    tokenizer = _tokenizer(checkpoint)
    for path in tokenizer:
        found = load_tokenizer(path, checkpoint.params)
        if checkpoint.layout == "gguf":
            files["tokenizer.json"] = tokenizer_json(found)
        else:
            files[path.name] = path
    CheckpointReader(checkpoint)  # its names and shapes are told before anything is written
    size = bytes_of(checkpoint, WHOLE, torch.bfloat16, quantize, torch.device("cpu"))
    with writing.new_folder(out_dir) as folder:
        writing.check_room(folder, size)
        packed.write(checkpoint, folder, quantize, progress)
        _write_others(files, folder)
        writing.write_checksums(folder)
    missing = [] if tokenizer else [f"no tokenizer is in {checkpoint.folder}: none was written"]
    return missing + writing.written(out_dir)


def _tokenizer(checkpoint: Checkpoint) -> list[Path]:
    """Its path, or none: weights alone are a checkpoint too."""
    try:
        return [checkpoint.tokenizer_path()]
    except FileNotFoundError:
        return []


class _Reader(CheckpointReader):
    """With a `quantize`, the matrices of layers are rounded."""

    def __init__(self, checkpoint: Checkpoint, quantize: str | None = None) -> None:
        super().__init__(checkpoint)
        self.quantize = quantize
        if quantize and (self.params.dim % GROUP or self.params.ffn_dim % GROUP):
            raise ValueError(f"quantize={quantize!r} needs rows of a multiple of {GROUP} numbers")

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if self.quantize else super().dtype(name)

    def rounding(self, name: str) -> str | None:
        return self.quantize if name.startswith("layers.") and "norm" not in name else None


def _num_bytes(reader: _Reader, size: int) -> dict[str, int]:
    """Of each tensor's share of one of `size` ranks; where it is rounded, about so many."""
    sizes = {}
    for name, shape in shard_shapes(reader.params, size).items():
        rounding = reader.rounding(name)
        bits = QUANTIZED[rounding].in_files[1] if rounding else 8 * reader.dtype(name).itemsize
        sizes[name] = shape.numel() * bits // (7 if rounding else 8)  # an eighth for scales
    return sizes


def _names(reader: CheckpointReader) -> list[str]:
    """Of all tensors; not of an output that is the embedding."""
    *names, last = reader.shapes
    is_tied = last == "output.weight" and reader.are_equal(last, names[0])
    return names if is_tied else [*names, last]


def _shards(reader: _Reader, size: int) -> Weights:
    """A file for each of `size` ranks: it gets a share of every tensor."""
    return {f"consolidated.{rank:02d}.pth": list(reader.shapes) for rank in range(size)}


def _hf_weights(reader: _Reader) -> Weights:
    """The tensors in order, in files of at most _FILE_BYTES, or of one tensor."""
    sizes = _num_bytes(reader, 1)
    groups: list[list[str]] = []
    room = 0
    for name in _names(reader):
        if sizes[name] > room:
            groups.append([])
            room = _FILE_BYTES
        groups[-1].append(name)
        room -= sizes[name]
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _hf_files(
    checkpoint: Checkpoint, reader: _Reader, weights: Weights, tokenizer: list[Path]
) -> Files:
    """The configurations and the tokenizer.

    As in Meta's releases, tokenizer.model is in original/: beside tokenizer.json, programs would
    take it for one of SentencePiece.
    """
    params, files = checkpoint.params, Files()
    ids = hf.metas_special_ids(params)
    for path in tokenizer:
        found = load_tokenizer(path, params)
        ids = special_ids(found)
        files["tokenizer.json"] = path if path.suffix == ".json" else tokenizer_json(found)
        if path.name == "tokenizer.model":
            files["original/tokenizer.model"] = path
        config = tokenizer_config(found, params, is_guard=checkpoint.is_guard)
        files["tokenizer_config.json"] = config
    tied = all("output.weight" not in names for names in weights.values())
    config = hf.config_of(params, tied=tied, dtype=reader.dtype("norm.weight"), ids=ids)
    if reader.quantize:
        config["quantization_config"] = quantization_config(reader.quantize)
    files["config.json"] = config
    return files | {"generation_config.json": ids | _SAMPLING} if ids else files


def _meta_params(args: ModelArgs) -> dict[str, Any]:
    """The params.json of a model: Meta's keys, and our own only where Meta's do not say enough.

    Meta's package refuses keys that it does not know; the sizes that Meta released need none.
    """
    ours = HARMLESS_PARAMS | {"rope_scale_factor", "context_length", "tied_output"}
    params = {key: x for key, x in vars(args).items() if key not in ours and x is not None}
    inferred = ModelArgs(**params)
    if inferred.rope_factor != args.rope_factor:
        params["rope_scale_factor"] = args.rope_factor
    if inferred.longest_context != args.longest_context:
        params["context_length"] = args.longest_context
    return params


def _write(
    reader: _Reader,
    layout: str,
    weights: Weights,
    files: Files,
    out_dir: str | os.PathLike[str],
    progress: bool,
) -> list[str]:
    """Write a folder; a line for each file and one for all."""
    with writing.new_folder(out_dir) as folder:
        _write_weights(reader, layout, weights, folder, progress)
        _write_others(files, folder)
    return writing.written(out_dir)


def _write_others(files: Files, folder: Path) -> None:
    for title, content in files.items():
        if isinstance(content, Path):
            writing.copy_file(content, folder / title)
        else:
            writing.write_json(folder / title, content)


def _bar(total: int, progress: bool) -> "tqdm[Any]":
    return tqdm(total=total, desc="Writing", unit="B", unit_scale=True, disable=not progress)


def _write_weights(
    reader: _Reader, layout: str, weights: Weights, folder: Path, progress: bool
) -> None:
    """Write the files of tensors, and the index of several of Hugging Face's."""
    ranks = len(weights) if layout == "meta" else 1
    shapes, sizes = shard_shapes(reader.params, ranks), _num_bytes(reader, ranks)
    each = [sum(sizes[name] for name in names) for names in weights.values()]
    total, total_size, title_of = sum(each), 0, dict[str, str]()
    writing.check_room(folder, total + max(each))  # all, and the scratch of one
    bar = _bar(total, progress)

    def report(count: int) -> None:
        """A tensor counts half when it is in scratch, and half when it is in its file. A .pth has
        some bytes more: beyond the total, tqdm would draw no bar."""
        bar.update(min(count / 2, total - bar.n))

    with bar:
        for i, (title, names) in enumerate(weights.items()):
            bar.set_postfix_str(f"file {i + 1} of {len(weights)}")
            tensors: dict[str, Tensor] = {}
            for name in names:
                tensor = writing.scratch(folder, shapes[name], reader.dtype(name))
                reader.copy(name, tensor, Placement(rank=i % ranks, size=ranks), layout)
                parts = {name_in(layout, name): tensor}
                if rounding := reader.rounding(name):
                    parts = encoded(name_in(layout, name), tensor, rounding)
                    for own, x in parts.items():
                        parts[own] = writing.scratch(folder, x.shape, x.dtype).copy_(x)
                report(sum(part.nbytes for part in parts.values()))
                tensors |= parts
            if layout == "meta":  # a tied output is a second name for the embedding's bytes
                tensors.setdefault("output.weight", tensors["tok_embeddings.weight"])
            writing.save(folder / title, tensors, report)
            total_size += sum(tensor.nbytes for tensor in tensors.values())
            title_of |= dict.fromkeys(tensors, title)
    if layout == "hf" and len(weights) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": title_of}
        writing.write_json(folder / "model.safetensors.index.json", index)
