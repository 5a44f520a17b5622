/* ---- the list of chats ---- */

let heads = []; // stored chats without their messages, the latest first
let menuId = null; // the chat whose menu is open

let shownHeads = ""; // what the list shows, as JSON

async function showChats() {
  if (database) heads = await stored("readonly", (stores) => requested(stores.getAll()));
  heads.sort((a, b) => b.updated - a.updated);
  const now = JSON.stringify([
    heads.map(({ id, title }) => [id, title]),
    chat.id,
    [...running].map((other) => other.id),
  ]);
  if (now === shownHeads || $("chat-list").querySelector("input")) return; // unchanged, or a title is being edited
  shownHeads = now;
  const focused = document.activeElement?.dataset?.chat;
  $("chat-list").replaceChildren(...heads.map(chatRow));
  if (focused) titleOf(focused)?.focus();
  $("export-all").hidden = !heads.length;
}

const headOf = (id) => heads.find((head) => head.id === id);
const titleOf = (id) => $("chat-list").querySelector(`[data-chat="${id}"]`);

function chatRow({ id, title }) {
  const open = button(title, () => openChat(id), {
    className: "title",
    title,
    "data-chat": id,
  });
  if (id === chat.id) open.setAttribute("aria-current", "true");
  open.classList.toggle("busy", Boolean(inMemory(id)?.running));
  return make(
    "li",
    {},
    open,
    button("⋯", (event) => openMenu(id, event.currentTarget), {
      className: "more",
      "aria-label": `Rename, export or delete ${title}`,
    }),
  );
}

/** Show a chat that is in memory or stored or, without an id, a new one. */
async function openChat(id = null) {
  let next = id && inMemory(id);
  if (!next && id) {
    const found = await storedChat(id);
    if (found) next = Chat.from(found);
  }
  chat = next ?? new Chat();
  sessionStorage.setItem("chat", chat.id);
  setMessage($("chat-problem"), "");
  showDrawer(false);
  showTab("chat");
  showLog();
  showRunning();
  showChats();
  follow(true);
  if (isWide.matches) $("message").focus();
}

function openMenu(id, source) {
  menuId = id;
  const menu = $("menu");
  menu.showPopover();
  const box = source.getBoundingClientRect();
  menu.style.left = `${Math.min(box.left, innerWidth - menu.offsetWidth - 8)}px`;
  menu.style.top = `${Math.min(box.bottom + 4, innerHeight - menu.offsetHeight - 8)}px`;
  $("menu-rename").focus();
}

function rename(id) {
  const row = titleOf(id).parentNode;
  const { title } = headOf(id);
  let isEnded = false;
  const end = async (isKept) => {
    if (isEnded) return;
    isEnded = true;
    const name = field.value.trim();
    field.remove();
    shownHeads = "";
    if (isKept && name && name !== title) await setTitle(id, name);
    await showChats();
    titleOf(id)?.focus();
  };
  const field = make("input", {
    value: title,
    maxLength: 200,
    "aria-label": "Name of the chat",
    onblur: () => end(true),
    onkeydown: (event) => {
      if (event.key === "Enter") end(true);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      end(false);
    },
  });
  row.replaceChildren(field);
  field.select();
}

async function setTitle(id, title) {
  const known = inMemory(id);
  if (known) {
    known.title = title;
    return saveChat(known);
  }
  await stored("readwrite", async (stores) => {
    const head = await requested(stores.get(id));
    if (head) stores.put({ ...head, title, rev: newId() });
  });
  tabs.postMessage({ saved: id });
}

async function deleteChat(id) {
  const known = inMemory(id);
  const found = known ? { head: { ...known }, messages: known.toMessages() } : await storedChat(id);
  if (known) known.isDeleted = true;
  known?.running?.abort();
  await known?.saving;
  await stored("readwrite", (stores, bodies) =>
    Promise.all([requested(stores.delete(id)), requested(bodies.delete(id))]),
  );
  tabs.postMessage({ deleted: id });
  if (id === chat.id) await openChat();
  else await showChats();
  if (found) toast(`“${found.head.title}” was deleted.`, () => restore(found));
}

async function restore({ head, messages }) {
  await saveChat(Chat.from({ head: { ...head, rev: null }, messages }));
  await openChat(head.id);
}

let toastTimer = null;

function toast(text, undo = null) {
  clearTimeout(toastTimer);
  $("toast-text").textContent = text;
  $("toast-undo").hidden = !undo;
  $("toast-undo").onclick = () => {
    $("toast").hidden = true;
    undo();
  };
  $("toast").hidden = false;
  toastTimer = setTimeout(() => {
    $("toast").hidden = true;
  }, 12_000);
}

const isWide = matchMedia("(min-width: 56rem)");

function showDrawer(isShown) {
  const isOpen = isShown && !isWide.matches;
  document.body.classList.toggle("drawer", isOpen);
  for (const name of ["header", "main"]) document.querySelector(name).inert = isOpen;
  const isListed = isWide.matches ? document.body.classList.contains("listed") : isOpen;
  $("chats-button").setAttribute("aria-expanded", isListed);
  if (isOpen) $("new-chat").focus();
}

function toggleChats() {
  if (isWide.matches) document.body.classList.toggle("listed");
  showDrawer(true);
}

/** React to a message of another tab. */
async function onTabMessage({ data: { saved, deleted, isRunning } }) {
  const isIdle = (id) => id === chat.id && !chat.running && !chat.saving && !$("edited");
  if (isIdle(deleted)) return openChat();
  const found = isIdle(saved) && !isRunning && (await storedChat(saved));
  if (found && isIdle(saved) && found.head.rev !== chat.rev) {
    chat = Chat.from(found);
    showLog();
  }
  showChats();
}
