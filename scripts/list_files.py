"""Write the lists of pages that docstrings have: of files in llama/README.md, of names in Python.

In: the Python files of llama/. Out: the list between the two marks of each page. Without `--check`
the pages are rewritten; with it, a list that is out of date is an error. A test does the same.
"""

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "llama" / "README.md"
PYTHON_PAGE = REPO / "docs" / "reference" / "python.md"
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef)
_Node = ast.Module | ast.ClassDef | ast.FunctionDef
_COLUMNS = 118
_INDENT = 21  # columns before a description


def summary(node: _Node) -> str:
    """Return the first line of a docstring, without its full stop."""
    docstring = ast.get_docstring(node)
    assert docstring, f"{ast.unparse(node)[:60]} has no docstring"
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
        name = f"{folder.relative_to(REPO).as_posix()}/"
        lines += _lines(name, summary(ast.parse(init.read_text())))
        for path in sorted(folder.glob("*.py")):
            if path.name != "__init__.py":
                lines += _lines(f"  {path.name}", summary(ast.parse(path.read_text())))
    return "\n".join(lines) + "\n"


def name_table() -> str:
    """Return a table of the names that the Python reference describes."""
    lines = ["", "| name | what it is |", "|---|---|"]
    for path in re.findall(r"^::: (\S+)$", PYTHON_PAGE.read_text(), re.MULTILINE):
        found = re.fullmatch(r"([a-z_.0-9]+)\.([A-Z].*)", path)
        assert found is not None, f"{path} is not MODULE.CLASS or MODULE.CLASS.METHOD"
        node: _Node = ast.parse((REPO / f"{found[1].replace('.', '/')}.py").read_text())
        for name in found[2].split("."):
            (node,) = (x for x in node.body if isinstance(x, _DEFINITIONS) and x.name == name)
        lines.append(f"| `{found[2]}` | {summary(node)} |")
    return "\n".join([*lines, ""]) + "\n"


# Page -> the marks around its list, and the function that makes the list.
LISTS: dict[Path, tuple[str, str, Callable[[], str]]] = {
    PAGE: (
        "<!-- The list is made by scripts/list_files.py. -->\n```text\n", "```\n", file_list
    ),
    PYTHON_PAGE: (
        "<!-- The table is made by scripts/list_files.py. -->\n", "<!-- end -->\n", name_table
    ),
}  # fmt: skip


def page_with_list(page: Path) -> str:
    """Return the text of a page with the list of today."""
    begin, end, make = LISTS[page]
    before, rest = page.read_text().split(begin)
    _, _, after = rest.partition(end)
    return before + begin + make() + end + after


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the lists that docstrings have.")
    parser.add_argument("--check", action="store_true", help="only compare, and change nothing")
    is_check = parser.parse_args().check
    for page in LISTS:
        wanted = page_with_list(page)
        if not is_check:
            page.write_text(wanted)
        elif page.read_text() != wanted:
            sys.exit(f"{page} is out of date: run scripts/list_files.py")


if __name__ == "__main__":
    main()
