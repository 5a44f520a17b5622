"""Completion in the real shells: keys are typed in a terminal, and the shell runs what it made."""

import fcntl
import os
import pty
import select
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.flags import read
from helpers.launch import REPO
from llama.checkpoint.write.quantize import GGUF_FORMATS
from llama.cli import COMMANDS, main
from llama.cli.flags import FLAGS, UsageError
from llama.common.device import DTYPES
from llama.prompts import ToolFormat
from llama.weights.choice import QUANTIZED

# Shell -> how it starts without the user's settings, and lines that read the script and define a
# function `llama` that writes its arguments to a file. The script asks the program of this name.
SHELLS = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        "source ./script; llama() { printf '%s\\n' \"$@\" > arguments; }",
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        "autoload -U compinit; compinit -D -u; source ./script; "
        "llama() { printf '%s\\n' \"$@\" > arguments; }",
    ),
    "fish": (
        ["fish", "--no-config", "--private", "-i"],
        "source ./script; function llama; printf '%s\\n' $argv > arguments; end",
    ),
}
# Keys after `llama `, where > is Tab -> the arguments.
LINES = {
    "cha>--devi>cu>my>": ["chat", "--device", "cuda", "my weights"],
    "conver>my> out --quantize=q8>": ["convert", "my weights", "out", "--quantize", "q8_0"],
    "comple>": ["complet"],  # complete or completion
    "completion fi>": ["completion", "fish"],
    "serve --api_key_f>my>": ["serve", "--api_key_file", "my weights"],
    "serve --port my>": ["serve", "--port", "my"],  # a port is no file
    "batch --speculate lo>--resum>": ["batch", "--speculate", "lookup", "--resume"],
    "list --he>": ["list", "--help"],
}
_LIMIT_S = 60.0


class Terminal:
    """A shell in a pseudo-terminal."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.main, side = pty.openpty()
        env = {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(REPO),
            "HOME": str(folder),
            "TERM": "dumb",
            "LC_ALL": "C.UTF-8",
        }
        self.process = subprocess.Popen(
            command, stdin=side, stdout=side, stderr=side, cwd=folder, env=env,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # fish needs it
        )  # fmt: skip
        os.close(side)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self.main, keys.encode())

    def expect(self, text: str) -> None:
        """Read until the shell has written a text."""
        end = time.monotonic() + _LIMIT_S
        while text not in self.shown:
            assert time.monotonic() < end, f"waiting for {text!r}, shown is {self.shown!r}"
            if select.select([self.main], [], [], 0.1)[0]:
                self.shown += os.read(self.main, 4096).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(_LIMIT_S)
        os.close(self.main)


@pytest.fixture(params=SHELLS)
def shell(request, tmp_path, capsys) -> Iterator[Terminal]:
    command, setup = SHELLS[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    assert main(["completion", request.param]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "my weights").mkdir()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "llama"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m llama "$@"\n')
    program.chmod(0o755)
    terminal = Terminal(command, tmp_path)
    terminal.type(f"{setup}; echo rea''dy\n")
    terminal.expect("ready")
    yield terminal
    terminal.close()


def test_a_shell_completes_commands_flags_values_and_paths(shell, tmp_path):
    for index, (keys, expected) in enumerate(LINES.items()):
        shell.type(f"llama {keys.replace('>', chr(9))}\n")
        shell.type(f"echo ran''{index}\n")
        shell.expect(f"ran{index}")
        lines = (tmp_path / "arguments").read_text().replace("=", "\n").splitlines()
        assert [line.removesuffix("/") for line in lines] == expected, keys


def test_the_offered_values_are_those_that_are_taken():
    build = {name: set(FLAGS[name].choices) for name in ("device", "dtype", "quantize")}
    assert build["device"] == {"cuda", "mps", "cpu"}
    assert build["dtype"] == DTYPES.keys()
    assert build["quantize"] == QUANTIZED.keys()
    convert = COMMANDS["convert"].flags["quantize"]
    assert set(convert.choices) == {*QUANTIZED, *GGUF_FORMATS}
    assert set(FLAGS["tool_format"].choices) == {each.value for each in ToolFormat}


def test_another_shell_is_refused():
    with pytest.raises(UsageError, match="SHELL: 'tcsh' is not one of 'bash', 'zsh', 'fish'"):
        read("llama completion", COMMANDS["completion"], ["tcsh"], {})
