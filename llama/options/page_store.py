"""KV pages on disk as the second tier of the pool: prompts that were read once are loaded.

In: the pages of prompts that a step would compute, and those that steps have filled. Out: pages of
the KV cache, loaded as a chunk of a step, and files (`llama.storage.kv_folder`), which one thread
writes after the steps.

All ranks load the same pages. The leader plans: it counts the pages that it finds, where reading
them is faster than computing them. The others take its counts, with the message of the step or by
a broadcast. Once the step is scheduled, each rank reads its part, and what any rank misses is
computed in the same step.
"""

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llama.engine.hooks import StepHook
from llama.engine.runner import ModelRunner
from llama.engine.scheduler import Scheduler
from llama.engine.sequence import SequenceState
from llama.engine.step import Step, StepResults
from llama.storage.kv_folder import KVFolder
from llama.storage.kv_writer import KVWriter

_LOGGER = logging.getLogger("llama")
_BUFFER_BYTES = 64 << 20  # pages that wait to be written
_CLOSE_S = 30.0  # seconds in which they are written in the end
_MEASURED_TOKENS = 128  # tokens of a step whose time says how long prompts take
_WEIGHT = 0.2  # the weight of a new measurement in a mean
_RETRY_S = 60.0  # seconds after which a slow disk is tried again
_UNCOMPARED_S = 1.0  # a load may take so long, times `min_gain`, before computing was measured
_MAX_UNCOMPARED_S = 10.0  # so long at most, where it leaves enough to measure computing
_TRIED_PAGES = 4  # pages whose time says how fast a disk is, before the first load


@dataclass
class DiskPolicy:
    """The pages that are worth a file.

    Attributes:
        min_seconds: The computing time of a text from which on its pages are written.
        min_gain: How many times longer computing a page must take than reading it.
    """

    min_seconds: float = 0.5
    min_gain: float = 2.0


POLICY = DiskPolicy()


@dataclass
class DiskStats:
    """Counters of one rank since its start.

    Attributes:
        read_bytes: The bytes of pages that were read.
        hit_tokens: The tokens of prompts that were loaded.
        dropped_pages: Pages for which the buffer had no room.
    """

    read_bytes: int = 0
    hit_tokens: int = 0
    dropped_pages: int = 0


class _Load(NamedTuple):
    """Pages that a step is to find loaded, with the hashes of their content."""

    pages: list[int]
    contents: list[bytes]


class _Staged(NamedTuple):
    """Loaded pages that go into the KV cache right before their step runs."""

    step: Step
    pages: list[int]
    data: Tensor  # (n, K, bytes) uint8


class PageStore(StepHook):
    """The pages of one rank in a folder, as `PageTier` and as a part of each step.

    Attributes:
        folder: Finds pages.
        stats: Counters.
        counts: The counts of this step's loads, while this rank leads others by messages.
        told: The counts that the leader has sent for this step, on a rank that follows.
    """

    def __init__(
        self,
        folder: KVFolder,
        writer: KVWriter,
        runner: ModelRunner,
        scheduler: Scheduler,
        policy: DiskPolicy = POLICY,
    ) -> None:
        self.folder = folder
        self.writer = _WriteBehind(writer, folder.part.page_bytes)
        self.stats = DiskStats()
        self.counts: list[int] | None = None
        self.told: deque[int] | None = None
        self._policy = policy
        self._runner = runner
        self._model = runner.model
        self._scheduler = scheduler
        self._size = scheduler.pool.page_size
        self._format = runner.model.plan.kv_format
        self._path = runner.model.execution_path()
        self._planned: list[_Load] = []
        self._staged: list[_Staged] = []
        self._timed: tuple[Step, float, int] | None = None
        self._token_seconds: float | None = None  # computing a token of a prompt
        self._page_seconds: float | None = None  # reading a page, on the slowest rank
        self._retry_at = 0.0

    def load(self, pages: Sequence[int], contents: Sequence[bytes]) -> int:
        """Plan to load the first of these pages; see `PageTier.load`."""
        parallel = self._model.parallel
        if self.told is not None:
            count = self.told.popleft() if self.told else 0
        elif parallel.is_leader:
            count = self._num_worth_reading(contents)
        else:
            count = 0
        if self.counts is not None:
            self.counts.append(count)
        elif self.told is None and not parallel.is_alone:
            data = parallel.broadcast_bytes(count.to_bytes(4, "little"))
            count = int.from_bytes(data, "little")
        if count:
            self._planned.append(_Load(list(pages[:count]), list(contents[:count])))
        return count

    def before_pack(self, step: Step) -> None:
        """Read what was planned, on all ranks alike; let the step compute what any rank misses."""
        if self._planned:
            self._load_planned(step)
        num_tokens = sum([item.count for item in step.items])
        if num_tokens >= _MEASURED_TOKENS:
            self._timed = (step, time.perf_counter(), num_tokens)

    def _load_planned(self, step: Step) -> None:
        loads = self._planned
        self._planned = []
        began = time.perf_counter()
        found = [self._read(load) for load in loads]
        counts = self._model.parallel.lowest([count for count, _ in found])
        seconds = time.perf_counter() - began
        num_planned = sum(len(load.pages) for load in loads)
        self._page_seconds = _mean(self._page_seconds, seconds / num_planned)
        for load, count, (_, data) in zip(loads, counts, found, strict=True):
            if count < len(load.pages):
                self.folder.forget(load.contents[count])
                self._set_back(step, load, count)
            if count:
                self._staged.append(_Staged(step, load.pages[:count], data[:count]))
            self.stats.hit_tokens += count * self._size
            self.stats.read_bytes += count * self.folder.part.page_bytes

    def before_pass(self, step: Step) -> None:
        """Put the loaded pages of a step into the KV cache."""
        if not self._staged:
            return
        kv_cache = self._runner.kv_cache
        for _, pages, data in [staged for staged in self._staged if staged.step is step]:
            places = torch.tensor(pages, device=kv_cache.device)
            shape = (*kv_cache.shape[:2], len(pages), *kv_cache.shape[3:])
            loaded = self._format.from_heads(data.to(kv_cache.device), shape, kv_cache.dtype)
            kv_cache.index_copy_(2, places, loaded)
        self._staged = [staged for staged in self._staged if staged.step is not step]

    def after_rows(self, step: Step, results: StepResults) -> None:
        """Copy the pages that a step has filled, to be written."""
        if self._timed is not None and self._timed[0] is step:
            seconds = time.perf_counter() - self._timed[1]
            self._token_seconds = _mean(self._token_seconds, seconds / self._timed[2])
            self._timed = None
        for seq, filled in self._scheduler.filled(step):
            self._save(seq, filled)

    def broke_off(self) -> None:
        """Forget what was planned for a step that broke off."""
        self._planned.clear()
        self._staged.clear()
        self._timed = None

    def close(self) -> None:
        """Write what waits, and close the files."""
        self.writer.close()
        self.folder.close()

    @property
    def num_dropped(self) -> int:
        """The pages that were not written: the disk was too slow, or a limit was reached."""
        return self.stats.dropped_pages + self.writer.num_dropped

    @property
    def _is_as_built(self) -> bool:
        """Whether the model runs as it did when the store was made: no hook, the same weights."""
        return self._path is not None and self._model.execution_path() is self._path

    def _num_worth_reading(self, contents: Sequence[bytes]) -> int:
        """Return how many leading pages are found, if reading is faster than computing.

        Where computing was not measured yet and reading is slow, enough is left to measure it. A
        slow disk is tried with a few pages now and then.
        """
        self.folder.refresh()
        count = 0
        while count < len(contents) and contents[count] in self.folder:
            count += 1
        if not count:
            return 0
        if self._page_seconds is None:
            self._page_seconds = self._time_pages(contents[: min(count, _TRIED_PAGES)])
        num_measured = -(-_MEASURED_TOKENS // self._size)
        least = self._policy.min_gain * self._page_seconds  # seconds that computing a page takes
        if self._token_seconds is None:
            if least * count <= _UNCOMPARED_S:
                return count
            return min(max(0, count - num_measured), int(_MAX_UNCOMPARED_S / self._page_seconds))
        if least <= self._size * self._token_seconds:
            return count
        now = time.monotonic()
        if now < self._retry_at:
            return 0
        is_due = self._retry_at > 0
        self._retry_at = now + _RETRY_S
        return min(count, num_measured) if is_due else 0

    def _time_pages(self, contents: Sequence[bytes]) -> float:
        """Read pages that nobody needs, one by one, and return the seconds that each takes."""
        began = time.perf_counter()
        for content in contents:
            self._read(_Load([0], [content]))
        return (time.perf_counter() - began) / len(contents)

    def _read(self, load: _Load) -> tuple[int, Tensor]:
        """Read this rank's heads of pages.

        Returns:
            The number of leading pages that are whole, and their bytes, (n, K, bytes) uint8.
        """
        part = self.folder.part
        data = np.empty((len(load.pages), part.num_heads, part.head_bytes), np.uint8)
        count = 0
        if self._is_as_built:
            for content, page in zip(load.contents, data, strict=True):
                if not self.folder.read_into(content, page.reshape(-1).data):
                    break
                count += 1
        return count, torch.from_numpy(data)

    def _set_back(self, step: Step, load: _Load, count: int) -> None:
        """Let a step compute all pages of a load but the first `count`."""
        num_missing = (len(load.pages) - count) * self._size
        for item in step.items:
            seq = item.sequence
            last = item.start // self._size - 1
            if last >= 0 and seq.pages[last] == load.pages[-1]:
                item.start -= num_missing
                item.count += num_missing
                if not seq.num_output:
                    seq.num_cached = max(seq.num_cached - num_missing, 0)
                break
        step.items.sort(key=lambda item: (item.count > 1, item.sequence.spec.adapter))
        step.rows = Step.of(step.items).rows

    def _save(self, seq: SequenceState, filled: range) -> None:
        """Copy filled pages of a sequence, and those right before, that are worth a file.

        They are written in order, so that each can be found: what does not fit the buffer now is
        looked at again with the next page.
        """
        if seq.spec.stays_in_memory or seq.spec.is_only_read:
            return
        end = filled.start + len(filled)
        if end * self._size * (self._token_seconds or 0.0) < self._policy.min_seconds:
            return
        first = filled.start
        while first and not self._has_file(seq.page_hashes[first - 1]):
            first -= 1
        missing = [i for i in range(first, end) if not self._has_file(seq.page_hashes[i])]
        if not missing or not self._is_as_built:
            return
        fitting = missing[: self.writer.num_free]
        self.stats.dropped_pages += len(missing) - len(fitting)
        if fitting:
            data = self._copied([seq.pages[i] for i in fitting]).numpy()
            is_continued = seq.num_cached > seq.spec.num_public
            for i, page in zip(fitting, data, strict=True):
                is_public = (i + 1) * self._size <= seq.spec.num_public
                tenant = b"" if is_public else seq.spec.tenant
                self.writer.put(_Waiting(seq.page_hashes[i], page, tenant, is_continued))

    def _copied(self, pages: list[int]) -> Tensor:
        """Return the bytes of pages of the KV cache on the host, (n, K, bytes) uint8."""
        kv_cache = self._runner.kv_cache
        places = torch.tensor(pages, device=kv_cache.device)
        return self._format.to_heads(kv_cache.index_select(2, places)).cpu()

    def _has_file(self, content: bytes) -> bool:
        return content in self.folder or content in self.writer.waiting


class _Waiting(NamedTuple):
    """A page that is to be written, as `KVWriter.append` takes it."""

    content: bytes
    page: np.ndarray  # (K, bytes) uint8
    tenant: bytes
    is_continued: bool


_Queue = queue.SimpleQueue[_Waiting | None]


class _WriteBehind:
    """The thread that writes pages, and the buffer in which they wait.

    Attributes:
        waiting: The hashes of the pages in the buffer.
    """

    def __init__(self, writer: KVWriter, page_bytes: int) -> None:
        self.waiting: set[bytes] = set()
        self._writer = writer
        self._max_pages = max(1, _BUFFER_BYTES // page_bytes)
        self._queue: _Queue = queue.SimpleQueue()
        arguments = (self._queue, self.waiting, writer)
        thread = threading.Thread(target=_write, args=arguments, name="llama-kv", daemon=True)
        thread.start()
        # A process that ends without `close` writes what waits.
        self._end = weakref.finalize(self, _end, self._queue, thread)

    @property
    def num_free(self) -> int:
        """The number of pages for which the buffer has room."""
        return max(0, self._max_pages - len(self.waiting))

    @property
    def num_dropped(self) -> int:
        """The pages that were taken and could not be written."""
        return self._writer.num_dropped

    @property
    def written_bytes(self) -> int:
        """The bytes that were written."""
        return self._writer.written_bytes

    def put(self, entry: _Waiting) -> None:
        """Let a page be written."""
        self.waiting.add(entry.content)
        self._queue.put(entry)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._end()


def _write(pages: _Queue, waiting: set[bytes], writer: KVWriter) -> None:
    """Write pages until None comes."""
    while (entry := pages.get()) is not None:
        content, page, tenant, is_continued = entry
        try:
            writer.append(content, page.reshape(-1).data, tenant, is_continued=is_continued)
        except Exception:  # No request waits for this thread, so that nothing else says it.
            _LOGGER.exception("llama: a KV page could not be written")
        waiting.discard(content)
    writer.close()


def _end(pages: _Queue, thread: threading.Thread) -> None:
    pages.put(None)
    thread.join(_CLOSE_S)


def _mean(mean: float | None, value: float) -> float:
    """Return an exponential mean with one more value."""
    return value if mean is None else mean + _WEIGHT * (value - mean)
