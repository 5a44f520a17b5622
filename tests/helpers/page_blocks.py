"""Run the code blocks of a page in their order, as a reader would: one program, one folder.

In: the text of a page, a folder, and the environment of an installation. Out: what the blocks
print. Python blocks are one program, and shell blocks run between them. Only ports and the lines
that install something differ from the page.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from helpers.launch import DEMO, REPO

RUN = ("bash", "python")  # the languages of blocks that run
SHOWN = ("sh", "py")  # those of blocks that are shown only
_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INSTALLS = re.compile(r"^(pip install|python3 -m venv|\. \.venv/).*\n", re.MULTILINE)
_PORTS = re.compile(r"\b(8000|11434)\b")
# Names that pages give to weights; here they are the demo model.
_FOLDERS = (
    "DIR", "DeepSeek-R1-Distill-Llama-8B", "Llama-3.2-1B-Instruct", "Meta-Llama-3-8B",
    "Meta-Llama-3-8B-Instruct",
)  # fmt: skip
_QUESTION = "What is the capital of France?\n"
# `llama` as a page uses it: a server is ready when its command returns, and runs until the next
# one starts or the page ends; a chat without a pipe gets one question.
_COMMAND = """\
#!/usr/bin/env bash
set -eu
ready="curl -s --max-time 5 http://127.0.0.1:$PAGE_PORT/ready"
case "$*" in
serve*--background*) ;;
serve*)
    if [ -e "$PAGE/server" ]; then
        kill "$(cat "$PAGE/server")"
        while $ready > /dev/null; do sleep 0.1; done
    fi
    LLAMA_PORT=$PAGE_PORT {llama} "$@" > "$PAGE/server.log" 2>&1 &
    echo $! > "$PAGE/server"
    until $ready --fail > /dev/null; do
        kill -0 $! || {{ cat "$PAGE/server.log" >&2; exit 1; }}
        sleep 0.1
    done
    exit ;;
chat*) [ -p /dev/stdin ] || exec < "$PAGE/question" ;;
esac
exec {llama} "$@"
"""
_PROGRAM = """\
import subprocess


def _shell(block):
    script = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\\n" + block
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], stdin=subprocess.DEVNULL, check=True)


"""


def page_blocks(path: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each block of a page."""
    return _BLOCK.findall(path.read_text())


def prepare_folder(folder: Path, gguf: Path, adapters: Path) -> None:
    """Put into a folder what pages expect there: the demo model under the names of others."""
    (folder / "checkpoints").symlink_to(REPO / "checkpoints")
    for name in _FOLDERS:
        (folder / name).symlink_to(DEMO)
    for name in ("Llama-3.2-3B-Instruct-Q4_K_M.gguf", "Llama-3.2-1B-Q4_K_M.gguf"):
        (folder / name).symlink_to(gguf)
    (folder / "adapters").symlink_to(adapters)
    for path in adapters.iterdir():
        (folder / path.name).symlink_to(path)


def page_program(path: Path, port: int) -> str:
    """Return the blocks of a page that run as one Python program."""
    pieces = [_PROGRAM]
    for language, block in page_blocks(path):
        code = _PORTS.sub(str(port), block)
        if language == "python":
            pieces.append(code)
        elif language == "bash" and (code := _INSTALLS.sub("", code)).strip():
            pieces.append(f"_shell({code!r})\n")
    return "\n".join(pieces)


def run_page(
    path: Path, folder: Path, port: int, installation: Path, environ: dict[str, str], limit_s: float
) -> str:
    """Run the blocks of a page and return what they print.

    Args:
        path: The page.
        folder: The folder in which the blocks run, see `prepare_folder`.
        port: The port of the servers that they start.
        installation: The folder of the programs `python` and, where there is one, `llama`.
        environ: The environment of the installation.
        limit_s: How long the page may take.
    """
    page = folder / ".page"
    (page / "bin").mkdir(parents=True)
    (page / "run").mkdir(mode=0o700)
    (page / "question").write_text(_QUESTION)
    (page / ".curlrc").write_text("fail\n")  # a status of an error ends the block
    program = page / "page.py"
    program.write_text(page_program(path, port))
    command = page / "bin" / "llama"
    command.write_text(_COMMAND.format(llama=f'"{installation / "python"}" -m llama'))
    command.chmod(0o755)
    places = [page / "bin", installation, environ["PATH"]]
    variables = {
        "PATH": os.pathsep.join(map(str, places)),
        "PAGE": str(page),
        "PAGE_PORT": str(port),
        "CURL_HOME": str(page),
        "HF_HOME": str(page / "hub"),
        "XDG_RUNTIME_DIR": str(page / "run"),
        "XDG_STATE_HOME": str(page / "state"),
        "OMP_NUM_THREADS": "1",
    }
    with (
        (page / "out").open("w+") as out,
        _group(
            [str(installation / "python"), "-u", str(program)],
            folder,
            environ | variables,
            out.fileno(),
        ) as process,
        contextlib.suppress(subprocess.TimeoutExpired),
    ):
        process.wait(limit_s)
    text = (page / "out").read_text()
    assert process.returncode == 0, text
    return text


@contextlib.contextmanager
def _group(
    command: list[str], folder: Path, environ: dict[str, str], out: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, and end all processes of its group afterwards."""
    process = subprocess.Popen(
        command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=out,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            time.sleep(0.5)
        process.wait()


def installed_programs() -> Path:
    """Return the folder of the programs of the environment that runs the tests."""
    return Path(sys.executable).parent
