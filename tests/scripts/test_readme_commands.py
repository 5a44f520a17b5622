"""The commands and the Python of README, run word for word, with what README installs alone.

The environment of the tests has more packages. So each Python that is started here imports a module
which refuses the packages that `pip install '.[serve]'` would not have installed.
"""

import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.pages import REPO, blocks

EXTRAS = {"serve"}
NOT_RUN = {  # what a fresh checkout does once; the tests of the demo and of CI run them
    "./scripts/demo", "./scripts/test",
}  # fmt: skip
BLOCKER = """\
import sys

REFUSED = frozenset({names!r})


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Refuse())
"""


def requirements(extras: set[str]) -> list[Requirement]:
    """Return what pyproject.toml asks for, with these extras."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    more = [line for name in extras for line in project["optional-dependencies"][name]]
    return [Requirement(line) for line in (*project["dependencies"], *more)]


def closure(wanted: list[Requirement]) -> set[str]:
    """Return the names of all distributions that pip would install for `wanted`."""
    names: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        requirement = wanted.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            lines = importlib.metadata.requires(requirement.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system
        names.add(key[0])
        for inner in map(Requirement, lines):
            environments = [{"extra": extra} for extra in ("", *requirement.extras)]
            if inner.marker is None or any(map(inner.marker.evaluate, environments)):
                wanted.append(inner)
    return names


def refused(extras: set[str]) -> list[str]:
    """Return the top-level modules of this environment that an installation with `extras` lacks."""
    installed = closure(requirements(extras)) | {"llama", "pip", "setuptools"}
    return sorted(
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if module.isidentifier() and not installed & {canonicalize_name(x) for x in owners}
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like a checkout, in which files may be written."""
    for name in ("checkpoints", "scripts", "torchrun_examples", "constraints.txt"):
        (tmp_path / name).symlink_to(REPO / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    return tmp_path


@pytest.fixture
def variables(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a shell in it: pip and venv do nothing, `llama` is this tree's."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "sitecustomize.py").write_text(BLOCKER.format(names=refused(EXTRAS)))
    programs = {
        "llama": f'exec {sys.executable} -m llama "$@"',
        "python": f'exec {sys.executable} "$@"',
        "python3": f'[ "$2" = venv ] || exec {sys.executable} "$@"',
        "pip": "exit 0",
    }
    for name, line in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        **os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PORT": str(port),
        "PYTHONPATH": f"{folder}{os.pathsep}{REPO}", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def script() -> str:
    """Return README's shell blocks as one script: what only ends by a key is not run in front."""
    lines = []
    for line in "\n".join(blocks(REPO / "README.md", "bash")).splitlines():
        words = line.split("#")[0].strip()
        if words == "llama serve" or words in NOT_RUN:
            continue
        if words == "llama doctor":
            line = "llama doctor || [ $? = 1 ]  # 1: it found a problem of this machine"
        lines.append(re.sub(r"^llama serve &", 'llama serve --port "$PORT" &', line))
    text = "\n".join(lines).replace("127.0.0.1:8000", "127.0.0.1:$PORT")
    return f"set -euo pipefail\n{text}\nkill %1\nwait %1\n"


@pytest.mark.slow
def test_the_commands_of_the_first_page_run_without_the_test_extra(checkout, variables):
    assert "pytest" in refused(EXTRAS) and "torch" not in refused(EXTRAS)
    shell = subprocess.Popen(
        ["bash", "-c", script()], cwd=checkout, env=variables, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = shell.communicate(timeout=240)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, output
    assert '"object":"text_completion"' in output.replace(" ", "")
    assert len((checkout / "results.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_the_python_of_the_first_page_runs_without_the_test_extra(checkout, variables):
    program = "\n".join(blocks(REPO / "README.md", "python"))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=checkout, env=variables, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout


def test_a_refused_package_is_missing_there(variables):
    done = subprocess.run(
        [sys.executable, "-c", "import transformers"], env=variables, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "ModuleNotFoundError: No module named 'transformers'" in done.stderr
