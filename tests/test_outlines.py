"""The land's outline: in the right place, and no line across the map."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from geoguessr_rl import outlines
from geoguessr_rl.outlines import land_path

PATH = re.compile(r"(M-?[\d.]+ -?[\d.]+(L-?[\d.]+ -?[\d.]+){2,}Z)+")


def rings(path: str) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (point.split() for point in ring.split("L"))]
        for ring in path.strip("MZ").split("ZM")
    ]


def is_land(latitude: float, longitude: float) -> bool:
    """Counts the outlines east of a place, as `fill-rule="evenodd"` does."""
    x, y = 2 * (longitude + 180), 2 * (85 - latitude)
    inside = False
    for ring in rings(land_path()):
        for (x0, y0), (x1, y1) in zip(ring, [*ring[1:], ring[0]], strict=True):
            if (y0 > y) != (y1 > y) and x < x0 + (x1 - x0) * (y - y0) / (y1 - y0):
                inside = not inside
    return inside


@pytest.mark.parametrize(
    ("place", "latitude", "longitude", "land"),
    [
        ("Paris", 48.9, 2.3, True),
        ("Nairobi", -1.3, 36.8, True),
        ("Denver", 39.7, -105.0, True),
        ("Alice Springs", -23.7, 133.9, True),
        ("the south of Chile", -46.6, -72.7, True),
        ("Chukotka, west of 180°", 67.0, 177.0, True),
        ("Chukotka, east of 180°", 66.3, -174.0, True),
        ("the Atlantic", 30.0, -45.0, False),
        ("the Caspian Sea, a hole", 41.5, 50.8, False),
        ("the Pacific at 180°", 30.0, -179.0, False),
        ("the Bering Strait's south", 60.0, -178.0, False),
    ],
)
def test_land_is_where_land_is(place: str, latitude: float, longitude: float, land: bool) -> None:
    assert is_land(latitude, longitude) == land, place


def test_arcs_are_steps_on_a_grid_and_may_run_backwards() -> None:
    topology = {
        "transform": {"scale": [0.5, 2], "translate": [-180, -90]},
        "arcs": [[[0, 0], [4, 0], [0, 5]], [[0, 0], [0, 5], [4, 0]]],
        "objects": {"land": {"geometries": [{"arcs": [[[0, ~1]], [[1]]]}]}},
    }
    there = [(-180, -90), (-178, -90), (-178, -80)]
    back = [(-178, -80), (-180, -80), (-180, -90)]
    assert list(outlines._rings(topology)) == [[*there, *back], back[::-1]]


def test_the_path_is_closed_rings_within_the_map() -> None:
    assert PATH.fullmatch(land_path())
    points = [point for ring in rings(land_path()) for point in ring]
    assert all(0 <= x <= 720 and 0 <= y <= 290 for x, y in points)  # Antarctica would lie below


def test_no_line_crosses_the_map() -> None:
    for ring in rings(land_path()):
        assert max(abs(b[0] - a[0]) for a, b in pairwise([*ring, ring[0]])) < 30


def test_no_point_is_given_twice_running() -> None:
    for ring in rings(land_path()):
        assert all(a != b for a, b in pairwise(ring))


def test_fewer_decimals_make_a_shorter_path() -> None:
    assert len(land_path(0)) < len(land_path()) < 60_000
    assert "." not in land_path(0)
    assert PATH.fullmatch(land_path(0))


def test_the_file_names_its_source_and_carries_its_licence() -> None:
    text = (Path(outlines.__file__).parent / "land-110m.json").read_text(encoding="utf-8")
    licence = json.loads(text)["licence"]
    assert "Natural Earth, public domain" in licence
    assert "Permission to use, copy, modify, and/or distribute" in licence


def test_a_run_along_the_maps_edge_keeps_its_ends_alone() -> None:
    run = [(700.0, 10.0), (720.0, 10.0), (720.0, 12.0), (720.0, 14.0), (700.0, 14.0)]
    assert outlines._thin(run) == [run[0], run[1], run[3], run[4]]
