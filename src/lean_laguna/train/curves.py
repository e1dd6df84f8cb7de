"""A page of a training run's curves, from its log: one HTML file, drawings inline, nothing fetched."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from lean_laguna.core.files import atomic_write_text

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 640, 240, 56, 24, 24, 10
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#bf8700", "#0a7ea4", "#c2188c", "#57606a")
_FEW = 12  # so few points are marked, too: a lone one has no line
_NAMES = {
    "loss": "loss",
    "ce": "cross entropy",
    "l1": "L1",
    "kl": "KL",
    "lk": "LK",
    "lk_hybrid": "LK hybrid",
    "confidence": "confidence",
    "tau_prob": "expected under rejection sampling (tau_prob)",
    "eal": "likeliest tokens against the text (eal)",
    "lr": "learning rate",
    "grad_norm": "norm before clipping",
    "tok_per_s": "block rows a second",
    "greedy_tau_chain": "greedy text",
    "sampled_tau_chain": "sampled text",
    "documents_tau_chain": "held-out documents",
}
_ERRORS = {
    "ece_before": "confidences as trained, calibration error",
    "ece_after": "confidences as written, calibration error",
}

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 46rem; padding: 0 1rem; }
body { color: #1f2328; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 .3rem; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; } td, th { padding: .1rem .9rem .1rem 0; text-align: right; }
th { color: #57606a; font-weight: normal; } td { font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; }
.key { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; margin: .2rem 0 0; }
text { font: 11px system-ui, sans-serif; fill: #57606a; }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ summary }}</p>
{% for chart in charts %}
<h2>{{ chart.title }}</h2>
<svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="{{ chart.title }}">
{% for tick in chart.ticks %}
<line x1="{{ left }}" x2="{{ width - right }}" y1="{{ tick.y }}" y2="{{ tick.y }}" stroke="#d8dee4"/>
<text x="{{ left - 6 }}" y="{{ tick.y + 4 }}" text-anchor="end">{{ tick.label }}</text>
{% endfor %}
{% for mark in chart.marks %}
<text x="{{ mark.x }}" y="{{ height - 6 }}" text-anchor="middle">{{ mark.label }}</text>
{% endfor %}
{% for line in chart.lines %}
<polyline fill="none" stroke="{{ line.colour }}" stroke-width="1.6" points="{{ line.points }}"/>
{% for dot in line.dots %}<circle cx="{{ dot[0] }}" cy="{{ dot[1] }}" r="3" fill="{{ line.colour }}"/>
{% endfor %}
{% endfor %}
</svg>
<p class="key">{% for line in chart.lines %}<span style="color: {{ line.colour }}">{{ line.name }}
{{ line.last }}</span> {% endfor %}</p>
{% endfor %}
{% for table in tables %}
<h2>{{ table.title }}</h2>
<table><tr>{% for cell in table.head %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endfor %}
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
        ("Mean acceptance length on held-out text, walked as serving does", _checked(checks)),
        ("Loss and its terms", _of(steps, ("loss", "ce", "l1", "kl", "lk", "lk_hybrid", "confidence"))),
        (
            "Accepted length in training batches: expected, and against the text",
            _of(steps, ("tau_prob", "eal")),
        ),
        ("Acceptance of each draft in training batches", _by_position(steps)),
        ("Learning rate", _of(steps, ("lr",))),
        ("Gradient norm", _of(steps, ("grad_norm",))),
        ("Block rows a second", _of(steps, ("tok_per_s",))),
    ]
    final: dict[str, Any] = {}
    for kind in ("final", "calibration"):
        final |= next((event for event in reversed(events) if event["event"] == kind), {})
    text = (
        jinja2.Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            title=title,
            summary=_summary(events, steps),
            charts=[_chart(name, series) for name, series in charts if series],
            tables=_tables(final),
            width=_WIDTH,
            height=_HEIGHT,
            left=_LEFT,
            right=_RIGHT,
        )
    )
    atomic_write_text(page, text)


def _summary(events: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> str:
    """Say in a sentence what was trained, for how long."""
    start: dict[str, Any] = next((event for event in events if event["event"] == "start"), {})
    last = next((event for event in reversed(events) if "step" in event), {"step": 0})
    parts = [f"{start.get('parameters', 0):,} parameters", f"{last['step']:,} steps"]
    recipe = start.get("recipe", {})
    if "elapsed_s" in last:
        parts.append(f"{last['elapsed_s']:,.0f} s")
    if recipe.get("warm_start"):
        parts.append(f"begun from {recipe['warm_start']}")
    if start.get("processes", 1) > 1:
        parts.append(f"{start['processes']} processes")
    if steps and not any(event["event"] == "final" for event in events):
        parts.append("not finished")
    return ", ".join(parts)


def _tables(final: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the last evaluation: a row for each kind of text and measure of drafts, then what is left."""
    drafts: dict[str, dict[int, float]] = {}
    rest: list[tuple[str, str]] = []
    for name, value in final.items():
        measure, _, place = name.rpartition("_")
        if place.isdigit() and measure.endswith("_acc"):
            drafts.setdefault(measure, {})[int(place)] = value
        elif isinstance(value, int | float) and name not in ("time", "step", "elapsed_s"):
            said = f"{_NAMES[name]}, accepted length" if name in _NAMES else _ERRORS.get(name, name)
            rest.append((said, f"{value:,.4g}"))
    tables = []
    if drafts:
        width = max(max(values) for values in drafts.values())
        rows = [
            [_measure(name), *(f"{values[k]:.3f}" if k in values else "" for k in range(1, width + 1))]
            for name, values in drafts.items()
        ]
        head = ["draft", *map(str, range(1, width + 1))]
        tables.append({"title": "Acceptance of each draft on held-out text", "head": head, "rows": rows})
    if rest:
        tables.append({"title": "Last evaluation", "head": [], "rows": rest})
    return tables


def _measure(name: str) -> str:
    kind, _, measure = name.removesuffix("_acc").rpartition("_")
    said = {"pos": "whatever came before", "cond": "given all before it"}
    return f"{kind}, {said[measure]}" if measure in said else name.removesuffix("_acc")


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
    values = _ticks(min(0.0, *ys), max(ys))
    low, high = values[0], values[-1]
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)
        up = (y - low) / (high - low)
        return round(across, 1), round(_HEIGHT - _BOTTOM - up * (_HEIGHT - _BOTTOM - _TOP), 1)

    lines = []
    for line, colour in zip(series, _COLOURS * len(series), strict=False):
        places = [place(*point) for point in line.points]
        lines.append(
            {
                "name": _NAMES.get(line.name, line.name),
                "colour": colour,
                "points": " ".join(f"{x},{y}" for x, y in places),
                "dots": places if len(places) <= _FEW else [],
                "last": _label(line.points[-1][1]),
            }
        )
    steps = (
        [x for x in _ticks(first, last) if first <= x <= last and x == int(x)] if max(xs) > first else [first]
    )
    return {
        "title": title,
        "lines": lines,
        "ticks": [{"y": place(first, value)[1], "label": _label(value)} for value in values],
        "marks": [{"x": place(step, low)[0], "label": f"{step:,.0f}"} for step in steps],
    }


def _ticks(low: float, high: float) -> list[float]:
    """Return round values from at or below ``low`` to at or above ``high``, about five."""
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= span / 4 * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _label(value: float) -> str:
    """Return a short number: 250k, 0.75, 2e-04."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.4g}" if size >= 1e-2 or size == 0 else f"{value:.2g}"
