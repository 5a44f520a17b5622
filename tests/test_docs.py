"""The documentation site: every page is in it, what is generated is right, and mkdocs builds it.

mkdocs, its theme and mkdocstrings are the extra `docs`. Where they are not installed, DOCS_PYTHON
may name a Python that has them; without it, links, anchors and navigation are checked here alone.
"""

import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys

import pytest

import docs_hooks
from helpers.pages import DOCS, REPO, anchors, links
from llama import Llama
from llama.cli import COMMANDS
from llama.cli.doctor import RAN_ON

_NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")


def docs_python() -> str | None:
    """Return a Python that has the packages of the extra `docs`, or None."""
    if all(importlib.util.find_spec(name) for name in _NEEDED):
        return sys.executable
    return os.environ.get("DOCS_PYTHON")


def navigation() -> list[str]:
    """Return the pages that mkdocs.yml lists, in order."""
    text = (REPO / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    return re.findall(r": (\S+\.md)$", text, re.MULTILINE)


def test_the_navigation_has_each_page_once():
    pages = navigation()
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    included = {name for name in docs_hooks.INCLUDED if name.endswith(".md")}
    assert len(pages) == len(set(pages))
    assert set(pages) == there | included


def test_each_command_and_flag_is_in_the_reference():
    reference = docs_hooks.command_reference()
    for name, command in COMMANDS.items():
        section = reference.split(f"## llama {name}\n")[1].split("\n## ")[0]
        assert command.summary in section
        for flag in command.defaults:
            assert f"`--{flag}" in section
            assert command.flags[flag].meaning.replace("|", "\\|") in section


def test_the_versions_that_ran_on_a_gpu_are_those_of_the_results():
    """Pages and `llama doctor` name them, and the pages say of pinned ones whether they ran."""
    ran = docs_hooks.versions_on_gpus()
    assert list(RAN_ON) == ran
    assert f"| {' | '.join(ran[0])} |" in docs_hooks.versions_table().splitlines()
    pins = (REPO / "constraints.txt").read_text()
    pinned = tuple(re.search(rf"^{name}==(\S+)", pins, re.M)[1] for name in ("torch", "triton"))  # type: ignore[index]
    for name in ("guides/gpu.md", "reference/tested.md"):
        text = " ".join((DOCS / name).read_text().split())
        for _, torch, triton in ran:
            assert f"torch {torch} and Triton {triton}" in text, name
        has_run = pinned in [row[1:] for row in ran]
        not_run = f"torch {pinned[0]} and Triton {pinned[1]}, which no GPU has run"
        assert (not_run in text) != has_run, name


def test_each_argument_of_build_is_in_the_reference():
    """The table has the arguments that are flags, each with its default.

    The commands read no images yet.
    """
    table = docs_hooks.build_arguments().splitlines()
    parameters = inspect.signature(Llama.build).parameters
    named = {line.split("`")[1] for line in table[2:]}
    assert named == parameters.keys() - {"ckpt_dir", "images", "mute_ranks", "verbose"}
    assert any(line.startswith("| `timeout_s`") and line.endswith("| 600.0 |") for line in table)


def test_the_measured_devices_are_those_of_the_results():
    """A result of another device needs a name for it, and each mark is in a page."""
    assert re.search(r"\| NVIDIA H100 \| \d+ \| 20\d\d-\d\d-\d\d \|", docs_hooks.measured_devices())
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert all(pages.count(mark) == 1 for mark in docs_hooks.GENERATED)


def test_the_names_in_the_python_reference_exist():
    """The names in the Python reference exist; mkdocs checks them too, but may not be installed."""
    text = (DOCS / "reference" / "python.md").read_text()
    names = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(names) > 10
    for name in names:
        assert pkgutil.resolve_name(name), name


WHERE = DOCS / "development" / "where.md"
_PATH = r"[\w.-]+/[\w./-]*|[\w.-]+\.(?:md|toml|txt|ya?ml)"


def test_every_path_of_the_index_of_changes_exists():
    """Every path of the index exists, except for those that are marked as new."""
    named = re.findall(rf"`({_PATH})`( \(new\))?", WHERE.read_text())
    assert len({path for path, _ in named}) > 150
    assert not {path for path, new in named if (REPO / path).exists() == bool(new)}


def test_every_name_of_the_index_of_changes_is_in_its_file():
    """A name that the index places in a file occurs there."""
    text = WHERE.read_text()
    found = re.findall(rf"((?:`[\w.]+`(?:, | and )?)+) (?:in|of) \*{{0,2}}`({_PATH})`", text)
    placed = [(name, path) for names, path in found for name in re.findall(r"`([\w.]+)`", names)]
    assert len(placed) > 40
    missing = [
        (name, path)
        for name, path in placed
        if name.rpartition(".")[2] not in (REPO / path).read_text()
    ]
    assert not missing


@pytest.mark.parametrize("page", [*navigation()])
def test_links_of_the_site_lead_to_its_pages(page):
    """Links of the site lead to its pages.

    Links are written for the repository. On the site, those that leave it become text.
    """
    source = REPO / docs_hooks.INCLUDED.get(page, f"docs/{page}")
    pages = {REPO / docs_hooks.INCLUDED.get(name, f"docs/{name}") for name in navigation()}
    rewritten = docs_hooks.site_links(source.read_text(), page)
    kept = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", rewritten)}
    for link in kept - {""}:
        if not re.match(r"[a-z]+:", link):
            path = os.path.normpath(os.path.join(os.path.dirname(page), link))
            assert path in navigation() or path in docs_hooks.INCLUDED, link
    for link, target, anchor in links(source):
        if target in pages and anchor:
            assert anchor in anchors(target), link


def test_a_link_that_leaves_the_site_becomes_its_path():
    text = "See [the package](../llama/README.md), [here](#x), [weights](guides/weights.md#gguf)."
    assert docs_hooks.site_links(text, "index.md") == (
        "See the package (`llama/README.md`), [here](#x), [weights](guides/weights.md#gguf)."
    )
    text = "[How](../../scripts/bench/README.md#quality) `[a](b)`\n```\n[c](d)\n```\n"
    assert docs_hooks.site_links(text, "guides/quantize.md").startswith(
        "[How](../reference/benchmarks.md#quality)"
    )
    assert docs_hooks.site_links(text, "guides/quantize.md").endswith("\n```\n[c](d)\n```\n")


@pytest.mark.slow
def test_mkdocs_builds_the_site_without_a_warning(tmp_path):
    python = docs_python()
    if python is None:
        pytest.skip("the extra docs is not installed; links and navigation are checked above")
    done = subprocess.run(
        [python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=REPO, env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPO)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "site" / "reference" / "python" / "index.html").read_text()
    assert "text_completion" in reference and "Continue" in reference
    assert "kv_cache_dtype" in reference
    commands = (tmp_path / "site" / "reference" / "commands" / "index.html").read_text()
    assert "--max_batch_size" in commands
