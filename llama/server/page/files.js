/* ---- attached files ---- */

const MAX_FILE_BYTES = 1_000_000;
// The limit for all files of a message; the server accepts 8 MiB of JSON.
const MAX_TOTAL_BYTES = 4_000_000;
let attached = []; // files of the next message, as {name, text}

const sizeOf = (count) =>
  count < 1000
    ? `${count} B`
    : count < 1e6
      ? `${(count / 1e3).toFixed(1)} kB`
      : `${(count / 1e6).toFixed(1)} MB`;
const numBytes = (text) => new Blob([text]).size;

/** The text of a file; throw a Problem if it is too large or not text. */
async function readText(file) {
  if (file.size > MAX_FILE_BYTES) {
    throw new Problem(
      `${file.name} has ${sizeOf(file.size)}: the limit for a file is ${sizeOf(MAX_FILE_BYTES)}.`,
    );
  }
  const bytes = await file.arrayBuffer().catch(() => {
    throw new Problem(
      `${file.name} cannot be read. A folder cannot be attached: choose its files.`,
    );
  });
  const text = textOf(bytes);
  if (text === null || text.includes("\0"))
    throw new Problem(`${file.name} is not text: only UTF-8 text can be attached.`);
  return text.replace(/^\ufeff/, "");
}

async function attach(files) {
  const problems = [];
  for (const file of files) {
    try {
      const text = await readText(file);
      const total = [text, ...attached.map((each) => each.text)].reduce(
        (sum, each) => sum + numBytes(each),
        0,
      );
      if (total > MAX_TOTAL_BYTES)
        throw new Problem(
          `${file.name} is too large: the limit for all files of a message is ${sizeOf(MAX_TOTAL_BYTES)}.`,
        );
      attached.push({ name: file.name, text });
    } catch (error) {
      problems.push(error.message);
    }
  }
  setMessage($("chat-problem"), problems.join(" "));
  showAttached();
  $("message").focus();
}

function showAttached() {
  const remove = (file) => {
    attached = attached.filter((each) => each !== file);
    showAttached();
    $("message").focus();
  };
  $("attached").hidden = !attached.length;
  $("attached").replaceChildren(
    ...attached.map((file) =>
      make(
        "li",
        { className: "file chip" },
        ...fileName(file),
        button("×", () => remove(file), {
          className: "quiet",
          "aria-label": `Remove ${file.name}`,
        }),
      ),
    ),
  );
}

const fileName = (file) => [file.name, make("small", {}, sizeOf(numBytes(file.text)))];
const fileList = (files) =>
  make(
    "div",
    { className: "files" },
    ...files.map((file) =>
      make(
        "details",
        { className: "file" },
        make("summary", {}, ...fileName(file)),
        make("pre", {}, file.text),
      ),
    ),
  );
