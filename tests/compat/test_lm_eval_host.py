"""lm-eval's own code against the server equals its transformers backend on the same weights.

It is installed in an environment of its own, with `lm-eval[api]`, torch, transformers and
accelerate. In this environment run: LM_EVAL_PYTHON=ITS/bin/python python -m pytest -m hosts
tests/compat
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers.launch import DEMO, PROGRAMS
from llama.checkpoint.write.convert import convert

PYTHON = os.environ.get("LM_EVAL_PYTHON", "")


@pytest.fixture(scope="module")
def results(server, tmp_path_factory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("lm_eval")
    convert(DEMO, folder / "hf")
    job = {"url": server.url, "model": "demo", "hf": str(folder / "hf"), "folder": str(folder)}
    (folder / "job.json").write_text(json.dumps(job))
    command = [PYTHON, str(PROGRAMS / "lm_eval_host.py"), str(folder / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text())


@pytest.mark.hosts
@pytest.mark.skipif(not PYTHON, reason="LM_EVAL_PYTHON names no Python with lm-eval")
@pytest.mark.timeout(300)
def test_lm_eval_finds_what_its_own_backend_finds(results):
    """lm-eval finds the same as with its own backend.

    Prompts are sent as ids, as text, and as ids of the server's tokenizer, 8 in a request and 16
    requests at once; and as chats. Answers and accuracies are equal, log probabilities within 1e-3.
    """
    for way, wanted in (
        ("ids", "hf"), ("text", "hf"), ("remote", "hf remote"), ("chat", "hf chat")
    ):  # fmt: skip
        assert results[way].keys() <= results[wanted].keys()
        for task, found in results[way].items():
            same = results[wanted][task]
            assert len(found["samples"]) == 40
            for one, other in zip(found["samples"], same["samples"], strict=True):
                _compare(one, other, (way, task))
            for name, value in found["metrics"].items():
                within = 1e-3 * value if "perplexity" in name else 0
                assert value == pytest.approx(same["metrics"][name], abs=within), (way, task, name)


def _compare(found: Any, wanted: Any, where: tuple[str, str]) -> None:
    """Compare results; numbers may be text in JSON written by lm-eval."""
    if isinstance(found, list):
        for one, other in zip(found, wanted, strict=True):
            _compare(one, other, where)
    elif isinstance(found, float):
        assert found == pytest.approx(wanted, abs=1e-3), where
    else:
        assert found == wanted, where
