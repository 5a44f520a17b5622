"""Threads that share pieces of work: each piece is written once, and nobody waits for a thread."""

import subprocess
from pathlib import Path

import pytest

from helpers.kernels import HAS_KERNELS
from llama.kernels.cpu import build

PROGRAM = Path(__file__).resolve().parent.parent / "helpers" / "team_program.cpp"


@pytest.mark.skipif(not HAS_KERNELS, reason="needs x86-64 with AVX2, and g++")
@pytest.mark.parametrize("more", [[], ["-DTEAM_MAX_PIECES=16"]], ids=["", "in parts"])
def test_pieces_are_written_once_and_nobody_waits_for_a_thread_put_aside(tmp_path, more):
    """Each piece is written once, and no thread waits for one that is descheduled.

    The compiled program checks it with its own threads; a hang ends after 20 s. A range counts
    pieces in 24 bits, so a phase with more is split.
    """
    flags = [
        *more,
        "-std=c++17",
        "-O2",
        "-fopenmp",
        "-march=haswell",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    command = ["g++", *flags, f"-I{build.FOLDER}", str(PROGRAM), "-o", str(tmp_path / "team")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    done = subprocess.run([tmp_path / "team"], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
