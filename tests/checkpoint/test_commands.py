"""The commands for checkpoints, as a shell calls them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.checkpoints import write_meta
from helpers.launch import REPO
from helpers.weights import PARAMS, STATE, expect_files
from llama.checkpoint.verify import verify
from llama.cli import main


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llama", *map(str, words)], cwd=REPO, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip


def test_the_commands_from_a_shell(meta, tmp_path):
    out = tmp_path / "out"
    done = command("reshard", meta, out, "--model_parallel_size", "4")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    expect_files(out, STATE, PARAMS, 4)


def test_the_commands_take_folders_as_words(tmp_path, monkeypatch, capsys):
    """fire would read 3.10 as a number, and look for a folder 3.1."""
    monkeypatch.chdir(tmp_path)
    write_meta(Path("3.10"), PARAMS, STATE)
    monkeypatch.setattr(sys, "argv", ["llama", "convert", "3.10", "4.20"])
    main()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "argv", ["llama", "verify", "4.20"])
    main()
    assert capsys.readouterr().out.splitlines() == verify("4.20")
    monkeypatch.setattr(sys, "argv", ["llama", "verify", "4.2"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("error: 4.2 does not exist")
