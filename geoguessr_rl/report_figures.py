"""What the report's pictures show: great circles, the table of confusions, the log-log scatter.

Geometry and counts only, in the units of a drawing; the template decides how they look.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from geoguessr_rl.artifacts import seed_for
from geoguessr_rl.data import unit_vectors
from geoguessr_rl.records import Prediction
from geoguessr_rl.tables import country_name

Line = list[tuple[float, float]]

STEP_DEGREES = 3.0  # of arc between two points of a great circle: no corner shows at the map's size
MAPPED = 150  # lines, beyond which the map is a tangle
CONFUSED = 20  # countries of the table

SOUTH = -60  # latitude, the lower edge of the map

# The map's distance bands: name, upper end in km. Their ends are the radii of the table.
BANDS = (("near", 750.0), ("mid", 2500.0), ("far", math.inf))

FLOOR_KM, CEILING_KM = 1.0, 20_000.0  # of a logarithmic axis of distances


def great_circle(start: tuple[float, float], end: tuple[float, float]) -> list[Line]:
    """Returns the shortest way between two points as lines that do not cross the antimeridian.

    Args:
        start: Latitude and longitude in decimal degrees.
        end: The same. Of two opposite points any way is the shortest, and one is taken.

    Returns:
        Lines of (longitude, latitude), each in [-180, 180], which together lead from start to end.
    """
    a, b = unit_vectors(np.array([start[0], end[0]]), np.array([start[1], end[1]]))
    angle = math.atan2(float(np.linalg.norm(np.cross(a, b))), float(a @ b))
    side = b - (a @ b) * a
    if math.sin(angle) < 1e-9:  # equal or opposite points span no plane
        side = np.cross(a, np.eye(3)[int(np.argmin(np.abs(a)))])
    side /= np.linalg.norm(side)
    steps = max(1, math.ceil(math.degrees(angle) / STEP_DEGREES))
    way = angle * np.arange(steps + 1)[:, None] / steps
    points = np.cos(way) * a + np.sin(way) * side
    lines: list[Line] = [[_degrees(points[0])]]
    for before, here in pairwise(points):
        old, new = _degrees(before), _degrees(here)
        if abs(new[0] - old[0]) > 180:
            # The chord meets the plane of the antimeridian below the great circle's own point.
            share = before[1] / (before[1] - here[1]) if before[1] != here[1] else 0.0
            _, latitude = _degrees(before + share * (here - before))
            edge = math.copysign(180.0, old[0])
            lines[-1].append((edge, latitude))
            lines.append([(-edge, latitude)])
        lines[-1].append(new)
    return lines


def _degrees(point: np.ndarray) -> tuple[float, float]:
    """Returns longitude and latitude of a unit vector."""
    x, y, z = map(float, point)
    return math.degrees(math.atan2(y, x)), math.degrees(math.atan2(z, math.hypot(x, y)))


def on_map(longitude: float, latitude: float) -> tuple[float, float]:
    """Returns x and y on the map of `outlines.land_path`."""
    return round(2 * (longitude + 180), 1), round(2 * (85 - latitude), 1)


def band_of(d_km: float) -> str:
    """Returns the distance band of the map."""
    return next(name for name, end in BANDS if d_km < end or end == math.inf)


def guess_map(rows: Sequence[Prediction]) -> dict[str, Any]:
    """Returns SVG paths from each true place to the guess, by distance band, the farthest first.

    Of many rows a fixed sample is drawn, by a hash of the photo's id, so that every run of a split
    shows the same photos and none was picked for its look. Counts are of all rows.

    Args:
        rows: One answer a photo.
    """
    placed = [
        (row, row.pred_latitude, row.pred_longitude, row.d_km)
        for row in rows
        if row.pred_latitude is not None and row.pred_longitude is not None and row.d_km is not None
    ]
    drawn = sorted(placed, key=lambda item: (seed_for(0, item[0].id), item[0].id))[:MAPPED]
    counts = Counter(band_of(d_km) for *_, d_km in placed)
    paths: dict[str, dict[str, list[str]]] = {
        name: {"lines": [], "truths": [], "guesses": []} for name, _ in reversed(BANDS)
    }
    for row, latitude, longitude, d_km in drawn:
        path = paths[band_of(d_km)]
        for line in great_circle((row.latitude, row.longitude), (latitude, longitude)):
            path["lines"].append("M" + "L".join(f"{x:g} {y:g}" for x, y in _thin(line)))
        for kind, point in (
            ("truths", (row.longitude, row.latitude)),
            ("guesses", (longitude, latitude)),
        ):
            path[kind].append("M{:g} {:g}h0".format(*on_map(*point)))
    return {
        "bands": [
            {"name": name, "count": counts[name]}
            | {kind: "".join(parts) for kind, parts in path.items()}
            for name, path in paths.items()
        ],
        "drawn": len(drawn),
        "placed": len(placed),
        "none": len(rows) - len(placed),
        "below": sum(row.latitude < SOUTH for row in rows),
    }


def _thin(line: Line) -> list[tuple[float, float]]:
    """Returns a line's points on the map, without those that fall on the one before."""
    points = [on_map(*point) for point in line]
    return points[:1] + [b for a, b in pairwise(points) if a != b]


def confusion(rows: Sequence[Prediction]) -> dict[str, Any]:
    """Counts the named country of each answer by the true one, for the most frequent true ones.

    Equally frequent ones are ranked by how often they are named, then by code: a split that is
    balanced by country has many ties.

    Returns:
        `codes` of the columns, to which one for all other countries and one for no answer are
        added; `rows` with the true country, its answers, and a (count, share of the answers) a
        column; and of how many countries these are the top.
    """
    true = Counter(row.country_iso2 for row in rows)
    named = Counter(row.pred_country_iso2 for row in rows)
    codes = sorted(true, key=lambda code: (-true[code], -named[code], code))[:CONFUSED]
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        guess = row.pred_country_iso2
        column = "none" if row.pred_country is None else guess if guess in codes else "other"
        counts[row.country_iso2, column or "other"] += 1
    return {
        "codes": codes,
        "of": len(true),
        "rows": [
            {
                "code": code,
                "name": country_name(code),
                "n": true[code],
                "cells": [
                    (counts[code, column], counts[code, column] / true[code])
                    for column in (*codes, "other", "none")
                ],
            }
            for code in codes
        ],
    }


def log_scatter(points: Iterable[tuple[float, float]]) -> dict[str, Any]:
    """Lays out pairs of distances in a box of 100 × 100, y downwards, both axes logarithmic."""

    def at(km: float) -> float:
        inside = min(CEILING_KM, max(FLOOR_KM, km))
        return round(100 * math.log(inside / FLOOR_KM) / math.log(CEILING_KM / FLOOR_KM), 1)

    return {
        "points": [(at(x), round(100 - at(y), 1)) for x, y in points],
        "ticks": [(at(km), f"{km:,}") for km in (1, 10, 100, 1000, 10_000)],
    }
