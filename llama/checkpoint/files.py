"""One file of tensors, opened without reading it and without running anything in it.

In: a path to a .pth of torch.save or to a .safetensors. Out: its tensors by name, mapped from the
file; the bytes of one of them, read by several threads; the checksums of a .pth, compared. A file
that is neither (half a download, a pickle of something else) is a ValueError that names the file,
its size and the remedy. What the tensors mean is not known here.
"""

import functools
import os
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llama.checkpoint.downloads import broken, check_download, check_utf8
from llama.checks import brief

Report = Callable[[int], None]  # called with the number of bytes just read

_CHUNK = 16 << 20  # bytes that a thread reads at a time
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
        raise broken(file, f"is cut short or damaged ({_first_line(e)})") from e


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
        raise broken(file, f"is cut short or damaged ({_first_line(e)})") from e
    except Exception as e:  # whatever refused data raises: its own type is in a module kept out
        raise ValueError(
            f"{file} holds something other than tensors, and was not run: get the weights from "
            f"where you trust them ({_first_line(e)})"
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


def read_into(tensor: Tensor, file: Path, offset: int) -> None:
    """Fill a tensor of host memory, in one piece, with the bytes of `file` from `offset` on.

    By several threads, and a third of the time that it takes to fault a mapping in page by page.
    """
    memory = tensor.view(-1).view(torch.uint8).numpy().data

    def read(begin: int) -> None:
        read_exactly(memory[begin : begin + _CHUNK], file, offset + begin)

    with ThreadPoolExecutor(min(torch.get_num_threads(), 8)) as pool:
        list(pool.map(read, range(0, len(memory), _CHUNK)))


def read_exactly(memory: memoryview, file: Path, offset: int) -> None:
    """Fill `memory` with the bytes of `file` from `offset` on; ValueError where it ends before."""
    descriptor, done = os.open(file, os.O_RDONLY), 0
    try:
        while done < len(memory):
            count = os.preadv(descriptor, [memory[done:]], offset + done)
            if not count:
                raise broken(file, "became shorter while it was read")
            done += count
    finally:
        os.close(descriptor)


def checksum_jobs(file: Path) -> list[Callable[[Report], None]]:
    """One job per record of a .pth: it reads the record and compares its CRC-32 (ValueError).

    A job calls the function that it is given with the number of bytes of each block that it has
    read. Threads may run jobs of one file at the same time. A .pth is a zip archive with one record
    per tensor; torch.save writes the CRC-32 of each, unless `set_crc32_options(False)` was called:
    then there is nothing to compare, and no job.
    """
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as e:
        raise broken(file, f"is cut short or damaged ({_first_line(e)})") from e
    records = [record for record in archive.infolist() if record.CRC]
    return [functools.partial(_check_record, file, archive, record) for record in records]


def _check_record(
    file: Path, archive: zipfile.ZipFile, record: zipfile.ZipInfo, report: Report
) -> None:
    try:
        with archive.open(record) as content:  # it compares the CRC-32 when it reaches the end
            while block := content.read(_CHUNK):
                report(len(block))
    except (zipfile.BadZipFile, EOFError) as e:
        raise broken(file, f"is damaged ({_first_line(e)})") from e


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200]
