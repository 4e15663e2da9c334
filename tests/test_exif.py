"""GPS in EXIF: signs, damage, and what is no place."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.TiffImagePlugin import IFDRational

from geoguessr_rl.exif import read_gps

AWKWARD = Path(__file__).parents[2] / "shared/awkward_files"
SOUTH_WEST = {1: "S", 2: (33.0, 27.0, 12.5), 3: "W", 4: (70.0, 39.0, 43.25)}


def photo(block: dict[int, Any], kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x8825] = block
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, kind, exif=exif)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "HEIF"])
def test_south_and_west_are_negative_in_every_format(kind: str) -> None:
    place = read_gps(photo(SOUTH_WEST, kind))
    assert place == pytest.approx((-33.453472, -70.662014), abs=1e-6)


@pytest.mark.parametrize(
    "block",
    [
        {},
        {1: "S", 2: (33.0, 27.0, 12.5)},  # half of a place
        SOUTH_WEST | {1: ""},  # no direction
        SOUTH_WEST | {3: "N"},  # north of a longitude
        SOUTH_WEST | {2: (33.0, 27.0)},
        SOUTH_WEST | {2: (91.0, 0.0, 0.0)},
        SOUTH_WEST | {4: (181.0, 0.0, 0.0)},
        SOUTH_WEST | {2: (IFDRational(0, 0), 0.0, 0.0)},  # not a number
        {1: "N", 2: (0.0, 0.0, 0.0), 3: "E", 4: (0.0, 0.0, 0.0)},  # a phone without a fix
    ],
)
def test_what_is_no_place_is_none(block: dict[int, Any]) -> None:
    assert read_gps(photo(block)) is None


@pytest.mark.parametrize("data", [b"", b"no photo", photo(SOUTH_WEST)[:40]])
def test_what_is_no_photo_says_nothing(data: bytes) -> None:
    assert read_gps(data) is None


@pytest.mark.skipif(not AWKWARD.is_dir(), reason="the awkward files are not part of the project")
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("exif_rot180_gps_west.jpg", (47.627, -122.337)),
        ("gps_south.jpg", (-38.405, 144.189)),
        ("gps_west.jpg", (12.543, -54.123)),
        ("heic_rotated_gps.heic", (41.843, 3.066)),
        ("webp exif rotated.webp", (37.393, -122.041)),
        ("wide_phone_pano_gps.jpg", (60.147, 24.907)),
        ("corrupt_exif_gps.jpg", (48.081, -1.668)),
        ("gps_zero_zero.jpg", None),
        ("gps_nan_rational.jpg", None),
        ("gray.jpg", None),
    ],
)
def test_real_files(name: str, place: tuple[float, float] | None) -> None:
    found = read_gps((AWKWARD / name).read_bytes())
    assert (found is None) == (place is None)
    if found and place:
        assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(found, place, strict=True))
