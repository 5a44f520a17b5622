"""The sampling kernels compile for GPUs without one; they spill no registers."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.launch import run_program

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton's kernels need Triton")
def test_registers_suffice_for_the_real_vocabulary():
    program = str(ROOT / "tests" / "programs" / "compile_sample.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, program, "80", "90"]
    done = run_program(command, env=environment | {"PYTHONPATH": str(ROOT)}, timeout=280)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 24
    for kernel in kernels:
        assert kernel["stack"] == kernel["local"] == 0, kernel
        assert kernel["registers"] <= 128, kernel
