"""The world's land as one SVG path, for the maps of the reports.

`land-110m.json` beside this file is Natural Earth's land at 1:110 million, which is in the public
domain, as TopoJSON of the npm package world-atlas 2.0.2 (ISC licence, copyright 2013-2019 Michael
Bostock; its text stands in the file under `licence`). Only what that file uses is decoded: one
collection of polygons, and no borders of countries.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

Ring = list[tuple[float, float]]

_ANTARCTIC = -60  # latitude, the lower edge of the map: rings that lie beyond it are left out


def arcs(topology: dict[str, Any]) -> list[Ring]:
    """Decodes the arcs of a quantised TopoJSON file to (longitude, latitude) in degrees."""
    (sx, sy), (tx, ty) = topology["transform"]["scale"], topology["transform"]["translate"]

    def decode(steps: list[list[int]]) -> Ring:
        points, x, y = [], 0, 0
        for dx, dy in steps:
            x, y = x + dx, y + dy  # each point is given as the step from the one before
            points.append((tx + sx * x, ty + sy * y))
        return points

    return [decode(steps) for steps in topology["arcs"]]


def join(arcs: Sequence[Ring], ring: Iterable[int]) -> Ring:
    """Joins a ring's arcs; ~i stands for arc i, walked backwards."""
    return [point for i in ring for point in (arcs[i] if i >= 0 else arcs[~i][::-1])]


def _rings(topology: dict[str, Any]) -> Iterator[Ring]:
    """Yields the closed rings of the land as (longitude, latitude) in degrees."""
    decoded = arcs(topology)
    for geometry in topology["objects"]["land"]["geometries"]:
        for polygon in geometry["arcs"]:
            for ring in polygon:
                yield join(decoded, ring)


def unwrap(ring: Ring) -> Ring:
    """Lets a ring run past ±180° where it steps from one edge of the map to the other."""
    points, turn = [ring[0]], 0
    for (before, _), (longitude, latitude) in pairwise(ring):
        if abs(longitude - before) > 180:
            turn += 360 if before > longitude else -360
        points.append((longitude + turn, latitude))
    return points


def _on_the_map(ring: Ring) -> Iterator[Ring]:
    """Yields the pieces of an unwrapped ring that the map shows, one a turn around the globe.

    What lies outside is pressed flat onto the map's edge, where it encloses nothing.
    """
    for turn in (0, -360, 360):
        piece = [(min(180.0, max(-180.0, x + turn)), y) for x, y in ring]
        if len({x for x, _ in piece}) > 1:
            yield piece


def _thin(points: Ring) -> Ring:
    """Drops points that repeat the one before, or lie within a straight run up or down."""
    kept: Ring = []
    for point in points:
        if kept and point == kept[-1]:
            continue
        if len(kept) > 1 and kept[-2][0] == kept[-1][0] == point[0]:
            kept.pop()
        kept.append(point)
    return kept


@lru_cache
def land_path(decimals: int = 1) -> str:
    """Returns the land but Antarctica as an SVG path of `M…L…Z`, one a ring.

    An equirectangular map with x = 2 (longitude + 180) and y = 2 (85 - latitude), made for the
    view box "0 0 720 290", latitude 85 to -60. Lakes are rings of their own: fill with
    `fill-rule="evenodd"`.

    Args:
        decimals: Digits after the point; the file's own detail is about 0.1.
    """
    topology = json.loads((Path(__file__).parent / "land-110m.json").read_text(encoding="utf-8"))
    parts = []
    for ring in _rings(topology):
        if max(latitude for _, latitude in ring) < _ANTARCTIC:
            continue
        for piece in _on_the_map(unwrap(ring)):
            points = [
                (round(2 * (x + 180), decimals), round(2 * (85 - y), decimals)) for x, y in piece
            ]
            thin = _thin(points)
            if len(set(thin)) > 2:
                parts.append("M" + "L".join(f"{x:g} {y:g}" for x, y in thin) + "Z")
    return "".join(parts)
