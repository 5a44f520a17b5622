"""The pages of the repository: README, docs/ and the READMEs of folders.

Lines are short, links lead somewhere, lists of files are right, and commands have known flags.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import list_files
import llama
from helpers.flags import read
from helpers.pages import DOCS, IDS, PAGES, REPO, anchors, blocks, commands, links, prose
from llama.cli import COMMANDS

README = REPO / "README.md"
LAYOUT = DOCS / "development" / "layout.md"
FOLDER_READMES = [path for path in PAGES if path.name == "README.md"]


def paragraphs(path: Path) -> list[str]:
    """Return what is neither a heading, a table, a list, HTML nor a code block."""
    found = re.split(r"\n{2,}", prose(path))
    return [text for text in found if not text.lstrip().startswith(("#", "|", "-", "<", "1."))]


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_no_line_is_longer_than_120_columns(path):
    """No line is longer than 120 columns, except rows of tables, which cannot be broken."""
    lines = enumerate(path.read_text().splitlines(), 1)
    assert not [i for i, line in lines if len(line) > 120 and not line.lstrip().startswith("|")]


def test_the_first_page_is_short():
    assert len(README.read_text().splitlines()) <= 150
    words = {text: len(re.sub(r"\]\([^)]*\)", "]", text).split()) for text in paragraphs(README)}
    assert not {text: count for text, count in words.items() if count > 90}


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_lead_somewhere(path):
    """Links lead somewhere: files exist, and so do the headings of anchors."""
    for link, target, anchor in links(path):
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_no_two_headings_of_a_page_have_the_same_anchor(path):
    """No two headings of a page have the same anchor; GitHub and mkdocs number them differently."""
    assert len(anchors(path)) == len(re.findall(r"^#+ ", prose(path), re.MULTILINE))


def test_every_page_is_two_clicks_from_the_first():
    first = {target for _, target, _ in links(README)}
    second = {target for page in first if page in PAGES for _, target, _ in links(page)}
    assert not {str(path) for path in PAGES} - {str(path) for path in {README} | first | second}


def test_the_index_of_the_documentation_leads_to_each_of_its_pages():
    targets = {target for _, target, _ in links(DOCS / "index.md")}
    assert not {path for path in DOCS.rglob("*.md") if path.name != "index.md"} - targets


@pytest.mark.parametrize("page", list_files.LISTS, ids=lambda page: page.name)
def test_the_lists_of_the_pages_are_those_of_the_docstrings(page):
    """The pages have the lists that scripts/list_files.py writes."""
    assert page.read_text() == list_files.page_with_list(page), (
        "the list is out of date: run python scripts/list_files.py"
    )


def test_the_python_reference_has_each_name_that_the_package_exports():
    table = list_files.name_table()
    for name in {*llama.__all__} - {"Dialog", "Message"}:  # types of dictionaries
        assert f"| `{name}` | " in table, name


def test_the_list_of_files_has_every_module_and_its_docstring(tmp_path, monkeypatch):
    package = tmp_path / "llama" / "part"
    package.mkdir(parents=True)
    (tmp_path / "llama" / "__init__.py").write_text('"""The whole."""\n')
    (package / "__init__.py").write_text('"""A part."""\n')
    (package / "one.py").write_text(f'"""One file{", and more" * 12}.\n\nNot this.\n"""\n')
    monkeypatch.setattr(list_files, "REPO", tmp_path)
    assert list_files.file_list().splitlines() == [
        "llama/               The whole",
        "llama/part/          A part",
        f"  one.py             One file{', and more' * 8}, and",
        f"{'':21}more{', and more' * 3}",
    ]


def test_the_files_of_the_pages_for_developers_are_there():
    """Those that a reader writes are marked as new."""
    pages = sorted((DOCS / "development").glob("*.md"))
    named = [
        (name, page.name)
        for page in pages
        for name, new in re.findall(
            r"`((?:llama|tests|docs|scripts)/[\w./-]+\.\w+)`( \(new\))?", page.read_text()
        )
        if not new
    ]
    assert len(named) > 300
    assert not [(name, page) for name, page in named if not (REPO / name).exists()]


def test_the_folders_of_the_layout_are_the_packages():
    block = LAYOUT.read_text().split("```text\n")[1].split("```")[0]
    named = set(re.findall(r"^  (\w+)/", block, re.MULTILINE))
    packages = {path.parent.name for path in (REPO / "llama").glob("*/__init__.py")}
    assert named == packages


def shell_commands() -> list[tuple[str, list[str]]]:
    """Return the commands in the shell blocks of all pages, each with its page."""
    return [
        (name, words)
        for name, path in zip(IDS, PAGES, strict=True)
        for block in blocks(path, "bash", "sh")
        for words in commands(block)
    ]


def extras() -> set[str]:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def check_llama(words: list[str]) -> None:
    """Read the flags of `llama WORDS` as the command does."""
    name, *rest = words
    numbers = ["1" if word == "N" else word for word in rest]
    read(f"llama {name}", COMMANDS[name], numbers, {})


def check_bench(words: list[str]) -> None:
    from bench.commands import _COMMANDS
    from bench.flags import command_of

    name, *rest = words
    read(f"bench {name}", command_of(_COMMANDS[name]), rest, {})


def check_launch(words: list[str]) -> None:
    """Read the flags of torchrun, and those of what it starts."""
    from torch.distributed.run import get_args_parser

    numbers = ["1" if word == "N" else word for word in words]
    launch = get_args_parser().parse_args(numbers)
    program = launch.training_script
    if launch.module:
        assert program == "llama"
        check_llama(launch.training_script_args)
    else:
        check_script(program, launch.training_script_args)


def check_script(name: str, words: list[str]) -> None:
    assert (REPO / name).exists()
    if name == "scripts/bench":
        check_bench(words)


def test_the_commands_of_the_pages_have_flags_that_exist():
    """The commands of the pages have flags that exist.

    Each command of ours in a shell block is read by its own parser; extras and scripts exist.
    """
    counts = {"llama": 0, "torchrun": 0, "bench": 0}
    for page, words in shell_commands():
        try:
            match words:
                case ["llama", *rest] | ["python", "-m", "llama", *rest]:
                    counts["llama"] += 1
                    check_llama(rest)
                case ["torchrun", *rest]:
                    counts["torchrun"] += 1
                    check_launch(rest)
                case ["python" | "python3", script, *rest] if script.startswith("scripts/"):
                    counts["bench"] += script == "scripts/bench"
                    check_script(script, rest)
                case ["pip", "install", *rest] if rest[-1].startswith("."):
                    for name in ",".join(re.findall(r"^\.\[(.*)\]$", rest[-1])).split(","):
                        assert name in extras(), name
                case [script, *_] if script.startswith(("./scripts/", "torchrun_examples/")):
                    assert (REPO / script).stat().st_mode & 0o111, "is not executable"
        except Exception as e:
            raise AssertionError(f"{page}: {' '.join(words)}: {e}") from e
    assert counts["llama"] > 40 and counts["torchrun"] > 2 and counts["bench"] > 10, counts


def test_the_python_of_the_pages_is_python():
    """The Python of the pages is valid; tests/test_pages.py runs what can run here."""
    for path in PAGES:
        for block in blocks(path, "python", "py"):
            ast.parse(block)


def test_the_launches_in_tables_exist():
    for path in FOLDER_READMES:
        for name in re.findall(r"`(torchrun_examples/[\w.]+)", path.read_text()):
            assert (REPO / name).exists(), name
