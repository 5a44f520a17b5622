"""The two files of a batch job: lines in, read once from the start; records out.

A record is one write to a file opened for appending, so a killed process loses only the records
that it had not written. Its id holds the number and a hash of its line: so a resumed job knows
which lines are done, and whether its input is the same. What a line asks for is not known here.
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

from llama.cli.batch.lines import MAX_LINE, check_encoding

_ID = "batch_req_{:012d}_{:08x}"
_HEAD = b'{"id": "batch_req_'
_RECORD = re.compile(re.escape(_HEAD) + rb'(\d{12})_([0-9a-f]{8})", ')
_JOB_LOCK, _WRITE_LOCK = 0, 1  # the byte of the output that stands for each lock


class Line(NamedTuple):
    """A line that is not blank, without its line end."""

    number: int  # from 1; blank lines count
    data: bytes  # only the beginning of a line that is too long, but more than MAX_LINE bytes
    line_hash: int  # 32 bits, never 0


def read_lines(file: BinaryIO, salt: str) -> Iterator[Line]:
    """The lines of a binary file, one in memory at a time. `salt` is hashed with each line.
    ValueError if the first line is not UTF-8, or the file was cut after it was opened."""
    size = os.fstat(file.fileno()).st_size  # 0 of a pipe
    salted = hashlib.blake2b(salt.encode(), digest_size=4)
    number = 0
    while piece := file.readline(MAX_LINE + 2):
        number += 1
        data = piece.removesuffix(b"\n").removesuffix(b"\r")
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(1 << 20)
        if not piece:
            _check_not_cut(file, size)
        if number == 1:
            check_encoding(str(file.name), data)
            data = data.removeprefix(codecs.BOM_UTF8)
        if data and not data.isspace():
            hashed = salted.copy()
            hashed.update(data)
            yield Line(number, data, int.from_bytes(hashed.digest()) or 1)
    _check_not_cut(file, size)


def _check_not_cut(file: BinaryIO, size: int) -> None:
    if size and file.tell() < size:
        raise ValueError(
            f"{file.name} had {size} bytes, and was cut to {file.tell()} while the job ran: "
            "restore it, and run again with --resume to do the lines that are missing"
        )


def check_files(in_path: str, out_path: str, *, resume: bool) -> None:
    """OSError or ValueError unless the input can be read, and the output written without loss."""
    os.stat(in_path)
    if os.path.isfile(in_path):
        with open(in_path, "rb") as file:
            check_encoding(in_path, file.readline(4096))
    elif os.path.isdir(in_path):
        raise ValueError(f"{in_path} is a folder: name a file with a request per line")
    elif resume:  # a pipe is not opened here: what is read from it is gone
        raise ValueError(f"{in_path} is a stream, and cannot be read again to resume: give a file")
    path = os.path.realpath(out_path)  # of a link, the file that it names
    exists = os.path.lexists(path)
    if exists and not os.path.isfile(path):
        raise ValueError(f"{out_path} is a folder or a device: name a file for the results")
    try:
        with open(path, "r+b") if exists else tempfile.TemporaryFile(dir=os.path.dirname(path)):
            pass
    except OSError as e:
        why = f"{e.strerror}: results cannot be written there, name another file"
        raise OSError(e.errno, why, out_path) from None
    if exists and os.path.getsize(path) and not resume:
        raise FileExistsError(
            f"{out_path} has results already: add --resume to do only what is missing, "
            "or write to another file"
        )


class Results:
    """The output file, shared by the replicas of one job and by nobody else: the first rank of a
    job (`first`) makes it, and sees that no other job writes to it. The other ranks open it after
    that. max_lines: a bound on the number of lines of the input."""

    def __init__(self, path: str, *, first: bool = True, max_lines: int = 0) -> None:
        self.path = path
        self.done = array.array("I", [0])  # at a line's number its hash; 0: it had no record
        self.failed = 0  # records with an error, when the file was opened
        self._first = first
        self._full_path = os.path.abspath(path)  # where it is, even after a chdir
        if not first:  # a rank that cannot see the first's file must not make its own
            os.stat(path)
        self._file = io.FileIO(path, "a+")
        try:
            # A second job fails here: all ranks of this one hold the lock together until its end.
            self._lock((fcntl.LOCK_EX if first else fcntl.LOCK_SH) | fcntl.LOCK_NB, _JOB_LOCK)
            self._size = self._read(max_lines)  # whole records only; the file must not shrink below
            self._lock(fcntl.LOCK_SH | fcntl.LOCK_NB, _JOB_LOCK)
        except BaseException:
            self._file.close()
            raise

    @property
    def num_done(self) -> int:
        return len(self.done) - self.done.count(0)

    def has(self, line: Line) -> bool:
        """Whether the line has its record. ValueError if the record is that of another line."""
        line_hash = self.done[line.number] if line.number < len(self.done) else 0
        if line_hash and line_hash != line.line_hash:
            raise ValueError(
                f"line {line.number} or the flags are not those that {self.path} was made with: "
                "resume with the same input, seed, temperature, top_p and max_gen_len, "
                "or write to another file"
            )
        return line_hash != 0

    def append(self, line: Line, fields: dict[str, Any]) -> None:
        """Write the record of a line: an id and `fields`. It then outlives a killed process.
        OSError if there is no room for it, or if another program changed the file."""
        record = {"id": _ID.format(line.number, line.line_hash), **fields}
        data = json.dumps(record).encode() + b"\n"  # ASCII: no reader sees another line end in it
        with self._write_lock():
            self._check_same_file()
            end = self._truncate_torn()
            try:
                if self._file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, "no room for a whole record", self.path)
            except BaseException:
                self._truncate_torn()
                raise
            self._size = end + len(data)

    def check_written(self, num_records: int) -> None:
        """OSError unless so many records are in the file, and the file is still at its path."""
        with self._write_lock():  # also makes a network file system show what others wrote
            self._check_same_file()
            found = sum(head is not None for _, head in self._records())
        if found != num_records:
            raise self._changed(f"has {found} records, and {num_records} were written")

    def close(self) -> None:
        """Close the file once its content is on the disk, safe from a power failure."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _check_same_file(self) -> None:
        try:
            found = os.stat(self._full_path)
        except FileNotFoundError:
            raise self._changed("was deleted") from None
        if not os.path.samestat(found, os.fstat(self._file.fileno())):
            raise self._changed("was replaced by another file")

    def _changed(self, what: str) -> OSError:
        return OSError(
            f"{self.path} {what} while the job ran, so results are lost: let no other program "
            "change it, and run again with --resume to do what is missing"
        )

    @contextmanager
    def _write_lock(self) -> Iterator[None]:
        self._lock(fcntl.LOCK_EX, _WRITE_LOCK)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_UN, _WRITE_LOCK)

    def _lock(self, kind: int, byte: int) -> None:
        """ValueError where a lock that is not waited for, that of the job, is another job's."""
        try:
            _lock_byte(self._file.fileno(), kind, byte)
        except (BlockingIOError, PermissionError):
            words = "is being written by another job: wait until it ends, or stop it"
            raise ValueError(f"{self.path} {words}") from None
        except OSError as e:
            if not self._first:  # one rank alone can work without locks
                why = "this file system has no locks, which several ranks need: write elsewhere"
                raise OSError(e.errno, why, self.path) from None

    def _records(self) -> Iterator[tuple[bytes, re.Match[bytes] | None]]:
        """Each line of the file, and its head if it is a whole record."""
        with open(self._file.fileno(), "rb", 1 << 20, closefd=False) as reader:
            reader.seek(0)
            for record in reader:
                yield record, _RECORD.match(record) if record.endswith(b"\n") else None

    def _read(self, max_lines: int) -> int:
        """Learn which lines are done; the size of their records. ValueError if not our records."""
        size = 0
        for i, (record, head) in enumerate(self._records(), 1):
            number = int(head[1]) if head else 0
            if head and 0 < number <= max_lines:
                if number >= len(self.done):
                    self.done.frombytes(bytes((number + 1 - len(self.done)) * self.done.itemsize))
                self.done[number] = int(head[2], 16)
                self.failed += not record.endswith(b'"error": null}\n')
                size += len(record)
            elif record.endswith(b"\n"):
                raise ValueError(
                    f"{self.path}, line {i}, is not a result of this input: "
                    "resume with the files of the same job"
                )
            elif record[: len(_HEAD)] != _HEAD[: len(record)]:
                raise ValueError(f"{self.path} does not end in a result: is it another file?")
        return size

    def _truncate_torn(self) -> int:
        """Cut off a last line without a line end, which a killed writer left. The size then.
        OSError, and nothing is cut, if the records that this rank knows of are no longer there."""
        size = end = self._file.seek(0, os.SEEK_END)
        while end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
            end -= 1
        if end < self._size:
            raise self._changed(f"was cut from {self._size} to {size} bytes")
        if end < size:
            self._file.truncate(end)
        return end


def _lock_byte(fd: int, kind: int, byte: int) -> None:
    """Lock one byte of a file, as fcntl.lockf does, but for this open file, not for the process
    (fcntl(2), open file description locks). flock locks whole files on a network file system."""
    if sys.platform == "linux":
        types = {fcntl.LOCK_SH: fcntl.F_RDLCK, fcntl.LOCK_EX: fcntl.F_WRLCK}
        wanted = types.get(kind & ~fcntl.LOCK_NB, fcntl.F_UNLCK)
        command = fcntl.F_OFD_SETLK if kind & fcntl.LOCK_NB else fcntl.F_OFD_SETLKW
        flock = struct.pack("hhqqi4x", wanted, os.SEEK_SET, byte, 1, 0)  # struct flock, fcntl.h
        try:
            fcntl.fcntl(fd, command, flock)
            return
        except OSError as e:
            if e.errno != errno.EINVAL:  # a kernel without them
                raise
    fcntl.lockf(fd, kind, 1, byte)
