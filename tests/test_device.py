"""Devices, dtypes, free memory and threads: choices of torchrun, containers and users are kept.

The control groups are folders laid out as cgroups(7) documents them.
"""

import contextlib
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.fake_cuda import FakeCuda
from helpers.launch import environment, run_program
from llama.build_args import BuildArgs
from llama.common import device as device_module
from llama.common.device import (
    available_cores,
    free_bytes,
    free_unused,
    pick_device,
    pick_dtype,
    set_num_threads,
)
from llama.engine.runner import ModelRunner, RunningStep
from llama.engine.step import Step
from llama.loading import load_model
from llama.ranks import groups
from llama.ranks.groups import check_carries

RANK_VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
V2, V1_MEMORY, V1_CPU = "0::{path}\n", "4:memory:{path}\n", "2:cpu,cpuacct:{path}\n"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """One process, without torchrun, and without the user's choice of threads or GPUs."""
    for name in (
        *RANK_VARIABLES,
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cgroup(monkeypatch, tmp_path) -> Callable[..., None]:
    """A function cgroup(V2, "/a/b", {"a": {file: text}}): this process's group, and files of
    groups.

    The folders of the groups are relative to the mount point.
    """
    monkeypatch.setattr(device_module, "_OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(device_module, "_GROUPS", tmp_path / "fs")

    def write(line: str, path: str, groups: dict) -> None:
        (tmp_path / "cgroup").write_text("1:name=systemd:/\n" + line.format(path=path))
        root = tmp_path / "fs" / {V2: "", V1_MEMORY: "memory", V1_CPU: "cpu"}[line]
        for folder, files in groups.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (root / folder / name).write_text(text + "\n")

    return write


@pytest.fixture
def cuda(monkeypatch) -> Callable[..., None]:
    """A function cuda(count, capability=(9, 0)) that makes torch find that many GPUs."""

    def found(count: int, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return found


def v1_memory(limit: int, used: int, cached: int = 0) -> dict[str, str]:
    stat = f"inactive_file 7\ntotal_inactive_file {cached}"
    return {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(used),
            "memory.stat": stat}  # fmt: skip


def v2_memory(limit: int | str, used: int, cached: int = 0) -> dict[str, str]:
    return {"memory.max": str(limit), "memory.current": str(used),
            "memory.stat": f"anon 5\ninactive_file {cached}"}  # fmt: skip


MIB = 1 << 20
UNLIMITED = 9223372036854771712  # what v1 writes for no limit


@pytest.mark.parametrize(
    ("version", "path", "groups", "left"),
    [
        # Only the own group is limited, or only a group above it, or both, and either one more.
        (V1_MEMORY, "/job/step", {"job/step": v1_memory(80 * MIB, 30 * MIB, 10 * MIB)}, 60),
        (V1_MEMORY, "/job/step", {"job": v1_memory(9 * MIB, 2 * MIB),
                                  "job/step": v1_memory(UNLIMITED, MIB)}, 7),
        (V2, "/a/b", {"a": v2_memory(50 * MIB, 20 * MIB, 10 * MIB), "a/b": v2_memory("max", 0)},
         40),
        (V2, "/a/b", {"a": v2_memory(90 * MIB, 20 * MIB), "a/b": v2_memory(30 * MIB, 5 * MIB)},
         25),
        # In a container the mount shows its own group and nothing above.
        (V2, "/", {"": v2_memory(64 * MIB, 60 * MIB, MIB)}, 5),
        (V1_MEMORY, "/docker/f00", {"": v1_memory(64 * MIB, 60 * MIB)}, 4),
        (V2, "/../outside", {"": v2_memory(8 * MIB, MIB)}, 7),
        # More is used than a limit that was lowered later.
        (V2, "/", {"": v2_memory(8 * MIB, 9 * MIB)}, 0),
    ],
)  # fmt: skip
def test_free_memory_is_bounded_by_every_group(cgroup, version, path, groups, left):
    cgroup(version, path, groups)
    assert free_bytes(torch.device("cpu")) == left * MIB


def test_without_a_limit_the_machine_counts(cgroup, monkeypatch):
    monkeypatch.setattr(device_module, "_available_memory", lambda: 12345)
    cgroup(V2, "/a", {"a": v2_memory("max", MIB)})
    assert free_bytes(torch.device("cpu")) == 12345
    monkeypatch.setattr(device_module, "_OWN_GROUPS", Path("/nowhere"))
    assert free_bytes(torch.device("cpu")) == 12345
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert free_bytes(torch.device("cpu")) == 12345 // 5
    monkeypatch.setenv("LLAMA_LOCAL_SERVERS", "2")
    assert free_bytes(torch.device("cpu")) == 12345 // 10
    monkeypatch.setenv("LLAMA_LOCAL_SERVERS", "two")
    with pytest.raises(ValueError, match="LLAMA_LOCAL_SERVERS"):
        free_bytes(torch.device("cpu"))


def test_blocks_that_torch_keeps_are_free(monkeypatch):
    """Blocks that torch caches are free: a second model in a process can use them."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert free_bytes(torch.device("cuda", 0)) == 140


def test_ranks_that_share_a_gpu_divide_its_memory(cuda, monkeypatch):
    """Four ranks on two GPUs have half of one each; without the variable a rank has all."""
    cuda(2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_bytes(torch.device("cuda", 0)) == 100
    monkeypatch.setenv("LLAMA_SHARE_GPU", "1")
    assert free_bytes(torch.device("cuda", 0)) == 50


@pytest.mark.parametrize(
    ("version", "path", "groups", "cores"),
    [
        (V2, "/a/b", {"a/b": {"cpu.max": "max 100000"}, "a": {"cpu.max": "250000 100000"}}, 3),
        (V2, "/a/b", {"a/b": {"cpu.max": "50000 100000"}, "a": {"cpu.max": "250000 100000"}}, 1),
        (V2, "/", {"": {"cpu.max": "max 100000"}}, 8),
        (V1_CPU, "/a/b", {"a": {"cpu.cfs_quota_us": "300000", "cpu.cfs_period_us": "100000"},
                          "a/b": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}}, 3),
    ],
)  # fmt: skip
def test_cores_are_bounded_by_every_group(cgroup, monkeypatch, version, path, groups, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    cgroup(version, path, groups)
    assert available_cores() == cores


TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("quota", "before", "variables", "after"),
    [
        ("max 100000", 8, {}, 8),
        ("250000 100000", 8, {}, 3),
        ("max 100000", 3, {}, 3),  # set by torch.set_num_threads
        ("250000 100000", 5, {"OMP_NUM_THREADS": "5"}, 5),
        ("max 100000", 1, TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, 4),
        ("500000 100000", 1, TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, 2),
        ("max 100000", 1, TORCHRUN | {"LOCAL_WORLD_SIZE": "16"}, 1),
        ("max 100000", 3, TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, 3),
        ("max 100000", 1, {"OMP_NUM_THREADS": "1"}, 1),
        ("600000 100000", 8, {"LLAMA_LOCAL_SERVERS": "2"}, 3),  # the quota of two servers
        ("max 100000", 8, {"LLAMA_LOCAL_SERVERS": "2"}, 8),  # each has its own CPU affinity
        ("max 100000", 2, TORCHRUN | {"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "2"}, 2),
    ],
)
def test_threads(cgroup, monkeypatch, quota, before, variables, after):
    """Eight cores are divided among the ranks, and the user's choice of threads is kept."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    cgroup(V2, "/", {"": {"cpu.max": quota}})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(before)
    set_num_threads()
    assert torch.get_num_threads() == after


@pytest.mark.parametrize(("device", "times"), [("cpu", 1), ("meta", 0)])
def test_building_on_the_cpu_sets_threads(checkpoint_dir, monkeypatch, device, times):
    calls: list[int] = []
    monkeypatch.setattr("llama.loading.weights.set_num_threads", lambda _: calls.append(1))
    monkeypatch.setattr("llama.loading.pick_device", lambda _: torch.device(device))
    monkeypatch.setattr("llama.loading.memory.choose_sizes", lambda *_: (64, 8))
    monkeypatch.setattr("llama.checkpoint.loader.load", lambda *_, **__: None)
    load_model(BuildArgs(str(checkpoint_dir[0]), None, 64, 2, dtype="fp32", timeout_s=9))
    assert len(calls) == times


def test_torchrun_s_default_is_told_from_a_choice(tmp_path):
    """torchrun's default is distinguished from a choice.

    The variables are those of a real torchrun: two ranks on eight cores get four threads each. In
    one launch, rank 1 plays the user who chose two threads, which torchrun would have passed on. A
    fork of each rank has one thread: OpenMP's others do not exist there, and it would wait for
    them.
    """
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, signal, torch\n"
        "os.sched_getaffinity = lambda _: set(range(8))\n"
        "from llama.common import device\n"
        "device._cgroup_cores = lambda: 99\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.environ['OMP_NUM_THREADS'] = '2'\n"
        "    torch.set_num_threads(2)\n"
        "device.set_num_threads()\n"
        # one write, because both ranks share a pipe
        "os.write(1, b'%d\\n' % torch.get_num_threads())\n"
        "add = lambda: torch.ones(1 << 20).sum()\n"
        "add()\n"
        "if pid := os.fork():\n"
        "    raise SystemExit(os.waitpid(pid, 0)[1])\n"
        "signal.alarm(20)\n"
        "add()\n"
        "os.write(1, b'%d\\n' % torch.get_num_threads())\n"
        "os._exit(0)\n"
    )
    variables = environment()
    del variables["OMP_NUM_THREADS"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(script)]
    done = run_program(command, env=variables)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["1", "1", "2", "4"]


@pytest.mark.parametrize(
    ("gpus", "device", "variables", "picked"),
    [
        (0, None, {}, "cpu"),
        (2, None, {}, "cuda:0"),
        (4, "cuda:3", {}, "cuda:3"),
        (4, "cuda", {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}, "cuda:3"),
        # Each task has a GPU of its own, which it sees as number 0.
        (1, "cuda", {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"},
         "cuda:0"),
        (1, "cuda:0", {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"},
         "cuda:0"),
        # For tests ranks may share GPUs, also one that is named.
        (2, None, {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3", "LLAMA_SHARE_GPU": "1"}, "cuda:1"),
        (1, "cuda:0", {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3", "LLAMA_SHARE_GPU": "1"},
         "cuda:0"),
    ],
)  # fmt: skip
def test_the_device_of_a_rank(cuda, monkeypatch, gpus, device, variables, picked):
    cuda(gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(pick_device(device)) == picked


@pytest.mark.parametrize(
    ("gpus", "device", "variables", "says"),
    [
        (0, "cuda", {}, "torch finds no CUDA GPU: use device='cpu'"),
        (0, "mps", {}, "torch finds no Apple GPU: use device='cpu'"),
        (0, "gpu", {}, "device='gpu' is not a device"),
        (0, None, {"WORLD_SIZE": "two"}, "WORLD_SIZE='two' must be a whole number from 1"),
        (1, None, {"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' must be a whole number from 0"),
        (0, 1.5, {}, "device=1.5 is not a device"),
        (2, "cuda:2", {}, "needs GPU 2, but torch finds 2"),
        (1, "cuda", {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "--nproc_per_node"),
        # With too many ranks, rank 0 reports it too; no task has a GPU of its own here.
        (2, "cuda", {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "needs GPU 3, but torch finds 2"),
        (
            1,
            "cuda",
            {
                "LOCAL_WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "CUDA_VISIBLE_DEVICES": "0",
                "LLAMA_LAUNCHER": "1",
            },
            "needs GPU 1, but torch finds 1, .*--ranks",
        ),
        (4, "cuda:0", {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"}, "use device='cuda', and each"),
    ],
)
def test_devices_that_cannot_be_used(cuda, monkeypatch, gpus, device, variables, says):
    cuda(gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        pick_device(device)


@pytest.mark.parametrize(
    ("built_with", "reason"),
    [("13.0", "The NVIDIA driver on your system is too old"), (None, "was built without CUDA")],
)
def test_a_gpu_that_torch_cannot_use_is_an_error(cuda, monkeypatch, tmp_path, built_with, reason):
    """An NVIDIA GPU that torch cannot use is an error with the reason and the remedy, on all ranks.

    A past fault: with a driver too old for torch's CUDA a large model ran on the CPU in silence.
    """

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")

    cuda(0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", built_with)
    monkeypatch.setattr(device_module, "_ROOT", tmp_path)
    assert pick_device(None).type == "cpu", "a machine without a GPU"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    said = f"has an NVIDIA GPU, but torch cannot use it: .*{reason}.*device='cpu'"
    for rank in ("0", "1"):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ValueError, match=said):
            pick_device(None)
        assert pick_device("cpu").type == "cpu"  # asked for
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("NVIDIA_VISIBLE_DEVICES", "void")):
        with monkeypatch.context() as hidden:
            hidden.setenv(name, value)
            assert pick_device(None).type == "cpu"


@pytest.mark.parametrize(
    ("vendor", "kind", "driver", "is_gpu"),
    [
        ("0x10de", "0x030000", "", True),
        ("0x10de", "0x030200", "nouveau", True),
        ("0x10de", "0x030200", "vfio-pci", False),  # a virtual machine has it
        ("0x10de", "0x040300", "", False),  # the sound of its screens
        ("0x1002", "0x030000", "amdgpu", False),
    ],
)
def test_a_gpu_without_its_driver_is_found(
    cuda, monkeypatch, tmp_path, vendor, kind, driver, is_gpu
):
    """A GPU is on the PCI bus, also where NVIDIA's driver is not installed."""
    cuda(0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(device_module, "_ROOT", tmp_path)
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    if driver:
        (tmp_path / driver).mkdir()
        (device / "driver").symlink_to(tmp_path / driver)
    if is_gpu:
        with pytest.raises(ValueError, match=r"cannot use it: .* was built without CUDA"):
            pick_device(None)
    else:
        assert pick_device(None).type == "cpu"


def test_ranks_are_not_put_on_mps(cuda, monkeypatch):
    """Ranks are not put on MPS: gloo, without CUDA, cannot exchange tensors of an Apple GPU."""
    cuda(0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device(None).type == pick_device("mps").type == "mps"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert pick_device(None).type == "cpu"
    with pytest.raises(ValueError, match="device='mps' works in one process only"):
        pick_device("mps")


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)]
)
def test_the_dtype_follows_the_gpu_that_is_used(cuda, monkeypatch, capability, dtype):
    """The dtype follows the GPU that the model uses, not the one that is current in torch."""
    cuda(2, capability)
    wrong_gpu = capability < (8, 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: wrong_gpu)
    assert pick_dtype(None, torch.device("cuda", 1)) is dtype


def test_bf16_is_refused_where_a_gpu_lacks_it(cuda, checkpoint_dir):
    """bf16 is refused on a T4 and a V100, which run fp16, with the reason and the remedy.

    A past fault: `quantize=` picked fp16 there, and said "leave dtype out", which was left out.
    """
    cuda(1, (7, 5))
    gpu = torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"dtype='bf16', but this GPU has no bf16 .*7\.5.*'fp16'"):
        pick_dtype("bf16", gpu)
    assert pick_dtype("fp16", gpu) is torch.float16 and pick_dtype("auto", gpu) is torch.float16
    args = BuildArgs(str(checkpoint_dir[0]), quantize="int8", device="cuda", timeout_s=9)
    with pytest.raises(ValueError, match=r"quantize='int8' needs bf16, but .*leave quantize out"):
        load_model(args)


@pytest.mark.parametrize(
    ("backends", "device", "fits"),
    [
        ("cuda:nccl", "cuda:1", True),
        ("cpu:gloo,cuda:nccl", "cpu", True),
        ("cpu:gloo,cuda:gloo", "cuda:0", True),  # tests run two ranks on one GPU in this way
        ("cuda:nccl", "cpu", False),
        ("cpu:gloo", "cuda:0", False),
    ],
)
def test_groups_that_a_program_made_must_carry_the_device(backends, device, fits):
    """Groups that a program made must support the device.

    Otherwise the first step would fail with torch's "No backend type associated with device type".
    """
    if fits:
        check_carries(backends, torch.device(device))
    else:
        with pytest.raises(ValueError, match=f"device='{device}', but this process joined"):
            check_carries(backends, torch.device(device))


def test_nccl_s_buffers_are_there_before_memory_is_measured(monkeypatch):
    """NCCL's buffers are allocated before memory is measured.

    The group is bound to the rank's GPU and used once while it is made, so that memory measured as
    free stays free. On the CPU there is nothing to bind.
    """
    done: list[Any] = []
    group = object()
    watch = SimpleNamespace(
        waiting=lambda *args: contextlib.nullcontext(), left_groups=[],
        rendezvous=SimpleNamespace(store="the store"),
    )  # fmt: skip
    monkeypatch.setattr(groups, "meet_all", lambda *args: watch)
    monkeypatch.setenv("RANK", "1")
    for name, value in {
        "is_initialized": lambda: False,
        "init_process_group": lambda backend, **more: done.append((backend, more["device_id"])),
        "get_backend_config": lambda group: "cpu:gloo,cuda:nccl",
        "get_backend": lambda group: "nccl",
        "get_rank": lambda: 1,
        "get_process_group_ranks": lambda group: [0, 1],
        "new_group": lambda *args, **more: group,
        "destroy_process_group": lambda group: None,
    }.items():
        monkeypatch.setattr(groups.dist, name, value)
    monkeypatch.setattr(groups.torch_private, "set_timeout", lambda *args: None)
    for name, value in {
        "model_parallel_is_initialized": lambda: False,
        "initialize_model_parallel": lambda *args, **more: None,
        "get_model_parallel_group": lambda: group,
        "get_pipeline_parallel_group": lambda: group,
        "get_data_parallel_group": lambda: group,
        "get_model_parallel_rank": lambda: 1,
    }.items():
        monkeypatch.setattr(groups.fs_init, name, value)
    monkeypatch.setattr(groups.SharedMemory, "join", lambda *args: None)
    rows = [b"this machine", b"another machine"]
    monkeypatch.setattr(groups, "exchange", lambda group, own, max_bytes: rows)
    monkeypatch.setattr(groups, "_first_sum", lambda group, device: done.append(device))
    properties = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu = torch.device("cuda", 1)
    sizes = groups.GroupSizes(group=2, stages=1, world=2)
    assert groups._join(sizes, gpu, 60.0, 30.0).group is group
    assert done == [("nccl", gpu), gpu]
    done.clear()
    groups._join(sizes, torch.device("cpu"), 60.0, 30.0)
    assert done == [("gloo", None)]


def test_a_step_runs_with_its_gpu_as_the_current_one(monkeypatch):
    """A step runs with its GPU as the current one.

    Kernels, graphs and events without a tensor go to the current device, which would be rank 0's.
    The caller's choice is restored.
    """
    chosen = [0]

    @contextlib.contextmanager
    def device(place: torch.device) -> Iterator[None]:
        before, chosen[0] = chosen[0], place.index
        yield
        chosen[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    seen = []
    runner = ModelRunner.__new__(ModelRunner)
    runner.kv_cache = SimpleNamespace(device=torch.device("cuda", 3))  # type: ignore[assignment]
    runner.hooks = []
    monkeypatch.setattr(
        "llama.engine.runner.RunningStep", lambda runner, step: seen.append(chosen[0])
    )
    runner.start(Step([], {}))
    running = RunningStep.__new__(RunningStep)
    running._runner = runner
    monkeypatch.setattr(running, "_compute_rows", lambda: seen.append(chosen[0]))
    running.compute_rows()
    assert seen == [3, 3] and chosen == [0]


def test_free_memory_is_limited_by_the_address_space():
    """Free memory is limited by `ulimit -v`, less what the process has mapped."""
    code = """
import resource, torch
from llama.common.device import free_bytes
device, used = torch.device("cpu"), int(open("/proc/self/statm").read().split()[0]) << 12
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28),) * 2)
assert 1 << 27 < free_bytes(device) <= 1 << 28, free_bytes(device)
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


def test_memory_of_dropped_models_is_given_back(monkeypatch):
    """A model in a reference cycle is collected, and torch's allocator keeps nothing of it."""

    class Model:
        def __init__(self) -> None:
            self.engine = self

    cuda = FakeCuda(kept=100, free=50).install(monkeypatch)
    alive = weakref.ref(Model())
    assert alive() is not None
    free_unused(torch.device("cuda"))
    assert alive() is None
    assert (cuda.free, cuda.kept) == (150, 0)
