"""What a GGUF file says of itself: metadata, and where each tensor lies. No tensor is read.

In: the path of a file, or of one part of a split one. Out: a `Header`. Every count, length and
offset is held against the size of the file before it is used: ValueError names the file and the
remedy. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llama.checkpoint.downloads import broken, check_download
from llama.checks import brief

MAGIC = b"GGUF"
_MOST_BYTES = 32 << 20  # of a header: that of Llama 3 has 8 MB, most of them the merges
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9  # of values that are no numbers
_LENGTH = struct.Struct("<Q")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class Kind(NamedTuple):
    """How numbers are stored: `block` neighbours along a row in `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


KINDS = {  # by the number in the file
    0: Kind("F32", 1, 4), 1: Kind("F16", 1, 2), 30: Kind("BF16", 1, 2),
    2: Kind("Q4_0", 32, 18), 3: Kind("Q4_1", 32, 20), 6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24), 8: Kind("Q8_0", 32, 34), 20: Kind("IQ4_NL", 32, 18),
    10: Kind("Q2_K", 256, 84), 11: Kind("Q3_K", 256, 110), 12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176), 14: Kind("Q6_K", 256, 210), 23: Kind("IQ4_XS", 256, 136),
}  # fmt: skip
_REFUSED = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0",
    35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
_MIXTURES = {  # of general.file_type; the others are called after their commonest kind
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M",
}  # fmt: skip


class TensorInfo(NamedTuple):
    """shape: the last dimension is that of neighbours. offset: from the beginning of the file."""

    shape: tuple[int, ...]
    kind: Kind
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def __fspath__(self) -> str:  # it can be given for its file, which is not read again then
        return str(self.file)

    @property
    def is_quantized(self) -> bool:
        return any(info.kind.block > 1 for info in self.tensors.values())

    @property
    def file_type(self) -> str:
        """What people call the file: Q4_K_M, Q8_0."""
        kinds = Counter(info.kind.name for info in self.tensors.values() if len(info.shape) > 1)
        number = self.metadata.get("general.file_type")
        named = _MIXTURES.get(number) if isinstance(number, int) else None
        return named or max(kinds, key=kinds.__getitem__, default="empty")


def is_gguf(path: Path) -> bool:
    if not path.is_file():  # a pipe would be waited for
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def parts_of(path: Path) -> list[Path]:
    """The files that belong to one, in order: itself, or all NAME-00001-of-00003.gguf."""
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    name, _, count = part.groups()
    parts = [path.with_name(f"{name}-{i + 1:05d}-of-{count}.gguf") for i in range(int(count))]
    if missing := [part.name for part in parts if not part.exists()]:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise FileNotFoundError(f"{missing[0]}{more} missing beside {path}: download the rest")
    return parts


def read_headers(path: Path) -> list[Header]:
    """The header of a file, or of each part of a split one: the first has the metadata."""
    headers = [read_header(part) for part in parts_of(path)]
    for i, header in enumerate(headers):
        found = [header.metadata.get(f"split.{key}", 0) for key in ("no", "count")]
        if found != [i, len(headers)] and (headers[1:] or found != [0, 0]):
            raise ValueError(
                f"{header.file} says that it is part {brief(found[0])} (from 0) of "
                f"{brief(found[1])}: parts must keep their names, such as "
                "model-00001-of-00002.gguf for part 0 of 2"
            )
    return headers


def read_header(path: Path) -> Header:
    """The header of one file."""
    check_download(path)
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), min(size, _MOST_BYTES), access=mmap.ACCESS_READ) as data,
    ):
        content = _Content(path, data)
        if bytes(content.numbers("B", len(MAGIC))) != MAGIC:
            raise broken(path, "is not a GGUF file")
        (version,) = content.numbers("I")
        if version not in (2, 3):
            raise ValueError(
                f"{path} is GGUF of version {version}, and this runtime reads 2 and 3, the low "
                "byte of a number first: get a newer file of the model"
            )
        num_tensors, num_pairs = content.numbers("Q", 2)
        metadata = {content.text(): content.value() for _ in range(num_pairs)}
        step = metadata.get("general.alignment", 32)
        if not isinstance(step, int) or not 8 <= step <= 1 << 20 or step % 8:
            raise broken(path, f"has general.alignment={brief(step)}")
        found = [content.tensor(step) for _ in range(num_tensors)]
    begin = -(-content.at // step) * step
    tensors = {name: info._replace(offset=begin + info.offset) for name, info in found}
    for name, info in tensors.items():
        if info.offset + info.num_bytes > size:
            raise broken(path, f"is cut short: {brief(name)} begins at byte {info.offset:,}")
    if len(tensors) < len(found):
        raise broken(path, "has two tensors of one name")
    return Header(path, metadata, tensors)


class _Content:
    """The header of a file, read from front to back; ValueError where it is not all there."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data = file, data
        self.at = 0

    def _next(self, count: int, size: int) -> int:
        """Where the next `count` things of `size` bytes begin."""
        begin, self.at = self.at, self.at + count * size
        if self.at > len(self.data):
            raise broken(self.file, f"is cut short or damaged at byte {begin:,}, in its header")
        return begin

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        begin = self._next(count, struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{count}{form}", self.data, begin)

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """A loop of few steps: there are 400,000 in a file of Llama 3."""
        begin = end = self._next(count, _LENGTH.size)  # so many must be there at the least
        found = []
        try:
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(self.data, end)
                begin = end + _LENGTH.size
                end = begin + length
                found.append(self.data[begin:end].decode())
        except (struct.error, OverflowError, UnicodeDecodeError):
            end = len(self.data) + 1
        self.at = begin
        self._next(end - begin, 1)
        return found

    def value(self) -> Any:
        (form,), count = self.numbers("I"), None
        if form == _ARRAY:
            (form,), (count,) = self.numbers("I"), self.numbers("Q")
        if form not in (*_NUMBERS, _STRING):
            raise broken(self.file, f"has a value of type {form} at byte {self.at:,}")
        length = 1 if count is None else count
        found = self.texts(length) if form == _STRING else self.numbers(_NUMBERS[form], length)
        return found[0] if count is None else found

    def tensor(self, step: int) -> tuple[str, TensorInfo]:
        """One, with its offset in the data, a multiple of `step`."""
        name = self.text()
        (dims,) = self.numbers("I")
        shape = self.numbers("Q", min(dims, 4))[::-1]
        (number,), (offset,) = self.numbers("I"), self.numbers("Q")
        kind = KINDS.get(number)
        if kind is None and number in _REFUSED:
            raise ValueError(
                f"{self.file}: {brief(name)} is of type {_REFUSED[number]}, which this runtime "
                "does not read: take the model's file in Q4_K_M, or the smaller in Q3_K_M or Q2_K"
            )
        if kind is None or not shape or shape[-1] % kind.block or offset % step:
            what = f"{brief(name)} with {dims} dimensions {brief(shape)} of type {number}"
            raise broken(self.file, f"is damaged: it has {what} at {offset:,}")
        num_bytes = math.prod(shape) // kind.block * kind.num_bytes
        return name, TensorInfo(shape, kind, offset, num_bytes)
