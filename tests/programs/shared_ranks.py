"""The program that test_shared_memory.py runs on each rank: shared memory, but no torchrun.

    python shared_ranks.py FOLDER RANK CALLS

CALLS is a list in JSON: for each call the number of ranks that take part, a function of this file,
and its arguments. For each call in which it takes part, a rank prints the result as a line of JSON,
or the text of its error. The ranks meet through files in the folder.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.waiting import wait_until
from llama.ranks import shared_memory
from llama.ranks.parallel import RankError
from llama.ranks.shared_memory import SharedMemory

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [0, 1, 2, 3, 31, 63, 65, 511, 513, 2048, 16411, 131073, 300001]
NAMES = [10, 11, 12, 13, 14, 15, 16]  # ranks in a larger world


class Rank:
    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self._meetings = 0

    def exchange(self, data: bytes) -> list[bytes]:
        """Exchange bytes between all ranks; also a barrier that needs no shared memory."""
        self._meetings += 1
        paths = [self.folder / f"{self._meetings}-{rank}" for rank in range(self.size)]
        part = self.folder / f"part-{self.rank}"
        part.write_bytes(data)
        part.rename(paths[self.rank])
        while not all(path.exists() for path in paths):
            time.sleep(0.001)
        return [path.read_bytes() for path in paths]

    def join(self, timeout_s: float = 60.0) -> SharedMemory:
        names, is_ending = NAMES[: self.size], (self.folder / "ending").exists
        shared = SharedMemory.join(self.rank, names, self.exchange, timeout_s, is_ending)
        assert shared is not None
        return shared


def main(folder: str, rank: int, calls: list[list[Any]]) -> None:
    """Take part in the calls, one after another; each has a folder of its own."""
    torch.set_num_threads(1)
    for number, (size, function, *arguments) in enumerate(calls):
        if rank >= size:
            continue
        own = Path(folder, str(number))
        own.mkdir(exist_ok=True)
        try:
            result = globals()[function](Rank(own, rank, size), *arguments)
        except (RankError, KeyboardInterrupt) as e:
            result = f"{type(e).__name__}: {e}"
        print(json.dumps(result), flush=True)


def inputs(size: int, count: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return the input of each rank: values of different magnitude, so that the order of a sum
    shows.
    """
    torch.manual_seed(seed)
    scales = torch.logspace(-3, 3, 7).repeat(count // 7 + 1)[:count]
    return [(torch.randn(count) * scales).to(dtype) for _ in range(size)]


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def operations(rank: Rank, seed: int, count: int, wound: bool = False) -> str:
    """Compare random operations with their definitions; return a digest of all results."""
    shared, choose, digest = rank.join(), random.Random(seed), hashlib.sha256()
    if wound:
        wind(rank, shared)
    for number in range(count):
        size, dtype = choose.choice(SIZES), choose.choice(DTYPES)
        parts = inputs(rank.size, size, dtype, seed + number)
        x = parts[rank.rank].clone()
        kind = choose.choice(["all_reduce", "all_gather", "uneven", "broadcast", "strided"])
        if kind == "all_gather":
            rows = choose.choice([1, 3])
            found = shared.all_gather(x[: size // rows * rows].view(rows, -1))
            wanted = torch.cat([p[: size // rows * rows].view(rows, -1) for p in parts], dim=-1)
        elif kind == "uneven":  # some ranks may have nothing
            rows = choose.choice([1, 3])
            widths = [choose.randint(0, size // rows) for _ in parts]
            tensors = [
                part[: rows * n].view(rows, n) for part, n in zip(parts, widths, strict=True)
            ]
            found = shared.all_gather(tensors[rank.rank].clone(), widths)
            wanted = torch.cat(tensors, dim=-1)
        elif kind == "broadcast":
            shared.broadcast(x)
            found, wanted = x, parts[0]
        elif kind == "strided":
            found = torch.zeros(size, 2, dtype=dtype)[:, 0]
            found.copy_(x)
            shared.all_reduce(found)
            wanted = in_order(parts)
        else:
            shared.all_reduce(x)
            found, wanted = x, in_order(parts)
        assert torch.equal(found, wanted), (number, kind, size, dtype)
        digest.update(found.float().numpy().tobytes())
    return digest.hexdigest()


def wind(rank: Rank, shared: SharedMemory) -> None:
    """Set all sequence numbers to just below 2**32, where they wrap."""
    sequence = 2**32 - 24
    for channel, slots in ((shared._tensors, 0), (shared._ring, 1)):
        channel[shared_memory._FIELD["sequence"]] = sequence
        start = int(channel[0]) - shared.base
        for slot in {0, rank.rank + slots} if slots else {rank.rank}:
            at = start + slot * 128
            ctypes.c_uint32.from_address(shared.base + at).value = sequence
    rank.exchange(b"")


def like_gloo(rank: Rank) -> None:
    """Compare two ranks with gloo: a sum of two has one order and one rounding."""
    shared = rank.join()
    dist.init_process_group(
        "gloo", init_method=f"file://{rank.folder}/store", rank=rank.rank, world_size=rank.size
    )
    for number, (size, dtype) in enumerate((s, d) for s in SIZES[1:] for d in DTYPES):
        ours = inputs(rank.size, size, dtype, number)[rank.rank]
        theirs = ours.clone()
        dist.all_reduce(theirs)
        shared.all_reduce(ours)
        assert torch.equal(ours, theirs), (size, dtype)
    dist.destroy_process_group()


def messages(rank: Rank, seed: int, wound: bool = False) -> None:
    """Send messages of every length in order, to ranks that are slow now and then."""
    shared, choose = rank.join(), random.Random(seed)
    if wound:
        wind(rank, shared)
    for number in range(200):
        length = choose.choice([0, 1, 7, 8, 100, 5000, 16384, 16385, 100_000])
        data = random.Random(seed + number).randbytes(length)
        if choose.random() < 0.05 and rank.rank == choose.randrange(rank.size):
            time.sleep(0.01)
        assert shared.broadcast_bytes(data if rank.rank == 0 else b"") == data


def unlike(rank: Rank, do: str) -> list[str]:
    """Use tensors of different sizes, then the same call on each: both times every rank gets an
    error.
    """
    shared, errors = rank.join(), []
    for size in (8 + rank.rank, 8):
        with contextlib.suppress(RankError):
            try:
                if do == "all-gather":
                    shared.all_gather(torch.ones(2, size), [8, size])
                else:
                    shared.all_reduce(torch.ones(size))
            except RankError as e:
                errors.append(str(e))
                raise
    rank.exchange(b"")  # otherwise the other rank would report that the first one ended
    return errors


def absent(rank: Rank, late: list[int], what: str, timeout_s: float) -> float:
    """Let some ranks make two exchanges less than the others; return how long the call took."""
    shared = rank.join(timeout_s)
    shared.all_reduce(torch.ones(3))
    (rank.folder / f"ready-{rank.rank}").touch()
    if rank.rank in late:
        time.sleep(600)
    began = time.monotonic()
    if what == "idle":
        shared.broadcast_bytes(b"", is_idle=True)
    else:
        shared.all_reduce(torch.ones(3))
    return time.monotonic() - began


def idle(rank: Rank) -> float:
    """Return the CPU seconds of a rank that waits for rank 0 longer than its limit."""
    shared = rank.join(timeout_s=0.2)
    if rank.rank == 0:
        time.sleep(2)
    began = time.process_time()
    assert shared.broadcast_bytes(b"x" * (rank.rank == 0), is_idle=True) == b"x"
    return time.process_time() - began


def woken(rank: Rank) -> float:
    """Return a short time in seconds between rank 0's message and rank 1's waking.

    It is the fourth of 15, so that a busy machine may delay most of them.
    """
    shared, seconds = rank.join(), []
    for _ in range(15):
        if rank.rank == 0:
            time.sleep(0.05)
            shared.broadcast_bytes(time.monotonic_ns().to_bytes(8), is_idle=True)
        else:
            sent = int.from_bytes(shared.broadcast_bytes(b"", is_idle=True))
            seconds.append((time.monotonic_ns() - sent) / 1e9)
    return sorted(seconds)[3] if seconds else 0.0


def interrupted(rank: Rank, times: int) -> list[str]:
    """Send Ctrl-C while the sum waits for rank 1, then compute another sum."""
    shared, seen = rank.join(), list[str]()
    if rank.rank == 0:
        interrupter = Interrupter(shared, times, rank.folder / "interrupted", seen)
        interrupter.start()
    else:
        wait_until((rank.folder / "interrupted").exists)
    for _ in range(2):
        x = torch.ones(2)
        try:
            shared.all_reduce(x)
        except (KeyboardInterrupt, RankError) as e:
            seen.append(f"{type(e).__name__} {e}")
        seen.append(str(x.tolist()))
    if rank.rank == 0:
        interrupter.join()
    return seen


class Interrupter(threading.Thread):
    """A thread that sends Ctrl-C to its own process while the main thread waits for a rank.

    The main thread checks every 100 ms whether it waits in vain. After two more checks, a signal
    that was sent before has been handled.
    """

    def __init__(self, shared: SharedMemory, times: int, done: Path, seen: list[str]) -> None:
        super().__init__()
        self._times, self._done, self._seen = times, done, seen
        self._num_checks = 0
        self._check = shared._check
        shared._check = self._count  # type: ignore[method-assign,assignment]

    def run(self) -> None:
        for _ in range(self._times):
            self._wait_for_checks()
            os.kill(os.getpid(), signal.SIGINT)
        self._wait_for_checks()
        self._done.touch()

    def _count(self, *args: Any) -> None:
        self._num_checks += 1
        self._check(*args)

    def _wait_for_checks(self) -> None:
        enough = self._num_checks + 2
        wait_until(lambda: self._seen or self._num_checks >= enough)


def leave_nothing(rank: Rank) -> list[list[str]]:
    """Return open files and mappings of shared memory, while it is used and after its release."""
    shared = rank.join()
    shared.all_reduce(torch.ones(1000))
    rank.exchange(b"")
    found = [held()]
    del shared
    return [*found, held()]


def held() -> list[str]:
    """Return this process's open files and mappings that other ranks share, named or not."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists them
            links.append(os.readlink(fd))
    kinds = ("llama-ranks", "pidfd", "/dev/shm")
    maps = Path("/proc/self/maps").read_text()
    files = [link for link in links if any(kind in link for kind in kinds)]
    named = ["/dev/shm"] * maps.count("/dev/shm")
    return [*files, *named, *["mapping"] * maps.count("llama-ranks")]


def without(rank: Rank, lacking: str, where: int) -> bool:
    """Prevent one rank from sharing memory, in one way or another: then none does."""

    def fails(*args: object) -> None:
        raise OSError(lacking)

    replaced: dict[str, Callable] = {
        "_machine": lambda: "elsewhere",
        "_create": lambda ranks: None,
        "_open": fails,
        "kernels": lambda: None,
    }
    place: Any = shared_memory.native if lacking == "kernels" else shared_memory
    function = replaced[lacking] if rank.rank == where else getattr(place, lacking)
    with patch.object(place, lacking, function):
        return SharedMemory.join(rank.rank, NAMES[: rank.size], rank.exchange, 5.0) is None


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
