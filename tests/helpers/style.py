"""Measure how dense Python code is, and find docstrings and comments that begin as fragments.

Run `python tests/helpers/style.py llama/server` to print the measures and every finding in a
folder.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

_FRAGMENT = re.compile(r"(Of|As|Those|That|Where|What|Who|Which|From|With|By|For|To)\b")
_TRAILING = re.compile(r"# (of|that|which|who|where|from|with|by|as|for|to|those)\b")


@dataclass(frozen=True)
class Finding:
    """A line of a file that breaks a rule, and a description of the rule."""

    path: Path
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}"


@dataclass
class Density:
    """Tokens and lines of code; comments, docstrings and blank lines are not counted as code."""

    lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    statements: int = 0
    packed: int = 0

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / self.code_lines

    @property
    def packed_per_1000(self) -> float:
        return 1000 * self.packed / self.lines

    def add(self, path: Path) -> None:
        """Add a file to the totals."""
        text = path.read_text()
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        docstring_lines: set[int] = set()
        for node in nodes:
            if _is_docstring(node):
                docstring_lines |= set(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]
        starts = [
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type not in _LAYOUT_TOKENS and token.start[0] not in docstring_lines
        ]
        self.lines += text.count("\n")
        self.code_lines += len(set(starts))
        self.tokens += len(starts)
        self.statements += sum(isinstance(x, ast.stmt) and not _is_docstring(x) for x in nodes)
        self.packed += sum(map(is_packed, nodes))


def density(paths: list[Path]) -> Density:
    """Return the density of all these files together."""
    total = Density()
    for path in paths:
        total.add(path)
    return total


def _is_docstring(node: ast.AST) -> bool:
    """Return whether a statement is a string alone, as docstrings are."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def is_packed(node: ast.AST) -> bool:
    """Return whether a statement assigns several values at once; a swap does not count."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    names = sorted(map(ast.unparse, target.elts))
    return names != sorted(map(ast.unparse, node.value.elts))


def prose_findings(path: Path) -> Iterator[Finding]:
    """Yield the docstrings and comments that begin as fragments."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DEFINITIONS) and _FRAGMENT.match(ast.get_docstring(node) or ""):
            yield Finding(path, getattr(node, "lineno", 1), "the docstring begins as a fragment")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.line[: token.start[1]].strip() and _TRAILING.match(token.string):
            yield Finding(path, token.start[0], "the comment begins as a fragment")


def python_files(names: list[str]) -> list[Path]:
    """Return the Python files for these names; a folder stands for all files below it."""
    paths = map(Path, names)
    return sorted(x for path in paths for x in (path.rglob("*.py") if path.is_dir() else [path]))


def main() -> None:
    """Print the measures of the files and folders named on the command line."""
    paths = python_files(sys.argv[1:])
    findings = [x for path in paths for x in prose_findings(path)]
    print(*findings, sep="\n")
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if is_packed(node):
                print(f"{path}:{node.lineno}: packed assignment")  # type: ignore[attr-defined]
    total = density(paths)
    rules = Counter(x.rule for x in findings)
    print(*(f"{count:5} {rule}" for rule, count in rules.most_common()), sep="\n")
    print(
        f"{len(paths)} files, {total.lines} lines, {total.statements} statements, "
        f"{total.tokens_per_line:.2f} tokens per code line (at most 9.0), "
        f"{total.packed_per_1000:.1f} packed assignments per 1,000 lines (at most 4)"
    )


if __name__ == "__main__":
    main()
