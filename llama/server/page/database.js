/* ---- chats in the browser's database ---- */

const SAVE_S = 0.7; // least time between two saves of an answer that streams
const tabs = new BroadcastChannel("llama chats"); // other tabs of this page
let database = null; // null if the browser refuses; chats then last as long as the tab

const newId = () => hexOf(crypto.getRandomValues(new Uint8Array(12)), "");
// The stores hold {id, title, updated, rev} and {id, messages}.
const STORES = ["heads", "bodies"];
/** The result of a request to the database. */
const requested = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

function openDatabase() {
  const request = indexedDB.open("llama chats", 1);
  request.onupgradeneeded = () =>
    STORES.forEach((name) => request.result.createObjectStore(name, { keyPath: "id" }));
  return requested(request);
}

/** Run `work` on the two stores, and wait until the transaction is complete. */
async function stored(mode, work) {
  const transaction = database.transaction(STORES, mode);
  const ended = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () =>
      reject(transaction.error ?? new Error("the transaction was aborted"));
  });
  const stores = STORES.map((name) => transaction.objectStore(name));
  return (await Promise.all([work(...stores), ended]))[0];
}

/** A stored chat, as {head, messages}; null if another tab has deleted it. */
async function storedChat(id) {
  const [head, body] = await stored("readonly", (heads, bodies) =>
    Promise.all([requested(heads.get(id)), requested(bodies.get(id))]),
  );
  return head && body ? { head, messages: body.messages } : null;
}

/** Write a chat. If another tab has written it meanwhile, this one becomes a copy. */
async function writeChat(owner) {
  const rev = newId();
  await stored("readwrite", async (stores, bodies) => {
    const before = await requested(stores.get(owner.id));
    if (before && before.rev !== owner.rev) {
      owner.id = newId();
      owner.title += " (copy)";
    }
    const { id, title, updated } = owner;
    stores.put({ id, title, updated, rev });
    bodies.put({ id, messages: owner.toMessages() });
  });
  owner.rev = rev;
  if (owner === chat) sessionStorage.setItem("chat", owner.id);
  tabs.postMessage({ saved: owner.id, isRunning: owner.running !== null });
}

/** Save a chat as it is now. Of several calls during a write, only the last one has an effect. */
function saveChat(owner) {
  owner.isChanged = true;
  owner.saving ??= (async () => {
    while (owner.isChanged && database && !owner.isDeleted) {
      owner.isChanged = false;
      try {
        await writeChat(owner);
      } catch (error) {
        const isFull = error.name === "QuotaExceededError";
        setMessage(
          $("chat-problem"),
          isFull
            ? "This browser has no space left for chats: this one is lost when the tab is closed. Delete others."
            : `This browser could not store the chat: ${error.message}.`,
        );
      }
    }
    owner.saving = null;
    await showChats();
  })();
  return owner.saving;
}
