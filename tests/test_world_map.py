"""The map of the world: land where land is, and a component that a person can use.

The second half runs a small Gradio app in a real browser.
"""

import http.server
import itertools
import json
import math
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from browser import Tab, browser_fixture, open_tab, require_browser  # noqa: F401  (a fixture)

from geoguessr_rl import world_map
from geoguessr_rl.outlines import arcs
from geoguessr_rl.reward import haversine_km
from geoguessr_rl.world_map import SIZE, picked_place, project, simplify

WIDTHS = {1280: {}, 390: {"height": 844, "has_touch": True, "is_mobile": True}}
EUROPE = [
    {"lat": 48.86, "lon": 2.35, "kind": "truth", "label": "Paris"},
    {"lat": 52.5, "lon": 13.4, "kind": "base", "label": "Germany"},
    {
        "lat": 45.5,
        "lon": 9.2,
        "kind": "trained",
        "label": "<img src=x onerror=alert(1)><b>Italy</b>",
    },
]


# ---- the outlines -----------------------------------------------------------------------------


def lines_of(path: str) -> list[list[tuple[int, int]]]:
    """Decodes `M x y l dx dy …`, the only commands that the paths use."""
    lines = []
    for part in re.findall(r"M([^Ml]+)l([^Mz]+)", path):
        x, y = map(int, re.findall(r"-?\d+", part[0]))
        numbers = list(map(int, re.findall(r"-?\d+", part[1])))
        line = [(x, y)]
        for dx, dy in zip(numbers[::2], numbers[1::2], strict=True):
            x, y = x + dx, y + dy
            line.append((x, y))
        lines.append(line)
    return lines


@lru_cache
def land() -> list[list[tuple[int, int]]]:
    return lines_of(world_map.paths().land)


@lru_cache
def borders() -> list[list[tuple[int, int]]]:
    return lines_of(world_map.paths().borders)


def is_land(latitude: float, longitude: float) -> bool:
    """Counts the outlines east of a place, as `fill-rule="evenodd"` does."""
    x, y = project(longitude, latitude)
    inside = False
    for ring in land():
        for (x0, y0), (x1, y1) in zip(ring, [*ring[1:], ring[0]], strict=True):
            if (y0 > y) != (y1 > y) and x < x0 + (x1 - x0) * (y - y0) / (y1 - y0):
                inside = not inside
    return inside


@pytest.mark.parametrize(
    ("place", "latitude", "longitude", "expected"),
    [
        ("Paris", 48.9, 2.3, True),
        ("Nairobi", -1.3, 36.8, True),
        ("Denver", 39.7, -105.0, True),
        ("Alice Springs", -23.7, 133.9, True),
        ("Lesotho, within another country", -29.6, 28.2, True),
        ("Malta, an island", 35.9, 14.4, True),
        ("Chukotka, west of 180°", 67.0, 177.0, True),
        ("Chukotka, east of 180°", 66.4, -171.0, True),
        ("the South Pole's side of Antarctica", -84.0, 0.0, True),
        ("Antarctica at the map's left edge", -84.8, -179.9, True),
        ("Antarctica at its right edge", -84.8, 179.9, True),
        ("the Atlantic", 30.0, -45.0, False),
        ("the Caspian Sea, a hole", 41.5, 50.8, False),
        ("the Pacific at 180°", 30.0, -179.0, False),
        ("the Southern Ocean", -60.0, 90.0, False),
        ("the Arctic Ocean", 84.5, 0.0, False),
    ],
)
def test_land_is_where_land_is(
    place: str, latitude: float, longitude: float, expected: bool
) -> None:
    assert is_land(latitude, longitude) == expected, place


def test_every_country_of_the_file_is_drawn() -> None:
    world = world_map.topology()
    decoded = arcs(world)
    drawn = {(x % SIZE, y) for line in [*land(), *borders()] for x, y in line}
    countries = world["objects"]["countries"]["geometries"]
    assert len(countries) == 241
    missing = set()
    for country in countries:
        for ring in world_map.rings(country):
            for index in ring:
                x, y = project(*decoded[max(index, ~index)][0])
                if (round(x) % SIZE, round(y)) not in drawn:
                    missing.add(country["properties"]["name"])
    # A fifth of a unit wide, less than a pixel at the closest; and it is a hole in Italy.
    assert missing == {"Vatican", "Italy"}


def test_no_line_crosses_the_map() -> None:
    for line in [*land(), *borders()]:
        steps = itertools.pairwise(line)
        long = [(a, b) for a, b in steps if abs(a[0] - b[0]) > SIZE / 10]
        assert all(a[1] == b[1] == SIZE for a, b in long)  # Antarctica's lower edge alone


def test_each_border_is_drawn_once() -> None:
    steps = [frozenset(step) for line in borders() for step in itertools.pairwise(line)]
    assert len(steps) == len(set(steps)) > 4000


def test_the_paths_are_small_and_whole_numbers() -> None:
    paths = world_map.paths()
    assert 150_000 < len(paths.land) + len(paths.borders) < 250_000
    for path in paths:
        assert re.fullmatch(r"(M-?\d+ -?\d+l(-?\d+[ -]?)+z?)+", path)
    assert len(world_map.head()) < 250_000
    assert world_map.head().count("</") == 1  # nothing ends the script early


def test_arcs_that_meet_at_180_join_without_a_jump() -> None:
    east, west = [(SIZE - 9.0, 5.0), (SIZE + 9.0, 5.0)], [(9.0, 5.0), (20.0, 7.0)]
    joined = world_map._joined([east, west], [0, 1])
    assert joined == [*east, (SIZE + 9.0, 5.0), (SIZE + 20.0, 7.0)]


def test_simplifying_keeps_the_ends_and_an_islands_area() -> None:
    bent = [(0.0, 0.0), (1.0, 0.4), (2.0, -0.4), (3.0, 0.0), (3.2, 2.0), (3.0, 5.0)]
    assert simplify(bent, 0.5) == [(0.0, 0.0), (3.0, 0.0), (3.0, 5.0)]
    island = [(0.0, 0.0), (0.1, 0.2), (0.3, 0.2), (0.2, 0.0), (0.0, 0.0)]
    kept = simplify(island, 10.0)
    assert len(set(kept)) == 3
    assert kept[0] == kept[-1]


def test_the_sources_licence_lies_beside_the_file() -> None:
    text = Path(world_map.__file__).with_name("countries-50m.LICENSE.txt").read_text("utf-8")
    assert "public domain" in text
    assert "Permission to use, copy, modify, and/or distribute" in text


# ---- the value --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "place"),
    [
        ({"picked": {"lat": 48.8, "lon": 2.3}}, (48.8, 2.3)),
        ({"picked": {"lat": -90, "lon": 180}}, (-90.0, 180.0)),
        ({"picked": None}, None),
        ({}, None),
        (None, None),
        ("48.8, 2.3", None),
        ({"picked": [48.8, 2.3]}, None),
        ({"picked": {"lat": "48.8", "lon": 2.3}}, None),
        ({"picked": {"lat": True, "lon": 2.3}}, None),
        ({"picked": {"lat": float("nan"), "lon": 2.3}}, None),
        ({"picked": {"lat": 90.1, "lon": 2.3}}, None),
        ({"picked": {"lat": 0, "lon": float("inf")}}, None),
        ({"picked": {"lat": 10**400, "lon": 0}}, None),
    ],
)
def test_only_a_place_on_the_globe_is_a_pin(sent: object, place: object) -> None:
    assert picked_place(sent) == place


def test_the_style_sheet_is_plain_text_as_a_template() -> None:
    css = world_map.component_arguments(label="A")["css_template"]
    assert not re.search(r"`|\$\{|\{\{|\\", css)  # Gradio would run what is within


def test_credit_is_given_for_tiles_alone() -> None:
    assert world_map.component_arguments(label="A")["attribution"] == ""
    with_tiles = world_map.component_arguments(label="A", tiles="http://x/{z}/{x}/{y}")
    assert with_tiles["attribution"] == "© OpenStreetMap contributors"


# ---- the component, in a browser ----------------------------------------------------------------


@pytest.fixture(scope="module")
def app() -> Iterator[str]:
    """A page with a map to click, one that shows what the box of JSON says, and one on a tab."""
    require_browser()
    import gradio as gr

    count = itertools.count()

    def on_ask(value: Any) -> str:
        return json.dumps([next(count), value])

    def on_select(value: Any, event: gr.SelectData) -> str:
        return json.dumps([picked_place(value), event.value])

    with gr.Blocks(analytics_enabled=False) as demo:
        play = gr.HTML(
            **world_map.component_arguments(label="Where is it?", clickable=True), elem_id="play"
        )
        selected = gr.Textbox(elem_id="selected")
        asked = gr.Textbox(elem_id="asked")
        text = gr.Textbox(elem_id="json")
        gr.Button("Ask", elem_id="ask").click(on_ask, play, asked)
        gr.Button("Set", elem_id="set").click(json.loads, text, play)
        play.select(on_select, play, selected)
        with gr.Tab("First"):
            gr.Markdown("Nothing here.")
        with gr.Tab("Second"):
            arguments = world_map.component_arguments(
                label="Answers", value=world_map.map_value(EUROPE)
            )
            gr.HTML(**arguments, elem_id="hidden")
    _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, head=world_map.head())
    yield url
    demo.close()


class Map:
    """A map on a page, as a person sees it."""

    def __init__(self, tab: Tab, name: str = "play") -> None:
        self.tab, self.page, self.name = tab, tab.page, name
        self.frame = tab.page.locator(f"#{name} .frame")
        self.frame.wait_for()
        self.frame.scroll_into_view_if_needed()
        self.settle()

    def settle(self) -> None:
        """Waits until what was asked for is drawn."""
        self.page.evaluate("() => new Promise((go) => requestAnimationFrame(() => setTimeout(go)))")

    def on_screen(self, latitude: float, longitude: float) -> tuple[float, float]:
        """Where the drawn land has a place, in pixels of the frame."""
        x, y = project(longitude, latitude)
        script = """(frame, [x, y]) => {
            const box = frame.getBoundingClientRect();
            const shown = frame.querySelector(".land").getScreenCTM();
            const at = new DOMPoint(x, y).matrixTransform(shown);
            return [at.x - box.x, at.y - box.y];
        }"""
        self.settle()
        return tuple(self.frame.evaluate(script, [x, y]))

    def hold(self, selector: str, places: list[tuple[float, float]]) -> list[bool]:
        """Whether a filled path of the map covers each of some places."""
        script = "(path, all) => all.map(([x, y]) => path.isPointInFill(new DOMPoint(x, y)))"
        at = [project(longitude, latitude) for latitude, longitude in places]
        return self.frame.locator(selector).evaluate(script, at)

    def pins(self) -> dict[str, list[float]]:
        """The place on the screen of each kind of pin."""
        script = """(frame) => {
            const box = frame.getBoundingClientRect();
            return Object.fromEntries([...frame.querySelectorAll(".pin")].map((pin) => {
                const at = new DOMPoint(0, 0).matrixTransform(pin.getScreenCTM());
                return [pin.dataset.kind, [at.x - box.x, at.y - box.y]];
            }));
        }"""
        self.settle()
        return self.frame.evaluate(script)

    def size(self) -> tuple[float, float]:
        box = self.frame.bounding_box()
        return box["width"], box["height"]

    def press(self, button: str, times: int = 1) -> None:
        for _ in range(times):
            self.page.locator(f"#{self.name}").get_by_role("button", name=button).click()
        self.settle()

    def set(self, value: dict[str, Any]) -> None:
        """Lets Python send a value, and waits until it is drawn."""
        marker = str(len(self.tab.requests))
        self.page.locator("#json textarea").fill(json.dumps({**value, "marker": marker}))
        self.page.locator("#set").click()
        for _ in range(100):
            if self.ask().get("marker") == marker:
                return
        raise AssertionError("the value never came")

    def ask(self) -> dict[str, Any]:
        """What a button's handler gets that takes the map as its input."""
        box = self.page.locator("#asked textarea")
        before = box.input_value()
        self.page.locator("#ask").click()
        for _ in range(200):
            if box.input_value() != before:
                break
            self.page.wait_for_timeout(25)
        return json.loads(box.input_value())[1]

    def picked(self) -> tuple[float, float]:
        """What the handler of `select` got, once it answered."""
        box = self.page.locator("#selected textarea")
        for _ in range(100):
            if box.input_value():
                break
            self.page.wait_for_timeout(50)
        from_value, from_event = json.loads(box.input_value())
        assert from_event == {"lat": from_value[0], "lon": from_value[1]}
        return tuple(from_value)


@pytest.fixture(params=WIDTHS, ids=lambda width: f"{width}px")
def shown(app: str, browser: Any, request: Any) -> Iterator[Map]:
    with open_tab(browser, app, width=request.param, **WIDTHS[request.param]) as tab:
        yield Map(tab)
        assert tab.errors == []
        assert tab.refused == []


@pytest.fixture
def wide(app: str, browser: Any) -> Iterator[Map]:
    with open_tab(browser, app) as tab:
        yield Map(tab)
        assert tab.errors == []
        assert tab.refused == []


@pytest.mark.parametrize("presses", [0, 3, 6])
def test_a_click_drops_the_pin_under_the_pointer(shown: Map, presses: int) -> None:
    shown.press("Zoom in", presses)
    width, height = shown.size()
    x, y = round(width * 0.6), round(height * 0.3)
    shown.frame.click(position={"x": x, "y": y})
    place = shown.picked()
    assert shown.on_screen(*place) == pytest.approx((x, y), abs=0.6)
    assert shown.pins()["guess"] == pytest.approx((x, y), abs=0.6)
    assert shown.ask()["picked"] == {"lat": place[0], "lon": place[1]}
    assert shown.hold(".land", [place]) == [is_land(*place)]


def test_the_map_shows_the_world_and_has_the_shape_of_its_width(shown: Map) -> None:
    width, height = shown.size()
    assert width / height == pytest.approx(2 if width > 640 else 4 / 3, rel=0.01)
    assert width > 0.8 * shown.page.viewport_size["width"]
    for place in [(70, -150), (-50, -70), (65, 175), (-45, 170)]:
        x, y = shown.on_screen(*place)
        assert 0 < x < width and 0 < y < height, place
    shown.press("Zoom in", 9)
    zoomed = shown.on_screen(0, 90)[0] - shown.on_screen(0, 0)[0]
    shown.press("Show the whole world")
    assert zoomed == pytest.approx(64 * (shown.on_screen(0, 90)[0] - shown.on_screen(0, 0)[0]))


def test_a_second_click_moves_the_pin_and_a_place_beyond_180_is_on_the_other_side(
    wide: Map,
) -> None:
    width, height = wide.size()
    wide.frame.click(position={"x": 300, "y": 200})
    wide.picked()
    wide.frame.click(position={"x": width - 4, "y": height / 2})
    picked = wide.ask()["picked"]
    assert -180 <= picked["lon"] < -165
    assert wide.pins() == {"guess": pytest.approx([width - 4, height / 2], abs=0.6)}


def test_the_keyboard_alone_drops_a_pin(shown: Map) -> None:
    assert not shown.frame.locator(".cross").is_visible()
    for _ in range(40):
        shown.page.keyboard.press("Tab")
        if shown.frame.evaluate("(frame) => frame === document.activeElement"):
            break
    width, height = shown.size()
    assert shown.frame.locator(".cross").is_visible()
    for key in ["ArrowRight"] * 3 + ["ArrowUp", "Shift+ArrowLeft"]:
        shown.page.keyboard.press(key)
    shown.page.keyboard.press("Enter")
    assert shown.on_screen(*shown.picked()) == pytest.approx(
        (width / 2 + 58, height / 2 - 20), abs=0.6
    )
    for key in ["+", "+", "ArrowDown", " "]:
        shown.page.keyboard.press(key)
    picked = shown.ask()["picked"]
    assert shown.pins()["guess"] == pytest.approx((width / 2 + 58, height / 2), abs=0.6)
    assert shown.on_screen(picked["lat"], picked["lon"]) == pytest.approx(
        (width / 2 + 58, height / 2), abs=0.6
    )


def test_arrow_keys_reach_every_edge_of_the_world(wide: Map) -> None:
    wide.frame.focus()
    for _ in range(2):
        wide.page.keyboard.press("+")
    for key in ["ArrowLeft"] * 150 + ["ArrowDown"] * 150:
        wide.page.keyboard.press(key)
    wide.page.keyboard.press("Enter")
    latitude, _ = wide.picked()
    width, height = wide.size()
    x, y = wide.pins()["guess"]
    assert latitude < -85 and -1 < x < width and 0 < y < height + 1
    left, _ = wide.on_screen(0, -180)
    assert left > 0


def test_a_map_that_only_shows_moves_by_its_keys_and_takes_no_click(wide: Map) -> None:
    wide.page.get_by_role("tab", name="Second").click()
    other = Map(wide.tab, "hidden")
    before = other.on_screen(48.86, 2.35)
    other.frame.focus()
    other.page.keyboard.press("ArrowRight")
    assert other.on_screen(48.86, 2.35) == pytest.approx((before[0] - 60, before[1]))
    other.page.keyboard.press("Enter")
    other.frame.click(position={"x": 300, "y": 200})
    assert "guess" not in other.pins()


def test_a_map_on_a_tab_that_was_hidden_fits_its_pins(shown: Map) -> None:
    shown.page.get_by_role("tab", name="Second").click()
    other = Map(shown.tab, "hidden")
    assert_pins_fit(other)


def assert_pins_fit(shown: Map) -> None:
    width, height = shown.size()
    pins = shown.pins()
    assert set(pins) >= {"truth", "base", "trained"}
    for x, y in pins.values():
        assert 30 < x < width - 30 and 30 < y < height - 30
    spread = max(x for x, _ in pins.values()) - min(x for x, _ in pins.values())
    assert spread > 0.15 * width  # and not as a dot in the middle of the whole world


def test_a_drag_moves_the_map_and_drops_no_pin(shown: Map) -> None:
    shown.press("Zoom in", 3)
    before = shown.on_screen(20, 0)
    box = shown.frame.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    shown.page.mouse.move(x, y)
    shown.page.mouse.down()
    shown.page.mouse.move(x + 40, y + 25, steps=8)
    shown.page.mouse.up()
    assert shown.on_screen(20, 0) == pytest.approx((before[0] + 40, before[1] + 25), abs=0.6)
    assert shown.ask()["picked"] is None
    shown.page.mouse.move(x + 40, y + 25)
    shown.page.mouse.down()
    shown.page.mouse.move(x + 43, y + 25)  # the hand is not quite still
    shown.page.mouse.up()
    assert shown.picked()


def test_the_wheel_zooms_about_the_pointer_and_the_buttons_about_the_middle(wide: Map) -> None:
    box = wide.frame.bounding_box()
    width, height = wide.size()
    x, y = round(0.7 * width), round(0.4 * height)
    wide.frame.click(position={"x": x, "y": y})
    place = wide.picked()
    scale = wide.on_screen(0, 90)[0] - wide.on_screen(0, 0)[0]
    wide.page.mouse.move(box["x"] + x, box["y"] + y)
    for _ in range(4):
        wide.page.mouse.wheel(0, -200)
        wide.page.wait_for_timeout(50)
    assert wide.on_screen(*place) == pytest.approx((x, y), abs=0.6)
    assert wide.on_screen(0, 90)[0] - wide.on_screen(0, 0)[0] > 3 * scale
    for _ in range(20):
        wide.page.mouse.wheel(0, 200)
        wide.page.wait_for_timeout(20)
    assert wide.on_screen(0, 90)[0] - wide.on_screen(0, 0)[0] == pytest.approx(scale)

    wide.press("Show the whole world")
    middle_before = wide.on_screen(0, 0)
    wide.press("Zoom in", 2)
    middle_after = wide.on_screen(0, 0)
    for before, after, centre in zip(
        middle_before, middle_after, (width / 2, height / 2), strict=True
    ):
        assert after - centre == pytest.approx(4 * (before - centre), abs=0.6)


def test_python_draws_pins_lines_and_a_circle_and_labels_are_text(shown: Map) -> None:
    lines = [((48.86, 2.35), (52.5, 13.4)), ((48.86, 2.35), (45.5, 9.2))]
    circle = {"lat": 48.86, "lon": 2.35, "km": 300}
    shown.set(world_map.map_value(EUROPE, lines, circle))
    assert_pins_fit(shown)
    for pin in EUROPE:
        expected = shown.on_screen(pin["lat"], pin["lon"])
        assert shown.pins()[pin["kind"]] == pytest.approx(expected, abs=0.6)
    world = shown.page.locator("#play")
    assert world.locator("img, b").count() == 0
    legend = world.locator(".legend").inner_text()
    assert "Trained model: <img src=x onerror=alert(1)><b>Italy</b>" in legend
    assert "Truth: Paris" in legend and "Spread of the samples: 300 km" in legend
    titles = world.locator(".pin title").all_text_contents()
    assert "Trained model: <img src=x onerror=alert(1)><b>Italy</b>" in titles
    assert {pin.get_attribute("data-kind") for pin in world.locator(".pin").all()} == {
        "truth",
        "base",
        "trained",
    }
    shapes = world.locator(".pin .mark")
    assert len({shape.get_attribute("d") for shape in shapes.all()}) == 3
    assert len({shape.get_attribute("fill") for shape in shapes.all()}) == 3


def test_the_view_stays_until_pins_come_from_python(shown: Map) -> None:
    shown.press("Zoom in", 3)
    shown.frame.click(position={"x": 100, "y": 60})
    place = shown.picked()
    before = shown.on_screen(0, 0)
    shown.set(world_map.map_value(picked=place, locked=True))
    assert shown.on_screen(0, 0) == pytest.approx(before)
    shown.frame.click(position={"x": 200, "y": 90})  # locked: the pin stays
    assert shown.ask()["picked"] == {"lat": place[0], "lon": place[1]}

    shown.set(world_map.map_value(EUROPE, picked=(50.0, 5.0)))
    assert_pins_fit(shown)
    shown.press("Zoom in")
    before = shown.on_screen(0, 0)
    shown.set(world_map.map_value(EUROPE, picked=(40.0, -3.0)))
    assert shown.on_screen(0, 0) == pytest.approx(before)  # only the person's own pin moved

    shown.set(world_map.map_value())  # the next round
    assert shown.pins() == {}
    width, _ = shown.size()
    assert shown.on_screen(0, 180)[0] - shown.on_screen(0, -180)[0] < width


def test_one_pin_is_shown_with_its_surroundings(wide: Map) -> None:
    wide.set(world_map.map_value([{"lat": 48.86, "lon": 2.35, "kind": "trained"}]))
    width, height = wide.size()
    assert wide.pins()["trained"] == pytest.approx((width / 2, height / 2), abs=1)
    assert wide.on_screen(0, 90)[0] - wide.on_screen(0, 0)[0] == pytest.approx(width, rel=0.07)


def test_pins_keep_their_size_and_strokes_their_width(wide: Map) -> None:
    wide.set(world_map.map_value([{"lat": 10.0, "lon": 0.0, "kind": "base"}]))
    mark = wide.frame.locator(".pin .mark")
    before = mark.bounding_box()
    wide.press("Zoom in", 3)
    after = mark.bounding_box()
    assert (after["width"], after["height"]) == pytest.approx((before["width"], before["height"]))
    for path in [".land", ".border"]:
        effect = "(path) => getComputedStyle(path).vectorEffect"
        assert wide.frame.locator(path).evaluate(effect) == "non-scaling-stroke"


CIRCLES = [
    (50, 5, 400),
    (0, 179, 1500),  # over ±180°
    (-17, -179.5, 900),
    (80, 100, 1800),  # a pole
    (-75, -60, 3000),
    (10, 20, 12000),  # one pole and more than half of the globe
    (0, 0, 15000),  # both poles
    (48, 2, 20100),  # the globe
]


def test_the_circle_holds_what_lies_within_its_radius(wide: Map) -> None:
    for lat, lon, km in CIRCLES:
        wide.set(world_map.map_value(circle={"lat": lat, "lon": lon, "km": km}))
        grid = itertools.product(range(-84, 85, 12), range(-179, 180, 13))
        away = {place: haversine_km(lat, lon, *place) for place in grid}
        # 72 corners are not quite a circle.
        clear = [place for place in away if abs(away[place] - km) > 0.04 * km + 30]
        assert len(clear) > 300
        inside = wide.hold(".area", clear)
        wrong = [p for p, held in zip(clear, inside, strict=True) if held != (away[p] < km)]
        assert wrong == [], (lat, lon, km)


LINES = [
    ((48.86, 2.35), (-33.9, 151.2)),
    ((-41.3, 174.8), (37.8, -122.4)),  # over ±180°
    ((60, -179), (60, 179)),
    ((70, -150), (70, 30)),  # over the pole, where the longitude turns at once
    ((0, 0), (1, 179)),
    ((10, 10), (10, 10)),
]


def test_lines_are_great_circles_that_leave_at_one_edge_and_enter_at_the_other(
    wide: Map,
) -> None:
    for start, end in LINES:
        wide.set(world_map.map_value(lines=[(start, end)]))
        turns = wide.frame.locator(".line:not(.halo)").get_attribute("d").split("M")[1:]
        points = [tuple(map(float, point.split(" "))) for point in turns[1].split("L")]
        whole = haversine_km(*start, *end)
        for x, y in points:
            place = unproject(x, y)
            way = haversine_km(*start, *place) + haversine_km(*place, *end)
            assert way == pytest.approx(whole, rel=1e-3, abs=3)
        if start[0] != 70:
            assert all(abs(a[0] - b[0]) < SIZE / 6 for a, b in itertools.pairwise(points))
        first = [float(turn.split(" ")[0]) for turn in turns]
        assert first == pytest.approx([first[1] - SIZE, first[1], first[1] + SIZE])


def unproject(x: float, y: float) -> tuple[float, float]:
    latitude = math.degrees(math.atan(math.sinh(math.pi * (1 - 2 * y / SIZE))))
    return latitude, x / SIZE * 360 % 360 - 180


def test_what_is_no_place_or_no_known_kind_breaks_nothing(wide: Map) -> None:
    pins = [
        {"lat": None, "lon": 3, "kind": "base"},
        {"lat": "48", "lon": 3, "kind": "base"},
        {"lat": 10, "lon": 3, "kind": "toString", "label": 7},
        {"lat": 95, "lon": 400, "kind": "truth", "label": "x" * 5000},
    ]
    wide.set({"pins": pins, "picked": {"lat": "a"}, "circle": {"lat": 1}})
    assert set(wide.pins()) == {"toString", "truth"}


def touch_screen(tab: Tab) -> Callable[..., None]:
    """Returns what puts fingers on a page's screen, moves them and takes them away."""
    devtools = tab.page.context.new_cdp_session(tab.page)

    def fingers(kind: str, *places: tuple[float, float]) -> None:
        points = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(places)]
        devtools.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    return fingers


def test_a_tap_drops_a_pin_and_a_pinch_zooms(app: str, browser: Any) -> None:
    with open_tab(browser, app, width=390, **WIDTHS[390]) as tab:
        phone = Map(tab)
        box = phone.frame.bounding_box()
        x, y = box["x"] + 150, box["y"] + 100
        fingers = touch_screen(tab)

        def width_of_world() -> float:
            return phone.on_screen(0, 90)[0] - phone.on_screen(0, 0)[0]

        before = width_of_world()
        fingers("touchStart", (x - 30, y), (x + 30, y))
        for reach in range(35, 95, 5):
            fingers("touchMove", (x - reach, y), (x + reach, y))
        fingers("touchEnd")
        assert width_of_world() == pytest.approx(3 * before, rel=0.05)
        fingers("touchStart", (x - 30, y), (x + 30, y))  # two fingers at rest
        fingers("touchEnd")
        assert phone.ask()["picked"] is None
        assert tab.page.evaluate("visualViewport.scale") == 1  # the map zoomed, not the page
        phone.frame.scroll_into_view_if_needed()
        phone.frame.tap(position={"x": 120, "y": 90})
        assert phone.on_screen(*phone.picked()) == pytest.approx((120, 90), abs=1)
        assert tab.errors == []


def test_a_finger_scrolls_the_page_past_the_whole_world_and_moves_a_part_of_it(
    app: str, browser: Any
) -> None:
    with open_tab(browser, app, width=390, **{**WIDTHS[390], "height": 500}) as tab:
        phone = Map(tab)
        fingers = touch_screen(tab)

        def swipe() -> float:
            """Swipes up over the map, and returns how far the page went."""
            tab.page.evaluate("window.scrollTo(0, 0)")
            box = phone.frame.bounding_box()
            x, y = box["x"] + 150, box["y"] + 150
            fingers("touchStart", (x, y))
            for moved in range(0, 120, 8):
                fingers("touchMove", (x, y - moved))
                tab.page.wait_for_timeout(16)
            fingers("touchEnd")
            tab.page.wait_for_timeout(300)
            return tab.page.evaluate("window.scrollY")

        assert swipe() > 50
        tab.page.evaluate("window.scrollTo(0, 0)")
        phone.press("Zoom in", 3)
        before = phone.on_screen(0, 0)
        assert swipe() == 0
        assert phone.on_screen(0, 0)[1] < before[1] - 50
        assert phone.ask()["picked"] is None


def test_the_map_is_dark_on_a_dark_page(app: str, browser: Any) -> None:
    fills = {}
    for scheme in ["light", "dark"]:
        with open_tab(browser, app, color_scheme=scheme) as tab:
            shown = Map(tab)
            fills[scheme] = shown.frame.evaluate(
                """(frame) => [
                    getComputedStyle(frame.querySelector(".land")).fill,
                    getComputedStyle(frame).backgroundColor,
                ].map((colour) => Math.max(...colour.match(/[0-9]+/g).map(Number)))"""
            )
    assert min(fills["light"]) > 200
    assert max(fills["dark"]) < 100


def test_the_outlines_travel_once_for_all_maps_of_a_page(app: str) -> None:
    with urllib.request.urlopen(app) as answer:
        page = answer.read().decode()
    assert page.count(world_map.paths().land[:300]) == 1
    assert page.count(world_map.paths().borders[:300]) == 1


# ---- tiles --------------------------------------------------------------------------------------

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415478"
    "9c63606060000000040001f61738550000000049454e44ae426082"
)


@pytest.fixture(scope="module")
def tiles() -> Iterator[SimpleNamespace]:
    """A server of one-pixel tiles that writes down what it was asked for, and may refuse."""
    state = SimpleNamespace(asked=[], status=200)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            self.send_response(state.status)
            self.send_header("Content-Type", "image/png")
            self.end_headers()
            if state.status == 200:
                self.wfile.write(PNG)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state.url = f"http://127.0.0.1:{server.server_port}"
        yield state
        server.shutdown()


@pytest.fixture(scope="module")
def tiled(tiles: SimpleNamespace) -> Iterator[str]:
    require_browser()
    import gradio as gr

    with gr.Blocks(analytics_enabled=False) as demo:
        arguments = world_map.component_arguments(
            label="Tiles", clickable=True, tiles=tiles.url + "/{z}/{x}/{y}.png"
        )
        gr.HTML(**arguments, elem_id="play")
    _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, head=world_map.head())
    yield url
    demo.close()


def test_tiles_lie_where_their_numbers_say(
    tiled: str, tiles: SimpleNamespace, browser: Any
) -> None:
    tiles.asked, tiles.status = [], 200
    with open_tab(browser, tiled) as tab:
        shown = Map(tab)
        assert "© OpenStreetMap contributors" in tab.page.locator("#play .credit").inner_text()
        for _ in range(3):
            tab.page.wait_for_timeout(400)
            images = shown.frame.locator(".tiles image").all()
            assert 0 < len(images) <= 40
            for image in images:
                z, x, y = map(
                    int, re.findall(r"/(\d+)/(\d+)/(\d+).png", image.get_attribute("href"))[0]
                )
                assert 0 <= x < 2**z and 0 <= y < 2**z
                box = image.evaluate("(i) => ['x', 'y', 'width'].map((n) => +i.getAttribute(n))")
                assert box == pytest.approx([x * SIZE / 2**z, y * SIZE / 2**z, SIZE / 2**z])
            shown.press("Zoom in", 2)
        assert tab.errors == []
    depths = {path.split("/")[1] for path in tiles.asked}
    assert depths == {"2", "4", "6"}  # not those of the zooms passed through


def test_a_large_screen_asks_for_few_tiles(
    tiled: str, tiles: SimpleNamespace, browser: Any
) -> None:
    tiles.status = 200
    with open_tab(browser, tiled, width=2400, height=1500) as tab:
        shown = Map(tab)
        for _ in range(7):
            tab.page.wait_for_timeout(300)
            assert 0 < shown.frame.locator(".tiles image").count() <= 40
            tab.page.mouse.move(900, 500)
            tab.page.mouse.wheel(0, -100)


def test_tiles_that_fail_leave_the_drawn_land(
    tiled: str, tiles: SimpleNamespace, browser: Any
) -> None:
    tiles.asked, tiles.status = [], 503
    with open_tab(browser, tiled) as tab:
        shown = Map(tab)
        tab.page.wait_for_timeout(800)
        assert shown.frame.locator(".tiles image").count() == 0
        assert shown.frame.locator(".land").is_visible()
    assert 0 < len(tiles.asked) <= 40  # each once
