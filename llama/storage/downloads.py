"""Checks of downloaded files, and small files read whole.

In: the path of a file. Out: its bytes, or an OSError or ValueError that names the file, the problem
and the remedy. No file format is known here, and no network is used.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llama.common.checks import brief

AGAIN = "download it again"  # said only where bytes are missing or damaged
_HEAD_BYTES = 512  # enough to recognise an error page that a server sent instead of the file
_MAX_SMALL_BYTES = 64 << 20  # limit for a file that is read whole; the largest tokenizer has 17 MB
_BLOCK_BYTES = 4 << 20  # bytes that are read and hashed at a time
_SHA256 = re.compile(r"[0-9a-f]{64}")
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
        raise ValueError(
            f"{shown(path)} is larger than {_MAX_SMALL_BYTES:,} bytes, so it is another file"
        )
    return path.read_bytes()


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a small file that must hold a JSON object.

    Raises:
        OSError: As `check_download` does.
        ValueError: As `read_small` does, or the file does not hold a JSON object.
    """
    content = parse_json(path, read_small(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {brief(content)}")
    return content


def parse_json(path: Path, data: bytes) -> Any:
    """Return what the content of a JSON file stands for.

    Raises:
        ValueError: It is cut short, or not JSON.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(f"{path} is not JSON of a model: it is nested too deeply") from None
    except json.JSONDecodeError as e:
        is_cut = e.pos >= len(e.doc.rstrip()) or e.msg.startswith("Unterminated string")
        if is_cut:
            raise broken(path, f"is cut short: it is not JSON ({brief(str(e))})") from e
        raise ValueError(f"{path} is not JSON ({brief(str(e))}): correct it there") from e
    except UnicodeDecodeError as e:
        raise broken(path, f"is not JSON: it is damaged ({brief(str(e))})") from e
    except ValueError as e:  # a number of more digits than Python reads
        raise ValueError(f"{path} is not JSON of a model ({brief(str(e))})") from e


class Digest(NamedTuple):
    """The hash that a file must have.

    Attributes:
        algorithm: "md5" or "sha256"; "sha1" is that of a blob of git, which includes its size.
        value: The hash in lower-case hexadecimal.
        source: Where it comes from, for messages.
    """

    algorithm: str
    value: str
    source: str


def cached_digest(path: Path) -> Digest | None:
    """Return the SHA-256 that a file of Hugging Face's cache is named after; None for other files.

    There a file is a link to blobs/HASH. Small files are named after another hash.
    """
    if not path.is_symlink():
        return None
    blob = path.readlink()
    if blob.parent.name != "blobs" or not _SHA256.fullmatch(blob.name):
        return None
    return Digest("sha256", blob.name, "its name in the cache")


def check_digest(path: Path, digest: Digest) -> Iterator[int]:
    """Hash a file, and yield the size of each block that was read.

    Raises:
        ValueError: The hash differs.
    """
    computed = hashlib.new(digest.algorithm, usedforsecurity=False)
    if digest.algorithm == "sha1":
        computed.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            computed.update(block)
            yield len(block)
    if computed.hexdigest() != digest.value:
        name = {"md5": "MD5", "sha1": "git's SHA-1", "sha256": "SHA-256"}[digest.algorithm]
        raise broken(
            path, f"has {name} {computed.hexdigest()}, but {digest.source} says {digest.value}"
        )


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
    """Return the error for a file whose bytes are missing or not those that were published.

    Where they are all there, and say something odd, another download would give the same.

    Args:
        path: The file, which must exist.
        problem: A predicate whose subject is the file, such as "is empty".
    """
    return ValueError(f"{shown(path)} ({path.stat().st_size:,} bytes) {problem}; {AGAIN}")
