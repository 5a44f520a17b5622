"""One engine in a process of its own, with the same work and the same clock as every other.

    PYTHONPATH=scripts:. python -m bench.worker transformers < job.json

In: an engine's name, and a job as a line of JSON on stdin. Out: a line of JSON, all there is on
stdout: seconds as measured, bytes of memory, or {"skipped": why}. Of a job of several rounds, each
further line of stdin asks for one more. Nothing heavy is imported before the job.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.engines import ENGINES, Engine, Job, Ours

Row = dict[str, Any]
_NUM_SPECIAL = 256  # the last ids of a vocabulary, not for prompts


def random_prompts(lengths: list[int], job: Job, seed: int) -> list[list[int]]:
    """Return prompts of ordinary ids, the same for every engine, without common prefixes."""
    draw = random.Random(seed)
    ids = range(job["params"]["vocab_size"] - _NUM_SPECIAL)
    return [draw.choices(ids, k=length) for length in lengths]


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


# A process that computes until its parent is gone, on the cores named. It says when it runs.
_BUSY = """
import os, sys
if sys.argv[2]:
    os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
print(flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def busy_processes(count: int, cores: set[int]) -> Iterator[list[subprocess.Popen]]:
    """Yield `count` processes that compute all the time; they end with the block.

    They have this process's niceness and may use all `cores` (an empty set: those of this thread),
    since some engines bind the thread that starts them.
    """
    command = [sys.executable, "-c", _BUSY, str(os.getpid()), ",".join(map(str, cores))]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def latency(engine: Engine, job: Job) -> Iterator[Row]:
    """Yield the seconds to the first token of all prompts, then of each step, after a warm-up.

    Further rounds are further steps of the same sequences. If the job has `busy`, that many
    processes compute from the warm-up on, and busy_s is the CPU time that they had.
    """
    rounds = job.get("rounds", 1)
    for turn in range(rounds):
        before = os.times().children_user
        with busy_processes(job.get("busy", 0), job.get("cores", set())):
            row = _steps(engine, job) if turn else _first_steps(engine, job)
            if turn == rounds - 1 and isinstance(engine, Ours):
                row["host"] = engine.host_overhead()
        if job.get("busy"):
            row["busy_s"] = os.times().children_user - before
        yield row


def _first_steps(engine: Engine, job: Job) -> Row:
    lengths = [job["context"]] * job["batch"]
    engine.start(random_prompts(lengths[:1], job, job["seed"] + 1))
    engine.finish()
    prompts = random_prompts(lengths, job, job["seed"])
    first, ids = seconds_of(partial(engine.start, prompts))
    row = _steps(engine, job)
    return row | {"first": first, "ids": [ids[0], *row["ids"]][:8]}


def _steps(engine: Engine, job: Job) -> Row:
    steps, first_ids = [], []
    for _ in range(job["warmup"] + job["steps"]):
        seconds, ids = seconds_of(engine.step)
        assert len(ids) == job["batch"], "a sequence ended early"
        steps.append(seconds)
        first_ids.append(ids[0])
    return {"steps": steps[job["warmup"] :], "ids": first_ids}


def prefill(engine: Engine, job: Job) -> Iterator[Row]:
    """Yield the seconds to the first token of one prompt: all repeats of a round."""
    for turn in range(job.get("rounds", 1)):
        seconds = []
        for i in range(job["repeats"] + 1):
            seed = job["seed"] + turn * (job["repeats"] + 1) + i
            prompts = random_prompts([job["context"]], job, seed)
            seconds.append(seconds_of(partial(engine.start, prompts))[0])
            engine.finish()
        yield {"prefills": seconds[1:]}


def offline(engine: Engine, job: Job) -> Iterator[Row]:
    prompts = random_prompts([p for p, _ in job["lengths"]], job, job["seed"])
    answers = [answer for _, answer in job["lengths"]]
    engine.start(random_prompts([len(prompts[0])], job, job["seed"] + 1))  # a warm-up
    engine.finish()
    yield {"seconds": seconds_of(partial(engine.offline, prompts, answers))[0]}


def startup(engine: Engine, job: Job) -> Iterator[Row]:
    """Yield the time of the first token and the seconds of the pass that made it.

    The time is on a clock that the parent process shares.
    """
    seconds, _ = seconds_of(partial(engine.start, random_prompts([8], job, job["seed"])))
    yield {"first_token_at": time.monotonic(), "first": seconds}


MEASURES: dict[str, Callable[[Engine, Job], Iterator[Row]]] = {
    "latency": latency,
    "prefill": prefill,
    "offline": offline,
    "startup": startup,
    "load": lambda engine, job: iter([{}]),  # what `measure` says of every engine
}


class PeakMemory:
    """A thread that records the peak of this process's private memory, without mapped files."""

    def __enter__(self) -> "PeakMemory":
        self.private = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        # The most ever resident, mapped files too: of this program alone, where ru_maxrss would
        # begin with what the parent had at the fork.
        self.resident = memory("VmHWM")

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.private = max(self.private, memory("RssAnon"))


def memory(key: str) -> int:
    """Return a line of /proc/self/status in bytes, or 0 where the system has none."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def _device_memory(device: str) -> int:
    """Return the peak of CUDA memory that torch allocated."""
    if device != "cuda":
        return 0
    import torch

    return torch.cuda.max_memory_allocated()


def _version(module: str) -> str:
    """Return the version of the module's package, whose name may differ from the module's."""
    package = module.partition(".")[0]
    if package == "llama":
        return "this tree"
    return importlib.metadata.version(importlib.metadata.packages_distributions()[package][0])


def measure(name: str, job: Job) -> Iterator[Row]:
    """Import, load and run the job, round by round; yield {"skipped": why} without its modules."""
    kind, modules, _, importing = ENGINES[name]
    missing = [m for m in modules if "." not in m and importlib.util.find_spec(m) is None]
    if missing:
        yield {"skipped": f"{', '.join(missing)} not installed in {sys.prefix}"}
        return
    if job.get("busy") and hasattr(os, "sched_getaffinity"):
        job["cores"] = os.sched_getaffinity(0)  # before the engine binds its threads
    with importing():
        imports = {m: seconds_of(partial(importlib.import_module, m))[0] for m in modules}
    with PeakMemory() as peak:
        load, engine = seconds_of(partial(kind, job))
    rounds = MEASURES[job["measure"]](engine, job)
    row = next(rounds)
    memory = {
        "peak_private": peak.private,
        "peak_resident": peak.resident,
        "peak_device": _device_memory(job["device"]),
    }
    times = {"imports": sum(imports.values()), "import_of": imports, "load": load}
    times |= getattr(engine, "load_parts", {})
    yield {"version": _version(modules[-1]), **times, **memory, **row}
    yield from rounds


if __name__ == "__main__":
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints, from C too, goes to stderr
    for row in measure(sys.argv[1], json.loads(sys.stdin.readline())):
        print(json.dumps(row), file=answer, flush=True)
        if not sys.stdin.readline():
            break
