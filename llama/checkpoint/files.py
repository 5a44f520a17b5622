"""One file of tensors, opened without reading it and without running anything in it; its bytes.

In: a path to a .pth of torch.save, a .safetensors or a GGUF file. Out: its tensors by name, mapped
from the file; and by several threads, in less time than the system takes to fault a mapped file in
page by page, bytes of it in a tensor. To a GPU they go through two buffers of pinned memory: one is
read into while the other is copied. A ValueError names the file that is none, and the remedy.
"""

import contextlib
import functools
import os
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llama.checkpoint import gguf_blocks
from llama.checkpoint.downloads import broken, check_download, check_utf8
from llama.checkpoint.gguf import Header, is_gguf, read_header
from llama.checks import brief
from llama.device import available_cores
from llama.weights.coded import Coded

_LEGACY_PTH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # how torch.save began before 1.6
_GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PIECE = 4 << 20  # bytes that a thread reads at a time
_BUFFER = 64 << 20  # bytes of a buffer
_MOST_THREADS = 16


class Quantized(NamedTuple):
    """A matrix (N, K) that a file holds in codes. read: some rows and columns, all columns if it
    is_rotated, on a device. pack: some to a weight, as `CodedRows` has it."""

    kind: str
    shape: torch.Size
    read: Callable[[slice, slice, torch.device], Coded]
    is_rotated: bool = False
    pack: Callable[[range, slice, Coded, int, Tensor, Tensor], bool] | None = None


class MappedTensor(NamedTuple):
    """A tensor in a file: `data` is mapped, `offset` where it begins there, if that is known.

    Where it is `quantized`, the data are bytes of its format.
    """

    file: Path
    data: Tensor
    offset: int | None
    quantized: Quantized | None = None

    @property
    def shape(self) -> torch.Size:
        return self.quantized.shape if self.quantized else self.data.shape


def open_tensors(file: Path | Header) -> dict[str, MappedTensor]:
    """The tensors of a file by name, mapped: nothing but names and shapes is read yet."""
    if isinstance(file, Header):
        return _open_gguf(file)
    check_utf8(file)
    check_download(file)
    if is_gguf(file):
        return _open_gguf(read_header(file))
    if file.suffix == ".safetensors":
        with _safetensors(file) as content:
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    else:
        tensors = _open_pth(file)
    regions = _mapped_regions(file)
    found = {}
    for name, data in tensors.items():
        at = data.data_ptr()
        offsets = (at - first + offset for first, end, offset in regions if first <= at < end)
        found[name] = MappedTensor(file, data, next(offsets, None))
    return found


@contextlib.contextmanager
def _safetensors(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as content:
            yield content
    except SafetensorError as e:
        raise broken(file, f"is cut short or damaged ({first_line(e)})") from e


def read_metadata(file: Path) -> dict[str, str]:
    """What a .safetensors says of itself."""
    check_utf8(file)
    check_download(file)
    with _safetensors(file) as content:
        return content.metadata() or {}


def _open_gguf(header: Header) -> dict[str, MappedTensor]:
    file = header.file
    content = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
    tensors = {}
    for name, info in header.tensors.items():
        data, quantized = content[info.offset : info.offset + info.num_bytes], None
        if info.kind.name in _GGUF_DTYPES:
            data = data.view(_GGUF_DTYPES[info.kind.name]).view(info.shape)
        else:
            data = data.view(*info.shape[:-1], -1)
            read = functools.partial(gguf_blocks.read, data, info.kind)
            pack = functools.partial(gguf_blocks.pack, file, info)
            quantized = Quantized(info.kind.name, torch.Size(info.shape), read, pack=pack)
        tensors[name] = MappedTensor(file, data, info.offset, quantized)
    return tensors


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
    _check_entries(file)
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


def _check_entries(file: Path) -> None:
    """ValueError where a .pth, a zip archive, has two entries of one name: torch reads one of them,
    and a program that looks the file over may see the other."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = Counter(archive.namelist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as e:
        raise broken(file, f"is cut short or damaged ({first_line(e)})") from e
    if len(names) < names.total():
        (name, _), *_ = names.most_common(1)
        raise broken(file, f"has two entries of the name {brief(name)}")


def _mapped_regions(file: Path) -> list[tuple[int, int, int]]:
    """Where a file is mapped, from and to, and what offset in it is there: as Linux tells."""
    maps, path = Path("/proc/self/maps"), os.fsencode(file.resolve())
    regions = []
    for line in maps.read_bytes().splitlines() if maps.exists() else ():
        # "first-end rwxp offset device inode path"
        addresses, _, offset, _, _, *mapped = line.split(maxsplit=5)
        if mapped == [path]:
            first, end = (int(address, 16) for address in addresses.split(b"-"))
            regions.append((first, end, int(offset, 16)))
    return regions


def first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200]


class FileReader:
    """Fills tensors of one device; on a GPU, in the order of its current stream."""

    def __init__(self, device: torch.device) -> None:
        threads = min(_MOST_THREADS, max(2, available_cores()))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="llama-load")
        self.is_staged = device.type != "cpu"
        self._is_cuda = device.type == "cuda"
        self._buffers = deque(  # each with the moment when the copy from it has been made
            (
                torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=self._is_cuda),
                torch.cuda.Event() if self._is_cuda else None,
            )
            for _ in range(2 * self.is_staged)
        )

    def read(self, into: Tensor, file: Path, offset: int) -> None:
        """Fill a contiguous tensor with the bytes of `file` from `offset` on; ValueError where it
        ends before."""

        def read(memory: np.ndarray, first: int) -> None:
            with file.open("rb") as source:
                source.seek(offset + first)
                if source.readinto(memory.data) < memory.nbytes:
                    raise broken(file, "became shorter while it was read")

        self._fill(into.view(-1).view(torch.uint8), read)

    def copy(self, into: Tensor, mapped: Tensor) -> None:
        """Fill a tensor, on a GPU a contiguous one, with one of its type and shape that is mapped;
        its rows may be parts of a file's rows, and no page is touched that has none."""
        source = mapped.view(torch.uint8).numpy()

        def copy(memory: np.ndarray, first: int) -> None:
            memory[:] = source[first : first + len(memory)]

        self._fill(into.view(torch.uint8), copy)

    def _fill(self, target: Tensor, fill: Callable[[np.ndarray, int], None]) -> None:
        """Of rows of bytes: threads call `fill` with host memory for some, and where they begin."""
        row_bytes = max(1, target[:1].numel())
        step, piece = max(1, _BUFFER // row_bytes), max(1, _PIECE // row_bytes)

        def run(memory: np.ndarray, first: int) -> None:
            starts = range(0, len(memory), piece)
            for _ in self._pool.map(lambda i: fill(memory[i : i + piece], first + i), starts):
                pass

        if not self.is_staged:
            run(target.numpy(), 0)
            return
        for at in range(0, len(target), step):
            part, (buffer, copied) = target[at : at + step], self._buffers[0]
            self._buffers.rotate()
            if copied is not None:
                copied.synchronize()
            host = buffer[: part.numel()].view(part.shape)
            run(host.numpy(), at)
            part.copy_(host, non_blocking=copied is not None)
            if copied is not None:
                copied.record(torch.cuda.current_stream(part.device))
