"""Line charts as SVG text, for a page that must stand alone.

Colours are classes (`s0` … `s7`) and ink is `currentColor`, so that the page's style sheet decides,
light or dark. Hovering over a point shows its numbers through <title>; there is no script.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

Point = tuple[float, float]
Place = Callable[[Point], Point]  # From numbers to where they are drawn.

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 26  # Margins for the numbers on the axes.
COLOURS = 8
MOST_POINTS = 160  # More are merged: nobody sees them, and the page grows.
DOTS_UP_TO = 12  # So few points are each marked.
SMOOTH_FROM = 30  # Points from which a running mean is drawn over the faint raw line.


@dataclass(frozen=True)
class Series:
    """A named line; points by rising x."""

    name: str
    points: Sequence[Point]


def line_chart(
    series: Sequence[Series], label: str, x_range: tuple[float, float] | None = None
) -> Markup:
    """The lines of `series` in one chart.

    Args:
      series: at least one with a point.
      label: what a screen reader says.
      x_range: the first and last x that the axis shows; by default those of the points.
    """
    drawn = [Series(each.name, thin(each.points)) for each in series if each.points]
    if not drawn:
        raise ValueError(f"chart {label!r} has no point to draw")
    xs = [x for each in drawn for x, _ in each.points]
    ys = [y for each in drawn for _, y in each.points]
    x_low, x_high = x_range or (min(xs), max(xs))
    x_ticks, y_ticks = nice_ticks(x_low, x_high, 5), nice_ticks(min(ys), max(ys), 5)
    # The y axis goes from its first tick to its last, the x axis only as far as there are steps.
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place(point: Point) -> Point:
        return (
            LEFT + _share(point[0], x_low, x_high) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - _share(point[1], y_low, y_high) * (HEIGHT - TOP - BOTTOM),
        )

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">',
        '<g class="axis">',
    ]
    for tick in y_ticks:
        y = place((x_low, tick))[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>'
        )
    for tick in x_ticks:
        if x_low <= tick <= x_high:
            x = place((tick, y_low))[0]
            parts.append(
                f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_short(tick)}</text>'
            )
    parts.append("</g>")
    for number, each in enumerate(drawn):
        parts.append(f'<g class="s{number % COLOURS}">')
        parts += _line(each, place)
        parts.append("</g>")
    parts.append("</svg>")
    return Markup("".join(parts))


def _line(series: Series, place: Place) -> list[str]:
    """Raw line (faint if a running mean is drawn too), lone points as dots, hover targets."""
    smooth = len(series.points) >= SMOOTH_FROM
    parts = []
    for run in split_at_gaps(series.points):
        if len(run) == 1 or len(series.points) <= DOTS_UP_TO:
            for x, y in map(place, run):
                parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
        if len(run) == 1:
            continue
        parts.append(_path(run, place, "raw" if smooth else "line"))
        if smooth:
            parts.append(_path(running_mean(run, max(3, len(series.points) // 12)), place, "line"))
    for x_value, y_value in series.points:
        x, y = place((x_value, y_value))
        told = f"{escape(series.name)}: {y_value:.4g} at {x_value:g}"
        parts.append(
            f'<circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{told}</title></circle>'
        )
    return parts


def _path(points: Sequence[Point], place: Place, kind: str) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, points))
    return f'<polyline class="{kind}" points="{text}"/>'


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers (steps of 1, 2 or 5 times a power of ten) that enclose [low, high].

    Args:
      low, high: finite, low <= high.
      about: how many intervals are wanted; there may be somewhat fewer or more.
    """
    if low == high:  # One value only: a little room around it.
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points: neighbours merged into their mean."""
    if len(points) <= most:
        return list(points)
    edges = [round(i * len(points) / most) for i in range(most + 1)]
    parts = [points[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    return [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts
    ]


def split_at_gaps(points: Sequence[Point], factor: float = 4.0) -> list[list[Point]]:
    """Runs of neighbouring points; a step of more than `factor` medians starts a new one.

    The proposer's and the solver's updates take turns, and a line across the other's turn would
    show numbers that nobody measured.
    """
    steps = sorted(b[0] - a[0] for a, b in zip(points, points[1:], strict=False))
    if not steps:
        return [list(points)]
    most = factor * steps[len(steps) // 2]
    runs = [[points[0]]]
    for before, point in zip(points, points[1:], strict=False):
        if point[0] - before[0] > most:
            runs.append([])
        runs[-1].append(point)
    return runs


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Each y replaced by the mean of the `window` (made odd) around it, fewer at the ends."""
    half = window // 2
    means = []
    for i, (x, _) in enumerate(points):
        around = points[max(0, i - half) : i + half + 1]
        means.append((x, sum(y for _, y in around) / len(around)))
    return means


def _short(tick: float) -> str:
    """0.25, 2000, 1.5e-7."""
    return re.sub(r"e([+-])0+", r"e\1", f"{tick:g}").replace("e+", "e")


def _share(value: float, low: float, high: float) -> float:
    return 0.5 if low == high else (value - low) / (high - low)
