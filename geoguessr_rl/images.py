"""Any photo file -> upright RGB at the image policy's size.

The policy is applied once, when photos are prepared; after that every processor (trainer, vLLM,
transformers) finds a size that it leaves alone, so that training, rollout and evaluation see the
same pixels. Where a photo was taken is not read here: see exif.py.
"""

import io
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import imagehash
import numpy as np
import pillow_heif
from PIL import Image, ImageOps, UnidentifiedImageError

from geoguessr_rl.config import ImagePolicy, View

MAX_PIXELS = 100_000_000
"""Larger pictures are refused before a pixel is decoded: they are never street-level photos."""

MAX_PREPARED_PIXELS = 50_000_000
"""The same where data is prepared: several processes decode at once, some at 16 bytes a pixel."""

MAX_STRETCH = 0.15
"""The largest change of aspect ratio that fitting may cost; beyond it a photo is too thin."""

VIEW_ASPECT = 1016 / 561
"""Width over height of the one view that is cut from a panorama."""

HASH_SIDE = 16
"""A perceptual hash has this many bits a side, 256 in all."""

VISUAL_TOKEN_PIXELS = 32 * 32
"""Pixels of one visual token of Qwen3-VL: patches of 16 pixels, merged 2 by 2."""

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".heic", ".heif", ".avif", ".gif", ".mpo")

FORMATS = ("JPEG", "PNG", "WEBP", "HEIF", "AVIF", "GIF")
"""The decoders that may see a file: a .jpg that holds PostScript must not start Ghostscript.

MPO is JPEG's work."""

# What decoders raise on damaged files; where these are caught, nothing is our own code.
DECODER_ERRORS = (
    OSError, SyntaxError, ValueError, EOFError, ArithmeticError, TypeError, RuntimeError,
    LookupError, struct.error, zlib.error,
)  # fmt: skip

pillow_heif.register_heif_opener()


class BadImageError(Exception):
    """A file that is not a usable photo; the message says why in a few words."""


def visual_tokens(size: tuple[int, int]) -> int:
    """Returns how many tokens an image of this (width, height) costs the model."""
    return size[0] * size[1] // VISUAL_TOKEN_PIXELS


def open_upright(source: bytes | Path) -> Image.Image:
    """Decodes the first frame of any photo as upright RGB.

    Args:
        source: A file, or its bytes.

    Raises:
        BadImageError: Not an image, damaged, or over `MAX_PIXELS`.
    """
    return _upright_rgb(_open(source))


@contextmanager
def _decoding() -> Iterator[None]:
    """Turns what decoders raise into BadImageError."""
    try:
        yield
    except Image.DecompressionBombError:
        raise BadImageError("too large") from None
    except UnidentifiedImageError:
        raise BadImageError("not an image") from None
    except DECODER_ERRORS as error:
        raise BadImageError(f"damaged: {' '.join(str(error).split())[:100]}") from None


def _open_header(source: bytes | Path, max_pixels: int) -> Image.Image:
    """Opens a picture whose size is acceptable, without decoding it."""
    data = source if isinstance(source, bytes) else source.read_bytes()
    if not data:
        raise BadImageError("empty file")
    with _decoding():
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.width * image.height > max_pixels:
        raise BadImageError(f"{image.width} × {image.height} pixels is too large")
    return image


def _open(source: bytes | Path) -> Image.Image:
    """Opens and decodes a picture whose size is acceptable."""
    image = _open_header(source, MAX_PIXELS)
    with _decoding():
        image.load()
    return image


def _upright_rgb(image: Image.Image) -> Image.Image:
    """Turns a decoded picture upright and into RGB, on white where it is transparent."""
    # An EXIF block that cannot be read holds no orientation.
    with suppress(*DECODER_ERRORS):
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip to white
        eight_bits = ((np.arange(65536) * 255 + 32767) // 65535).astype(np.uint8)
        image = Image.fromarray(eight_bits[np.asarray(image).clip(0, 65535)])
    if image.has_transparency_data:
        clear = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.new("RGB", clear.size, "white")
        image.paste(clear, mask=clear)
    return image if image.mode == "RGB" else image.convert("RGB")


@lru_cache(maxsize=4096)
def fitted_size(width: int, height: int, policy: ImagePolicy) -> tuple[int, int]:
    """Returns the size that the policy gives a photo, or the photo's own size when it fits.

    Both sides are multiples of `policy.multiple`, the long edge and the area lie within their
    bounds, the aspect ratio is kept as nearly as possible, and among equals the area.

    Raises:
        BadImageError: No allowed size has nearly this aspect ratio.
    """
    step, longest = policy.multiple, policy.long_edge
    scale = min(1.0, longest / max(width, height))
    area = min(max(width * height * scale**2, policy.min_pixels), policy.max_pixels)
    best, best_cost = None, math.inf
    for w in range(step, longest + 1, step):
        for h in range(step, longest + 1, step):
            if not policy.min_pixels <= w * h <= policy.max_pixels:
                continue
            stretch = abs(math.log(w / h) - math.log(width / height))
            cost = stretch + abs(math.log(w * h / area))
            if stretch <= MAX_STRETCH and cost < best_cost:
                best, best_cost = (w, h), cost
    if best is None:
        raise BadImageError(f"{width} × {height} pixels is too thin")
    return best


def fit(image: Image.Image, policy: ImagePolicy) -> Image.Image:
    """Resizes an upright RGB photo to the policy's size; returns it unchanged when it fits."""
    size = fitted_size(*image.size, policy)
    return image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)


def _is_bare_jpeg(image: Image.Image, data: bytes) -> bool:
    """Whether a picture is an RGB JPEG without EXIF, profile, comment, more frames or a trailer."""
    segments = {name for name, _ in getattr(image, "applist", [])}
    if image.format != "JPEG" or image.mode != "RGB" or not segments <= {"APP0", "APP14"}:
        return False
    # The first end marker after the start of the scan: within a scan it cannot stand.
    return data.find(b"\xff\xd9", data.find(b"\xff\xda")) == len(data) - 2


def cut_view(strip: Image.Image, view: View) -> Image.Image:
    """Turns a panorama into a photo: its middle, the whole, or its four quarters in a grid.

    Args:
        strip: A panorama, shape (height, width) with width over height.
        view: `crop`: full height, at `VIEW_ASPECT`. `quad`: quarters from left to right, two above
            two.
    """
    width, height = strip.size
    if view == "crop":
        wide = min(width, round(height * VIEW_ASPECT))
        left = (width - wide) // 2
        return strip.crop((left, 0, left + wide, height))
    if view == "quad":
        part = width // 4
        grid = Image.new("RGB", (2 * part, 2 * height))
        for n in range(4):
            quarter = strip.crop((n * part, 0, (n + 1) * part, height))
            grid.paste(quarter, (n % 2 * part, n // 2 * height))
        return grid
    return strip


def perceptual_hash(jpeg: bytes) -> int:
    """Returns the 256-bit perceptual hash of a stored photo.

    It is a function of the stored bytes alone, decoded in grey at a fraction of their size, so that
    a later check finds the same bits. Every byte of the scan is read for it, so that damage shows
    as in a full decoding, at a third of its cost.

    Raises:
        BadImageError: The file is damaged.
    """
    with _decoding():
        image = Image.open(io.BytesIO(jpeg), formats=("JPEG",))
        image.draft("L", (4 * HASH_SIDE, 4 * HASH_SIDE))  # the size that the hash works on
        return int(str(imagehash.phash(image, HASH_SIDE)), 16)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A photo as it is stored.

    Attributes:
        jpeg: Its bytes, without metadata.
        size: Width and height in pixels.
        phash: See `perceptual_hash`.
    """

    jpeg: bytes
    size: tuple[int, int]
    phash: int


def prepare(
    data: bytes,
    policy: ImagePolicy,
    view: View = "strip",
    max_pixels: int = MAX_PREPARED_PIXELS,
) -> Prepared:
    """Applies the policy to one photo's bytes, and finds out whether they can be decoded.

    Bytes that satisfy the policy already are kept as they are.

    Args:
        data: A photo in one of `FORMATS`.
        policy: The image policy.
        view: What to take of a panorama.
        max_pixels: Larger pictures are refused.

    Raises:
        BadImageError: See `open_upright` and `fitted_size`.
    """
    image = _open_header(data, max_pixels)
    keeps = view == "strip" and _is_bare_jpeg(image, data)
    if keeps and fitted_size(*image.size, policy) == image.size:
        return Prepared(data, image.size, perceptual_hash(data))
    with _decoding():
        image.load()
    fitted = fit(cut_view(_upright_rgb(image), view), policy)
    out = io.BytesIO()
    # A fresh picture, since Pillow carries a comment or profile of the old one along.
    clean = Image.frombytes("RGB", fitted.size, fitted.tobytes())
    clean.save(out, "JPEG", quality=policy.jpeg_quality)
    return Prepared(out.getvalue(), clean.size, perceptual_hash(out.getvalue()))
