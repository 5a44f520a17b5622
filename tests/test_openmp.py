"""OpenMP's threads sleep soon when they wait: seen in the CPU time that they take."""

import json
import os
import subprocess
import sys

import pytest

from helpers.launch import environment
from llama.openmp import idle_team_size

# CPU milliseconds of 20 regions with a pause after each, in which threads that spin take the most.
# Before and after the call, with the number of this process's threads after it; then what a product
# gives before and after.
PROGRAM = """
import json, os, time, torch
from llama.openmp import wait_briefly
torch.set_num_threads(2)
x = torch.arange(1 << 20) * 0.37

def cpu_ms():
    began = time.process_time()
    for _ in range(20):
        x.sum()
        time.sleep(0.03)
    return (time.process_time() - began) * 1e3

before, sum_before = cpu_ms(), x.sum()
threads = len(os.listdir("/proc/self/task"))
team = wait_briefly()
again = wait_briefly()
print(json.dumps({
    "before": before, "after": cpu_ms(), "is_kept": team is again,
    "is_alive": team is not None and team.is_alive(), "same": bool(x.sum() == sum_before),
    "started": len(os.listdir("/proc/self/task")) - threads,
}))
"""


def run(**variables: str) -> dict:
    clean = {k: v for k, v in environment().items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**clean, **variables}, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP, as torch for Linux brings it")
def test_threads_that_wait_sleep_soon():
    """The idle team is there, once, and waiting takes a small part of the CPU time that it took."""
    said = run()
    cpus = len(os.sched_getaffinity(0))
    assert said["is_alive"] and said["is_kept"] and said["same"]
    assert said["started"] == idle_team_size(2, cpus)
    assert said["after"] < said["before"] / 3, said


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP, as torch for Linux brings it")
def test_what_the_user_set_is_obeyed():
    said = run(OMP_WAIT_POLICY="active")
    assert not said["is_alive"] and said["started"] == 0 and said["same"]


@pytest.mark.parametrize(
    ("threads", "cpus", "size"), [(2, 2, 2), (1, 2, 3), (4, 2, 2), (8, 16, 10)]
)
def test_the_team_is_no_larger_than_it_must_be(threads, cpus, size):
    assert idle_team_size(threads, cpus) == size
    assert threads + size - 1 > cpus and (size == 2 or threads + size - 2 <= cpus)
