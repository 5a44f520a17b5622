"""Formulas in TeX: where they are in Markdown, and their trees of MathML, by latex2mathml.

In: the parser of Markdown, which gets rules for formulas, and the text of a formula. Out: tokens
`math` and `math_block`; a tree, or None where the text is no formula that can be drawn. Only the
elements and attributes that are listed here come through, whatever the text names.
"""

import html
import re
from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert_to_element
from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

Node = Any  # a text, or a list of a tag, its attributes and its nodes

MAX_TEX = 5000  # characters of a formula
_MAX_LINES = 200
# The mark before a formula, and the one after it.
CLOSING = {"$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]"}
_ARITY = {
    **dict.fromkeys(("mfrac", "mroot", "msub", "msup", "munder", "mover"), 2),
    **dict.fromkeys(("msubsup", "munderover"), 3),
}
MATH_TAGS = frozenset(
    "math mrow mi mn mo mtext ms mspace mstyle mpadded mphantom msqrt mtable mtr mtd".split()
) | frozenset(_ARITY)
_MATH_ATTRIBUTES = frozenset(
    "accent accentunder depth display displaystyle fence form height linethickness lspace "
    "mathcolor maxsize minsize movablelimits rspace scriptlevel separator stretchy voffset "
    "width".split()
)
_VALUE = re.compile(r"[A-Za-z0-9#+.%-]{1,30}")  # no parentheses, so that nothing is a url(...)
_CLASSES = {"left": "left", "right": "right"}
_ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{(\w+)(\*?)\}")
# Environments that latex2mathml does not lay out, by one that it does.
_SAME = {
    **dict.fromkeys("align aligned split eqnarray flalign".split(), "align*"),
    **dict.fromkeys("gather gathered multline equation".split(), "matrix"),
    "dcases": "cases",
}
_KNOWN = frozenset(
    "align* array cases matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix substack".split()
)
_COUNTED = re.compile(r"\\begin\s*\{align(?:ed)?at\*?\}\s*\{\d{1,3}\}")
_TEXT_WITH_MATH = re.compile(r"\\text\{([^{}$]*)\$([^{}$]*)\$")
_BRACES = re.compile(r"\\[\\{}]|[{}]")
# The first letters of bold italic alphabets, which a browser does not take from mathvariant.
_BOLD_ITALIC = (("A", "Z", 0x1D468), ("a", "z", 0x1D482), ("Α", "Ω", 0x1D71C), ("α", "ω", 0x1D736))


def formula(tex: str, *, is_display: bool) -> Node | None:
    """Return a formula as an element `math`; None if it is malformed, or too long."""
    if len(tex) > MAX_TEX or not _is_balanced(tex):
        return None
    known = _with_known_environments(tex.strip())
    if known is None:
        return None
    try:
        element = convert_to_element(known, display="block" if is_display else "inline")
        return _node(element)
    except Exception:  # the library raises whatever its own operations do
        return None


def _is_balanced(tex: str) -> bool:
    depth = 0
    for brace in _BRACES.findall(tex):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


def _with_known_environments(tex: str) -> str | None:
    """Return a formula in the terms of latex2mathml; None if it has an unknown environment."""
    tex = _COUNTED.sub(r"\\begin{aligned}", tex)
    tex = re.sub(r"\\end\s*\{align(?:ed)?at(\*?)\}", r"\\end{aligned}", tex)
    open_environments: list[str] = []

    def renamed(match: re.Match[str]) -> str:
        name = _SAME.get(match[2], match[2])
        if match[1] == "begin":
            open_environments.append(name)
        elif not open_environments or open_environments.pop() != name:
            open_environments.append("")
        if name not in _KNOWN:
            open_environments.append("")
        return f"\\{match[1]}{{{name}}}"

    tex = _ENVIRONMENT.sub(renamed, tex)
    if open_environments:
        return None
    for _ in range(8):
        tex, count = _TEXT_WITH_MATH.subn(r"\\text{\1}{\2}\\text{", tex)
        if not count:
            break
    if "\\begin" not in tex and re.search(r"\\\\|(?<!\\)&", tex):
        return f"\\begin{{align*}}{tex}\\end{{align*}}"
    return tex


def _node(element: Element) -> Node:
    """Return an element as a node.

    Raises:
        ValueError: the formula is malformed.
    """
    tag = element.tag.rpartition("}")[2]
    children = [_node(child) for child in element]
    text = html.unescape(element.text or "")
    if text:
        children.insert(0, text)
    if tag == "menclose":
        kind = "boxed" if element.get("notation") == "box" else "cancel"
        return ["mrow", {"class": kind}, children]
    if tag not in MATH_TAGS or _ARITY.get(tag, len(children)) != len(children):
        raise ValueError(f"{tag} has {len(children)} children")
    if tag == "mi" and text == "&":
        raise ValueError("an & outside of a table")
    if tag == "mi" and re.fullmatch(r"\\[a-zA-Z]+", text):
        return ["mtext", {"class": "unknown"}, [text]]
    if element.get("mathvariant") == "bold-italic":
        children = ["".join(map(_bold_italic, text))]
    attributes = _attributes(tag, element)
    if tag == "mrow" and len(children) == 1 and not attributes:
        return children[0]
    return [tag, attributes, children]


def _attributes(tag: str, element: Element) -> dict[str, str]:
    found = {
        name: value
        for name, value in element.attrib.items()
        if name in _MATH_ATTRIBUTES and _VALUE.fullmatch(value)
    }
    if found.get("display") == "inline":
        del found["display"]
    if tag == "mtd" and element.get("columnalign") in _CLASSES:
        found["class"] = _CLASSES[element.attrib["columnalign"]]
    if tag == "mtable" and element.get("columnspacing"):
        found["class"] = "aligned"
    if tag == "mi" and element.get("mathvariant") == "normal":
        found["mathvariant"] = "normal"
    return found


def _bold_italic(letter: str) -> str:
    for first, last, start in _BOLD_ITALIC:
        if first <= letter <= last:
            return chr(start + ord(letter) - ord(first))
    return letter


def add_rules(parser: MarkdownIt) -> None:
    """Let a parser of Markdown read formulas."""
    parser.inline.ruler.before("escape", "math", _read_math)
    interrupted = ["paragraph", "blockquote", "list"]
    parser.block.ruler.before("fence", "math_block", _read_math_block, {"alt": interrupted})


def _read_math(state: StateInline, silent: bool) -> bool:
    r"""Read a formula between $, $$, \( and \) or \[ and \], as a rule of markdown-it."""
    text = state.src
    mark = _math_mark(text, state.pos)
    if mark is None:
        return False
    start = state.pos + len(mark)
    end = _math_end(text, start, mark)
    tex = text[start:end]
    if end < 0 or not tex.strip() or (mark == "$" and not _is_formula(text, start, end)):
        if mark[0] == "$":  # not the beginning of a shorter mark either
            if not silent:
                state.pending += mark
            state.pos = start
            return True
        return False
    if not silent:
        token = state.push("math", "", 0)
        token.markup = mark
        token.content = tex
    state.pos = end + len(mark)
    return True


def _math_mark(text: str, position: int) -> str | None:
    if text[position] == "\\":
        mark = text[position : position + 2]
        return mark if mark in CLOSING else None
    if text[position] != "$":
        return None
    end = position
    while end < len(text) and text[end] == "$":
        end += 1
    return text[position:end]


def _math_end(text: str, start: int, mark: str) -> int:
    """Return where the formula that begins at `start` ends, or -1."""
    if mark not in CLOSING:
        return -1
    closing = CLOSING[mark]
    end = text.find(closing, start)
    if mark[0] == "\\":
        # A link whose brackets are escaped is none of both.
        is_link = mark == "\\[" and text[end + 2 : end + 3] in ("(", "[")
        return -1 if is_link else end
    while end >= 0:
        run = end
        while run < len(text) and text[run] == "$":
            run += 1
        if run - end == len(mark) and text[end - 1] != "\\":
            return end
        end = text.find(closing, run)
    return -1


def _is_formula(text: str, start: int, end: int) -> bool:
    """Return whether text between two dollar signs is a formula, not what is between two prices."""
    tex = text[start:end]
    before = text[start - 2] if start > 1 else " "
    after = text[end + 1 : end + 2]
    if tex[0].isspace() or tex[-1].isspace() or before.isalnum() or after.isdigit():
        return False
    is_price = tex[0].isdigit() and any(map(str.isspace, tex))
    return not is_price or re.search(r"[\\^_=+*/<>-]", tex) is not None


def _read_math_block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Read a formula in lines of its own, as a rule of markdown-it.

    A blank line before its end, or text after it, makes it a paragraph.
    """
    if state.is_code_block(start):
        return False
    first = state.src[state.bMarks[start] + state.tShift[start] : state.eMarks[start]]
    mark = _math_mark(first, 0) if first else None
    if mark not in ("$$", "\\["):
        return False
    closing = CLOSING[mark]
    parts: list[str] = []
    rest = first[2:]
    line = start
    while closing not in rest:
        parts.append(rest)
        line += 1
        if line >= min(end, start + _MAX_LINES) or state.isEmpty(line):
            return False
        if state.sCount[line] < state.blkIndent:
            return False
        rest = state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]
    tex, _, tail = rest.partition(closing)
    tail = tail.strip()
    if tail not in ("", ".", ",", ";", ":"):
        return False
    if silent:
        return True
    token = state.push("math_block", "", 0)
    token.markup = mark
    token.content = "\n".join([*parts, tex]) + tail
    token.map = [start, line + 1]
    state.line = line + 1
    return True
