"""Pages written to disk: to segments of this process, within the limits of the folder.

In: pages as bytes, by the hashes of their content. Out: records, which a `KVFolder` finds. A
process appends to a segment that it has locked, and waits for a lock only where another process
makes a segment. No error is raised: a page that cannot be written is left out.
"""

import contextlib
import json
import logging
import os
import secrets
import time

from llama.storage.kv_disk import (
    DAY_S,
    DESCRIPTION,
    SEGMENT_BYTES,
    alone,
    has_room,
    locked,
    make_private,
    note_written,
    remove,
    segments,
    write_whole,
    written_today,
)
from llama.storage.kv_folder import KVFolder
from llama.storage.kv_segments import HEADER_BYTES, SUFFIX, SegmentWriter

log = logging.getLogger("llama")
DAYS_UNUSED = 7  # after which a segment is removed
_PAUSE_S = 60.0  # without writing, after an error
_COUNTED_BYTES = 8 << 20  # written bytes that are counted at once
_DAY_LIMITS = 4  # times the limit that is written in a day, and as much again of continued texts


class KVWriter:
    """Writes the pages of one rank, in one thread.

    Attributes:
        written_bytes: The bytes that were written.
        num_dropped: The pages that were not.
    """

    def __init__(
        self,
        folder: KVFolder,
        max_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        num_writers: int = 1,
    ) -> None:
        """Remove segments that were not used for days, and those beyond the limit.

        Args:
            folder: Finds what is written.
            max_bytes: The limit of all segments, those of other models included.
            segment_bytes: The largest size of a segment.
            num_writers: The ranks that write to the folder; each can have two segments.
        """
        record_bytes = folder.part.record_bytes
        segment_bytes = min(segment_bytes, max_bytes // (2 * num_writers))
        self.written_bytes = 0
        self.num_dropped = 0
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_records = max(1, (segment_bytes - HEADER_BYTES) // record_bytes)
        self._segment_bytes = HEADER_BYTES + self._max_records * record_bytes
        self._segment: SegmentWriter | None = None
        self._name = ""
        self._uncounted = 0
        self._today = 0  # bytes that were written within a day, by all processes
        self._look_at = 0.0  # when these are looked up again
        self._write_at = 0.0  # no writing before this time
        self._has_warned = False
        oldest = time.time() - DAYS_UNUSED * DAY_S
        for path, _, used in segments(folder.root):
            if used < oldest:
                remove(path)
        self._make_room(0)

    def append(
        self, key: bytes, page: memoryview, tenant: bytes = b"", *, is_continued: bool = False
    ) -> bool:
        """Write a page, unless a limit or an error forbids it; return whether it was written.

        Args:
            key: The hash of its content.
            page: The bytes of its heads.
            tenant: The tag of the tenant that it belongs to.
            is_continued: Whether the text before was found, so that it was asked for again. Of
                such texts pages are written when the day's bytes for others are used up.
        """
        is_written = time.monotonic() >= self._write_at and self._append(
            key, page, tenant, is_continued
        )
        self.num_dropped += not is_written
        return is_written

    def _append(self, key: bytes, page: memoryview, tenant: bytes, is_continued: bool) -> bool:
        try:
            if self._is_spent(is_continued):
                return False
            segment = self._segment or self._next()
            if segment is None:
                return False
            number = segment.append(key, page, tenant)
            is_found = self._folder.add(number, key)
            self._count(self._folder.part.record_bytes)
        except OSError as error:
            self._end_segment()
            self._pause(str(error))
            return False
        if not is_found or segment.num_records >= self._max_records:
            self._end_segment()
        return is_found

    def close(self) -> None:
        """Close the segment; another process may go on with it."""
        self._end_segment()
        with contextlib.suppress(OSError):
            self._flush_count()

    def _is_spent(self, is_continued: bool) -> bool:
        """Return whether the bytes of a day are written; say so once."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _PAUSE_S
            self._today = written_today(self._folder.root)
        limit = _DAY_LIMITS * self._max_bytes * (1 + is_continued)
        is_spent = self._today + self._uncounted >= limit
        if is_spent:
            self._warn("the bytes of this day are written")
        return is_spent

    def _next(self) -> SegmentWriter | None:
        """Return a segment that has room, or a new one; None if the limits leave no room."""
        folder = self._folder
        make_private(folder.root)
        folder.path.mkdir(mode=0o700, exist_ok=True)
        description = folder.path / DESCRIPTION
        if not description.exists():
            write_whole(description, json.dumps(vars(folder.identity), indent=1).encode())
        if not has_room(folder.root, self._segment_bytes):
            self._pause("the disk is nearly full")
            return None
        folder.refresh()
        if self._resume() or self._start():
            return self._segment
        self._pause("kv_cache_disk_bytes leaves no room")
        return None

    def _resume(self) -> bool:
        """Go on with a segment that no process writes."""
        for name in self._folder.unfilled(self._max_records):
            try:
                descriptor = locked(self._folder.path / name, os.O_RDWR)
            except OSError:
                continue
            if descriptor is not None and self._take(name, descriptor) < self._max_records:
                return True
            self._end_segment()
        return False

    def _start(self) -> bool:
        """Make a new segment, if there is room or others can be removed."""
        name = f"{int(time.time())}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        with alone(self._folder.root):  # Ranks fill their segments at the same time.
            has_room = self._make_room(self._segment_bytes)
            descriptor = locked(self._folder.path / name, flags) if has_room else None
        if descriptor is None:
            return False
        self._take(name, descriptor)
        return True

    def _take(self, name: str, descriptor: int) -> int:
        """Write to a locked segment from now on, and return how many records it has."""
        num_records = self._folder.own(name)
        self._segment = SegmentWriter(descriptor, self._folder.description, num_records)
        self._name = name
        return num_records

    def _end_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
            self._folder.own("")

    def _make_room(self, num_bytes: int) -> bool:
        """Remove the segments unused for longest until a file fits; return whether it does.

        A segment that is not full counts as if it were, since any process may go on with it.
        """
        folder = self._folder
        found = sorted(segments(folder.root), key=lambda entry: entry[2])
        sizes = [max(size, self._segment_bytes) for _, size, _ in found]
        excess = sum(sizes) + num_bytes - self._max_bytes
        for (path, *_), size in zip(found, sizes, strict=True):
            if excess <= 0:
                break
            if remove(path):
                excess -= size
                if path.parent == folder.path:
                    folder.drop(path.name)
        return excess <= 0

    def _count(self, num_bytes: int) -> None:
        """Count written bytes; look at the limits and at the own file now and then."""
        self.written_bytes += num_bytes
        self._uncounted += num_bytes
        if self._uncounted >= _COUNTED_BYTES:
            self._flush_count()
            is_there = (self._folder.path / self._name).exists()
            if not is_there or not has_room(self._folder.root):
                self._end_segment()

    def _flush_count(self) -> None:
        if self._uncounted:
            note_written(self._folder.root, self._uncounted)
            self._uncounted = 0
            self._look_at = 0.0

    def _pause(self, reason: str) -> None:
        """Write nothing for a minute."""
        self._write_at = time.monotonic() + _PAUSE_S
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        """Say once why pages are not written."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "llama: KV pages are not written to %s for now: %s", self._folder.root, reason
            )
