"""Write a checkpoint again: Meta's in another number of shards, or in the other layout.

In: a folder that `find` understands. Out: a new folder, complete or not there at all, with the same
values. Each file is first put together in scratch files on the same disk, so that memory holds one
tensor at most, and a laptop converts a model larger than its memory.
"""

import os
from pathlib import Path
from typing import Any, SupportsIndex

from torch import Size

from llama.checkpoint import huggingface as hf
from llama.checkpoint import writing
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.reader import CheckpointReader
from llama.checkpoint.table import name_in, shard_shapes
from llama.checkpoint.tokenizer_files import (
    load_tokenizer,
    special_ids,
    tokenizer_config,
    tokenizer_json,
)
from llama.checkpoint.writing import Progress
from llama.checks import whole_number
from llama.model.args import ModelArgs
from llama.tokenizer import Tokenizer

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
    reader = CheckpointReader(checkpoint)
    with writing.new_folder(out_dir) as folder:
        _write_shards(reader, folder, size, progress)
        for path in (checkpoint.params_path, _tokenizer_path(checkpoint)):
            if path is not None:
                writing.copy_file(path, folder / path.name)
    return writing.written(out_dir)


def convert(
    ckpt_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    progress: bool = False,
) -> list[str]:
    """Write Meta's layout as Hugging Face's, or Hugging Face's as Meta's (one shard).

    Hugging Face's folder has what `AutoTokenizer` and `AutoModelForCausalLM` of transformers read,
    the chat template among it; without a tokenizer in `ckpt_dir`, the weights and their config.
    Returns a line for each file written and one for all; `progress` draws a bar on stderr.
    ValueError or OSError, before anything is written, for a bad checkpoint or tokenizer, or an
    `out_dir` that holds something.
    """
    checkpoint = find(ckpt_dir)
    reader, path = CheckpointReader(checkpoint), _tokenizer_path(checkpoint)
    to_hf = checkpoint.layout == "meta"
    tokenizer = load_tokenizer(path, checkpoint.params) if to_hf and path else None
    with writing.new_folder(out_dir) as folder:
        if to_hf:
            _write_hf(reader, tokenizer, folder, progress)
        else:
            _write_shards(reader, folder, 1, progress)
            writing.write_json(folder / "params.json", _meta_params(checkpoint.params))
        if tokenizer and path:
            _write_tokenizer(tokenizer, path, checkpoint, folder)
        elif path:
            writing.copy_file(path, folder / path.name)
    missing = [f"no tokenizer is in {checkpoint.folder}: none was written"] * (path is None)
    return missing + writing.written(out_dir)


def _write_shards(reader: CheckpointReader, folder: Path, size: int, progress: bool) -> None:
    """consolidated.NN.pth for each of `size` ranks."""
    names = list(reader.shapes)
    files = {f"consolidated.{rank:02d}.pth": names for rank in range(size)}
    _write_files(reader, folder, files, "meta", size, progress)


def _write_hf(
    reader: CheckpointReader, tokenizer: Tokenizer | None, folder: Path, progress: bool
) -> None:
    """The weights, config.json, and where the special ids are known, generation_config.json."""
    tied = reader.params.tied_output or reader.are_equal("output.weight", "tok_embeddings.weight")
    sizes = _num_bytes(reader, reader.shapes)
    if tied:
        sizes.pop("output.weight", None)
    groups = _by_size(sizes, _FILE_BYTES)
    titles = ["model.safetensors"]
    if len(groups) > 1:
        titles = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    files = dict(zip(titles, groups, strict=True))
    _write_files(reader, folder, files, "hf", 1, progress)
    if len(files) > 1:
        index = {name_in("hf", name): title for title, names in files.items() for name in names}
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        writing.write_json(folder / "model.safetensors.index.json", content)
    dtype = reader.dtype("tok_embeddings.weight")
    ids = special_ids(tokenizer) if tokenizer else hf.metas_special_ids(reader.params)
    config = hf.config_of(reader.params, tied=tied, dtype=dtype, ids=ids)
    writing.write_json(folder / "config.json", config)
    if ids:
        writing.write_json(folder / "generation_config.json", ids | _SAMPLING)


def _write_files(
    reader: CheckpointReader,
    folder: Path,
    files: dict[str, list[str]],
    layout: str,
    size: int,
    progress: bool,
) -> None:
    """Titles and the tensors of each, by Meta's names: whole ones, or file by file the share of
    each of `size` ranks."""
    shapes = shard_shapes(reader.params, size)
    each = _num_bytes(reader, shapes)
    sizes = [sum(each[name] for name in names) for names in files.values()]
    writing.check_room(folder, sum(sizes) + max(sizes))  # all, and the scratch of one
    with Progress(sum(sizes), len(files), progress) as bar:
        for i, (title, names) in enumerate(files.items()):
            bar.begin_file(i)
            tensors = {}
            for name in names:
                tensor = writing.scratch(folder, shapes[name], reader.dtype(name))
                reader.copy(name, tensor, i % size, size, layout)
                bar.half(tensor.nbytes)
                tensors[name_in(layout, name)] = tensor
            if layout == "meta":  # a tied output is a second name for the embedding's bytes
                tensors.setdefault("output.weight", tensors["tok_embeddings.weight"])
            writing.save(folder / title, tensors, bar)


def _num_bytes(reader: CheckpointReader, shapes: dict[str, Size]) -> dict[str, int]:
    """Of tensors of these shapes, in the types of the files."""
    return {name: shape.numel() * reader.dtype(name).itemsize for name, shape in shapes.items()}


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


def _tokenizer_path(checkpoint: Checkpoint) -> Path | None:
    """None where there is none: weights alone are a checkpoint too."""
    try:
        return checkpoint.tokenizer_path()
    except FileNotFoundError:
        return None


def _write_tokenizer(
    tokenizer: Tokenizer, path: Path, checkpoint: Checkpoint, folder: Path
) -> None:
    """tokenizer.json, tokenizer_config.json and, as in Meta's releases, original/tokenizer.model.

    Beside tokenizer.json, programs would take a tokenizer.model for one of SentencePiece.
    """
    if path.suffix == ".json":
        writing.copy_file(path, folder / "tokenizer.json")
    else:
        writing.write_json(folder / "tokenizer.json", tokenizer_json(tokenizer))
        writing.copy_file(path, folder / "original" / "tokenizer.model")
    config = tokenizer_config(tokenizer, checkpoint.params, is_guard=checkpoint.is_guard)
    writing.write_json(folder / "tokenizer_config.json", config)
