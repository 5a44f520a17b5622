"""The scripts in an ordinary installation on a CPU, which has neither Triton nor the test tools."""

import os
import subprocess
from pathlib import Path

import pytest

from helpers.launch import REPO
from helpers.lean import lean_environment


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lean")
    lean_environment(folder)
    return folder


def run(environment: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env |= {"VIRTUAL_ENV": str(environment), "OMP_NUM_THREADS": "1"}
    program = [str(environment / "bin" / "python"), *command]
    return subprocess.run(
        program, cwd=REPO, env=env, capture_output=True, text=True, timeout=200, check=False
    )


def test_the_environment_has_no_test_tools(environment):
    code = "import importlib.util as u; print([u.find_spec(x) for x in ('triton', 'pytest')])"
    assert run(environment, "-c", code).stdout == "[None, None]\n"


@pytest.mark.slow
def test_the_benchmark_starts_without_triton(environment):
    """The benchmark starts without Triton.

    Its commands that imitate a GPU's kernels say that they need Triton; the others run.
    """
    done = run(environment, "scripts/bench", "latency", "--help")
    assert done.returncode == 0 and "--batches" in done.stdout, done.stderr
    done = run(environment, "scripts/bench", "host")
    assert done.returncode == 1 and "pip install triton" in done.stderr


@pytest.mark.slow
def test_the_check_of_a_gpu_runs_dry_without_triton(environment, tmp_path):
    sections = ["--only", "facts,sweeps,tests"]
    done = run(environment, "scripts/gpu_check.py", "--dry", "--out", str(tmp_path), *sections)
    assert done.returncode == 0, done.stdout + (tmp_path / "log.txt").read_text()
    lines = done.stdout.splitlines()
    assert any(line.split(maxsplit=1) == ["sweeps", "Triton is not installed"] for line in lines)
