"""Ranks without torchrun: processes that each run one function and send its result."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIMIT_S = 45  # distinguishes a hang from a slow end


class Ranks:
    """Processes that run one function of a program; all are gone at the end of the block.

    `main` of the program is called with (pipe, do, folder, rank, size, args).
    """

    def __init__(self, main: Callable, folder: Path, size: int, do: str, *args: Any) -> None:
        # The processes are forks of a single-threaded process that has imported torch.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "llama.ranks.shared_memory"])
        self.folder = folder
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=main, args=(theirs, do, str(folder), rank, size, list(args))
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def result(self, rank: int) -> Any:
        assert self.pipes[rank].poll(LIMIT_S), f"rank {rank} hangs"
        return self.pipes[rank].recv()

    def results(self) -> list[Any]:
        return [self.result(rank) for rank in range(len(self.pipes))]

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has already sent its result and exited
            os.kill(pid, number)


def close() -> None:
    """End the process that forks, if there is one; it would otherwise outlive this process."""
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
