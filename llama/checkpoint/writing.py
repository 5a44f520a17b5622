"""A new folder of weights, written so that it is complete or not there at all.

Its files have the permissions that the umask gives. Tensors wait in scratch files on the same disk;
one that cannot take them is an OSError that names it.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm.utils import CallbackIOWrapper

from llama.checkpoint.downloads import check_utf8


@contextlib.contextmanager
def new_folder(out_dir: str | os.PathLike[str]) -> Iterator[Path]:
    """A draft folder beside `out_dir`: renamed to it at the end, removed if the block fails. A file
    of its name in the draft is all of it. A process that is killed leaves `out_dir`.partial."""
    check_utf8(Path(out_dir))
    out = Path(out_dir).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(
            f"{out} holds something: give a new folder or file, nothing is overwritten"
        )
    draft = out.with_name(out.name + ".partial")
    if draft.exists():
        raise FileExistsError(f"{draft} was left by a run that was cut off: remove it if none runs")
    try:
        draft.mkdir(parents=True)
    except OSError as e:
        raise OSError(f"{out} cannot be made ({e.strerror}): give another folder") from e
    try:
        yield draft
        file = draft / out.name
        if file.exists() and out.is_dir():
            out.rmdir()
        (file if file.exists() else draft).replace(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def save_bytes(
    path: Path, total: int, pieces: Iterable[bytes], report: Callable[[int], object]
) -> None:
    """Write a file of `total` bytes; `report` is told how many it has more."""
    check_room(path.parent, total)
    with _disk_errors(path), path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            report(len(piece))


def check_room(folder: Path, needed: int) -> None:
    """OSError unless the disk has `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder.parent} has {free / 1e9:.3g} GB free, and writing takes {needed / 1e9:.3g} "
            "GB: free some, or give a folder on another disk"
        )


def scratch(folder: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor in a file that is already unlinked: it uses disk, not memory, while it exists."""
    path = folder / "scratch"
    with _disk_errors(path), path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            # A write to a mapping for which the disk has no room would kill the process.
            os.posix_fallocate(file.fileno(), 0, shape.numel() * dtype.itemsize)
        flat = torch.from_file(str(path), shared=True, size=shape.numel(), dtype=dtype)
        path.unlink()
    return flat.view(shape)


def save(path: Path, tensors: dict[str, Tensor], report: Callable[[int], None]) -> None:
    """Write a .pth or a .safetensors; `report` is told how many bytes it has more."""
    with _disk_errors(path), path.open("wb") as file:
        if path.suffix == ".pth":
            torch.save(tensors, CallbackIOWrapper(report, file, "write"))
            return
        mode = path.stat().st_mode  # what the umask gives: safetensors makes a file for us alone
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)
        report(sum(tensor.nbytes for tensor in tensors.values()))


FILLER = "filler"  # how the names of tensors begin that only take room


@contextlib.contextmanager
def tensor_file(
    path: Path, most_header: int, metadata: dict[str, str]
) -> Iterator[Callable[[str, Tensor], None]]:
    """A function that writes a tensor by its name into a .safetensors, each from a multiple of 64
    bytes on. most_header: bytes that names and shapes take at the most."""
    entries: dict[str, dict[str, Any]] = {"__metadata__": metadata}
    begin = -(-(most_header + len(json.dumps(metadata))) // 4096) * 4096
    with path.open("wb", buffering=0) as file:  # nothing is left to be written when it is closed
        file.seek(begin)

        def write(data: memoryview) -> None:
            with _disk_errors(path):
                while len(data):
                    data = data[file.write(data) :]

        def add(name: str, tensor: Tensor) -> None:
            raw, at = tensor.contiguous().view(-1).view(torch.uint8), file.tell() - begin
            ends, size = [at, at + len(raw)], list(tensor.shape)
            entries[name] = {"dtype": _type_name(tensor.dtype), "shape": size, "data_offsets": ends}
            write(raw.numpy().data)
            if missing := -file.tell() % 64:
                add(f"{FILLER}.{ends[1]}", torch.zeros(missing, dtype=torch.uint8))

        yield add
        header = json.dumps(entries).encode().ljust(begin - 8)
        assert len(header) == begin - 8, len(header)
        file.seek(0)
        write(memoryview(len(header).to_bytes(8, "little") + header))


def _type_name(dtype: torch.dtype) -> str:
    """As safetensors has it: F8_E4M3 for float8_e4m3fn, BF16 for bfloat16."""
    letters = {"bfloat": "BF", "float": "F", "uint": "U", "int": "I"}
    name = str(dtype).removeprefix("torch.").removesuffix("fn")
    return re.sub("^[a-z]+", lambda x: letters[x[0]], name).upper()


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn what torch and safetensors raise for a full or broken disk into OSError."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as e:
        # After a write that failed, torch.save ends the file, and raises what that says.
        cause = e.__context__ if isinstance(e.__context__, OSError) else e
        why = getattr(cause, "strerror", None) or str(cause).partition("\n")[0]
        raise OSError(
            f"{path} could not be written ({why}): free some space, or give a folder on another "
            "disk"
        ) from e


def write_checksums(folder: Path) -> None:
    """The MD5 of each .safetensors, in the checklist.chk of Meta's downloads: see `verify`."""
    lines = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'md5').hexdigest()}  {path.name}\n")
    with _disk_errors(folder):
        (folder / "checklist.chk").write_text("".join(lines))


def write_json(path: Path, content: dict[str, Any]) -> None:
    with _disk_errors(path):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def copy_file(source: Path, path: Path) -> None:
    """Copy the content alone: the permissions are those of a new file."""
    with _disk_errors(path):
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, path)


def written(out_dir: str | os.PathLike[str]) -> list[str]:
    """What lies in a folder just written: a line for each file and one for all."""
    folder = Path(out_dir).resolve()
    if folder.is_file():
        return [f"{folder}: {folder.stat().st_size:,} bytes written"]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    lines = [f"{name}: {size:,} bytes" for name, size in sizes.items()]
    return [*lines, f"{folder}: {len(sizes)} files, {sum(sizes.values()):,} bytes written"]
