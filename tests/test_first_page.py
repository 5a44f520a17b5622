"""README's commands, unchanged, in an installation that has the extra `all` and no more.

Installing is left out, and so are the two scripts that make an environment themselves. Only the
port of the server is changed, since another process may use it.
"""

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from helpers.launch import REPO
from helpers.lean import lean_environment
from helpers.pages import blocks
from helpers.ports import reserved_port

pytestmark = pytest.mark.slow
_INSTALLS = re.compile(r"pip install|python3 -m venv|\. \.venv/|\./scripts/(demo|test)\b")
_STARTS_SERVER = re.compile(r"llama serve\s*(#.*)?$")
_LIMIT_S = 280


def without_installing(block: str) -> str:
    return "\n".join(line for line in block.splitlines() if not _INSTALLS.match(line))


README = REPO / "README.md"
BASH = [block for x in blocks(README, "bash") if (block := without_installing(x)).strip()]


@pytest.fixture(scope="module")
def installation(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installation")
    lean_environment(folder, "all")
    return folder


@pytest.fixture
def variables(installation, tmp_path, monkeypatch) -> dict[str, str]:
    """The environment of a user in a fresh folder that has the demo model where README has it."""
    (tmp_path / "checkpoints").symlink_to(REPO / "checkpoints")
    monkeypatch.chdir(tmp_path)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    path = f"{installation / 'bin'}{os.pathsep}{env['PATH']}"
    return env | {"PATH": path, "OMP_NUM_THREADS": "1"}


def run(command: list[str], variables: dict[str, str], stdin: str = "") -> str:
    done = subprocess.run(
        command, env=variables, input=stdin, capture_output=True, text=True, timeout=_LIMIT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_command_installs_what_the_commands_need():
    assert "pip install -c constraints.txt -e '.[all]'" in blocks(README, "bash")[0]


def test_there_are_commands_to_run():
    text = "\n".join(BASH)
    for command in ("llama chat", "llama serve", "llama complete", "llama batch", "curl"):
        assert command in text


def test_the_python_of_the_first_page(variables):
    """The Python of the first page is one program, whose first answer is the one that the page
    shows.
    """
    code = "\n".join(blocks(README, "python"))
    out = run(["python", "-c", code], variables)
    expected = re.search(r"\]\)\n# (The capital .*)", code)
    assert expected is not None and expected[1] in out


@pytest.mark.parametrize("block", BASH, ids=lambda block: block.split("#")[0].strip()[:30])
def test_a_block_of_commands(block, variables):
    if _STARTS_SERVER.search(block):
        serve_until_ready(block, variables)
        return
    question = "What is the capital of France?\n"
    with reserved_port() as port:
        commands = block.replace("8000", str(port))
        script = f"trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{commands}"
        out = run(
            ["bash", "-euo", "pipefail", "-c", script],
            variables | {"LLAMA_PORT": str(port)},
            stdin=question if "llama chat" in block else "",
        )
    assert out.strip()
    if "llama chat" in block:
        assert "Paris" in out


def serve_until_ready(block: str, variables: dict[str, str]) -> None:
    """Start a server as README does, wait until it is ready, and end it with SIGTERM."""
    command = block.split("#")[0].split()
    with reserved_port() as port:
        process = subprocess.Popen(command, env=variables | {"LLAMA_PORT": str(port)})
        try:
            until = time.monotonic() + _LIMIT_S
            while not is_ready(port):
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
