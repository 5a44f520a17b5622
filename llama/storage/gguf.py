"""The header of a GGUF file: its metadata, and where each tensor lies. No tensor is read.

In: the path of a file, or of one part of a split file. Out: a `Header`. Every count, length and
offset is compared with the size of the file before it is used: ValueError names the file and the
remedy. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import itertools
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llama.common.checks import brief
from llama.storage.downloads import broken, check_download

MAGIC = b"GGUF"
_READ_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # tensors begin at multiples of this many bytes
_MAX_HEADER_BYTES = 32 << 20  # Llama 3's header has 8 MB, most of them merges of the tokenizer
_MAX_DIMENSIONS = 4
_LENGTH = struct.Struct("<Q")
_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

# Types of metadata values: the number in the file -> the code of `struct` for one scalar.
_SCALAR_CODES = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9


class TensorType(NamedTuple):
    """How a tensor's elements are stored: in blocks of neighbours along a row.

    Attributes:
        name: The name that llama.cpp uses, such as Q4_K.
        block_size: Elements per block.
        block_bytes: Bytes per block.
    """

    name: str
    block_size: int
    block_bytes: int

    def bytes_of(self, num_elements: int) -> int:
        """Return the bytes of a number of elements, which fill whole blocks."""
        return num_elements // self.block_size * self.block_bytes


# By the number in the file (ggml_type).
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
}
# Types that this runtime does not read, named so that the error can name them.
_UNSUPPORTED_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
# Types of ik_llama.cpp, which has numbers of its own.
_IK_TYPES = {
    133: "Q6_0",
    134: "IQ1_BN",
    135: "IQ2_BN",
    137: "IQ2_K",
    138: "IQ3_K",
    139: "IQ4_K",
    140: "IQ5_K",
    141: "IQ6_K",
    144: "IQ4_KS",
    145: "IQ2_KS",
    146: "IQ4_KSS",
    152: "IQ5_KS",
    153: "IQ2_KT",
    154: "IQ3_KT",
    155: "IQ4_KT",
    156: "IQ3_KS",
    157: "IQ2_KL",
    158: "IQ1_KT",
}
_IK_NUMBERS = range(97, 400)  # Some of them are written for one kind of CPU alone.
# Values of general.file_type for mixtures; other files are named after their commonest type.
_MIXTURES = {
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
}


class TensorInfo(NamedTuple):
    """One tensor of a file.

    Attributes:
        shape: The sizes; elements along the last dimension are neighbours in the file.
        type: How the elements are stored.
        offset: The tensor's first byte, counted from the beginning of the file.
        num_bytes: The bytes that the tensor takes.
    """

    shape: tuple[int, ...]
    type: TensorType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """The metadata and the tensors of one file.

    A header can be given wherever the path of its file is expected; the file's header is then not
    read again.
    """

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def __fspath__(self) -> str:
        return str(self.file)

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor is quantized."""
        return any(info.type.block_size > 1 for info in self.tensors.values())

    @property
    def file_type(self) -> str:
        """The usual name of the file's quantization, such as Q4_K_M or Q8_0."""
        number = self.metadata.get("general.file_type")
        mixture = _MIXTURES.get(number) if isinstance(number, int) else None
        if mixture is not None:
            return mixture
        types = Counter(info.type.name for info in self.tensors.values() if len(info.shape) > 1)
        return max(types, key=types.__getitem__, default="empty")


def is_gguf(path: Path) -> bool:
    """Return whether a path is a regular file that begins as GGUF files do."""
    if not path.is_file():  # reading a pipe could block forever
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def first_part(path: Path) -> Path:
    """Return the first file of the model that a file belongs to; it may not exist."""
    return path.with_name(_part_names(path)[0])


def part_paths(path: Path) -> list[Path]:
    """Return the files of a model in order: the file itself, or all NAME-00001-of-00003.gguf.

    Raises:
        FileNotFoundError: A part is missing.
        ValueError: The name of the file counts its parts wrongly.
    """
    names = _part_names(path)
    if len(names) > 1:
        present = {entry.name for entry in path.parent.iterdir()}
        missing = [name for name in names if name not in present]
        if missing:
            more = f" and {len(missing) - 1} more are" if missing[1:] else " is"
            raise FileNotFoundError(
                f"{missing[0]}{more} missing from {path.parent}: download the rest"
            )
    return [path.with_name(name) for name in names]


def _part_names(path: Path) -> Sequence[str]:
    """Return the names of the files that form the model of a file, in order.

    Raises:
        ValueError: The name of the file is that of a part beyond the number of parts.
    """
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path.name]
    name, number, count = match.groups()
    if not 1 <= int(number) <= int(count):
        raise ValueError(
            f"{path} is by its name part {int(number)} of {int(count)}, which is none: give the "
            "file its published name, such as model-00001-of-00002.gguf"
        )
    return [f"{name}-{i + 1:05d}-of-{count}.gguf" for i in range(int(count))]


def read_headers(path: Path) -> list[Header]:
    """Read the header of a file, or of each part of a split one; the first has the metadata."""
    headers = [read_header(part) for part in part_paths(path)]
    for i, header in enumerate(headers):
        number = header.metadata.get("split.no", 0)
        count = header.metadata.get("split.count", 0)
        is_split = len(headers) > 1 or (number, count) != (0, 0)
        if is_split and (number, count) != (i, len(headers)):
            raise ValueError(
                f"{header.file} says that it is part {brief(number)} (from 0) of {brief(count)}: "
                "parts must keep their names, such as model-00001-of-00002.gguf for part 0 of 2"
            )
    return headers


def read_header(path: Path) -> Header:
    """Read the header of one file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not GGUF, is damaged, or has a type or version that is not read.
    """
    check_download(path)
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), min(size, _MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as data,
    ):
        reader = _HeaderReader(path, data)
        if bytes(reader.scalars("B", len(MAGIC))) != MAGIC:
            raise broken(path, "is not a GGUF file")
        version = reader.scalar("I")
        if version not in _READ_VERSIONS:
            raise ValueError(
                f"{path} is a GGUF file of version {version}, and this runtime reads versions 2 "
                "and 3 in little-endian byte order: get a newer file of the model"
            )
        num_tensors, num_pairs = reader.scalars("Q", 2)
        metadata = {reader.string(): reader.value() for _ in range(num_pairs)}
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise ValueError(
                f"{path} has general.alignment={brief(alignment)}: it must be a multiple of 8"
            )
        entries = [reader.tensor(alignment) for _ in range(num_tensors)]
        data_begin = -(-reader.position // alignment) * alignment
    tensors = {name: info._replace(offset=data_begin + info.offset) for name, info in entries}
    for name, info in tensors.items():
        if info.offset + info.num_bytes > size:
            raise broken(path, f"is cut short: {brief(name)} begins at byte {info.offset:,}")
    if len(tensors) < len(entries):
        raise ValueError(f"{path} has two tensors of one name")
    in_order = sorted(tensors, key=lambda name: tensors[name].offset)
    for name, following in itertools.pairwise(in_order):
        if tensors[name].offset + tensors[name].num_bytes > tensors[following].offset:
            raise broken(path, f"is damaged: {brief(following)} begins inside {brief(name)}")
    return Header(path, metadata, tensors)


class _HeaderReader:
    """Reads a header from front to back; ValueError where the data end too early."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file = file
        self.data = data
        self.position = 0

    def _advance(self, count: int, size: int) -> int:
        """Move past `count` items of `size` bytes; return where they begin."""
        begin = self.position
        self.position += count * size
        if self.position > len(self.data):
            raise broken(self.file, f"is cut short or damaged at byte {begin:,}, in its header")
        return begin

    def scalar(self, code: str) -> Any:
        """Read one scalar; `code` is that of `struct`."""
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        """Read `count` scalars of one type."""
        begin = self._advance(count, struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{count}{code}", self.data, begin)

    def string(self) -> str:
        """Read one string."""
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Read `count` strings in a tight loop: a file of Llama 3 has 400,000."""
        # Each string takes at least its length field, so that an absurd count fails at once.
        begin = end = self._advance(count, _LENGTH.size)
        strings = []
        try:
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(self.data, end)
                begin = end + _LENGTH.size
                end = begin + length
                strings.append(self.data[begin:end].decode())
        except (struct.error, OverflowError, UnicodeDecodeError):
            end = len(self.data) + 1
        self.position = begin
        self._advance(end - begin, 1)
        return strings

    def value(self) -> Any:
        """Read a metadata value with its type: a scalar, a string, or an array of either."""
        type_number = self.scalar("I")
        if type_number == _ARRAY:
            item_type = self.scalar("I")
            count = self.scalar("Q")
            return self._items(item_type, count)
        return self._items(type_number, 1)[0]

    def _items(self, type_number: int, count: int) -> list[str] | tuple[Any, ...]:
        if type_number == _STRING:
            return self.strings(count)
        if type_number not in _SCALAR_CODES:
            raise broken(self.file, f"has a value of type {type_number} at byte {self.position:,}")
        return self.scalars(_SCALAR_CODES[type_number], count)

    def tensor(self, alignment: int) -> tuple[str, TensorInfo]:
        """Read the name and the description of a tensor; its offset is within the tensor data."""
        name = self.string()
        num_dimensions = self.scalar("I")
        shape = self.scalars("Q", min(num_dimensions, _MAX_DIMENSIONS))[::-1]
        type_number = self.scalar("I")
        offset = self.scalar("Q")
        if type_number in _UNSUPPORTED_TYPES:
            raise ValueError(
                f"{self.file}: {brief(name)} is of type {_UNSUPPORTED_TYPES[type_number]}, which "
                "this runtime does not read: take the model's file in Q4_K_M, or a smaller one in "
                "Q3_K_M or Q2_K"
            )
        if type_number in _IK_NUMBERS:
            kind = _IK_TYPES.get(type_number, "that has no name here")
            raise ValueError(
                f"{self.file}: {brief(name)} is of type {kind} ({type_number}) of ik_llama.cpp, "
                "which this runtime does not read: convert it with ik_llama.cpp's llama-quantize "
                "--allow-requantize IN.gguf OUT.gguf Q4_K_M, or take the model's file in Q4_K_M"
            )
        tensor_type = TENSOR_TYPES.get(type_number)
        if (
            tensor_type is None
            or not shape
            or shape[-1] % tensor_type.block_size
            or offset % alignment
        ):
            raise broken(
                self.file,
                f"is damaged: it has {brief(name)} with {num_dimensions} dimensions "
                f"{brief(shape)} of type {type_number} at {offset:,}",
            )
        num_bytes = tensor_type.bytes_of(math.prod(shape))
        return name, TensorInfo(shape, tensor_type, offset, num_bytes)
