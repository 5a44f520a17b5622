"""The expected meaning of Markdown, from the HTML that markdown-it-py writes.

Input: texts. Output: trees of [tag, attributes, children], from that HTML and from the trees of the
page, in one normal form: pictures are links, and a code block is its text.
"""

from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

from markdown_it import MarkdownIt

_EMPTY = {"br", "hr", "img"}
_KEPT = ("href", "start", "class")
_BLOCKS = {"ul", "ol", "blockquote", "table", "thead", "tbody", "tr", "pre", ""}

TEXTS = [
    # Paragraphs and breaks. The options of markdown-it-py treat a line's end as chats expect.
    "one\ntwo  \nthree\\\nfour\n\n  five\n\n\n\nsix",
    "a * b and 2*3*4, snake_case_name, __init__, *a*b*c*",
    # Emphasis.
    "*a* **b** ***c*** _d_ __e__ ___f___",
    "*a **b** c* **a *b* c** *a __b__* ***a** b* ***a* b**",
    "**a*b*c** *a**b**c* **a **b** c** ****a**** *(**a**)*",
    "a*b* a_b_ _a_b (_a_) \"*a*\" *a *b* ** a** *\u00a0a*",
    "*a _b* c_ **a *b** c* *a **b* c** *unclosed **and this",
    "~~a~~ ~~ b ~~ ~~*c*~~ **~~d~~** ~e~ a~~b~~c",
    # Code in a line.
    "`a` ``b ` c`` ` `` ` `a\nb` `  x  ` `*a*` *`a*`* `unclosed ``x`",
    r"`a\` b` \`a` `<b>&amp;`",
    # Escapes and entities.
    r"\*a\* \_b\_ \[c\](d) \# \\ \a \" 1\. \&amp; \<b>",
    "&amp; &lt;b&gt; &copy; &nbsp;x &#65; &#x42; &#0; &bogus; &amp &#xffffff;",
    # Links and pictures.
    "[a](http://e.x/) [b *c*](https://e.x/y 'title') [d](<http://e.x/a>)",
    "[a](http://e.x/(b)c) [e](http://e.x/\\)) [f]( http://e.x/ ) [g](mailto:a@b.c)",
    "![pic](http://e.x/p.png) ![*a* `b`](http://e.x/)",
    "[a [b](http://e.x/1) c](mailto:a@b.c) [a](b c) [a] (mailto:a@b.c) [] [x]",
    "*[a*](http://e.x/) [a](http://e.x/*)* `[a`](mailto:a@b.c) [a`]`](http://e.x/)",
    "<http://e.x/a_b_c> <mailto:a@b.c> <not a link> <b>",
    # Headings.
    "# a\n## b ##\n### c #d\n#### *e*\n##### f\n###### g\n####### h\n#i\n#",
    "a\n===\n\nb *c*\nd\n---\n\ne\n----\nf",
    "   # three\n\n    # four is code\n\n# \n\n## ##",
    # Rules.
    "---\n***\n___\n- - -\n * * *\n--\n_ _ _ _\n+++",
    # Code blocks.
    "```python\ndef f():\n\treturn 1\n\n    # four\n```\nafter",
    "~~~ js extra\na\n```\nb\n~~~~\nc",
    "```\nnot closed\n\n  still",
    "  ```\n  a\n    b\n c\n  ```\n",
    "    code\n\n      more\n\n\n    end\nparagraph\n    no code",
    "\ttab\n\t\ttwo\n",
    "``` a`b\nno fence\n```\nfence",
    "a\n```\nb\n```\nc",
    # Quotes.
    "> a\n> b\n\n> c\nlazy\n\n>d\n>\n> e",
    "> # h\n> - a\n> - b\n>\n>   c\n> > nested\n> ```\n> code\n> ```\nout",
    "> ```\n> a\nb",
    ">     code\n\n> a\n---",
    # Lists.
    "- a\n- b\n  - c\n    - d\n  - e\n- f",
    "- a\n\n- b\n- c\n\n\n- d",
    "- a\n\n  b\n\n  ```\n  c\n  ```\n- d",
    "1. a\n2. b\n   1. c\n   2. d\n3. e",
    "3) a\n4) b\n1. c\n- d\n+ e\n* f",
    "10. a\n    b\n\n    c\n11. d",
    "para\n- a\npara\n1. b\npara\n2. c",
    "- a\nlazy\n- b\n\nout",
    "-\n- a\n-   b\n-     code\n- - c\n- 1. d",
    "- # a\n- > b\n- ***\n- ```\n  c\n  ```\n- | x | y |\n  |---|---|\n  | 1 | 2 |",
    "* a\n\n  * b\n\n  * c\n\n* d",
    "- a\n  > b\n- c\n\n  d\n- e",
    "1. **Bold**: text\n   - sub `code`\n   - sub\n\n2. **Next**\n\n   paragraph",
    "-\ta\n\n\tb\n-\t\tcode",
    "- a\n - b\n  - c\n   - d\n    - e",
    "1986\\. A year\n\n1986. A list\n\n-not a list\n1.not",
    # Tables.
    "| a | b |\n|---|:-:|\n| 1 | 2 |\n| *3* | `4` |",
    "a | b | c\n:-- | --: | :-:\n1 | 2\n1 | 2 | 3 | 4\n\nafter",
    "text before\n| a |\n|---|\n| b |\nlast row\n\n- list",
    "| a \\| b | c |\n|---|---|\n| `d` | \\| |\n> quote",
    "| a | b |\n|---|\n\n| no delimiter |\n\na | b\n--- | x",
    "|a|b|\n|-|-|\n|<b>|[l](http://e.x/)|\n||x|",
    # HTML is text.
    "<b>a</b> <script>alert(1)</script>\n\n<div>\n*a*\n</div>\n\n<!-- c -->",
    "<img src=x onerror=alert(1)> <a href=\"javascript:alert(1)\">x</a>",
    # What a model writes.
    "Sure! Here's how:\n\n1. **Install** it:\n   ```bash\n   pip x\n   ```\n2. Run `x`.\n\nThen:",
    "## Title\n\nText with **bold:** text.\n\n---\n\n| A | B |\n|:--|--:|\n| x | 1 |\n\n> Note\n",
    "Roses are red,\nViolets are blue,\n\n\\- not a list\n\n*Note*: 5 * 3 = 15, 2**3 and a_b.",
    "- [ ] todo\n- [x] done\n\n[1]\n\n(see [docs](https://e.x/a?b=c&d=e#f))",
    "émphase **très**, «*oui*»、**太字**です。🎈**x**🎈 **「a」**b",
    "a\r\nb\r\n\r\n- c\r\n- d",
]  # fmt: skip


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[list[Any]] = [[]]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "img":
            node: list[Any] = ["a", {"href": given["src"]}, [given["alt"] or given["src"]]]
        else:
            if (side := (given.pop("style", "") or "").removeprefix("text-align:")) != "left":
                given["class"] = side
            named = tag in ("td", "th", "a", "ol")
            node = [tag, {k: v for k, v in given.items() if v and named and k in _KEPT}, []]
        self.open[-1].append(node)
        if tag not in _EMPTY:
            self.open.append(node[2])

    def handle_endtag(self, tag: str) -> None:
        if tag not in _EMPTY:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].append(data)


def commonmark(text: str) -> list[Any]:
    """Return the tree that markdown-it-py makes of a text, with HTML treated as text."""
    options = {"html": False, "breaks": True}
    parser = MarkdownIt("commonmark", options).enable(["table", "strikethrough"])
    tree = _Tree()
    tree.feed(parser.render(f"{text}\n"))
    return normalized(tree.open[0])


def normalized(nodes: list[Any], parent: str = "") -> list[Any]:
    """Normalize a tree: join adjacent texts, and drop space between blocks and after breaks."""
    found: list[Any] = []
    for node in nodes:
        if not isinstance(node, str):
            tag, attributes, children = node
            found.append([tag, attributes, normalized(children, "pre" if parent == "pre" else tag)])
        elif found and isinstance(found[-1], str):
            found[-1] += node
        elif parent == "pre" or (parent not in _BLOCKS or node.strip()):
            found.append(node)
    if parent == "pre":
        return found
    for i, node in enumerate(found):
        if isinstance(node, str) and (parent == "li" or (i and found[i - 1][0] == "br")):
            found[i] = node.strip("\n")
    return [node for node in found if node != ""]


def shown(nodes: list[Any]) -> list[Any]:
    """Return trees of the page without toolbars, colors and boxes that scroll."""
    return normalized(list(_bare(nodes)))


def _bare(nodes: list[Any]) -> Iterator[Any]:
    for node in nodes:
        if isinstance(node, str):
            yield node
            continue
        tag, attributes, children = node
        kind = attributes.get("class", "")
        if kind == "block-bar":
            continue
        if tag == "div" or kind.startswith("code-"):
            yield from _bare(children)
        else:
            kept = {name: value for name, value in attributes.items() if name in _KEPT}
            yield [tag, kept, list(_bare(children))]
