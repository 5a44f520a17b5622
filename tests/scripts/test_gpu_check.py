"""`scripts/gpu_check.py` without a GPU: all of it runs, so that on one it is not what fails."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="its kernels need Triton")

import gpu_check

from bench.gpu_run import BARS, MODES
from bench.gpu_sections import LIMITS
from helpers import warm
from helpers.launch import REPO, environment
from llama.ops.cpu import native


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory) -> tuple[list[str], Path, subprocess.CompletedProcess]:
    """Its command, its folder and how it ended. Its cache is its own, but for the CPU's kernels."""
    out: Path = tmp_path_factory.mktemp("gpu_check")
    if native.kernels() is not None:
        shutil.copytree(native.cache_folder(), out / "cache" / "llama")
    command = [sys.executable, str(REPO / "scripts" / "gpu_check.py"), "--dry", "--minutes", "9"]
    command += ["--out", str(out)]
    return command, out, warm.run(command, env=environment(WARM_CHILDREN="1"), timeout=400)


@pytest.mark.slow
def test_all_sections_run_dry_and_only_once(dry_run, monkeypatch, capsys):
    """Every figure that has a bar is there in its last mode, and those of decode in each mode; a
    second run finds nothing left to do."""
    command, out, done = dry_run
    logs = "\n".join(path.read_text()[-2000:] for path in out.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {row["section"]: row["ended"] for row in rows if "ended" in row} == dict.fromkeys(
        LIMITS, "ok"
    )
    found = {(row["what"], row.get("mode")) for row in rows if "what" in row}
    for what in BARS:
        assert {(what, None), (what, MODES[-1])} & found, f"{what} was not measured"
    assert {("8b batch 1", mode) for mode in MODES} <= found
    assert ("8b graphs", None) in found
    checked = {row["what"]: row["value"] for row in rows if "what" in row}
    assert checked["8b graphs"] == checked["8b sample"] == "passed"
    assert "8b batch 1" in (out / "summary.txt").read_text()
    monkeypatch.setattr(sys, "argv", command[1:])
    assert gpu_check.main() == 0
    assert capsys.readouterr().out.count("done before") == len(LIMITS)


def test_a_section_that_hangs_or_fails_costs_its_own_time_alone(tmp_path):
    assert gpu_check._run_child("decode", tmp_path, 0.5, dry=True).startswith(
        "stopped at its limit"
    )
    assert gpu_check._run_child("nowhere", tmp_path, 60, dry=True).startswith("failed (exit code 1")
    assert "KeyError: 'nowhere'" in (tmp_path / "nowhere.log").read_text()


def test_without_a_gpu_it_says_so(tmp_path, capsys, monkeypatch):
    for arguments, said in (
        (["--out", str(tmp_path)], "torch finds no CUDA GPU here: --dry runs all of this"),
        (["--out", str(tmp_path), "--dry", "--only", "decod"], "--only decod: there are facts,"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
        monkeypatch.setattr("bench.gpu_sections.has_gpu", lambda: False)
        with pytest.raises(SystemExit):
            gpu_check.main()
        assert said in capsys.readouterr().err
