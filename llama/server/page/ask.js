/* ---- ask for an answer ---- */

/** A file with its name, in a fence that is longer than any fence in it. */
function fileText({ name, text }) {
  let fence = "```";
  for (const [run] of text.matchAll(/`{3,}/g)) if (run.length >= fence.length) fence = `${run}\``;
  return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** The messages that the server gets; the files of a question come before it, first its images. */
function requestMessages(messages) {
  const system = $("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  return [...first, ...messages.map(requestMessage).filter(Boolean)];
}

/** A message for the server; null if it is an answer without content. */
function requestMessage(message) {
  const { figures, reasoning, versions, files = [], ...sent } = plainMessage(message);
  if (sent.role === "assistant" && !sent.content && !sent.tool_calls) return null;
  if (sent.role === "tool") delete sent.name;
  if (!files.length) return sent;
  const images = files.filter((file) => file.image);
  const texts = [...files.filter((file) => !file.image).map(fileText), sent.content];
  const content = [
    ...images.map(({ image }) => ({ type: "image_url", image_url: { url: image } })),
    ...texts.filter(Boolean).map((text) => ({ type: "text", text })),
  ];
  return { ...sent, content };
}

/** A body without the files of its images, each of which is one token, whatever it shows. */
const withoutImages = (body) =>
  JSON.stringify(body, (key, value) =>
    key === "url" && DATA_URL.test(value) ? "data:image/png;base64," : value,
  );

const MIN_ANSWER = 1024; // tokens kept for an answer without a limit; a quarter of a small context
const SHARE_KEPT = 0.75; // of the context, once it is full: the next turns then drop nothing more

/** The fields of a request that the prompt is made of. */
function promptFields(messages, kept) {
  const fields = { messages: requestMessages(messages), tools: tools() };
  if (!kept) return fields;
  fields.messages.push({ role: "assistant", content: joined(kept) });
  return { ...fields, continue_final_message: true, add_generation_prompt: false };
}

/** Whether a prompt has at most `limit` tokens. */
async function fits(fields, limit, signal) {
  if (numBytes(withoutImages(fields)) < limit) return true; // A token has a byte at least.
  const body = withoutImages({ model: modelName ?? undefined, ...fields });
  try {
    const response = await ask("tokenize", { method: "POST", body, signal });
    return (await response.json()).count <= limit;
  } catch (error) {
    if (error.status === 404) return true; // a proxy without this route
    if (error.status === 413) return false;
    throw error;
  }
}

/** The index of the first message that the model gets. Once the context is full, the oldest turns are
 * left out; the last one is always sent. */
async function firstSent(owner, messages, kept, signal) {
  const start = Math.max(0, messages.indexOf(owner.start));
  if (!contextLength) return start;
  const reserved = number("max_tokens") ?? Math.min(MIN_ANSWER, contextLength / 4);
  const limit = Math.max(0, contextLength - reserved);
  const fitsFrom = (i, share) => fits(promptFields(messages.slice(i), kept), share * limit, signal);
  if (await fitsFrom(start, 1)) return start;
  const turns = messages.flatMap(({ role }, i) => (role === "user" && i > start ? [i] : []));
  let low = 0; // The turns before it do not fit.
  let high = turns.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await fitsFrom(turns[middle], SHARE_KEPT)) high = middle;
    else low = middle + 1;
  }
  return turns[low] ?? start;
}

/** Ask for the next message or, with `kept` pieces, for the rest of the last one. versions: of the
 * answer, if it is not the first one. */
async function answer(kept = null, versions = null) {
  stop();
  setMessage($("chat-problem"), "");
  const control = new AbortController();
  const owner = chat;
  const reply = new Reply(owner, kept ?? []);
  const messages = [...owner.messages];
  reply.versions = versions;
  owner.messages.push(reply);
  owner.running = control;
  owner.updated = Date.now();
  running.add(owner);
  showLog();
  if (kept?.some((piece) => piece.entries.length)) reply.showTokens(true);
  reply.node.setAttribute("aria-busy", "true");
  if (!$("composer").contains(document.activeElement)) reply.node.focus({ preventScroll: true });
  showRunning();
  reply.draw();
  follow(true);
  saveChat(owner);
  let note = "";
  try {
    const start = await firstSent(owner, messages, kept, control.signal);
    owner.start = start ? messages[start] : null;
    if (owner === chat) showLog();
    const body = {
      ...sampling(),
      ...promptFields(messages.slice(start), kept),
      max_tokens: number("max_tokens"),
      logprobs: true,
      top_logprobs: NUM_LIKELIEST,
    };
    let last = seconds();
    for await (const chunk of chunks("v1/chat/completions", body, control.signal)) {
      reply.take(chunk);
      if (seconds() - last < SAVE_S) continue;
      last = seconds();
      saveChat(owner);
    }
  } catch (error) {
    note = showError(error, reply.problem);
  }
  reply.end(note);
  if (owner.running === control) owner.running = null;
  if (!owner.running) running.delete(owner);
  owner.updated = Date.now();
  saveChat(owner);
  if (owner !== chat) return;
  showRunning();
  if (reply.problem.hidden) $("say").textContent = note || "The answer is complete.";
  follow();
}

function stop() {
  chat.running?.abort();
  chat.running = null;
  showRunning();
}

const showRunning = () => showStop(chat.running !== null, [$("send")], $("stop"), $("message"));

/** While something runs, the stop button replaces the buttons that start it. */
function showStop(isRunning, starts, stop, home) {
  const hadFocus = [...starts, stop].includes(document.activeElement);
  starts.forEach((each) => {
    each.hidden = isRunning;
  });
  stop.hidden = !isRunning;
  if (hadFocus) (isRunning ? stop : home).focus();
}

function send() {
  const content = $("message").value;
  if ((!content.trim() && !attached.length) || chat.running) return;
  const last = chat.messages.at(-1);
  const isAlone = (last?.versions?.tails.length ?? 1) < 2;
  if (last?.role === "assistant" && last.isEmpty && isAlone) chat.messages.pop();
  chat.title ||= (content.trim().split("\n")[0] || attached[0].name).slice(0, 60);
  chat.messages.push({ role: "user", content, files: attached });
  attached = [];
  showAttached();
  $("message").value = "";
  sessionStorage.removeItem("message");
  answer();
}

/** Ask for another version of an answer. */
function askAgain(message, kept = null) {
  stop();
  answer(kept, chat.fork(message));
}
