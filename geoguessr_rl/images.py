"""Any photo file -> upright RGB at the image policy's size.

The policy is applied once, when photos are prepared; after that every processor (trainer, vLLM,
transformers) finds a size that it leaves alone, so that training, rollout and evaluation see the
same pixels. Reading GPS from EXIF is the demo's business, not this module's.
"""

import io
import math
import struct
import zlib
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import pillow_heif
from PIL import Image, ImageOps, UnidentifiedImageError

from geoguessr_rl.config import ImagePolicy

MAX_PIXELS = 100_000_000
"""Larger pictures are refused before a pixel is decoded: they are never street-level photos."""

MAX_STRETCH = 0.15
"""The largest change of aspect ratio that fitting may cost; beyond it a photo is too thin."""

VISUAL_TOKEN_PIXELS = 32 * 32
"""Pixels of one visual token of Qwen3-VL: patches of 16 pixels, merged 2 by 2."""

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".heic", ".heif", ".avif", ".gif", ".mpo")

FORMATS = ("JPEG", "PNG", "WEBP", "HEIF", "AVIF", "GIF")
"""The decoders that may see a file: a .jpg that holds PostScript must not start Ghostscript.

MPO is JPEG's work."""

# What decoders raise on damaged files; where these are caught, nothing is our own code.
_DECODER_ERRORS = (
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


def _open(source: bytes | Path) -> Image.Image:
    """Opens and decodes a picture whose size is acceptable."""
    data = source if isinstance(source, bytes) else source.read_bytes()
    if not data:
        raise BadImageError("empty file")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise BadImageError(f"{image.width} × {image.height} pixels is too large")
        image.load()
    except Image.DecompressionBombError:
        raise BadImageError("too large") from None
    except UnidentifiedImageError:
        raise BadImageError("not an image") from None
    except _DECODER_ERRORS as error:
        raise BadImageError(f"damaged: {' '.join(str(error).split())[:100]}") from None
    return image


def _upright_rgb(image: Image.Image) -> Image.Image:
    """Turns a decoded picture upright and into RGB, on white where it is transparent."""
    # An EXIF block that cannot be read holds no orientation.
    with suppress(*_DECODER_ERRORS):
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip to white
        grey = np.asarray(image, dtype=np.float64) / 65535
        image = Image.fromarray((grey * 255).round().clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


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


def _is_bare_jpeg(image: Image.Image) -> bool:
    """Whether a picture is a baseline RGB JPEG without EXIF, profile, comment or extra frames."""
    segments = {name for name, _ in getattr(image, "applist", [])}
    return image.format == "JPEG" and image.mode == "RGB" and segments <= {"APP0", "APP14"}


def prepare(data: bytes, policy: ImagePolicy) -> tuple[bytes, tuple[int, int]]:
    """Applies the policy to one photo's bytes.

    Args:
        data: A photo in one of `FORMATS`.
        policy: The image policy.

    Returns:
        JPEG bytes without metadata, and their (width, height). Bytes that satisfy the policy
        already are returned as they are.

    Raises:
        BadImageError: See `open_upright` and `fitted_size`.
    """
    image = _open(data)
    if _is_bare_jpeg(image) and fitted_size(*image.size, policy) == image.size:
        return data, image.size
    fitted = fit(_upright_rgb(image), policy)
    out = io.BytesIO()
    # A fresh picture, since Pillow carries a comment or profile of the old one along.
    clean = Image.frombytes("RGB", fitted.size, fitted.tobytes())
    clean.save(out, "JPEG", quality=policy.jpeg_quality)
    return out.getvalue(), fitted.size
