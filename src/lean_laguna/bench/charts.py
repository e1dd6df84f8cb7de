"""Charts without a plotting library: bars of characters for the terminal, SVG for files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

EIGHTHS = " ▏▎▍▌▋▊▉█"
WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 44, 52
INK, FAINT, LINE, GOOD, BAD = "#1f2430", "#d5d9e0", "#2b6cb0", "#2f855a", "#c53030"


@dataclass(frozen=True)
class Point:
    """One value of a chart.

    Attributes:
        label: What stands below or beside it.
        value: Its height.
        low: Least value seen; None where not repeated.
        high: Greatest value seen.
        is_good: False where the value must not be trusted, such as a run with mismatches.
    """

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    is_good: bool = True


def text_bar(share: float, width: int) -> str:
    """Return a bar of block characters, exact to an eighth of a character.

    Args:
        share: Filled part, cut to [0, 1].
        width: Characters of a full bar.
    """
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def bars_svg(title: str, points: Sequence[Point], *, y_label: str, top: float | None = None) -> str:
    """Return a bar chart as one SVG element.

    Args:
        title: Stands above it.
        points: One bar each.
        y_label: Names the quantity and its unit.
        top: Upper end of the scale; None takes a round number above the largest value.
    """
    scale = _Scale(points, top)
    step = (WIDTH - LEFT - RIGHT) / max(len(points), 1)
    parts = []
    for index, point in enumerate(points):
        x = LEFT + step * (index + 0.2)
        y = scale.y(point.value)
        colour = LINE if point.is_good else BAD
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{step * 0.6:.1f}" '
            f'height="{HEIGHT - BOTTOM - y:.1f}" fill="{colour}" rx="2"/>'
        )
        parts.append(_text(x + step * 0.3, y - 6, f"{point.value:.2f}", size=11))
        parts.append(_text(x + step * 0.3, HEIGHT - BOTTOM + 18, point.label, size=11))
    return _frame(title, scale, y_label, parts)


def line_svg(
    title: str, points: Sequence[Point], *, y_label: str, x_label: str, baseline: float | None
) -> str:
    """Return a line chart with error bars as one SVG element; the best point is marked.

    Args:
        title: Stands above it.
        points: In order, at equal distances.
        y_label: Names the quantity and its unit.
        x_label: Names what the labels count.
        baseline: Drawn as a dashed line; None for none.
    """
    scale = _Scale([*points, *([Point("", baseline)] if baseline is not None else [])], None)
    step = (WIDTH - LEFT - RIGHT) / max(len(points), 1)
    xs = [LEFT + step * (index + 0.5) for index in range(len(points))]
    parts = []
    if baseline is not None:
        y = scale.y(baseline)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-dasharray="5 4"/>')
        parts.append(_text(WIDTH - RIGHT, y - 6, f"no drafter {baseline:.1f}", size=11, anchor="end"))
    path = " ".join(f"{x:.1f},{scale.y(p.value):.1f}" for x, p in zip(xs, points, strict=True))
    parts.append(f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="2"/>')
    best = max(points, key=lambda p: p.value) if points else None
    for x, point in zip(xs, points, strict=True):
        if point.low is not None and point.high is not None:
            parts.append(
                f'<path d="M{x:.1f} {scale.y(point.low):.1f}V{scale.y(point.high):.1f}" stroke="{LINE}"/>'
            )
        colour = BAD if not point.is_good else GOOD if point is best else LINE
        radius = 6 if point is best else 4
        parts.append(f'<circle cx="{x:.1f}" cy="{scale.y(point.value):.1f}" r="{radius}" fill="{colour}"/>')
        parts.append(_text(x, scale.y(point.high or point.value) - 10, f"{point.value:.1f}", size=11))
        parts.append(_text(x, HEIGHT - BOTTOM + 18, point.label, size=11))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, size=12))
    return _frame(title, scale, y_label, parts)


class _Scale:
    """Maps values to heights, from 0 to a round number."""

    def __init__(self, points: Sequence[Point], top: float | None):
        largest = max([p.high if p.high is not None else p.value for p in points], default=1.0)
        self.step = _round_step((top or largest * 1.1 or 1.0) / 5)
        self.top = top or self.step * math.ceil(max(largest * 1.1, self.step) / self.step)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.top

    def ticks(self) -> list[float]:
        return [self.step * i for i in range(round(self.top / self.step) + 1)]


def _round_step(rough: float) -> float:
    power = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999))


def _frame(title: str, scale: _Scale, y_label: str, parts: Sequence[str]) -> str:
    grid = []
    for tick in scale.ticks():
        y = scale.y(tick)
        grid.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{FAINT}"/>')
        grid.append(_text(LEFT - 8, y + 4, f"{tick:g}", size=11, anchor="end"))
    body = "".join([*grid, *parts])
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}" font-family="system-ui, sans-serif">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
        f'<text x="{LEFT}" y="20" font-size="15" font-weight="600" fill="{INK}">{escape(title)}</text>'
        f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle" font-size="12" '
        f'fill="{INK}">{escape(y_label)}</text>{body}</svg>'
    )


def _text(x: float, y: float, text: str, *, size: int, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">'
        f"{escape(text)}</text>"
    )
