/* ---- attached files ---- */

const MAX_FILE_BYTES = 1_000_000;
// The limit for all files of a message; the server accepts 8 MiB of JSON, or 32 with images.
const MAX_TOTAL_BYTES = 4_000_000;
const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_SIDE = 2240; // pixels of an image: a model with four tiles sees no more
const MAX_IMAGE_BYTES = 2_000_000; // beyond it an image is encoded again
const DATA_URL = /^data:image\//;
let attached = []; // files of the next message, as {name, text} or {name, image}

const sizeOf = (count) =>
  count < 1000
    ? `${count} B`
    : count < 1e6
      ? `${(count / 1e3).toFixed(1)} kB`
      : `${(count / 1e6).toFixed(1)} MB`;
const numBytes = (text) => new Blob([text]).size;
const contentOf = (file) => file.image ?? file.text;

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

/** An image as a data: URL, shrunk if it is large; throw a Problem if it is none. */
async function readImage(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Problem(`${file.name} is no image that this browser reads.`);
  });
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= MAX_IMAGE_BYTES) {
    const reader = new FileReader();
    const hasRead = new Promise((resolve) => reader.addEventListener("load", resolve));
    reader.readAsDataURL(file);
    await hasRead;
    return reader.result;
  }
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/webp", 0.9);
}

/** A file of a message: an image, or text. */
async function readFile(file) {
  if (IMAGE_TYPES.includes(file.type)) return { name: file.name, image: await readImage(file) };
  return { name: file.name, text: await readText(file) };
}

async function attach(files) {
  const problems = [];
  for (const file of files) {
    try {
      const read = await readFile(file);
      const total = [read, ...attached].reduce((sum, each) => sum + numBytes(contentOf(each)), 0);
      if (total > MAX_TOTAL_BYTES)
        throw new Problem(
          `${file.name} is too large: the limit for all files of a message is ${sizeOf(MAX_TOTAL_BYTES)}.`,
        );
      attached.push(read);
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

const fileName = (file) => [file.name, make("small", {}, sizeOf(numBytes(contentOf(file))))];
const fileList = (files) =>
  make(
    "div",
    { className: "files" },
    ...files.map((file) =>
      make(
        "details",
        { className: "file" },
        make("summary", {}, ...fileName(file)),
        file.image ? make("img", { src: file.image, alt: file.name }) : make("pre", {}, file.text),
      ),
    ),
  );
