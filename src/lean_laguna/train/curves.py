"""A page of a training run's curves, from its log: one HTML file, drawings inline, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from lean_laguna.core.files import atomic_write_text

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 240, 56, 24, 10
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#bf8700", "#0a7ea4", "#cf222e", "#57606a")

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 46rem; color: #1f2328; }
h2 { font-size: 1.05rem; margin: 1.6rem 0 .3rem; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; } td, th { padding: .1rem .8rem .1rem 0; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.key span { margin-right: 1rem; white-space: nowrap; }
text { font: 11px system-ui, sans-serif; fill: #57606a; }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ summary }}</p>
{% for chart in charts %}
<h2>{{ chart.title }}</h2>
<svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="{{ chart.title }}">
{% for tick in chart.ticks %}
<line x1="{{ left }}" x2="{{ width }}" y1="{{ tick.y }}" y2="{{ tick.y }}" stroke="#d8dee4"/>
<text x="{{ left - 6 }}" y="{{ tick.y + 4 }}" text-anchor="end">{{ tick.label }}</text>
{% endfor %}
{% for mark in chart.marks %}
<text x="{{ mark.x }}" y="{{ height - 6 }}" text-anchor="middle">{{ mark.label }}</text>
{% endfor %}
{% for line in chart.lines %}
<polyline fill="none" stroke="{{ line.colour }}" stroke-width="1.6" points="{{ line.points }}"/>
{% endfor %}
</svg>
<p class="key">{% for line in chart.lines %}<span style="color: {{ line.colour }}">{{ line.name }}:
{{ line.last }}</span>{% endfor %}</p>
{% endfor %}
{% if figures %}
<h2>Last evaluation</h2>
<table>{% for name, value in figures %}
<tr><td>{{ name }}</td><td class="n">{{ value }}</td></tr>{% endfor %}</table>
{% endif %}
</body></html>
"""


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: For the key.
        points: Step and value, in order.
    """

    name: str
    points: tuple[tuple[float, float], ...]


def write_curves(log: Path, page: Path, title: str) -> None:
    """Write the page of a run.

    Args:
        log: ``train_log.jsonl``.
        page: HTML file.
        title: Its heading.
    """
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    checks = [event for event in events if event["event"] in ("val", "final")]
    charts = [
        ("Loss and its terms", _of(steps, ("loss", "ce", "l1", "kl", "lk", "lk_hybrid", "confidence"))),
        (
            "Accepted length in training batches: expected, and against the text",
            _of(steps, ("tau_prob", "eal")),
        ),
        ("Acceptance of each draft in training batches", _by_position(steps)),
        ("Mean acceptance length on held-out text, walked as serving does", _checked(checks)),
        ("Learning rate", _of(steps, ("lr",))),
        ("Gradient norm", _of(steps, ("grad_norm",))),
        ("Block rows a second", _of(steps, ("tok_per_s",))),
    ]
    final: dict[str, Any] = next((event for event in reversed(events) if event["event"] == "final"), {})
    figures = [(name, f"{value:,.4g}") for name, value in final.items() if isinstance(value, int | float)]
    start: dict[str, Any] = next((event for event in events if event["event"] == "start"), {})
    summary = f"{start.get('parameters', 0):,} parameters, {steps[-1]['step'] if steps else 0:,} steps"
    text = (
        jinja2.Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            title=title,
            summary=summary,
            charts=[_chart(name, series) for name, series in charts if series],
            figures=[pair for pair in figures if pair[0] != "time"],
            width=_WIDTH,
            height=_HEIGHT,
            left=_LEFT,
        )
    )
    atomic_write_text(page, text)


def _of(events: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Series]:
    """Return the curves of those names that the log has."""
    found = []
    for name in names:
        points = tuple((float(e["step"]), float(e[name])) for e in events if name in e)
        if points:
            found.append(Series(name, points))
    return found


def _by_position(steps: Sequence[dict[str, Any]]) -> list[Series]:
    width = min((len(e["acceptance"]) for e in steps if "acceptance" in e), default=0)
    return [
        Series(
            f"draft {k + 1}",
            tuple((float(e["step"]), e["acceptance"][k]) for e in steps if "acceptance" in e),
        )
        for k in range(min(width, len(_COLOURS)))
    ]


def _checked(checks: Sequence[dict[str, Any]]) -> list[Series]:
    names = sorted({name for event in checks for name in event if name.endswith("tau_chain")})
    return _of(checks, names)


def _chart(title: str, series: Sequence[Series]) -> dict[str, Any]:
    """Lay one chart out: lines, ticks of values, marks of steps."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    low, high = min(0.0, *ys), max(ys) or 1.0
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - first) / (last - first) * (_WIDTH - _LEFT - 8)
        up = (y - low) / ((high - low) or 1.0)
        return round(across, 1), round(_HEIGHT - _BOTTOM - up * (_HEIGHT - _BOTTOM - _TOP), 1)

    lines = []
    for line, colour in zip(series, _COLOURS * len(series), strict=False):
        points = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line.points))
        lines.append(
            {"name": line.name, "colour": colour, "points": points, "last": f"{line.points[-1][1]:.4g}"}
        )
    values = [low + (high - low) * i / 4 for i in range(5)]
    steps = [first + (last - first) * i / 4 for i in range(5)]
    return {
        "title": title,
        "lines": lines,
        "ticks": [{"y": place(first, value)[1], "label": f"{value:.3g}"} for value in values],
        "marks": [{"x": place(step, low)[0], "label": f"{step:,.0f}"} for step in steps],
    }
