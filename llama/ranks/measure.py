"""What ranks learn of one another: texts, and the time of an all-reduce by its size.

In: a `ModelParallel` of several ranks. Out: strings and seconds. Every rank of the world makes the
same calls in the same order. It must not know models; only tensors of a fixed layout cross ranks.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from llama.ranks.groups import ModelParallel

_SIZES = {4 << 10: 50, 64 << 10: 20, 1 << 20: 5, 16 << 20: 2}  # bytes: how often each is timed


def gather_texts(parallel: ModelParallel, text: str) -> list[str]:
    """Each rank's text, in the order of the ranks of the world."""
    if parallel.world is None:
        return [text]
    data, size = text.encode(), parallel.world.size()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    parallel.world.allgather([lengths], [torch.tensor([len(data)])]).wait()
    room = max(1, *(int(length) for length in lengths))
    mine = torch.zeros(room, dtype=torch.uint8)
    mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(size)]
    parallel.world.allgather([rows], [mine]).wait()
    return [
        bytes(row[: int(length)].tolist()).decode()
        for row, length in zip(rows, lengths, strict=True)
    ]


def all_reduce_seconds(
    parallel: ModelParallel, device: torch.device
) -> Iterator[tuple[str, dict[int, float]]]:
    """For each path: its name, and bytes -> median seconds of one sum over the group, in bf16.

    The first path is what the model's layers use; the second is gloo, from and to host memory.
    """
    group, control = parallel.group, parallel.control
    if group is None or control is None or parallel.size == 1:
        return

    def start() -> None:
        control.barrier().wait()

    def through_gloo(x: Tensor) -> None:
        control.allreduce([x]).wait()

    ranks = f"{parallel.size} ranks"
    yield f"the model's, {ranks}", _times(parallel.all_reduce, start, device)
    yield f"gloo alone, {ranks}", _times(through_gloo, start, torch.device("cpu"))


def _times(
    all_reduce: Callable[[Tensor], object], start: Callable[[], None], device: torch.device
) -> dict[int, float]:
    """`start` returns on all ranks at once: the wait for a late one is not the path's."""
    seconds = {}
    for size, count in _SIZES.items():
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        times = []
        for _ in range(count + 1):  # the first opens connections and touches memory
            start()
            began = time.perf_counter()
            all_reduce(x)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # sync: the end of the sum is what is timed
            times.append(time.perf_counter() - began)
        seconds[size] = statistics.median(times[1:])
    return seconds
