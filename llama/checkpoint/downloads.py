"""Files that were downloaded: where they are; is one what it should be, and what if it is not?

In: a path, or the name of a model. Out: the model's folder, the bytes of a small file, or an
OSError or ValueError with the remedy. No file format is known here, and no network is used.
"""

import contextlib
import ctypes
import mmap
import os
import re
import stat
import threading
from pathlib import Path

_HEAD_BYTES = 512  # enough to recognise what a server sends instead of a file
_MOST_BYTES = 64 << 20  # of a file that is read whole: the largest tokenizer.json has 17 MB
_WEIGHTS = (".pth", ".safetensors", ".gguf")
_MARKUP = re.compile(rb"(\xef\xbb\xbf)?\s*<[!?a-z]", re.IGNORECASE)


def repository(name: str | os.PathLike[str]) -> str:
    """The hub's repository that a name stands for: ORG/NAME, or NAME alone for one of Meta's."""
    return str(name) if "/" in str(name) else f"meta-llama/{name}"


def hub_cache() -> Path:
    """Hugging Face's cache, by its own variables: what other programs have fetched is there too."""
    get = os.environ.get
    home = get("HF_HOME") or get("XDG_CACHE_HOME", "~/.cache") + "/huggingface"
    return Path(get("HF_HUB_CACHE") or home + "/hub").expanduser()


def model_folder(name: str | os.PathLike[str]) -> Path:
    """A folder as it is; for a model's name, where `llama download` has put it, if it has."""
    folder, home = Path(name), hub_cache() / f"models--{repository(name).replace('/', '--')}"
    if folder.exists() or not (commit := home / "refs" / "main").is_file():
        return folder
    return home / "snapshots" / commit.read_text()


def read_ahead(folder: Path) -> threading.Thread:
    """Have the system read the weights in a folder, or a file, into its page cache, in a thread: a
    disk is read while torch is imported. What cannot be read is left to who opens it, and so are
    files of more than half of the machine's memory: their end would drive out their beginning.

    They are mapped in huge pages for that. posix_fadvise would leave pages of 4 KiB in the cache,
    in which a product takes 1.8 to 2.4 times the CPU time (a Xeon with AMX, Linux 6.18).
    """
    files = [folder] if folder.is_file() else [x for x in folder.glob("*") if x.suffix in _WEIGHTS]
    reading = threading.Thread(target=_touch, args=(files,), daemon=True)
    reading.start()
    return reading


def cache_anew(file: Path) -> None:
    """Have the page cache hold a new file as `read_ahead` does: writing leaves small pages."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    _touch([file])


def _touch(files: list[Path]) -> None:
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if sum(path.stat().st_size for path in files if path.exists()) >= most:
        return
    for path in files:
        with contextlib.suppress(OSError, ValueError, AttributeError), path.open("rb") as file:
            try:
                os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size - 1, os.RWF_NOWAIT)
            except BlockingIOError:  # the last byte is not there, so that others may not be
                pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                first, madvise = ctypes.c_char.from_buffer(pages), ctypes.CDLL(None).madvise
                for advice in (14, 22):  # MADV_HUGEPAGE, MADV_POPULATE_READ: madvise(2)
                    madvise(ctypes.byref(first), ctypes.c_size_t(len(pages)), advice)


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
