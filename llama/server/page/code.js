/* ---- colors of code ---- */

const MAX_COLORED = 100_000; // characters; longer code has no colors
const MAX_PARTS = 10_000; // parts with and without colors; what follows has none
const wordsOf = (text) => new Set(text.trim().split(/\s+/));

// Each part ends at the end of the text at the latest, so that a text that is cut off takes linear time.
const DOUBLE = String.raw`"(?:\\[^]|[^"\\\n])*"?`;
const SINGLE = String.raw`'(?:\\[^]|[^'\\\n])*'?`;
const BACKTICKS = "`(?:\\\\[^]|[^`\\\\])*`?";
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;
const HASH = String.raw`(?<!\S)#[^\n]*`;
const TRIPLE = String.raw`[rbfuRBFU]{0,2}(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${DOUBLE}|${SINGLE})`;
const NUMBER = String.raw`\b\d(?:[\w.]|(?<=[eE])[-+](?=\d))*`;
const WORD = String.raw`[\p{L}_$][\p{L}\p{N}_$]*`;

const C_WORDS = `break case catch class const continue default delete do else enum extends false finally for
  goto if import in instanceof interface new null package private protected public return static struct
  super switch this throw true try typedef union void volatile while`;
const JS_WORDS = `${C_WORDS} as async await constructor debugger declare export from function get implements let
  namespace of readonly set type typeof undefined var with yield keyof satisfies`;
const CPP_WORDS = `${C_WORDS} alignas auto bool char concept constexpr decltype double explicit extern final float
  friend inline int long mutable namespace noexcept nullptr operator override register requires short signed
  sizeof static_cast template typename unsigned using virtual size_t`;
const JAVA_WORDS = `${C_WORDS} abstract assert boolean byte char double final float int long record sealed short
  synchronized throws transient var yield abstract async await base bool decimal delegate event get set
  internal is lock namespace object out override params readonly ref sealed string using virtual where fun val
  when companion data object open suspend func guard let protocol extension self nil init init`;
const GO_WORDS = `any bool break byte case chan const continue default defer else error fallthrough false float32
  float64 for func go goto if import int int32 int64 interface map nil package range return rune select string
  struct switch true type uint8 uint32 uint64 var`;
const RUST_WORDS = `as async await bool break char const continue crate dyn else enum extern f32 f64 false fn for i32
  i64 if impl in let loop match mod move mut pub ref return self Self static str String struct super trait true
  type u8 u32 u64 unsafe use usize where while`;
const PYTHON_WORDS = `and as assert async await break case class continue def del elif else except False finally for
  from global if import in is lambda match None nonlocal not or pass raise return self True try while with yield`;
const SHELL_WORDS = `case do done elif else esac export fi for function if in local return set then unset until while
  cd echo exit source sudo`;
const RUBY_WORDS = `alias and begin break case class def defined do else elsif end ensure false for if in module next
  nil not or redo rescue retry return self super then true undef unless until when while yield require local
  function repeat library`;
const SQL_WORDS = `add all alter and as asc avg begin between by case check column commit count create cross database
  default delete desc distinct drop else end exists foreign from full group having if in index inner insert into
  is join key left like limit max min not null offset on or order outer over partition primary references right
  rollback select set sum table then union unique update using values view when where with`;
const PHP_WORDS = `${C_WORDS} abstract and array as echo elseif endforeach endif fn foreach function global include
  isset list match namespace or require trait use var yield`;

/** A grammar: comments, strings, words, and other patterns by their class, which come first. */
function grammar(comment, string, words, others = {}, isCaseSensitive = true) {
  const parts = { ...others };
  if (comment) parts.comment = comment;
  if (string) parts.string = string;
  parts.number ??= NUMBER;
  parts.word ??= WORD;
  const sources = Object.entries(parts).map(([kind, source]) => `(?<${kind}>${source})`);
  return { pattern: new RegExp(sources.join("|"), "gu"), words: wordsOf(words), isCaseSensitive };
}

const JSON_KEY = String.raw`"(?:\\[^]|[^"\\\n])*"(?=\s{0,20}:)`;
const LINE_KEY = String.raw`(?<![^\n])[ \t\-]*[\p{L}_"'][\p{L}\p{N}_."'\-]*(?=[ \t]{0,20}[:=])|(?<![^\n])\[[^\n]*`;
/** Grammars by the names of their languages. */
const GRAMMARS = {
  "js jsx ts tsx javascript typescript mjs node": () =>
    grammar(SLASHES, `${DOUBLE}|${SINGLE}|${BACKTICKS}`, JS_WORDS),
  "c h cpp c++ cc cxx hpp cuda cu objc glsl arduino": () =>
    grammar(SLASHES, `${DOUBLE}|${SINGLE}`, CPP_WORDS, {
      keyword: String.raw`(?<![^\n])[ \t]*#[ \t]*\w+`,
    }),
  "java kotlin kt swift cs csharp c# scala dart groovy": () =>
    grammar(SLASHES, `${DOUBLE}|${SINGLE}`, JAVA_WORDS, { keyword: String.raw`@\p{L}+` }),
  "go golang": () => grammar(SLASHES, `${DOUBLE}|${SINGLE}|${BACKTICKS}`, GO_WORDS),
  "rust rs": () =>
    grammar(SLASHES, String.raw`${DOUBLE}|'(?:\\[^'\n]{1,10}|[^'\\\n])'`, RUST_WORDS),
  "python py python3 ipython pycon": () =>
    grammar(String.raw`#[^\n]*`, TRIPLE, PYTHON_WORDS, {
      keyword: String.raw`(?<![^\n])[ \t]*@[\w.]+`,
    }),
  "bash sh shell zsh console shell-session dockerfile makefile make docker": () =>
    grammar(HASH, `${DOUBLE}|${SINGLE}`, SHELL_WORDS, {
      name: String.raw`\$(?:\w+|\{[^}\n]*\}?|[?@#*!$])`,
    }),
  "ruby rb lua julia jl r elixir perl": () =>
    grammar(String.raw`${HASH}|--[^\n]*`, `${DOUBLE}|${SINGLE}`, RUBY_WORDS),
  "sql mysql postgresql postgres sqlite": () =>
    grammar(String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|$)`, `${DOUBLE}|${SINGLE}`, SQL_WORDS, {}, false),
  php: () =>
    grammar(String.raw`${SLASHES}|${HASH}`, `${DOUBLE}|${SINGLE}`, PHP_WORDS, {
      name: String.raw`\$\w+`,
    }),
  "json jsonc json5 jsonl": () => grammar(SLASHES, DOUBLE, "true false null", { name: JSON_KEY }),
  "yaml yml toml ini properties": () =>
    grammar(HASH, `${DOUBLE}|${SINGLE}`, "true false null yes no on off", { name: LINE_KEY }),
  "html xml svg vue xhtml": () =>
    grammar("<!--[^]*?(?:-->|$)", `(?<==)(?:${DOUBLE}|${SINGLE})`, "", {
      keyword: String.raw`<[\/!?]?[\p{L}][\w:.\-]*|\/?>`,
      name: String.raw`(?<![\w:.\-])[\p{L}_:@][\w:.\-]*(?==)`,
    }),
  "css scss less": () =>
    grammar(SLASHES.replace("\\/\\/[^\\n]*|", ""), `${DOUBLE}|${SINGLE}`, "important", {
      keyword: String.raw`@[\w\-]+`,
      name: String.raw`(?<![\w\-])[\w\-]+(?=:[ \t])`,
      number: String.raw`#[\da-fA-F]{3,8}\b|\b\d[\w.%]*`,
    }),
  "diff patch": () =>
    grammar(String.raw`(?<![^\n])@@[^\n]*`, String.raw`(?<![^\n])\+[^\n]*`, "", {
      number: String.raw`(?<![^\n])-[^\n]*`,
      word: "(?!)",
    }),
};
const grammars = new Map();

/** The grammar of a language; undefined if there is none. */
function grammarOf(language) {
  if (!grammars.has(language)) {
    const names = Object.keys(GRAMMARS).find((each) => each.split(" ").includes(language));
    grammars.set(language, names && GRAMMARS[names]());
  }
  return grammars.get(language);
}

/** The class of a word of code; empty if it has no color. */
function classOfWord(word, next, { words, isCaseSensitive }) {
  if (words.has(isCaseSensitive ? word : word.toLowerCase())) return "keyword";
  return next === "(" ? "name" : "";
}

/** Code as trees: colored parts, and text between them. */
function coloredCode(code, language) {
  const known = code.length <= MAX_COLORED && grammarOf(language.toLowerCase());
  if (!known) return code ? [code] : [];
  const nodes = [];
  let end = 0;
  for (const { 0: text, index, groups } of code.matchAll(known.pattern)) {
    const [kind] = Object.entries(groups).find(([, value]) => value !== undefined);
    const next = code[index + text.length];
    const name = kind === "word" ? classOfWord(text, next, known) : kind;
    if (!name) continue;
    if (nodes.length > MAX_PARTS) break;
    if (index > end) nodes.push(code.slice(end, index));
    nodes.push(h("span", { class: `code-${name}` }, text));
    end = index + text.length;
  }
  if (end < code.length) nodes.push(code.slice(end));
  return nodes;
}
