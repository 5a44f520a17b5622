/* ---- a chat and its messages ---- */

/** A chat in memory. running: the AbortController of the answer that streams. rev: revision of the
stored chat, by which a tab notices that another one has written it. */
class Chat {
  constructor({ id = newId(), title = "", updated = Date.now(), rev = null } = {}) {
    this.id = id;
    this.title = title;
    this.updated = updated;
    this.rev = rev;
    this.messages = []; // OpenAI's messages with their files; those of the model are Replies
    this.running = null;
  }

  static from({ head, messages }) {
    const chat = new Chat(head);
    chat.messages = messages.map((message) => readMessage(chat, message));
    const last = chat.messages.at(-1);
    if (last?.calls?.length) last.callBox.append(resultForm(last));
    return chat;
  }

  toMessages() {
    return this.messages.map((message) => {
      if (message instanceof Reply) return message.toMessage();
      const { node, ...plain } = message;
      return plain;
    });
  }
}

/** Check a stored message, or one of an imported file, which may contain anything. */
function readMessage(chat, given) {
  const text = (value = "") => {
    if (typeof value === "string") return value;
    throw new TypeError("a text is not a string");
  };
  const { role } = given;
  const content = text(given.content ?? "");
  if (role === "user") {
    const files = (given.files ?? []).map((file) => ({
      name: text(file.name),
      text: text(file.text),
    }));
    return { role, content, files };
  }
  if (role === "tool")
    return { role, content, tool_call_id: text(given.tool_call_id), name: text(given.name) };
  if (role !== "assistant") throw new TypeError("a message has an unknown role");
  const reply = new Reply(chat, [{ text: content, entries: [] }]);
  reply.calls = (given.tool_calls ?? []).map(({ id, function: call }) => ({
    id: text(id),
    type: "function",
    function: { name: text(call.name), arguments: text(call.arguments) },
  }));
  reply.texts = (given.figures ?? []).map(text);
  reply.finish();
  return reply;
}

let chat = new Chat(); // the shown chat
const running = new Set(); // chats whose answer streams, shown or not

/** A chat that is in memory; undefined if it is only stored. */
const inMemory = (id) => [chat, ...running].find((other) => other.id === id);

/** An answer, shown as Markdown or as tokens with their probabilities. */
class Reply {
  constructor(owner, kept = []) {
    this.view = make("div", { className: "markdown" });
    this.role = "assistant";
    this.chat = owner;
    this.content = "";
    this.calls = [];
    this.pieces = []; // the content as pieces
    this.tokens = null; // TokenText, while the tokens are shown
    this.texts = []; // figures, once the answer is complete
    this.figures = new Figures();
    this.join = joiner();
    this.waiting = []; // pieces whose text has not arrived yet
    this.rest = ""; // text whose pieces have not arrived yet
    this.nextDraw = 0; // time before which nothing is drawn, in seconds
    this.markdown = new Markdown(this.view);
    this.body = make("div", { className: "answer" }, this.view);
    this.callBox = make("div");
    this.problem = make("p", { className: "problem", role: "alert", hidden: true });
    this.foot = make("span", { className: "figures" });
    kept.forEach((piece) => this.push(piece));
    this.content = joined(kept);
  }

  toMessage() {
    const message = { role: "assistant", content: this.content, figures: this.texts };
    return this.calls.length
      ? { ...message, content: this.content || null, tool_calls: this.calls }
      : message;
  }

  get isEmpty() {
    return !this.content && !this.calls.length;
  }

  /** Update the button that shows the tokens. */
  showToggle() {
    const toggle = this.node?.querySelector("[data-action=tokens]");
    if (!toggle) return;
    toggle.hidden = !this.isScored;
    toggle.setAttribute("aria-pressed", this.tokens !== null);
  }

  get isScored() {
    return this.pieces.some((piece) => piece.entries.length);
  }

  take(chunk) {
    const choice = chunk.choices[0];
    const entries = (choice?.logprobs?.content ?? []).map(chatEntry);
    const { content, tool_calls: calls = [] } = choice?.delta ?? {};
    this.figures.take(chunk, content || calls.length || entries.length);
    if (!choice) return;
    this.waiting.push(...entries.flatMap(this.join));
    this.rest += content ?? "";
    this.content += content ?? "";
    this.matchTokens();
    calls.forEach((part) => this.takeCall(part));
    this.reason = choice.finish_reason ?? this.reason;
    this.drawSoon();
  }

  /** Match the text that has arrived with its tokens. Special tokens, and those of tool calls, have
  log-probabilities but no text. */
  matchTokens() {
    while (this.rest && this.waiting.length) {
      const piece = this.waiting[0];
      if (this.rest.startsWith(piece.text)) {
        this.rest = this.rest.slice(piece.text.length);
        this.push(this.waiting.shift());
      } else if (isSpecial(piece.entries[0])) this.waiting.shift();
      else if (piece.text.startsWith(this.rest)) return;
      else return this.flushText();
    }
  }

  /** Add the text that has no tokens. */
  flushText() {
    if (this.rest) this.push({ text: this.rest, entries: [] });
    this.rest = "";
    this.waiting = [];
  }

  push(piece) {
    this.pieces.push(piece);
    this.tokens?.push(piece);
  }

  takeCall(part) {
    const call = (this.calls[part.index] ??= {
      id: "",
      type: "function",
      function: { name: "", arguments: "" },
    });
    call.id = part.id ?? call.id;
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }

  /** Draw at the next frame; drawing takes at most a quarter of the time. */
  drawSoon() {
    if (seconds() > this.nextDraw) this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw(isDone = false) {
    const began = seconds();
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.markdown.show(this.content, !isDone);
    this.body.classList.toggle("waiting", !isDone && this.isEmpty);
    this.callBox.replaceChildren(
      ...this.calls.map((each) =>
        make(
          "div",
          { className: "call code" },
          make("h2", {}, `Calls ${each.function.name}`),
          make("pre", {}, each.function.arguments),
        ),
      ),
    );
    if (this.chat === chat) follow();
    this.nextDraw = seconds() + 3 * (seconds() - began);
  }

  finish() {
    this.flushText();
    this.draw(true);
    this.foot.replaceChildren(...asSpans(this.texts));
    this.node?.removeAttribute("aria-busy");
    this.node?.classList.add("done");
    this.showToggle();
  }

  end(note) {
    const last = note || ENDS[this.reason];
    this.texts = [...this.figures.texts(), ...(last ? [last] : [])];
    this.finish();
    const isWhole = !note && this.problem.hidden;
    if (this.calls.length && isWhole) this.callBox.append(resultForm(this));
  }

  showTokens(isShown) {
    closeChoices();
    this.tokens = null;
    if (isShown) {
      this.tokens = new TokenText("Answer", (before, piece) => askAgain(this, [...before, piece]));
      this.pieces.forEach((piece) => this.tokens.push(piece));
    }
    this.body.replaceChildren(this.tokens?.node ?? this.view);
    this.showToggle();
  }
}

const labelled = (label, properties) =>
  make(
    "div",
    {},
    make("label", { htmlFor: properties.id }, label),
    make("textarea", { rows: 2, ...properties }),
  );

/** A form with a field for the result of each call, which is sent to the model. */
function resultForm(reply) {
  const { messages } = reply.chat;
  const fields = reply.calls.map((call, i) => {
    const id = `result-${messages.length}-${i}`;
    return labelled(`Result of ${call.function.name}`, { id, className: "code" });
  });
  return make(
    "form",
    {
      className: "results",
      onsubmit: (event) => {
        event.preventDefault();
        event.target.remove();
        messages.length = messages.indexOf(reply) + 1;
        reply.calls.forEach((call, i) =>
          messages.push({
            role: "tool",
            tool_call_id: call.id,
            name: call.function.name,
            content: fields[i].querySelector("textarea").value,
          }),
        );
        answer();
      },
    },
    ...fields,
    make("button", { className: "main" }, "Send the result"),
  );
}

/** A file with its name, in a fence that is longer than any fence in it. */
function fileText({ name, text }) {
  let fence = "```";
  for (const [run] of text.matchAll(/`{3,}/g)) if (run.length >= fence.length) fence = `${run}\``;
  return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** The messages that the server gets; the files of a question come before it, as text. */
function requestMessages(messages) {
  const system = $("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  const others = messages.map(({ figures, files = [], ...message }) => {
    if (message.role === "tool") delete message.name;
    if (!files.length) return message;
    const parts = [...files.map(fileText), message.content].filter(Boolean);
    return { ...message, content: parts.map((text) => ({ type: "text", text })) };
  });
  return [...first, ...others];
}

/** Ask for the next message or, with `kept` pieces, for the rest of the last one. */
async function answer(kept = null) {
  stop();
  setMessage($("chat-problem"), "");
  const control = new AbortController();
  const owner = chat;
  const reply = new Reply(owner, kept ?? []);
  const sent = requestMessages(owner.toMessages());
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
    const body = {
      ...sampling(),
      messages: sent,
      max_tokens: number("max_tokens"),
      tools: tools(),
      logprobs: true,
      top_logprobs: NUM_LIKELIEST,
    };
    if (kept) {
      sent.push({ role: "assistant", content: reply.content });
      Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    }
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
  if (last?.role === "assistant" && last.isEmpty) chat.messages.pop();
  chat.title ||= (content.trim().split("\n")[0] || attached[0].name).slice(0, 60);
  chat.messages.push({ role: "user", content, files: attached });
  attached = [];
  showAttached();
  $("message").value = "";
  sessionStorage.removeItem("message");
  answer();
}

/** Ask again from a message on, which is dropped with all that follows it. */
function askAgain(message, kept = null) {
  stop();
  chat.messages.length = chat.messages.indexOf(message);
  answer(kept);
}

/** Show a message as a form. */
function edit(message) {
  const isAnswer = message.role === "assistant";
  const label = isAnswer
    ? "Edit, and let the model continue from here"
    : "Edit, and ask again from here";
  const cancel = (event) => {
    event.stopPropagation();
    show(message);
    message.node.querySelector("[data-action=edit]").focus();
  };
  const save = (event) => {
    event.preventDefault();
    if (isAnswer) return askAgain(message, [{ text: $("edited").value, entries: [] }]);
    stop();
    chat.messages.length = chat.messages.indexOf(message) + 1;
    message.content = $("edited").value;
    show(message);
    answer();
  };
  $("edited")?.closest("form").querySelector("[type=button]").click(); // Only one message is edited at a time.
  closeChoices();
  message.node.replaceChildren(
    make(
      "form",
      {
        className: "results",
        onsubmit: save,
        onkeydown: (event) => event.key === "Escape" && cancel(event),
      },
      labelled(label, { id: "edited", value: message.content }),
      make(
        "div",
        { className: "row" },
        make("button", { className: "main" }, "Save and send"),
        button("Cancel", cancel),
      ),
    ),
  );
  $("edited").focus();
}

const SPEAKERS = {
  user: () => "You",
  assistant: () => "Model",
  tool: (m) => `Result of ${m.name}`,
};

/** Show a message with its buttons. */
function show(message) {
  const isAnswer = message.role === "assistant";
  const speaker = SPEAKERS[message.role](message);
  const action = (name, label, act) =>
    button(label, (event) => act(message, event.currentTarget), {
      className: "quiet",
      "data-action": name,
    });
  const actions = make("div", { className: "actions" });
  actions.append(action("copy", "Copy", (m, source) => copy(m.content, source)));
  if (isAnswer) actions.append(action("retry", "Retry", (m) => askAgain(m)));
  if (!message.calls?.length) actions.append(action("edit", "Edit", edit));
  if (isAnswer) {
    actions.append(
      action("tokens", "Tokens", (m) => m.showTokens(!m.tokens)),
      message.foot,
    );
  }
  const parts = isAnswer
    ? [message.body, message.callBox, message.problem]
    : [
        ...(message.files?.length ? [fileList(message.files)] : []),
        make(
          "div",
          { className: `text ${message.role === "tool" ? "code" : ""}` },
          message.content,
        ),
      ];
  message.node ??= make("article", {
    className: isAnswer && chat.running === null ? "assistant done" : message.role,
    tabIndex: -1,
    "aria-label": speaker,
  });
  message.node.replaceChildren(
    make("h2", { className: message.role === "tool" ? "" : "unseen" }, speaker),
    ...parts,
    actions,
  );
  if (isAnswer) message.showToggle();
}

/** Show the messages of the chat; each has a node that is made once. */
function showLog() {
  closeChoices();
  hideTip();
  chat.messages.forEach((message) => message.node ?? show(message));
  $("hint").hidden = chat.messages.length > 0;
  const wanted = [$("hint"), ...chat.messages.map((message) => message.node)];
  for (const node of [...$("log").children]) if (!wanted.includes(node)) node.remove();
  wanted.forEach((node, i) => {
    if ($("log").children[i] !== node) $("log").insertBefore(node, $("log").children[i] ?? null);
  });
}

async function copy(text, source) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // It does not exist over plain HTTP from another machine.
    const field = make("textarea", { className: "unseen", value: text });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    source.focus();
  }
  source.textContent = "Copied";
  $("say").textContent = "Copied";
  setTimeout(() => {
    source.textContent = "Copy";
  }, 1500);
}
