"""One file of tensors, opened without reading it and without running anything in it.

In: a path to a .pth of torch.save or to a .safetensors. Out: its tensors by name, mapped from the
file, and the bytes of one of them, read by several threads. What is no such file (a web page, a Git
LFS pointer, half a download, a pickle of something else) is a ValueError that names the file, its
size and the remedy.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_CHUNK = 16 << 20  # bytes that a thread reads at a time
_LEGACY_PTH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # how torch.save began before 1.6


def open_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped: nothing but their names and shapes is read yet."""
    why = guess(file)
    if why is not None:
        raise broken(file, why)
    return _open_safetensors(file) if file.suffix == ".safetensors" else _open_pth(file)


def _open_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as content:
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except SafetensorError as e:
        raise broken(file, f"is cut short or damaged ({e})") from e


def _open_pth(file: Path) -> dict[str, Tensor]:
    with file.open("rb") as content:
        head = content.read(len(_LEGACY_PTH))
    if head == _LEGACY_PTH:
        raise ValueError(
            f"{file} is in the format of PyTorch before 1.6, which cannot be mapped. Write it "
            f"anew: torch.save(torch.load({file.name!r}, weights_only=True), 'new.pth')"
        )
    if not head.startswith(b"PK\x03\x04"):
        raise broken(file, "is no file of torch.save")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, MemoryError):
        raise
    except RuntimeError as e:
        raise broken(file, f"is cut short or damaged ({_first_line(e)})") from e
    except Exception as e:  # whatever refused data raises: its own type is in a module kept out
        raise ValueError(
            f"{file} holds something other than tensors, and was not run: get the weights from "
            f"where you trust them ({_first_line(e)})"
        ) from e
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds {type(content).__name__}, where a dict of tensors belongs")
    for name, data in content.items():
        dense = isinstance(data, Tensor) and data.layout == torch.strided
        if not (dense and isinstance(name, str)):
            raise ValueError(f"{file}: the entry {name!r} is no tensor with a name: not weights")
    return content


def offsets(file: Path, tensors: Iterable[Tensor]) -> list[int | None]:
    """Where in `file` each of its mapped tensors begins; None where the system does not tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return [None for _ in tensors]
    path = str(file.resolve())
    regions = []
    for line in maps.read_text().splitlines():  # "first-end rwxp offset device inode path"
        addresses, _, offset, _, _, *mapped = line.split(maxsplit=5)
        if mapped == [path]:
            first, end = (int(address, 16) for address in addresses.split("-"))
            regions.append((first, end, int(offset, 16)))
    return [
        next((at - first + offset for first, end, offset in regions if first <= at < end), None)
        for at in (tensor.data_ptr() for tensor in tensors)
    ]


def read_into(tensor: Tensor, file: Path, offset: int) -> None:
    """Fill a tensor of host memory, in one piece, with the bytes of `file` from `offset` on.

    By several threads, and a third of the time that it takes to fault a mapping in page by page.
    """
    memory = tensor.view(-1).view(torch.uint8).numpy().data

    def read(begin: int) -> None:
        end = min(begin + _CHUNK, len(memory))
        while begin < end:
            count = os.preadv(descriptor, [memory[begin:end]], offset + begin)
            if not count:
                raise broken(file, "became shorter while it was read")
            begin += count

    descriptor = os.open(file, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(min(torch.get_num_threads(), 8)) as pool:
            list(pool.map(read, range(0, len(memory), _CHUNK)))
    finally:
        os.close(descriptor)


def guess(file: Path) -> str | None:
    """What a download that went wrong turned out to be, if its first bytes tell."""
    with file.open("rb") as content:
        head = content.read(64).lstrip().lower()
    if not head:
        return "is empty"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file (`git lfs pull` fetches it)"
    if head.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page: sign in where it comes from and accept the licence"
    return None


def broken(file: Path, why: str) -> ValueError:
    return ValueError(f"{file} ({file.stat().st_size:,} bytes) {why}; download it again")


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200]
