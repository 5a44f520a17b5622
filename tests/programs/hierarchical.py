"""What test_hierarchy.py runs on each rank: collectives of a group that spans machines, and gloo's.

In: which ranks are on which machine, of which each passes for an agent of torchrun. Out: a digest
of all results, or the text of an error, through a pipe.
"""

import hashlib
import os
import random
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from llama.ranks import ModelParallel
from llama.ranks.hierarchy import share_memory
from programs.shared_ranks import DTYPES, SIZES, Rank, in_order, inputs

KINDS = ["all_reduce", "whole_numbers", "strided", "all_gather", "broadcast", "bytes", "ints"]


def main(pipe: Connection, do: str, folder: str, rank: int, size: int, args: list) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(globals()[do](Rank(folder, rank, size), *args))
    except Exception as e:
        pipe.send(f"{type(e).__name__}: {e}")


def connect(rank: Rank, machines: list[list[int]]) -> ModelParallel:
    os.environ["GROUP_RANK"] = str(next(i for i, m in enumerate(machines) if rank.rank in m))
    dist.init_process_group(
        "gloo", init_method=f"file://{rank.folder}/store", rank=rank.rank, world_size=rank.size
    )
    world = dist.group.WORLD
    assert world is not None
    shared, hierarchy = share_memory(world, rank.exchange, timedelta(seconds=60))
    assert shared is None and hierarchy is not None and hierarchy.machines == machines
    return ModelParallel(
        rank=rank.rank, size=rank.size, group=world, control=world, hierarchy=hierarchy
    )


def operations(rank: Rank, machines: list[list[int]], seed: int, count: int) -> str:
    """Random operations, each compared with gloo's, or where that rounds more often with the
    definition; a digest of all results."""
    quick, choose, digest = connect(rank, machines), random.Random(seed), hashlib.sha256()
    plain = replace(quick, hierarchy=None)
    for number in range(count):
        kind, size, dtype = KINDS[number % len(KINDS)], choose.choice(SIZES), choose.choice(DTYPES)
        parts = inputs(rank.size, size, dtype, seed + number)
        if kind == "whole_numbers":  # whose sums are exact in any order
            parts = [part.clamp(-20, 20).round() for part in parts]
        if kind == "bytes":
            data = random.Random(number).randbytes(choose.choice([0, 1, 40, 504, 505, 100_000]))
            own = data if rank.rank == 0 else b""
            assert quick.broadcast_bytes(own, is_idle=True) == data, (number, len(data))
            assert plain.broadcast_bytes(own) == data
            continue
        found, wanted = compute(kind, quick, plain, parts, machines)
        if kind != "all_reduce" or len(machines) == 2 or found.nbytes <= 1 << 16:
            assert torch.equal(found, wanted), (number, kind, size, dtype)
        else:  # gloo adds large sums of three machines in an order of its own
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02 * 1000)
        digest.update(found.float().numpy().tobytes())
    dist.destroy_process_group()
    return digest.hexdigest()


def compute(
    kind: str, quick: ModelParallel, plain: ModelParallel, parts: list[Tensor],
    machines: list[list[int]],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the hierarchy gives, and what it should."""
    x = parts[quick.rank].clone()
    if kind == "all_reduce":
        sums = [in_order([parts[r] for r in ranks]) for ranks in machines]
        return quick.all_reduce(x), in_order(sums)
    if kind == "whole_numbers":
        return quick.all_reduce(x), plain.all_reduce(parts[quick.rank].clone())
    if kind == "strided":
        wide = torch.zeros(len(x), 2, dtype=x.dtype)[:, 0]
        wide.copy_(x)
        quick.broadcast(wide)
        return wide, parts[0]
    if kind == "all_gather":
        x = x[: len(x) // 3 * 3].view(3, -1)
        return quick.all_gather(x), plain.all_gather(x)
    if kind == "broadcast":
        return quick.broadcast(x), plain.broadcast(parts[quick.rank].clone())
    counts = torch.arange(5) + quick.rank  # a type that shared memory cannot add up
    return quick.all_reduce(counts.clone()), plain.all_reduce(counts)
