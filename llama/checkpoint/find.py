"""A folder that holds a model: which files are its weights, and what params.json says of it.

In: a folder with Meta's consolidated.NN.pth and params.json, in any number of shards, or with
Hugging Face's *.safetensors and config.json, or a GGUF file, in any number of parts. Out: a
`Checkpoint`. The JSON is read, of a GGUF file its header, and of Meta's files the tensors' names.
"""

import hashlib
import itertools
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama.checkpoint import gguf, gguf_args, hf_quantized, huggingface
from llama.checkpoint.downloads import broken, check_utf8, model_folder, read_small, shown
from llama.checkpoint.files import MappedTensor, open_tensors, read_metadata
from llama.checks import brief
from llama.model.args import ModelArgs

_MAX_NAME_BYTES = 255  # of a file: what file systems take
# Of Llama Guard: the name of a folder; and beside the weights, the name of the model that was
# saved, or the task in a chat template of Llama Guard 1 to 3.
_GUARD_FOLDER = re.compile(r"llama[-_ ]?guard", re.IGNORECASE)
_GUARD_FILE = re.compile(
    rb'<BEGIN UNSAFE CONTENT CATEGORIES>|"_name_or_path"\s*:\s*"[^"]*llama[-_ ]?guard',
    re.IGNORECASE,
)
_TOLD_BY = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json", "config.json")
_MAX_BYTES = 4 * 2**20  # of one of these
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of a file with weights
_PACKED = "llama-packed/"
PACKED = f"{_PACKED}2"  # the layout of packed weights: its number changes with packed_weight.h
_TOLD_BY_PACKED = {"quantize", "is_guard", "source"}
_FETCH = "fetch a model: llama download NAME"
_EXECUTORCH = "is a program of ExecuTorch, which holds no weights to load: take Meta's .pth files"


@dataclass(frozen=True)
class Checkpoint:
    """A model in a folder; `params.tied_output`: whether output and embedding are one matrix."""

    folder: Path  # where the weights lie
    params: ModelArgs
    shards: list[Path]  # in order
    layout: str  # "meta", "hf", "gguf" or "packed"
    header: gguf.Header | None = None  # of a GGUF file, or of its first part
    quantization: dict[str, Any] | None = None  # as config.json says it
    in_codes: bool = False  # whether quantized matrices are held as the file has them
    packed: dict[str, str] | None = None  # what files of packed weights say of themselves

    @property
    def weights_path(self) -> Path:
        """What the user knows the weights by: the folder, or the GGUF file, or its first part."""
        return self.shards[0] if self.layout == "gguf" else self.folder

    @property
    def file_type(self) -> str | None:
        """What people call a file of quantized weights: Q4_K_M, awq."""
        if self.packed is not None:
            return self.packed["quantize"] or None
        if self.quantization is not None:
            return str(self.quantization["quant_method"])
        return None if self.header is None else self.header.file_type

    @property
    def is_quantized(self) -> bool:
        return self.quantization is not None or bool(self.header and self.header.is_quantized)

    @property
    def params_path(self) -> Path:
        if self.layout == "gguf":
            return self.weights_path
        return self.folder / ("config.json" if self.layout == "hf" else "params.json")

    def tokenizer_path(self) -> Path:
        """The GGUF file, or tokenizer.model or tokenizer.json beside the weights. FileNotFoundError
        if neither is."""
        if self.layout == "gguf":
            return self.weights_path
        near = [self.folder, self.folder / "original"]
        if self.layout == "meta":  # Meta's downloads have one file for the sizes beside it
            near.append(self.folder.parent)
        candidates = [*(x / "tokenizer.model" for x in near), self.folder / "tokenizer.json"]
        for path in filter(Path.is_file, candidates):
            return path
        raise FileNotFoundError(
            f"no tokenizer: looked for {', '.join(map(str, candidates))}; give tokenizer_path"
        )

    @property
    def is_guard(self) -> bool:
        """Whether it is Llama Guard, which calls no tools: its sizes, tensors and tokenizer are
        those of a Llama, so that the chat template, which holds its task, and names tell it."""
        if self.packed is not None:
            return self.packed["is_guard"] == "True"
        if self.header is not None:
            template = str(self.header.metadata.get("tokenizer.chat_template")).encode()
            return bool(_GUARD_FILE.search(template) or _GUARD_FOLDER.search(self.header.file.name))
        folder = self.folder.absolute()
        model = folder.parent if folder.name == "original" else folder
        # Hugging Face's cache has models--meta-llama--Llama-Guard-3-8B/snapshots/HASH.
        named = model.parent.parent if model.parent.name == "snapshots" else model
        files = (_beginning(model / name) for name in _TOLD_BY)
        return any(map(_GUARD_FILE.search, files)) or bool(_GUARD_FOLDER.search(named.name))

    def samples(self) -> list[str]:
        """Of each file with weights a line that tells it from another one of the same size: a hash
        of its start, where names and shapes stand, of its end and of pages in between."""
        return [_sample(path) for path in self.shards]


def find(ckpt_dir: str | os.PathLike[str]) -> Checkpoint:
    """Find a checkpoint in a folder: Meta's there or in `original/`, else Hugging Face's, else the
    one GGUF file; or in a GGUF file.

    In place of a folder, the name of a model that `llama download` has fetched. FileNotFoundError,
    NotADirectoryError or ValueError name what is missing or wrong and the remedy.
    """
    folder = model_folder(ckpt_dir)
    check_utf8(folder)
    if not folder.exists():
        raise FileNotFoundError(
            f"{folder} does not exist: give the folder that holds the weights, or {_FETCH}"
        )
    if not folder.is_dir():
        if gguf.is_gguf(folder) or folder.suffix == ".gguf":  # half a download is told as such
            return _find_gguf(folder)
        if folder.suffix == ".pte":
            raise ValueError(f"{folder} {_EXECUTORCH}")
        raise NotADirectoryError(
            f"{folder} is a file: give the folder that holds the weights, or a GGUF file"
        )
    for place in (folder, folder / "original"):
        if any(place.glob("consolidated.*.pth")):
            return _find_meta(place)
    packed = sorted(folder.glob("packed*.safetensors"))
    if packed and (metadata := read_metadata(packed[0])).get("format", "").startswith(_PACKED):
        return _find_packed(folder, packed, metadata)
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").exists():
        return _find_hf(folder)
    if models := sorted({gguf.parts_of(path)[0] for path in folder.glob("*.gguf")}):
        if len(models) > 1:
            names = ", ".join(path.name for path in models[:8])
            raise ValueError(f"{folder} holds {len(models)} models: give the path of one: {names}")
        return _find_gguf(models[0])
    for program in folder.glob("*.pte"):
        raise ValueError(f"{program} {_EXECUTORCH}")
    raise FileNotFoundError(
        f"{folder} holds no weights: neither consolidated.00.pth (nor does original/) nor "
        f"*.safetensors nor *.gguf is there; {_FETCH}"
    )


def is_tied(shard: dict[str, MappedTensor]) -> bool:
    """Whether output and embedding are the same bytes in a shard of Meta's layout.

    In the .pth of 3.2 1B and 3B both names stand for one matrix, which params.json does not say.
    """
    if not shard.keys() >= {"output.weight", "tok_embeddings.weight"}:
        return False
    a, b = shard["output.weight"].data, shard["tok_embeddings.weight"].data
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _find_meta(folder: Path) -> Checkpoint:
    shards, path = _meta_shards(folder), folder / "params.json"
    content = _read_json(path)
    quantization = hf_quantized.of_params(content, str(path), len(shards))
    params = ModelArgs.from_params(content, source=str(path))
    if not params.tied_output and quantization is None:
        tied = all(is_tied(open_tensors(file)) for file in shards)
        params = replace(params, tied_output=tied)
    if (folder / "fp8_scales_0.pt").exists():
        quantization = {"quant_method": "fp8"}
    return Checkpoint(folder, params, shards, "meta", quantization=quantization)


def _find_hf(folder: Path) -> Checkpoint:
    path = folder / "config.json"
    config = _read_json(path)
    args = huggingface.args_of(config, source=str(path))
    quantization = config.get("quantization_config")
    if quantization is None and (folder / "hf_quant_config.json").exists():
        quantization = {"quant_method": "modelopt"}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if quantization is not None and method not in hf_quantized.METHODS:
        raise ValueError(
            f"{path}: quantization_config is of {brief(method)}, and this runtime reads "
            f"{', '.join(hf_quantized.METHODS)}: get the model in one of these, or in bfloat16"
        )
    return Checkpoint(folder, args, _hf_shards(folder), "hf", quantization=quantization)


def _find_packed(folder: Path, files: list[Path], metadata: dict[str, str]) -> Checkpoint:
    source = brief(metadata.get("source", "IN"))[1:-1]
    if metadata["format"] != PACKED or files[1:] or not metadata.keys() >= _TOLD_BY_PACKED:
        raise ValueError(
            f"{folder} has weights in the layout {brief(metadata['format'])} in {len(files)} "
            f"file(s), and this version of llama reads {PACKED} in one: make it anew: llama "
            f"convert {source} OUT --packed"
        )
    path = folder / "params.json"
    params = ModelArgs.from_params(_read_json(path), source=str(path))
    return Checkpoint(folder, params, files, "packed", packed=metadata)


def _find_gguf(path: Path) -> Checkpoint:
    headers = gguf.read_headers(path)
    files = [header.file for header in headers]
    return Checkpoint(path.parent, gguf_args.args_of(headers), files, "gguf", headers[0])


def _meta_shards(folder: Path) -> list[Path]:
    shards: dict[int, Path] = {}
    for path in sorted(folder.glob("consolidated.*.pth")):
        number = re.fullmatch(r"consolidated\.([0-9]{1,18})\.pth", path.name)
        if number is None:
            raise ValueError(
                f"{shown(path)}: no shard number in the name: rename it or move it away"
            )
        other = shards.setdefault(int(number[1]), path)
        if other != path:
            raise ValueError(f"{path} and {other.name} are the same shard: move one away")
    absent = (i for i in range(max(shards)) if i not in shards)
    if missing := [f"consolidated.{i:02d}.pth" for i in itertools.islice(absent, 16)]:
        raise FileNotFoundError(
            f"{folder} has shards up to {max(shards)}, but {', '.join(missing)} missing: "
            f"download the rest, or {_FETCH}"
        )
    return [shards[i] for i in sorted(shards)]


def _hf_shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(map(is_plain, names.values())):
        raise ValueError(f"{index}: weight_map must name a file for each tensor: fetch it again")
    shards = [folder / name for name in sorted(set(names.values()))]
    if missing := [path.name for path in shards if not path.exists()]:
        more = f" and {len(missing) - 8} more" if missing[8:] else ""
        raise FileNotFoundError(
            f"{index} names {', '.join(missing[:8])}{more}, not there: download the rest, or "
            f"{_FETCH}"
        )
    return shards


def is_plain(name: object) -> bool:
    """Is it the name of a file in the folder itself?"""
    if not isinstance(name, str) or name in ("", "..") or not name.isprintable():
        return False
    return Path(name).name == name and len(name.encode()) <= _MAX_NAME_BYTES


def _read_json(path: Path) -> dict[str, Any]:
    data = read_small(path)
    try:
        content = json.loads(data)
    except RecursionError:
        raise broken(path, "is not JSON of a model: it is nested too deeply") from None
    except ValueError as e:  # of JSON or of UTF-8
        raise broken(path, f"is not JSON ({brief(str(e))})") from e
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object: download it again")
    return content


def _sample(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256()
        for i in range(_SAMPLES + 1):
            file.seek(max(size - _SAMPLE_BYTES, 0) * i // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{path.name}: {size} bytes, sample {digest.hexdigest()[:8]}"


def _beginning(path: Path) -> bytes:
    try:
        if not path.is_file():  # a pipe would be waited for
            return b""
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return b""
