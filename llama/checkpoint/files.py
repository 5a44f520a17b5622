"""One file of tensors, mapped without reading it and without running anything in it; its bytes.

In: the path of a .pth of torch.save, a .safetensors or a GGUF file. Out: its tensors by name,
mapped from the file, and a `FileReader` that reads their bytes. A file that is damaged or of
another format is a ValueError that names it and the remedy.
"""

import contextlib
import errno
import os
import struct
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llama.checkpoint.gguf.blocks import GGUFMatrix
from llama.checkpoint.quantized_matrix import QuantizedMatrix
from llama.common.checks import brief, errors_in_file
from llama.common.device import available_cores
from llama.storage.downloads import broken, check_download, check_utf8
from llama.storage.gguf import Header, TensorInfo, is_gguf, read_header

_LEGACY_PTH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # written by torch.save before 1.6
_ZIP = b"PK\x03\x04"
_ZIP_LENGTHS_OFFSET = 26  # two lengths in a record's header: name and extra fields
_ZIP_LENGTHS = struct.Struct("<HH")
_GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STATE_KEYS = ("model", "state_dict", "module")
_SHARDED = (
    "holds DTensors, of which each process of FSDP or tensor parallelism has a part: save whole "
    "tensors, as get_model_state_dict of torch.distributed.checkpoint.state_dict returns them with "
    "StateDictOptions(full_state_dict=True)"
)
_PIECE = 4 << 20  # bytes that a thread reads at a time
_BUFFER = 64 << 20  # bytes of a pinned buffer
_MAX_THREADS = 16

_Bytes = npt.NDArray[np.uint8]


class MappedTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        file: The file.
        data: The tensor, mapped from the file; the bytes of its format where it is quantized.
        offset: The first byte of the tensor in the file, if that is known.
        quantized: The matrix that the tensor stands for, where it is quantized.
    """

    file: Path
    data: Tensor
    offset: int | None
    quantized: QuantizedMatrix | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor, or of the matrix that it stands for."""
        return self.quantized.shape if self.quantized else self.data.shape


def open_tensors(file: Path | Header) -> dict[str, MappedTensor]:
    """Map the tensors of a file, by name: only names and shapes are read.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, of another format, or holds anything but tensors.
    """
    if isinstance(file, Header):
        return _open_gguf(file)
    check_utf8(file)
    check_download(file)
    with errors_in_file(file):
        if is_gguf(file):
            return _open_gguf(read_header(file))
        if file.suffix == ".safetensors":
            with _open_safetensors(file) as content:
                tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118
        else:
            tensors = _open_pth(file)
    regions = _mapped_regions(file)
    if file.suffix != ".safetensors":
        _check_storages(file, tensors, regions)
    mapped = {}
    for name, data in tensors.items():
        mapped[name] = MappedTensor(file, data, _offset_in(regions, data.data_ptr()))
    return mapped


@contextlib.contextmanager
def _open_safetensors(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as content:
            yield content
    except SafetensorError as e:
        raise broken(file, f"is cut short or damaged ({first_line(e)})") from e


def read_metadata(file: Path) -> dict[str, str]:
    """Read the metadata in the header of a .safetensors file."""
    check_utf8(file)
    check_download(file)
    with _open_safetensors(file) as content:
        metadata: dict[str, str] | None = content.metadata()
    return metadata or {}


def _open_gguf(header: Header) -> dict[str, MappedTensor]:
    size = header.file.stat().st_size
    content = torch.from_file(str(header.file), size=size, dtype=torch.uint8)
    return {
        name: _mapped_gguf(header.file, info, content[info.offset : info.offset + info.num_bytes])
        for name, info in header.tensors.items()
    }


def _mapped_gguf(file: Path, info: TensorInfo, data: Tensor) -> MappedTensor:
    """Return the tensor of a GGUF file that has these bytes."""
    dtype = _GGUF_DTYPES.get(info.type.name)
    if dtype is not None:
        return MappedTensor(file, data.view(dtype).view(info.shape), info.offset)
    rows = data.view(*info.shape[:-1], -1)
    matrix = GGUFMatrix(torch.Size(info.shape), file, info, rows)
    return MappedTensor(file, rows, info.offset, matrix)


def _open_pth(file: Path) -> dict[str, Tensor]:
    """Load a .pth with `weights_only`, its tensors mapped."""
    with file.open("rb") as opened:
        head = opened.read(len(_LEGACY_PTH))
    if head == _LEGACY_PTH:
        raise ValueError(
            f"{file} is in the format of PyTorch before 1.6, which cannot be mapped. Write it "
            f"anew: torch.save(torch.load({file.name!r}, weights_only=True), 'new.pth')"
        )
    if not head.startswith(_ZIP):
        raise broken(file, "is not a file of torch.save")
    _check_entries(file)
    try:
        content: object = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, MemoryError):
        raise
    except RuntimeError as e:
        if os.strerror(errno.ENOMEM) in str(e):
            raise MemoryError(f"{file} cannot be mapped: {first_line(e)}") from e
        raise broken(file, f"is cut short or damaged ({first_line(e)})") from e
    except Exception as e:  # the unpickler's errors, whose type is in the module `pickle`
        if "DTensor" in str(e) or "ShardedTensor" in str(e):
            raise ValueError(f"{file} {_SHARDED}") from e
        raise ValueError(
            f"{file} holds something other than tensors, and was not run: get the weights from a "
            f"source that you trust ({first_line(e)})"
        ) from e
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a dict of tensors, not {type(content).__name__}")
    tensors: dict[str, Tensor] = content
    for key in _STATE_KEYS:  # Training scripts save other things with the model.
        inner: Any = tensors.get(key)
        if isinstance(inner, dict):
            tensors = inner
    for name, data in tensors.items():
        if type(data) is not Tensor and isinstance(data, Tensor) and hasattr(data, "full_tensor"):
            raise ValueError(f"{file} {_SHARDED}")
        is_dense = isinstance(data, Tensor) and data.layout == torch.strided and not data.is_meta
        if not (is_dense and isinstance(name, str)):
            raise ValueError(
                f"{file}: the entry {brief(name)} is not a tensor with a name and values: save the "
                "state dict of the model alone"
            )
    return tensors


def _check_entries(file: Path) -> None:
    """Raise ValueError where a .pth, a zip archive, has two entries of one name.

    torch reads one of them, and a program that scans the file may see the other.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            names = Counter(archive.namelist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as e:
        raise broken(file, f"is cut short or damaged ({first_line(e)})") from e
    if len(names) < names.total():
        (name, _), *_ = names.most_common(1)
        raise ValueError(f"{file} has two entries of the name {brief(name)}: save it with torch")


def _check_storages(file: Path, tensors: dict[str, Tensor], regions: list["_Region"]) -> None:
    """Raise ValueError where a tensor of a .pth is larger than its record in the archive.

    torch maps as many bytes as the tensor has, so it would continue with the next record. Where the
    system does not report what is mapped, nothing is checked.
    """
    sizes = _record_sizes(file)
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        begin = _offset_in(regions, storage.data_ptr())
        size = sizes.get(begin, 0)
        if begin is not None and size < storage.nbytes():
            raise broken(
                file,
                f"is damaged: it holds {size:,} bytes for {brief(name)}, which has "
                f"{storage.nbytes():,}",
            )


def _record_sizes(file: Path) -> dict[int | None, int]:
    """Return the size of each record of a zip archive, by the offset of its first byte."""
    sizes: dict[int | None, int] = {}
    with file.open("rb") as opened, zipfile.ZipFile(opened) as archive:
        for record in archive.infolist():
            # The header of a record repeats its name, and ends in fields of any length.
            opened.seek(record.header_offset + _ZIP_LENGTHS_OFFSET)
            header = opened.read(_ZIP_LENGTHS.size)
            if len(header) == _ZIP_LENGTHS.size:
                begin = opened.tell() + sum(_ZIP_LENGTHS.unpack(header))
                sizes[begin] = record.compress_size
    return sizes


class _Region(NamedTuple):
    """A part of a file that is mapped: its addresses, and its first byte in the file."""

    begin: int
    end: int
    offset: int


def _mapped_regions(file: Path) -> list[_Region]:
    """Return where this process has mapped a file, as Linux reports it; empty elsewhere."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    path = os.fsencode(file.resolve())
    regions = []
    for line in maps.read_bytes().splitlines():
        # A line is "begin-end rwxp offset device inode path", in hexadecimal.
        addresses, _, offset, _, _, *mapped = line.split(maxsplit=5)
        if mapped == [path]:
            begin, end = addresses.split(b"-")
            regions.append(_Region(int(begin, 16), int(end, 16), int(offset, 16)))
    return regions


def _offset_in(regions: list[_Region], address: int) -> int | None:
    """Return the position in its file of a mapped byte, if it is in one of the regions."""
    for region in regions:
        if region.begin <= address < region.end:
            return address - region.begin + region.offset
    return None


def first_line(e: Exception) -> str:
    """Return the type of an error and the first line of its message, at most 200 characters."""
    message = str(e).splitlines()[0] if str(e) else ""
    return f"{type(e).__name__}: {message}"[:200]


class FileReader:
    """Reads bytes of files into tensors of one device, with several threads.

    On a CPU that takes less time than faulting a mapped file in page by page. On a GPU the bytes go
    through two buffers of pinned memory, one of which is filled while the other is copied, and all
    happens in the order of the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        num_threads = min(_MAX_THREADS, max(2, available_cores()))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="llama-load")
        self.is_staged = device.type != "cpu"
        self._buffers: deque[_Buffer] = deque()
        if self.is_staged:
            is_cuda = device.type == "cuda"
            self._buffers.extend([_Buffer(is_cuda), _Buffer(is_cuda)])

    def read(self, into: Tensor, file: Path, offset: int) -> None:
        """Fill a contiguous tensor with the bytes of `file` from `offset` on.

        Raises:
            ValueError: The file ends before that.
        """

        def read(memory: _Bytes, first: int) -> None:
            with file.open("rb") as source:
                source.seek(offset + first)
                if source.readinto(memory.data) < memory.nbytes:
                    raise broken(file, "became shorter while it was read")

        self._fill(into.view(-1).view(torch.uint8), read)

    def copy(self, into: Tensor, mapped: Tensor) -> None:
        """Fill a tensor, on a GPU a contiguous one, with a mapped one of its type and shape.

        The rows of `mapped` may be parts of a file's rows; other pages of the file are not touched.
        """
        source = mapped.view(torch.uint8).numpy()

        def copy(memory: _Bytes, first: int) -> None:
            memory[:] = source[first : first + len(memory)]

        self._fill(into.view(torch.uint8), copy)

    def _fill(self, target: Tensor, fill: Callable[[_Bytes, int], None]) -> None:
        """Fill rows of bytes.

        Args:
            target: The rows.
            fill: Is called by several threads, each time with host memory for some rows, and the
                index of the first.
        """
        row_bytes = max(1, target[:1].numel())
        rows_per_buffer = max(1, _BUFFER // row_bytes)
        rows_per_piece = max(1, _PIECE // row_bytes)

        def fill_in_threads(memory: _Bytes, first: int) -> None:
            def fill_piece(start: int) -> None:
                fill(memory[start : start + rows_per_piece], first + start)

            for _ in self._pool.map(fill_piece, range(0, len(memory), rows_per_piece)):
                pass  # an error of a thread is raised here

        if not self.is_staged:
            fill_in_threads(target.numpy(), 0)
            return
        for start in range(0, len(target), rows_per_buffer):
            part = target[start : start + rows_per_buffer]
            buffer = self._buffers[0]
            self._buffers.rotate()
            host = buffer.reserve(part)
            fill_in_threads(host.numpy(), start)
            buffer.copy_to(part, host)


class _Buffer:
    """Host memory through which bytes go to a device."""

    def __init__(self, is_cuda: bool) -> None:
        self.memory = torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=is_cuda)
        # The event is recorded after the last copy from this memory.
        new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
        self.copied = new_event() if is_cuda else None

    def reserve(self, part: Tensor) -> Tensor:
        """Return memory of the shape of `part`, once the last copy from it has ended."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.memory[: part.numel()].view(part.shape)

    def copy_to(self, part: Tensor, host: Tensor) -> None:
        """Copy memory that `reserve` gave to a part of a tensor, on CUDA without waiting."""
        part.copy_(host, non_blocking=self.copied is not None)
        if self.copied is not None:
            self.copied.record(torch.cuda.current_stream(part.device))
