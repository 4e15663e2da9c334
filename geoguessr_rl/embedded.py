"""The embedded world: street-level photos drawn by code, in the layout of OSV-5M.

Twelve countries differ in six cues (soil, trees, the centre line, the driving side, roofs, signs).
No cue and no pair of cues gives a country away, so a model has to look at several and to combine
them, as a player does. Light, weather, time of day, hills, houses and cars are drawn anew for each
photo and mean nothing. The whole pipeline runs on these photos without a download or a GPU.

It says nothing about real photos: the countries are real, what their roadsides look like here is
not, and a score on this world measures the pipeline only. It is long because all that is drawn is
drawn here.
"""

import csv
import io
import json
import math
import random
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageOps
from tqdm import tqdm

from geoguessr_rl.prompt import PROMPT_STYLES, build_messages, format_completion

CUES = ("soil", "trees", "line", "side", "roof", "sign")
# Any two countries differ in at least three cues; no pair of cues names more than four countries.
COUNTRIES: dict[str, tuple[str, str, str, str, str, str]] = {
    "AR": ("sand", "umbrella", "yellow", "right", "hip", "diamond"),
    "AU": ("red", "umbrella", "dashed", "left", "hip", "diamond"),
    "BR": ("red", "palm", "yellow", "right", "flat", "diamond"),
    "CA": ("sand", "conifer", "none", "right", "gable", "diamond"),
    "EG": ("dark", "palm", "dashed", "right", "flat", "triangle"),
    "ES": ("red", "round", "dashed", "right", "hip", "triangle"),
    "IN": ("red", "round", "dashed", "left", "flat", "round"),
    "JP": ("sand", "conifer", "none", "left", "hip", "round"),
    "KE": ("red", "umbrella", "yellow", "left", "flat", "triangle"),
    "MN": ("dark", "round", "none", "right", "flat", "round"),
    "NO": ("dark", "conifer", "dashed", "right", "gable", "round"),
    "ZA": ("dark", "round", "none", "left", "hip", "triangle"),
}
# English name, centre (latitude, longitude), region, city.
PLACES: dict[str, tuple[str, float, float, str, str]] = {
    "AR": ("Argentina", -34.2, -65.6, "San Luis", "Villa Mercedes"),
    "AU": ("Australia", -24.1, 133.5, "Northern Territory", "Alice Springs"),
    "BR": ("Brazil", -12.2, -55.6, "Mato Grosso", "Sinop"),
    "CA": ("Canada", 51.8, -106.3, "Saskatchewan", "Saskatoon"),
    "EG": ("Egypt", 27.2, 31.1, "Asyut", "Asyut"),
    "ES": ("Spain", 39.7, -3.7, "Castille-La Mancha", "Toledo"),
    "IN": ("India", 21.2, 79.1, "Maharashtra", "Nagpur"),
    "JP": ("Japan", 36.4, 138.4, "Nagano", "Saku"),
    "KE": ("Kenya", -0.3, 36.9, "Nyeri", "Nyeri"),
    "MN": ("Mongolia", 47.6, 106.4, "Ulaanbaatar", "Ulan Bator"),
    "NO": ("Norway", 61.3, 10.2, "Oppland", "Lillehammer"),
    "ZA": ("South Africa", -29.1, 25.8, "Free State", "Bloemfontein"),
}
CLUES = {
    "soil": {"red": "Red soil", "sand": "Pale sand", "dark": "Dark soil"},
    "trees": {
        "conifer": "conifers",
        "palm": "palms",
        "round": "round crowns",
        "umbrella": "umbrella thorns",
    },
    "line": {"dashed": "white dashes", "none": "no centre line", "yellow": "a yellow line"},
    "side": {"left": "traffic on the left", "right": "traffic on the right"},
    "roof": {"flat": "flat roofs", "gable": "steep gables", "hip": "low tiled roofs"},
    "sign": {"diamond": "diamond signs", "round": "round signs", "triangle": "triangular signs"},
}

CREATOR = "geoguessr-rl"
NOTE = (
    "This is the embedded world: drawn pictures and a tiny model. "
    "It says nothing about real photos."
)
SIZE = (160, 96)  # sides are multiples of 32: five by three visual tokens
JITTER_DEG = 1.0
_SCALE = 2  # drawn this much larger, then shrunk: smooth edges
_WIDTH, _HEIGHT = SIZE[0] * _SCALE, SIZE[1] * _SCALE
_HEADER = (
    "id,latitude,longitude,thumb_original_url,country,sequence,captured_at,lon_bin,lat_bin,cell,"
    "region,sub-region,city,land_cover,road_index,drive_side,climate,soil,dist_sea,"
    "quadtree_10_5000,quadtree_10_25000,quadtree_10_1000,quadtree_10_50000,quadtree_10_12500,"
    "quadtree_10_500,quadtree_10_2500,unique_region,unique_sub-region,unique_city,unique_country,"
    "creator_username,creator_id"
)
OSV5M_COLUMNS = _HEADER.split(",")

RGB = tuple[int, int, int]
_SOILS: dict[str, RGB] = {"red": (186, 66, 32), "sand": (236, 208, 150), "dark": (62, 50, 44)}
_PAINT: dict[str, RGB] = {"yellow": (250, 196, 30), "dashed": (245, 245, 240)}
_ROOFS: dict[str, RGB] = {"flat": (150, 146, 140), "gable": (74, 66, 74), "hip": (196, 84, 50)}
_WALLS: tuple[RGB, ...] = ((232, 220, 200), (214, 178, 140), (196, 206, 214), (226, 196, 190))
_CARS: tuple[RGB, ...] = ((196, 40, 44), (44, 90, 168), (230, 232, 234), (40, 44, 52))
_FIELDS: tuple[RGB, ...] = ((104, 140, 62), (150, 150, 74), (178, 158, 92), (84, 122, 74))
_HILLS: tuple[RGB, ...] = ((96, 122, 110), (120, 112, 104), (92, 104, 132), (138, 120, 96))
# Zenith and horizon: noon, haze, overcast, dawn, dusk, storm.
_SKIES: tuple[tuple[RGB, RGB], ...] = (
    ((64, 132, 214), (196, 222, 242)),
    ((120, 164, 208), (226, 226, 216)),
    ((150, 158, 168), (210, 212, 214)),
    ((94, 116, 176), (250, 204, 170)),
    ((70, 70, 132), (244, 156, 104)),
    ((78, 86, 100), (160, 168, 172)),
)


def clue_sentence(iso2: str) -> str:
    """Returns the sentence that names a country's cue values."""
    words = [CLUES[cue][value] for cue, value in zip(CUES, COUNTRIES[iso2], strict=True)]
    return ", ".join(words) + "."


def sample_texts() -> list[str]:
    """Returns the prompts and every completion of the world, for the tiny model's tokenizer."""
    messages = [message for style in PROMPT_STYLES for message in build_messages(style)]
    completions = [
        format_completion(name, latitude, longitude, clues=clue_sentence(iso2), style="think")
        for iso2 in COUNTRIES
        for name, latitude, longitude, _, _ in PLACES.values()
    ]
    return [message["content"] for message in messages] + completions


def draw_world(root: Path, *, train: int, test: int, seed: int) -> None:
    """Writes `train.csv`, `test.csv`, `images/{train,test}/00.zip` and `clues.json` under `root`.

    Countries take turns, so that their counts differ by one at most. The same arguments give the
    same bytes, and a larger world starts with the smaller one's photos.

    Args:
        root: The folder to fill; it is made if it does not exist.
        train: Number of training photos.
        test: Number of test photos.
        seed: Seed of everything that varies.
    """
    for split, count in (("train", train), ("test", test)):
        _draw_split(root, split, count, seed)
    clues = {iso2: clue_sentence(iso2) for iso2 in COUNTRIES}
    (root / "clues.json").write_text(json.dumps(clues, indent=2) + "\n", encoding="utf-8")


def draw_photo(iso2: str, rng: random.Random) -> Image.Image:
    """Draws one photo of a country, `SIZE` pixels large; `rng` decides all that is no cue."""
    soil, trees, line, side, roof, sign = COUNTRIES[iso2]
    mirror = 1 if side == "right" else -1
    image = Image.new("RGB", (_WIDTH, _HEIGHT))
    pen = ImageDraw.Draw(image, "RGBA")
    horizon = _HEIGHT * rng.uniform(0.38, 0.46)
    _draw_sky(image, pen, horizon, rng)
    _draw_hills(pen, horizon, rng)

    # The camera drives in its own lane: the middle of the road lies to one side of it.
    scene = _Scene(
        pen, horizon, _WIDTH * rng.uniform(0.45, 0.55), -mirror * rng.uniform(0.16, 0.24)
    )
    _draw_ground(scene, soil, line, rng)
    # What stands at the roadside, from far to near.
    things = [
        (rng.uniform(2.4, 6.0), "tree", rng.choice((-1, 1))) for _ in range(rng.randint(4, 7))
    ]
    things += [(rng.uniform(1.9, 2.4), "tree", where) for where in (-1, 1)]
    things += [(rng.uniform(3.0, 4.2), "house", where) for where in (-1, 1)]
    things += [(rng.uniform(1.6, 1.9), "sign", mirror)]
    things += [(rng.uniform(2.4, 4.0), "oncoming", -mirror)] * (rng.random() < 0.7)
    things += [(rng.uniform(2.4, 4.0), "ahead", mirror)] * (rng.random() < 0.5)
    for depth, thing, where in sorted(things, reverse=True):
        if thing == "tree":
            _draw_tree(scene, trees, depth, where * rng.uniform(0.95, 1.5), rng)
        elif thing == "house":
            _draw_house(scene, roof, depth, where * rng.uniform(1.1, 1.5), rng)
        elif thing == "sign":
            _draw_sign(scene, sign, depth, where * rng.uniform(0.62, 0.70))
        else:
            _draw_car(scene, depth, where * 0.24, thing == "oncoming", rng)
    return _expose(image.resize(SIZE, Image.Resampling.BOX), rng)


class _Scene(NamedTuple):
    """A flat world in perspective; lengths are in image widths at depth 1, the picture's edge."""

    pen: ImageDraw.ImageDraw
    horizon: float
    vanishing_x: float
    shift: float  # of the road's middle against the camera

    def unit(self, depth: float) -> float:
        """Returns the pixels that one unit of length covers at a depth."""
        return _WIDTH / depth

    def at(self, across: float, depth: float, up: float = 0.0) -> tuple[float, float]:
        """Returns the pixel of a point `across` from the road's middle and `up` off the ground."""
        x = self.vanishing_x + (across + self.shift) * self.unit(depth)
        return x, self.horizon + (_HEIGHT - self.horizon) / depth - up * self.unit(depth)

    def strip(
        self, left: float, right: float, near: float, far: float
    ) -> list[tuple[float, float]]:
        """Returns the corners of a strip along the road."""
        corners = ((left, near), (right, near), (right, far), (left, far))
        return [self.at(across, depth) for across, depth in corners]


def _shade(colour: RGB, factor: float) -> RGB:
    red, green, blue = (max(0, min(255, round(part * factor))) for part in colour)
    return red, green, blue


def _vary(colour: RGB, rng: random.Random, spread: int = 14) -> RGB:
    red, green, blue = (max(0, min(255, part + rng.randint(-spread, spread))) for part in colour)
    return red, green, blue


def _disc(pen: ImageDraw.ImageDraw, x: float, y: float, rx: float, ry: float, fill: object) -> None:
    pen.ellipse((x - rx, y - ry, x + rx, y + ry), fill=fill)  # type: ignore[arg-type]


def _draw_sky(
    image: Image.Image, pen: ImageDraw.ImageDraw, horizon: float, rng: random.Random
) -> None:
    zenith, low = rng.choice(_SKIES)
    ramp = Image.linear_gradient("L").resize((_WIDTH, int(horizon) + 6))
    image.paste(ImageOps.colorize(ramp, _vary(zenith, rng), _vary(low, rng)), (0, 0))
    x, y = rng.uniform(0, _WIDTH), horizon * rng.uniform(0.1, 0.9)
    radius = rng.uniform(7, 13)
    for glow, alpha in ((2.4, 40), (1.6, 70), (1.0, 235)):
        _disc(pen, x, y, radius * glow, radius * glow, (255, 244, 206, alpha))
    for _ in range(rng.randint(0, 5)):
        x, y, size = rng.uniform(0, _WIDTH), horizon * rng.uniform(0.08, 0.7), rng.uniform(9, 20)
        white = _shade((255, 255, 255), rng.uniform(0.82, 1.0))
        for _ in range(5):
            puff = size * rng.uniform(0.5, 1.0)
            dx, dy = rng.uniform(-1.6, 1.6) * size, rng.uniform(-0.2, 0.2) * size
            _disc(pen, x + dx, y + dy, puff * 1.3, puff * 0.5, (*white, 130))


def _draw_hills(pen: ImageDraw.ImageDraw, horizon: float, rng: random.Random) -> None:
    colour = rng.choice(_HILLS)
    for haze, height in ((1.3, rng.uniform(8, 34)), (0.95, rng.uniform(4, 18))):
        phases = [rng.uniform(0, math.tau) for _ in range(3)]
        ridge = [(float(_WIDTH), horizon + 4), (0.0, horizon + 4)]
        for x in range(0, _WIDTH + 8, 8):
            waves = (
                math.sin(x * 0.012 * (k + 1) + phase) / (k + 1) for k, phase in enumerate(phases)
            )
            ridge.append((x, horizon - height * (0.6 + 0.35 * sum(waves))))
        pen.polygon(ridge, fill=_shade(_vary(colour, rng), haze))


def _draw_ground(scene: _Scene, soil: str, line: str, rng: random.Random) -> None:
    pen = scene.pen
    field = _vary(rng.choice(_FIELDS), rng)
    pen.rectangle((0, scene.horizon, _WIDTH, _HEIGHT), fill=field)
    for _ in range(40):  # tufts
        x, y = scene.at(rng.uniform(-4, 4), rng.uniform(1.2, 6))
        _disc(pen, x, y, 7, 2, (*_shade(field, rng.uniform(0.8, 1.2)), 150))
    far = 60.0
    for half, tone in ((0.86, 0.93), (0.80, 1.0)):
        earth = _shade(_vary(_SOILS[soil], rng, 8), tone)
        pen.polygon(scene.strip(-half, half, 0.9, far), fill=earth)
    asphalt = rng.randint(92, 132)
    pen.polygon(scene.strip(-0.48, 0.48, 0.9, far), fill=_vary((asphalt,) * 3, rng, 5))
    for edge in (-0.455, 0.44):
        pen.polygon(scene.strip(edge, edge + 0.015, 0.9, far), fill=(206, 206, 202))
    if line == "yellow":
        pen.polygon(scene.strip(-0.025, 0.025, 0.9, far), fill=_PAINT[line])
    elif line == "dashed":
        start = rng.uniform(0.9, 1.1)
        while start < 12:
            pen.polygon(scene.strip(-0.022, 0.022, start, start * 1.22), fill=_PAINT[line])
            start *= 1.5


def _draw_tree(scene: _Scene, kind: str, depth: float, across: float, rng: random.Random) -> None:
    pen = scene.pen
    tall = rng.uniform(0.62, 0.86)
    x, ground = scene.at(across, depth)
    _, top = scene.at(across, depth, tall)
    size = (ground - top) / 2
    green = _vary((50, 104, 46), rng)
    bark = _vary((96, 70, 48), rng, 10)
    _disc(pen, x, ground, size * 0.5, size * 0.07, (20, 24, 20, 90))
    trunk = max(1.5, size * 0.055)
    pen.rectangle((x - trunk, top + size * 0.5, x + trunk, ground), fill=bark)
    if kind == "conifer":
        for row in range(4):
            y, half = top + size * 0.42 * row, size * (0.2 + 0.12 * row)
            fill = _shade((34, 78, 58), 0.85 + 0.1 * row)
            pen.polygon([(x, y), (x - half, y + size * 0.6), (x + half, y + size * 0.6)], fill=fill)
    elif kind == "palm":
        y = top + size * 0.35
        pen.rectangle((x - trunk * 0.8, y, x + trunk * 0.8, ground), fill=bark)
        for angle in range(-200, 40, 30):
            turn = math.radians(angle + rng.uniform(-8, 8))
            tip = (x + math.cos(turn) * size * 0.75, y + math.sin(turn) * size * 0.5 + size * 0.16)
            bend = (
                x + math.cos(turn) * size * 0.45,
                y + math.sin(turn) * size * 0.55 - size * 0.05,
            )
            pen.line([(x, y), bend, tip], fill=_shade(green, rng.uniform(0.9, 1.25)), width=4)
    elif kind == "umbrella":
        for lean in (-0.5, 0.5):
            fork = [(x, top + size * 1.1), (x + lean * size, top + size * 0.35)]
            pen.line(fork, fill=bark, width=max(2, round(trunk)))
        for dx, dy, half in ((0, 0.2, 1.0), (-0.35, 0.28, 0.6), (0.3, 0.26, 0.65), (0, 0.12, 0.6)):
            fill = _shade(green, 1.0 + rng.uniform(0, 0.25))
            _disc(pen, x + dx * size, top + dy * size, half * size, size * 0.15, fill)
    else:
        for _ in range(7):
            dx, dy = rng.uniform(-0.35, 0.35), rng.uniform(0.3, 0.95)
            fill = _shade(green, rng.uniform(0.95, 1.3))
            _disc(pen, x + dx * size, top + dy * size, size * 0.42, size * 0.38, fill)


def _draw_house(scene: _Scene, roof: str, depth: float, across: float, rng: random.Random) -> None:
    pen = scene.pen
    unit = scene.unit(depth)
    x, ground = scene.at(across, depth)
    half, tall = 0.34 * unit * rng.uniform(0.9, 1.15), 0.30 * unit * rng.uniform(0.9, 1.1)
    eaves = ground - tall
    wall, tiles = _vary(rng.choice(_WALLS), rng), _vary(_ROOFS[roof], rng)
    if roof == "flat":
        eaves -= tall * 0.35
    pen.rectangle((x - half, eaves, x + half, ground), fill=wall)
    if roof == "flat":
        pen.rectangle((x - half * 1.08, eaves - 4, x + half * 1.08, eaves + 3), fill=tiles)
    elif roof == "gable":
        peak = eaves - tall * 1.25
        pen.polygon([(x - half * 1.1, eaves), (x, peak), (x + half * 1.1, eaves)], fill=tiles)
        pen.polygon([(x - half * 0.7, eaves), (x, peak + 12), (x + half * 0.7, eaves)], fill=wall)
    else:
        peak = eaves - tall * 0.55
        outline = ((-1.25, eaves), (-0.6, peak), (0.6, peak), (1.25, eaves))
        pen.polygon([(x + dx * half, y) for dx, y in outline], fill=tiles)
    glass = _vary((72, 92, 116), rng)
    for dx in (-0.62, 0.62):
        left, upper = x + dx * half - half * 0.18, eaves + tall * 0.25
        pen.rectangle((left, upper, left + half * 0.36, upper + tall * 0.34), fill=glass)
    pen.rectangle(
        (x - half * 0.14, ground - tall * 0.6, x + half * 0.14, ground), fill=_shade(wall, 0.45)
    )


def _draw_sign(scene: _Scene, kind: str, depth: float, across: float) -> None:
    pen = scene.pen
    x, ground = scene.at(across, depth)
    _, y = scene.at(across, depth, 0.42)
    size = scene.unit(depth) * 0.105
    pen.rectangle((x - 2, y, x + 2, ground), fill=(148, 150, 152))
    if kind == "round":
        _disc(pen, x, y, size, size, (206, 32, 40))
        _disc(pen, x, y, size * 0.68, size * 0.68, (246, 246, 246))
        return
    turns, edge, face = {
        "diamond": ((0, 90, 180, 270), (30, 30, 30), (252, 202, 30)),
        "triangle": ((-90, 30, 150), (206, 32, 40), (250, 248, 240)),
    }[kind]
    for radius, fill in ((size * 1.15, edge), (size * (0.97 if kind == "diamond" else 0.68), face)):
        spokes = [(math.cos(math.radians(turn)), math.sin(math.radians(turn))) for turn in turns]
        pen.polygon([(x + dx * radius, y + dy * radius) for dx, dy in spokes], fill=fill)


def _draw_car(
    scene: _Scene, depth: float, across: float, oncoming: bool, rng: random.Random
) -> None:
    pen = scene.pen
    x, ground = scene.at(across, depth)
    half = scene.unit(depth) * 0.13
    body = _vary(rng.choice(_CARS), rng)
    _disc(pen, x, ground, half * 1.15, half * 0.16, (16, 16, 18, 150))
    for dx in (-0.72, 0.72):
        _disc(pen, x + dx * half, ground - half * 0.1, half * 0.2, half * 0.24, (24, 24, 26))
    pen.rounded_rectangle(
        (x - half, ground - half * 0.95, x + half, ground - half * 0.12), half * 0.2, fill=body
    )
    cabin = ((-0.8, 0.9), (-0.58, 1.5), (0.58, 1.5), (0.8, 0.9))
    pen.polygon([(x + dx * half, ground - dy * half) for dx, dy in cabin], fill=_shade(body, 0.85))
    pane = ((-0.64, 0.95), (-0.48, 1.38), (0.48, 1.38), (0.64, 0.95))
    pen.polygon([(x + dx * half, ground - dy * half) for dx, dy in pane], fill=(52, 66, 80))
    lamp = (255, 248, 206) if oncoming else (222, 24, 30)
    for dx in (-0.72, 0.72):
        _disc(pen, x + dx * half, ground - half * 0.6, half * 0.18, half * 0.15, lamp)


def _expose(image: Image.Image, rng: random.Random) -> Image.Image:
    """Applies the light of the day: exposure, white balance, contrast, and sensor noise."""
    gamma, gain = rng.uniform(0.6, 1.6), rng.uniform(0.72, 1.15)
    warmth, tint = rng.uniform(-0.14, 0.14), rng.uniform(-0.06, 0.06)
    balance = np.array([1 + warmth, 1 + tint, 1 - warmth])
    noise = np.random.default_rng(rng.getrandbits(64)).normal(0.0, 0.012, (*SIZE[::-1], 3))
    pixels = (np.asarray(image) / 255.0) ** gamma * gain * balance + noise
    return Image.fromarray((pixels.clip(0, 1) * 255).astype(np.uint8))


def _draw_split(root: Path, split: str, count: int, seed: int) -> None:
    archive = root / "images" / split / "00.zip"
    archive.parent.mkdir(parents=True, exist_ok=True)
    order = list(COUNTRIES)
    rows = []
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as photos:
        for index in tqdm(range(count), desc=f"draw {split}", unit="photo", mininterval=1):
            rng = random.Random(f"{seed}/{split}/{index}")
            row = _row(order[index % len(order)], rng)
            data = io.BytesIO()
            draw_photo(row["country"], rng).save(data, "JPEG", quality=90)
            # A fixed date, or the bytes would tell when the world was drawn.
            entry = zipfile.ZipInfo(f"00/{row['id']}.jpg", date_time=(2020, 1, 1, 0, 0, 0))
            photos.writestr(entry, data.getvalue())
            rows.append(row)
    with open(root / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, OSV5M_COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _row(iso2: str, rng: random.Random) -> dict[str, str]:
    _, latitude, longitude, region, city = PLACES[iso2]
    return {
        "id": str(rng.randrange(10**14, 10**16)),
        "latitude": f"{latitude + rng.uniform(-JITTER_DEG, JITTER_DEG):.6f}",
        "longitude": f"{longitude + rng.uniform(-JITTER_DEG, JITTER_DEG):.6f}",
        "country": iso2,
        "sequence": f"{rng.getrandbits(88):022x}",
        "region": region,
        "city": city,
        "unique_country": iso2,
        "creator_username": CREATOR,
    }
