"""What `llama doctor` says of several ranks: where each is, whether they are alike, how fast.

In: the facts of this rank. Out: facts for rank 0 to print. Every rank makes the same calls; what
crosses ranks is JSON, in the store where they met.
"""

import json
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import llama
from llama.cli.environment_checks import Fact, problem
from llama.device import free_bytes
from llama.ops.cpu import native
from llama.ranks.collectives import ModelParallel
from llama.ranks.groups import connect

_LIMIT_S = 120.0  # the kernels of another machine may have to be compiled first
_SIZES = {4 << 10: 50, 64 << 10: 20, 1 << 20: 5, 16 << 20: 2}  # bytes: how often each is timed


def report(
    own: list[Fact], device: torch.device, model_parallel_size: int | None
) -> Iterator[Fact]:
    """Meet the other ranks; on rank 0: each rank, their problems, what is unlike, and the sums."""
    try:
        parallel = connect(model_parallel_size, device, _LIMIT_S)
        records = _gather(parallel, _own_record(own, device))
        yield Fact("backend", _backend(parallel, device))
        for rank, record in enumerate(records):
            yield Fact(f"rank {rank}", f"on {record['host']}, {record['device']}")
        yield from _problems_elsewhere(records)
        yield from _unlike(records)
        for name, seconds in all_reduce_seconds(parallel, device):
            timings = ", ".join(_timing(size, s) for size, s in seconds.items())
            yield Fact("all-reduce", f"{name}: {timings}")
    except ValueError as e:
        yield problem("ranks", str(e))
    except RuntimeError as e:  # of torch's stores and groups, whose kinds have no common name
        yield problem(
            "ranks",
            f"they cannot talk to each other ({str(e).splitlines()[0]}): open the ports that the "
            "kernel hands out (net.ipv4.ip_local_port_range) between the machines, or name the "
            "interface that they share by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )


def _gather(parallel: ModelParallel, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Each rank's record, in the order of the ranks of the world."""
    store, world_size = parallel.store, parallel.size * parallel.data_size
    if store is None:
        return [record]
    store.set(f"doctor/{parallel.global_rank}", json.dumps(record))
    return [json.loads(store.get(f"doctor/{rank}")) for rank in range(world_size)]


def _own_record(own: list[Fact], device: torch.device) -> dict[str, Any]:
    library = native.kernels()
    return {
        "host": socket.gethostname(),
        "device": f"{device}, {free_bytes(device) / 2**30:.1f} GiB free, "
        f"{torch.get_num_threads()} threads",
        "versions": {
            "llama": llama.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kernels": "torch's" if library is None else library._name.rpartition("/")[2],
        },
        "problems": [[fact.name, fact.text] for fact in own if fact.problem],
    }


def _backend(parallel: ModelParallel, device: torch.device) -> str:
    assert parallel.group is not None
    control = "gloo" if parallel.shared is None else "shared memory"
    tensors = control if device.type == "cpu" else parallel.group.name()
    return (
        f"{tensors} for tensors, {control} for control; {parallel.data_size} "
        f"group{'s' * (parallel.data_size > 1)} of {parallel.size} ranks"
    )


def _problems_elsewhere(records: list[dict]) -> Iterator[Fact]:
    """Those of other ranks that rank 0 does not have too, each once."""
    known = {tuple(problem) for problem in records[0]["problems"]}
    for rank, record in enumerate(records):
        for name, text in record["problems"]:
            if (name, text) not in known:
                known.add((name, text))
                yield problem(name, f"rank {rank} on {record['host']}: {text}")


def _unlike(records: list[dict]) -> Iterator[Fact]:
    """Versions that differ, with the first rank that has each. Unlike kernels only round unlike."""
    for name in records[0]["versions"]:
        found: dict[str, int] = {}
        for rank, record in enumerate(records):
            found.setdefault(record["versions"][name], rank)
        if len(found) < 2:
            continue
        each = ", ".join(f"{version} on rank {rank}" for version, rank in found.items())
        if name == "kernels":
            text = f"{each}: the CPUs or compilers are unlike, and the slowest sets the pace"
            yield Fact(name, text)
        else:
            yield problem(name, f"unlike on the ranks: {each}; install one version")


def _timing(size: int, seconds: float) -> str:
    name = f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB"
    rate = "" if size < 64 << 10 else f" ({size / seconds / 1e9:.2g} GB/s)"
    return f"{name} in {seconds * 1e3:.3g} ms{rate}"


def all_reduce_seconds(
    parallel: ModelParallel, device: torch.device
) -> Iterator[tuple[str, dict[int, float]]]:
    """For each path: its name, and bytes -> median seconds of one sum over the group, in bf16.

    The first path is what the model's layers use; the second is gloo, from and to host memory.
    """
    control = parallel.control
    if control is None or parallel.size == 1:
        return

    def through_gloo(x: Tensor) -> None:
        control.allreduce([x]).wait()

    ranks = f"{parallel.size} ranks"
    yield f"the model's, {ranks}", _times(parallel, parallel.all_reduce, device)
    yield f"gloo alone, {ranks}", _times(parallel, through_gloo, torch.device("cpu"))


def _times(
    parallel: ModelParallel, all_reduce: Callable[[Tensor], object], device: torch.device
) -> dict[int, float]:
    """The ranks begin each sum together: the wait for a late one is not the path's."""
    assert parallel.control is not None
    seconds = {}
    for size, count in _SIZES.items():
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        times = []
        for _ in range(count + 1):  # the first opens connections and touches memory
            parallel.control.barrier().wait()
            began = time.perf_counter()
            all_reduce(x)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # sync: the end of the sum is what is timed
            times.append(time.perf_counter() - began)
        seconds[size] = statistics.median(times[1:])
    return seconds
