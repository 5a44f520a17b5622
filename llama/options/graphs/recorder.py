"""Recorders: a function that works on a device in, and what repeats its work out.

`Recorder` says what recording means, and `CudaRecorder` does it with CUDA graphs. Tests have other
recorders. Steps and models must not be known here.
"""

import atexit
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from llama.common.device import free_gpu_bytes

_POOLED_STREAMS = 32  # streams of a GPU that torch hands out in turn

Outputs = tuple[Tensor, ...]


class Recorder(Protocol):
    """Turns a function into one that repeats its work on the device.

    The function reads and writes tensors that stay where they are: the model's and `inputs`. Each
    replay overwrites the tensors that the function returned.
    """

    def record(
        self, function: Callable[[], Outputs], inputs: Seq[Tensor]
    ) -> tuple[Outputs, Callable[[], None]]:
        """Record `function`, and return its outputs and what replays it."""

    def free_bytes(self) -> int:
        """Return the memory of the device that a KV cache can have."""

    def close(self) -> None:
        """Free all that was recorded."""


class CaptureError(RuntimeError):
    """A step could not be recorded; it can still be run operator by operator."""


class CudaRecorder:
    """CUDA graphs of one device. They share one memory pool, as one of them runs at a time.

    No two live recorders share a stream. Graphs hold the address of the cuBLAS workspace of their
    stream, and the reset of any graph of the stream frees it (pytorch issue 193402).
    """

    _alive: ClassVar[weakref.WeakSet["CudaRecorder"]] = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = self._unused_stream(device)
        self._alive.add(self)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # Graphs may hold collectives of the process groups, which must end after them: atexit runs
        # the last registered function first.
        atexit.register(_close_if_alive, weakref.ref(self))

    @classmethod
    def _unused_stream(cls, device: torch.device) -> torch.cuda.Stream:
        """Return a stream of no live recorder; torch hands out the same few streams in turn."""
        in_use = {recorder._stream for recorder in cls._alive}
        streams = (torch.cuda.Stream(device) for _ in range(_POOLED_STREAMS))
        unused = next((stream for stream in streams if stream not in in_use), None)
        if unused is None:
            raise CaptureError(
                f"{len(in_use)} models with CUDA graphs are alive, and torch has no more streams: "
                "close one of them, or build with LLAMA_GPU_KERNELS=none"
            )
        return unused

    def record(
        self, function: Callable[[], Outputs], inputs: Seq[Tensor]
    ) -> tuple[Outputs, Callable[[], None]]:
        """Capture `function` in a graph, after running it once on the stream of the graphs.

        Raises:
            CaptureError: It has run, and cannot be captured.
        """
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                function()  # workspaces and modules are made at first use, which is not captured
            self._stream.synchronize()
            try:
                # nccl's watchdog calls CUDA from its own thread, which must not end the capture.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    outputs = function()
            except Exception as error:
                raise CaptureError(str(error)) from error
        finally:
            # A capture that fails leaves its stream current, where later steps would run unordered.
            torch.cuda.set_stream(before)
        self._graphs.append(graph)
        return outputs, graph.replay

    def free_bytes(self) -> int:
        """Return the free memory of the device, as the driver counts it.

        What torch's allocator keeps for reuse is given back before. The memory of graphs is not
        free, although torch counts it as kept.
        """
        torch.cuda.empty_cache()
        return free_gpu_bytes(self._device)

    def close(self) -> None:
        """Free the graphs, before the process groups whose collectives they hold."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # an unused pool cannot be used again
        self._alive.discard(self)


def _close_if_alive(recorder: weakref.ref[CudaRecorder]) -> None:
    alive = recorder()
    if alive is not None:
        alive.close()
