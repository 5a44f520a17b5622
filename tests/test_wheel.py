"""A built wheel, installed apart from the tree: its kernels run with no compiler and no home."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers import ahead
from helpers.kernels import HAS_KERNELS
from llama.ops.cpu import build

REPO = Path(__file__).resolve().parent.parent
PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
import llama
from llama.ops.cpu import native
library = native.kernels()
engine = llama.Llama.build(sys.argv[1], device="cpu", dtype="bf16", max_seq_len=128)
prompts = [engine.tokenizer.encode("Once upon a time", bos=True, eos=False)] * 2
ids, logprobs = engine.generate(prompts, 24, temperature=0.8, logprobs=True, seed=7)
bits = [[x.hex() for x in row] for row in logprobs]
print(json.dumps([llama.__file__, library and library._name, ids, bits]))
"""


def generated(folder: Path, checkpoint: Path, **environment: str) -> list:
    """Where the package and the kernels lie, and the ids and log-probabilities of two answers."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(checkpoint)],
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        cwd=checkpoint, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def wheel() -> Path:
    return ahead.wheel()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_KERNELS, reason="needs x86-64 with AVX2, and g++")
def test_a_wheel_gives_the_bits_of_a_checkout_without_a_compiler(wheel, tmp_path):
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"llama/ops/cpu/{build.library_name(build.INSTRUCTION_SETS[-1])}",
            "llama/data/demo/params.json",
            "llama/server/page.html"} < set(names)  # fmt: skip
    site, home = tmp_path / "site", tmp_path / "home"
    zipfile.ZipFile(wheel).extractall(site)  # what pip does, and faster
    home.mkdir()
    package, library, *answers = generated(
        site, site / "llama" / "data" / "demo", PATH=str(home), HOME=str(home), XDG_CACHE_HOME=""
    )
    assert package == str(site / "llama" / "__init__.py")
    assert library is not None and library.startswith(str(site))
    assert list(home.iterdir()) == []
    _, compiled, *expected = generated(REPO, REPO / "checkpoints" / "demo")
    assert not compiled.startswith(str(REPO))
    assert answers == expected
