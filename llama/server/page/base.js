"use strict";
// Text of a model or a person becomes text nodes, never HTML; the Content-Security-Policy enforces it.

const $ = (id) => document.getElementById(id);
const on = (target, type, act) => target.addEventListener(type, act);
const onClick = (id, act) => on($(id), "click", act);
const NUM_LIKELIEST = 5; // alternatives shown for each token
const MAX_NATS = 8; // surprisal at the end of the heat map's scale
const HISTORY_SECONDS = 60; // width of the engine's lines
/** Inputs whose values last as long as the tab. */
const STORED_INPUTS = [
  "message",
  "key",
  "system",
  "temperature",
  "top_p",
  "max_tokens",
  "seed",
  "tools",
];

/** An error whose message is shown. field: id of the input at fault; status: of the answer. */
class Problem extends Error {
  constructor(message, field = null, status = null) {
    super(message);
    this.field = field;
    this.status = status;
  }
}

/** Make an element; properties that begin with "on" are listeners. */
function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) on(node, name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const button = (label, act, properties) =>
  make("button", { type: "button", onclick: act, ...properties }, label);

/** Show a message in a node, or hide the node if there is none. */
function setMessage(node, message) {
  node.textContent = message;
  node.hidden = !message;
}

const asWhole = (value) => value.toFixed(0);
const asRate = (value) => value.toFixed(value < 100 ? 1 : 0);
const hexOf = (bytes, between) =>
  Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join(between);
const seconds = () => performance.now() / 1000;

/** A message of the server as a sentence. */
const sentence = (text) => {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
};
