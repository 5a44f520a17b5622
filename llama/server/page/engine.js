/* ---- engine ---- */

const asPercent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}\u00a0%`;
/** Label, how a value is written, and the value from the current and the previous metrics. */
const FIGURES = [
  ["Running", asWhole, (now) => now.get("num_requests_running")],
  ["Waiting", asWhole, (now) => now.get("num_requests_waiting")],
  ["KV cache in use", asPercent, (now) => now.get("kv_cache_usage_perc")],
  ["Tokens/s in", asRate, (now, before) => perSecond("prompt_tokens_total", now, before)],
  ["Tokens/s out", asRate, (now, before) => perSecond("generation_tokens_total", now, before)],
  [
    "Prefix cache hits",
    asPercent,
    (now) => now.get("prefix_cache_hits_total") / now.get("prefix_cache_queries_total"),
  ],
];
let polling = null;
let before = null;
const rows = FIGURES.map(([label]) => {
  const [picture, line] = ["svg", "polyline"].map((tag) =>
    document.createElementNS("http://www.w3.org/2000/svg", tag),
  );
  const attributes = {
    viewBox: `0 0 ${HISTORY_SECONDS - 1} 20`,
    preserveAspectRatio: "none",
    "aria-hidden": true,
  };
  Object.entries(attributes).forEach((each) => picture.setAttribute(...each));
  picture.append(line);
  const value = make("dd", {}, "–");
  $("figures").append(make("div", {}, make("dt", {}, label), value, picture));
  return { value, line, points: [] };
});

function perSecond(name, now, before) {
  if (!before) return NaN;
  return Math.max(0, now.get(name) - before.get(name)) / (now.get("at") - before.get("at"));
}

/** Read Prometheus's text format; metrics with labels are not needed here. */
function readMetrics(text) {
  const found = [...text.matchAll(/^llama:(\w+) (\S+)$/gm)].map(([, name, value]) => [
    name,
    Number(value),
  ]);
  return new Map([...found, ["at", seconds()]]);
}

async function poll() {
  try {
    const now = readMetrics(await (await ask("metrics")).text());
    if (!now.has("num_requests_running")) throw new Problem("The model is being loaded.");
    setMessage($("engine-problem"), "");
    FIGURES.forEach(([, write, read], i) => draw(rows[i], read(now, before), write));
    before = now;
  } catch (error) {
    before = null;
    const problem = $("engine-problem");
    if (problem.hidden || problem.textContent !== error.message) showError(error, problem);
    if (error.status === 403) clearInterval(polling); // No further try can succeed.
  }
}

function draw(row, value, write) {
  const isKnown = Number.isFinite(value);
  row.value.textContent = isKnown ? write(value) : "–";
  row.points = [...row.points, isKnown ? value : 0].slice(-HISTORY_SECONDS);
  const highest = Math.max(...row.points) || 1;
  const start = HISTORY_SECONDS - row.points.length;
  row.line.setAttribute(
    "points",
    row.points.map((y, i) => `${start + i},${19 - (18 * y) / highest}`).join(" "),
  );
}

function setPolling() {
  clearInterval(polling);
  polling = null;
  before = null;
  if ($("engine").hidden || document.hidden) return;
  poll();
  polling = setInterval(poll, 1000);
}
