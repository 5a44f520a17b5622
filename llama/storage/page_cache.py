"""The operating system's page cache: reading weights ahead of their use.

In: a file or a folder with weights. Out: pages in memory; no error is raised. Other systems than
Linux are left as they are.
"""

import contextlib
import ctypes
import mmap
import os
import threading
from pathlib import Path

_WEIGHT_SUFFIXES = (".pth", ".safetensors", ".gguf")
# Advice of Linux's madvise(2); Python's mmap module does not name both.
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22


def read_ahead(folder: Path) -> threading.Thread:
    """Start a thread that reads a file, or the weights in a folder, into the page cache.

    The disk is then read while torch is imported. The thread ignores errors: whoever opens the file
    will see them. It reads nothing if the files are larger than half of the machine's memory,
    because reading their end would evict their beginning.

    The files are mapped with huge pages. posix_fadvise would leave pages of 4 KiB in the cache,
    with which a matrix product takes 1.8 to 2.4 times the CPU time (Xeon with AMX, Linux 6.18).
    """
    if folder.is_file():
        files = [folder]
    else:
        files = [path for path in folder.glob("*") if path.suffix in _WEIGHT_SUFFIXES]
    thread = threading.Thread(target=_populate, args=(files,), daemon=True)
    thread.start()
    return thread


def cache_anew(file: Path) -> None:
    """Replace the cached pages of a file just written, which are small, by huge ones."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    _populate([file])


def _populate(files: list[Path]) -> None:
    """Read files into the page cache in huge pages, except those that are there already."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sum(path.stat().st_size for path in files if path.exists()) >= memory // 2:
        return
    for path in files:
        with contextlib.suppress(OSError, ValueError, AttributeError), path.open("rb") as file:
            if _is_cached(file.fileno(), path.stat().st_size):
                continue
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            first = ctypes.c_char.from_buffer(pages)
            madvise = ctypes.CDLL(None).madvise
            for advice in (_MADV_HUGEPAGE, _MADV_POPULATE_READ):
                madvise(ctypes.byref(first), ctypes.c_size_t(len(pages)), advice)


def _is_cached(file: int, size: int) -> bool:
    """Return whether the last byte of an open file is in the page cache, and so probably all."""
    try:
        os.preadv(file, [bytearray(1)], size - 1, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True
