"""Where a photo says that it was taken: the GPS block of its EXIF.

The demo compares answers with it. No model is shown it: prepared photos carry no metadata.
"""

import io
import math
import warnings
from collections.abc import Mapping
from typing import Any

from PIL import ExifTags, Image

from geoguessr_rl.images import DECODER_ERRORS, FORMATS


def read_gps(photo: bytes) -> tuple[float, float] | None:
    """Returns latitude and longitude in decimal degrees, or None where a photo does not say.

    A block that is damaged, incomplete or out of range says nothing, and nor does 0, 0, which
    phones write when they have no fix.

    Args:
        photo: The file's bytes, of which the header is read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow comments on odd blocks
            with Image.open(io.BytesIO(photo), formats=FORMATS) as image:
                block = image.getexif().get_ifd(ExifTags.IFD.GPSInfo)
        place = _degrees(block, "Latitude", "NS"), _degrees(block, "Longitude", "EW")
    except (Image.DecompressionBombError, *DECODER_ERRORS):
        return None
    if place == (0, 0) or not (abs(place[0]) <= 90 and abs(place[1]) <= 180):  # NaN is neither
        return None
    return place


def _degrees(block: Mapping[int, Any], name: str, signs: str) -> float:
    """Returns degrees, minutes and seconds as decimal degrees, negative for the second sign.

    NaN where the direction is missing: half of a place is none.
    """
    parts = [float(part) for part in block[ExifTags.GPS[f"GPS{name}"]]]
    ref = block[ExifTags.GPS[f"GPS{name}Ref"]]
    letter = (ref.decode("ascii") if isinstance(ref, bytes) else str(ref)).strip("\0 ").upper()
    if letter not in tuple(signs):
        return math.nan
    size = parts[0] + parts[1] / 60 + parts[2] / 3600
    return size if letter == signs[0] else -size
