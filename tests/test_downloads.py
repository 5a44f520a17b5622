"""A failed download is distinguished from a good file, and the error says what to do."""

import ast
import json
import mmap
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import llama
from llama import Tokenizer
from llama.storage.downloads import AGAIN, check_download, read_json
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


WHOLE = json.dumps({"weight_map": {"a": 7}, "text": "x" * 50}, indent=1).encode()
READERS: dict[str, Callable[[Path], object]] = {
    "config.json": read_json,
    "tokenizer.json": Tokenizer,
    "tokenizer.model": Tokenizer,
}


@pytest.mark.parametrize("size", [1, len(WHOLE) // 3, len(WHOLE) - 20, len(WHOLE) - 2])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_json_that_is_cut_short_is_to_be_downloaded_again(tmp_path, name, size):
    (tmp_path / name).write_bytes(WHOLE[:size])
    with pytest.raises(ValueError, match=rf"{name} .* is cut short: .*; {AGAIN}"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"[1, 2]"),
        ("config.json", WHOLE.replace(b":", b"=", 1)),
        ("config.json", b'{"a": 1,}'),
        ("config.json", b"[" * 10**5 + b"]" * 10**5),
        ("tokenizer.json", WHOLE),
        ("tokenizer.json", b'{"added_tokens": [], "model": {"type": "BPE", "vocab": {}}}'),
        ("tokenizer.model", b"IQ== 0\nIg== zero\nIw== 2\n"),
    ],
)
def test_a_whole_file_with_odd_content_is_not(tmp_path, name, content):
    """Another download of it would be the same file."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name) as error:
        READERS[name](tmp_path / name)
    assert "again" not in str(error.value)


def test_no_other_message_asks_for_another_download():
    """The remedy stands in one file, so that who uses it must ask whether bytes are missing."""
    asks = re.compile(r"(download|fetch|get)\b[^.:;]{0,40}\bagain\b", re.IGNORECASE)
    found = []
    for path in Path(llama.__file__).parent.rglob("*.py"):
        texts = [
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        found += [(path.name, text) for text in texts if asks.search(text)]
    assert found == [("downloads.py", AGAIN)]
