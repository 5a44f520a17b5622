"""The commands and the Python of README, run word for word with what README installs alone."""

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from helpers.lean import lean_environment
from helpers.pages import REPO, blocks

# The fixture has made the environment of these lines; other tests run the scripts.
DONE_BEFORE = {
    "pip install -c constraints.txt -e '.[serve]'",
    "python3 -m venv .venv",
    "./scripts/demo",
    "./scripts/test",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a checkout, in which files may be written, with the environment of README."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("checkpoints", "scripts", "torchrun_examples", "constraints.txt"):
        (folder / name).symlink_to(REPO / name)
    lean_environment(folder / ".venv", "serve")
    return folder


@pytest.fixture
def variables() -> dict[str, str]:
    """The environment of a new shell, and a free port for the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inherited = {key: x for key, x in os.environ.items() if not key.startswith(("PYTHON", "LLAMA"))}
    return {**inherited, "OMP_NUM_THREADS": "1", "PORT": str(port)}


def script() -> str:
    """Return README's shell blocks as one script; of the two servers, the one in the background."""
    lines = []
    for line in "\n".join(blocks(REPO / "README.md", "bash")).splitlines():
        command = line.partition(" #")[0].strip()
        if command in DONE_BEFORE or command == "llama serve":
            continue
        if command == "llama doctor":
            line = "llama doctor || [ $? = 1 ]  # 1: it found a problem of this machine"
        lines.append(re.sub(r"^llama serve &", 'llama serve --port "$PORT" &', line))
    text = "\n".join(lines).replace("127.0.0.1:8000", "127.0.0.1:$PORT")
    return f". .venv/bin/activate\nset -euo pipefail\n{text}\nkill %1\nwait %1\n"


@pytest.mark.slow
def test_the_commands_of_the_first_page_run_without_the_test_extra(checkout, variables):
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
        [checkout / ".venv" / "bin" / "python", "-c", program], cwd=checkout, env=variables,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout


def test_the_script_has_the_commands_of_the_first_page():
    """Few lines are left out, and each of them is in the page."""
    text = script()
    assert len(re.findall(r"^(llama|curl) ", text, re.MULTILINE)) >= 8
    assert all(line in (REPO / "README.md").read_text() for line in DONE_BEFORE)
