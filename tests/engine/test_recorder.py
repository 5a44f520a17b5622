"""The recorder of CUDA graphs, over a torch.cuda that has streams, workspaces and memory alone."""

import pytest
import torch

from helpers.fake_cuda import DEFAULT_STREAM, POOL, FakeCuda
from llama.options.graphs.recorder import CaptureError, CudaRecorder

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


def nothing() -> tuple:
    return ()


def test_graphs_of_a_model_outlive_those_of_later_ones(cuda):
    """A model's graphs can be replayed after many later models were built and closed.

    A past fault: torch hands out 32 streams in turn, and the reset of a later model's graph freed
    the workspace of an older one's.
    """
    old = CudaRecorder(GPU)
    _, replay = old.record(nothing, [])
    for _ in range(40):
        later = CudaRecorder(GPU)
        later.record(nothing, [])
        later.close()
        replay()
    assert cuda.current is DEFAULT_STREAM


def test_each_live_model_has_a_stream_of_its_own(cuda):
    recorders = [CudaRecorder(GPU) for _ in range(POOL)]
    assert len({recorder._stream for recorder in recorders}) == POOL
    with pytest.raises(CaptureError, match="32 models with CUDA graphs are alive"):
        CudaRecorder(GPU)
    recorders.pop().close()
    CudaRecorder(GPU)


def test_a_capture_that_fails_leaves_no_stream_behind(cuda):
    """A capture that fails restores the stream, as later steps would run on the graphs' own."""
    recorder = CudaRecorder(GPU)
    cuda.fails = True
    with pytest.raises(RuntimeError, match="previous error in capture"):
        recorder.record(nothing, [])
    assert cuda.current is DEFAULT_STREAM


def test_the_measured_bytes_of_a_graph_are_its_own(cuda):
    """What torch's allocator keeps is not taken for the memory of a graph, nor from it.

    A past fault: a capture empties the allocator's cache, so that a graph seemed to take less than
    nothing, and the KV cache became too large.
    """
    cuda.kept = 5000
    recorder = CudaRecorder(GPU)

    def step() -> tuple:
        if cuda.current is DEFAULT_STREAM:
            raise AssertionError("a graph is recorded on a stream of its own")
        cuda.kept += 300  # activations of the run before the capture
        cuda.free -= 300 + 7
        return ()

    before = recorder.free_bytes()
    recorder.record(step, [])
    assert before - recorder.free_bytes() == 2 * 7
