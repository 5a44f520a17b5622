"""The code of README and docs: each page's blocks run in order, in a folder of its own.

A block of `bash` or `python` runs here, with the demo model for the models that a page names. A
block of `sh` or `py` is only shown; `SHOWN_ONLY` says why, and counts them. README and the
quickstart run in an installation that has the extra `all` and no more.
"""

import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from helpers.launch import DEMO, REPO, environment, run_program
from helpers.lean import lean_environment
from helpers.page_blocks import (
    RUN,
    SHOWN,
    installed_programs,
    page_blocks,
    prepare_folder,
    run_page,
)
from helpers.pages import DOCS
from helpers.ports import reserved_port

README = REPO / "README.md"
PAGES = {str(path.relative_to(REPO)): path for path in (README, *sorted(DOCS.rglob("*.md")))}
LEAN = ("README.md", "docs/quickstart.md")
# Blocks that cannot run here, or not in time: their number, and what they need.
SHOWN_ONLY = {
    "README.md": (2, "an installation of its own"),
    "docs/CONTRIBUTING.md": (2, "the whole suite, mkdocs"),
    "docs/development/add-kv-format.md": (1, "a part of a file"),
    "docs/development/add-layer-kind.md": (1, "a part of a file"),
    "docs/development/add-route.md": (1, "a part of a file"),
    "docs/development/add-sampling-field.md": (1, "a part of a file"),
    "docs/development/add-weight-format.md": (1, "a part of a file"),
    "docs/development/tests.md": (2, "the whole suite"),
    "docs/guides/clients.md": (1, "Claude Code"),
    "docs/guides/deploy.md": (3, "Docker, systemd"),
    "docs/guides/embeddings.md": (2, "models for embeddings"),
    "docs/guides/gpu.md": (2, "a GPU"),
    "docs/guides/hosts.md": (3, "FastChat"),
    "docs/guides/lm-eval.md": (1, "lm-eval"),
    "docs/guides/python.md": (1, "a vision model"),
    "docs/guides/quantize.md": (1, "a CPU without AMX"),
    "docs/guides/ranks.md": (6, "several GPUs or machines, or seconds for each rank"),
    "docs/guides/replicas.md": (2, "several GPUs or machines"),
    "docs/guides/serve.md": (1, "a vision model"),
    "docs/guides/weights.md": (2, "a download, another template"),
    "docs/quickstart.md": (2, "an installation of its own, a download"),
}
# What the blocks of a page print, among other things.
PRINTED = {
    "README.md": ("The capital of France is Paris.", "the engine and the reference agree"),
    "docs/concepts/reference.md": ("'generation': ",),
    "docs/concepts/speculation.md": ("The capital of France is Paris.",),
    "docs/development/core.md": ("[11, 390, 315, ",),
    "docs/guides/adapters.md": ("The capital of France is Paris.", "W8A16"),
    "docs/guides/batch.md": (
        "shared.jsonl: 3 results added, 0 errors",
        "served.jsonl: 3 results added, 0 errors",
    ),
    "docs/guides/chat.md": ("The capital of Japan is Tokyo."),
    "docs/guides/convert.md": ("the engine and the reference agree", "Paris"),
    "docs/guides/embeddings.md": ("cosine: ",),
    "docs/guides/from-llama-cpp.md": ("The capital of France is Paris.",),
    "docs/guides/from-vllm.md": (" stop\n",),
    "docs/guides/hosts.md": ("{'prompt_tokens': ",),
    "docs/guides/ollama.md": (),
    "docs/guides/plan.md": ("command    llama serve DIR --ranks 4 --replicas 2",),
    "docs/guides/python.md": ("Usage(prompt_tokens=",),
    "docs/guides/quantize.md": ("Paris",),
    "docs/guides/serve.md": ("The capital of France is Paris.",),
    "docs/guides/tools.md": ("tools",),
    "docs/guides/weights.md": ("Paris",),
    "docs/quickstart.md": ("The capital of France is Paris.", "The capital of Japan is Tokyo."),
}
_LIMIT_S = 280


def counted(path: Path, languages: tuple[str, ...]) -> int:
    count = Counter(language for language, _ in page_blocks(path))
    return sum(count[language] for language in languages)


def test_each_block_runs_or_has_a_reason():
    """Each block of code runs here, or `SHOWN_ONLY` counts it."""
    shown = {name: counted(path, SHOWN) for name, path in PAGES.items()}
    assert {name: n for name, n in shown.items() if n} == {
        name: count for name, (count, _) in SHOWN_ONLY.items()
    }
    run = {name for name, path in PAGES.items() if counted(path, RUN)}
    assert run == PRINTED.keys()
    languages = {language for path in PAGES.values() for language, _ in page_blocks(path)}
    assert languages <= {*RUN, *SHOWN, "", "json", "mermaid", "text", "toml", "yaml"}


def test_the_first_command_installs_what_the_commands_need():
    first = next(block for language, block in page_blocks(README) if language == "bash")
    assert "pip install -c constraints.txt -e '.[all]'" in first


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    """The demo model as a GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    command = ["-m", "llama", "convert", DEMO, path, "--quantize", "q8_0"]
    done = run_program([installed_programs() / "python", *command])
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Path:
    """A folder of LoRA adapters for the demo model, whose updates are small."""
    from helpers.adapters import write_demo_adapter  # it imports transformers

    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("legal", "poems", "my-adapter", "first", "second")):
        write_demo_adapter(folder / name, seed, 0.01)
    return folder


@pytest.fixture(scope="module")
def lean(tmp_path_factory) -> Path:
    """An installation with the extra `all`."""
    folder = tmp_path_factory.mktemp("installation")
    lean_environment(folder, "all")
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PRINTED])
def test_the_blocks_of_a_page_run_in_order(name, gguf, adapters, request):
    """The blocks of a page run in order, in an empty folder with the demo model."""
    if name in LEAN:
        installation = request.getfixturevalue("lean")
        environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    else:
        installation, environ = installed_programs(), environment()
    # Paths of sockets must be short.
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        prepare_folder(Path(folder), gguf, adapters)
        out = run_page(PAGES[name], Path(folder), port, installation, environ, _LIMIT_S)
    assert all(text in out for text in PRINTED[name]), out
