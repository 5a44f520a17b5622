/* ---- tokens and their probabilities ---- */

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** The text of bytes; null if they are not valid UTF-8. */
function textOf(bytes) {
  try {
    return strict.decode(bytes);
  } catch {
    return null;
  }
}

/** A visible name of a token. */
function nameOf(bytes) {
  const text = textOf(bytes);
  if (text !== null) {
    return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  }
  return `bytes ${hexOf(bytes, " ")}`;
}

const isSpecial = (entry) => /^<\|.*\|>$/.test(textOf(entry.bytes) ?? "");
const sameBytes = (a, b) =>
  a.bytes.length === b.bytes.length && a.bytes.every((x, i) => x === b.bytes[i]);

function percent(logprob) {
  const p = 100 * Math.exp(logprob);
  const digits = p >= 10 ? 0 : p >= 1 ? 1 : 2;
  return `${p < 0.01 ? "<\u00a00.01" : p.toFixed(digits)}\u00a0%`;
}

const nats = (logprob) => Math.abs(logprob).toFixed(2);
const chanceOf = ({ logprob }) => `p ${percent(logprob)}, −log p ${nats(logprob)}`;

const chatEntry = (given) => ({
  bytes: Uint8Array.from(given.bytes),
  logprob: given.logprob,
  likeliest: (given.top_logprobs ?? []).map(chatEntry),
});

/** The tokens of a completion's logprobs; those that are not text come as "bytes:\x..". */
function textEntries(given) {
  const bytesOf = (token) =>
    /^bytes:(\\x[0-9a-f]{2})+$/.test(token)
      ? Uint8Array.from(token.slice(8).split("\\x"), (x) => parseInt(x, 16))
      : new TextEncoder().encode(token);
  return given.tokens.map((token, i) => ({
    bytes: bytesOf(token),
    logprob: given.token_logprobs[i],
    likeliest: Object.entries(given.top_logprobs[i] ?? {}).map(([text, logprob]) => ({
      bytes: bytesOf(text),
      logprob,
    })),
  }));
}

/** A function that joins tokens into pieces of whole characters, {text, entries}. Without a token it
returns what is left. */
function joiner() {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const entries = [];
  return (entry) => {
    if (entry) entries.push(entry);
    const text = decoder.decode(entry?.bytes, { stream: Boolean(entry) });
    return text ? [{ text, entries: entries.splice(0) }] : [];
  };
}

const joined = (pieces) => pieces.map((piece) => piece.text).join("");

/** A text whose tokens can be chosen with the mouse or the arrow keys. */
class TokenText {
  constructor(label, onContinue) {
    this.pieces = [];
    this.spans = [];
    this.here = -1;
    this.onContinue = onContinue;
    this.label = label;
    this.node = make("div", {
      className: "text",
      dir: "auto",
      role: "group",
      "aria-label": label,
      onclick: (event) => this.clicked(event),
      onkeydown: (event) => this.key(event),
      onpointerover: (event) => event.pointerType === "mouse" && this.hover(event.target),
      onpointerleave: hideTip,
      onblur: hideTip,
      onfocus: () => this.node.matches(":focus-visible") && this.move(this.here < 0 ? 1 : 0),
    });
  }

  get text() {
    return joined(this.pieces);
  }

  push(piece) {
    const entry = piece.entries[0];
    const span = make("span", { className: "token" }, piece.text);
    if (entry && entry.logprob !== null) {
      span.classList.add("scored");
      span.style.setProperty("--heat", Math.min(1, Math.abs(entry.logprob) / MAX_NATS).toFixed(3));
      if (this.node.tabIndex < 0) {
        this.node.tabIndex = 0;
        this.node.setAttribute(
          "aria-label",
          `${this.label}. Use the arrow keys to choose a token, and Enter to show its probability.`,
        );
      }
    }
    this.pieces.push(piece);
    this.spans.push(span);
    this.node.append(span);
    return span;
  }

  isScored(i) {
    return i >= 0 && i < this.spans.length && this.spans[i].classList.contains("scored");
  }

  describe(i) {
    const entry = this.pieces[i].entries[0];
    return `${nameOf(entry.bytes)}: ${chanceOf(entry)}`;
  }

  hover(target) {
    const i = this.spans.indexOf(target);
    if (this.isScored(i)) showTip(target, this.describe(i));
    else hideTip();
  }

  clicked(event) {
    const i = this.spans.indexOf(event.target);
    if (this.isScored(i) && getSelection().isCollapsed) this.open(i);
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (event.target !== this.node) return;
    if (event.key in steps) this.move(steps[event.key]);
    else if ((event.key === "Enter" || event.key === " ") && this.isScored(this.here))
      this.open(this.here);
    else return;
    event.preventDefault();
  }

  /** Move to the next token that has a probability; an infinite step goes to an end. */
  move(step) {
    const last = this.spans.length - 1;
    let i = Number.isFinite(step) ? this.here + step : step < 0 ? 0 : last;
    const direction = step === Infinity ? -1 : step === -Infinity ? 1 : step;
    while (direction && i >= 0 && i <= last && !this.isScored(i)) i += direction;
    if (!this.isScored(i)) return;
    this.mark(i);
    showTip(this.spans[i], this.describe(i));
    $("say").textContent = this.describe(i);
  }

  mark(i) {
    this.spans[this.here]?.classList.remove("here");
    this.here = i;
    this.spans[i].classList.add("here");
    this.spans[i].scrollIntoView({ block: "nearest" });
  }

  open(i) {
    closeChoices();
    hideTip();
    this.mark(i);
    this.spans[i].classList.add("open");
    const node = choicesOf(this, i);
    this.node.parentNode.append(node);
    const box = this.node.parentNode.getBoundingClientRect();
    const token = [...this.spans[i].getClientRects()].at(-1);
    const left = Math.min(token.left - box.left, box.width - node.offsetWidth);
    node.style.left = `${Math.max(0, left)}px`;
    node.style.top = `${token.bottom - box.top + 6}px`;
    opened = { node, text: this, span: this.spans[i] };
    node.querySelector("button:enabled").focus({ preventScroll: true });
    node.scrollIntoView({ block: "nearest" });
  }
}

let opened = null; // the alternatives that are shown

function closeChoices(isFocusReturned = false) {
  if (!opened) return;
  const { node, text, span } = opened;
  opened = null;
  node.remove();
  span.classList.remove("open");
  if (isFocusReturned) text.node.focus();
}

/** The dialog with the alternatives to a token. */
function choicesOf(text, i) {
  const piece = text.pieces[i];
  const chosen = piece.entries[0];
  const others = chosen.likeliest.filter((entry) => !sameBytes(entry, chosen));
  const rows = [chosen, ...others].sort((a, b) => b.logprob - a.logprob);
  const before = text.pieces.slice(0, i);
  const node = make(
    "div",
    { className: "choices", role: "dialog", "aria-label": "Probabilities of this token" },
    make("p", { className: "note" }, `Token ${i + 1}: ${chanceOf(chosen)} nats`),
    make("ul", {}, ...rows.map((entry) => make("li", {}, choiceRow(text, before, chosen, entry)))),
  );
  if (piece.entries.length > 1) {
    node.append(
      make(
        "p",
        { className: "note" },
        `This character consists of ${piece.entries.length} tokens. These are the alternatives to the first one.`,
      ),
    );
  }
  node.append(button("Close", () => closeChoices(true), { className: "quiet close" }));
  return node;
}

function choiceRow(text, before, chosen, entry) {
  const share = make("span");
  share.style.width = `${100 * Math.exp(entry.logprob)}%`;
  const parts = [
    make("span", { className: "code" }, nameOf(entry.bytes)),
    make("span", { className: "share", "aria-hidden": "true" }, share),
    make("span", { className: "number" }, percent(entry.logprob)),
  ];
  if (entry === chosen)
    return make("div", { className: "chosen", "aria-current": "true" }, ...parts);
  const added = textOf(entry.bytes);
  const reason = isSpecial(entry)
    ? "ends the text"
    : added === null
      ? "is part of a character"
      : "";
  const label = `${nameOf(entry.bytes)}, ${percent(entry.logprob)}`;
  return make(
    "button",
    {
      type: "button",
      disabled: Boolean(reason),
      title: reason
        ? `This token ${reason}, so the text cannot be continued from it.`
        : "Continue from this token",
      "aria-label": reason ? `${label}, ${reason}` : `Continue from ${label}`,
      onclick: () => {
        closeChoices();
        const likeliest = chosen.likeliest;
        text.onContinue(before, { text: added, entries: [{ ...entry, likeliest }] });
      },
    },
    ...parts,
  );
}

function showTip(span, text) {
  const tip = $("tip");
  setMessage(tip, text);
  const token = span.getClientRects()[0];
  if (!token) return;
  const left = Math.min(token.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${token.top > 40 ? token.top - tip.offsetHeight - 4 : token.bottom + 4}px`;
}

function hideTip() {
  $("tip").hidden = true;
}
