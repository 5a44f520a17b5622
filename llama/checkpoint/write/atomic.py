"""New folders and files of weights, which are complete or not there at all.

In: tensors, JSON and files to copy. Out: files with the permissions that the umask gives. Tensors
wait in scratch files on the same disk. A disk that cannot take them is an OSError that names it.
No layout of a checkpoint is known here.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm.utils import CallbackIOWrapper

from llama.storage.downloads import check_utf8

FILLER = "filler"  # prefix of the names of tensors that only align the next one
_ALIGNMENT = 64  # each tensor of a packed file begins at a multiple of this many bytes
_PAGE = 4096


@contextlib.contextmanager
def new_folder(out_dir: str | os.PathLike[str]) -> Iterator[Path]:
    """Create a folder, or a file, when the block has ended.

    The block gets a draft folder alongside `out_dir`, which is renamed to it at the end, and
    removed if the block fails. If the draft then has a file of the name of `out_dir`, that file
    alone takes its place. A process that is killed leaves `out_dir`.partial.

    Raises:
        OSError: `out_dir` holds something, or cannot be created.
        ValueError: The path is not UTF-8.
    """
    check_utf8(Path(out_dir))
    out = Path(out_dir).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(
            f"{out} holds something: give a new folder or file, nothing is overwritten"
        )
    draft = out.with_name(out.name + ".partial")
    if draft.exists():
        raise FileExistsError(
            f"{draft} was left by a run that was cut off: remove it if no other run is writing it"
        )
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


def append_bytes(
    path: Path, total: int, pieces: Iterable[bytes], report: Callable[[int], object]
) -> None:
    """Add `total` bytes to a file piece by piece; `report` is called with the bytes of each."""
    check_free_space(path.parent, total)
    with disk_errors(path), path.open("ab") as file:
        for piece in pieces:
            file.write(piece)
            report(len(piece))


def check_free_space(folder: Path, needed: int) -> None:
    """Raise OSError unless the disk of a folder has `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder.parent} has {free / 1e9:.3g} GB free, and writing takes {needed / 1e9:.3g} "
            "GB: free some space, or give a folder on another disk"
        )


def scratch(folder: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a file that is unlinked already: it uses disk, not memory."""
    path = folder / "scratch"
    with disk_errors(path), path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            # A write to a mapping that the disk has no space for would kill the process.
            os.posix_fallocate(file.fileno(), 0, shape.numel() * dtype.itemsize)
        flat = torch.from_file(str(path), shared=True, size=shape.numel(), dtype=dtype)
        path.unlink()
    return flat.view(shape)


def save(path: Path, tensors: dict[str, Tensor], report: Callable[[int], None]) -> None:
    """Write a .pth or a .safetensors file; `report` is called with the bytes of each write."""
    with disk_errors(path), path.open("wb") as file:
        if path.suffix == ".pth":
            torch.save(tensors, CallbackIOWrapper(report, file, "write"))
            return
        mode = path.stat().st_mode  # given by the umask; safetensors would keep others out
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)
        report(sum(tensor.nbytes for tensor in tensors.values()))


@contextlib.contextmanager
def tensor_file(
    path: Path, max_header: int, metadata: dict[str, str]
) -> Iterator[Callable[[str, Tensor], None]]:
    """Write a .safetensors file tensor by tensor, each at a multiple of 64 bytes.

    Args:
        path: The file.
        max_header: The most bytes that the names and shapes of all tensors can take.
        metadata: The metadata in the file's header.

    Yields:
        A function that writes a tensor under a name.
    """
    # Writes are not buffered, so that an error of the disk is raised by the write it belongs to.
    with path.open("wb", buffering=0) as file:
        writer = _TensorFile(path, file, max_header, metadata)
        yield writer.add
        writer.write_header()


class _TensorFile:
    """A .safetensors file in the making: the tensors are written first, the header last."""

    def __init__(
        self, path: Path, file: BinaryIO, max_header: int, metadata: dict[str, str]
    ) -> None:
        self.path = path
        self.file = file
        self.entries: dict[str, dict[str, Any]] = {"__metadata__": metadata}
        header_size = max_header + len(json.dumps(metadata))
        self.data_begin = -(-header_size // _PAGE) * _PAGE
        file.seek(self.data_begin)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, and a filler that aligns the next one."""
        data = tensor.contiguous().view(-1).view(torch.uint8)
        begin = self.file.tell() - self.data_begin
        end = begin + len(data)
        self.entries[name] = {
            "dtype": _type_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        self._write(data.numpy().data)
        missing = -self.file.tell() % _ALIGNMENT
        if missing:
            self.add(f"{FILLER}.{end}", torch.zeros(missing, dtype=torch.uint8))

    def write_header(self) -> None:
        """Write the header in the space before the tensors, padded with blanks."""
        size = self.data_begin - 8
        header = json.dumps(self.entries).encode().ljust(size)
        assert len(header) == size, len(header)
        self.file.seek(0)
        self._write(memoryview(size.to_bytes(8, "little") + header))

    def _write(self, data: memoryview) -> None:
        with disk_errors(self.path):
            while len(data):
                data = data[self.file.write(data) :]


def _type_name(dtype: torch.dtype) -> str:
    """Return the name of a type in safetensors: F8_E4M3 for float8_e4m3fn, BF16 for bfloat16."""
    letters = {"bfloat": "BF", "float": "F", "uint": "U", "int": "I"}
    name = str(dtype).removeprefix("torch.").removesuffix("fn")
    return re.sub("^[a-z]+", lambda match: letters[match[0]], name).upper()


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what torch and safetensors raise for a full or broken disk into OSError."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as e:
        # After a failed write torch.save ends the file, and raises the error that this gives.
        cause = e.__context__ if isinstance(e.__context__, OSError) else e
        reason = getattr(cause, "strerror", None) or str(cause).partition("\n")[0]
        raise OSError(
            f"{path} could not be written ({reason}): free some space, or give a folder on another "
            "disk"
        ) from e


def write_checksums(folder: Path) -> None:
    """Write the MD5 of each .safetensors file to a checklist.chk, as Meta's downloads have it."""
    lines = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'md5').hexdigest()}  {path.name}\n")
    with disk_errors(folder):
        (folder / "checklist.chk").write_text("".join(lines))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object."""
    with disk_errors(path):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def write_text(path: Path, content: str) -> None:
    """Write a text as UTF-8, with its own line ends."""
    with disk_errors(path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode())


def copy_file(source: Path, path: Path) -> None:
    """Copy the content of a file; its permissions are those of a new file."""
    with disk_errors(path):
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, path)


def describe(out_dir: str | os.PathLike[str]) -> list[str]:
    """Return a line for each file of a folder just written, and one for all."""
    folder = Path(out_dir).resolve()
    if folder.is_file():
        return [f"{folder}: {folder.stat().st_size:,} bytes written"]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    lines = [f"{name}: {size:,} bytes" for name, size in sizes.items()]
    return [*lines, f"{folder}: {len(sizes)} files, {sum(sizes.values()):,} bytes written"]
