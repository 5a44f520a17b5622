"""torch.cuda without a GPU, as a recorder of graphs meets it: streams, captures and memory.

In: a monkeypatch fixture. Out: a `FakeCuda` whose streams come from a small pool in turn, and whose
graphs fail as those of a GPU do: a graph that is reset frees the cuBLAS workspace of its stream,
and a graph that is replayed without its workspace accesses an illegal address.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

POOL = 32  # streams that torch hands out in turn (c10/cuda/CUDAStream.cpp)


@dataclass(frozen=True)
class FakeStream:
    """A stream; two of the same number are the same one."""

    number: int

    def wait_stream(self, other: "FakeStream") -> None:
        pass

    def synchronize(self) -> None:
        pass


DEFAULT_STREAM = FakeStream(-1)


@dataclass
class FakeCuda:
    """The state of CUDA in one process.

    Attributes:
        current: The current stream.
        workspaces: The version of each stream's workspace; freeing it starts the next version.
        free: The bytes that the driver has left, without those that torch's allocator keeps.
        kept: The bytes that torch's allocator keeps, which `empty_cache` gives back.
        fails: Whether the end of a capture raises an error.
    """

    current: FakeStream = DEFAULT_STREAM
    workspaces: dict[FakeStream, int] = field(default_factory=dict)
    free: int = 1 << 30
    kept: int = 0
    fails: bool = False
    _num_streams: int = 0

    def new_stream(self, device: Any = None) -> FakeStream:
        self._num_streams += 1
        return FakeStream(self._num_streams % POOL)

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    def empty_cache(self) -> None:
        self.free += self.kept
        self.kept = 0

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current
        self.current = stream
        yield
        self.current = before

    @contextlib.contextmanager
    def graph(self, graph: "FakeGraph", stream: FakeStream, **_: Any) -> Iterator[None]:
        """Capture as torch.cuda.graph does, which keeps its stream if the capture cannot end."""
        self.empty_cache()
        before = self.current
        self.current = stream
        yield
        if self.fails:
            raise RuntimeError("CUDA error: operation failed due to a previous error in capture")
        graph.capture(self, stream)
        self.current = before

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeCuda":
        """Replace the functions of torch.cuda."""
        replaced: dict[str, Any] = {
            "Stream": self.new_stream,
            "current_stream": lambda device=None: self.current,
            "set_stream": self.set_stream,
            "stream": self.stream,
            "graph": self.graph,
            "graph_pool_handle": object,
            "CUDAGraph": FakeGraph,
            "empty_cache": self.empty_cache,
            "mem_get_info": lambda device: (self.free, 1 << 40),
            "memory_reserved": lambda device: self.kept,
        }
        for name, replacement in replaced.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        return self


class FakeGraph:
    """A graph that holds the address of its stream's workspace."""

    def capture(self, cuda: FakeCuda, stream: FakeStream) -> None:
        self._cuda = cuda
        self._stream = stream
        self._workspace = cuda.workspaces.setdefault(stream, 0)

    def replay(self) -> None:
        if self._cuda.workspaces[self._stream] != self._workspace:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def reset(self) -> None:
        self._cuda.workspaces[self._stream] += 1
