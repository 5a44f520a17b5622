/* ---- Markdown: the text in a block ---- */

const PLAIN = /(?:(?!https?:\/\/)[^\\`$<&![\]*_~\n])+/y;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const AUTOLINK = /<((?:https?:|mailto:)[^\s<>]*)>/iy;
const ADDRESS = /https?:\/\/[^\s<>[\]`*]*[^\s<>[\]`*?!.,:;"'~_]/y;
const ENTITY = /&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]{2,8}\d?));/iy;
const ENTITIES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  copy: "©",
  hellip: "…",
  mdash: "—",
};

/** An element of the tree. */
const h = (tag, attributes = {}, ...children) => ({ tag, attributes, children });
/** Match a sticky pattern at an index. */
const matchAt = (pattern, text, i) => {
  pattern.lastIndex = i;
  return pattern.exec(text);
};
const plainOf = (nodes) =>
  nodes.map((node) => (typeof node === "string" ? node : plainOf(node.children))).join("");

function entityOf(found) {
  const [whole, decimal, hex, name] = found;
  if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
  const code = decimal ? Number(decimal) : parseInt(hex, 16);
  const isCharacter = code > 0 && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
  return isCharacter ? String.fromCodePoint(code) : "\ufffd";
}

function unescape(text) {
  return text.replace(
    /\\([!-/:-@[-`{-~])|&#?\w+;/g,
    (whole, escaped) =>
      escaped ?? (matchAt(ENTITY, whole, 0) ? entityOf(matchAt(ENTITY, whole, 0)) : whole),
  );
}

/** The runs of dollar signs and the ends of formulas, the last one first: {mark, index}. */
function mathMarks(text) {
  const marks = { $: [], "\\)": [], "\\]": [] };
  for (const { 0: mark, index } of text.matchAll(/\\[^]|\$+/g)) {
    if (mark === "\\]" && /[([]/.test(text[index + 2] ?? "")) continue; // an escaped link
    marks[mark[0] === "$" ? "$" : mark]?.push({ mark, index });
  }
  Object.values(marks).forEach((each) => each.reverse());
  return marks;
}

/** Whether text between two dollar signs is a formula, not what stands between two prices. */
function isFormula(tex, before, after) {
  if (/^\s|\s$/.test(tex) || /[\p{L}\p{N}]/u.test(before) || /\d/.test(after)) return false;
  return !/^\d/.test(tex) || !/\s/.test(tex) || /[\\^_=+*/<>-]/.test(tex);
}

/** The spans of code and of math, by the index at which each begins: {width, end} of its marks. While
 * the text grows, a formula may reach its end. */
function literalSpans(text, isGrowing) {
  const closing = new Map(); // width -> indices of runs of backticks, the last one first
  for (const { 0: run, index } of [...text.matchAll(/`+/g)].reverse()) {
    if (!closing.has(run.length)) closing.set(run.length, []);
    closing.get(run.length).push(index);
  }
  const marks = mathMarks(text);
  const ends = { "\\(": marks["\\)"], "\\[": marks["\\]"] };
  const spans = new Map();
  const opening = /\\[^]|`+|\$+/g;
  const add = (index, span) => {
    spans.set(index, span);
    opening.lastIndex = span.end;
  };
  for (;;) {
    const found = opening.exec(text);
    if (!found) return spans;
    const { 0: run, index } = found;
    if (run[0] === "`") {
      const starts = closing.get(run.length) ?? [];
      while (starts.length && starts.at(-1) <= index) starts.pop();
      if (starts.length) add(index, { width: run.length, end: starts.at(-1) + run.length });
      continue;
    }
    const isDollar = run[0] === "$";
    const candidates = isDollar ? marks.$ : ends[run];
    if (!candidates || run.length > 2) continue;
    while (candidates.length && candidates.at(-1).index <= index) candidates.pop();
    const end = candidates.at(-1);
    const from = index + run.length;
    const tex = text.slice(from, end?.index);
    const before = text[index - 1] ?? " ";
    const after = end ? (text[end.index + 1] ?? " ") : " ";
    if (end ? isDollar && end.mark !== run : !isGrowing) continue;
    if (run === "$" && (end ? !isFormula(tex, before, after) : !/^[^\s\d]/.test(tex))) continue;
    if (!tex.trim()) continue;
    const close = end ? end.index + end.mark.length : text.length;
    add(index, { tex, isDisplay: run === "$$" || run === "\\[", isOpen: !end, end: close });
  }
}

/** The index of the closing bracket, by the index of the opening one. */
function matchBrackets(text, spans) {
  const found = new Map();
  const open = [];
  for (let i = 0; i < text.length; i++) {
    const c = text[i];
    if (spans.has(i)) i = spans.get(i).end - 1;
    else if (c === "\\") i++;
    else if (c === "[") open.push(i);
    else if (c === "]" && open.length) found.set(open.pop(), i);
  }
  return found;
}

/** The target after a link's text, as {url, end}; url is null if the text ends in it. */
function readTarget(text, start) {
  const opened = matchAt(/\(\s*/y, text, start);
  if (!opened) return null;
  let i = start + opened[0].length;
  const pointed = matchAt(/<((?:[^<>\n\\]|\\.)*)>/y, text, i);
  let url;
  if (pointed) {
    url = pointed[1];
    i += pointed[0].length;
  } else {
    const from = i;
    for (let depth = 0; i < text.length && !/[\s<]/.test(text[i]); i++) {
      if (text[i] === "\\") i++;
      else if (text[i] === ")" && depth-- === 0) break;
      else if (text[i] === "(" && ++depth === MAX_OPEN) return null;
    }
    url = text.slice(from, i);
  }
  const closed = matchAt(
    /(?:\s+(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\((?:[^()\\]|\\.)*\)))?\s*\)/y,
    text,
    i,
  );
  if (closed) return { url: unescape(url), end: i + closed[0].length };
  return i < text.length ? null : { url: null, end: i };
}

class InlineReader {
  /** isGrowing: the text may grow, so whatever is open is shown as if it ended here. */
  constructor(text, isGrowing = false, depth = 0) {
    this.text = isGrowing ? text.replace(/(?:[*_~`$\\]+|!?\[)$/, "") : text;
    this.isGrowing = isGrowing;
    this.depth = depth;
    this.i = 0;
    this.frames = [{ children: [] }]; // what is open; the first frame is the text itself
    this.spans = literalSpans(this.text, isGrowing);
    this.brackets = matchBrackets(this.text, this.spans);
  }

  nodes() {
    while (this.i < this.text.length) {
      const plain = matchAt(PLAIN, this.text, this.i);
      if (plain) this.put(plain[0]);
      else if (!this.readSign(this.text[this.i])) this.put(this.text[this.i]);
    }
    while (this.frames.length > 1) {
      if (this.isGrowing) this.closeLast();
      else this.dissolve(this.frames.length - 1);
    }
    return this.frames[0].children;
  }

  readSign(c) {
    const span = this.spans.get(this.i);
    if (span?.tex !== undefined) return this.readFormula(span);
    if (c === "\\") return this.readEscape();
    if (c === "`") return this.readCode();
    if (c === "<") return this.readAutolink();
    if (c === "&") return this.readEntity();
    if (c === "[" || c === "!") return this.readLink(c === "!");
    if (c === "*" || c === "_" || c === "~") return this.readRun(c);
    if (c === "\n") return this.readBreak(1);
    return c === "h" && this.readAddress();
  }

  /** Add a node to what is open, and read `width` characters. */
  put(node, width = node.length) {
    add(this.frames.at(-1).children, node);
    this.i += width;
    return true;
  }

  readEscape() {
    const next = this.text[this.i + 1] ?? "";
    if (next === "\n") return this.readBreak(2);
    return ESCAPABLE.test(next) && this.put(next, 2);
  }

  readBreak(width) {
    const { children } = this.frames.at(-1);
    if (typeof children.at(-1) === "string") children.push(children.pop().trimEnd());
    return this.put(h("br"), width);
  }

  readCode() {
    const run = matchAt(/`+/y, this.text, this.i)[0];
    const growing = this.isGrowing && {
      width: run.length,
      end: this.text.length + run.length,
    };
    const { width, end } = this.spans.get(this.i) ?? growing;
    if (!end) return this.put(run);
    let code = this.text.slice(this.i + width, end - width).replaceAll("\n", " ");
    if (/^ .* $/.test(code) && code.trim()) code = code.slice(1, -1);
    return this.put(h("code", {}, code), end - this.i);
  }

  readFormula({ tex, isDisplay, isOpen, end }) {
    const width = end - this.i;
    if (isOpen) return this.put(h("code", { class: "tex" }, this.text.slice(this.i, end)), width);
    return this.put(formula(tex, isDisplay, "span"), width);
  }

  readEntity() {
    const found = matchAt(ENTITY, this.text, this.i);
    return found && this.put(entityOf(found), found[0].length);
  }

  readAutolink() {
    const found = matchAt(AUTOLINK, this.text, this.i);
    return found && !this.depth && this.put(anchor(found[1], [found[1]]), found[0].length);
  }

  readAddress() {
    const found = matchAt(ADDRESS, this.text, this.i);
    if (!found || this.depth || /\w/.test(this.text[this.i - 1] ?? " ")) return false;
    let url = found[0];
    while (url.endsWith(")") && url.split(")").length > url.split("(").length)
      url = url.slice(0, -1);
    return this.put(anchor(url, [url]), url.length);
  }

  readLink(isPicture) {
    const start = this.i + (isPicture ? 1 : 0);
    const close = this.brackets.get(start);
    const target = close !== undefined && this.depth < 8 && readTarget(this.text, close + 1);
    if (!target || (target.url === null ? !this.isGrowing : !SAFE_LINK.test(target.url)))
      return false;
    const inner = new InlineReader(this.text.slice(start + 1, close), false, this.depth + 1);
    const nodes = inner.nodes();
    const width = target.end - this.i;
    if (isPicture) return this.put(anchor(target.url, [plainOf(nodes) || target.url || ""]), width);
    this.hasLink = true;
    if (!inner.hasLink) return this.put(anchor(target.url, nodes), width);
    ["[", ...nodes, "]"].forEach((node) => this.put(node, 0)); // Only the inner one is a link.
    this.i = close + 1;
    return true;
  }

  /** Read a run of *, _ or ~, which closes an earlier run, opens emphasis or is text. */
  readRun(c) {
    const [run] = matchAt(/\*+|_+|~+/y, this.text, this.i);
    const size = run.length;
    const before = this.text[this.i - 1] ?? " ";
    const after = this.text[this.i + size] ?? " ";
    const isMark = (x) => PUNCTUATION.test(x);
    const isSpace = (x) => /\s/.test(x);
    const left = !isSpace(after) && (!isMark(after) || isSpace(before) || isMark(before));
    const right = !isSpace(before) && (!isMark(before) || isSpace(after) || isMark(after));
    const canOpen = left && (c !== "_" || !right || isMark(before));
    const canClose = right && (c !== "_" || !left || isMark(after));
    if (c === "~" ? size !== 2 : size > MAX_OPEN) return this.put(run);
    this.i += size;
    const count = canClose ? this.close({ c, size, canOpen }) : size;
    if (count && canOpen) this.frames.push({ c, count, size, canClose, children: [] });
    else if (count) this.put(c.repeat(count), 0);
    if (this.frames.length > MAX_OPEN) this.dissolve(1);
    return true;
  }

  /** Close what a run can close; return how many of its characters are left. */
  close({ c, size, canOpen }) {
    const fits = (frame) =>
      frame.c === c &&
      !((frame.canClose || canOpen) && (frame.size + size) % 3 === 0 && size % 3 !== 0);
    let count = size;
    while (count) {
      const i = this.frames.findLastIndex(fits);
      if (i < 1) break;
      while (this.frames.length - 1 > i) this.dissolve(this.frames.length - 1);
      count -= this.wrap(this.frames[i], count);
    }
    return count;
  }

  /** Make a node of the last frame; return how many of `count` closing characters it took. */
  wrap(frame, count) {
    const used = Math.min(2, frame.count, count);
    const node = h(frame.c === "~" ? "s" : used === 2 ? "strong" : "em", {}, ...frame.children);
    frame.count -= used;
    frame.children = [node];
    if (!frame.count) {
      this.frames.pop();
      this.put(node, 0);
    }
    return used;
  }

  closeLast() {
    const frame = this.frames.at(-1);
    while (frame.count) this.wrap(frame, frame.count);
  }

  /** Turn the opening characters of a frame back into text. */
  dissolve(i) {
    const [frame] = this.frames.splice(i, 1);
    const { children } = this.frames[i - 1];
    add(children, frame.c.repeat(frame.count));
    frame.children.forEach((node) => add(children, node));
  }
}

/** Append a node, or extend the text at the end. */
function add(nodes, node) {
  if (typeof node === "string" && typeof nodes.at(-1) === "string") nodes.push(nodes.pop() + node);
  else nodes.push(node);
}

/** A link; url is null while its target is incomplete. The target learns nothing of this page. */
const anchor = (url, children) =>
  h(
    "a",
    url === null ? {} : { href: url, target: "_blank", rel: "noopener noreferrer" },
    ...children,
  );
