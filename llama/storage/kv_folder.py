"""The pages on disk that one rank finds: an index of the segments in the folder of a model.

In: the folder that a user gives, and what the pages of a model depend on. Out: a `KVFolder`, which
finds pages by the hashes of their content. It knows neither torch nor sequences, and raises nothing
for damaged files: these are misses.

    DIR/                  0700, of this user alone
      secret              32 random bytes, the key of the roots of tenants
      written             when how many bytes were written
      IDENTITY/model.json the model, and what its pages depend on
      IDENTITY/*.kv       segments (kv_segments.py), of all ranks and processes
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from llama.storage.kv_disk import is_segment, make_private, segments
from llama.storage.kv_segments import MAX_HEADS, Description, Part, Segment

log = logging.getLogger("llama")
_REFRESH_S = 1.0
_TOUCH_S = 60.0  # between two changes of a segment's time
_MAX_OPEN = 16


@dataclass(frozen=True)
class Identity:
    """The facts that the pages of a model depend on.

    Attributes:
        model: The path of the weights, for people.
        content: Everything that changes what a page means, by name.
        numerics: Everything that changes how it is rounded, too.
    """

    model: str
    content: dict[str, object]
    numerics: dict[str, object]

    def describe(self, part: Part) -> Description:
        """Return the header of segments of these pages."""
        return Description(_digest(self.content), _digest(self.numerics), part)


class _Place(NamedTuple):
    """A record: the name of its segment, and its number."""

    name: str
    number: int


@dataclass
class _Known:
    """A segment of the folder that has been scanned.

    Attributes:
        description: Its header.
        keys: The keys of its records, in order; empty for damaged ones.
        touched: When its time was last changed.
    """

    description: Description
    keys: list[bytes] = field(default_factory=list)
    touched: float = 0.0


class KVFolder:
    """The pages that one rank finds in a folder.

    One thread may read while another one adds what it has written.

    Attributes:
        root: The folder that the user gave.
        path: The folder of the model's pages.
        identity: What the pages depend on.
        description: The header of segments of this rank's pages.
        num_damaged: Pages that were found and had changed.
    """

    def __init__(
        self, root: Path, identity: Identity, part: Part, *, is_exact: bool = True
    ) -> None:
        """Open the folder, which is made if it is missing.

        Args:
            root: The folder that the user gave.
            identity: What the pages depend on.
            part: The part of each page that this rank holds.
            is_exact: Whether pages are found only if they were rounded alike.

        Raises:
            OSError: The folder cannot be made or read, or other users can enter it.
        """
        assert part.num_heads <= MAX_HEADS, part
        self.root = root
        self.identity = identity
        self.description = identity.describe(part)
        self.path = root / self.description.identity.hex()[:16]
        self.num_damaged = 0
        self._is_exact = is_exact
        self._index: dict[bytes, list[_Place]] = {}
        self._known: dict[str, _Known] = {}
        self._open: OrderedDict[str, Segment] = OrderedDict()
        self._lock = threading.RLock()
        self._refresh_at = 0.0
        self._own_name = ""  # the segment that this process writes, and adds itself
        make_private(root)
        self.refresh()

    @property
    def part(self) -> Part:
        """The part of each page that this rank holds."""
        return self.description.part

    @property
    def nbytes(self) -> int:
        """The bytes of all segments, those of other models included."""
        return sum(size for _, size, _ in segments(self.root))

    def __contains__(self, key: bytes) -> bool:
        """Return whether this rank finds all its heads of a page."""
        return key in self._index and self._pieces(key) is not None

    def refresh(self) -> None:
        """Look for what other processes have written or removed, once a second at most."""
        now = time.monotonic()
        if now < self._refresh_at:
            return
        self._refresh_at = now + _REFRESH_S
        with self._lock:
            try:
                names = {entry.name for entry in os.scandir(self.path) if is_segment(entry.name)}
            except OSError:
                names = set()
            for name in self._known.keys() - names:
                self.drop(name)
            for name in sorted(names - {self._own_name}):  # the oldest first
                self.scan(name)

    def read_into(self, key: bytes, out: memoryview) -> bool:
        """Read this rank's heads of a page.

        Args:
            key: The hash of its content.
            out: The bytes of the heads, which are written here.

        Returns:
            Whether the page was found whole. If not, `out` may have any content. Records that are
            not whole are not found again.
        """
        size = self.part.head_bytes
        while (pieces := self._pieces(key)) is not None:
            for place, heads in pieces:
                first = heads.start - self.part.first_head
                target = out[first * size : (first + len(heads)) * size]
                if not self._read_piece(key, place, heads, target):
                    self._drop_place(key, place)
                    break
            else:
                return True
        return False

    def forget(self, key: bytes) -> None:
        """Find a page no longer, so that it can be written again."""
        with self._lock:
            self._index.pop(key, None)

    def unfilled(self, max_records: int) -> list[str]:
        """Return the segments of this rank's pages that have fewer records."""
        with self._lock:
            return [
                name
                for name, known in self._known.items()
                if known.description == self.description and len(known.keys) < max_records
            ]

    def own(self, name: str) -> int:
        """Return the records of a segment that this process writes from now on; it has the lock.

        Args:
            name: The segment. An empty name: none is written.
        """
        with self._lock:
            self._own_name = name
            if name:
                self.scan(name)
                self._known.setdefault(name, _Known(self.description))
            return len(self._known[name].keys) if name else 0

    def add(self, number: int, key: bytes) -> bool:
        """Find a page that was written to the own segment; return whether that is still there."""
        with self._lock:
            known = self._known.get(self._own_name)
            if known is None:
                return False
            known.keys += [b""] * (number - len(known.keys))
            self._add(self._own_name, known, key)
        return True

    def scan(self, name: str) -> None:
        """Find the records of a segment that are not known yet, if they are for this rank."""
        try:
            segment = Segment(self.path / name)
        except (OSError, ValueError):  # It is gone, or has no header yet.
            return
        with self._lock, contextlib.closing(segment), contextlib.suppress(OSError):
            if self._finds(segment.description):
                known = self._known.setdefault(name, _Known(segment.description))
                for key in segment.keys(len(known.keys)):
                    self._add(name, known, key)

    def drop(self, name: str) -> None:
        """Forget a segment."""
        with self._lock:
            known = self._known.pop(name, None)
            for number, key in enumerate(known.keys if known else ()):
                self._drop_place(key, _Place(name, number))
            segment = self._open.pop(name, None)
            if segment is not None:
                segment.close()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _add(self, name: str, known: _Known, key: bytes) -> None:
        if key:
            self._index.setdefault(key, []).append(_Place(name, len(known.keys)))
        known.keys.append(key)

    def _pieces(self, key: bytes) -> list[tuple[_Place, range]] | None:
        """Return records that together have this rank's heads of a page; None if there are none."""
        own = self.part.heads
        pieces: list[tuple[_Place, range]] = []
        head = own.start
        with self._lock:
            found = self._index.get(key, ())
            places = [(x, self._known[x.name].description.part.heads) for x in found]
        while head < own.stop:
            fitting = [pair for pair in places if head in pair[1]]
            if not fitting:
                return None
            # Of equal ones, the newest: it was written where an older one had changed.
            place, heads = max(reversed(fitting), key=lambda pair: pair[1].stop)
            stop = min(heads.stop, own.stop)
            pieces.append((place, range(head, stop)))
            head = stop
        return pieces

    def _read_piece(self, key: bytes, place: _Place, heads: range, out: memoryview) -> bool:
        try:
            is_whole = self._opened(place.name).read_into(place.number, key, heads, out)
        except (OSError, ValueError):  # It was removed, or the disk has an error.
            return False
        if is_whole:
            self._touch(place.name)
        else:
            if not self.num_damaged:
                log.warning("llama: KV pages in %s have changed, and are not used", self.path)
            self.num_damaged += 1
        return is_whole

    def _opened(self, name: str) -> Segment:
        """Return an open segment; the last few stay open."""
        with self._lock:
            segment = self._open.pop(name, None) or Segment(self.path / name)
            self._open[name] = segment
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
        return segment

    def _touch(self, name: str) -> None:
        """Say in the time of a segment that it was used."""
        now = time.monotonic()
        known = self._known.get(name)
        if known is not None and now > known.touched + _TOUCH_S:
            known.touched = now
            with contextlib.suppress(OSError):
                os.utime(self.path / name)

    def _finds(self, other: Description) -> bool:
        """Return whether a segment has pages for this rank."""
        own = self.description
        if other.identity != own.identity or (self._is_exact and other.numerics != own.numerics):
            return False
        same_layers = other.part[:2] == own.part[:2] and other.part[-1] == own.part[-1]
        return same_layers and 0 < other.part.num_heads <= MAX_HEADS

    def _drop_place(self, key: bytes, place: _Place) -> None:
        with self._lock:
            places = [other for other in self._index.get(key, ()) if other != place]
            if places:
                self._index[key] = places
            else:
                self._index.pop(key, None)


def _digest(values: dict[str, object]) -> bytes:
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
