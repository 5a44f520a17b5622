/* ---- time and tokens of a request ---- */

/** The figures of an answer. The speed is the server's own, because chunks may arrive in bursts. */
class Figures {
  constructor() {
    this.began = seconds();
  }

  take(chunk, hasTokens) {
    this.usage = chunk.usage ?? this.usage;
    this.speed = chunk.timings?.predicted_per_second ?? this.speed;
    if (hasTokens) this.first ??= seconds();
  }

  texts() {
    if (this.first === undefined) return [];
    const texts = this.speed ? [`${asRate(this.speed)} tokens/s`] : [];
    texts.push(`First token ${(this.first - this.began).toFixed(2)} s`);
    if (!this.usage) return texts;
    const { prompt_tokens, completion_tokens: count, prompt_tokens_details: details } = this.usage;
    if (count) texts.push(`${count} ${count === 1 ? "token" : "tokens"}`);
    return [...texts, `Prompt ${prompt_tokens}, ${details?.cached_tokens ?? 0} cached`];
  }
}

const ENDS = { length: "Token limit reached", abort: "Stopped by the server" };
const asSpans = (texts) => texts.map((text) => make("span", {}, text));

/** Show an error in a node, and the input at fault; return a note instead if it was stopped. */
function showError(error, node) {
  if (error.name === "AbortError") return "Stopped";
  const isKnown = error instanceof Problem;
  if (!isKnown) console.error(error);
  setMessage(node, isKnown ? error.message : `An error occurred in this page: ${error.message}.`);
  if (error instanceof KeyProblem) showKeyProblem(error);
  else if (error.field) showField(error.field);
  return "";
}
