"""Show measurements: an aligned table, and a plot of throughput against latency as SVG.

In: rows of plain values. Out: text. It knows nothing of what was measured.
"""

from html import escape
from typing import Any

Column = tuple[str, str, str]  # heading, key of the row, format
_COLOURS = ("#1f5fbf", "#c0392b", "#2e8b57", "#8e44ad", "#b8860b", "#00838f", "#555555")
_WIDTH, _HEIGHT, _MARGIN = 720, 440, 70


def table(columns: list[Column], rows: list[dict[str, Any]]) -> str:
    """Return a table with a line per row and columns as wide as their widest cells.

    "-" stands where a row has no value.
    """
    cells = [[heading for heading, _, _ in columns]]
    for row in rows:
        values = ((row.get(key), spec) for _, key, spec in columns)
        cells.append(["-" if value is None else format(value, spec) for value, spec in values])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        first, *others = zip(line, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  ".join(padded))
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]]) -> str:
    """Return an SVG of tokens per second over milliseconds per step, with a line per engine.

    Args:
        rows: Rows with "engine", "batch", "step_ms" and "tokens_per_s". A point is labelled with
            its batch size.
    """
    right = _round_up(max(row["step_ms"] for row in rows))
    top = _round_up(max(row["tokens_per_s"] for row in rows))
    body = [*_axes(right, top)]
    for i, engine in enumerate(dict.fromkeys(row["engine"] for row in rows)):
        own = sorted((r for r in rows if r["engine"] == engine), key=lambda row: row["batch"])
        points = [_point(row["step_ms"] / right, row["tokens_per_s"] / top) for row in own]
        labels = [str(row["batch"]) for row in own]
        body += _line(points, labels, engine, _COLOURS[i % len(_COLOURS)], i)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join(
        [head, f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>', *body, "</svg>"]
    )


def _axes(right: float, top: float) -> list[str]:
    """Return a frame, five marks on each axis, and the labels of the axes."""
    (left, bottom), (end, peak) = _point(0, 0), _point(1, 1)
    out = [f'<path d="M{left} {peak}V{bottom}H{end}" fill="none" stroke="#444"/>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = _point(share, share)
        out.append(_text(x, bottom + 18, f"{right * share:g}", "middle"))
        out.append(_text(left - 8, y + 4, f"{top * share:g}", "end"))
        out.append(f'<path d="M{left} {y}H{end}" stroke="#e4e4e4"/>')
    out.append(_text((left + end) / 2, bottom + 44, "milliseconds a step", "middle"))
    out.append(_text(left, peak - 16, "tokens a second, by batch", "start"))
    return out


def _line(
    points: list[tuple[float, float]], labels: list[str], name: str, colour: str, index: int
) -> list[str]:
    joined = " ".join(f"{x},{y}" for x, y in points)
    out = [f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for (x, y), label in zip(points, labels, strict=True):
        out.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>')
        out.append(_text(x + 7, y - 6, label, "start", colour))
    out.append(_text(_WIDTH - _MARGIN, _MARGIN - 38 + 16 * index, name, "end", colour))
    return out


def _point(right: float, up: float) -> tuple[float, float]:
    """Return the pixel coordinates of a point given as fractions of the two axes."""
    x = _MARGIN + right * (_WIDTH - 2 * _MARGIN)
    return round(x, 1), round(_HEIGHT - _MARGIN - up * (_HEIGHT - 2 * _MARGIN), 1)


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 4, 5, 8 or 10 times a power of ten."""
    power = 10 ** (len(str(int(value))) - 1)
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if value <= step * power)


def _text(x: float, y: float, content: str, anchor: str, colour: str = "#222") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(content)}</text>'
