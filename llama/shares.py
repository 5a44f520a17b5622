"""The shares of the ranks of a group: how they are chosen, and the memory that all then have.

In: what the user asked for, files and devices. Out: the relative share of each rank, the steps of
their parts, and the sizes of the rank with the smallest KV cache. What a rank holds by its share is
decided in `llama.ranks.placement` and `llama.model.shares`.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from llama.checkpoint.column_blocks import columns_per_block
from llama.checkpoint.find import Checkpoint
from llama.checks import FieldError
from llama.device import free_bytes
from llama.ops.cpu.constants import N_BLOCK
from llama.ranks.collectives import ModelParallel
from llama.sizes import Memory

_MEASURED_STEPS = 16  # Shares that are measured are rounded to so many parts of the largest.
_PROBE_BYTES = 256 << 20  # more than caches hold
_PROBE_S = 0.2
_GPU_COLUMNS = 128  # columns that the products of a GPU take at a time


def check_shares(shares: str | Sequence[int] | None, size: int) -> None:
    """Raise a ValueError if `shares`, as `BuildArgs.checked` has it, is not for `size` ranks."""
    if isinstance(shares, tuple) and len(shares) != size:
        raise FieldError.of(
            "shares",
            f"={','.join(map(str, shares))} has {len(shares)} numbers, and the model is divided "
            f"among {size} rank{'s' * (size > 1)}: give a number for each",
        )


def resolve_shares(
    shares: str | Sequence[int] | None, parallel: ModelParallel, device: torch.device
) -> tuple[int, ...]:
    """Return the relative share of each rank of a group; empty if all are equal.

    All ranks call it: shares that are to be measured are measured at the same time on each. Every
    group has the same shares, so that the slowest copy of a rank counts.

    Args:
        shares: As `BuildArgs.checked` has it, for as many ranks as a group has.
        parallel: The ranks.
        device: The device of this rank.
    """
    if shares is None or parallel.is_alone:
        return ()
    if isinstance(shares, str):
        value = free_bytes(device) if shares == "memory" else _read_rate(device)
        values = [value for (value,) in parallel.gather_integers([value])]
        slowest = [min(values[rank :: parallel.size]) for rank in range(parallel.size)]
        scale = _MEASURED_STEPS / max(1, *slowest)
        shares = [max(1, round(value * scale)) for value in slowest]
    return tuple(shares) if len(set(shares)) > 1 else ()


def _read_rate(device: torch.device) -> int:
    """Measure how many bytes per second this process reads from a device's memory."""
    x = torch.ones(_PROBE_BYTES // 4, device=device)
    x.sum().item()  # sync; the first run allocates, or compiles
    count = 0
    began = time.perf_counter()
    while (seconds := time.perf_counter() - began) < _PROBE_S or count == 0:
        x.sum().item()  # sync
        count += 1
    return int(count * x.nbytes / seconds)


def tightest_memory(memory: Memory, parallel: ModelParallel, kv_bytes: int | None) -> Memory:
    """Return the memory of the rank of the world that leaves least to the KV cache.

    All ranks call it, and all use the returned sizes, so that they have the same number of pages.

    Args:
        memory: What this rank needs.
        parallel: The ranks.
        kv_bytes: The bytes of the KV cache that the user asked for, if any.
    """
    ranks = [Memory.of_integers(row) for row in parallel.gather_integers(memory.as_integers())]
    rank = Memory.tightest(ranks, kv_bytes)
    if len({(each.weights, each.per_token) for each in ranks}) == 1:
        return ranks[rank]
    return replace(ranks[rank], rank=rank)


def column_step(checkpoint: Checkpoint, device: torch.device) -> int:
    """Return the step of unequal parts of feed-forward columns that suits files and device."""
    keeps_blocks = checkpoint.in_codes or checkpoint.packed is not None
    file_step = columns_per_block(checkpoint) if keeps_blocks else 1
    return math.lcm(file_step, _GPU_COLUMNS if device.type == "cuda" else N_BLOCK)
