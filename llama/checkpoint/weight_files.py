"""The weight files of a folder: which are taken, and which are left.

In: a folder. Out: `WeightFiles`, which has the layout, its files in order, and the other files of
weights there. A folder's own files come before those of `original/`, and the files that every other
program loads come before those that only this project or llama.cpp reads. The names of files
decide, the metadata of packed weights, and config.json where it names files; no tensor is opened.
"""

import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llama.checkpoint.files import read_metadata
from llama.checkpoint.foreign import describe_foreign
from llama.common.checks import brief, torchrun_number
from llama.storage import gguf
from llama.storage.downloads import read_json, shown

PACKED_PREFIX = "llama-packed/"
FETCH = "fetch a model: llama download NAME"
EXECUTORCH = "is a program of ExecuTorch, which holds no weights to load: take Meta's .pth files"
INDEX = "model.safetensors.index.json"
# The 11B vision model on Hugging Face has a file without a number, consolidated.pth.
_META_FILES = "consolidated.*pth"
_MAX_NAME_BYTES = 255  # limit of file systems for the name of a file
_NUMBERED = re.compile(r"model-\d+-of-\d+\.safetensors")
# Weights in safetensors that are no model of Hugging Face's layout: an adapter, and Meta's names.
_STRAYS = re.compile(r"(adapter_model|consolidated).*\.safetensors")
_BINS = "pytorch_model*.bin"  # what transformers wrote before safetensors
_WEIGHTS = ("*.safetensors", _META_FILES, "*.gguf", _BINS, f"original/{_META_FILES}")
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model's weights in a folder.

    Attributes:
        layout: "hf", "meta", "packed" or "gguf".
        folder: Where they are.
        files: The files in order; of a GGUF model, the first part.
        left: Other files of weights, which are not used.
    """

    layout: str
    folder: Path
    files: list[Path]
    left: tuple[Path, ...] = ()


@dataclass(frozen=True)
class _Candidate:
    """A layout of which a folder has files.

    Attributes:
        layout: The layout.
        folder: Where its files are.
        files: Those that are there; some may be missing.
        description: The file with the model's sizes; None where the weights have them.
    """

    layout: str
    folder: Path
    files: list[Path]
    description: str | None = None

    @property
    def is_described(self) -> bool:
        """Whether the file with the model's sizes is there."""
        return self.description is None or (self.folder / self.description).exists()


def weight_files(folder: Path) -> WeightFiles:
    """Return the weights that a folder holds.

    Of several layouts the first one counts whose sizes are there, too: Hugging Face's safetensors,
    Meta's .pth, pytorch_model.bin, packed weights, a GGUF file, and at last Meta's files in
    `original/`, where repositories of Hugging Face's hub have a copy of what was published.

    Raises:
        FileNotFoundError: There are no weights, or a file of them is missing.
        ValueError: It cannot be told which files are the weights.
    """
    candidates = [candidate for candidate in _candidates(folder) if candidate.files]
    if not candidates and (folder / INDEX).exists():
        _hf_shards(folder)  # raises: all files of the index are missing
    if not candidates:
        for program in folder.glob("*.pte"):
            raise ValueError(f"{program} {EXECUTORCH}")
        foreign = describe_foreign(folder)
        if foreign:
            raise ValueError(foreign)
        raise FileNotFoundError(
            f"{folder} holds no weights: neither consolidated.00.pth (nor does original/) nor "
            f"*.safetensors nor *.gguf is there; {FETCH}"
        )
    chosen = next((each for each in candidates if each.is_described), candidates[0])
    match chosen.layout:
        case "hf":
            files = _hf_shards(folder)
        case "meta":
            files = _meta_shards(chosen.folder)
        case "bin":
            single = folder / "pytorch_model.bin"
            index = folder / f"{single.name}.index.json"
            files = [single] if single.exists() else chosen.files
            if index.exists() and not single.exists():
                files = _indexed_shards(folder, index)
        case "gguf":
            files = [_only_model(folder, chosen.files)]
        case _:
            files = chosen.files
    taken = {*files, *(folder.glob("*.gguf") if chosen.layout == "gguf" else ())}
    found = itertools.chain.from_iterable(sorted(folder.glob(pattern)) for pattern in _WEIGHTS)
    left = tuple(path for path in found if path not in taken)
    layout = "hf" if chosen.layout == "bin" else chosen.layout
    return WeightFiles(layout, chosen.folder, files, left)


def log_choice(choice: str) -> None:
    """Log which weights were taken where a folder holds others, once for all ranks."""
    if choice and torchrun_number("RANK") == 0:
        _LOGGER.warning("llama: %s", choice)


def describe_choice(folder: Path, files: Sequence[Path], left: Sequence[Path]) -> str:
    """Return one line that says which weights of a folder are taken, and which are left."""
    taken_verb = "are" if files[1:] else "is"
    left_verb = "are" if left[1:] else "is"
    return (
        f"{shown(folder)} holds several weights: {_names(folder, files)} {taken_verb} taken, and "
        f"{_names(folder, left)} {left_verb} left"
    )


def _names(folder: Path, files: Sequence[Path]) -> str:
    """Return the name of the first file within a folder, and the number of the others."""
    first = shown(files[0].relative_to(folder))
    return f"{first} with {len(files) - 1} more" if files[1:] else first


def _candidates(folder: Path) -> list[_Candidate]:
    """Return all layouts in the order in which they count; their files may be none."""
    safetensors = sorted(folder.glob("*.safetensors"))
    packed = [path for path in safetensors if path.name.startswith("packed") and _is_packed(path)]
    models = {gguf.first_part(path) for path in folder.glob("*.gguf")}
    original = folder / "original"
    hugging = [path for path in safetensors if path not in packed and not _is_stray(path)]
    if hugging != safetensors:  # Names that seem to be of other models may be named there.
        hugging = _named_shards(folder) or hugging
    bins = sorted(folder.glob(_BINS))
    return [
        _Candidate("hf", folder, hugging, "config.json"),
        _Candidate("meta", folder, sorted(folder.glob(_META_FILES)), "params.json"),
        _Candidate("bin", folder, bins, "config.json"),
        _Candidate("packed", folder, packed, "params.json"),
        _Candidate("gguf", folder, sorted(models)),
        _Candidate("meta", original, sorted(original.glob(_META_FILES)), "params.json"),
    ]


def _is_packed(path: Path) -> bool:
    return read_metadata(path).get("format", "").startswith(PACKED_PREFIX)


def _is_stray(path: Path) -> bool:
    return _STRAYS.fullmatch(path.name) is not None


def _only_model(folder: Path, models: list[Path]) -> Path:
    """Return the first part of the only GGUF model in a folder."""
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:8])
        raise ValueError(f"{folder} holds {len(models)} models: give the path of one: {names}")
    return models[0]


def _meta_shards(folder: Path) -> list[Path]:
    """Return the shards of Meta's layout in order; an error names those that are missing."""
    shards: dict[int, Path] = {}
    for path in sorted(folder.glob(_META_FILES)):
        match = re.fullmatch(r"consolidated(?:\.([0-9]{1,18}))?\.pth", path.name)
        if match is None:
            raise ValueError(
                f"{shown(path)}: there is no shard number in the name: rename it or move it away"
            )
        other = shards.setdefault(int(match[1] or 0), path)
        if other != path:
            raise ValueError(f"{path} and {other.name} are the same shard: move one away")
    absent = (i for i in range(max(shards)) if i not in shards)
    missing = [f"consolidated.{i:02d}.pth" for i in itertools.islice(absent, 16)]
    if missing:
        raise FileNotFoundError(
            f"{folder} has shards up to {max(shards)}, but {', '.join(missing)} "
            f"{'are' if missing[1:] else 'is'} missing: download the rest, or {FETCH}"
        )
    return [shards[i] for i in sorted(shards)]


def _hf_shards(folder: Path) -> list[Path]:
    """Return the .safetensors files of a folder that are the model.

    As in transformers these are those that config.json names, else model.safetensors, else those
    that the index names. Without any, files that are numbered as shards come before other names.
    """
    named = _named_shards(folder)
    if named:
        return named
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    index = folder / INDEX
    if index.exists():
        return _indexed_shards(folder, index)
    files = [path for path in sorted(folder.glob("*.safetensors")) if not _is_stray(path)]
    numbered = [path for path in files if _NUMBERED.fullmatch(path.name)]
    return numbered or files


def _named_shards(folder: Path) -> list[Path]:
    """Return the files that `transformers_weights` of config.json names; none without that key.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: It names something else than a safetensors file of the folder, or an index.
    """
    config = folder / "config.json"
    name = read_json(config).get("transformers_weights") if config.is_file() else None
    if name is None:
        return []
    if not is_plain(name) or not name.endswith((".safetensors", ".safetensors.index.json")):
        raise ValueError(
            f"{config}: transformers_weights is {brief(name)}: it must name a file of this folder "
            "that ends in .safetensors or .safetensors.index.json; remove the key if the weights "
            "have their usual names"
        )
    path = folder / name
    if name.endswith(".json"):
        return _indexed_shards(folder, path)
    if not path.exists():
        raise FileNotFoundError(
            f"{config} names {name} in transformers_weights, which is missing: download it, or "
            f"{FETCH}"
        )
    return [path]


def _indexed_shards(folder: Path, index: Path) -> list[Path]:
    """Return the files that an index names."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(map(is_plain, names.values())):
        raise ValueError(f"{index}: weight_map must name a file for each tensor")
    shards = [folder / name for name in sorted(set(names.values()))]
    missing = [path.name for path in shards if not path.exists()]
    if missing:
        more = f" and {len(missing) - 8} more" if missing[8:] else ""
        original = folder / "original"
        metas = f", or give {original}" if any(original.glob(_META_FILES)) else ""
        raise FileNotFoundError(
            f"{index} names {', '.join(missing[:8])}{more}, which {'are' if missing[1:] else 'is'} "
            f"missing: download the rest, or {FETCH}{metas}"
        )
    return shards


def is_plain(name: object) -> bool:
    """Return whether a name is that of a file in the folder itself, not of a path elsewhere."""
    if not isinstance(name, str) or name in ("", "..") or not name.isprintable():
        return False
    return Path(name).name == name and len(name.encode()) <= _MAX_NAME_BYTES
