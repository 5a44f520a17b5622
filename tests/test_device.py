"""Cores are divided among ranks and bounded by a container; what the user chose is left alone."""

import os
import subprocess
import sys

import pytest
import torch

from llama import device as threads
from llama.device import available_cores, set_num_threads
from llama.loading import load_model


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(cores, quota, **environment) -> torch's threads after `set_num_threads`."""

    def settled(cores: int, quota: str, before: int, **environment: str) -> int:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
        (tmp_path / "cpu.max").write_text(quota)
        monkeypatch.setattr(threads, "_QUOTA", tmp_path / "cpu.max")
        for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        torch.set_num_threads(before)
        set_num_threads()
        return torch.get_num_threads()

    return settled


TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("cores", "quota", "before", "environment", "after"),
    [
        (8, "max 100000", 8, {}, 8),
        (8, "250000 100000", 8, {}, 3),
        (8, "50000 100000", 8, {}, 1),
        (8, "max 100000", 3, {}, 3),  # chosen by torch.set_num_threads
        (8, "250000 100000", 5, {"OMP_NUM_THREADS": "5"}, 5),
        (8, "max 100000", 1, TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, 4),
        (8, "500000 100000", 1, TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, 2),
        (8, "max 100000", 1, TORCHRUN | {"LOCAL_WORLD_SIZE": "16"}, 1),
        (8, "max 100000", 3, TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, 3),
        (8, "max 100000", 1, {"OMP_NUM_THREADS": "1"}, 1),
        (8, "max 100000", 2, TORCHRUN | {"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "2"}, 2),
    ],
)
def test_threads(machine, cores, quota, before, environment, after):
    assert machine(cores, quota, before, **environment) == after


@pytest.mark.parametrize(("device", "times"), [("cpu", 1), ("meta", 0)])
def test_building_on_the_cpu_settles_threads(checkpoint_dir, monkeypatch, device, times):
    settled = []
    monkeypatch.setattr("llama.loading.set_num_threads", lambda: settled.append(1))
    monkeypatch.setattr("llama.loading.pick_device", lambda _: torch.device(device))
    monkeypatch.setattr("llama.loading._choose_sizes", lambda *_: None)
    monkeypatch.setattr("llama.loading.checkpoint.load", lambda *_, **__: None)
    load_model(
        str(checkpoint_dir[0]),
        None,
        64,
        2,
        None,
        1,
        device=None,
        dtype="fp32",
        kv_cache_memory_bytes=None,
        timeout_s=9,
    )
    assert len(settled) == times


def test_without_a_quota_the_cores_count(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "_QUOTA", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5}, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert available_cores() == 2


def test_torchrun_s_default_is_told_from_a_choice(tmp_path):
    """`set_num_threads` knows what torchrun does: two ranks on eight cores get four each."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, torch\n"
        "os.sched_getaffinity = lambda _: set(range(8))\n"
        "from llama import threads\n"
        "threads._quota = lambda: 99\n"
        "threads.set_num_threads()\n"
        "print(torch.get_num_threads(), flush=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(script)]
    for chosen, told in ((None, "4"), ("2", "2")):
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        environment |= {"OMP_NUM_THREADS": chosen} if chosen else {}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout.split() == [told, told]
