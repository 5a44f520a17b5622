"""Write a checkpoint again: in other shards, in another layout, merged, quantized or packed.

In: what `find` understands. Out: a new folder or GGUF file, complete or not there at all. The
values are the same, those of quantized files in bfloat16, unless adapters are merged or matrices
are quantized on the way. Memory holds one tensor at most, so that a laptop converts a model larger
than its memory.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsIndex

import torch

from llama.checkpoint import packed
from llama.checkpoint.chat_templates import find_chat_templates
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.hf import config as hf
from llama.checkpoint.hf import vision as hf_vision
from llama.checkpoint.hf.tokenizer import special_ids, tokenizer_config, tokenizer_json
from llama.checkpoint.memory import bytes_of
from llama.checkpoint.reader import CheckpointReader
from llama.checkpoint.tokenizer_files import load_tokenizer, tokenizer_for_meta
from llama.checkpoint.weight_files import log_choice
from llama.checkpoint.write import atomic as writing
from llama.checkpoint.write.folder import (
    ConversionReader,
    OutputFolder,
    progress_bar,
    write_folder,
    write_other_files,
)
from llama.checkpoint.write.params import meta_params
from llama.checkpoint.write.quantize import GGUF_FORMATS, check_activations, quantization_config
from llama.checkpoint.write.settings_files import (
    PROCESSOR_FILE,
    FileContent,
    further_config,
    left_out,
    settings_files,
)
from llama.common.checks import FieldError, brief, whole_number
from llama.common.extras import install_hint
from llama.kernels.cpu import native
from llama.model.args import ModelArgs
from llama.ranks.placement import WHOLE
from llama.tokenizer import Tokenizer
from llama.weights.choice import QUANTIZED, check_quantize

_FILE_BYTES = 5_000_000_000  # limit for one .safetensors file, unless it holds a single tensor
_MAX_SHARDS = 4096
Lora = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
_SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}  # Meta's defaults


def reshard(
    ckpt_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    model_parallel_size: SupportsIndex,
    *,
    progress: bool = False,
) -> list[str]:
    """Write a checkpoint of Meta's layout again, in `model_parallel_size` shards.

    With more shards than key-value heads, each head is written to several shards.

    Args:
        ckpt_dir: The checkpoint.
        out_dir: The new folder.
        model_parallel_size: The number of shards.
        progress: Whether a bar is drawn on stderr.

    Returns:
        A line for each file written and one for all.

    Raises:
        TypeError: The number of shards is not an integer.
        ValueError: It does not divide the model; and as `convert` does.
        OSError: As `convert` does.
    """
    size = whole_number("model_parallel_size", model_parallel_size, 1, _MAX_SHARDS)
    checkpoint = find(ckpt_dir).with_images()
    log_choice(checkpoint.choice)
    reader = ConversionReader(checkpoint)
    if checkpoint.layout != "meta":
        raise ValueError(f"{checkpoint.weights_path} is not in Meta's layout: convert it first")
    checkpoint.params.check_shards(size)
    output = OutputFolder("meta", _shards(reader, size))
    for path in (checkpoint.params_path, *_tokenizer_paths(checkpoint)):
        output.others[path.name] = path
    output.others |= settings_files(checkpoint, {}, has_config=False)
    if checkpoint.is_quantized:
        output.others["params.json"] = meta_params(checkpoint.params)
    return write_folder(reader, output, out_dir, progress)


def convert(
    ckpt_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    quantize: str | None = None,
    activations: str | None = None,
    lora: Lora = None,
    images: bool = True,
    progress: bool = False,
) -> list[str]:
    """Write Meta's layout or GGUF as Hugging Face's, or Hugging Face's as Meta's (one shard).

    Hugging Face's folder has what `AutoTokenizer` and `AutoModelForCausalLM` of transformers read;
    without a tokenizer in `ckpt_dir`, the weights and their config. An `out_dir` that ends in .gguf
    becomes a file for llama.cpp. Chat templates and settings are kept, and the first lines of the
    result name the keys that the new files have no place for.

    Args:
        ckpt_dir: The checkpoint.
        out_dir: The new folder or file.
        quantize: A format of `build`: then Hugging Face's layout is written from any layout, with
            the matrices of the layers as compressed-tensors stores them. For a GGUF file, "q8_0" or
            "q4_0"; without it the file is in bf16.
        activations: One of `quantize.ACTIVATIONS`, which writes a W8A8 folder: the programs that
            run it round the inputs of these matrices, too, with a scale for each token.
        lora: Adapters of `build` that are merged first: then, too, a folder is written in Hugging
            Face's layout from any layout.
        images: Whether all of a vision model is written. Else, and in a GGUF file, its text model
            is.
        progress: Whether a bar is drawn on stderr.

    Returns:
        Lines about what was left out, a line for each file written and one for all.

    Raises:
        OSError: A file cannot be read or written, or `out_dir` holds something.
        ValueError: The checkpoint or its tokenizer is bad, `quantize` or `activations` is unknown,
            or the two do not fit. All are raised before anything is written, unless the disk fails.
    """
    to_gguf = Path(out_dir).suffix.lower() == ".gguf"
    _check_quantize_name(quantize, to_gguf)
    check_activations(activations, quantize)
    checkpoint = _find_generating(ckpt_dir, images=images and not to_gguf).merged_with(lora)
    reader = ConversionReader(checkpoint, quantize, activations)
    if to_gguf:
        return _write_gguf(checkpoint, reader, Path(out_dir), progress)
    tokenizer = _tokenizer_paths(checkpoint)
    if checkpoint.layout != "hf" or quantize or lora:
        output = _hf_output(checkpoint, reader, tokenizer)
    else:
        output = OutputFolder("meta", _shards(reader, 1))
        if tokenizer:
            path = tokenizer_for_meta(checkpoint)
            output.others[path.name] = path
        output.others["params.json"] = meta_params(checkpoint.params)
        output.others |= settings_files(checkpoint, {}, has_config=False)
    lines = _notes(checkpoint, output.layout)
    return lines + write_folder(reader, output, out_dir, progress)


def pack(
    ckpt_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    quantize: str | None = None,
    lora: Lora = None,
    images: bool = True,
    progress: bool = False,
) -> list[str]:
    """Write a checkpoint as `build` stores it in the memory of a CPU.

    Such packed weights are mapped, and neither read nor packed, by any number of ranks.

    Args:
        ckpt_dir: The checkpoint.
        out_dir: The new folder.
        quantize: As for `build`. None keeps the codes of quantized files.
        lora: Adapters of `build` that are merged first. Into codes none can be merged.
        images: Whether all of a vision model is written, or its text model.
        progress: Whether a bar is drawn on stderr.

    Returns:
        A line for each file written and one for all.

    Raises:
        OSError: As `convert` does.
        ValueError: As `convert` does, or the CPU kernels do not run here.
    """
    check_quantize(quantize, torch.bfloat16, torch.device("cpu"))
    if Path(out_dir).suffix.lower() == ".gguf":
        raise ValueError(f"{Path(out_dir)}: packed weights are a folder: give it another name")
    if native.kernels() is None:
        raise ValueError(
            "packed weights are for this project's CPU kernels, which do not run here (`llama "
            "doctor` tells why)"
        )
    checkpoint = _find_generating(ckpt_dir, images=images)
    in_codes = checkpoint.is_quantized and quantize is None
    if in_codes and lora:
        raise ValueError(
            f"{checkpoint.weights_path} keeps the codes of {checkpoint.file_type} when it is "
            "packed, into which no adapter can be merged: give --quantize, or first write a folder "
            "in bf16 without --packed, and pack that"
        )
    checkpoint = replace(checkpoint.merged_with(lora), in_codes=in_codes)
    others = _packed_others(checkpoint) | _lora_file(checkpoint)
    CheckpointReader(checkpoint)  # raises for wrong names and shapes before anything is written
    size = bytes_of(checkpoint, WHOLE, torch.bfloat16, quantize, torch.device("cpu"))
    with writing.new_folder(out_dir) as folder:
        writing.check_free_space(folder, size)
        packed.write(checkpoint, folder, quantize, progress)
        write_other_files(others, folder)
        writing.write_checksums(folder)
    return _notes(checkpoint, "packed") + writing.describe(out_dir)


def _packed_others(checkpoint: Checkpoint) -> dict[str, FileContent]:
    """Return the files alongside packed weights: params.json, the tokenizer and the settings."""
    params = meta_params(checkpoint.params)
    if checkpoint.params.tied_output:
        params["tied_output"] = True
    others: dict[str, FileContent] = {"params.json": params}
    ids = {}
    for path in _tokenizer_paths(checkpoint):
        tokenizer = load_tokenizer(checkpoint)
        ids = special_ids(tokenizer)
        if checkpoint.layout == "gguf":
            others["tokenizer.json"] = tokenizer_json(tokenizer)
            others["tokenizer_config.json"] = _tokenizer_config(checkpoint, tokenizer)
        else:
            others[path.name] = path
    return others | settings_files(checkpoint, ids, has_config=False)


def _tokenizer_config(checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokenizer_config.json for a checkpoint that has none.

    Meta's files hold no chat template, so that the one of their format is written, unless another
    is alongside them. To files of other layouts none is added.
    """
    config = tokenizer_config(tokenizer, checkpoint.params, is_guard=checkpoint.is_guard)
    if checkpoint.layout != "meta" or find_chat_templates(checkpoint):
        del config["chat_template"]
    return config


def _check_quantize_name(quantize: str | None, to_gguf: bool) -> None:
    """Raise ValueError unless a folder, or a GGUF file, can be written in a format."""
    known = GGUF_FORMATS if to_gguf else QUANTIZED
    if quantize is not None and quantize not in known:
        out = "an OUT that ends in .gguf" if to_gguf else "a folder OUT"
        text = f"={brief(quantize)}: give one of {', '.join(known)} for {out}"
        raise FieldError.of("quantize", text)


def _tokenizer_paths(checkpoint: Checkpoint) -> list[Path]:
    """Return the path of the tokenizer, or none: a checkpoint may be weights alone."""
    try:
        return [checkpoint.tokenizer_path()]
    except FileNotFoundError:
        return []


def _notes(checkpoint: Checkpoint, target: str) -> list[str]:
    """Return the lines that say what a conversion did not write.

    Args:
        checkpoint: What is converted.
        target: "hf", "meta", "gguf" or "packed".
    """
    config = _config(checkpoint.params, tied=False, dtype=torch.bfloat16, ids={})
    lines = left_out(checkpoint, target, config.keys())
    if checkpoint.vision is not None and checkpoint.params.vision is None:
        lines.insert(0, f"{checkpoint.weights_path} is {checkpoint.vision.describe()}")
    if not _tokenizer_paths(checkpoint):
        lines.insert(0, f"no tokenizer is in {checkpoint.folder}: none was written")
    return lines


def _write_gguf(
    checkpoint: Checkpoint, reader: ConversionReader, out: Path, progress: bool
) -> list[str]:
    try:
        from llama.checkpoint.gguf.writing import gguf_content
    except ModuleNotFoundError as e:
        hint = install_hint("gguf")
        raise ValueError(
            f"{out}: a GGUF file needs {e.name}, which is not installed: {hint}"
        ) from None
    content = gguf_content(checkpoint, reader, _names(reader), reader.quantize)
    with (
        writing.new_folder(out) as folder,
        progress_bar(content.num_bytes, progress) as bar,
    ):
        path = folder / out.name
        with writing.disk_errors(path):
            content.write_header(path)
        writing.append_bytes(path, content.num_bytes, content.pieces(), bar.update)
    return _notes(checkpoint, "gguf") + writing.describe(out)


def _names(reader: CheckpointReader) -> list[str]:
    """Return the names of all tensors, without lm_head where it equals the embedding."""
    names = list(reader.shapes)
    if names[-1] == "output.weight" and reader.are_equal(names[-1], names[0]):
        names.pop()
    return names


def _shards(reader: CheckpointReader, size: int) -> dict[str, list[str]]:
    """Return Meta's files for `size` ranks: each has a share of every tensor."""
    return {f"consolidated.{rank:02d}.pth": list(reader.shapes) for rank in range(size)}


def _hf_weights(reader: ConversionReader) -> dict[str, list[str]]:
    """Return Hugging Face's files: the tensors in order, up to _FILE_BYTES in each."""
    sizes = reader.num_bytes("hf", 1)
    groups: list[list[str]] = []
    free_bytes = 0
    for name in _names(reader):
        if sizes[name] > free_bytes:
            groups.append([])
            free_bytes = _FILE_BYTES
        groups[-1].append(name)
        free_bytes -= sizes[name]
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": x for i, x in enumerate(groups, 1)}


def _hf_output(
    checkpoint: Checkpoint, reader: ConversionReader, tokenizer_paths: list[Path]
) -> OutputFolder:
    """Return Hugging Face's folder: weights, configurations and the tokenizer.

    As in Meta's releases, tokenizer.model is in original/: alongside tokenizer.json, programs would
    take it for a SentencePiece model.
    """
    params = checkpoint.params
    output = OutputFolder("hf", _hf_weights(reader))
    ids = hf.default_special_ids(params)
    for path in tokenizer_paths:
        tokenizer = load_tokenizer(checkpoint)
        ids = special_ids(tokenizer)
        is_json = path.suffix == ".json"
        output.others["tokenizer.json"] = path if is_json else tokenizer_json(tokenizer)
        output.others["tokenizer_config.json"] = _tokenizer_config(checkpoint, tokenizer)
        if path.name == "tokenizer.model":
            output.others["original/tokenizer.model"] = path
    tied = all("output.weight" not in names for names in output.weights.values())
    config = _config(params, tied=tied, dtype=reader.dtype("norm.weight"), ids=ids)
    config |= further_config(checkpoint, config)
    if reader.quantize:
        config["quantization_config"] = quantization_config(
            reader.quantize, reader.activations, has_images=params.vision is not None
        )
    output.others["config.json"] = config
    if ids and checkpoint.layout == "meta":
        output.others["generation_config.json"] = ids | _SAMPLING
    if params.vision is not None:
        output.others[PROCESSOR_FILE] = hf_vision.processor_config(params.vision)
    output.others |= settings_files(checkpoint, ids, has_config=True)
    output.others |= _lora_file(checkpoint)
    return output


def _config(args: ModelArgs, **settings: Any) -> dict[str, Any]:
    """Return the config.json of a model; see `llama.checkpoint.hf.config.config_of`."""
    config = hf.config_of(args, **settings)
    return config if args.vision is None else hf_vision.config_of(config, args)


def _lora_file(checkpoint: Checkpoint) -> dict[str, FileContent]:
    """Return the file that names the adapters that were merged, if there are any."""
    if not checkpoint.adapters:
        return {}
    adapters = [
        {"name": x.folder.resolve().name, "sha256": x.digest()} for x in checkpoint.adapters
    ]
    return {"lora.json": {"merged": adapters}}


def _find_generating(ckpt_dir: str | os.PathLike[str], *, images: bool) -> Checkpoint:
    """Find a checkpoint, and raise a ValueError if no other layout has a place for what it is.

    Args:
        ckpt_dir: The checkpoint.
        images: Whether the parts of a vision model that read images belong to it.
    """
    checkpoint = find(ckpt_dir)
    if images:
        checkpoint = checkpoint.with_images()
    log_choice(checkpoint.choice)
    if checkpoint.why_silent:
        raise ValueError(
            f"{checkpoint.folder} cannot be converted: {checkpoint.why_silent}, and this runtime "
            "reads such models in Hugging Face's layout alone: build with quantize=... instead"
        )
    return checkpoint
