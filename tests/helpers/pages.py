"""Read the repository's pages: links, anchors, and the commands and Python code in code blocks."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
PAGES = [
    REPO / "README.md",
    *(REPO / "checkpoints").glob("*.md"),  # folders below hold downloads
    *(path for name in ("docs", "llama", "scripts", "torchrun_examples")
      for path in sorted((REPO / name).rglob("*.md"))),
]  # fmt: skip
IDS = [str(path.relative_to(REPO)) for path in PAGES]
_TOKEN = re.compile(
    r"""(?P<comment>(?<!\S)\#[^\n]*)
    |(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\|&;<>])+)
    |(?P<redirection>\d*[<>]+&?\s*\S+)
    |(?P<end>[|&;\n]+)""",
    re.VERBOSE,
)


def prose(path: Path) -> str:
    """Return the text of a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the documentation site make them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(path: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield each internal link of a page: its text in the page, its target and its anchor."""
    for a, b in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", prose(path)):
        link = a or b
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        yield link, (path.parent / name).resolve() if name else path, anchor


def blocks(path: Path, *languages: str) -> list[str]:
    """Return the code blocks of a page in some languages."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    return [block for language, block in found if language in languages]


def commands(block: str) -> Iterator[list[str]]:
    """Yield the simple commands of a shell block as word lists, without leading variable
    assignments.
    """
    block = re.sub(r"<<'(\w+)'\n.*?\n\1$", "", block, flags=re.DOTALL | re.MULTILINE)
    arguments: list[str] = []
    for match in _TOKEN.finditer(block.replace("\\\n", " ") + "\n"):
        if match["word"]:
            arguments += shlex.split(match["word"])
        elif match["end"] and arguments:
            yield _without_variables(arguments)
            arguments = []


def _without_variables(arguments: list[str]) -> list[str]:
    start = next(
        (i for i, word in enumerate(arguments) if not re.match(r"\w+=", word)), len(arguments)
    )
    return arguments[start:]
