"""One segment of KV pages on disk: a file of records of equal size, which only grows.

In: pages as bytes, by the hashes of their content. Out: the same bytes, or nothing where a byte has
changed. This file knows neither torch, nor which segments there are.

A segment begins with a header of 4 KiB. Record i is at 4 KiB + i R: a header of 4 KiB, which has
the key, the tenant's tag and a digest of each head, then the heads. A record's header is written
after its heads, so that a process which is killed leaves whole records, and at most one without a
header.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

KEY_BYTES = 32
_TENANT_BYTES = 8
SUFFIX = ".kv"
HEADER_BYTES = 4096  # the size of each header
_MAGIC = b"LLAMAKV2"
_HEADER = struct.Struct("<8s32s32sIIIIQ")
_CRC = struct.Struct("<I")
_DIGEST_BYTES = 16
_DIGESTS_AT = KEY_BYTES + _TENANT_BYTES
MAX_HEADS = (HEADER_BYTES - _DIGESTS_AT - _CRC.size) // _DIGEST_BYTES


def tenant_tag(root: bytes) -> bytes:
    """Return the name of a tenant in records: 8 bytes that do not tell its root, nor its key.

    Args:
        root: The prefix root of the tenant; empty where there is one tenant, which has no name.
    """
    return hashlib.sha256(b"tenant" + root).digest()[:_TENANT_BYTES] if root else b""


class Part(NamedTuple):
    """The part of each page that one rank holds.

    Attributes:
        first_layer: Its first layer.
        num_layers: The number of its layers.
        first_head: Its first key-value head.
        num_heads: The number of its key-value heads.
        head_bytes: The bytes of one head of a page: keys and values of all these layers.
    """

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    head_bytes: int

    @property
    def heads(self) -> range:
        """The key-value heads."""
        return range(self.first_head, self.first_head + self.num_heads)

    @property
    def page_bytes(self) -> int:
        """The bytes of all heads of a page."""
        return self.num_heads * self.head_bytes

    @property
    def record_bytes(self) -> int:
        """The bytes of a record, with its header."""
        return HEADER_BYTES + self.page_bytes


class Description(NamedTuple):
    """The header of a segment.

    Attributes:
        identity: SHA-256 of all that pages depend on.
        numerics: SHA-256 of what their rounding depends on, too.
        part: The part of each page.
    """

    identity: bytes
    numerics: bytes
    part: Part

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return _with_crc(_HEADER.pack(_MAGIC, self.identity, self.numerics, *self.part))

    @classmethod
    def unpack(cls, block: bytes) -> "Description | None":
        """Return what a header says; None if it is damaged, or another file's."""
        content = _checked(block, _HEADER.size)
        if content is None:
            return None
        magic, identity, numerics, *part = _HEADER.unpack(content)
        return cls(identity, numerics, Part(*part)) if magic == _MAGIC else None


class Segment:
    """A segment that is open for reading.

    Raises:
        OSError: The file is missing, is a symbolic link, or cannot be read.
        ValueError: It is no segment.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", 0)
        description = Description.unpack(os.pread(self._file.fileno(), HEADER_BYTES, 0))
        if description is None:
            self.close()
            raise ValueError(f"{path} is no segment of KV pages")
        self.description = description

    def keys(self, first: int) -> Iterator[bytes]:
        """Yield the keys of the records from number `first` on, up to the first without a header.

        Of a damaged header nothing is known, so that it yields an empty key where others follow.
        """
        for header in self._headers(first):
            yield header[:KEY_BYTES]

    def tenants(self) -> Iterator[bytes]:
        """Yield the tag of the tenant of each record that is whole; of those without one, b""."""
        for header in self._headers(0):
            tag = header[KEY_BYTES:_DIGESTS_AT]
            if header:
                yield tag if any(tag) else b""

    def _headers(self, first: int) -> Iterator[bytes]:
        """Yield the headers of records, as `keys` does."""
        part = self.description.part
        end = os.fstat(self._file.fileno()).st_size
        number = first
        skipped = 0
        while (start := _start(part, number)) + part.record_bytes <= end:
            header = _read_header(self._file.fileno(), start, part.num_heads)
            if header is None:
                skipped += 1
            else:
                yield from [b""] * skipped
                yield header
                skipped = 0
            number += 1

    def read_into(self, number: int, key: bytes, heads: range, out: memoryview) -> bool:
        """Read heads of a record.

        Args:
            number: The number of the record.
            key: Its key.
            heads: The heads of the model that are wanted; the segment has them.
            out: Their bytes are written here.

        Returns:
            Whether the record is whole. If not, `out` may have any content.

        Raises:
            OSError: The file cannot be read.
        """
        part = self.description.part
        descriptor = self._file.fileno()
        start = _start(part, number)
        header = _read_header(descriptor, start, part.num_heads)
        if header is None or header[:KEY_BYTES] != key:
            return False
        first = heads.start - part.first_head
        place = start + HEADER_BYTES + first * part.head_bytes
        if _read_all(descriptor, out, place) < len(out):
            return False
        for i, head in enumerate(heads):
            size = part.head_bytes
            digest = _digest(key, part, head, out[i * size : (i + 1) * size])
            at = _DIGESTS_AT + (first + i) * _DIGEST_BYTES
            if header[at : at + _DIGEST_BYTES] != digest:
                return False
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class SegmentWriter:
    """A segment to which one process appends.

    Args:
        descriptor: The file, open for reading and writing. Nobody else writes to it.
        description: Its header, which is written if the file is empty.
        num_records: The number of records that it has, or is to keep.
    """

    def __init__(self, descriptor: int, description: Description, num_records: int = 0) -> None:
        self._descriptor = descriptor
        self._part = description.part
        self.num_records = num_records
        if not os.fstat(descriptor).st_size:
            _write_all(descriptor, description.pack(), 0)

    @property
    def nbytes(self) -> int:
        """The bytes of the file."""
        return _start(self._part, self.num_records)

    def append(self, key: bytes, page: memoryview, tenant: bytes = b"") -> int:
        """Append a page, head by head, and return the number of its record.

        Args:
            key: The hash of its content.
            page: The bytes of its heads.
            tenant: The tag of the tenant that it belongs to.

        Raises:
            OSError: It cannot be written; the record does not exist then.
        """
        part = self._part
        assert len(key) == KEY_BYTES and len(page) == part.page_bytes, (len(key), len(page))
        size = part.head_bytes
        digests = [
            _digest(key, part, head, page[i * size : (i + 1) * size])
            for i, head in enumerate(part.heads)
        ]
        start = self.nbytes
        _write_all(self._descriptor, page, start + HEADER_BYTES)
        _write_all(
            self._descriptor,
            _with_crc(key + tenant.ljust(_TENANT_BYTES, b"\0") + b"".join(digests)),
            start,
        )
        number = self.num_records
        self.num_records += 1
        return number

    def close(self) -> None:
        """Close the file, whose lock ends."""
        os.close(self._descriptor)


def _start(part: Part, number: int) -> int:
    """Return where a record begins."""
    return HEADER_BYTES + number * part.record_bytes


def _digest(key: bytes, part: Part, head: int, content: memoryview) -> bytes:
    """Return the digest of a head; that of another key, head or layer differs."""
    place = struct.pack("<III", part.first_layer, part.num_layers, head)
    digest = hashlib.sha256(key + place)
    digest.update(content)
    return digest.digest()[:_DIGEST_BYTES]


def _with_crc(content: bytes) -> bytes:
    """Return a header's block: the content, its CRC-32, and zeros."""
    return (content + _CRC.pack(zlib.crc32(content))).ljust(HEADER_BYTES, b"\0")


def _checked(block: bytes, size: int) -> bytes | None:
    """Return the content of a header's block; None where its CRC-32 is wrong."""
    content = block[:size]
    return content if block[size : size + _CRC.size] == _CRC.pack(zlib.crc32(content)) else None


def _read_header(descriptor: int, start: int, num_heads: int) -> bytes | None:
    """Return key, tenant and digests of a record; None where they are damaged or not written."""
    block = os.pread(descriptor, HEADER_BYTES, start)
    return _checked(block, _DIGESTS_AT + num_heads * _DIGEST_BYTES)


def _read_all(descriptor: int, out: memoryview, start: int) -> int:
    """Read as many bytes as there are; return their number."""
    num_read = 0
    while num_read < len(out):
        count = os.preadv(descriptor, [out[num_read:]], start + num_read)
        if not count:
            break
        num_read += count
    return num_read


def _write_all(descriptor: int, content: bytes | memoryview, start: int) -> None:
    view = memoryview(content)
    num_written = 0
    while num_written < len(view):
        num_written += os.pwrite(descriptor, view[num_written:], start + num_written)
