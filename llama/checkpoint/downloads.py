"""Files that were downloaded: is one what it should be, and what is said where it is not?

In: a path. Out: nothing, or the bytes of a small file, or an OSError or ValueError with the
remedy. No file format is known here.
"""

import os
import re
import stat
from pathlib import Path

_HEAD_BYTES = 512  # enough to recognise what a server sends instead of a file
_MOST_BYTES = 64 << 20  # of a file that is read whole: the largest tokenizer.json has 17 MB
_MARKUP = re.compile(rb"(\xef\xbb\xbf)?\s*<[!?a-z]", re.IGNORECASE)


def check_download(path: Path) -> None:
    """OSError or ValueError unless `path` is a regular file that does not look like a bad download.

    A named pipe or a device would be waited for without end. A web page, a Git LFS pointer and an
    empty file are what a download leaves that went wrong.
    """
    if not path.exists():
        raise FileNotFoundError(f"{shown(path)} is missing: download it")
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(
            f"{shown(path)} is a directory: give the path of the file inside it"
        )
    if not stat.S_ISREG(mode):
        raise OSError(f"{shown(path)} is a pipe, a socket or a device: put the file itself there")
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head.strip():
        raise broken(path, "is empty")
    if head.lstrip().lower().startswith(b"version https://git-lfs"):
        raise broken(path, "is a Git LFS pointer, not the file: run `git lfs pull`")
    if _MARKUP.match(head) and b"\0" not in head:  # the length before a safetensors header has NULs
        raise broken(
            path,
            "is a web page (HTML or XML), not the file: sign in where it comes from, accept the "
            "licence",
        )


def read_small(path: Path) -> bytes:
    """A file that describes a model or is its tokenizer: never large, so a large one is another."""
    check_download(path)
    if path.stat().st_size > _MOST_BYTES:
        raise broken(path, f"is larger than {_MOST_BYTES:,} bytes, so it is another file")
    return path.read_bytes()


def check_utf8(path: Path) -> None:
    """ValueError unless the path is UTF-8: torch and safetensors open no other."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{shown(path)} is not UTF-8: rename the folder or the file") from None


def shown(path: str | os.PathLike[str]) -> str:
    """The path as text that can be printed and sent: a byte that is not UTF-8 becomes \\udcNN."""
    return os.fspath(path).encode(errors="backslashreplace").decode()


def broken(path: Path, why: str) -> ValueError:
    """The error for a file that was not downloaded as it was published."""
    return ValueError(f"{shown(path)} ({path.stat().st_size:,} bytes) {why}; download it again")
