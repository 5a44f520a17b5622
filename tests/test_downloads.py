"""A failed download is distinguished from a good file, and the error says what to do."""

import mmap
import os
import struct
from pathlib import Path

import pytest

from llama.storage.downloads import check_download
from llama.storage.page_cache import cache_anew, read_ahead

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:82e9d31979e92ab9\nsize 2183982\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; download it again"),
        (b" \r\n", "is empty"),
        (LFS, "is a Git LFS pointer, not the file: run `git lfs pull`"),
        (b"<!DOCTYPE html><html>", "is a web page"),
        (b"\xef\xbb\xbf\n <HTML lang=en>", "is a web page"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code>', "is a web page .*sign in"),
        (b"<Error><Code>AccessDenied</Code></Error>", "is a web page"),
    ],
)
def test_a_bad_download_is_named(tmp_path, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"file \({len(content)} bytes\) {message}"):
        check_download(path)


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04",
        b"{}",
        b"IQ== 0\n",
        # a safetensors header of 6 MB, whose length is the text " <a"
        struct.pack("<Q", 0x613C20) + b"{",
        struct.pack("<Q", 0x3C) + b"{",
    ],
)
def test_a_good_file_passes(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    check_download(tmp_path / "file")


@pytest.mark.timeout(60)  # opening a pipe waits for a writer
def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is a pipe, a socket or a device"):
        check_download(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError, match="give the path of the file inside"):
        check_download(tmp_path)
    with pytest.raises(FileNotFoundError, match="nothing is missing: download it"):
        check_download(tmp_path / "nothing")


def test_files_are_read_ahead_and_what_is_missing_is_silent(tmp_path):
    """Files are read ahead, and missing ones are ignored.

    Where the file system drops cached pages on request, they are read again; otherwise they stay.
    """
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(32 << 20))
    (tmp_path / "empty.pth").touch()

    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read_ahead(tmp_path / "nothing").join(60)
        read_ahead(tmp_path).join(60)
        assert os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1, "it is not there"


def in_huge_pages(path: Path) -> int:
    """Return the bytes of a file in the page cache that can be mapped at once."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        pages.madvise(mmap.MADV_HUGEPAGE)
        for i in range(0, len(pages), 4096):
            pages[i]
        of_file = Path("/proc/self/smaps").read_text().partition(path.name)[2]
        return int(of_file.partition("FilePmdMapped:")[2].split()[0]) << 10


def test_a_new_file_is_cached_as_one_that_is_read_ahead(tmp_path):
    """A new file is cached like one that is read ahead.

    It has pages of 2 MiB, where the file system supports them: writes of 4 KiB would leave small
    ones.
    """
    written, read = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    for path in (written, read):
        with path.open("wb", buffering=0) as file:
            for _ in range(8 << 8):
                file.write(bytes(4096))
            if path == read:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert in_huge_pages(written) == 0
    cache_anew(written)
    read_ahead(read).join(60)
    assert bool(in_huge_pages(written)) == bool(in_huge_pages(read))


def test_what_is_larger_than_memory_is_not_read_ahead(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(4096))
    opened: list[tuple] = []
    monkeypatch.setattr(type(path), "open", lambda *x: opened.append(x))
    monkeypatch.setattr(os, "sysconf", lambda name: 64)  # a machine of 4096 bytes
    read_ahead(path).join(60)
    assert not opened
