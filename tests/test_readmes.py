"""The READMEs: lines that can be read, links that lead somewhere, a list of files that is right."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PAGES = [
    REPO / "README.md",
    *(REPO / "checkpoints").glob("*.md"),  # not below: those of downloads
    *(path for name in ("llama", "scripts", "torchrun_examples")
      for path in sorted((REPO / name).rglob("*.md"))),
]  # fmt: skip
READMES = [path for path in PAGES if path.name == "README.md"]
IDS = [str(path.relative_to(REPO)) for path in PAGES]


def headings(path: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them from its headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    words = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", word.lower()).replace(" ", "-") for word in words}


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_no_line_is_longer_than_120_columns(path):
    long = [i for i, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 120]
    assert not long


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_lead_somewhere(path):
    """Files are there, and so are the headings of an anchor."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    for link in filter(None, (a or b for a, b in links)):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_the_first_page_leads_to_every_other():
    """In one click."""
    text = (REPO / "README.md").read_text()
    others = {name for name in IDS if name != "README.md"}
    assert not {name for name in others if f"]({name})" not in text}


def test_the_list_of_files_is_the_tree():
    """llama/README.md names every Python file of the package once, and nothing that is not there; a
    folder's line stands for its `__init__.py`."""
    text = (REPO / "llama" / "README.md").read_text()
    block = re.search(r"```\n(llama/ .*?)```", text, re.DOTALL)
    assert block is not None
    named, folder = [], ""
    for line in block[1].splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder, name = name, "__init__.py"
        named.append(folder + name)
    assert len(named) == len(set(named))
    there = {str(path.relative_to(REPO)) for path in (REPO / "llama").rglob("*.py")}
    missing, gone = sorted(there - set(named)), sorted(set(named) - there)
    assert not missing and not gone, f"not in the list: {missing}; not in the tree: {gone}"


def test_the_files_to_begin_in_are_there():
    """Each path in the table of the first page, which is about `llama/`."""
    table = (REPO / "README.md").read_text().split("| to change | begin in |")[1].split("\n\n")[0]
    named = re.findall(r"`([\w/]+/\w+\.py)`", table)
    assert len(named) > 20
    assert not [name for name in named if not (REPO / "llama" / name).exists()]
