"""Screening: what is printed into a photo goes, what stands in the street stays."""

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from geoguessr_rl import images, screen
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import ImagePolicy, Screen
from geoguessr_rl.screen import Line

SHARED = Path(__file__).parents[2] / "shared/osv5m_mini/images"
TEXT = Screen(text=True)
PLACES = ("France", "Île-de-France", "Paris")
reads_text = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="the package that reads text has no release for it"
)


def grainy(image: Image.Image, deviation: float) -> Image.Image:
    """The picture with the grain of a sensor, always the same."""
    pixels = np.asarray(image, dtype=np.float64)
    noise = np.random.default_rng(0).normal(0, deviation, pixels.shape)
    return Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))


def street(size: tuple[int, int] = (640, 480)) -> Image.Image:
    """A road under a sky, with some grain."""
    width, height = size
    image = Image.new("RGB", size, (150, 175, 205))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, height // 2, width, height), fill=(105, 125, 80))
    draw.polygon(
        [(width // 2, height // 2), (0, height), (width, height)],
        fill=(85, 85, 88),
    )
    return grainy(image, 4)


def write(image: Image.Image, text: str, at: tuple[int, int], size: int, fill: str) -> Image.Image:
    draw = ImageDraw.Draw(image)
    draw.text(at, text, fill=fill, font=ImageFont.load_default(size=size))
    return image


def sign(image: Image.Image, text: str, at: tuple[int, int]) -> Image.Image:
    """A white board with a name on it, as at the entry of a town."""
    x, y = at
    ImageDraw.Draw(image).rectangle((x, y, x + 170, y + 48), fill="white", outline="red", width=4)
    return write(image, text, (x + 20, y + 6), 30, "black")


def line(text: str, top: float = 0.5, bottom: float = 0.53, level: bool = True) -> Line:
    return Line(text, top, bottom, level)


# --- Pictures


@reads_text
@pytest.mark.parametrize(
    ("text", "at", "size", "what"),
    [
        ("2019-03-12 08:15:42", (400, 452), 18, "date"),
        ("06/08/2021", (520, 450), 14, "date"),
        ("N48.8566 E2.3522", (20, 8), 18, "coordinates"),
        ("48.85661, 2.35222", (200, 300), 18, "coordinates"),  # anywhere, as they are no clue
        ("PARIS", (20, 448), 20, "name Paris"),
        ("CITY OF PARIS, traffic camera 4", (20, 8), 20, "name Paris"),
    ],
)
def test_printed_text_that_gives_the_answer_away_is_found(
    text: str, at: tuple[int, int], size: int, what: str
) -> None:
    found = screen.screen(write(street(), text, at, size, "white"), TEXT, PLACES)
    assert found is not None and found[0] == "burned_in_text"
    assert found[1].startswith(f"{what} in ")


@reads_text
def test_small_print_at_the_edge_is_found() -> None:
    image = write(street((640, 352)), "17-07-2017 12:06:35", (10, 342), 7, "#f0f0f0")
    assert screen.screen(image, TEXT, ())


@reads_text
@pytest.mark.parametrize("at", [(235, 180), (40, 210)])
def test_a_town_sign_in_the_street_stays(at: tuple[int, int]) -> None:
    assert [found.text for found in screen.read_text(sign(street(), "PARIS", at))]
    assert screen.screen(sign(street(), "PARIS", at), TEXT, PLACES) is None


@reads_text
def test_other_places_and_other_words_at_the_edge_stay() -> None:
    image = write(street(), "NEXTBASE 25 KM/H Springfield", (20, 450), 18, "white")
    assert [found.text for found in screen.read_text(image)]
    assert screen.screen(image, TEXT, PLACES) is None


@reads_text
def test_a_plain_street_stays() -> None:
    assert screen.screen(street(), TEXT, PLACES) is None


@reads_text
def test_lines_lie_where_they_stand_in_the_frame() -> None:
    image = write(street((800, 400)), "HELLO WORLD", (100, 200), 24, "white")
    (found,) = [one for one in screen.read_text(image) if "HELLO" in one.text]
    assert found.level and 0.48 < found.top < 0.54 < found.bottom < 0.6


@reads_text
def test_text_in_an_edge_band_is_placed_in_the_whole_frame() -> None:
    image = write(street((800, 400)), "HELLO WORLD", (100, 370), 18, "white")
    found = [one for one in screen.read_text(image) if "HELLO" in one.text]
    assert len(found) == 2  # of the frame, and of the band
    assert all(0.9 < one.top < one.bottom <= 1.01 for one in found)


@reads_text
def test_reading_prints_and_logs_nothing() -> None:
    code = (
        "from PIL import Image\nfrom geoguessr_rl import screen\nfrom geoguessr_rl.config import "
        "Screen\nscreen.screen(Image.new('RGB', (320, 240)), Screen(text=True), ())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


@reads_text
def test_the_reader_is_loaded_once_and_runs_on_one_thread() -> None:
    import cv2

    reader = screen._reader()
    assert screen._reader() is reader
    assert cv2.getNumThreads() == 1
    for part in (reader.text_det.infer, reader.text_rec.session, reader.text_cls.infer):
        assert part.session.get_session_options().intra_op_num_threads == 1


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "find_spec", lambda name: None)
    screen._reader.cache_clear()
    with pytest.raises(UserError, match=r"screen\.text needs .* uv pip install -e '\.\[screen\]'"):
        screen.screen(street(), TEXT, ())
    assert screen.screen(street(), Screen(blank=True), ()) is None  # needs no package


def real_photo(path: Path, identifier: str) -> Image.Image:
    """One photo out of a zip."""
    with zipfile.ZipFile(path) as file:
        (name,) = [name for name in file.namelist() if identifier in name]
        return images.open_upright(file.read(name))


REAL = {
    "test/00": {"1000344074062646": "06/08/2021", "336498017891466": "17-07-2017"},
    "train/01": {"199603871996898": "Lat:3.567381", "608625953431116": "2020/06/26"},
}


@reads_text
@pytest.mark.parametrize(
    ("archive", "identifier", "text"),
    [(archive, *pair) for archive, pairs in REAL.items() for pair in pairs.items()],
)
def test_real_photos_with_burned_in_text_are_found(
    archive: str, identifier: str, text: str
) -> None:
    path = SHARED / f"{archive}.zip"
    if not path.is_file():
        pytest.skip("needs ../shared")
    image = images.fit(real_photo(path, identifier), ImagePolicy())
    found = screen.screen(image, TEXT, ())
    assert found is not None and text in found[1]


# Signs of the street: a town and its neighbour in two scripts, an emergency number, a fire hydrant.
STREET = {
    "131999275926838": ("Greece", "Karya", "Karia", "Englouvi"),
    "7319564422999719": ("Germany", "Alt Hammoor", "Hammoor"),
    "1789767142058592": ("United Kingdom", "Poole"),
}


@reads_text
@pytest.mark.parametrize("identifier", STREET)
def test_real_photos_with_signs_stay(identifier: str) -> None:
    path = SHARED / "test/00.zip"
    if not path.is_file():
        pytest.skip("needs ../shared")
    image = images.fit(real_photo(path, identifier), ImagePolicy())
    assert [found.text for found in screen.read_text(image)]
    assert screen.screen(image, TEXT, STREET[identifier]) is None


# --- Text


@pytest.mark.parametrize(
    "text",
    [
        "2019-03-12",
        "2019/06/1609:44:02",  # the reader loses the space
        "17-07-20171206:35",  # and the colon
        "2019:03:12 08:15:42",  # EXIF's form
        "12.03.2019",
        "3/12/2019 8:15 PM",
        "12/03/19 08:15",
        "GARMIN17-07-2017 12:06:35",
        "12 March 2019",
        "12MAR2019",
        "Mar 12, 2019",
        "2019年3月12日",
        "10:20:17",
    ],
)
def test_dates_and_times_with_seconds_count_anywhere(text: str) -> None:
    assert screen.giveaway(line(text), ()) == "date"


@pytest.mark.parametrize(
    "text",
    [
        "48.85661, 2.35222",
        "-33.8688 151.2093",
        "42.0852121.7017",  # run together
        "066km/h N45.0758-F40.9211",  # E read as F
        "48.8566° N",
        "2,3522E",
        "Lat:3.567381Lng:116.606308",
        "Longitude = -0.128",
        "48°51'24\"N 2°21'7\"E",
        "N 48°51.396",
        "N23°0353.9120*1130.7-",
        "S33º51",
        "48° 51.4'",
    ],
)
def test_coordinates_count_anywhere(text: str) -> None:
    assert screen.giveaway(line(text), ()) == "coordinates"


@pytest.mark.parametrize(
    "text",
    [
        "01.45.67.89.10",  # a phone number
        "+44 20 7946 0018",
        "10/12/2019-4471",  # a serial number
        "Nr. 5512.12.2019",
        "8:00-20:00",  # opening hours
        "24/7",
        "1.500 2.500",  # prices
        "N 12.500",
        "LATTE 3.500, CHOCOLATE 4.500",
        "EST. 1998",
        "Since 2004",
        "3.85 m",
        "23°C",
        "Route 12.5",
        "A 45 B 12.5.08",
        "192.168.100.12",
        "ISO 9001:2015",
        "25/33/2019",  # no month
        "MAYOR 12",
        "",
    ],
)
def test_numbers_of_the_street_stay(text: str) -> None:
    assert screen.giveaway(line(text), ()) is None


@pytest.mark.parametrize(
    ("top", "bottom", "level", "counts"),
    [
        (0.02, 0.06, True, True),
        (0.93, 0.98, True, True),
        (0.45, 0.5, True, False),  # a sign
        (0.11, 0.16, True, False),  # reaches out of the band
        (0.02, 0.06, False, False),  # leans as signs do
        (0.01, 0.13, True, False),  # hangs over the road
    ],
)
def test_a_places_name_counts_at_the_edge_alone(
    top: float, bottom: float, level: bool, counts: bool
) -> None:
    found = screen.giveaway(line("Camera 4, PARIS", top, bottom, level), PLACES)
    assert found == ("name Paris" if counts else None)


@pytest.mark.parametrize(
    ("text", "name", "holds"),
    [
        ("ILE DE FRANCE", "Île-de-France", True),
        ("UserId:binamarga.malinau@mail", "Malinau", True),
        ("RiodeJaneiro", "Rio de Janeiro", True),  # the reader loses spaces
        ("LIMA 2", "Lima", True),
        ("Bălți 3", "Balti", True),
        ("climate", "Lima", False),  # within a word
        ("NIGERIA", "Niger", False),
        ("Aso", "Aso", False),  # too short to mean anything
        ("anything", "", False),
    ],
)
def test_names_are_compared_as_words_without_accents(text: str, name: str, holds: bool) -> None:
    assert screen.holds_name(text, name) == holds


# --- Blank frames and shapes


def night() -> Image.Image:
    """A black street with two lamps and their glow."""
    image = Image.new("RGB", (640, 480), (3, 3, 5))
    draw = ImageDraw.Draw(image)
    for x, y in ((140, 150), (500, 190)):
        draw.ellipse((x - 16, y - 16, x + 16, y + 16), fill=(255, 225, 160))
    return image.filter(ImageFilter.GaussianBlur(3))


def fog() -> Image.Image:
    image = Image.linear_gradient("L").resize((640, 480)).point(lambda grey: 190 + grey // 10)
    return image.convert("RGB")


@pytest.mark.parametrize("grey", [0, 6, 128, 250, 255])
def test_frames_of_one_colour_with_some_noise_are_blank(grey: int) -> None:
    image = grainy(Image.new("RGB", (640, 480), (grey, grey, grey)), 2)
    found = screen.screen(image, Screen(blank=True), ())
    assert found is not None and found[0] == "blank_frame"
    assert abs(int(found[1].split()[2]) - grey) <= 1  # "mean luminance 128 of 255"


def test_a_night_with_lamps_fog_and_a_street_stay() -> None:
    for image in (night(), fog(), street()):
        assert screen.screen(image, Screen(blank=True), ()) is None


def test_a_lens_cap_with_a_leak_of_light_is_blank() -> None:
    image = Image.new("RGB", (640, 480), (2, 2, 2))
    ImageDraw.Draw(image).rectangle((0, 0, 3, 480), fill=(70, 40, 30))
    assert screen.is_blank(image)


@pytest.mark.parametrize(
    ("size", "unfit"),
    [((300, 100), False), ((100, 300), False), ((301, 100), True), ((100, 301), True)],
)
def test_a_frame_beyond_the_aspect_is_unfit(size: tuple[int, int], unfit: bool) -> None:
    found = screen.screen(Image.new("RGB", size), Screen(max_aspect=3), ())
    assert found == (("extreme_aspect", f"{size[0]} × {size[1]} pixels") if unfit else None)


def test_without_rules_everything_stays() -> None:
    image = write(Image.new("RGB", (900, 100)), "2019-03-12", (10, 80), 14, "white")
    assert screen.screen(image, Screen(), PLACES) is None


def test_the_modules_import_loads_no_reader() -> None:
    code = "import sys, geoguessr_rl.screen; print(sorted(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in ("cv2", "onnxruntime", "rapidocr_onnxruntime"):
        assert f"'{name}'" not in ended.stdout
