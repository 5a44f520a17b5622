"""A folder that holds a model: which files are its weights, and what params.json says of it.

In: a folder with Meta's consolidated.NN.pth and params.json, in any number of shards, or with
Hugging Face's *.safetensors and config.json. Out: a `Checkpoint`; nothing is read but the JSON.
Which layout it is follows from the files there, never from a path's name.
"""

import itertools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama.args import ModelArgs
from llama.checkpoint import huggingface
from llama.checkpoint.tensor_files import broken, guess


@dataclass(frozen=True)
class Checkpoint:
    """What `find` found: nothing is read yet but the JSON."""

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
        if self.layout == "meta":  # as Meta's downloads have it: one for the sizes beside it
            near.append(self.folder.parent)
        places = [place / "tokenizer.model" for place in near]
        places.append(self.folder / "tokenizer.json")
        for path in places:
            if path.is_file():
                return path
        raise FileNotFoundError(
            f"no tokenizer: looked for {', '.join(map(str, places))}; give tokenizer_path"
        )


def find(ckpt_dir: str | os.PathLike[str]) -> Checkpoint:
    """Find a checkpoint in a folder: Meta's there or in `original/`, else Hugging Face's.

    FileNotFoundError, NotADirectoryError or ValueError name what is missing or wrong and the
    remedy.
    """
    folder = Path(ckpt_dir)
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist: give the folder that holds the weights")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: give the folder that holds the weights")
    for place in (folder, folder / "original"):
        if any(place.glob("consolidated.*.pth")):
            shards, path = _meta_shards(place), place / "params.json"
            params = ModelArgs.from_params(_read_json(path), source=str(path))
            return Checkpoint(place, params, shards, "meta")
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").exists():
        path = folder / "config.json"
        told = huggingface.params_of(_read_json(path), source=str(path))
        params = ModelArgs.from_params(told, source=str(path))
        return Checkpoint(folder, params, _hf_shards(folder), "hf")
    raise FileNotFoundError(
        f"{folder} holds no weights: neither consolidated.00.pth (nor does original/) nor "
        "*.safetensors is there; download the model into it"
    )


def _meta_shards(folder: Path) -> list[Path]:
    shards: dict[int, Path] = {}
    for path in sorted(folder.glob("consolidated.*.pth")):
        number = re.fullmatch(r"consolidated\.([0-9]+)\.pth", path.name)
        if number is None:
            raise ValueError(f"{path}: no shard number in the name: rename it or move it away")
        other = shards.setdefault(int(number[1]), path)
        if other != path:
            raise ValueError(f"{path} and {other.name} are the same shard: move one away")
    absent = (i for i in range(max(shards)) if i not in shards)
    missing = [f"consolidated.{i:02d}.pth" for i in itertools.islice(absent, 16)]
    if missing:
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
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"{index} names {', '.join(missing)}, not there: download the rest")
    return shards


def is_plain(name: object) -> bool:
    """Is it the name of a file in the folder itself?"""
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: download it from where the weights came from")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as e:  # of JSON or of UTF-8
        raise broken(path, guess(path) or f"is not JSON ({e})") from e
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object: download it again")
    return content
