"""Markdown, formulas and code as the trees that the page builds, and the route that makes them."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from helpers.markdown import TEXTS, commonmark, shown
from helpers.services import service_of
from llama.common.confined import Confined, ConfinedError, LimitError
from llama.server.app import make_app
from llama.server.page.formulas import MATH_TAGS
from llama.server.page.markdown import blocks_of

TAGS = frozenset(
    "p h1 h2 h3 h4 h5 h6 ul ol li blockquote div table thead tbody tr th td pre code em strong s a "
    "br hr span button".split()
)
HTML_ATTRIBUTES = frozenset(
    "class href target rel start tabindex role aria-label type data-action".split()
)
MATH_ATTRIBUTES = frozenset(
    "class accent accentunder depth display displaystyle fence form height linethickness lspace "
    "mathcolor mathvariant maxsize minsize movablelimits rspace scriptlevel separator stretchy "
    "voffset width".split()
)
CLASSES = frozenset(
    "wide formula block block-bar quiet tex unknown aligned boxed cancel left right center "
    "code-keyword code-string code-number code-name code-comment".split()
)


def nodes_of(text: str) -> list[Any]:
    return [node for _, nodes in blocks_of(text) for node in nodes]


def test_markdown_means_what_commonmark_says():
    for text in TEXTS:
        assert shown(nodes_of(text)) == commonmark(text), text


def test_addresses_are_links():
    text = (
        "https://e.x/a_b. (see http://e.x/c(d)) xhttp://no [http://e.x](http://e.x/2) `http://no` "
        "[![p](http://e.x/q.png)](http://e.x/3)"
    )
    ((_, _, nodes),) = nodes_of(text)
    found = [node[1]["href"] for node in nodes if node[0] == "a"]
    wanted = ["https://e.x/a_b", "http://e.x/c(d)", "http://e.x/2", "http://e.x/3"]
    assert found == wanted
    assert {node[1]["rel"] for node in nodes if node[0] == "a"} == {"noopener noreferrer"}


@pytest.mark.parametrize("text", [*TEXTS, "é🎈\r\n\r\n*x*\n\n$$\na\n$$\nb", "a\n\n\n"])
def test_blocks_can_be_drawn_one_by_one(text):
    """The ends of blocks are counted as scripts count, and no block depends on later ones."""
    data = text.encode("utf-16-le")
    blocks = blocks_of(text)
    start = 0
    for end, nodes in blocks:
        part = data[2 * start : 2 * end].decode("utf-16-le")
        assert [node for _, found in blocks_of(part) for node in found] == nodes
        start = end
    assert not data[2 * start :].decode("utf-16-le").strip()


def written(node: Any) -> str:
    """Return a tree as tag.class(children); the text of a leaf is in quotes."""
    if isinstance(node, str):
        return json.dumps(node, ensure_ascii=False)
    tag, attributes, children = node
    name = ".".join([tag, *attributes.get("class", "").split()])
    return f"{name}({' '.join(map(written, children))})"


def drawn(text: str) -> str:
    found = " ".join(map(written, nodes_of(text)))
    return found.removeprefix("p(").removesuffix(")") if found.startswith("p(") else found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("$x^23$", 'mrow(msup(mi("x") mn("2")) mn("3"))'),
        (r"\(\frac12\)", 'mfrac(mn("1") mn("2"))'),
        (r"$\sqrt[3]{a_i^2}$", 'mroot(msubsup(mi("a") mi("i") mn("2")) mn("3"))'),
        (r"$\int_0^1$", 'msubsup(mo("∫") mn("0") mn("1"))'),
        (r"$\mathbb{R}\mathbf{x}\mathrm{d}$", 'mrow(mi("ℝ") mi("𝐱") mi("d"))'),
        (r"$\bm{x}\boldsymbol{\alpha}$", 'mrow(mi("𝒙") mi("𝜶"))'),
        (r"\(\text{if $x$ is}\)", 'mrow(mtext("if ") mi("x") mtext(" is"))'),
        (r"$\vec v$", 'mover(mi("v") mo("→"))'),
        (r"$\foo$", 'mtext.unknown("\\\\foo")'),
        (r"$5 \times 3$", 'mrow(mn("5") mo("×") mn("3"))'),
        (r"$\boxed{x}\cancel{y}$", 'mrow(mrow.boxed(mi("x")) mrow.cancel(mi("y")))'),
    ],
)
def test_math_is_drawn_as_mathml(text, wanted):
    assert drawn(text).replace("\xa0", " ") == f"span(math({wanted}))"


def test_displays_are_tables_and_columns():
    matrix = r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \\ \end{bmatrix}"
    rows = 'mtr(mtd(mn("1")) mtd(mn("2"))) mtr(mtd(mn("3")) mtd(mn("4")))'
    table = f'div.wide.formula(math(mrow(mo("[") mtable({rows}) mo("]"))))'
    for text in (f"$${matrix}$$", f"$$\n{matrix}\n$$", f"\\[{matrix}\\]", f"\\[\n{matrix}\n\\]"):
        assert drawn(text) == table
    assert drawn(f"```math\n{matrix}\n```") == table
    assert drawn(f"- a\n  $$\n  {matrix}\n  $$") == f'ul(li("a" {table}))'
    assert drawn("a\n$$\n- b\n= c\n$$\nd").count("mtable") == 0
    for name in ("align", "align*", "aligned", "split", "eqnarray"):
        found = drawn(f"$$\\begin{{{name}}}a &= b \\\\ c &= d\\end{{{name}}}$$")
        assert found.count("mtd.right") == found.count("mtd.left") == 2, name
    assert drawn("$$a &= b \\\\ c &= d$$").count("mtd.right") == 2
    for name in ("gather", "gathered", "cases", "array}{l"):
        end = name.partition("}")[0]
        assert drawn(f"$$\\begin{{{name}}}a \\\\ b\\end{{{end}}}$$").count("mtr(") == 2, name
    assert "aria-label" in nodes_of("$$x$$")[0][1], "who scrolls by the keyboard hears what it is"


@pytest.mark.parametrize(
    "text",
    [
        "It costs $5 or $10, US$6 and 20$.",
        "From $20 (or 20$) to $30.",
        "`$x$` and \\$x\\$ and $ x $",
        "$$ is a lot of money\n\nand $ is less",
        "\\\\(x\\\\)",
        "\\[a\\](b)",
        "$$$",
    ],
)
def test_what_is_no_formula_stays_text(text):
    assert "math(" not in drawn(text)


@pytest.mark.parametrize(
    "text", [r"$\frac{1}{2$", r"$x^2^3$", r"$\left( x$", r"$\begin{foo}\end{foo}$", "$}$", "$a&b&$"]
)
def test_a_malformed_formula_is_shown_as_its_source(text):
    found = drawn(text)
    assert found == f"span(code.tex({json.dumps(text)}))" or ("math(" in found and "&" in text)


CODE = {
    "python": ('@a.b\ndef f(x): # "c"\n    return g(1) + "d"',
               "keyword:@a keyword:def name:f comment:#_\"c\" keyword:return number:1 "
               'string:"d"'),
    "js": ("const a = 'f' // g", "keyword:const string:'f' comment://_g"),
    "C++": ("#include <a>\nint x = 'c';", "keyword:#include string:<a> keyword:int string:'c'"),
    "sh": ("if true # c", "keyword:if comment:#_c"),
    "sql": ("SELECT 1 -- a", "keyword:SELECT number:1 comment:--_a"),
    "json": ('{"a": ["b", true]}', 'keyword:"a" string:"b" keyword:true'),
    "diff": ("-a\n+b\n c()", "number:-a string:+b"),
    "unknown": ("def f(): 1", ""),
}  # fmt: skip


@pytest.mark.parametrize("language", CODE)
def test_code_has_colors_and_a_button(language):
    code, wanted = CODE[language]
    ((_, _, [bar, pre]),) = nodes_of(f"```{language}\n{code}\n```")
    assert bar[2] == [
        ["span", {}, [language]],
        ["button", {"type": "button", "class": "quiet", "data-action": "copy-code"}, ["Copy"]],
    ]
    ((_, _, parts),) = pre[2]
    assert "".join(part if isinstance(part, str) else part[2][0] for part in parts) == code + "\n"
    colored = [part for part in parts if not isinstance(part, str)]
    found = " ".join(f"{p[1]['class'][5:]}:{p[2][0].strip().replace(' ', '_')}" for p in colored)
    assert found == wanted


HOSTILE = r"""
<script>hacked = 1</script><img src=x onerror="hacked = 1"><svg onload="hacked = 1">
[a](javascript:hacked=1) [b](data:text/html,<script>hacked=1</script>) [c](vbscript:x) [d](//evil.x)
[e]( JaVaScRiPt:hacked=1 ) [f](java&#115;cript:hacked=1) [g](\x01javascript:hacked=1) <javascript:x>
![p](http://evil.x/p.png) ![q](data:image/svg+xml,<svg/onload=1>) [h](http://evil.x/"onclick="x)
[i](file:///etc/passwd) [j](ftp://x) [k](/markdown) [l](http:evil) [ref]

[ref]: javascript:hacked=1

```"><img src=x onerror=hacked=1>
</code></pre><script>hacked = 1</script>
```

| <img src=http://evil.x/t.png> | b |
|---|:-:|
| [x](javascript:hacked=1) | <iframe src=http://evil.x> |

$\href{javascript:hacked=1}{x} \url{http://evil.x} \text{<img src=x onerror=hacked=1>}$
$$\includegraphics{http://evil.x/p.png} \style{background:url(http://evil.x)}{x} \class{a}{b}$$
$\color{url(http://evil.x)} x$ $\begin{array}{" onclick="hacked=1"} x \end{array}$
$\textcolor{red;background:url(x)}{x} \cssId{a}{b} \require{x} \def\a{\script}\a \id{x}$

1. > - <b>
"""


def check(nodes: list[Any]) -> int:
    """Assert that trees have nothing but what the page may build; return the number of nodes."""
    count = len(nodes)
    for node in nodes:
        if isinstance(node, str):
            continue
        tag, attributes, children = node
        assert tag in TAGS | MATH_TAGS, tag
        allowed = MATH_ATTRIBUTES if tag in MATH_TAGS else HTML_ATTRIBUTES
        assert attributes.keys() <= allowed, attributes
        assert set(attributes.get("class", "").split()) <= CLASSES, attributes
        assert re.match(r"(https?://|mailto:)", attributes.get("href", "http://"), re.IGNORECASE)
        for name, value in attributes.items():
            assert isinstance(value, str)
            assert name in ("href", "aria-label") or "url" not in value
        count += check(children)
    return count


@pytest.mark.parametrize("text", [HOSTILE, *TEXTS])
def test_trees_have_no_other_elements_attributes_and_links(text):
    nodes = nodes_of(text)
    check(nodes)
    if text == HOSTILE:
        links = re.findall(r'"href": "(\w+):', json.dumps(nodes))
        assert links and set(links) == {"http"}


MAX_CPU_S, MAX_BYTES = 1.0, 1 << 25
_SIZE = 60_000
_PARTS = ["*", "**", "_", "`", "[", "]", "![", "[a](", "[a](<", "<http:", "&#1", "| ", "~~", "> ",
          "- ", "1. ", "**a* ", "[[a]](b", "\\", "$", "$a", "$$a ", "\\(", "\\[\n", "$a\\$", "$`",
          "$x$ "]  # fmt: skip
_TEX = ["{", "x_", "\\frac", "\\left(", "\\text{$", "\\begin{cases}", "x^2 ", "&", "\\sqrt[",
        "\\def\\a{\\a\\a}\\a", "\\newcommand{\\a}{\\a\\a}", "\\over ", "{" * 90]  # fmt: skip
_CODE = ['\\"', "<!--", "((", "a "]
BOMBS = {
    **{f"many {part!r}": part * (_SIZE // len(part)) for part in _PARTS},
    **{f"TeX {part!r}": f"$${part * (4_900 // len(part))}$$\n\n" * 12 for part in _TEX},
    **{
        f"{language} {part!r}": f"```{language}\n{part * (_SIZE // len(part))}\n```"
        for language in ("js", "html", "css", "perl", "cpp")
        for part in _CODE
    },
    "nested quotes": "> " * 30_000 + "a",
    "nested lists": "\n".join("  " * i + "- a" for i in range(240)),
    "a large table": "|a" * 2_000 + "\n" + "|-" * 2_000 + "\n" + "|\n" * 20_000,
    "spaces": " " * _SIZE + "x",
}


@pytest.fixture(scope="module")
def process() -> Iterator[Confined]:
    made = Confined("llama.server.page.markdown", cpu_s=MAX_CPU_S, memory_mb=256, wait_s=30)
    made.call("warm")
    yield made
    made.close()


@pytest.mark.parametrize("name", BOMBS)
def test_no_text_takes_long(process, name):
    """A text is drawn within the limits, or refused when it reaches one."""
    began = time.monotonic()
    try:
        blocks = process.call(BOMBS[name])
    except LimitError as error:
        assert "processor time" in str(error) or "memory" in str(error)
    except ConfinedError as error:
        assert "the text has more than 50000 elements" in str(error)
    else:
        assert len(json.dumps(blocks)) < MAX_BYTES
        assert sum(check(nodes) for _, nodes in blocks) <= 50_000
    assert time.monotonic() - began < 25
    assert process.call("next") == [[4, [["p", {}, ["next"]]]]]


def test_the_route_draws_and_refuses():
    client = TestClient(make_app(service_of(), api_keys=["k"]), base_url="http://localhost")
    key = {"Authorization": "Bearer k"}

    def ask(**body: Any) -> Any:
        return client.post("/markdown", json=body, headers=key)

    found = ask(text="a\n\n*b*")
    assert found.json() == {
        "blocks": [[2, [["p", {}, ["a"]]]], [6, [["p", {}, [["em", {}, ["b"]]]]]]]
    }
    assert client.post("/markdown", json={"text": "a"}).status_code == 401
    other = {**key, "Host": "evil.example"}
    assert client.post("/markdown", json={"text": "a"}, headers=other).status_code == 400
    for body in ({"text": "x" * 1_000_000}, {"text": 1}, {}, {"text": "a", "more": 1}):
        assert ask(**body).status_code == 400, body
    slow = ask(text="\\[\n" * 20_000)
    assert slow.status_code == 400
    assert "text cannot be shown as Markdown" in slow.json()["error"]["message"]
    assert ask(text="b").status_code == 200
