"""The two files of a batch job: lines in, read forward once; records out, whole or not at all.

A record is one write to a file opened for appending, so a process killed at any moment loses only
what it had not finished. Its id holds the line's number and a fingerprint of the line: that is all
that a resumed job needs to know what is done, and whether it is given the same input.
"""

import errno
import fcntl
import hashlib
import io
import json
import os
import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

MAX_LINE = 10_000_000  # bytes; of a longer line, only so many are kept in memory
_BOM = b"\xef\xbb\xbf"
_ID = "batch_req_{:012d}_{:08x}"
_HEAD = b'{"id": "batch_req_'
_RECORD = re.compile(re.escape(_HEAD) + rb'(\d{12})_([0-9a-f]{8})", ')
_JOB_LOCK, _WRITE_LOCK = 0, 1  # the byte of the output that stands for each lock


class Line(NamedTuple):
    """A line that is not blank, without its end. `mark` is its fingerprint, never 0."""

    number: int  # from 1, blank lines counted
    data: bytes  # more than MAX_LINE bytes if the line was too long: then only its beginning
    mark: int


def read_lines(file: BinaryIO, salt: str) -> Iterator[Line]:
    """The lines of a binary file, one in memory at a time; `salt` goes into the fingerprints."""
    salted = hashlib.blake2b(salt.encode(), digest_size=4)
    number = 0
    while piece := file.readline(MAX_LINE + 2):
        number += 1
        data = piece.removesuffix(b"\n").removesuffix(b"\r")
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(1 << 20)
        if number == 1:
            data = data.removeprefix(_BOM)
        if data and not data.isspace():
            fingerprint = salted.copy()
            fingerprint.update(data)
            yield Line(number, data, int.from_bytes(fingerprint.digest()) or 1)


def check_files(in_path: str, out_path: str, *, resume: bool) -> None:
    """OSError or ValueError unless the input is there and no result would be overwritten."""
    os.stat(in_path)  # not opened: a pipe would be spent
    os.stat(os.path.dirname(out_path) or ".")
    if resume and not os.path.isfile(in_path):
        raise ValueError(f"{in_path} is a stream, and cannot be read again to resume: give a file")
    if not resume and os.path.exists(out_path) and os.path.getsize(out_path):
        raise FileExistsError(
            f"{out_path} has results already: add --resume to do only what is missing, "
            "or write to another file"
        )


def _open_existing(path: str, flags: int) -> int:
    """For ranks after the first: one that cannot see the first's file must not make its own."""
    return os.open(path, flags & ~os.O_CREAT)


class Results:
    """The output file, shared by the replicas of one job and by nobody else.

    done: for each line, at its number, its fingerprint, or 0 if it has no record yet: four bytes a
    line, and none in a new file. failed: the records that hold an error. The `first` of a job's
    ranks makes the file, and sees that no other job has it; the others open it after that.
    """

    def __init__(self, path: str, *, first: bool = True, most_lines: int = 0) -> None:
        self.path = path
        self.failed = 0
        self._first = first
        self.done = array("I", [0])
        self._file = io.FileIO(path, "a+", opener=None if first else _open_existing)
        self._claim(fcntl.LOCK_EX if first else fcntl.LOCK_SH)
        self._read(most_lines)
        if first:
            self._claim(fcntl.LOCK_SH)

    @property
    def num_done(self) -> int:
        return len(self.done) - self.done.count(0)

    def has(self, line: Line) -> bool:
        """Whether the line has its record. ValueError if that record is of another line."""
        mark = self.done[line.number] if line.number < len(self.done) else 0
        if mark and mark != line.mark:
            raise ValueError(
                f"line {line.number} or the flags are not those that {self.path} was made with: "
                "resume with the same input, seed, temperature, top_p and max_gen_len, "
                "or write to another file"
            )
        return mark != 0

    def append(self, line: Line, fields: dict[str, object]) -> None:
        """Add the record of a line, after an id; once this returns, it outlives the process."""
        record = {"id": _ID.format(line.number, line.mark), **fields}
        data = json.dumps(record).encode() + b"\n"  # ASCII: no reader sees another line end in it
        with self._turn():
            end = self._mend()
            try:
                if self._file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, "no room for a whole record", self.path)
            except BaseException:
                if self._file.seek(0, os.SEEK_END) < end + len(data):
                    self._file.truncate(end)
                raise

    def close(self) -> None:
        """Also against a power failure, what is in the file stays."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def _claim(self, kind: int) -> None:
        """Keep out another job: its first rank wants alone what every rank of this one holds."""
        try:
            self._lock(kind | fcntl.LOCK_NB, _JOB_LOCK)
        except (BlockingIOError, PermissionError):
            self._file.close()
            raise ValueError(
                f"{self.path} is being written by another job: wait until it ends, or stop it"
            ) from None

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._lock(fcntl.LOCK_EX, _WRITE_LOCK)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_UN, _WRITE_LOCK)

    def _lock(self, kind: int, byte: int) -> None:
        try:
            # Not flock: on network file systems it is this lock, of the whole file.
            fcntl.lockf(self._file, kind, 1, byte)
        except OSError as e:
            if e.errno in (errno.EACCES, errno.EAGAIN):
                raise
            if not self._first:  # a rank alone can do without
                why = "this file system has no locks, which several ranks need: write elsewhere"
                raise OSError(e.errno, why, self.path) from None

    def _read(self, most_lines: int) -> None:
        """Learn which lines are done. ValueError, before any change, if these are not records."""
        reader = io.BufferedReader(self._file, 1 << 20)
        reader.seek(0)
        for i, record in enumerate(reader, 1):
            if record.endswith(b"\n"):
                head = _RECORD.match(record)
                number = int(head[1]) if head else 0
                if head is None or not 0 < number <= most_lines:
                    raise ValueError(
                        f"{self.path}, line {i}, is no result of this input: "
                        "resume with the files of the same job"
                    )
                if number >= len(self.done):
                    self.done.frombytes(bytes((number + 1 - len(self.done)) * self.done.itemsize))
                self.done[number] = int(head[2], 16)
                self.failed += not record.endswith(b'"error": null}\n')
            elif record[: len(_HEAD)] != _HEAD[: len(record)]:
                raise ValueError(f"{self.path} does not end in a result: is it another file?")
        reader.detach()  # or it would close the file, and the locks would go with it

    def _mend(self) -> int:
        """Cut off a last line without its end, which a killed writer left; the size after it."""
        size = end = self._file.seek(0, os.SEEK_END)
        block = 1  # nearly always, the last byte is a line end
        while end:
            start = max(0, end - block)
            self._file.seek(start)
            at = self._file.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end, block = start, 1 << 16
        if end < size:
            self._file.truncate(end)
        return end
