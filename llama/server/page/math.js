/* ---- math: from TeX to trees of MathML ---- */

// Only the elements and attributes below are made; whatever a formula contains becomes their text.
// It is one file because half of it is tables, which the reader below them consults.
const MAX_TEX = 20_000; // characters of a formula; a longer one is shown as its source
const MAX_TEX_DEPTH = 60; // nested groups
const MAX_INLINE = 80; // characters; a longer formula in a line gets a scroll bar of its own

/** A map of the pairs of words in a text. */
const pairsOf = (text) => {
  const words = text.trim().split(/\s+/);
  return new Map(words.flatMap((word, i) => (i % 2 ? [] : [[word, words[i + 1]]])));
};

/** Symbols that are identifiers, upright. */
const SYMBOLS = pairsOf(`
  infty ∞ emptyset ∅ varnothing ∅ partial ∂ nabla ∇ hbar ℏ hslash ℏ ell ℓ Re ℜ Im ℑ wp ℘ aleph ℵ
  beth ℶ forall ∀ exists ∃ nexists ∄ top ⊤ bot ⊥ angle ∠ measuredangle ∡ triangle △ square □ Box □
  blacksquare ■ bigstar ★ diamondsuit ♢ heartsuit ♡ clubsuit ♣ spadesuit ♠ checkmark ✓ prime ′
  degree ° dots … ldots … cdots ⋯ vdots ⋮ ddots ⋱ dotsc … dotsb ⋯ dotsm ⋯ dotsi ⋯ dotso … textdegree °
  imath ı jmath ȷ complement ∁ flat ♭ natural ♮ sharp ♯ dagger † ddagger ‡ S § P ¶ copyright ©
  pounds £ euro € mho ℧ Diamond ◊ lozenge ◊ blacktriangle ▲ triangledown ▽ backprime ‵ % % $ $ # # _ _
  & & Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
  Alpha Α Beta Β Epsilon Ε Zeta Ζ Eta Η Iota Ι Kappa Κ Mu Μ Nu Ν Omicron Ο Rho Ρ Tau Τ Chi Χ`);

/** Greek letters, in italics as Latin ones. */
const GREEK = pairsOf(`
  alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ
  varkappa ϰ lambda λ mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ
  upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω digamma ϝ`);

/** Operators and relations. */
const OPERATORS = pairsOf(`
  pm ± mp ∓ times × div ÷ cdot ⋅ cdotp ⋅ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗
  oslash ⊘ odot ⊙ wedge ∧ land ∧ vee ∨ lor ∨ cap ∩ cup ∪ uplus ⊎ sqcap ⊓ sqcup ⊔ setminus ∖
  smallsetminus ∖ wr ≀ amalg ⨿ diamond ⋄ bigtriangleup △ bigtriangledown ▽ triangleleft ◁
  triangleright ▷ ltimes ⋉ rtimes ⋊ neg ¬ lnot ¬ leq ≤ le ≤ leqslant ⩽ leqq ≦ geq ≥ ge ≥
  geqslant ⩾ geqq ≧ ll ≪ gg ≫ lll ⋘ ggg ⋙ neq ≠ ne ≠ equiv ≡ sim ∼ simeq ≃ approx ≈ approxeq ≊
  cong ≅ doteq ≐ propto ∝ varpropto ∝ asymp ≍ prec ≺ succ ≻ preceq ⪯ succeq ⪰ lesssim ≲ gtrsim ≳
  in ∈ notin ∉ ni ∋ owns ∋ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ supsetneq ⊋
  nsubseteq ⊈ nsupseteq ⊉ sqsubseteq ⊑ sqsupseteq ⊒ mid ∣ nmid ∤ parallel ∥ nparallel ∦ perp ⊥
  vdash ⊢ dashv ⊣ models ⊨ vDash ⊨ Vdash ⊩ bowtie ⋈ smile ⌣ frown ⌢ triangleq ≜ coloneqq ≔ eqqcolon ≕
  nleq ≰ ngeq ≱ nless ≮ ngtr ≯ therefore ∴ because ∵ colon : to → rightarrow → leftarrow ← gets ←
  leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹ impliedby ⟸ iff ⟺
  longrightarrow ⟶ longleftarrow ⟵ longleftrightarrow ⟷ Longrightarrow ⟹ Longleftarrow ⟸
  Longleftrightarrow ⟺ mapsto ↦ longmapsto ⟼ uparrow ↑ downarrow ↓ updownarrow ↕ Uparrow ⇑
  Downarrow ⇓ Updownarrow ⇕ nearrow ↗ searrow ↘ swarrow ↙ nwarrow ↖ hookrightarrow ↪
  hookleftarrow ↩ rightharpoonup ⇀ rightharpoondown ⇁ leftharpoonup ↼ leftharpoondown ↽
  rightleftharpoons ⇌ leftrightharpoons ⇋ rightrightarrows ⇉ rightsquigarrow ⇝ leadsto ⇝
  twoheadrightarrow ↠ nrightarrow ↛ nRightarrow ⇏ circlearrowleft ↺ circlearrowright ↻`);

/** Fences; a plain one does not stretch. */
const FENCES = pairsOf(`
  ( ( ) ) [ [ ] ] { { } } | | / / < ⟨ > ⟩ lbrace { rbrace } lbrack [ rbrack ] langle ⟨ rangle ⟩
  lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lvert | rvert | lVert ‖ rVert ‖ vert | Vert ‖ backslash ∖
  lgroup ⟮ rgroup ⟯ ulcorner ⌜ urcorner ⌝ llcorner ⌞ lrcorner ⌟`);

/** Operators with limits above and below them in a display. */
const LARGE = pairsOf(`
  sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigodot ⨀ bigvee ⋁ bigwedge ⋀
  biguplus ⨄ bigsqcup ⨆`);
const INTEGRALS = pairsOf("int ∫ iint ∬ iiint ∭ oint ∮ oiint ∯ smallint ∫");
const FUNCTIONS = new Set(
  `arccos arcsin arctan arg cos cosh cot coth csc deg dim exp hom ker lg ln log sec sin sinh tan tanh`.split(
    " ",
  ),
);
const LIMITS = new Map(
  `det gcd inf lim max min sup Pr`
    .split(" ")
    .map((name) => [name, name])
    .concat([
      ["limsup", "lim sup"],
      ["liminf", "lim inf"],
      ["argmax", "arg max"],
      ["argmin", "arg min"],
    ]),
);
const ACCENTS = pairsOf(`
  hat ^ widehat ^ bar ‾ overline ‾ vec → overrightarrow → overleftarrow ← overleftrightarrow ↔ dot ˙
  ddot ¨ dddot ⃛ tilde ~ widetilde ~ check ˇ widecheck ˇ breve ˘ acute ´ grave \` mathring ˚
  overbrace ⏞ overparen ⏜`);
const UNDER_ACCENTS = pairsOf("underline _ underbrace ⏟ underparen ⏝ underrightarrow →");
const SPACES = pairsOf(`
  , 0.167em : 0.222em > 0.222em ; 0.278em ! -0.167em enspace 0.5em quad 1em qquad 2em thinspace 0.167em
  medspace 0.222em thickspace 0.278em negthinspace -0.167em`);
const SIZES = pairsOf("big 1.2em Big 1.8em bigg 2.4em Bigg 3em");
const ARROWS = pairsOf(`
  xrightarrow → xleftarrow ← xleftrightarrow ↔ xRightarrow ⇒ xLeftarrow ⇐ xmapsto ↦
  xrightleftharpoons ⇌ xhookrightarrow ↪`);
const FRACTIONS = pairsOf(
  "frac - dfrac true tfrac false cfrac true binom - dbinom true tbinom false",
);
const STYLES = pairsOf("displaystyle true textstyle false scriptstyle 1 scriptscriptstyle 2");
const NEGATED = pairsOf("= ≠ ∈ ∉ ⊂ ⊄ ⊃ ⊅ ⊆ ⊈ ⊇ ⊉ < ≮ > ≯ ≤ ≰ ≥ ≱ ≡ ≢ ∼ ≁ ≈ ≉ ∃ ∄ ∣ ∤ ∥ ∦ ∋ ∌ ≅ ≇");
/** Fences of an environment, and the alignment of its columns. */
const ENVIRONMENTS = {
  matrix: ["", "", ""],
  smallmatrix: ["", "", ""],
  pmatrix: ["(", ")", ""],
  bmatrix: ["[", "]", ""],
  Bmatrix: ["{", "}", ""],
  vmatrix: ["|", "|", ""],
  Vmatrix: ["‖", "‖", ""],
  cases: ["{", "", "l"],
  dcases: ["{", "", "l"],
  rcases: ["", "}", "l"],
  array: ["", "", ""],
  subarray: ["", "", ""],
  align: ["", "", "rl"],
  aligned: ["", "", "rl"],
  alignat: ["", "", "rl"],
  alignedat: ["", "", "rl"],
  eqnarray: ["", "", "rcl"],
  split: ["", "", "rl"],
  gather: ["", "", ""],
  gathered: ["", "", ""],
  multline: ["", "", ""],
  equation: ["", "", ""],
};
const COLUMN_CLASSES = { l: "left", r: "right", c: "" };

/** Code points of a mathematical alphabet: of A, a and 0, and of the letters that Unicode has elsewhere. */
const ALPHABETS = {
  bold: [0x1d400, 0x1d41a, 0x1d7ce, "", 0x1d6a8, 0x1d6c2],
  boldItalic: [0x1d468, 0x1d482, 0x1d7ce, "", 0x1d71c, 0x1d736],
  double: [0x1d538, 0x1d552, 0x1d7d8, "CℂHℍNℕPℙQℚRℝZℤ"],
  script: [0x1d49c, 0x1d4b6, null, "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ"],
  fraktur: [0x1d504, 0x1d51e, null, "CℭHℌIℑRℜZℨ"],
  sans: [0x1d5a0, 0x1d5ba, 0x1d7e2, ""],
  mono: [0x1d670, 0x1d68a, 0x1d7f6, ""],
  upright: [null, null, null, ""],
  italic: [null, null, null, ""],
};
const FONTS = pairsOf(`
  mathbf bold boldsymbol boldItalic bm boldItalic pmb boldItalic mathbb double mathcal script
  mathscr script mathfrak fraktur mathsf sans mathtt mono mathrm upright mathnormal italic mathit italic
  rm upright bf bold it italic cal script`);
const FONT_SWITCHES = new Set(["rm", "bf", "it", "cal"]);
const TEXT_COMMANDS = new Set(
  "text textrm textnormal textup textit textbf textsf texttt mbox hbox emph".split(" "),
);
const TRANSPARENT = new Set(
  "mathop mathbin mathrel mathord mathopen mathclose mathpunct mathinner smash mathstrut".split(
    " ",
  ),
);
/** Commands without an effect here, by the number of their arguments. */
const IGNORED = pairsOf(
  "nonumber 0 notag 0 limits 0 nolimits 0 hline 0 label 1 vspace 1 allowbreak 0 left. 0 relax 0 protect 0",
);

/** A letter or a digit in a mathematical alphabet. */
function inAlphabet(c, alphabet) {
  const [upper, lower, digit, others, greekUpper, greekLower] = ALPHABETS[alphabet];
  const i = others.indexOf(c);
  if (i >= 0 && i % 2 === 0) return others[i + 1];
  const ranges = [
    ["A", "Z", upper],
    ["a", "z", lower],
    ["0", "9", digit],
    ["Α", "Ω", greekUpper],
    ["α", "ω", greekLower],
  ];
  for (const [first, last, start] of ranges) {
    if (start && c >= first && c <= last)
      return String.fromCodePoint(start + c.charCodeAt(0) - first.charCodeAt(0));
  }
  return c;
}

class TexError extends Error {}

const TEX_TOKEN = /\\[a-zA-Z]+\*?|\\[^]|\d+(?:[.,]\d+)*|\s+|[^]/gu;
const isBlank = (token) => /^\s/.test(token);
const rowOf = (nodes) => (nodes.length === 1 ? nodes[0] : h("mrow", {}, ...nodes));
const operator = (text, attributes = {}) => h("mo", attributes, text);
const fence = (text, form) => operator(text, { form, stretchy: "true", fence: "true" });

/** Reads a formula into trees; throws a TexError if it is malformed. */
class TexReader {
  constructor(tex, depth = 0) {
    this.tokens = tex.match(TEX_TOKEN) ?? [];
    this.i = 0;
    this.depth = depth;
    this.alphabet = null;
  }

  /** The whole formula; lines that no environment encloses are the rows of a table. */
  whole() {
    const rows = this.cells(new Set());
    if (this.peek() !== undefined) throw new TexError(`${this.peek()} has no counterpart`);
    if (rows.length === 1 && rows[0].length === 1) return rows[0][0];
    return [this.table(rows, "rl")];
  }

  peek() {
    while (this.i < this.tokens.length && isBlank(this.tokens[this.i])) this.i++;
    return this.tokens[this.i];
  }

  next() {
    const token = this.peek();
    this.i++;
    return token;
  }

  accept(token) {
    if (this.peek() !== token) return false;
    this.i++;
    return true;
  }

  expect(token) {
    if (!this.accept(token)) throw new TexError(`${token} is missing`);
  }

  /** Read nodes until one of `ends`, which stays unread. */
  row(ends) {
    if (++this.depth > MAX_TEX_DEPTH) throw new TexError("the groups are nested too deeply");
    let nodes = [];
    const { alphabet } = this;
    for (;;) {
      const token = this.peek();
      if (token === undefined || token === "}" || ends.has(token)) break;
      const name = token.slice(1);
      if (token === "\\over" || token === "\\choose") {
        this.i++;
        const parts = [rowOf(nodes), rowOf(this.row(ends))];
        nodes = token === "\\over" ? [h("mfrac", {}, ...parts)] : this.binomial(parts, {});
      } else if (token[0] === "\\" && STYLES.has(name)) {
        this.i++;
        const style = STYLES.get(name);
        const attributes = Number(style)
          ? { scriptlevel: style, displaystyle: "false" }
          : { displaystyle: style };
        nodes.push(h("mstyle", attributes, ...this.row(ends)));
      } else if (token[0] === "\\" && FONT_SWITCHES.has(name)) {
        this.i++;
        this.alphabet = FONTS.get(name);
      } else if (token === "\\color") {
        this.i++;
        nodes.push(this.colored(() => this.row(ends)));
      } else nodes.push(...this.term(nodes.at(-1)));
    }
    this.alphabet = alphabet;
    this.depth--;
    return nodes;
  }

  group() {
    const nodes = this.row(new Set());
    this.expect("}");
    return rowOf(nodes);
  }

  /** The argument of a command: a group, or one token. */
  argument() {
    const token = this.peek();
    if (token === undefined || token === "}" || token === "&")
      throw new TexError("an argument is missing");
    if (this.accept("{")) return this.group();
    if (/^\d./.test(token)) {
      this.tokens[this.i] = token.slice(1); // Only the first digit of a number is the argument.
      return this.number(token[0]);
    }
    if (++this.depth > MAX_TEX_DEPTH) throw new TexError("the commands are nested too deeply");
    const nodes = this.atom();
    this.depth--;
    return rowOf(nodes);
  }

  /** An argument in brackets; null if there is none. */
  optional() {
    if (!this.accept("[")) return null;
    const nodes = this.row(new Set(["]"]));
    this.expect("]");
    return rowOf(nodes);
  }

  /** The text of an argument, as it is written. */
  raw() {
    if (!this.accept("{")) return this.next() ?? "";
    const start = this.i;
    for (let open = 1; open; this.i++) {
      if (this.i >= this.tokens.length) throw new TexError("} is missing");
      if (this.tokens[this.i] === "{") open++;
      else if (this.tokens[this.i] === "}") open--;
    }
    return this.tokens.slice(start, this.i - 1).join("");
  }

  /** An atom with its sub- and superscripts; `before` is the node before it. */
  term(before) {
    const token = this.peek();
    const nodes = token === "^" || token === "_" || token === "'" ? [h("mrow")] : this.atom();
    if (!nodes.length) return nodes;
    const base = nodes.pop();
    let { hasLimits } = base;
    if (this.accept("\\limits")) hasLimits = true;
    if (this.accept("\\nolimits")) hasLimits = false;
    let sub = null;
    let sup = null;
    for (;;) {
      const mark = this.peek();
      if (mark === "'") sup = this.primes(sup);
      else if (mark === "^" && !sup) sup = this.script();
      else if (mark === "_" && !sub) sub = this.script();
      else if (mark === "^" || mark === "_") throw new TexError("a second script");
      else break;
    }
    if (base.isFunction) {
      const isSpaced = before && before.tag !== "mo" && before.tag !== "mspace";
      base.attributes.lspace = isSpaced ? "0.167em" : "0";
      const after = this.peek() ?? "}";
      base.attributes.rspace = /^([)(}[\]|,;&^=+]|\\[\]}\\,:;!]|\\left|\\right|\\big)/i.test(after)
        ? "0"
        : "0.167em";
    }
    return [...nodes, this.scripted(base, sub, sup, hasLimits)];
  }

  script() {
    this.i++;
    return this.argument();
  }

  primes(sup) {
    let count = 0;
    while (this.accept("'")) count++;
    const primes = operator("′".repeat(count));
    const script = this.peek() === "^" ? this.script() : sup;
    return script ? h("mrow", {}, primes, script) : primes;
  }

  scripted(base, sub, sup, hasLimits) {
    const tags = hasLimits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (sub && sup) return h(tags[2], {}, base, sub, sup);
    if (sub) return h(tags[0], {}, base, sub);
    return sup ? h(tags[1], {}, base, sup) : base;
  }

  number(token) {
    const text = this.alphabet
      ? Array.from(token, (c) => inAlphabet(c, this.alphabet)).join("")
      : token;
    return h("mn", {}, text);
  }

  letter(c) {
    if (!this.alphabet) return h("mi", {}, c);
    const text = inAlphabet(c, this.alphabet);
    return h("mi", this.alphabet === "upright" ? { mathvariant: "normal" } : {}, text);
  }

  /** One node, or several for a few commands. */
  atom() {
    const token = this.next();
    if (token === "{") return [this.group()];
    if (token[0] === "\\") return this.command(token.slice(1));
    if (/^\d/.test(token)) return [this.number(token)];
    if (/\p{L}/u.test(token)) return [this.letter(token)];
    if (token === "~") return [h("mspace", { width: "0.333em" })];
    if (token === "&" || token === "]") return [operator(token, { stretchy: "false" })];
    if (token === "|") return [operator("|", { stretchy: "false", form: "prefix" })];
    if (token !== "<" && token !== ">" && FENCES.has(token))
      return [operator(token, { stretchy: "false" })];
    if (token === ".") return [operator(".", { lspace: "0", rspace: "0" })];
    if (token === "-") return [operator("−")];
    if (token === "*") return [operator("∗")];
    return [/[\p{P}\p{S}]/u.test(token) ? operator(token) : h("mtext", {}, token)];
  }

  command(name) {
    if (GREEK.has(name)) return [this.letter(GREEK.get(name))];
    if (SYMBOLS.has(name)) {
      const symbol = SYMBOLS.get(name);
      const text = this.alphabet ? inAlphabet(symbol, this.alphabet) : symbol;
      return [h("mi", { mathvariant: "normal" }, text)];
    }
    if (OPERATORS.has(name)) return [operator(OPERATORS.get(name))];
    if (SPACES.has(name)) return [h("mspace", { width: SPACES.get(name) })];
    if (/^\s/.test(name)) return [h("mspace", { width: "0.333em" })];
    if (name === "|") return [operator("‖", { stretchy: "false", form: "prefix" })];
    if (FENCES.has(name)) return [operator(FENCES.get(name), { stretchy: "false" })];
    if (LARGE.has(name)) return [{ ...operator(LARGE.get(name)), hasLimits: true }];
    if (INTEGRALS.has(name)) return [operator(INTEGRALS.get(name))];
    if (FUNCTIONS.has(name)) return [this.functionName(name, false)];
    if (LIMITS.has(name)) return [this.functionName(LIMITS.get(name), true)];
    return this.structure(name);
  }

  functionName(text, hasLimits) {
    const attributes = hasLimits ? { movablelimits: "true" } : {};
    return { ...operator(text, attributes), hasLimits, isFunction: true };
  }

  /** A command with arguments. */
  structure(name) {
    if (FRACTIONS.has(name)) return this.fraction(name);
    if (FONTS.has(name)) return [this.inFont(FONTS.get(name))];
    if (TEXT_COMMANDS.has(name)) return [this.text(name)];
    if (ACCENTS.has(name)) {
      const body = this.argument();
      const isStretched = /^(wide|over)/.test(name);
      const mark = operator(ACCENTS.get(name), { stretchy: String(isStretched) });
      const node = h("mover", { accent: "true" }, body, mark);
      return [{ ...node, hasLimits: name === "overbrace" }];
    }
    if (UNDER_ACCENTS.has(name)) {
      const mark = operator(UNDER_ACCENTS.get(name), { stretchy: "true" });
      const node = h("munder", { accentunder: "true" }, this.argument(), mark);
      return [{ ...node, hasLimits: name === "underbrace" }];
    }
    if (ARROWS.has(name)) return [this.arrow(ARROWS.get(name))];
    const size = /^(.*?)[lrm]?$/.exec(name)[1];
    if (SIZES.has(size)) {
      const extent = SIZES.get(size);
      const attributes = { stretchy: "true", minsize: extent, maxsize: extent };
      return [operator(this.delimiter(), { ...attributes, form: "prefix" })];
    }
    if (TRANSPARENT.has(name)) return [this.argument()];
    if (IGNORED.has(name)) {
      for (let i = Number(IGNORED.get(name)); i; i--) this.raw();
      return [];
    }
    return this.special(name);
  }

  special(name) {
    switch (name) {
      case "sqrt": {
        const index = this.optional();
        const body = this.argument();
        return [index ? h("mroot", {}, body, index) : h("msqrt", {}, body)];
      }
      case "left":
        return [this.fenced()];
      case "begin":
        return [this.environment()];
      case "operatorname":
      case "operatorname*":
        return [this.functionName(this.raw().replace(/\\[,;: ]/g, " "), name.endsWith("*"))];
      case "overset":
      case "stackrel": {
        const above = this.argument();
        return [h("mover", {}, this.argument(), above)];
      }
      case "underset": {
        const below = this.argument();
        return [h("munder", {}, this.argument(), below)];
      }
      case "substack": {
        this.expect("{");
        const rows = this.cells(new Set());
        this.expect("}");
        return [this.table(rows, "")];
      }
      case "boxed":
      case "fbox":
        return [h("mrow", { class: "boxed" }, this.argument())];
      case "cancel":
      case "bcancel":
      case "xcancel":
        return [h("mrow", { class: "cancel" }, this.argument())];
      case "phantom":
      case "hphantom":
      case "vphantom":
        return [h("mphantom", {}, this.argument())];
      case "textcolor":
        return [this.colored(() => [this.argument()])];
      case "not": {
        const node = this.argument();
        const text = plainOf([node]);
        return [operator(NEGATED.get(text) ?? `${text}\u0338`)];
      }
      case "bmod":
        return [operator("mod")];
      case "mod":
        return [h("mspace", { width: "1em" }), operator("mod")];
      case "pmod":
      case "pod": {
        const word = name === "pmod" ? [operator("mod", { lspace: "0" })] : [];
        const body = [operator("("), ...word, this.argument(), operator(")")];
        return [h("mspace", { width: "1em" }), ...body];
      }
      case "tag":
      case "tag*": {
        const text = this.raw();
        return [h("mspace", { width: "2em" }), h("mtext", {}, name === "tag" ? `(${text})` : text)];
      }
      case "hspace":
      case "hspace*": {
        const width = /^(-?[\d.]{1,4})(em|ex|pt|px|cm|mm|in)$/.exec(this.raw().trim());
        return width ? [h("mspace", { width: width[0] })] : [];
      }
      default:
        return [h("mtext", { class: "unknown" }, `\\${name}`)];
    }
  }

  fraction(name) {
    const style = FRACTIONS.get(name);
    const attributes = style === "-" ? {} : { displaystyle: style };
    const parts = [this.argument(), this.argument()];
    if (name.endsWith("binom")) return this.binomial(parts, attributes);
    const node = h("mfrac", {}, ...parts);
    return [style === "-" ? node : h("mstyle", attributes, node)];
  }

  binomial(parts, attributes) {
    const body = h("mfrac", { linethickness: "0" }, ...parts);
    return [h("mstyle", attributes, fence("(", "prefix"), body, fence(")", "postfix"))];
  }

  inFont(alphabet) {
    const before = this.alphabet;
    this.alphabet = alphabet;
    const node = this.argument();
    this.alphabet = before;
    return node;
  }

  /** Text, which may contain formulas between dollar signs. */
  text(name) {
    const parts = this.raw().split(/(?<!\\)\$/);
    const nodes = parts.map((part, i) => {
      if (i % 2) return rowOf(new TexReader(part, this.depth + 1).whole());
      const text = part
        .replace(/\\([^a-zA-Z])/g, "$1")
        .replace(/\\[a-zA-Z]+\s*|[{}]/g, "")
        .replace(/[\s~]+/g, "\u00a0");
      return h("mtext", name === "textbf" ? { class: "bold" } : {}, text);
    });
    return rowOf(nodes);
  }

  colored(read) {
    const color = this.raw().trim();
    const isColor = /^([a-zA-Z]{1,20}|#[\da-fA-F]{3,8})$/.test(color);
    return h("mstyle", isColor ? { mathcolor: color } : {}, ...read());
  }

  arrow(symbol) {
    const below = this.optional();
    const above = this.argument();
    const arrow = operator(symbol, { stretchy: "true" });
    const space = h("mspace", { width: "0.5em" });
    const padded = (node) => h("mrow", {}, space, node, space);
    return below
      ? h("munderover", {}, arrow, padded(below), padded(above))
      : h("mover", {}, arrow, padded(above));
  }

  /** The sign after \left, \middle, \right or \big; empty for a period. */
  delimiter() {
    const token = this.next();
    if (token === undefined) throw new TexError("a delimiter is missing");
    if (token === ".") return "";
    const name = token.replace(/^\\(?=.)/, "");
    if (token === "\\|") return "‖";
    const sign = FENCES.get(name) ?? OPERATORS.get(name);
    if (!sign) throw new TexError(`${token} is not a delimiter`);
    return sign;
  }

  fenced() {
    const ends = new Set(["\\right", "\\middle"]);
    const nodes = [fence(this.delimiter(), "prefix")];
    for (;;) {
      nodes.push(rowOf(this.row(ends)));
      const token = this.next();
      if (token === "\\middle") nodes.push(fence(this.delimiter(), "infix"));
      else if (token === "\\right") break;
      else throw new TexError("\\right is missing");
    }
    return h("mrow", {}, ...nodes, fence(this.delimiter(), "postfix"));
  }

  /** The rows of a table, each a list of cells, each a list of nodes. */
  cells(ends) {
    const cellEnds = new Set([...ends, "&", "\\\\", "\\cr", "\\newline"]);
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(this.row(cellEnds));
      const token = this.peek();
      if (token === "&") this.i++;
      else if (token === "\\\\" || token === "\\cr" || token === "\\newline") {
        this.i++;
        if (this.tokens[this.i] === "[") while (this.i < this.tokens.length && this.next() !== "]");
        rows.push([]);
      } else break;
    }
    if (rows.length > 1 && rows.at(-1).every((cell) => !cell.length)) rows.pop();
    return rows;
  }

  table(rows, align) {
    const cellOf = (nodes, i) => {
      const side = COLUMN_CLASSES[align[i % (align.length || 1)]];
      return h("mtd", side ? { class: side } : {}, ...nodes);
    };
    const attributes = align.startsWith("r") ? { class: "aligned", displaystyle: "true" } : {};
    return h("mtable", attributes, ...rows.map((cells) => h("mtr", {}, ...cells.map(cellOf))));
  }

  environment() {
    const name = this.raw();
    const known = name.replace(/\*$/, "");
    if (!Object.hasOwn(ENVIRONMENTS, known)) throw new TexError(`${name} is unknown`);
    const [open, close, columns] = ENVIRONMENTS[known];
    let align = columns;
    if (known === "array" || known === "subarray")
      align = this.raw().replace(/\{[^}]*\}|[^lcr]/g, "");
    if (known === "alignat" || known === "alignedat") this.raw();
    const rows = this.cells(new Set(["\\end"]));
    this.expect("\\end");
    if (this.raw() !== name) throw new TexError(`\\end{${name}} is missing`);
    const table = this.table(rows, align);
    if (!open && !close) return table;
    return h("mrow", {}, fence(open, "prefix"), table, fence(close, "postfix"));
  }
}

/** The nodes of a formula; of its source as code, if it is malformed or too long. */
function formulaNodes(tex, isDisplay) {
  try {
    if (tex.length > MAX_TEX) throw new TexError("the formula is too long");
    return [h("math", isDisplay ? { display: "block" } : {}, ...new TexReader(tex).whole())];
  } catch (error) {
    if (!(error instanceof TexError)) throw error;
    const mark = isDisplay ? "$$" : "$";
    return [h("code", { class: "tex" }, `${mark}${tex}${mark}`)];
  }
}

/** The tree of a formula, read when it is drawn. A long formula can be scrolled. */
function formula(tex, isDisplay, tag) {
  const isWide = isDisplay || tex.length > MAX_INLINE;
  const kind = isDisplay ? "wide formula" : "wide";
  const attributes = { class: kind, tabindex: "0", role: "group", "aria-label": "Formula" };
  let children = null;
  return {
    tag,
    attributes: isWide ? attributes : {},
    key: `${isDisplay} ${tex}`,
    get children() {
      children ??= formulaNodes(tex, isDisplay);
      return children;
    },
  };
}
