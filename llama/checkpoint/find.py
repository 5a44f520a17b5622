"""A folder that holds a model: which files are its weights, and what params.json says of it.

In: a folder with Meta's consolidated.NN.pth and params.json, in any number of shards, or with
Hugging Face's *.safetensors and config.json. Out: a `Checkpoint`. The JSON is read, and of Meta's
files the names of their tensors. Which layout it is follows from the files there, never from a
path's name.
"""

import hashlib
import itertools
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama.checkpoint import huggingface
from llama.checkpoint.downloads import broken, check_utf8, read_small, shown
from llama.checkpoint.files import MappedTensor, open_tensors
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
_TOLD_BY = (
    "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "config.json",
)  # fmt: skip
_MAX_BYTES = 4 * 2**20  # of one of these
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of a file with weights


_GGUF = (
    "is a GGUF file, llama.cpp's format, which this runtime does not read: give the folder of the "
    "model's own weights, *.safetensors with config.json, or Meta's consolidated.*.pth"
)


@dataclass(frozen=True)
class Checkpoint:
    """A model in a folder; `params.tied_output`: whether output and embedding are one matrix."""

    folder: Path  # where the weights lie
    params: ModelArgs
    shards: list[Path]  # in order
    layout: str  # "meta" or "hf"

    @property
    def params_path(self) -> Path:
        return self.folder / ("params.json" if self.layout == "meta" else "config.json")

    def tokenizer_path(self) -> Path:
        """tokenizer.model or tokenizer.json beside the weights. FileNotFoundError if neither is."""
        near = [self.folder, self.folder / "original"]
        if self.layout == "meta":  # Meta's downloads have one file for the sizes beside it
            near.append(self.folder.parent)
        candidates = [folder / "tokenizer.model" for folder in near]
        candidates.append(self.folder / "tokenizer.json")
        for path in candidates:
            if path.is_file():
                return path
        raise FileNotFoundError(
            f"no tokenizer: looked for {', '.join(map(str, candidates))}; give tokenizer_path"
        )

    @property
    def is_guard(self) -> bool:
        """Whether it is Llama Guard, by what lies beside the weights.

        Llama Guard 3 has the sizes, the tensors and the tokenizer of the Llama that it was made
        from, and was trained to judge dialogs, not to call tools. The chat template, which holds
        its task, tells it, and the names that downloads have. A file that cannot be read tells
        nothing.
        """
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
    """Find a checkpoint in a folder: Meta's there or in `original/`, else Hugging Face's.

    FileNotFoundError, NotADirectoryError or ValueError name what is missing or wrong and the
    remedy.
    """
    folder = Path(ckpt_dir)
    check_utf8(folder)
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist: give the folder that holds the weights")
    if not folder.is_dir():
        if _is_gguf(folder):
            raise ValueError(f"{folder} {_GGUF}")
        raise NotADirectoryError(f"{folder} is a file: give the folder that holds the weights")
    for place in (folder, folder / "original"):
        if any(place.glob("consolidated.*.pth")):
            return _find_meta(place)
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").exists():
        return _find_hf(folder)
    if gguf := next(filter(_is_gguf, sorted(folder.glob("*.gguf"))), None):
        raise ValueError(f"{gguf} {_GGUF}")
    raise FileNotFoundError(
        f"{folder} holds no weights: neither consolidated.00.pth (nor does original/) nor "
        "*.safetensors is there; download the model into it"
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
    params = ModelArgs.from_params(_read_json(path), source=str(path))
    if not params.tied_output:
        tied = all(is_tied(open_tensors(file)) for file in shards)
        params = replace(params, tied_output=tied)
    return Checkpoint(folder, params, shards, "meta")


def _find_hf(folder: Path) -> Checkpoint:
    path = folder / "config.json"
    args = huggingface.args_of(_read_json(path), source=str(path))
    return Checkpoint(folder, args, _hf_shards(folder), "hf")


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
            "download the rest"
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
            f"{index} names {', '.join(missing[:8])}{more}, not there: download the rest"
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


def _is_gguf(path: Path) -> bool:
    return _beginning(path, 4) == b"GGUF"


def _sample(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256()
        for i in range(_SAMPLES + 1):
            file.seek(max(size - _SAMPLE_BYTES, 0) * i // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{path.name}: {size} bytes, sample {digest.hexdigest()[:8]}"


def _beginning(path: Path, size: int = _MAX_BYTES) -> bytes:
    try:
        if not path.is_file():  # a pipe would be waited for
            return b""
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""
