"""How the code of `llama/` reads: dense lines, packed assignments, fragments, long files.

There is no limit on lines. `python tests/helpers/style.py llama` lists every finding; ruff holds
PEP 257 (`D`), and mypy is strict on the package.
"""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from helpers.style import density, is_packed, prose_findings, python_files
from llama.build_args import BuildArgs

REPO = Path(__file__).resolve().parent.parent
FILES = python_files([str(REPO / "llama")])
MAX_TOKENS_PER_LINE = 9.0
MAX_PACKED_PER_1000 = 4
MAX_LINES = 400


def test_a_line_of_code_does_not_hold_too_much():
    measured = density(FILES)
    assert measured.tokens_per_line <= MAX_TOKENS_PER_LINE
    assert measured.packed_per_1000 <= MAX_PACKED_PER_1000


def test_docstrings_and_comments_are_sentences():
    assert not [str(finding) for path in FILES for finding in prose_findings(path)]


def test_a_long_file_says_why():
    """Past 400 lines the module's docstring says what keeps its content together."""
    for path in FILES:
        text = path.read_text()
        if text.count("\n") > MAX_LINES:
            assert re.search(r"\b[45]00\s+lines", ast.get_docstring(ast.parse(text)) or ""), path


@pytest.mark.parametrize(
    ("code", "packed"),
    [
        ("a, b = 1, 2", True),
        ("self.a, b = x.y, f(2)", True),
        ("a, b = b, a", False),
        ("a, b = f()", False),
        ("a = 1, 2", False),
    ],
)
def test_what_counts_as_packed(code, packed):
    assert is_packed(ast.parse(code).body[0]) is packed


def test_an_error_about_an_argument_of_build_names_it_as_its_field():
    """The command line tells by the field that a flag's value is wrong: exit code 2."""
    names = {field.name for field in fields(BuildArgs)}
    for path in FILES:
        text = path.read_text()
        begin = re.findall(r'raise ValueError\(\s*f?"(\w+)=', text)
        apart = any(part in path.parts for part in ("reference", "compat", "cli"))
        assert apart or not names & {*begin}, f"{path}: raise FieldError.of for {begin}"


def test_a_line_on_stderr_is_one_write():
    """No line is printed to stderr, where print() makes two writes if Python does not buffer.

    Ranks and threads share stderr, so that others would write between the two.
    """
    for path in FILES:
        assert not re.search(r"print\(.*file=sys\.stderr", path.read_text()), (
            f"{path}: write the line in one call"
        )


def test_the_findings_are_found(tmp_path):
    """The checks of this file fail where they should."""
    path = tmp_path / "bad.py"
    path.write_text(
        '"""Of a thing."""\n\nrows = 3  # that are read\n\n\n'
        'def draft(adapter):\n    """Return a draft."""\n'
    )
    prose = [(finding.line, finding.rule) for finding in prose_findings(path)]
    assert prose == [
        (1, "the docstring begins as a fragment"),
        (3, "the comment begins as a fragment"),
    ]
