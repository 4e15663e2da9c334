"""A map of the world to look at and to click, for the pages of the demo.

`countries-50m.json.gz` beside this file is Natural Earth at 1:50 million, which is in the public
domain, as TopoJSON of the npm package world-atlas 2.0.2 (ISC licence, copyright 2013-2019 Michael
Bostock; `countries-50m.LICENSE.txt`). It becomes two SVG paths in Web Mercator, small enough to
travel inside the page, so that the map works without a network.

The browser's half is `world_map.js` and `world_map.css`. This module does not import Gradio: it
gives the arguments for `gr.HTML`, the script for the page's head, and the value that the two
halves exchange.
"""

import gzip
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from geoguessr_rl.outlines import Ring, arcs, join, unwrap

SIZE = 16384  # the world's width and height in the paths' units; 0.022° a unit
TOLERANCE = 2.3  # units that simplifying may move a line: 0.05° at the equator, less elsewhere
OSM_ATTRIBUTION = "© OpenStreetMap contributors"

Kind = Literal["guess", "base", "trained", "truth", "gps", "consensus", "sample"]
Place = tuple[float, float]  # latitude, longitude

_FOLDER = Path(__file__).parent
_LIMIT = 85.0511  # latitude where Web Mercator's square ends


class Pin(TypedDict, total=False):
    """A mark on the map; its label is text, whatever it holds."""

    lat: float
    lon: float
    kind: Kind
    label: str


class Circle(TypedDict):
    """All places within a distance of one, as far as samples lie apart."""

    lat: float
    lon: float
    km: float


class Paths(NamedTuple):
    """SVG path data in a square of `SIZE` units, north up."""

    land: str
    """Closed rings, lakes included: fill with `fill-rule="evenodd"`."""
    borders: str
    """Open lines between two countries, each once."""


def project(longitude: float, latitude: float) -> tuple[float, float]:
    """Returns a place in Web Mercator, in units of the paths; y is 0 at 85.05° north."""
    sine = math.sin(math.radians(max(-_LIMIT, min(_LIMIT, latitude))))
    return (
        (longitude + 180) / 360 * SIZE,
        (0.5 - math.atanh(sine) / (2 * math.pi)) * SIZE,
    )


def _off_line(points: Ring, first: int, last: int) -> tuple[float, int]:
    """Returns how far the farthest point between two others lies off their line, and which."""
    (x0, y0), (x1, y1) = points[first], points[last]
    dx, dy = x1 - x0, y1 - y0
    length = dx * dx + dy * dy
    farthest, where = -1.0, first
    for i in range(first + 1, last):
        x, y = points[i][0] - x0, points[i][1] - y0
        if length:
            along = max(0.0, min(1.0, (x * dx + y * dy) / length))
            x, y = x - along * dx, y - along * dy
        if x * x + y * y > farthest:
            farthest, where = x * x + y * y, i
    return math.sqrt(max(farthest, 0.0)), where


def simplify(points: Ring, tolerance: float) -> Ring:
    """Drops points that lie within `tolerance` of the line through the others.

    Ramer-Douglas-Peucker. The ends stay, so arcs that meet still meet; a closed arc stays a
    triangle at least, so no island vanishes.
    """
    if len(points) < 3:
        return points
    keep = {0, len(points) - 1}
    spans = [(0, len(points) - 1)]
    if points[0] == points[-1] and len(points) > 3:
        _, far = _off_line(points, 0, len(points) - 1)
        sides = [(0, far), (far, len(points) - 1)]
        _, third = max(_off_line(points, *side) for side in sides)
        keep |= {far, third}
        ends = sorted(keep)
        spans = list(pairwise(ends))
    while spans:
        first, last = spans.pop()
        distance, where = _off_line(points, first, last)
        if distance > tolerance:
            keep.add(where)
            spans += [(first, where), (where, last)]
    return [points[i] for i in sorted(keep)]


def _turns(points: Ring) -> Iterator[Ring]:
    """Yields a line once for each turn around the globe in which the map shows a part of it."""
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    for turn in (-SIZE, 0, SIZE):
        if low + turn < SIZE and high + turn > 0:
            yield [(x + turn, y) for x, y in points]


def _svg(points: Iterable[tuple[float, float]], end: str = "") -> str:
    """Returns a line as SVG path data: whole numbers, each point as the step from the last."""
    whole = [(round(x), round(y)) for x, y in points]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(whole)]
    numbers = [f"{n:d}" for step in steps if step != (0, 0) for n in step]
    line = "".join(n if n[0] == "-" else f" {n}" for n in numbers).lstrip()
    return f"M{whole[0][0]} {whole[0][1]}l{line}{end}" if line else ""


def topology() -> dict[str, Any]:
    """Reads the TopoJSON file: objects `countries` (with names) and `land`."""
    packed = (_FOLDER / "countries-50m.json.gz").read_bytes()
    return json.loads(gzip.decompress(packed))


def rings(geometry: dict[str, Any]) -> Iterator[list[int]]:
    """Yields the rings of a polygon or of several, as lists of arcs."""
    polygons = geometry["arcs"] if geometry["type"] == "MultiPolygon" else [geometry["arcs"]]
    for polygon in polygons:
        yield from polygon


def _mercator(arc: Ring) -> Ring:
    """Projects an arc, and simplifies it; arcs that cross ±180° run past the map's edge."""
    return simplify([project(x, y) for x, y in unwrap(arc)], TOLERANCE)


def _joined(lines: Sequence[Ring], ring: Iterable[int]) -> Ring:
    """Joins projected arcs to a ring, each a whole number of turns from where it was drawn."""
    points: Ring = []
    for x, y in join(lines, ring):
        turn = round((points[-1][0] - x) / SIZE) * SIZE if points else 0
        points.append((x + turn, y))
    return points


@lru_cache
def paths() -> Paths:
    """Returns the land and the borders between countries, computed once a process."""
    world = topology()
    lines = [_mercator(arc) for arc in arcs(world)]
    land = []
    for ring in rings(world["objects"]["land"]["geometries"][0]):
        points = _joined(lines, ring)
        if abs(points[-1][0] - points[0][0]) > SIZE / 2:  # around the pole: Antarctica
            points += [(points[-1][0], SIZE), (points[0][0], SIZE)]
        land += [_svg(piece, "z") for piece in _turns(points)]
    countries = world["objects"]["countries"]["geometries"]
    users = Counter(i if i >= 0 else ~i for one in countries for ring in rings(one) for i in ring)
    borders = [_svg(piece) for i, n in users.items() if n > 1 for piece in _turns(lines[i])]
    return Paths("".join(land), "".join(borders))


@lru_cache
def head() -> str:
    """Returns the script for the page's head (`launch(head=…)`) that all maps of a page share."""
    return f"<script>window.worldMap={json.dumps({'size': SIZE, **paths()._asdict()})}</script>"


def map_value(
    pins: Sequence[Pin] = (),
    lines: Sequence[tuple[Place, Place]] = (),
    circle: Circle | None = None,
    picked: Place | None = None,
    locked: bool = False,
) -> dict[str, Any]:
    """Returns what a map shows, as the value of its component.

    Args:
        pins: Marks; the view moves so that all are seen when they change.
        lines: Great circles between two places.
        circle: An area around a place.
        picked: Where the person's own pin stands.
        locked: Whether a map to click refuses further clicks.
    """
    return {
        "pins": list(pins),
        "lines": [{"from": list(a), "to": list(b)} for a, b in lines],
        "circle": circle,
        "picked": {"lat": picked[0], "lon": picked[1]} if picked else None,
        "locked": locked,
    }


def picked_place(value: object) -> Place | None:
    """Returns the person's pin from what the browser sent, or None.

    A browser can send anything: whatever is not two finite numbers on the globe is no pin.
    """
    pin = value.get("picked") if isinstance(value, dict) else None
    if not isinstance(pin, dict):
        return None
    latitude: Any = pin.get("lat")
    longitude: Any = pin.get("lon")
    if type(latitude) not in (int, float) or type(longitude) not in (int, float):
        return None
    if not (abs(latitude) <= 90 and abs(longitude) <= 180):  # NaN compares false
        return None
    return float(latitude), float(longitude)


def component_arguments(
    *,
    label: str,
    clickable: bool = False,
    value: dict[str, Any] | None = None,
    tiles: str | None = None,
    attribution: str = OSM_ATTRIBUTION,
) -> dict[str, Any]:
    """Returns the keyword arguments of the `gr.HTML` that is a map.

    The page needs `head()` once, in `launch(head=…)`. A click, or Enter on the keyboard, sets
    `picked` in the component's value and sends the event `select`, whose `gr.SelectData.value`
    is `{"lat": …, "lon": …}`.

    Args:
        label: What the map is for, read out by screen readers.
        clickable: Whether the person can drop a pin.
        value: What it shows at first: `map_value(…)`.
        tiles: Address of image tiles with {z}, {x} and {y}. The browser asks that server for
            them, so it learns which places are looked at; without it, no request goes out.
        attribution: The credit that the tiles ask for.
    """
    return {
        "value": value or map_value(),
        "label": label,
        "html_template": '<div class="world-map"></div>',
        "css_template": (_FOLDER / "world_map.css").read_text(encoding="utf-8"),
        "js_on_load": (_FOLDER / "world_map.js").read_text(encoding="utf-8"),
        "apply_default_css": False,
        "clickable": clickable,
        "tiles": tiles,
        "attribution": attribution if tiles else "",
    }
