"""This engine alongside others as bars, from the newest results of the benchmark: light and dark.

In: scripts/bench/results, files whose last line is JSON. Out: two SVGs. Only a run in which vLLM
and llama.cpp took turns with this engine is drawn; of each case the median, as the file has it.
"""

import json
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"
ENGINES = {
    "ours": "this",
    "vllm": "vLLM",
    "llama_cpp": "llama.cpp",
    "transformers": "transformers",
    "llama_models": "Meta's code",
}
_NEEDED = {"ours", "vllm", "llama_cpp"}
_WIDTH, _PANEL, _LABEL, _BAR, _TOP = 860, 400, 96, 22, 66
_THEMES = {  # text, faint text, this engine, the others
    "light": ("#1f2328", "#59636e", "#1f6feb", "#c4ccd4"),
    "dark": ("#e6edf3", "#9198a1", "#4493f8", "#4b535d"),
}


def newest(kind: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Return the newest result of this kind, latency or prefill, with all engines needed."""
    for path in sorted(folder.glob(f"*-1b-{kind}.txt"), reverse=True):
        result: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
        if {row["engine"] for row in result["rows"]} >= _NEEDED:
            return result
    raise ValueError(f"no result of {kind} in {folder} has {', '.join(sorted(_NEEDED))}")


def panels(latency: dict[str, Any], prefill: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Return a title and the tokens per second of each engine, for each case."""
    found: dict[str, dict[str, float]] = {}
    for row in latency["rows"]:
        load = f"{row['batch']} sequences" if row["batch"] > 1 else "1 sequence"
        case = f"Writing, {load} (context {row['context']})"
        found.setdefault(case, {})[row["engine"]] = row["tokens_per_s"]
    for row in prefill["rows"]:
        case = f"Reading a prompt of {row['tokens']} tokens"
        found.setdefault(case, {})[row["engine"]] = row["tokens_per_s"]
    return list(found.items())


def draw(latency: dict[str, Any], prefill: dict[str, Any], theme: str) -> str:
    """Return the bars in the colours of a theme; each panel has its own scale."""
    strong, faint, own, other = _THEMES[theme]
    cases = panels(latency, prefill)
    step = 34 + _BAR * max(len(rates) for _, rates in cases)
    height = _TOP + step * ((len(cases) + 1) // 2)
    machine = latency["machine"]
    about = (
        f"Llama 3.2 1B's shape in bf16 on {machine['cores']} cores of an {machine['cpu']}, "
        f"{latency['date'][:10]}, the engines in turn"
    )
    body = [
        f'<text x="10" y="22" font-size="17" font-weight="600" fill="{strong}">'
        "Tokens per second: more is better</text>",
        f'<text x="10" y="43" fill="{faint}">{escape(about)}</text>',
    ]
    for i, (title, rates) in enumerate(cases):
        x, y = 10 + (_WIDTH // 2) * (i % 2), _TOP + step * (i // 2)
        body.append(f'<text x="{x}" y="{y + 8}" font-weight="600" fill="{strong}">{title}</text>')
        order = sorted(rates, key=list(ENGINES).index)
        for k, engine in enumerate(order):
            colour = own if engine == "ours" else other
            shade = (strong, faint)[engine != "ours"]
            share = rates[engine] / max(rates.values())
            body += _bar(x, y + 18 + _BAR * k, engine, rates[engine], share, colour, shade)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" role="img" font-size="13" '
            'font-family="-apple-system,BlinkMacSystemFont,Segoe UI,Helvetica,Arial,sans-serif" '
            'aria-label="Tokens per second of this engine and of others">',
            *body,
            "</svg>\n",
        ]
    )


def _bar(
    x: int, y: int, engine: str, rate: float, share: float, colour: str, shade: str
) -> list[str]:
    """Return a name, a bar and its value as SVG."""
    long = (_PANEL - _LABEL - 50) * share
    value = f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"
    weight = ' font-weight="600"' if engine == "ours" else ""
    return [
        f'<text x="{x + _LABEL - 8}" y="{y + 13}" text-anchor="end" fill="{shade}"{weight}>'
        f"{escape(ENGINES[engine])}</text>",
        f'<rect x="{x + _LABEL}" y="{y + 1}" width="{long:.1f}" height="16" rx="3" '
        f'fill="{colour}"/>',
        f'<text x="{x + _LABEL + long + 6:.1f}" y="{y + 13}" fill="{shade}"{weight}>{value}</text>',
    ]


def make(folder: Path) -> None:
    """Write bars-light.svg and bars-dark.svg."""
    latency, prefill = newest("latency"), newest("prefill")
    for theme in _THEMES:
        (folder / f"bars-{theme}.svg").write_text(draw(latency, prefill, theme))
