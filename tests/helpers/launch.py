"""Processes for tests: their environment, and ranks under torchrun.

A job is {"do": name, ...}, a function of programs/ranks.py; each rank writes its results as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent.parent
PROGRAMS = REPO / "tests" / "programs"
DEMO = REPO / "checkpoints" / "demo"
WORKER = str(PROGRAMS / "ranks.py")


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a program that runs in this repository.

    It has one thread, unless this process sets another number, and finds the packages that this
    process finds in folders of PYTHONPATH.
    """
    paths = [str(REPO), os.environ.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {"OMP_NUM_THREADS": "1", **os.environ, **found, **extra}


def run_program(
    command: Sequence[str | Path],
    *,
    env: dict[str, str] | None = None,
    timeout: float = 240,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Return the result of subprocess.run, with its output captured as text.

    The program has `environment()`, unless `env` is given.
    """
    return subprocess.run(
        command,
        env=env or environment(),
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def torchrun_groups(
    world: int, groups: dict[str, list[dict]], folder: Path
) -> dict[str, list[list[dict]]]:
    """Run the jobs of many tests in one launch; return {test: results}, one list for each rank.

    Each group starts with no model loaded, as in a launch of its own.
    """
    jobs = [job for own in groups.values() for job in ({"do": "forget"}, *own)]
    ranks, found, start = torchrun(world, jobs, folder), {}, 0
    for name, own in groups.items():
        start += 1  # skip the results of "forget"
        found[name] = [rank[start : start + len(own)] for rank in ranks]
        start += len(own)
    return found


def torchrun(
    world: int, jobs: list[dict], folder: Path, num_builds: int | None = None
) -> list[list[dict]]:
    """Run the jobs under torchrun and return the results, one list for each rank.

    Args:
        world: the number of ranks.
        jobs: the jobs.
        folder: where the results are written.
        num_builds: how many models are loaded; None: one per folder, until they are forgotten.
    """
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc_per_node={world}", WORKER, str(folder / "jobs.json"), str(folder),
    ]  # fmt: skip
    done = run_program(command)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = [(folder / f"rank{r}.end").read_text() for r in range(world)]
    assert ends == ["False"] * world, "a process that leaves its groups can end with SIGABRT"
    expected = _num_builds(jobs) if num_builds is None else num_builds
    assert done.stdout.count("Loaded in ") == expected, "rank 0 alone prints, per build"
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(world)]


_BUILDING = ("adapters", "generate", "place", "score", "vllm_client")  # jobs that may load a model


def _num_builds(jobs: list[dict]) -> int:
    """Return how many models the jobs load: one per folder, until they are forgotten."""
    builds = 0
    loaded: set[str] = set()
    for job in jobs:
        if job["do"] == "forget":
            loaded.clear()
        elif job["do"] in _BUILDING and job["folder"] not in loaded:
            loaded.add(job["folder"])
            builds += 1
    return builds
