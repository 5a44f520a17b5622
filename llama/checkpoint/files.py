"""One file of tensors, opened without reading it and without running anything in it.

In: a path to a .pth of torch.save or to a .safetensors. Out: its tensors by name, mapped from the
file, and where in it they lie. A file that is neither (half a download, a pickle of something else)
is a ValueError that names the file, its size and the remedy. What the tensors mean is not known
here.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llama.checkpoint.downloads import broken, check_download, check_utf8
from llama.checks import brief

_LEGACY_PTH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # how torch.save began before 1.6


def open_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped: nothing but their names and shapes is read yet."""
    check_utf8(file)
    check_download(file)
    return _open_safetensors(file) if file.suffix == ".safetensors" else _open_pth(file)


def _open_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as content:
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except SafetensorError as e:
        raise broken(file, f"is cut short or damaged ({first_line(e)})") from e


def _open_pth(file: Path) -> dict[str, Tensor]:
    with file.open("rb") as content:
        head = content.read(len(_LEGACY_PTH))
    if head == _LEGACY_PTH:
        raise ValueError(
            f"{file} is in the format of PyTorch before 1.6, which cannot be mapped. Write it "
            f"anew: torch.save(torch.load({file.name!r}, weights_only=True), 'new.pth')"
        )
    if not head.startswith(b"PK\x03\x04"):
        raise broken(file, "is not a file of torch.save")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, MemoryError):
        raise
    except RuntimeError as e:
        raise broken(file, f"is cut short or damaged ({first_line(e)})") from e
    except Exception as e:  # whatever refused data raises: its own type is in a module kept out
        raise ValueError(
            f"{file} holds something other than tensors, and was not run: get the weights from "
            f"where you trust them ({first_line(e)})"
        ) from e
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a dict of tensors, not {type(content).__name__}")
    for name, data in content.items():
        dense = isinstance(data, Tensor) and data.layout == torch.strided and not data.is_meta
        if not (dense and isinstance(name, str)):
            raise ValueError(
                f"{file}: the entry {brief(name)} is not a tensor with a name and values: this "
                "file is not the weights of a model; download it again"
            )
    return content


def offsets(file: Path, tensors: Iterable[Tensor]) -> list[int | None]:
    """Where in `file` each of its mapped tensors begins; None where the system does not tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return [None for _ in tensors]
    path = os.fsencode(file.resolve())
    regions = []
    for line in maps.read_bytes().splitlines():  # "first-end rwxp offset device inode path"
        addresses, _, offset, _, _, *mapped = line.split(maxsplit=5)
        if mapped == [path]:
            first, end = (int(address, 16) for address in addresses.split(b"-"))
            regions.append((first, end, int(offset, 16)))
    return [
        next((at - first + offset for first, end, offset in regions if first <= at < end), None)
        for at in (tensor.data_ptr() for tensor in tensors)
    ]


def first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200]
