"""Checks of downloaded files, and small files read whole.

In: the path of a file. Out: its bytes, or an OSError or ValueError that names the file, the problem
and the remedy. No file format is known here, and no network is used.
"""

import os
import re
import stat
from pathlib import Path

_HEAD_BYTES = 512  # enough to recognise an error page that a server sent instead of the file
_MAX_SMALL_BYTES = 64 << 20  # limit for a file that is read whole; the largest tokenizer has 17 MB
_MARKUP = re.compile(rb"(\xef\xbb\xbf)?\s*<[!?a-z]", re.IGNORECASE)


def check_download(path: Path) -> None:
    """Raise OSError or ValueError unless `path` is a regular file that looks like a good download.

    A failed download leaves a web page, a Git LFS pointer or an empty file. A named pipe or a
    device is refused too, because reading it could block forever.
    """
    if not path.exists():
        raise FileNotFoundError(f"{shown(path)} is missing: download it")
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(
            f"{shown(path)} is a directory: give the path of the file inside it"
        )
    if not stat.S_ISREG(mode):
        raise OSError(
            f"{shown(path)} is a pipe, a socket or a device: replace it with the file itself"
        )
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head.strip():
        raise broken(path, "is empty")
    if head.lstrip().lower().startswith(b"version https://git-lfs"):
        raise broken(path, "is a Git LFS pointer, not the file: run `git lfs pull`")
    # The length field before a safetensors header may spell "<a", but it also contains NUL bytes.
    if _MARKUP.match(head) and b"\0" not in head:
        raise broken(
            path,
            "is a web page (HTML or XML), not the file: sign in to the site that hosts it and "
            "accept the licence",
        )


def read_small(path: Path) -> bytes:
    """Return the content of a file that describes a model or holds its tokenizer.

    Raises:
        OSError: As `check_download` does.
        ValueError: As `check_download` does, or the file is too large to be such a file.
    """
    check_download(path)
    if path.stat().st_size > _MAX_SMALL_BYTES:
        raise broken(path, f"is larger than {_MAX_SMALL_BYTES:,} bytes, so it is another file")
    return path.read_bytes()


def check_utf8(path: Path) -> None:
    """Raise ValueError unless the path is UTF-8: torch and safetensors open no other paths."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{shown(path)} is not UTF-8: rename the folder or the file") from None


def shown(path: str | os.PathLike[str]) -> str:
    r"""Return the path as printable text: a byte that is not UTF-8 becomes \udcNN."""
    return os.fspath(path).encode(errors="backslashreplace").decode()


def broken(path: Path, problem: str) -> ValueError:
    """Return the error for a file that differs from what was published.

    Args:
        path: The file, which must exist.
        problem: A predicate whose subject is the file, such as "is empty".
    """
    return ValueError(f"{shown(path)} ({path.stat().st_size:,} bytes) {problem}; download it again")
