"""A folder that holds a model: which files are its weights, and what params.json says of it.

In: a folder with Meta's consolidated.NN.pth and params.json, in any number of shards, or with
Hugging Face's *.safetensors and config.json, or with packed weights; or a GGUF file, in any number
of parts. Out: a `Checkpoint`. The JSON files are read, the header of a GGUF file, and the names of
the tensors in Meta's files; no tensor is.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama.checkpoint import guard, meta_quantized
from llama.checkpoint.alike import is_lm_head_the_embedding
from llama.checkpoint.files import MappedTensor, read_metadata
from llama.checkpoint.gguf import args as gguf_args
from llama.checkpoint.hf import config as huggingface
from llama.checkpoint.hf import quantized as hf_quantized
from llama.checkpoint.hf.quantization import quantization_of
from llama.checkpoint.lora.adapters import Adapter, open_adapters
from llama.checkpoint.names import open_model_tensors
from llama.checkpoint.pooling import GENERATES, PoolingSettings, is_causal, settings_of
from llama.checkpoint.vision import VisionParts, split_config, split_params
from llama.checkpoint.weight_files import (
    EXECUTORCH,
    FETCH,
    PACKED_PREFIX,
    describe_choice,
    weight_files,
)
from llama.common.checks import FieldPathError, brief, errors_in_file
from llama.model.args import ModelArgs
from llama.storage import gguf
from llama.storage.downloads import check_utf8, read_json, shown
from llama.storage.hub import model_folder
from llama.weights.choice import GGUF_ACTIVATIONS

_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096
PACKED_FORMAT = f"{PACKED_PREFIX}2"  # the number changes when packed_weight.h changes the layout
_PACKED_KEYS = {"quantize", "is_guard", "source"}


@dataclass(frozen=True)
class Checkpoint:
    """A model in a folder.

    Attributes:
        folder: The folder of the weights.
        params: The model's sizes. `tied_output` says whether lm_head and embedding are one matrix.
        shards: The files of weights, in order.
        layout: "meta", "hf", "gguf" or "packed".
        header: The header of a GGUF file, or of its first part.
        quantization: The quantization_config, as `quantization_of` returns it.
        in_codes: Whether quantized matrices keep the codes of the file when they are loaded.
        packed: The metadata of a file of packed weights.
        vision: What the files hold besides the text model that is loaded; None: nothing.
        adapters: The adapters that are merged into the tensors while these are read, in order.
        base_params: The sizes of the model in the files, where adapters change them.
        pooling: What the files say about embeddings and scores of whole prompts.
        left: Other files of weights in the folder that was given, which are not used.
    """

    folder: Path
    params: ModelArgs
    shards: list[Path]
    layout: str
    header: gguf.Header | None = None
    quantization: dict[str, Any] | None = None
    in_codes: bool = False
    packed: dict[str, str] | None = None
    vision: VisionParts | None = None
    adapters: tuple[Adapter, ...] = ()
    base_params: ModelArgs | None = None
    pooling: PoolingSettings = GENERATES
    left: tuple[Path, ...] = ()

    def merged_with(
        self, lora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
    ) -> "Checkpoint":
        """Return the same checkpoint with adapters, as `build` takes them, merged into it.

        Raises:
            OSError: A file of an adapter is missing or cannot be read.
            ValueError: An adapter does not fit the model, or the weights are packed.
        """
        if not lora:
            return self
        if self.packed is not None:
            source = shown(self.packed["source"])
            raise ValueError(
                f"{self.folder} holds packed weights, into which no adapter can be merged: make "
                f"another folder: llama convert {source} OUT --packed --lora ADAPTER"
            )
        adapters = open_adapters(lora, self.params)
        is_tied = self.params.tied_output and not any(adapter.unties for adapter in adapters)
        vocab_size = adapters[-1].vocab_size
        params = replace(self.params, tied_output=is_tied, vocab_size=vocab_size)
        return replace(self, params=params, adapters=adapters, base_params=self.params)

    def with_images(self) -> "Checkpoint":
        """Return the same checkpoint with the parts that read images, if its files hold them.

        Raises:
            ValueError: The files describe other parts than those of Llama 3.2 Vision.
        """
        if self.vision is None or not self.vision.settings:
            return self
        source = str(self.params_path)
        params = replace(self.params, vision=self.vision.args(source))
        params.check(source)
        return replace(self, params=params, vision=replace(self.vision, reads_images=True))

    @property
    def why_silent(self) -> str:
        """Why the model cannot generate text; empty if it can."""
        if not self.params.is_causal:
            return "its attention is bidirectional"
        if self.pooling.has_lm_head:
            return ""
        return f"its files ({self.pooling.architecture}) have no lm_head"

    @property
    def purpose(self) -> str:
        """The use of the model alongside generating, or instead; empty if its files say nothing."""
        parts = [self.pooling.describe()]
        if self.why_silent:
            parts.append(f"generates nothing, as {self.why_silent}")
        return "; ".join(part for part in parts if part)

    @property
    def choice(self) -> str:
        """The line about which weights were taken; empty if the folder holds no others."""
        if not self.left:
            return ""
        folder = self.folder.parent if self._is_in_original else self.folder
        return describe_choice(folder, self.shards, self.left)

    @property
    def _is_in_original(self) -> bool:
        return self.layout == "meta" and self.folder.absolute().name == "original"

    @property
    def params_of_files(self) -> ModelArgs:
        """The sizes of the model in the files, before adapters are merged."""
        return self.base_params or self.params

    @property
    def weights_path(self) -> Path:
        """The path that a user knows the weights by: the folder, or the first GGUF file."""
        return self.shards[0] if self.layout == "gguf" else self.folder

    @property
    def model_folder(self) -> Path:
        """The folder of the model, which in Meta's releases may hold the weights in original/."""
        folder = self.folder.absolute()
        return folder.parent if self._is_in_original else folder

    @property
    def source_layout(self) -> str:
        """The layout, or that of the files from which packed weights were made."""
        if self.packed is not None:
            return self.packed.get("layout", "meta")  # Older files do not say it.
        return self.layout

    @property
    def file_type(self) -> str | None:
        """The usual name of the quantization, such as Q4_K_M or awq; None if there is none."""
        if self.packed is not None:
            return self.packed["quantize"] or None
        if self.quantization is not None:
            return str(self.quantization["quant_method"])
        return None if self.header is None else self.header.file_type

    @property
    def activations(self) -> str | None:
        """The value of `activations=` that the files ask for."""
        if self.packed is not None:
            return self.packed.get("activations") or None
        if self.layout == "gguf":
            return GGUF_ACTIVATIONS if self.is_quantized else None
        return hf_quantized.activations_of(self.quantization or {})

    @property
    def is_quantized(self) -> bool:
        """Whether any matrix of the files is quantized; packed weights do not count."""
        return self.quantization is not None or bool(self.header and self.header.is_quantized)

    @property
    def params_path(self) -> Path:
        """The file with the model's sizes."""
        if self.layout == "gguf":
            return self.weights_path
        return self.folder / ("config.json" if self.layout == "hf" else "params.json")

    def tokenizer_path(self) -> Path:
        """Return the GGUF file, or tokenizer.model or tokenizer.json alongside the weights.

        In Hugging Face's layout tokenizer.json comes first: a fine-tune may have a copy of Meta's
        original/tokenizer.model, which does not name the tokens that were added or renamed. An
        adapter that adds rows for tokens may have a tokenizer.json that names them.

        Raises:
            FileNotFoundError: There is none.
        """
        for adapter in reversed(self.adapters):
            path = adapter.folder / "tokenizer.json"
            if adapter.vocab_size > self.params_of_files.vocab_size and path.is_file():
                return path
        if self.layout == "gguf":
            return self.weights_path
        folders = [self.folder, self.folder / "original"]
        if self.layout == "meta":  # Meta's downloads have one tokenizer above the models' folders
            folders.append(self.folder.parent)
        candidates = [folder / "tokenizer.model" for folder in folders]
        json_path = self.folder / "tokenizer.json"
        candidates.insert(0 if self.layout == "hf" else len(candidates), json_path)
        for path in candidates:
            if path.is_file():
                return path
        raise FileNotFoundError(
            f"no tokenizer: looked for {', '.join(map(str, candidates))}; give tokenizer_path"
        )

    @property
    def is_guard(self) -> bool:
        """Whether the model is Llama Guard, which calls no tools.

        Its sizes, tensors and tokenizer are those of a Llama, so that only its chat template, which
        holds its task, and the names of model and folder tell.
        """
        if self.packed is not None:
            return self.packed["is_guard"] == "True"
        if self.header is not None:
            return guard.is_in_gguf(self.header)
        return guard.is_in_folder(self.model_folder)

    def samples(self) -> list[str]:
        """Return a line for each file of weights that differs between files of the same size.

        It has a hash of the file's start, which holds names and shapes, of its end, and of pages in
        between. Adapters, which are smaller, are hashed whole.
        """
        adapters = [f"lora: SHA-256 {adapter.digest()}" for adapter in self.adapters]
        return adapters + [_sample(path) for path in self.shards]


def find(ckpt_dir: str | os.PathLike[str]) -> Checkpoint:
    """Find the checkpoint in a folder or a GGUF file.

    Which files of a folder are its weights, `weight_files` says. The name of a model that `llama
    download` has fetched stands for its folder.

    Raises:
        OSError: The path does not exist, is no folder, or a file is missing.
        ValueError: A file is not what this runtime reads. Both name the remedy.
    """
    path = model_folder(ckpt_dir)
    check_utf8(path)
    if not path.exists():
        raise FieldPathError(
            "ckpt_dir", f"{path} does not exist: give the folder that holds the weights, or {FETCH}"
        )
    if path.is_dir():
        return _find_in_folder(path)
    if gguf.is_gguf(path) or path.suffix == ".gguf":  # the suffix alone: an unfinished download
        return _find_gguf(path)
    if path.suffix == ".pte":
        raise ValueError(f"{path} {EXECUTORCH}")
    raise NotADirectoryError(
        f"{path} is a file: give the folder that holds the weights, or a GGUF file"
    )


def _find_in_folder(folder: Path) -> Checkpoint:
    weights = weight_files(folder)
    match weights.layout:
        case "hf":
            with errors_in_file(folder / "config.json"):
                checkpoint = _find_hf(folder, weights.files)
        case "meta":
            with errors_in_file(weights.folder / "params.json"):
                checkpoint = _find_meta(weights.folder, weights.files)
        case "packed":
            with errors_in_file(folder / "params.json"):
                checkpoint = _find_packed(folder, weights.files)
        case _:
            checkpoint = _find_gguf(weights.files[0])
    return replace(checkpoint, left=weights.left)


def is_tied(shard: dict[str, MappedTensor]) -> bool:
    """Return whether lm_head and embedding are the same bytes in a shard of Meta's layout.

    In the .pth of Llama 3.2 1B and 3B both names stand for one matrix, which params.json does not
    say.
    """
    if not shard.keys() >= {"output.weight", "tok_embeddings.weight"}:
        return False
    output = shard["output.weight"].data
    embedding = shard["tok_embeddings.weight"].data
    return (
        output.data_ptr() == embedding.data_ptr()
        and output.shape == embedding.shape
        and output.stride() == embedding.stride()
    )


def _find_meta(folder: Path, shards: list[Path]) -> Checkpoint:
    path = folder / "params.json"
    content, vision_parts = split_params(read_json(path), str(path))
    quantization = meta_quantized.config_of(content, str(path), len(shards))
    params = ModelArgs.from_params(content, source=str(path))
    if not params.tied_output and quantization is None:
        tied = all(is_tied(open_model_tensors(file)) for file in shards)
        params = replace(params, tied_output=tied)
    if (folder / "fp8_scales_0.pt").exists():
        quantization = {"quant_method": "fp8"}
    return Checkpoint(
        folder, params, shards, "meta", quantization=quantization, vision=vision_parts
    )


def _find_hf(folder: Path, shards: list[Path]) -> Checkpoint:
    path = folder / "config.json"
    config = read_json(path)
    text_config, vision_parts = split_config(config, str(path))
    args = huggingface.args_of(text_config, source=str(path))
    quantization = quantization_of(folder, config)
    pooling = settings_of(folder, config)
    if args.tied_output and pooling.has_lm_head and not is_lm_head_the_embedding(shards):
        args = replace(args, tied_output=False)
    if not pooling.has_lm_head:
        args = replace(args, tied_output=True)  # so that no lm_head is expected, and none is made
    return Checkpoint(
        folder,
        replace(args, is_causal=is_causal(config)),
        shards,
        "hf",
        quantization=quantization,
        vision=vision_parts,
        pooling=pooling,
    )


def _find_packed(folder: Path, files: list[Path]) -> Checkpoint:
    metadata = read_metadata(files[0])
    is_known = metadata["format"] == PACKED_FORMAT and metadata.keys() >= _PACKED_KEYS
    if not is_known or len(files) > 1:
        source = brief(metadata.get("source", "IN"))[1:-1]
        raise ValueError(
            f"{folder} has weights in the layout {brief(metadata['format'])} in {len(files)} "
            f"file(s), and this version of llama reads {PACKED_FORMAT} in one: write it again: "
            f"llama convert {source} OUT --packed"
        )
    path = folder / "params.json"
    content, vision_parts = split_params(read_json(path), str(path))
    params = ModelArgs.from_params(content, source=str(path))
    return Checkpoint(folder, params, files, "packed", packed=metadata, vision=vision_parts)


def _find_gguf(path: Path) -> Checkpoint:
    with errors_in_file(path):
        headers = gguf.read_headers(path)
        args = gguf_args.args_of(headers)
    files = [header.file for header in headers]
    return Checkpoint(path.parent, args, files, "gguf", headers[0])


def _sample(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        last = max(size - _SAMPLE_BYTES, 0)
        for i in range(_NUM_SAMPLES + 1):
            file.seek(last * i // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{path.name}: {size} bytes, sample {digest.hexdigest()[:8]}"
