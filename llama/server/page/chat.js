/* ---- a chat and its messages ---- */

/** A chat in memory. running: the AbortController of the answer that streams. rev: revision of the
 * stored chat, by which a tab notices that another one has written it. start: the first message that
 * the model gets; null while it gets all of them.
 *
 * A message that was edited or asked again has versions, {tails, index}: each tail is the message of
 * that version with all that followed it, and null at `index`, where the version is in the chat. */
class Chat {
  constructor({ id = newId(), title = "", updated = Date.now(), rev = null } = {}) {
    this.id = id;
    this.title = title;
    this.updated = updated;
    this.rev = rev;
    this.messages = []; // OpenAI's messages with their files; those of the model are Replies
    this.running = null;
    this.start = null;
  }

  static from({ head, messages }) {
    const chat = new Chat(head);
    chat.messages = readMessages(chat, messages);
    return chat;
  }

  toMessages() {
    return this.messages.map(plainMessage);
  }

  /** Take a message and what follows it out of the chat; return its versions, which keep both unless
   * the message is an empty answer. */
  setAside(message) {
    const versions = message.versions ?? { tails: [null], index: 0 };
    const tail = this.messages.splice(this.messages.indexOf(message));
    message.versions = null;
    if (message.isEmpty) versions.tails.splice(versions.index, 1);
    else versions.tails[versions.index] = tail;
    return versions;
  }

  /** Set a message aside for a new version; return the versions for that. */
  fork(message) {
    const versions = this.setAside(message);
    versions.index = versions.tails.push(null) - 1;
    return versions;
  }

  /** Show another version of a message: the one before it (-1) or after it (1). Return its message. */
  turn(message, step) {
    const tail = message.versions.tails[message.versions.index + step];
    const versions = this.setAside(message);
    versions.index = versions.tails.indexOf(tail);
    versions.tails[versions.index] = null;
    tail[0].versions = versions;
    this.messages.push(...tail);
    return tail[0];
  }
}

/** A message as it is stored. */
function plainMessage(message) {
  const { node, versions, ...others } = message instanceof Reply ? message.toMessage() : message;
  const known = message.versions;
  if (!known || known.tails.length < 2) return others;
  const tails = known.tails.map((tail) => tail && tail.map(plainMessage));
  return { ...others, versions: { index: known.index, tails } };
}

/** Check stored messages, or those of an imported file, which may contain anything. */
function readMessages(chat, given) {
  const messages = given.map((each) => readMessage(chat, each));
  const last = messages.at(-1);
  if (last?.calls?.length) last.callBox.append(resultForm(last));
  return messages;
}

function readMessage(chat, given) {
  const message = readContent(chat, given);
  if (given.versions === undefined) return message;
  const { index, tails } = given.versions;
  const isTail = (tail, i) => (i === index ? tail === null : Array.isArray(tail) && tail.length);
  if (!Array.isArray(tails) || tails[index] !== null || !tails.every(isTail))
    throw new TypeError("the versions of a message are malformed");
  const read = tails.map((tail) => tail && readMessages(chat, tail));
  message.versions = { index, tails: read };
  return message;
}

function readContent(chat, given) {
  const text = (value = "") => {
    if (typeof value === "string") return value;
    throw new TypeError("a text is not a string");
  };
  const { role } = given;
  const content = text(given.content ?? "");
  if (role === "user") {
    const files = (given.files ?? []).map((file) => {
      if (file.image === undefined) return { name: text(file.name), text: text(file.text) };
      if (!DATA_URL.test(text(file.image))) throw new TypeError("an image is no data: URL");
      return { name: text(file.name), image: file.image };
    });
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
  reply.reasoning = text(given.reasoning);
  reply.isDone = true; // It is drawn when it is shown.
  return reply;
}

let chat = new Chat(); // the shown chat
const running = new Set(); // chats whose answer streams, shown or not

/** A chat that is in memory; undefined if it is only stored. */
const inMemory = (id) => [chat, ...running].find((other) => other.id === id);
