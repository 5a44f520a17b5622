/* ---- Markdown: from blocks to nodes ---- */

/** The tree of a block. isGrowing: the block may grow. */
function treeOf(block, isGrowing) {
  const inline = (text) => new InlineReader(text.trim(), isGrowing).nodes();
  const inner = (blocks) =>
    blocks.map((each, i) => treeOf(each, isGrowing && i === blocks.length - 1));
  switch (block.type) {
    case "paragraph":
      return h("p", {}, ...inline(block.lines.join("\n")));
    case "heading":
      return h(`h${block.level}`, {}, ...inline(block.text));
    case "quote":
      return h("blockquote", {}, ...inner(block.children));
    case "item":
      return h("li", {}, ...inner(block.children));
    case "list":
      return listTree(block, inner);
    case "table":
      return tableTree(block, inline);
    case "math":
      if (block.isClosed) return formula(block.tex.join("\n"), true, "div");
      if (isGrowing) return h("div", {}, h("code", { class: "tex" }, block.lines.join("\n")));
      return h("p", {}, ...inline(block.lines.join("\n")));
    case "rule":
      return h("hr");
    default:
      return codeTree(block, isGrowing);
  }
}

/** A list is loose if a blank line separates two of its items, or two blocks of an item. */
function listTree(list, inner) {
  const isApart = (blocks) => blocks.some((block, i) => i && block.start > blocks[i - 1].end + 1);
  const isLoose = isApart(list.children) || list.children.some((item) => isApart(item.children));
  const items = inner(list.children);
  if (!isLoose) {
    for (const item of items)
      item.children = item.children.flatMap((node) => (node.tag === "p" ? node.children : [node]));
  }
  if (list.first === undefined) return h("ul", {}, ...items);
  return h("ol", list.first === 1 ? {} : { start: String(list.first) }, ...items);
}

function tableTree({ align, rows: [head, ...rows] }, inline) {
  const row = (tag, cells) =>
    h(
      "tr",
      {},
      ...align.map((side, i) => h(tag, side && { class: side }, ...inline(cells[i] ?? ""))),
    );
  const body = rows.length ? [h("tbody", {}, ...rows.map((cells) => row("td", cells)))] : [];
  return h(
    "div",
    { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row("th", head)), ...body),
  );
}

function codeTree({ type, lines, info = "" }, isGrowing) {
  while (type === "code" && !lines.at(-1).trim()) lines.pop();
  const code = lines.join("\n") + (lines.length && !isGrowing ? "\n" : "");
  const language = unescape(info.trim().split(/\s/)[0]);
  if (language === "math" && !isGrowing) return formula(code, true, "div");
  const button = h(
    "button",
    { type: "button", class: "quiet", "data-action": "copy-code" },
    "Copy",
  );
  return h(
    "div",
    { class: "block" },
    {
      ...h("div", { class: "block-bar" }, h("span", {}, language || "text"), button),
      key: language,
    },
    h(
      "pre",
      { tabindex: "0", "aria-label": `Code${language && `, ${language}`}` },
      h("code", {}, ...coloredCode(code, language)),
    ),
  );
}

const drawn = new WeakMap(); // node -> the tree that it was made from

const MATHML = "http://www.w3.org/1998/Math/MathML";
const elementOf = (tag, parent) =>
  document.createElementNS(tag === "math" ? MATHML : parent.namespaceURI, tag);

/** Turn `node` and its next siblings into these trees; touch only what differs. */
function patch(parent, node, trees) {
  for (const tree of trees) {
    const next = node?.nextSibling ?? null;
    const isText = typeof tree === "string";
    const before = node && drawn.get(node);
    if (isText && node?.nodeType === Node.TEXT_NODE) {
      if (tree.startsWith(node.data)) node.appendData(tree.slice(node.data.length));
      else node.data = tree;
    } else if (!isText && before?.tag === tree.tag && before.key === tree.key) {
      if (tree.key === undefined) update(node, before, tree); // A tree with a key never changes.
    } else {
      const fresh = isText
        ? document.createTextNode(tree)
        : update(elementOf(tree.tag, parent), h(""), tree);
      if (node) node.replaceWith(fresh);
      else parent.append(fresh);
    }
    node = next;
  }
  while (node) {
    const next = node.nextSibling;
    node.remove();
    node = next;
  }
}

/** Turn an element made from `before` into one of `tree`. */
function update(node, before, tree) {
  for (const name of Object.keys(before.attributes)) {
    if (!(name in tree.attributes)) node.removeAttribute(name);
  }
  for (const [name, value] of Object.entries(tree.attributes)) {
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
  patch(node, node.firstChild, tree.children);
  drawn.set(node, tree);
  return node;
}

/** A growing text without an end that may still become another block: a line of markup alone, or the
row of a table before the next one. */
function stablePart(text) {
  let end = text.lastIndexOf("\n");
  const line = text.slice(end + 1);
  const isOpen = /^[-=*_+|:~`#$\\> \t]*$|^[ \t>]*(?:\d{1,9}[.)]?$|[`~]{3}|\|)/.test(line);
  if (isOpen && /^[-|: \t]*$/.test(line)) {
    const before = text.lastIndexOf("\n", end - 1);
    if (end > 0 && /^[ \t]*\|.*[^-|: \t]/.test(text.slice(before + 1, end))) end = before;
  }
  return isOpen ? text.slice(0, Math.max(0, end)) : text;
}

/** Shows a text as Markdown while it grows; only its last block is made again. */
class Markdown {
  constructor(node) {
    this.node = node;
    this.from = 0; // index in the text; the blocks before it are done
    this.numDone = 0; // nodes of the blocks that are done
  }

  show(text, isGrowing) {
    const rest = text.slice(this.from);
    const blocks = readBlocks(isGrowing ? stablePart(rest) : rest);
    const trees = blocks.map((block, i) => treeOf(block, isGrowing && i === blocks.length - 1));
    patch(this.node, this.node.childNodes[this.numDone] ?? null, trees);
    if (blocks.length < 2) return;
    LINE_END.lastIndex = this.from;
    for (let i = 0; i < blocks.at(-1).start; i++) LINE_END.exec(text);
    this.from = LINE_END.lastIndex;
    this.numDone += blocks.length - 1;
  }
}
