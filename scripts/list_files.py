"""Write the list of files in llama/README.md, from the first line of each module's docstring.

In: the Python files of llama/. Out: the list between the two marks of that page. Without `--check`
the page is rewritten; with it, a list that is out of date is an error. A test does the same.
"""

import argparse
import ast
import sys
import textwrap
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "llama" / "README.md"
BEGIN = "<!-- The list is made by scripts/list_files.py. -->\n```text\n"
END = "```\n"
_COLUMNS = 118
_INDENT = 21  # columns before a description


def summary(path: Path) -> str:
    """Return the first line of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path} has no docstring"
    return docstring.splitlines()[0].removesuffix(".")


def _lines(name: str, text: str) -> list[str]:
    """Return a name with its description, which may take several lines."""
    width = _COLUMNS - _INDENT
    first, *others = textwrap.wrap(text, width)
    return [f"{name:<{_INDENT - 1}} {first}", *(" " * _INDENT + line for line in others)]


def file_list() -> str:
    """Return a line for each folder of the package, and one for each of its modules."""
    lines: list[str] = []
    for init in sorted((REPO / "llama").rglob("__init__.py"), key=lambda path: path.parent.parts):
        folder = init.parent
        lines += _lines(f"{folder.relative_to(REPO).as_posix()}/", summary(init))
        for path in sorted(folder.glob("*.py")):
            if path.name != "__init__.py":
                lines += _lines(f"  {path.name}", summary(path))
    return "\n".join(lines) + "\n"


def page_with_list(text: str) -> str:
    """Return the text of the page with the list of today."""
    before, rest = text.split(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + file_list() + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the list of files in llama/README.md.")
    parser.add_argument("--check", action="store_true", help="only compare, and change nothing")
    text = PAGE.read_text()
    wanted = page_with_list(text)
    if parser.parse_args().check:
        sys.exit(None if text == wanted else f"{PAGE} is out of date: run scripts/list_files.py")
    PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
