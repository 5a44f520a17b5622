/* ---- the server ---- */

/** State of the server and message, by what is wrong with the API key. */
const KEY_ERRORS = {
  missing: ["API key required", "The server requires an API key. Enter it in the settings."],
  rejected: ["API key rejected", "The server rejected this API key. Correct it in the settings."],
  malformed: [
    "API key malformed",
    "An API key consists of ASCII characters without spaces. Correct it in the settings.",
  ],
};

/** A problem with the API key, which the header and the settings show too. */
class KeyProblem extends Problem {
  constructor([state, message]) {
    super(message, "key");
    this.state = state;
  }
}

/** Send a request; throw a Problem if it fails. */
async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  const key = $("key").value.trim();
  if (/[^\x21-\x7e]/.test(key)) throw new KeyProblem(KEY_ERRORS.malformed);
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    watch();
    throw new Problem(
      "The server does not answer. Check that it is still running, then try again.",
    );
  }
  if (response.ok) return response;
  throw await refusal(response, key);
}

/** The Problem that a response with an error status stands for. */
async function refusal(response, key) {
  if (response.status === 401) {
    return new KeyProblem(key ? KEY_ERRORS.rejected : KEY_ERRORS.missing);
  }
  let message = `the server answered with status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    /* not JSON: a proxy answered */
  }
  if (response.status === 503) {
    watch();
    const seconds = response.headers.get("Retry-After");
    message = `The server cannot accept this request now: ${message}${seconds ? ` in ${seconds} s` : ""}`;
  }
  return new Problem(sentence(message), null, response.status);
}

/** Yield the chunks of a stream of server-sent events, until [DONE]. */
async function* chunks(path, body, signal) {
  const response = await ask(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue; // a comment that keeps the connection open
        const data = event.slice(6);
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Problem(sentence(chunk.error.message));
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof Problem || error.name === "AbortError") throw error;
    console.error(error);
  } finally {
    reader.cancel().catch(() => {});
  }
  watch();
  throw new Problem("The connection broke before the end of the answer. Try again.");
}

const STATES = {
  ready: "Ready",
  loading: "Loading the model",
  draining: "Shutting down",
  broken: "Broken",
};
let modelName = null;
let contextLength = null; // in tokens
let watching = false;

/** Poll the state until the server is ready, then ask for the model's name. */
async function watch() {
  if (watching) return;
  watching = true;
  for (;;) {
    let state = "gone";
    try {
      state = (await (await fetch("ready", { cache: "no-store" })).json()).status;
    } catch {
      /* no answer, or one of a proxy */
    }
    showState(
      STATES[state] ?? "No answer",
      state === "ready" ? "ready" : state === "loading" ? "" : "wrong",
    );
    if (state === "ready") break;
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
  watching = false;
  try {
    const [model] = (await (await ask("v1/models")).json()).data;
    modelName = model.id;
    contextLength = model.max_model_len ?? null;
    $("model").textContent = modelName;
    document.title = modelName;
    setMessage($("key-problem"), "");
  } catch (error) {
    if (error instanceof KeyProblem) showKeyProblem(error);
  }
}

function showKeyProblem({ state, message }) {
  showState(state, "wrong");
  setMessage($("key-problem"), message);
  showField("key");
}

function showState(text, kind) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = kind;
}

/* ---- settings ---- */

function showSettings(shown) {
  $("settings").hidden = !shown;
  $("settings-button").setAttribute("aria-expanded", shown);
}

/** Focus an input, and open the settings if it is there. */
function showField(id) {
  if ($("settings").contains($(id))) showSettings(true);
  $(id).focus();
}

/** The value of a number input; undefined if it is empty. */
function number(id) {
  const input = $(id);
  const label = document.querySelector(`label[for=${id}]`).textContent;
  if (!input.validity.valid) {
    const range = [input.min && `from ${input.min}`, input.max && `up to ${input.max}`];
    const kind = input.step === "any" ? "a number" : "a whole number";
    throw new Problem(`${label} must be ${[kind, ...range.filter(Boolean)].join(" ")}.`, id);
  }
  return input.value === "" ? undefined : Number(input.value);
}

/** The tools of the settings; undefined if there are none. */
function tools() {
  const text = $("tools").value.trim();
  if (!text) return undefined;
  try {
    const given = JSON.parse(text);
    return Array.isArray(given) ? given : [given];
  } catch (error) {
    throw new Problem(`The tools are not valid JSON: ${error.message}.`, "tools");
  }
}

/** The fields that all requests for text have. */
const sampling = () => ({
  model: modelName ?? undefined,
  temperature: number("temperature"),
  top_p: number("top_p"),
  seed: number("seed"),
  stream: true,
  stream_options: { include_usage: true },
});
