/* ---- chats as files ---- */

const FORMAT = "llama chats";

function saveAs(title, ending, type, text) {
  const name = `${title.replace(/[^\p{L}\p{N}]+/gu, " ").trim() || "chat"}.${ending}`;
  make("a", {
    href: URL.createObjectURL(new Blob([text], { type })),
    download: name,
  }).click();
}

async function exportJson(title, ids) {
  const found = (await Promise.all(ids.map(storedChat))).filter(Boolean);
  const chats = found.map(({ head, messages }) => ({
    title: head.title,
    updated: head.updated,
    messages,
  }));
  saveAs(title, "json", "application/json", JSON.stringify({ format: FORMAT, chats }, null, 2));
}

function asMarkdown({ head, messages }) {
  const parts = messages.flatMap((message) => [
    `## ${SPEAKERS[message.role](message)}`,
    ...(message.files ?? []).map((file) => (file.image ? `Image ${file.name}` : fileText(file))),
    message.content,
    ...(message.tool_calls ?? []).map(
      (call) => `Calls ${call.function.name}: \`${call.function.arguments}\``,
    ),
  ]);
  return `${[`# ${head.title}`, ...parts].filter(Boolean).join("\n\n")}\n`;
}

async function exportMarkdown(id) {
  const found = await storedChat(id);
  saveAs(found.head.title, "md", "text/markdown", asMarkdown(found));
}

/** Add the chats of a file that this page has exported. */
async function importChats([file]) {
  try {
    const given = JSON.parse(await file.text());
    if (given?.format !== FORMAT) throw new TypeError("this page did not write it");
    const read = given.chats.map(({ title, updated, messages }) =>
      Chat.from({
        head: { title: String(title).slice(0, 200), updated: Number(updated) || 0 },
        messages,
      }),
    );
    for (const imported of read) await saveChat(imported);
    toast(`${read.length} ${read.length === 1 ? "chat was" : "chats were"} imported.`);
  } catch (error) {
    toast(`This is not a file of exported chats: ${error.message}.`);
  }
}
