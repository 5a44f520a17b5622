/* ---- Markdown: the server makes trees of it, and this file makes nodes of the trees ---- */

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MAX_SENT = 60_000; // characters of one request; the server takes a few more

/** Make a node of a tree, which is a text or [tag, attributes, trees]. The server names no other
 * elements and attributes than those that `page/markdown.py` lists. */
function built(tree, parent) {
  if (typeof tree === "string") return document.createTextNode(tree);
  const [tag, attributes, trees] = tree;
  const node = document.createElementNS(tag === "math" ? MATHML : parent.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...trees.map((each) => built(each, node)));
  return node;
}

/** The index of the last blank line of a text, before which a block may be complete; -1 if there is
 * none, or if it is in a block of code. */
function lastBlank(text) {
  const end = [...text.matchAll(/\n[ \t]*\n/g)].at(-1)?.index ?? -1;
  const fences = text.slice(0, end + 1).match(/^[ \t>]*(`{3,}|~{3,})/gm) ?? [];
  return fences.length % 2 ? -1 : end;
}

/** Shows a text as Markdown while it grows. A block is drawn once it is complete; what follows it is
 * text until then. */
class Markdown {
  /** onDrawn: called when blocks were drawn. */
  constructor(node, onDrawn = () => {}) {
    this.node = node;
    this.onDrawn = onDrawn;
    this.tail = make("p", { className: "tail", dir: "auto" });
    this.text = "";
    this.from = 0; // index in the text; the blocks before it are drawn
    this.asked = -1; // the last blank line that a request has had
    this.isGrowing = true;
    this.isDrawing = false;
  }

  show(text, isGrowing) {
    this.text = text;
    this.isGrowing = isGrowing;
    this.showTail();
    this.drawing = this.draw();
  }

  showTail() {
    const text = this.text.slice(this.from).trim();
    if (text) this.node.append(this.tail);
    else this.tail.remove();
    this.tail.textContent = text;
  }

  /** Draw the blocks that are complete, as long as there are any. */
  async draw() {
    if (this.isDrawing) return this.drawing;
    this.isDrawing = true;
    try {
      while (await this.drawSome());
    } catch (error) {
      if (!(error instanceof Problem)) throw error; // else the rest stays text
    } finally {
      this.isDrawing = false;
    }
  }

  /** Draw complete blocks; return whether there may be more. */
  async drawSome() {
    const { isGrowing } = this;
    const rest = this.text.slice(this.from);
    const sent = rest.slice(0, MAX_SENT);
    const blank = this.from + lastBlank(sent);
    if (!rest.trim() || (isGrowing && blank <= Math.max(this.asked, this.from - 1))) return false;
    this.asked = blank;
    const body = JSON.stringify({ text: sent });
    const { blocks } = await (await ask("markdown", { method: "POST", body })).json();
    const isWhole = !isGrowing && sent.length === rest.length;
    const done = isWhole ? blocks : blocks.slice(0, -1);
    for (const [, trees] of done) {
      const nodes = trees.map((tree) => built(tree, this.node));
      nodes.forEach((node) => (node.dir = "auto")); // each block runs as its first letter does
      this.node.append(...nodes);
    }
    if (done.length) this.from += isWhole ? rest.length : done.at(-1)[0];
    this.showTail();
    this.onDrawn();
    return isGrowing !== this.isGrowing || (done.length > 0 && !isWhole);
  }
}
