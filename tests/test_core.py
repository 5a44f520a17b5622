"""The edge of the engine core: what it reaches by imports, and that this can be read in an hour."""

import ast
import functools
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
CORE = "llama.engine.core"
MAX_FILES = 40
MAX_TOKENS = 45_000  # without docstrings and comments
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


@functools.cache
def modules() -> dict[str, Path]:
    """Return the file of each module of the package, by its dotted name."""
    found = {}
    for path in (REPO / "llama").rglob("*.py"):
        parts = path.relative_to(REPO).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Return the modules of the package that a file imports, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in modules():
                name = name.rpartition(".")[0]
            if name not in ("", "llama"):
                yield name


def num_tokens(text: str, tree: ast.Module) -> int:
    """Return the number of tokens of a file, without docstrings and comments."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines |= {*range(first.lineno, (first.end_lineno or first.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in _NO_CODE and token.start[0] not in lines for token in tokens)


@pytest.fixture(scope="module")
def closure() -> dict[str, int]:
    """Return the modules that the core reaches by imports, with their numbers of tokens."""
    found: dict[str, int] = {}
    left = [CORE]
    while left:
        name = left.pop()
        if name in found:
            continue
        text = modules()[name].read_text()
        tree = ast.parse(text)
        found[name] = num_tokens(text, tree)
        left += imported(tree)
    return found


def test_the_core_can_be_read_by_itself(closure):
    """The closure of the core has at most 40 files and 45,000 tokens."""
    largest = sorted(closure.items(), key=lambda pair: -pair[1])
    assert CORE in closure and "llama.model.transformer" in closure
    assert len(closure) <= MAX_FILES, sorted(closure)
    assert sum(closure.values()) <= MAX_TOKENS, largest[:10]


def test_the_core_knows_interfaces_alone(closure):
    """The core imports no kernels and no checkpoint, and interfaces of ranks and weights alone."""
    packages = {name.split(".")[1] for name in closure}
    assert packages == {"common", "engine", "model", "ops", "ranks", "weights"}
    assert {name for name in closure if name.startswith("llama.ranks")} == {
        "llama.ranks.parallel",
        "llama.ranks.placement",
    }
    assert {name for name in closure if name.startswith("llama.weights")} == {
        "llama.weights.plain",
        "llama.weights.weight",
    }
