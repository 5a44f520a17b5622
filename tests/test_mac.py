"""A model on a Mac's GPU that is absent: its name, its limits, and the CPU's values."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from helpers.absent_device import AbsentDevice, refuse_float64
from llama import Llama

PROMPTS = [[256, 70, 71], [256, 77], [256, *range(65, 90)]]


@pytest.fixture
def mac(monkeypatch) -> Iterator[None]:
    """A Mac with 1 GiB for its GPU."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1 << 30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 0)
    with AbsentDevice("mps", refuse_float64):
        yield


def build(folder: str, device: str | None, dtype: str = "fp32") -> Llama:
    return Llama.build(folder, None, 128, 4, device=device, dtype=dtype)


def test_requests_of_every_kind_give_the_ids_of_the_cpu(mac, checkpoint_dir):
    """Greedy and sampled requests give the CPU's ids, and the default device is the GPU.

    A past fault: each sampled request failed, because MPS has no float64.
    """
    gpu = build(str(checkpoint_dir[0]), None)
    assert gpu.engine.runner.kv_cache.device.type == "mps"
    cpu = build(str(checkpoint_dir[0]), "cpu")
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": True},
        {"temperature": 0.6, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "top_p": 1.0, "seed": 4, "logprobs": True},
    ]
    for settings in ways:
        ours, theirs = (llama.generate(PROMPTS, 20, **settings) for llama in (gpu, cpu))
        assert ours[0] == theirs[0], settings
        for a, b in zip(ours[1] or [], theirs[1] or [], strict=True):
            assert a == pytest.approx(b, abs=1e-4)
