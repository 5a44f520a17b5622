/* ---- an answer of the model ---- */

/** What the model wrote before its answer: open while it grows alone, and folded once the answer
 * begins. */
class Thoughts {
  constructor() {
    this.node = make("details", { className: "thoughts", hidden: true });
    this.view = make("div", { className: "markdown" });
    this.markdown = new Markdown(this.view);
    this.shown = "";
    this.isGrowing = false;
  }

  /** isAlone: nothing of the answer has arrived. */
  show(text, isAlone, isDone) {
    const isGrowing = isAlone && !isDone;
    if (!text || (text === this.shown && isGrowing === this.isGrowing)) return;
    if (this.node.hidden) this.node.append(make("summary", {}, "Reasoning"), this.view);
    this.node.hidden = false;
    if (!this.shown || isGrowing !== this.isGrowing) this.node.open = isAlone; // else as a person left it
    this.shown = text;
    this.isGrowing = isGrowing;
    this.markdown.show(text, isGrowing);
  }
}

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
    this.markdown = new Markdown(this.view, () => this.chat === chat && follow());
    this.isDone = false;
    this.versions = null;
    this.reasoning = "";
    this.thoughts = new Thoughts();
    this.body = make("div", { className: "answer" }, this.view);
    this.callBox = make("div");
    this.problem = make("p", { className: "problem", role: "alert", hidden: true });
    this.foot = make("span", { className: "figures" });
    kept.forEach((piece) => this.push(piece));
    this.content = joined(kept);
  }

  toMessage() {
    const message = { role: "assistant", content: this.content, figures: this.texts };
    if (this.reasoning) message.reasoning = this.reasoning;
    return this.calls.length
      ? { ...message, content: this.content || null, tool_calls: this.calls }
      : message;
  }

  get isEmpty() {
    return !this.content && !this.calls.length && !this.reasoning;
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
    const { content, tool_calls: calls = [], ...delta } = choice?.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning; // A server sends one of the two.
    // Tokens of the reasoning, and of the mark behind it, have no text in the content.
    const isBefore = reasoning || (this.reasoning && !this.content && !content);
    const entries = isBefore ? [] : (choice?.logprobs?.content ?? []).map(chatEntry);
    this.figures.take(chunk, content || reasoning || calls.length || entries.length);
    if (!choice) return;
    this.waiting.push(...entries.flatMap(this.join));
    this.rest += content ?? "";
    this.content += content ?? "";
    this.reasoning += reasoning ?? "";
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
    this.thoughts.show(this.reasoning, !this.content && !this.calls.length, isDone);
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
    this.isDone = true;
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
  const fields = reply.calls.map((call, i) => {
    const id = `result-${i}`;
    return labelled(`Result of ${call.function.name}`, { id, className: "code" });
  });
  return make(
    "form",
    {
      className: "results",
      onsubmit: (event) => {
        event.preventDefault();
        event.target.remove();
        const { messages } = reply.chat;
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
