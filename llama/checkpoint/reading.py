"""Bytes of files into tensors, by several threads.

In: a contiguous tensor, and where its bytes lie in a file. Out: the tensor, filled, in less time
than the system takes to fault a mapped file in page by page. To a GPU they go through two buffers
of pinned memory: one is read into while the other is copied.
"""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from llama.checkpoint.downloads import broken
from llama.device import available_cores

_PIECE = 4 << 20  # bytes that a thread reads at a time
_BUFFER = 64 << 20  # bytes of a buffer
_MOST_THREADS = 16


class _Buffer:
    """Host memory, and the moment when the copy from it has been made."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.memory = torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=is_cuda)
        self.copied = torch.cuda.Event() if is_cuda else None

    def send(self, count: int, target: Tensor) -> None:
        """Copy the first bytes to a device, soon."""
        target.copy_(self.memory[:count], non_blocking=self.copied is not None)
        if self.copied is not None:
            self.copied.record(torch.cuda.current_stream(target.device))

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class FileReader:
    """Fills tensors of one device; on a GPU, in the order of its current stream."""

    def __init__(self, device: torch.device) -> None:
        threads = min(_MOST_THREADS, max(2, available_cores()))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="llama-load")
        self.is_staged = device.type != "cpu"
        self._buffers = deque(_Buffer(device) for _ in range(2 * self.is_staged))

    def read(self, into: Tensor, file: Path, offset: int) -> None:
        """Fill a contiguous tensor with the bytes of `file` from `offset` on; ValueError where it
        ends before."""
        target = into.view(-1).view(torch.uint8)
        if not self.is_staged:
            self._read(target, file, offset)
            return
        for at in range(0, len(target), _BUFFER):
            part, buffer = target[at : at + _BUFFER], self._buffers[0]
            self._buffers.rotate()
            buffer.wait()
            self._read(buffer.memory[: len(part)], file, offset + at)
            buffer.send(len(part), part)

    def _read(self, target: Tensor, file: Path, offset: int) -> None:
        memory = target.numpy().data

        def read(begin: int) -> None:
            _read_exactly(memory[begin : begin + _PIECE], file, offset + begin)

        for _ in self._pool.map(read, range(0, len(memory), _PIECE)):
            pass


def _read_exactly(memory: memoryview, file: Path, offset: int) -> None:
    descriptor, done = os.open(file, os.O_RDONLY), 0
    try:
        while done < len(memory):
            count = os.preadv(descriptor, [memory[done:]], offset + done)
            if not count:
                raise broken(file, "became shorter while it was read")
            done += count
    finally:
        os.close(descriptor)
