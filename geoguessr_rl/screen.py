"""Screening of photos: burned-in text that gives the answer away, blank frames, extreme shapes.

Each rule is off until the config asks for it. Text is read by `rapidocr-onnxruntime` (the extra
`screen`), whose models ship in its package. Text that belongs to the street is a clue and stays:
coordinates and dates count anywhere, a place's name only where cameras print it, and only the
photo's own place. Names are compared in Latin letters as the labels spell them, so "Deutschland"
is not found. One photo is seen at a time; repeated photos are `data.py`'s work.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import Screen

Reason = Literal["burned_in_text", "blank_frame", "extreme_aspect"]

# Luminance is 0 to 255. Of 415 street photos at hand the darkest has a mean of 59 and the flattest,
# bare sand, deviates by 11.6. One lamp in a black night already gives 16; a lens cap, a failed
# exposure and a filled frame stay far below.
DARK, LIGHT = 12.0, 243.0
DEVIATION_AT_THE_ENDS = 6.0  # of a frame that is near-black or near-white
DEVIATION_OF_FLAT = 3.0  # of any other frame: less than fog

# Cameras print level, small, and along the top or the bottom edge; signs do so seldom.
EDGE_BAND = 0.14  # of the frame's height: room for four lines
MAX_TEXT_HEIGHT = 0.08  # of the frame's height
MAX_SLOPE = 0.035  # two degrees: one pixel in a word of thirty

# A date of 10 pixels on grey asphalt is found when the band is doubled, and not in the whole frame.
FRAME_SIDE = 736  # the short side that the text finder was made for
BAND_ZOOM = 2
MARGIN = 16  # pixels around a band, black outside the frame: text on the border needs room
MAX_SIDE = 2000  # the reader shrinks larger pictures by itself

SHORTEST_NAME = 4  # letters: shorter names stand in any text
SHORTEST_PART = 6  # letters from which a name may stand inside a longer run of letters

_DAY, _MONTH, _YEAR = r"(?:0?[1-9]|[12]\d|3[01])", r"(?:0?[1-9]|1[0-2])", r"(?:19|20)\d\d"
_DAY_MONTH = rf"(?:{_DAY}(?P<a>[-./]){_MONTH}|{_MONTH}(?P<b>[-./]){_DAY})(?:(?P=a)|(?P=b))"
_MONTH_NAME = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}"
_CLOCK = r"(?:[01]?\d|2[0-3]):[0-5]\d"
# What goes on before or after is a phone or a serial number; but the reader may lose the space
# before a time, and its colon.
_FROM = r"(?<![\d.,/:-])"
_TO = r"(?:(?![\d/:-])|(?=(?:[01]?\d|2[0-3]):?[0-5]\d))"
_DATES = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{_FROM}{_YEAR}(?P<a>[-./:]){_MONTH}(?P=a){_DAY}{_TO}",  # 2019-03-12, EXIF's 2019:03:12
        rf"{_FROM}{_DAY_MONTH}{_YEAR}{_TO}",  # 12.03.2019, 3/12/2019
        rf"{_FROM}{_DAY_MONTH}\d\d[\s,]*{_CLOCK}",  # 12/03/19 08:15; without a time too common
        rf"{_FROM}{_DAY}[\s.-]*{_MONTH_NAME}[\s.,'-]*{_YEAR}{_TO}",  # 12 March 2019
        rf"(?<![a-z]){_MONTH_NAME}[\s.-]*{_DAY}[\s.,-]+{_YEAR}{_TO}",  # Mar 12, 2019
        rf"{_YEAR}\s*年\s*{_MONTH}\s*月",
        rf"{_FROM}{_CLOCK}:[0-5]\d",  # with seconds: no opening hours
    )
]
# Four digits after the point, since three are a price in thousands: 12.500. The reader may run
# the two numbers together.
_COORDINATES = [
    re.compile(pattern)
    for pattern in (
        r"(?<!\d)-?\d{1,2}\.\d{4,9}[\s,;/|]*-?\d{0,3}\.\d{4}",  # 48.85661, 2.35222
        r"(?<![A-Z])(?:[NS]\s*\d{1,2}|[EW]\s*\d{1,3})[.,]\d{4}",  # N45.0758
        r"(?<!\d)(?:\d{1,2}[.,]\d{4,9}\s*°?\s*[NS]|\d{1,3}[.,]\d{4,9}\s*°?\s*[EW])(?![a-z])",
        r"(?i:(?<![a-z])(?:lat(?:itude)?|lon(?:g(?:itude)?)?|lng))\W{0,3}-?\d{1,3}[.,]\d{3}",
        # 48°51'24"N, N 48°51.4; the reader takes ° for º or * and loses the signs that follow.
        r"(?<![A-Z])[NSEW]\s*\d{1,3}\s*[°º*]\s*\d{2}",
        r"(?<!\d)\d{1,3}\s*[°º*]\s*\d{1,2}(?:[.,]\d+)?\s*['′’`]",  # noqa: RUF001
    )
]


class Line(NamedTuple):
    """One line of text in a photo; places are fractions of the frame's height."""

    text: str
    top: float
    bottom: float
    level: bool


def require_reader() -> None:
    """Raises UserError when the package that reads text is not installed."""
    if find_spec("rapidocr_onnxruntime") is None:
        raise UserError(
            "screen.text needs rapidocr-onnxruntime, which is not installed; run "
            "uv pip install -e '.[screen]' under Python 3.11 or 3.12, or set screen.text to false"
        )


@lru_cache(maxsize=1)
def _reader() -> Any:
    """Loads the text reader, on one thread: the caller runs a process a core."""
    require_reader()
    import cv2
    from rapidocr_onnxruntime import RapidOCR

    cv2.setNumThreads(1)
    # A limit this low leaves the pictures at the size that `read_text` gives them.
    return RapidOCR(
        intra_op_num_threads=1,
        inter_op_num_threads=1,
        det_limit_side_len=32,
        width_height_ratio=-1,  # padded, a band would cost as much as the whole frame
    )


def read_text(image: Image.Image) -> Iterator[Line]:
    """Yields the lines of text in an upright RGB photo: of the whole frame, then of its edges.

    Text near an edge may come twice. A caller who has found enough stops, and saves the rest of the
    work.
    """
    width, height = image.size
    band = max(1, round(EDGE_BAND * height))
    parts = (
        (0, height, FRAME_SIDE / min(image.size)),
        (-MARGIN, band + MARGIN, BAND_ZOOM),
        (height - band - MARGIN, height + MARGIN, BAND_ZOOM),
    )
    for upper, lower, zoom in parts:
        zoom = min(zoom, MAX_SIDE / max(width, lower - upper))
        size = (max(1, round(width * zoom)), max(1, round((lower - upper) * zoom)))
        found, _ = _reader()(image.crop((0, upper, width, lower)).resize(size))
        for corners, text, _ in found or ():
            (x0, y0), (x1, y1) = corners[:2]  # the line's start and end along its top
            ys = [y for _, y in corners]
            yield Line(
                text,
                (upper + min(ys) / zoom) / height,
                (upper + max(ys) / zoom) / height,
                x1 > x0 and abs(y1 - y0) <= MAX_SLOPE * (x1 - x0),
            )


def _words(text: str) -> list[str]:
    """Splits text into lower-case words without accents."""
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    letters = "".join(char for char in decomposed if not unicodedata.combining(char))
    return re.findall(r"\w+", letters)


def holds_name(text: str, name: str) -> bool:
    """Whether a line holds a place's name, as words of its own or, when long, within a run."""
    words, squashed = _words(text), "".join(_words(name))
    if len(squashed) < SHORTEST_NAME:
        return False
    return squashed in words or (len(squashed) >= SHORTEST_PART and squashed in "".join(words))


def giveaway(line: Line, places: Sequence[str]) -> str | None:
    """Returns what a line of text gives away: coordinates, a date, a place's name, or None."""
    if any(pattern.search(line.text) for pattern in _COORDINATES):
        return "coordinates"
    if any(pattern.search(line.text) for pattern in _DATES):
        return "date"
    at_an_edge = line.bottom <= EDGE_BAND or line.top >= 1 - EDGE_BAND
    if at_an_edge and line.level and line.bottom - line.top <= MAX_TEXT_HEIGHT:
        return next((f"name {name}" for name in places if holds_name(line.text, name)), None)
    return None


def is_blank(image: Image.Image) -> bool:
    """Whether a frame is near-black, near-white or flat, by its luminance."""
    luminance = np.asarray(image.convert("L"), dtype=np.float64)
    deviation = float(luminance.std())
    at_the_ends = not DARK < float(luminance.mean()) < LIGHT
    return deviation < (DEVIATION_AT_THE_ENDS if at_the_ends else DEVIATION_OF_FLAT)


def active_reasons(rules: Screen) -> list[Reason]:
    """Returns the reasons that rules can give; without any, no photo needs to be decoded for it."""
    switches: list[tuple[bool, Reason]] = [
        (rules.text, "burned_in_text"),
        (rules.blank, "blank_frame"),
        (rules.max_aspect is not None, "extreme_aspect"),
    ]
    return [reason for on, reason in switches if on]


def screen(image: Image.Image, rules: Screen, places: Sequence[str]) -> tuple[Reason, str] | None:
    """Returns why a photo is left out, and a detail for the record; None when it stays.

    Args:
        image: Upright RGB at the stored size.
        rules: Which rules apply; the cheap ones are tried first.
        places: Names of the photo's own country, region, sub-region and city.

    Raises:
        UserError: Text is to be read and the extra `screen` is not installed.
    """
    longest, shortest = max(image.size), min(image.size)
    if rules.max_aspect is not None and longest > rules.max_aspect * shortest:
        return "extreme_aspect", f"{image.width} × {image.height} pixels"
    if rules.blank and is_blank(image):
        return "blank_frame", f"mean luminance {np.asarray(image.convert('L')).mean():.0f} of 255"
    if rules.text:
        for line in read_text(image):
            if found := giveaway(line, places):
                return "burned_in_text", f"{found} in {line.text[:80]!r}"
    return None
