"""A folder of KV pages on disk as all models and processes share it: limits, secret, deletion.

In: the folder. Out: its segments, the bytes written within a day, the secret from which the roots
of tenants are made, and the lists and deletions of `llama kv`. It knows neither torch nor what a
page is.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llama.storage.kv_segments import SUFFIX, Segment

SEGMENT_BYTES = 64 << 20
MIN_BYTES = 2 * SEGMENT_BYTES  # the smallest limit
DAY_S = 86_400
DESCRIPTION = "model.json"  # in the folder of a model's pages
_MIN_FREE = 2 << 30  # bytes of the disk that stay free, besides the next part of it
_MIN_FREE_PART = 0.05
_MAX_ENTRIES = 8192  # the entries that `written` keeps
_ENTRY = struct.Struct("<QQ")
_FOLDER = re.compile("[0-9a-f]{16}")


class StoredModel(NamedTuple):
    """The pages of one model in a folder.

    Attributes:
        folder: Their folder.
        model: The path of the weights.
        details: What else tells models of one path apart.
        nbytes: The bytes of the segments.
        last_used: When one was last written or read, in seconds since 1970.
    """

    folder: Path
    model: str
    details: str
    nbytes: int
    last_used: float


def stored_models(root: Path) -> list[StoredModel]:
    """Return the models that have pages in a folder, the one used last first."""
    models = []
    for folder in _folders(root):
        segments = list(segments_in(folder))
        model, details = _described(folder)
        nbytes = sum(size for _, size, _ in segments)
        last_used = max((used for _, _, used in segments), default=folder.stat().st_mtime)
        models.append(StoredModel(folder, model, details, nbytes, last_used))
    return sorted(models, key=lambda model: -model.last_used)


def tenants_of(folder: Path) -> Counter[str]:
    """Return the bytes of each tenant's pages in the folder of a model.

    A tenant has its tag in hexadecimal as a name; an empty one stands for pages of all keys.
    """
    sizes: Counter[str] = Counter()
    for path, *_ in segments_in(folder):
        sizes.update(_tenants_in(path))
    return sizes


def clear(
    root: Path, model: str | None = None, days: float | None = None, tenant: str | None = None
) -> int:
    """Remove pages, and return how many bytes they had.

    A process that reads or writes one of these segments goes on, and makes a new one.

    Args:
        root: The folder.
        model: Remove those of models whose path ends in this name alone.
        days: Remove those alone that were not used for so many days.
        tenant: Remove those of the tenant with this name, and what shares a segment with them.
    """
    num_bytes = 0
    oldest = time.time() - (days or 0) * DAY_S
    models = stored_models(root)
    for stored in models:
        if model is not None and not _is_named(stored.model, model):
            continue
        for path, size, used in segments_in(stored.folder):
            is_old = days is None or used < oldest
            if is_old and (tenant is None or tenant in _tenants_in(path)):
                path.unlink(missing_ok=True)
                num_bytes += size
        if not any(segments_in(stored.folder)):
            for path in stored.folder.glob(f"{DESCRIPTION}*"):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # It has something else, which is not ours.
                stored.folder.rmdir()
    if models and not _folders(root):
        for name in ("secret", "written"):
            (root / name).unlink(missing_ok=True)
    return num_bytes


def default_folder() -> Path:
    """Return the folder of servers in the background."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "llama" / "kv"


def default_bytes(root: Path) -> int:
    """Return the limit that a folder has by default: 8 GiB, and a tenth of the free disk."""
    existing = next(path for path in (root, *root.parents) if path.exists())
    disk = os.statvfs(existing)
    return max(MIN_BYTES, min(8 << 30, disk.f_bavail * disk.f_frsize // 10))


def secret_of(root: Path) -> bytes:
    """Return the secret of a folder, from which the roots of tenants are made.

    Raises:
        OSError: It is missing and cannot be made, or cannot be read.
    """
    make_private(root)
    path = root / "secret"
    with contextlib.suppress(FileNotFoundError):
        return _read_secret(path)
    temporary = root / f"secret-{secrets.token_hex(4)}"
    write_whole(temporary, secrets.token_bytes(32))
    try:
        os.link(temporary, path)  # unlike a rename, it keeps the secret of another process
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    return _read_secret(path)


def make_private(folder: Path) -> None:
    """Make a folder that this user alone can enter.

    Raises:
        OSError: It cannot be made, or belongs to others.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder of yours that nobody else can enter, since KV pages are "
            f"the text of prompts: chmod 700 {folder}, or give another one"
        )


def _read_secret(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        secret = file.read()
    if len(secret) != 32:
        raise OSError(f"{path} is damaged: remove it, and the pages of tenants are not found again")
    return secret


def _folders(root: Path) -> list[Path]:
    """Return the folders of models; others in the same place are left alone."""
    found = (path for path in root.glob("*") if _FOLDER.fullmatch(path.name))
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def is_segment(name: str) -> bool:
    """Return whether a file of this name is a segment."""
    return name.endswith(SUFFIX)


def segments(root: Path) -> Iterator[tuple[Path, int, float]]:
    """Yield all segments of a folder: path, bytes, and when it was last used."""
    for folder in _folders(root):
        yield from segments_in(folder)


def segments_in(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Yield the segments of one model, as `segments` does."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if is_segment(entry.name):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    yield Path(entry.path), status.st_size, status.st_mtime


def _tenants_in(path: Path) -> Counter[str]:
    """Return the bytes of each tenant's pages in a segment, as `tenants_of` does."""
    with contextlib.suppress(OSError, ValueError):  # It is gone, or none.
        segment = Segment(path)
        with contextlib.closing(segment):
            size = segment.description.part.record_bytes
            counts = Counter(tag.hex() for tag in segment.tenants())
            return Counter({name: count * size for name, count in counts.items()})
    return Counter()


def _described(folder: Path) -> tuple[str, str]:
    """Return the model of a folder, and what tells its pages from others of the same model."""
    try:
        described = json.loads((folder / DESCRIPTION).read_bytes())
        content = described["content"]
        names = ("dtype", "quantize", "activations", "KV cache")
        details = [str(content[name]) for name in names if content.get(name)]
        return str(described["model"]), ", ".join(details)
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown", ""


def _is_named(model: str, name: str) -> bool:
    return name in (model, Path(model).name)


def locked(path: Path, flags: int) -> int | None:
    """Open a file and lock it; None where another process has, or it is gone by then."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Wait until no other process is in such a block with the folder.

    Raises:
        OSError: The folder is gone.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remove(path: Path) -> bool:
    """Remove a segment, unless a process writes it; return whether it is gone."""
    try:
        descriptor = locked(path, os.O_RDONLY)
        if descriptor is None:
            return not path.exists()
        path.unlink(missing_ok=True)
        os.close(descriptor)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of this user alone, which appears whole."""
    temporary = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def _entries(root: Path) -> list[tuple[int, int]]:
    """Return the times and the bytes of what was written within a day."""
    try:
        content = (root / "written").read_bytes()
    except FileNotFoundError:
        return []
    whole = content[: len(content) // _ENTRY.size * _ENTRY.size]
    now = time.time()
    return [(at, count) for at, count in _ENTRY.iter_unpack(whole) if now - DAY_S < at <= now]


def has_room(root: Path, num_bytes: int = 0) -> bool:
    """Return whether the disk has room for so many bytes, besides what stays free.

    Raises:
        OSError: The folder cannot be read.
    """
    disk = os.statvfs(root)
    free = disk.f_bavail * disk.f_frsize - num_bytes
    return free >= max(_MIN_FREE, _MIN_FREE_PART * disk.f_blocks * disk.f_frsize)


def written_today(root: Path) -> int:
    """Return the bytes that were written within a day.

    Raises:
        OSError: They cannot be read.
    """
    return sum(count for _, count in _entries(root))


def note_written(root: Path, num_bytes: int) -> None:
    """Add to the bytes that were written today.

    Raises:
        OSError: They cannot be written down.
    """
    path = root / "written"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, _ENTRY.pack(int(time.time()), num_bytes))
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if size > _MAX_ENTRIES * _ENTRY.size:
        write_whole(path, b"".join(_ENTRY.pack(*entry) for entry in _entries(root)))
