"""The two files of a batch job: lines are read once from the start, and records are appended.

A record is one write to a file that is opened for appending, so a killed process loses only the
records that it had not written. The id of a record holds the number and a hash of its line: by it a
resumed job knows which lines are done, and whether its input is the same. This module must not know
what a line asks for.
"""

import array
import codecs
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

from llama.cli.batch.csv_rows import ends_in_quotes, is_csv
from llama.cli.batch.lines import MAX_LINE, LineFormat, check_encoding

_ID = "batch_req_{:012d}_{:08x}"
_HEAD = b'{"id": "batch_req_'
_RECORD = re.compile(re.escape(_HEAD) + rb'(\d{12})_([0-9a-f]{8})", ')
_NO_ERROR = b'"error": null}\n'  # the end of a record without an error
# Each lock of the output file is on a byte of its own.
_JOB_LOCK = 0  # held by all ranks of a job until its end
_WRITE_LOCK = 1  # held by a rank while it appends a record


class Line(NamedTuple):
    """A line that is not blank, or a row of a CSV file, without its line end."""

    number: int  # the number of its first line; blank lines count
    data: bytes  # only the first MAX_LINE + 2 bytes of a line that is too long
    line_hash: int  # 32 bits, never 0


def read_lines(file: BinaryIO, salt: str) -> Iterator[Line]:
    """Yield the lines of a binary file, or the rows of a CSV file, with one in memory at a time.

    Args:
        file: The file, at its start.
        salt: A text that is hashed with each line.

    Raises:
        ValueError: The first line is not UTF-8, or the file was truncated after it was opened.
    """
    size = os.fstat(file.fileno()).st_size  # 0 for a pipe
    has_rows = is_csv(str(file.name))
    salted = hashlib.blake2b(salt.encode(), digest_size=4)
    next_number = 1
    is_header = has_rows
    while True:
        number = next_number
        data, num_lines = _next_line(file, size, has_rows=has_rows)
        if not data:
            return
        next_number += num_lines
        data = data.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            check_encoding(str(file.name), data)
            data = data.removeprefix(codecs.BOM_UTF8)
        if data and not data.isspace():
            hasher = salted.copy()
            hasher.update(data)
            yield Line(number, data, int.from_bytes(hasher.digest()) or 1)
            if is_header:
                salted = hasher  # A row means something else under other columns.
            is_header = False


def _next_line(file: BinaryIO, size: int, *, has_rows: bool) -> tuple[bytes, int]:
    """Read the next line, or the next row of a CSV file.

    Args:
        file: The file.
        size: The size of the file when it was opened; 0 for a pipe.
        has_rows: Whether it is a CSV file.

    Returns:
        The bytes with the line end, of which those beyond MAX_LINE + 2 are left out, and the number
        of lines. At the end of the file there are no bytes.
    """
    data = bytearray()
    num_lines = 0
    is_quoted = False
    while True:
        piece = file.readline(MAX_LINE + 2)
        if not piece:
            _check_not_truncated(file, size)
            return bytes(data), num_lines + 1
        if len(data) <= MAX_LINE:
            data += piece
            del data[MAX_LINE + 2 :]
        is_quoted = has_rows and ends_in_quotes(piece, is_quoted)
        if piece.endswith(b"\n"):
            num_lines += 1
            if not is_quoted:
                return bytes(data), num_lines


def _check_not_truncated(file: BinaryIO, size: int) -> None:
    if size and file.tell() < size:
        raise ValueError(
            f"{file.name} had {size} bytes and was truncated to {file.tell()} while the job ran: "
            "restore it, and run again with --resume to answer the missing lines"
        )


def check_files(in_path: str, out_path: str, *, resume: bool) -> None:
    """Check that the input can be read and that the output can be written without loss.

    Raises:
        OSError, ValueError: A file cannot be used; the message names it.
    """
    _check_input(in_path, resume=resume)
    path = os.path.realpath(out_path)  # A link stands for the file that it names.
    exists = os.path.lexists(path)
    if exists and not os.path.isfile(path):
        raise ValueError(f"{out_path} is a folder or a device: name a file for the results")
    try:
        with open(path, "r+b") if exists else tempfile.TemporaryFile(dir=os.path.dirname(path)):
            pass
    except OSError as e:
        message = f"{e.strerror}: results cannot be written there, name another file"
        raise OSError(e.errno, message, out_path) from None
    if exists and os.path.getsize(path) and not resume:
        raise FileExistsError(
            f"{out_path} has results already: add --resume to answer only the missing lines, "
            "or write to another file"
        )


def _check_input(path: str, *, resume: bool) -> None:
    os.stat(path)
    if os.path.isfile(path):
        with open(path, "rb") as file:
            check_encoding(path, file.readline(4096))
        unread_columns(path)  # This checks the first line.
    elif os.path.isdir(path):
        raise ValueError(f"{path} is a folder: name a file with a request per line")
    elif resume:  # A pipe is not opened here, because what is read from it is lost.
        raise ValueError(f"{path} is a stream, which cannot be read again to resume: name a file")


def unread_columns(path: str) -> list[str]:
    """Return the columns of a CSV file that have no effect. Other files have none.

    Raises:
        ValueError: The first line shows that the file cannot be used.
    """
    if not os.path.isfile(path):
        return []
    with open(path, "rb") as file:
        header = next(read_lines(file, ""), None)
    return [] if header is None else LineFormat.of(path, header.data).unread_columns


class Results:
    """The output file of one job. The replicas of the job share it, and no other job writes to it.

    Attributes:
        path: The path that was given.
        done: The hash of each line at its number; 0 if it had no record when the file was opened.
        failed: Number of records with an error when the file was opened.
    """

    def __init__(self, path: str, *, first: bool = True, max_lines: int = 0) -> None:
        """Open the file and read its records.

        Args:
            path: The file. The first rank creates it if it does not exist.
            first: Whether this is the first rank of the job, which checks that no other job writes
                to the file. The other ranks open it afterwards.
            max_lines: An upper bound of the number of lines of the input.

        Raises:
            OSError: The file cannot be opened or locked.
            ValueError: Another job writes to the file, or it is not the output of this input.
        """
        self.path = path
        self.done = array.array("I", [0])
        self.failed = 0
        self._first = first
        self._full_path = os.path.abspath(path)  # remains valid after a chdir
        if not first:  # A rank that cannot see the first rank's file must not create its own.
            os.stat(path)
        self._file = io.FileIO(path, "a+")
        try:
            # A second job fails here, because all ranks of this one hold the lock until its end.
            kind = fcntl.LOCK_EX if first else fcntl.LOCK_SH
            self._lock(kind | fcntl.LOCK_NB, _JOB_LOCK)
            self._size = self._read(max_lines)  # bytes of whole records; it never decreases
            self._lock(fcntl.LOCK_SH | fcntl.LOCK_NB, _JOB_LOCK)
        except BaseException:
            self._file.close()
            raise

    @property
    def num_done(self) -> int:
        """The number of lines that had a record when the file was opened."""
        return len(self.done) - self.done.count(0)

    def has(self, line: Line) -> bool:
        """Return whether the line had a record when the file was opened.

        Raises:
            ValueError: The record belongs to another line or to other flags.
        """
        line_hash = self.done[line.number] if line.number < len(self.done) else 0
        if line_hash and line_hash != line.line_hash:
            raise ValueError(
                f"line {line.number} or the flags are not those that {self.path} was made with: "
                "resume with the same input, --seed and flags of sampling, or write to another file"
            )
        return line_hash != 0

    def append(self, line: Line, fields: dict[str, Any]) -> None:
        """Write the record of a line: an id and `fields`. It survives the death of this process.

        Raises:
            OSError: The disk is full, or another program has changed the file.
        """
        record = {"id": _ID.format(line.number, line.line_hash), **fields}
        # ASCII holds no character that another reader would take for a line end.
        data = json.dumps(record).encode() + b"\n"
        with self._write_lock():
            self._check_same_file()
            end = self._truncate_torn()
            try:
                if self._file.write(data) < len(data):
                    message = "no space left for a whole record"
                    raise OSError(errno.ENOSPC, message, self.path)
            except BaseException:
                self._truncate_torn()
                raise
            self._size = end + len(data)

    def check_written(self, num_records: int) -> None:
        """Check that the file is still at its path and holds so many records.

        Raises:
            OSError: Another program has changed the file.
        """
        with self._write_lock():  # This also makes a network file system show others' records.
            self._check_same_file()
            count = sum(head is not None for _, head in self._records())
        if count != num_records:
            raise self._changed(f"has {count} records instead of {num_records}")

    def close(self) -> None:
        """Close the file once its content is on the disk and will survive a power failure."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _check_same_file(self) -> None:
        try:
            status = os.stat(self._full_path)
        except FileNotFoundError:
            raise self._changed("was deleted") from None
        if not os.path.samestat(status, os.fstat(self._file.fileno())):
            raise self._changed("was replaced by another file")

    def _changed(self, change: str) -> OSError:
        return OSError(
            f"{self.path} {change} while the job ran, so results are lost: let no other program "
            "change it, and run again with --resume to answer the missing lines"
        )

    @contextmanager
    def _write_lock(self) -> Iterator[None]:
        self._lock(fcntl.LOCK_EX, _WRITE_LOCK)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_UN, _WRITE_LOCK)

    def _lock(self, kind: int, byte: int) -> None:
        """Lock a byte of the file.

        Raises:
            OSError: The file system has no locks and there are several ranks.
            ValueError: Another job holds the lock, and `kind` says not to wait.
        """
        try:
            _lock_byte(self._file.fileno(), kind, byte)
        except (BlockingIOError, PermissionError):
            raise ValueError(
                f"{self.path} is being written by another job: wait until it ends, or stop it"
            ) from None
        except OSError as e:
            if not self._first:  # A single rank can work without locks.
                message = "this file system has no locks, which several ranks need: write elsewhere"
                raise OSError(e.errno, message, self.path) from None

    def _records(self) -> Iterator[tuple[bytes, re.Match[bytes] | None]]:
        """Yield each line of the file, with the match of its head if it is a whole record."""
        with open(self._file.fileno(), "rb", 1 << 20, closefd=False) as reader:
            reader.seek(0)
            for record in reader:
                yield record, _RECORD.match(record) if record.endswith(b"\n") else None

    def _read(self, max_lines: int) -> int:
        """Find the lines that are done, and return the size of their records in bytes.

        Raises:
            ValueError: The file holds something else than records of this input.
        """
        size = 0
        for i, (record, head) in enumerate(self._records(), 1):
            number = int(head[1]) if head else 0
            if head and 0 < number <= max_lines:
                self._note_done(number, int(head[2], 16))
                self.failed += not record.endswith(_NO_ERROR)
                size += len(record)
            elif record.endswith(b"\n"):
                raise ValueError(
                    f"{self.path}, line {i}, is not a result of this input: "
                    "resume with the files of the same job"
                )
            elif record[: len(_HEAD)] != _HEAD[: len(record)]:
                raise ValueError(f"{self.path} does not end in a result: is it another file?")
        return size

    def _note_done(self, number: int, line_hash: int) -> None:
        missing = number + 1 - len(self.done)
        if missing > 0:
            self.done.frombytes(bytes(missing * self.done.itemsize))
        self.done[number] = line_hash

    def _truncate_torn(self) -> int:
        """Remove a last line without a line end, which a killed writer left behind.

        Returns:
            The size of the file afterwards, in bytes.

        Raises:
            OSError: Records that this rank knows of are gone; nothing is removed then.
        """
        size = self._file.seek(0, os.SEEK_END)
        end = size
        while end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
            end -= 1
        if end < self._size:
            raise self._changed(f"was truncated from {self._size} to {size} bytes")
        if end < size:
            self._file.truncate(end)
        return end


def _lock_byte(fd: int, kind: int, byte: int) -> None:
    """Lock one byte of a file, as fcntl.lockf does, but for this open file, not for the process.

    These are the open file description locks of fcntl(2). flock is not used, because on a network
    file system it would lock the whole file.
    """
    if sys.platform == "linux":
        types = {fcntl.LOCK_SH: fcntl.F_RDLCK, fcntl.LOCK_EX: fcntl.F_WRLCK}
        lock_type = types.get(kind & ~fcntl.LOCK_NB, fcntl.F_UNLCK)
        command = fcntl.F_OFD_SETLK if kind & fcntl.LOCK_NB else fcntl.F_OFD_SETLKW
        flock = struct.pack("hhqqi4x", lock_type, os.SEEK_SET, byte, 1, 0)  # struct flock, fcntl.h
        try:
            fcntl.fcntl(fd, command, flock)
            return
        except OSError as e:
            if e.errno != errno.EINVAL:  # EINVAL: the kernel does not have these locks
                raise
    fcntl.lockf(fd, kind, 1, byte)
