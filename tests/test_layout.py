"""The walls of the house, held by parsing the imports; the safety rules, by reading the code."""

import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llama
from llama.engine.sequence import Sequence, TokenParams

REPO = Path(__file__).resolve().parent.parent
FILES = sorted((REPO / "llama").rglob("*.py"))
NAMES = [str(path.relative_to(REPO)) for path in FILES]

# What each part may import of the package; imports point down only.
BELOW = {
    "llama/device.py": set(),
    "llama/openmp.py": set(),
    "llama/signals.py": set(),
    "llama/tokenizer.py": {"checks", "downloads"},
    "llama/checks.py": set(),
    "llama/downloads.py": {"checks"},
    "llama/args.py": {"checks"},
    "llama/sampling_params.py": {"checks", "structured_output"},
    "llama/structured_output.py": {"checks"},
    "llama/ops": {"device", "ops"},
    "llama/parallel": {"ops", "parallel", "signals"},
    "llama/layers.py": {"ops", "parallel"},
    "llama/fused.py": {"ops"},
    "llama/gpu.py": {"args", "device", "engine", "model", "ops", "parallel"},
    "llama/model.py": {"args", "device", "fused", "layers", "ops", "parallel"},
    "llama/checkpoint": {
        "args", "checkpoint", "checks", "device", "downloads", "model", "parallel", "tokenizer",
    },
    "llama/engine/params.py": {"sampling_params"},  # an old name, for those who import it there
    "llama/engine/graph_check.py": {"args", "device", "engine", "model", "ops"},  # a program
    "llama/engine": {"device", "engine", "model", "openmp", "ops", "parallel"},
    "llama/requests": {
        "checks", "engine", "parallel", "requests", "sampling_params", "structured_output",
        "tokenizer",
    },
    "llama/loading.py": {
        "args", "checkpoint", "checks", "device", "engine", "gpu", "model", "parallel",
        "tokenizer",
    },
    "llama/predictions.py": {"tokenizer"},
    "llama/generation.py": {
        "predictions",
        "checks", "engine", "gpu", "loading", "model", "parallel", "requests", "sampling_params",
        "tokenizer",
    },
    "llama/serving/fastchat_worker.py": {  # a program, as __main__
        "cli", "generation", "requests", "serving",
    },
    "llama/serving/server/metrics.py": {"parallel", "requests", "serving"},  # which ranks live
    "llama/serving": {
        "checks", "generation", "requests", "sampling_params", "serving", "structured_output",
        "tokenizer",
    },
    "llama/batch": {
        "batch", "generation", "parallel", "requests", "sampling_params", "serving", "signals",
        "tokenizer",
    },
    "llama/chat": {
        "chat", "generation", "parallel", "requests", "sampling_params", "serving", "signals",
        "tokenizer",
    },
    "llama/cli": {
        "batch", "chat", "checkpoint", "cli", "device", "generation", "loading", "ops",
        "parallel", "sampling_params", "serving", "signals",
    },
    "llama/__main__.py": {"cli"},
    "llama/__init__.py": {
        "args", "generation", "model", "requests", "sampling_params", "structured_output",
        "tokenizer",
    },
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """Full dotted names of everything that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_imports_point_down(name):
    allowed = next(parts for place, parts in BELOW.items() if name.startswith(place))
    own = {i.split(".")[1] for i in imports(REPO / name) if i.startswith("llama.")}
    assert own <= allowed, f"{name} may import {sorted(allowed)} of the package"


@pytest.mark.parametrize(
    ("library", "where"),
    [
        ("torch.distributed", r"llama/parallel/(groups|hierarchy|one_shot|rendezvous)\.py"),
        ("fairscale", r"llama/parallel/groups\.py"),
        ("triton", r"llama/ops/gpu/"),
        ("fastapi", r"llama/serving/server/"),
        ("uvicorn", r"llama/serving/(server/(process|protocol)|fastchat_worker)\.py"),
        ("prometheus_client", r"llama/serving/server/metrics\.py"),
        ("fastchat", r"nowhere"),
        ("fire", r"nowhere"),
        ("tiktoken", r"llama/tokenizer\.py"),
        ("llguidance", r"llama/requests/grammar\.py"),
        ("transformers", r"nowhere"),
        ("llama_models", r"nowhere"),
        ("pickle", r"nowhere"),
    ],
)
def test_each_library_has_one_place(library, where):
    users = [n for n, p in zip(NAMES, FILES, strict=True)
             if any(i == library or i.startswith(library + ".") for i in imports(p))]  # fmt: skip
    assert all(re.match(where, name) for name in users), users
    assert users or where == "nowhere"


@pytest.mark.parametrize("name", ["sequence", "pages", "scheduler"])
def test_the_books_of_the_engine_need_no_torch(name):
    path = REPO / "llama" / "engine" / f"{name}.py"
    assert not {i for i in imports(path) if i.split(".")[0] == "torch"}


BELOW_TEXT = [*(REPO / "llama" / "engine").glob("*.py"), REPO / "llama" / "model.py"]


def test_text_stays_out_of_the_engine():
    """No tokenizer, and no string of a user's: neither in what a sequence holds nor in what is
    read of it."""
    text = {"stop", "bad_words_text", "prompt", "text", "detokenizer", "tokenizer"}
    for path in BELOW_TEXT:
        assert not {i for i in imports(path) if "tokenizer" in i}
        tree = ast.parse(path.read_text())
        read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not read & text, path
    fields = dataclasses.fields(TokenParams) + dataclasses.fields(Sequence)
    holds_text = {field.name for field in fields if re.search(r"\bstr\b", str(field.type))}
    assert holds_text == {"finish_reason"}


@pytest.mark.parametrize("name", NAMES)
def test_no_dangerous_calls(name):
    """No code from data: eval, exec, shell strings, object collectives, unsafe loads."""
    for node in ast.walk(ast.parse((REPO / name).read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in ("eval", "exec", "os.system", "compile")
        assert "_object" not in called and "set_default_" not in called
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        assert keywords.get("shell") is None
        if called == "torch.load":
            assert keywords.get("weights_only") == "True"


def test_old_names_still_import():
    """Where README named these before the packages had their folders."""
    from llama.engine.params import SamplingParams as OldParams
    from llama.serving.async_engine import AsyncLLMEngine as OldEngine

    assert (OldParams, OldEngine) == (llama.SamplingParams, llama.AsyncLLMEngine)


def test_importing_is_quiet_and_light():
    """`import llama` prints nothing, loads no heavy library and changes no global of torch."""
    code = """
import json, sys, torch
before = (str(torch.get_default_dtype()), torch.get_num_threads(), torch.initial_seed())
import llama
after = (str(torch.get_default_dtype()), torch.get_num_threads(), torch.initial_seed())
heavy = [m for m in ("transformers", "fire", "triton", "tokenizers") if m in sys.modules]
print(json.dumps([before == after, heavy]))
"""
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True,
        cwd=REPO,
    )  # fmt: skip
    assert json.loads(out.stdout) == [True, []]
    assert out.stderr == ""


def test_every_file_opens_with_its_charter():
    paths = [*FILES, *(REPO / "scripts").rglob("*.py"), *(REPO / "tests").glob("*.py")]
    for path in paths:
        tree = ast.parse(path.read_text())
        assert not tree.body or ast.get_docstring(tree), path
