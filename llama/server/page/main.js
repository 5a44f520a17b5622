/* ---- views, keys, start ---- */

const TABS = ["chat", "completion", "engine"];

function showTab(name, hasFocus = false) {
  if (!$("chat").hidden) chatTop = root.scrollTop;
  closeChoices();
  hideTip();
  for (const each of TABS) {
    const isShown = each === name;
    $(each).hidden = !isShown;
    const tab = $(`tab-${each}`);
    tab.setAttribute("aria-selected", isShown);
    tab.tabIndex = isShown ? 0 : -1;
    if (isShown && hasFocus) tab.focus();
  }
  // This is not the id of an element, because the Tab key would then start there.
  history.replaceState(null, "", `#view-${name}`);
  setPolling();
  root.scrollTop = name === "chat" ? chatTop : 0;
  follow();
}

const onSubmit = (id, act) =>
  on($(id), "submit", (event) => {
    event.preventDefault();
    act();
  });

/** Let a button open the file chooser of an input. */
function onFiles(id, inputId, act) {
  const input = $(inputId);
  onClick(id, () => input.click());
  on(input, "change", async () => {
    await act([...input.files]);
    input.value = "";
  });
}

TABS.forEach((name, i) => {
  onClick(`tab-${name}`, () => showTab(name));
  on($(`tab-${name}`), "keydown", (event) => {
    const indices = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: -1 };
    if (!(event.key in indices)) return;
    event.preventDefault();
    showTab(TABS.at(indices[event.key] % TABS.length), true);
  });
});

onClick("settings-button", () => showSettings($("settings").hidden));
onSubmit("settings", () => {});
on($("settings"), "keydown", (event) => {
  if (event.key !== "Escape" && (event.key !== "Enter" || event.target.rows)) return;
  event.stopPropagation();
  event.preventDefault();
  showSettings(false);
  $("settings-button").focus();
});
onSubmit("composer", send);
on($("message"), "keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
onClick("stop", stop);
onClick("to-end", () => follow(true));
onClick("log", (event) => {
  const source = event.target.closest("[data-action=copy-code]");
  if (source) copy(source.closest(".block").querySelector("pre").textContent, source);
});

onFiles("attach", "files", attach);
on($("message"), "paste", (event) => {
  const { files, types } = event.clipboardData;
  if (!files.length || types.includes("text/plain")) return; // such as cells of a table
  event.preventDefault();
  attach([...files]);
});
const showDrop = (isOver) => $("composer").classList.toggle("drop", isOver);
const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
on(document, "dragover", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  showDrop(true);
});
on(document, "dragleave", (event) => {
  if (!event.relatedTarget) showDrop(false);
});
on(document, "drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault(); // The browser would open the file instead of this page.
  showDrop(false);
  if (!$("chat").hidden) attach([...event.dataTransfer.files]);
});
onClick("chats-button", toggleChats);
on(isWide, "change", () => showDrawer(false));
onClick("curtain", () => showDrawer(false));
onClick("new-chat", () => openChat());
onFiles("import", "import-file", importChats);
onClick("export-all", () =>
  exportJson(
    "chats",
    heads.map(({ id }) => id),
  ),
);
const MENU = {
  "menu-rename": rename,
  "menu-markdown": exportMarkdown,
  "menu-json": (id) => exportJson(headOf(id).title, [id]),
  "menu-delete": deleteChat,
};
for (const [id, act] of Object.entries(MENU)) {
  onClick(id, () => {
    $("menu").hidePopover();
    act(menuId);
  });
}
onSubmit("completion-form", () => complete());
onClick("score", () => complete(0));
onClick("complete-stop", () => completing?.abort());
on(document, "keydown", (event) => {
  if (event.key !== "Escape" || $("menu").matches(":popover-open")) return;
  if (opened) closeChoices(true);
  else if (document.body.classList.contains("drawer")) {
    showDrawer(false);
    $("chats-button").focus();
  } else if (!$("chat").hidden) stop();
  else completing?.abort();
});
on(document, "pointerdown", (event) => {
  if (opened && !opened.node.contains(event.target)) closeChoices();
  if (!event.target.closest("header")) showSettings(false);
});
on(document, "scroll", scrolled);
on(document, "visibilitychange", () => {
  setPolling();
  if (document.hidden) running.forEach(saveChat);
});
for (const id of STORED_INPUTS) {
  $(id).value = sessionStorage.getItem(id) ?? $(id).value;
  on($(id), "input", () => sessionStorage.setItem(id, $(id).value));
}
on($("key"), "change", watch);
tabs.onmessage = onTabMessage;

async function start() {
  showDrawer(false);
  showTab(TABS.find((name) => location.hash === `#view-${name}`) ?? "chat");
  watch();
  try {
    database = await openDatabase();
  } catch {
    setMessage(
      $("store-note"),
      "This browser cannot store chats here: they are lost when the tab is closed.",
    );
  }
  const id = sessionStorage.getItem("chat");
  const found = database && id && (await storedChat(id));
  if (found && !chat.messages.length) chat = Chat.from(found);
  showLog();
  await showChats();
  follow(true);
  if (isWide.matches && !$("chat").hidden && document.activeElement === document.body)
    $("message").focus();
}
start();
