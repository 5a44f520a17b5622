"""Markdown as trees of the elements that the page may build, by markdown-it-py and Pygments.

In: a text of a model, which may be hostile, and so this module runs in a process with limits: see
`llama.common.confined`. Out: the blocks of the text, each with the place where it ends. A block is
a tree: a text, or a list of a tag, its attributes and its nodes. There is no other way from a text
to an element than the functions of this file and of `formulas`, which name each tag and attribute.
"""

import re
from collections.abc import Iterator, Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments.lexers import get_lexer_by_name
from pygments.token import Token as Kind
from pygments.util import ClassNotFound

from llama.common.confined import answer_requests
from llama.server.page.formulas import CLOSING, Node, add_rules, formula

MAX_NODES = 50_000  # elements and texts of one answer
_MAX_COLORED = 20_000  # characters of code; longer code has no colors
_MAX_INLINE = 60  # characters of a formula in a line that is not scrolled by itself
_NESTING = 24  # open containers; deeper ones are text
_LINK = re.compile(r"(?:https?://|mailto:)", re.IGNORECASE)
_ADDRESS = re.compile(r"(?<!\w)https?://[^\s<>\[\]`*]*[^\s<>\[\]`*?!.,:;\"'~_]")
_NEW_LINE = re.compile(r"\r\n|\r|\n")
_WIDE = {"class": "wide", "tabindex": "0", "role": "group"}
# Tokens of markdown-it whose tag stands for the element.
_CONTAINERS = frozenset(
    "paragraph heading blockquote bullet_list ordered_list list_item thead tbody tr th td em "
    "strong s".split()
)
_ALIGNED = {"text-align:center": "center", "text-align:right": "right"}
# Kinds of Pygments' tokens, and the class of their color; the first that fits counts.
_COLORS = (
    (Kind.Comment.PreprocFile, "code-string"),
    (Kind.Comment.Preproc, "code-keyword"),
    (Kind.Comment, "code-comment"),
    (Kind.Keyword, "code-keyword"),
    (Kind.Name.Tag, "code-keyword"),
    (Kind.Name.Decorator, "code-keyword"),
    (Kind.Operator.Word, "code-keyword"),
    (Kind.Literal.String, "code-string"),
    (Kind.Literal.Number, "code-number"),
    (Kind.Name.Function, "code-name"),
    (Kind.Name.Class, "code-name"),
    (Kind.Name.Attribute, "code-name"),
    (Kind.Name.Variable, "code-name"),
    (Kind.Name.Property, "code-name"),
    (Kind.Generic.Inserted, "code-string"),
    (Kind.Generic.Deleted, "code-number"),
    (Kind.Generic.Heading, "code-comment"),
    (Kind.Generic.Subheading, "code-comment"),
)


class TooLargeError(ValueError):
    """A text has more elements than a page should build."""


def blocks_of(text: str) -> list[tuple[int, list[Node]]]:
    """Return the blocks of a text, each with its end as scripts count it, in UTF-16.

    Raises:
        TooLargeError: there are too many elements.
    """
    tokens = _PARSER.parse(f"{text}\n")
    found = []
    ends = [match.end() for match in _NEW_LINE.finditer(text)]
    position = count = 0
    budget = _Budget()
    for block in _top_level(tokens):
        assert block[0].map is not None
        last_line = block[0].map[1]
        end = ends[last_line - 1] if last_line <= len(ends) else len(text)
        count += len(text[position:end].encode("utf-16-le", "surrogatepass")) // 2
        position = end
        found.append((count, budget.counted(_nodes(iter(block)))))
    return found


class _Budget:
    """Counts the nodes of all blocks."""

    def __init__(self) -> None:
        self._left = MAX_NODES

    def counted(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes; raise a TooLargeError if there are too many."""
        for node in nodes:
            self._left -= 1
            if self._left < 0:
                raise TooLargeError(f"the text has more than {MAX_NODES} elements")
            if not isinstance(node, str):
                self.counted(node[2])
        return nodes


def _top_level(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """Yield the tokens of each block that is in no other one."""
    block: list[Token] = []
    for token in tokens:
        block.append(token)
        if token.level == 0 and token.nesting <= 0:
            yield block
            block = []


def _nodes(tokens: Iterator[Token]) -> list[Node]:
    """Return the nodes of tokens, up to the one that closes their parent."""
    found: list[Node] = []
    for token in tokens:
        if token.nesting < 0:
            break
        if token.nesting > 0:
            found += _container(token, _nodes(tokens))
        else:
            _add(found, _leaf(token))
    return found


def _container(token: Token, children: list[Node]) -> list[Node]:
    """Return the element of a token that opens one."""
    kind = token.type.removesuffix("_open")
    if token.hidden:  # a paragraph of a list without blank lines
        return children
    if kind == "link":
        return [_anchor(str(token.attrs.get("href", "")), children)]
    if kind == "table":
        return [["div", {**_WIDE, "aria-label": "Table"}, [["table", {}, children]]]]
    assert kind in _CONTAINERS, kind
    attributes: dict[str, str] = {}
    if kind == "ordered_list" and token.attrs.get("start", 1) != 1:
        attributes["start"] = str(token.attrs["start"])
    if side := _ALIGNED.get(str(token.attrs.get("style", ""))):
        attributes["class"] = side
    return [[token.tag, attributes, children]]


def _leaf(token: Token) -> list[Node]:
    """Return the nodes of a token that closes itself."""
    kind = token.type
    if kind == "inline":
        return _inline(token.children or [])
    if kind in ("fence", "code_block"):
        return [_code_block(token)]
    if kind == "math_block":
        return [_formula(token, "div")]
    if kind == "hr":
        return [["hr", {}, []]]
    assert kind == "text", kind
    return [token.content]


def _inline(tokens: Sequence[Token]) -> list[Node]:
    return _inline_nodes(iter(tokens), is_linked=False)


def _inline_nodes(tokens: Iterator[Token], *, is_linked: bool) -> list[Node]:
    """Return the nodes of the text of a block, up to the token that closes their parent."""
    found: list[Node] = []
    for token in tokens:
        kind = token.type
        if token.nesting < 0:
            break
        if token.nesting > 0:
            inner = _inline_nodes(tokens, is_linked=is_linked or kind == "link_open")
            found += _container(token, inner)
        elif kind == "code_inline":
            found.append(["code", {}, [token.content]])
        elif kind in ("softbreak", "hardbreak"):
            found.append(["br", {}, []])
        elif kind == "math":
            found.append(_formula(token, "span"))
        elif kind == "image":
            _add(found, _image(token, is_linked=is_linked))
        else:
            _add(found, [token.content] if is_linked else _with_addresses(token.content))
    return found


def _add(nodes: list[Node], more: list[Node]) -> None:
    """Append nodes; a text after a text extends it."""
    for node in more:
        if isinstance(node, str) and nodes and isinstance(nodes[-1], str):
            nodes[-1] += node
        elif node != "":
            nodes.append(node)


def _anchor(href: str, children: list[Node]) -> Node:
    """Return a link. Its target learns nothing of the page."""
    attributes = {"href": href, "target": "_blank", "rel": "noopener noreferrer"}
    return ["a", attributes, children] if _LINK.match(href) else ["span", {}, children]


def _image(token: Token, *, is_linked: bool) -> list[Node]:
    """Return a link to a picture: the page loads nothing from elsewhere."""
    source = str(token.attrs.get("src", ""))
    text = "".join(_plain(_inline(token.children or []))) or source
    return [text] if is_linked else [_anchor(source, [text])]


def _plain(nodes: list[Node]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, str):
            yield node
        else:
            yield from _plain(node[2])


def _with_addresses(text: str) -> list[Node]:
    """Return a text in which addresses are links."""
    found: list[Node] = []
    start = 0
    for match in _ADDRESS.finditer(text):
        url = match[0]
        while url.endswith(")") and url.count(")") > url.count("("):
            url = url[:-1]
        found += [text[start : match.start()], _anchor(url, [url])]
        start = match.start() + len(url)
    return [*found, text[start:]]


def _code_block(token: Token) -> Node:
    language = token.info.split()[0] if token.info.strip() else ""
    if language == "math":
        token.markup = "$$"
        return _formula(token, "div")
    copy = {"type": "button", "class": "quiet", "data-action": "copy-code"}
    bar = [["span", {}, [language or "text"]], ["button", copy, ["Copy"]]]
    label = f"Code, {language}" if language else "Code"
    code = ["code", {}, list(_colored(token.content, language.lower()))]
    return [
        "div",
        {"class": "block"},
        [
            ["div", {"class": "block-bar"}, bar],
            ["pre", {"tabindex": "0", "aria-label": label}, [code]],
        ],
    ]


def _colored(code: str, language: str) -> Iterator[Node]:
    """Yield colored parts of code, and the texts between them."""
    try:
        if len(code) > _MAX_COLORED:
            raise ClassNotFound
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        yield code
        return
    last_color, part = "", ""
    for kind, text in lexer.get_tokens(code):
        color = next((name for known, name in _COLORS if kind in known), "")
        if color != last_color and part:
            yield ["span", {"class": last_color}, [part]] if last_color else part
            part = ""
        last_color = color
        part += text
    if part:
        yield ["span", {"class": last_color}, [part]] if last_color else part


def _formula(token: Token, tag: str) -> Node:
    """Return a formula, or its source where it cannot be drawn."""
    is_display = token.markup in ("$$", "\\[")
    math = formula(token.content, is_display=is_display)
    if math is None:
        source = f"{token.markup}{token.content}{CLOSING[token.markup]}"
        return [tag, {}, [["code", {"class": "tex"}, [source]]]]
    if not is_display and len(token.content) <= _MAX_INLINE:
        return [tag, {}, [math]]
    kind = "wide formula" if is_display else "wide"
    return [tag, {**_WIDE, "class": kind, "aria-label": "Formula"}, [math]]


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True, "maxNesting": _NESTING})
    parser.enable(["table", "strikethrough"])
    parser.disable(["reference", "html_block", "html_inline"])
    add_rules(parser)
    parser.validateLink = lambda url: _LINK.match(url) is not None  # type: ignore[method-assign]
    return parser


_PARSER = _parser()

if __name__ == "__main__":
    answer_requests(blocks_of)
