/* ---- completion ---- */

let completing = null;

async function complete(count) {
  completing?.abort();
  const control = new AbortController();
  completing = control;
  const figures = new Figures();
  const join = joiner();
  const body = new TokenText("Text with its surprisal", (before, piece) => {
    $("prompt").value = joined([...before, piece]);
    complete();
  });
  let reason;
  let note = "";
  let numEchoed = null;
  body.node.classList.add("heat");
  closeChoices();
  setMessage($("completion-problem"), "");
  $("result").replaceChildren(body.node);
  $("completion-figures").replaceChildren();
  setCompleting(true);
  try {
    const request = {
      ...sampling(),
      prompt: $("prompt").value,
      max_tokens: count ?? number("count"),
      echo: true,
      logprobs: NUM_LIKELIEST,
    };
    for await (const chunk of chunks("v1/completions", request, control.signal)) {
      const choice = chunk.choices[0];
      const entries = choice?.logprobs ? textEntries(choice.logprobs) : [];
      const isEcho = numEchoed === null;
      figures.take(chunk, !isEcho && entries.length);
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      // The first token of the prompt is begin_of_text, which has no text.
      const pieces = (isEcho ? entries.slice(1) : entries).flatMap(join);
      const spans = pieces.map((piece) => body.push(piece));
      if (isEcho) numEchoed = spans.length;
      if (!isEcho && body.spans.length - spans.length === numEchoed)
        spans[0]?.classList.add("first");
      $("legend").hidden = false;
    }
  } catch (error) {
    note = showError(error, $("completion-problem"));
  }
  join().forEach((piece) => body.push(piece));
  if (completing !== control) return;
  completing = null;
  setCompleting(false);
  const end = note || (count === 0 ? "" : ENDS[reason]);
  $("completion-figures").replaceChildren(
    ...asSpans([...surprisal(body.pieces), ...figures.texts(), end].filter(Boolean)),
  );
}

function surprisal(pieces) {
  const values = pieces.flatMap((piece) => piece.entries).map((entry) => entry.logprob);
  if (!values.length) return [];
  const mean = -values.reduce((sum, value) => sum + value, 0) / values.length;
  return [`Mean surprisal ${nats(mean)} nats`, `Perplexity ${Math.exp(mean).toPrecision(3)}`];
}

const setCompleting = (isRunning) =>
  showStop(isRunning, [$("complete"), $("score")], $("complete-stop"), $("complete"));
