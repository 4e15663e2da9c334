"""Line charts as plain coordinates: geometry only, for a template to draw as inline SVG.

Drawing them in the page lets them follow its fonts, its colours in the dark, and its width.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Points = Sequence[tuple[float, float]]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns round values that cover a range, at most `most` steps apart."""
    span = (high - low) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / most))
    step = next(unit * m for m in (1, 2, 5, 10) if span / (unit * m) <= most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * i, 10) for i in range(first, max(last, first + 1) + 1)]


def chart(
    title: str,
    axes: tuple[str, str],
    series: Mapping[str, Points],
    *,
    faint: Points = (),
    x_ticks: Mapping[float, str] | None = None,
    band: Sequence[tuple[float, float, float]] = (),
    from_zero: bool = True,
    mark: float | None = None,
) -> dict[str, Any]:
    """Lays out a line chart in a box of 100 × 100, y downwards, for the template to draw.

    Args:
        title: What is drawn.
        axes: The names of x and y.
        series: Points by the line's name.
        faint: A line behind the others.
        x_ticks: Labels of x; round values otherwise.
        band: x, lower and upper end of an interval around a line.
        from_zero: Whether y begins at 0; a curve of small changes may leave it out.
        mark: An x to point at.
    """
    ends = [(x, y) for x, *both in band for y in both]
    points = [point for line in (*series.values(), faint, ends) for point in line]
    xs, ys = zip(*points, strict=True)
    y_ticks = ticks(min(0, *ys) if from_zero else min(ys), max(ys))
    x_labels = x_ticks or {x: f"{x:,g}" for x in ticks(min(xs), max(xs))}
    x0, x1, y0, y1 = min(x_labels), max(x_labels), y_ticks[0], y_ticks[-1]

    def at_x(x: float) -> float:
        return round(100 * (x - x0) / (x1 - x0), 2)

    def at_y(y: float) -> float:
        return round(100 - 100 * (y - y0) / (y1 - y0), 2)

    return {
        "title": title,
        "axes": axes,
        "x_ticks": [(at_x(x), label) for x, label in x_labels.items()],
        "y_ticks": [(at_y(y), f"{y:,g}") for y in y_ticks],
        "lines": {name: [(at_x(x), at_y(y)) for x, y in line] for name, line in series.items()},
        "faint": [(at_x(x), at_y(y)) for x, y in faint],
        "band": [(at_x(x), at_y(high)) for x, _, high in band]
        + [(at_x(x), at_y(low)) for x, low, _ in reversed(band)],
        "mark": None if mark is None else at_x(mark),
    }


def running_mean(points: Points, window: int) -> list[tuple[float, float]]:
    """Returns each point with the mean of itself and up to `window` - 1 points before it."""
    sums = np.cumsum([0.0, *(y for _, y in points)])
    starts = [max(0, i + 1 - window) for i in range(len(points))]
    return [
        (x, float(sums[i + 1] - sums[start]) / (i + 1 - start))
        for i, ((x, _), start) in enumerate(zip(points, starts, strict=True))
    ]
