/* ---- the messages as the page shows them ---- */

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
    const content = $("edited").value;
    show(message);
    if (isAnswer) return askAgain(message, [{ text: content, entries: [] }]);
    stop();
    const { node, ...others } = message;
    const versions = chat.fork(message);
    chat.messages.push({ ...others, content, versions });
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
  if (message.isDone && !message.node) message.finish();
  const actions = make("div", { className: "actions" }, make("span", { className: "versions" }));
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
    ? [message.thoughts.node, message.body, message.callBox, message.problem]
    : [
        ...(message.files?.length ? [fileList(message.files)] : []),
        make(
          "div",
          { className: `text ${message.role === "tool" ? "code" : ""}`, dir: "auto" },
          message.content,
        ),
      ];
  message.node ??= make("article", {
    className: message.isDone ? "assistant done" : message.role,
    tabIndex: -1,
    "aria-label": speaker,
  });
  message.node.replaceChildren(
    make("h2", { className: message.role === "tool" ? "" : "unseen" }, speaker),
    ...parts,
    actions,
  );
  if (isAnswer) message.showToggle();
  showVersions(message);
}

/** Show which version of a message this is, and buttons for the others. */
function showVersions(message) {
  const { tails, index } = message.versions ?? { tails: [null], index: 0 };
  const count = tails.length;
  const turn = (step, label, name) => {
    const act = () => turnTo(message, step);
    const isEnd = !(index + step in tails);
    const attributes = { "aria-label": name, title: name, "data-step": step };
    return button(label, act, { className: "quiet", disabled: isEnd, ...attributes });
  };
  const number = make("span", {}, `${index + 1}/${count}`);
  const parts = [turn(-1, "‹", "Previous version"), number, turn(1, "›", "Next version")];
  message.node.querySelector(".versions")?.replaceChildren(...(count > 1 ? parts : []));
}

function turnTo(message, step) {
  stop();
  const shown = chat.turn(message, step);
  setMessage($("chat-problem"), "");
  showLog();
  const steps = [step, -step].map((each) => shown.node.querySelector(`[data-step="${each}"]`));
  (steps.find((each) => each && !each.disabled) ?? shown.node).focus();
  const { tails, index } = shown.versions;
  $("say").textContent = `Version ${index + 1} of ${tails.length}`;
  saveChat(chat);
}

const cut = make("p", { className: "note cut" }); // between the messages that are not sent and the others

/** Show the messages of the chat; each has a node that is made once. */
function showLog() {
  closeChoices();
  hideTip();
  chat.messages.forEach((message) => (message.node ? showVersions(message) : show(message)));
  $("hint").hidden = chat.messages.length > 0;
  setMessage(
    cut,
    `The context of ${contextLength} tokens is full: the model no longer gets the messages above.`,
  );
  const nodesOf = (message) => (message === chat.start ? [cut, message.node] : [message.node]);
  const wanted = [$("hint"), ...chat.messages.flatMap(nodesOf)];
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
