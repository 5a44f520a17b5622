"""Weights from files to a GPU: threads read into pinned buffers, and a stream of its own copies.

In: tensors on the device, and where their bytes lie in files. Out: the tensors, filled. Torch alone
would fault the mapped file in page by page, in one thread, and copy it twice: some 4 GB/s of the 50
that PCIe has. On a CPU the buffers are plain and the copies immediate; the bytes are the same.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from llama.checkpoint.files import read_exactly
from llama.device import available_cores, current

_CHUNK = 8 << 20  # bytes of a buffer
_BUFFERS = 2  # of a thread: it reads into one while the other is copied
_MOST_THREADS = 16
_MOST_PENDING = 4  # tensors that are being read: their temporary copies take the device's memory


class _Buffer:
    """Host memory, and the moment when the copy from it has been made."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.memory = torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=is_cuda)
        self.copied = torch.cuda.Event() if is_cuda else None

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class Staging:
    """Fills tensors of one device within a `with` block; they are whole when it has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        threads = min(_MOST_THREADS, max(2, available_cores()))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="llama-load")
        self._own = threading.local()  # of each thread: its buffers
        self._pending: deque[tuple[list[Future], Callable[[], object] | None]] = deque()

    def __enter__(self) -> "Staging":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            while self._pending and error is None:
                self._complete()
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def read(
        self, into: Tensor, file: Path, offset: int, then: Callable[[], object] | None = None
    ) -> None:
        """Fill a contiguous tensor with the bytes of `file` from `offset` on, soon.

        then: called on the stream once the tensor is whole. ValueError, in this call or a later
        one, where the file ends too early.
        """
        target = into.view(-1).view(torch.uint8)
        futures = [
            self._pool.submit(self._read_chunk, target[at : at + _CHUNK], file, offset + at)
            for at in range(0, len(target), _CHUNK)
        ]
        self._pending.append((futures, then))
        while len(self._pending) > _MOST_PENDING:
            self._complete()

    def convert(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        file: Path,
        offset: int,
        use: Callable[[Tensor], object],
    ) -> None:
        """Read a tensor of another type or layout to the device, and let `use` copy it there."""
        with self._on_stream():
            raw = torch.empty(shape, dtype=dtype, device=self._device)
        self.read(raw, file, offset, lambda: use(raw))

    def _complete(self) -> None:
        """Wait until the oldest tensor is on its way, chunk by chunk, and do what comes then."""
        futures, then = self._pending.popleft()
        for future in futures:
            future.result()
        if then is not None:
            with self._on_stream():
                then()

    def _read_chunk(self, target: Tensor, file: Path, offset: int) -> None:
        """In a thread of the pool."""
        if not hasattr(self._own, "buffers"):
            self._own.buffers = deque(_Buffer(self._device) for _ in range(_BUFFERS))
        buffer = self._own.buffers[0]
        self._own.buffers.rotate()
        buffer.wait()
        chunk = buffer.memory[: len(target)]
        read_exactly(chunk.numpy().data, file, offset)
        with self._on_stream():
            target.copy_(chunk, non_blocking=self._stream is not None)
            if buffer.copied is not None:
                buffer.copied.record(self._stream)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Work in the block goes to the stream; on a CPU, it is done."""
        with current(self._device), torch.cuda.stream(self._stream):
            yield
