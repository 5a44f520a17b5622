/* ---- Markdown: blocks (CommonMark 0.31, with GitHub's tables and strikethrough) ---- */

// Text becomes a tree of plain objects, and the tree becomes nodes. HTML stays text. The text of a
// model may be hostile: these limits keep the time linear in its length.
const MAX_DEPTH = 24; // nested containers; deeper ones are text
const MAX_OPEN = 32; // open emphasis, or open brackets in an address
const MAX_COLUMNS = 100; // columns of a table
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;
const ITEM = /^(?:([-+*])|(\d{1,9})([.)]))(?=\s|$)/;
const RULE = /^(?:(?:\*[ \t]*){3,}|(?:_[ \t]*){3,}|(?:-[ \t]*){3,})$/;
const HEADING = /^(#{1,6})(?=[ \t]|$)/;
const FENCE = /^(?:(`{3,})([^`]*)|(~{3,})(.*))$/;
const MATH = /^(?:(\$\$)(?!\$)|(\\\[))/; // at the beginning of a line: the formula of a display
const MATH_TAIL = /^[.,;:]?$/; // what may follow the formula in its line
const DELIMITERS = /^(?!-\s)[-|:][-|: \t]*$/;

/** The width of a line's leading white space, in columns; the line begins at `column`. */
function indentOf(line, column) {
  let width = 0;
  for (const c of line) {
    if (c !== " " && c !== "\t") break;
    width += c === "\t" ? 4 - ((column + width) % 4) : 1;
  }
  return width;
}

/** The cells of a table's row; a bar after a backslash is text. */
function cellsOf(row) {
  const cells = row
    .trim()
    .split(/(?<!\\)\|/)
    .map((cell) => cell.replaceAll("\\|", "|").trim());
  if (cells[0] === "") cells.shift();
  if (cells.at(-1) === "") cells.pop();
  return cells;
}

/** The text before a mark and the text after it; undefined if the mark is missing. */
function splitAt(text, mark) {
  const i = text.indexOf(mark);
  return i < 0 ? [text, undefined] : [text.slice(0, i), text.slice(i + mark.length)];
}

/** Reads lines one by one; keeps the open containers and the open leaf in the last of them. */
class BlockReader {
  constructor() {
    this.root = { type: "root", children: [] };
    this.path = [this.root]; // open containers: quotes and items
    this.leaf = null;
  }

  read(line, number) {
    this.number = number;
    this.line = line; // the unread part
    this.column = 0;
    const depth = this.enter();
    const isInside = depth === this.path.length;
    if (isInside && this.leaf?.type === "fence") return this.readFence();
    if (isInside && this.leaf?.type === "math") return this.readMath();
    this.depth = depth;
    this.isOpen = isInside; // this line continues all containers
    if (this.begin()) return this.note(this.path.length);
    this.readText();
  }

  /** Read so many columns of the line. */
  take(width) {
    this.line = this.after(width);
    this.column += width;
  }

  /** The line after so many columns; the rest of a tab that they cut becomes spaces. */
  after(width) {
    let used = 0;
    let i = 0;
    for (; used < width && i < this.line.length; i++) {
      used += this.line[i] === "\t" ? 4 - ((this.column + used) % 4) : 1;
    }
    return " ".repeat(Math.max(0, used - width)) + this.line.slice(i);
  }

  get indent() {
    return indentOf(this.line, this.column);
  }

  get text() {
    return this.line.replace(/^[ \t]+/, "");
  }

  /** Enter the containers that this line continues; return how many. */
  enter() {
    let depth = 1;
    for (; depth < this.path.length; depth++) {
      const box = this.path[depth];
      const { indent, text } = this;
      if (box.type === "quote") {
        if (indent > 3 || text[0] !== ">") break;
        this.takeQuote(indent);
        this.note(depth + 1);
      } else if (text ? indent < box.indent : !box.children.length) break;
      else this.take(Math.min(box.indent, indent));
    }
    return depth;
  }

  takeQuote(indent) {
    this.take(indent + 1);
    if (this.indent) this.take(1);
  }

  /** Note that the first `depth` containers reach this line. */
  note(depth) {
    for (const box of this.path.slice(1, depth)) {
      box.end = this.number;
      if (box.list) box.list.end = this.number;
    }
  }

  /** Close the leaf, and the containers that this line does not continue. */
  close() {
    this.path.length = this.depth;
    this.leaf = null;
    this.isOpen = true;
  }

  placed(block) {
    return Object.assign(block, { start: this.number, end: this.number });
  }

  add(block, isLeaf = false) {
    this.path.at(-1).children.push(this.placed(block));
    this.leaf = isLeaf ? block : null;
    return block;
  }

  /** Begin the blocks of this line; return whether they took all of its text. */
  begin() {
    for (;;) {
      const { indent, text, leaf } = this;
      if (!text) return false;
      if (indent >= 4) return leaf?.type !== "paragraph" && this.beginCode();
      const paragraph = this.isOpen && leaf?.type === "paragraph" ? leaf : null;
      if (text[0] === ">" && this.depth < MAX_DEPTH) this.beginQuote(indent);
      else if (this.beginLeaf(text, paragraph, indent)) return true;
      else if (this.depth < MAX_DEPTH && this.beginItem(text, paragraph, indent)) continue;
      else return false;
    }
  }

  beginCode() {
    if (this.leaf?.type !== "code" || !this.isOpen) {
      this.close();
      this.add({ type: "code", lines: [] }, true);
    }
    this.leaf.lines.push(this.after(4));
    this.leaf.end = this.number;
    return true;
  }

  beginQuote(indent) {
    this.close();
    this.path.push(this.add({ type: "quote", children: [] }));
    this.depth++;
    this.takeQuote(indent);
  }

  beginLeaf(text, paragraph, indent) {
    const heading = HEADING.exec(text);
    const fence = FENCE.exec(text);
    const isUnderlined = paragraph && /^(=+|-+)[ \t]*$/.test(text);
    if (!heading && !fence && !isUnderlined && !RULE.test(text))
      return this.beginMath(text) || this.beginTable(text, paragraph);
    this.close();
    if (heading) {
      const content = text.slice(heading[1].length).trim();
      this.add({
        type: "heading",
        level: heading[1].length,
        text: content.replace(/(^|[ \t])#+$/, ""),
      });
    } else if (fence) {
      const mark = fence[1] ?? fence[3];
      this.add({ type: "fence", mark, indent, info: fence[2] ?? fence[4], lines: [] }, true);
    } else if (isUnderlined) {
      Object.assign(paragraph, {
        type: "heading",
        level: text[0] === "=" ? 1 : 2,
        text: paragraph.lines.join("\n"),
        end: this.number,
      });
    } else this.add({ type: "rule" });
    return true;
  }

  /** A formula in lines of its own; a blank line ends it, too, and it is then a paragraph. */
  beginMath(text) {
    const found = MATH.exec(text);
    if (!found) return false;
    const mark = found[1] ?? "\\]";
    const [tex, tail] = splitAt(text.slice(2), mark);
    if (tail !== undefined && !MATH_TAIL.test(tail.trim())) return false;
    this.close();
    const block = { type: "math", mark, lines: [text], tex: [tex], isClosed: tail !== undefined };
    if (tail) block.tex.push(tail.trim());
    this.add(block, !block.isClosed);
    return true;
  }

  readMath() {
    const { leaf, text } = this;
    if (!text) {
      this.leaf = null;
      return;
    }
    const [tex, tail] = splitAt(text, leaf.mark);
    this.note(this.path.length);
    leaf.end = this.number;
    leaf.lines.push(text);
    if (tail !== undefined && !MATH_TAIL.test(tail.trim())) {
      leaf.type = "paragraph"; // The formula ends in the middle of a line.
      return;
    }
    leaf.tex.push(tex);
    if (tail === undefined) return;
    leaf.tex.push(tail.trim());
    leaf.isClosed = true;
    this.leaf = null;
  }

  /** If this line is a delimiter row, the paragraph's last line becomes the head of a table. */
  beginTable(text, paragraph) {
    const head = paragraph?.lines.at(-1);
    if (!head?.includes("|") || !DELIMITERS.test(text)) return false;
    const marks = cellsOf(text);
    const cells = cellsOf(head);
    if (marks.length !== cells.length || cells.length > MAX_COLUMNS) return false;
    if (!marks.every((mark) => /^:?-+:?$/.test(mark))) return false;
    paragraph.lines.pop();
    if (!paragraph.lines.length) this.path.at(-1).children.pop();
    else paragraph.end--;
    const align = marks.map((mark) =>
      /:$/.test(mark) ? (/^:/.test(mark) ? "center" : "right") : "",
    );
    const start = this.number - 1;
    Object.assign(this.add({ type: "table", align, rows: [cells] }, true), { start });
    return true;
  }

  beginItem(text, paragraph, indent) {
    const found = ITEM.exec(text);
    if (!found) return false;
    const width = indent + found[0].length;
    const spaces = indentOf(this.after(width), this.column + width);
    const isEmpty = !text.slice(found[0].length).trim();
    if (paragraph && (isEmpty || (found[2] && Number(found[2]) !== 1))) return false;
    this.close();
    const mark = found[1] ?? found[3];
    let list = this.path.at(-1).children.at(-1);
    if (list?.type !== "list" || list.mark !== mark) {
      list = this.add({
        type: "list",
        mark,
        first: found[2] && Number(found[2]),
        children: [],
      });
    }
    const pad = isEmpty || spaces > 4 ? 1 : spaces;
    this.take(width);
    this.take(Math.min(pad, this.indent));
    const item = this.placed({ type: "item", list, indent: width + pad, children: [] });
    list.children.push(item);
    list.end = this.number;
    this.path.push(item);
    this.depth++;
    return true;
  }

  readFence() {
    const { leaf, indent } = this;
    const text = this.text.trimEnd();
    leaf.end = this.number;
    if (text) this.note(this.path.length);
    if (
      indent < 4 &&
      text.length >= leaf.mark.length &&
      text === leaf.mark[0].repeat(text.length)
    ) {
      this.leaf = null;
    } else leaf.lines.push(this.after(Math.min(leaf.indent, indent)));
  }

  /** Read the text of a line that begins no block. */
  readText() {
    const { leaf, text } = this;
    const isLazy = text && leaf?.type === "paragraph"; // A paragraph may continue without the marks of its containers.
    if (!this.isOpen && !isLazy) this.close();
    if (!text) {
      if (this.leaf?.type === "code") this.leaf.lines.push(this.after(4));
      else this.leaf = null;
      return;
    }
    this.note(this.path.length);
    if (this.leaf?.type === "table") this.leaf.rows.push(cellsOf(text));
    else if (this.leaf?.type === "paragraph") this.leaf.lines.push(text);
    else this.add({ type: "paragraph", lines: [text] }, true);
    this.leaf.end = this.number;
  }
}

const LINE_END = /\r\n|\n|\r/g;

/** The blocks of a text; their start and end are line numbers. */
function readBlocks(text) {
  const reader = new BlockReader();
  const lines = text.replaceAll("\0", "\ufffd").split(LINE_END);
  if (lines.at(-1) === "") lines.pop();
  lines.forEach((line, i) => reader.read(line, i));
  return reader.root.children;
}
