"""A rank on a machine with as many imitated GPUs as ranks: gloo carries host memory.

It joins its groups by `connect` and writes, as JSON to `FOLDER/rankN.json`, the current CUDA device
at each operation that launches on it: a kernel of torch is launched on the current device of its
thread, whatever device its pointers belong to. Usage: current_devices.py FOLDER, under torchrun.
With SHARED_GPU all ranks find the same GPU, and write the error of the build. With GROUP_SIZE the
ranks form model-parallel groups of this size.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as fs_init

from llama.ranks import groups, one_shot, torch_private
from llama.ranks.collectives import ModelParallel

RANK = int(os.environ["RANK"])


class FakeCUDA(threading.local):
    """The current device, which is separate for each thread; CUDA starts with device 0."""

    current = 0

    def set_device(self, device: torch.device) -> None:
        self.current = torch.device(device).index


cuda = FakeCUDA()
seen: list[tuple[str, int]] = []


def recorded(name: str, function: Callable) -> Callable:
    """Return `function`, which records the current device whenever it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        seen.append((name, cuda.current))
        return function(*args, **kwargs)

    return call


def on_host(function: Callable) -> Callable:
    """Return a function of torch that takes host memory in place of a GPU's."""

    def call(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def init_process_group(backend: str, *, device_id: torch.device, **kwargs: Any) -> None:
    assert backend == "nccl" and device_id.index == RANK
    real_init(backend="gloo", **kwargs)
    world: Any = dist.distributed_c10d.GroupMember.WORLD
    world.bound_device_id = device_id  # as torch binds nccl


def symmetric_buffer(num_bytes: int, device: torch.device) -> tuple:
    def rendezvous(group: dist.ProcessGroup) -> tuple:
        def one_shot_sum(own: torch.Tensor, x: torch.Tensor) -> None:
            real_all_reduce(x, group=group)

        kernel = recorded("one-shot kernel", one_shot_sum)
        return kernel, kernel

    return torch.empty(num_bytes, dtype=torch.uint8), recorded("rendezvous", rendezvous)


def properties(device: torch.device) -> SimpleNamespace:
    return SimpleNamespace(uuid=os.environ.get("SHARED_GPU", f"GPU-{device.index}"))


def seconds(run: Callable[[], object]) -> float:
    """Run a sum as it is timed: the one-shot kernels are faster."""
    run()
    return 1.0 + (run.func is dist.all_reduce)  # type: ignore[attr-defined]


def split_source(group: dist.ProcessGroup) -> SimpleNamespace:
    """Return nccl's communicator, which all ranks must split at once."""
    split = recorded("split of a group that others make", lambda device: None)
    return SimpleNamespace(perform_nocolor_split=split)


def is_nccl(group: dist.ProcessGroup) -> str:
    return "nccl"


real_init = dist.init_process_group
real_all_reduce = dist.all_reduce
patches: list[Any] = [
    mock.patch.object(torch.cuda, "set_device", cuda.set_device),
    mock.patch.object(
        dist, "init_process_group", recorded("init_process_group", init_process_group)
    ),
    mock.patch.object(dist, "all_reduce", recorded("all_reduce", real_all_reduce)),
    mock.patch.object(dist, "get_backend", is_nccl),
    mock.patch.object(dist.distributed_c10d, "_get_split_source", split_source),
    mock.patch.object(torch.cuda, "get_device_properties", properties),
    mock.patch.object(torch, "zeros", on_host(torch.zeros)),
    mock.patch.object(torch_private, "symmetric_buffer", symmetric_buffer),
    mock.patch.object(one_shot, "_reaches_peers", lambda device: True),
    mock.patch.object(one_shot, "_seconds", seconds),
]
for patch in patches:
    patch.start()
try:
    size = int(os.environ.get("GROUP_SIZE", os.environ["WORLD_SIZE"]))
    parallel = groups.connect(size, torch.device("cuda", RANK), 30)
except ValueError as error:
    Path(sys.argv[1], f"rank{RANK}.json").write_text(json.dumps(str(error)))
    sys.exit()
assert isinstance(parallel, ModelParallel)
assert (parallel.one_shot is not None) == (size > 1)
assert fs_init.get_data_parallel_world_size() == int(os.environ["WORLD_SIZE"]) // size
assert fs_init.get_model_parallel_rank() == RANK % size
assert fs_init.get_pipeline_parallel_ranks() == [RANK]
mock.patch.stopall()
Path(sys.argv[1], f"rank{RANK}.json").write_text(json.dumps(seen))
groups.disconnect()
