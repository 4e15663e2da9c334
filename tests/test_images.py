"""Images: any photo file becomes upright RGB at the policy's size, or a BadImageError."""

import io
import json
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pillow_heif
import polars as pl
import pytest
from conftest import scene
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from geoguessr_rl.config import Contamination, ImagePolicy, View
from geoguessr_rl.images import (
    MAX_STRETCH,
    BadImageError,
    cut_view,
    fit,
    fitted_size,
    open_upright,
    perceptual_hash,
    prepare,
    visual_tokens,
)

AWKWARD = Path(__file__).parents[1].parent / "shared" / "awkward_files"
AWKWARD_FILES = sorted(p for p in AWKWARD.glob("*") if p.suffix != ".md")
DEFAULT, SMALL = ImagePolicy(), ImagePolicy(long_edge=160, min_pixels=1024)
SIZE = (96, 64)
# Top left, top right, bottom left, bottom right.
CORNERS = [(220, 30, 30), (30, 200, 30), (30, 30, 220), (230, 220, 40)]
EXIF_ORIENTATION, EXIF_MAKE = 0x0112, 0x010F
# How a picture must be stored so that the orientation turns it upright again.
STORED_AS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def upright() -> Image.Image:
    """A picture whose four quarters have the colours of `CORNERS`."""
    quarters = Image.new("RGB", (2, 2))
    for n, colour in enumerate(CORNERS):
        quarters.putpixel((n % 2, n // 2), colour)
    return quarters.resize(SIZE, Image.Resampling.NEAREST)


def save(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def with_orientation(orientation: int, kind: str = "JPEG", **options: object) -> bytes:
    turn = STORED_AS[orientation]
    stored = upright() if turn is None else upright().transpose(turn)
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    return save(stored, kind, exif=exif, **options)


def assert_upright(image: Image.Image, tolerance: int = 45) -> None:
    """The picture is RGB, lies flat, and has the right colour in every corner."""
    assert image.mode == "RGB"
    assert image.size == SIZE
    for n, colour in enumerate(CORNERS):
        found = image.getpixel(
            (SIZE[0] * (1 + 2 * (n % 2)) // 4, SIZE[1] * (1 + 2 * (n // 2)) // 4)
        )
        assert max(abs(a - b) for a, b in zip(found, colour, strict=True)) < tolerance, (n, found)


def png(width: int, height: int, *, depth: int = 8, kind: int = 2, rows: bytes = b"") -> bytes:
    """A PNG whose header says any size, whatever pixels follow."""

    def chunk(tag: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + tag
            + content
            + struct.pack(">I", zlib.crc32(tag + content))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + body + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF"])
@pytest.mark.parametrize("orientation", STORED_AS)
def test_every_exif_orientation_ends_upright(orientation: int, kind: str) -> None:
    assert_upright(open_upright(with_orientation(orientation, kind)))


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_heic_is_turned_once(orientation: int) -> None:
    turn = STORED_AS[orientation]
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    stored = upright() if turn is None else upright().transpose(turn)
    out = io.BytesIO()
    heif = pillow_heif.from_pillow(stored)
    heif.save(out, quality=90, exif=exif.tobytes())
    assert_upright(open_upright(out.getvalue()))


def test_a_prepared_photo_is_not_turned_again() -> None:
    stored = prepare(with_orientation(6), SMALL).jpeg
    assert_upright(open_upright(stored))
    assert_upright(open_upright(prepare(stored, SMALL).jpeg))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda: save(upright(), "WEBP"), id="webp"),
        pytest.param(lambda: save(upright(), "WEBP", lossless=True), id="lossless webp"),
        pytest.param(lambda: save(upright(), "AVIF"), id="avif"),
        pytest.param(lambda: save(upright(), "HEIF"), id="heic"),
        pytest.param(lambda: save(upright(), "PNG"), id="png"),
        pytest.param(lambda: save(upright().quantize(16), "PNG"), id="palette"),
        pytest.param(lambda: save(upright().convert("RGBA"), "PNG"), id="rgba"),
        pytest.param(lambda: save(upright(), "JPEG", progressive=True), id="progressive"),
        pytest.param(lambda: save(upright().convert("CMYK"), "JPEG", quality=95), id="cmyk"),
        pytest.param(
            lambda: save(upright(), "MPO", save_all=True, append_images=[Image.new("RGB", SIZE)]),
            id="mpo, whose second frame is black",
        ),
        pytest.param(
            lambda: save(upright(), "GIF", save_all=True, append_images=[Image.new("RGB", SIZE)]),
            id="animated gif, whose second frame is black",
        ),
    ],
)
def test_every_format_gives_upright_rgb_of_its_first_frame(data: object) -> None:
    assert_upright(open_upright(data()), tolerance=60)  # type: ignore[operator]


def test_transparency_becomes_white() -> None:
    palette = upright().quantize(16)
    clear = palette.getpixel((0, 0))
    for data in (
        save(palette, "PNG", transparency=clear),
        save(palette, "GIF", transparency=clear),
        save(Image.new("RGBA", SIZE, (9, 9, 9, 0)), "PNG"),
        save(Image.new("LA", SIZE, (9, 0)), "PNG"),
        save(Image.new("RGB", SIZE, (9, 9, 9)), "PNG", transparency=(9, 9, 9)),
    ):
        assert open_upright(data).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bit_grey_is_scaled_and_not_clipped_to_white() -> None:
    ramp = np.tile(np.linspace(0, 65535, 96).astype(np.uint16), (64, 1))
    grey = np.asarray(open_upright(save(Image.fromarray(ramp), "PNG")))
    assert grey.shape == (64, 96, 3)
    assert grey[0, 0, 0] == 0 and grey[0, -1, 0] == 255
    assert abs(int(grey[0, 48, 0]) - 128) <= 3


def test_a_grey_and_a_one_bit_picture_become_rgb() -> None:
    for mode in ("L", "1"):
        assert open_upright(save(upright().convert(mode), "PNG")).mode == "RGB"


def truncated(kind: str, share: float) -> bytes:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8))
    data = save(noise, kind)
    return data[: int(len(data) * share)]


BAD = {
    "empty": lambda: b"",
    "text": lambda: b"this is no photo\n" * 50,
    "html": lambda: b"<!DOCTYPE html><html><body>429</body></html>",
    "git lfs pointer": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "only a JPEG's first bytes": lambda: b"\xff\xd8\xff\xe0",
    "no pixels": lambda: png(96, 64),
    "no width": lambda: png(0, 64),
    "a gif of no size": lambda: b"GIF89a" + bytes(7) + b";",
    **{
        f"{kind} cut at {share:.0%}": lambda kind=kind, share=share: truncated(kind, share)
        for kind in ("JPEG", "PNG", "WEBP", "AVIF", "HEIF", "GIF")
        for share in (0.1, 0.5, 0.9)
    },
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_whole_photo_is_refused_in_a_few_words(name: str) -> None:
    with pytest.raises(BadImageError) as refused:
        prepare(BAD[name](), SMALL)
    assert 0 < len(str(refused.value)) < 200
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["EPS", "TIFF", "BMP", "ICO", "PPM", "TGA", "JPEG2000"])
def test_no_decoder_but_those_of_photos_sees_a_file(kind: str) -> None:
    """A photo's name may hide PostScript, whose decoder starts a program."""
    with pytest.raises(BadImageError, match="not an image"):
        open_upright(save(upright(), kind))


def test_an_empty_file_is_called_so() -> None:
    with pytest.raises(BadImageError, match="empty"):
        open_upright(b"")


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["JPEG", "PNG", "WEBP", "AVIF", "HEIF", "GIF"]),
    changes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_damaged_bytes_never_raise_anything_else(
    kind: str, changes: list[tuple[float, int]]
) -> None:
    exif = Image.Exif()
    exif[EXIF_ORIENTATION], exif[EXIF_MAKE] = 6, "camera"
    options = {} if kind in ("GIF", "HEIF") else {"exif": exif}
    data = bytearray(save(upright(), kind, **options))
    for where, value in changes:
        data[int(where * len(data))] = value
    try:
        photo = prepare(bytes(data), SMALL)
    except BadImageError:
        return
    assert open_upright(photo.jpeg).size == photo.size


def test_an_avif_whose_payload_is_gone_is_a_bad_image() -> None:
    """Pillow's AVIF decoder raises RuntimeError, which no other decoder does."""
    data = bytearray(save(upright(), "AVIF"))
    middle = len(data) // 2
    data[middle:] = bytes(len(data) - middle)
    with pytest.raises(BadImageError):
        open_upright(bytes(data))


# In a process of its own: the peak of this one is whatever the largest test before took.
MEASURE = """
import json, resource, sys, warnings
from pathlib import Path
from geoguessr_rl.config import ImagePolicy
from geoguessr_rl.images import BadImageError, prepare
warnings.simplefilter("ignore")
status = Path("/proc/self/status")
def peak():
    # A new process inherits the peak of the one that started it in ru_maxrss, and not here.
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = {"": peak()}
for path in map(Path, sys.argv[1:]):
    try:
        prepare(path.read_bytes(), ImagePolicy())
    except BadImageError as refused:
        print(refused, file=sys.stderr)
    found[path.name] = peak()
print(json.dumps(found))
"""


def peaks(paths: Sequence[Path]) -> dict[str, int]:
    """The peak of memory in bytes after each file, and at first under an empty name."""
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(ended.stdout)
    return found


HUGE = [(65536, 65536), (20000, 14000), (10001, 10001)]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", HUGE)
def test_a_huge_picture_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(BadImageError, match="too large"):
        open_upright(png(*size, depth=1, kind=0))


def test_a_huge_picture_is_refused_before_a_pixel_is_decoded(tmp_path: Path) -> None:
    paths = []
    for width, height in HUGE:
        rows = bytes((width // 8 + 2) * min(height, 12_000))
        paths.append(tmp_path / f"{width}.png")
        paths[-1].write_bytes(png(width, height, depth=1, kind=0, rows=rows))
    found = peaks(paths)
    assert max(found.values()) - found[""] < 60_000_000


@pytest.mark.parametrize("size", [(2048, 1), (1, 2048), (4000, 100)])
def test_a_picture_that_is_too_thin_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(BadImageError, match="too thin"):
        prepare(save(Image.new("RGB", size), "PNG"), DEFAULT)


sides = st.integers(1, 12_000)


@settings(max_examples=150, deadline=None)
@given(width=sides, height=sides, max_pixels=st.sampled_from([401_408, 602_112, 802_816]))
def test_a_fitted_size_keeps_every_bound_of_the_policy(
    width: int, height: int, max_pixels: int
) -> None:
    policy = ImagePolicy(max_pixels=max_pixels)
    try:
        size = fitted_size(width, height, policy)
    except BadImageError:
        assert max(width / height, height / width) > 4  # 1024 × 224 is the thinnest allowed
        return
    w, h = size
    assert w % 32 == 0 and h % 32 == 0
    assert max(size) <= 1024
    assert 200_704 <= w * h <= max_pixels
    assert visual_tokens(size) <= max_pixels // 1024 <= 784
    assert abs(np.log(w / h) - np.log(width / height)) <= MAX_STRETCH
    assert fitted_size(w, h, policy) == size


@settings(max_examples=100, deadline=None)
@given(w=st.integers(1, 32), h=st.integers(1, 32))
def test_a_size_that_fits_already_is_left_alone(w: int, h: int) -> None:
    size = (32 * w, 32 * h)
    if DEFAULT.min_pixels <= size[0] * size[1] <= DEFAULT.max_pixels:
        assert fitted_size(*size, DEFAULT) == size
        image = Image.new("RGB", size)
        assert fit(image, DEFAULT) is image


@pytest.mark.parametrize(
    ("size", "fitted"),
    [
        ((4032, 3024), (1024, 768)),
        ((3024, 4032), (768, 1024)),
        ((1920, 1080), (1024, 576)),
        ((640, 480), (640, 480)),
        ((1024, 1024), (896, 896)),
        ((320, 240), (512, 416)),
    ],
)
def test_usual_photos_get_the_size_that_one_expects(
    size: tuple[int, int], fitted: tuple[int, int]
) -> None:
    w, h = fitted_size(*size, DEFAULT)
    assert abs(w - fitted[0]) <= 32 and abs(h - fitted[1]) <= 32


def test_a_bare_jpeg_that_fits_keeps_its_bytes() -> None:
    for quality in (60, 95):
        data = save(upright(), "JPEG", quality=quality)
        photo = prepare(data, SMALL)
        assert photo.jpeg == data and photo.size == SIZE


def _with_icc() -> bytes:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return save(upright(), "JPEG", icc_profile=profile)


def _with_camera() -> bytes:
    exif = Image.Exif()
    exif[EXIF_MAKE] = "dashcam 52.5N 13.4E"
    return save(upright(), "JPEG", exif=exif)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(_with_camera, id="exif"),
        pytest.param(lambda: save(upright(), "JPEG", comment=b"Berlin"), id="comment"),
        pytest.param(_with_icc, id="icc"),
        pytest.param(lambda: save(upright(), "JPEG", xmp=b"<x>Berlin</x>"), id="xmp"),
        pytest.param(lambda: save(upright(), "PNG"), id="png"),
        pytest.param(lambda: save(upright().convert("L"), "JPEG"), id="grey jpeg"),
        pytest.param(
            lambda: save(upright(), "MPO", save_all=True, append_images=[upright()]), id="mpo"
        ),
    ],
)
def test_whatever_else_is_written_anew_without_metadata(data: object) -> None:
    original = data()  # type: ignore[operator]
    photo = prepare(original, SMALL)
    stored = photo.jpeg
    assert stored != original
    image = Image.open(io.BytesIO(stored))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", photo.size)
    assert {name for name, _ in image.applist} <= {"APP0"}
    assert not image.getexif() and "icc_profile" not in image.info and "comment" not in image.info
    assert b"Berlin" not in stored and b"dashcam" not in stored
    assert prepare(stored, SMALL).jpeg == stored


def test_what_stands_behind_a_jpeg_s_end_is_not_kept() -> None:
    data = save(upright(), "JPEG")
    for trailer in (b"GPS 52.5 13.4", b"GPS 52.5 13.4\xff\xd9"):
        stored = prepare(data + trailer, SMALL).jpeg
        assert b"52.5" not in stored and open_upright(stored).size == SIZE


def test_a_photo_costs_at_most_784_tokens() -> None:
    for size in [(4000, 3000), (3000, 3000), (1024, 800)]:
        photo = prepare(save(Image.new("RGB", size), "JPEG"), DEFAULT)
        assert 196 <= visual_tokens(photo.size) <= 784


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("path", AWKWARD_FILES, ids=lambda path: path.name)
def test_each_awkward_file_is_upright_rgb_or_refused(path: Path) -> None:
    try:
        photo = prepare(path.read_bytes(), DEFAULT)
    except BadImageError as refused:
        assert 0 < len(str(refused)) < 200
        assert path.name.startswith(("giant", "png_65536", "truncated"))
        return
    assert not path.name.startswith(("giant", "png_65536", "truncated."))
    image = open_upright(photo.jpeg)
    assert (image.mode, image.size) == ("RGB", photo.size)
    # The photos of this folder whose pixels lie on their side.
    if path.name in ("exif_rot90.jpg", "webp exif rotated.webp", "gps_zero_zero.jpg"):
        assert image.height > image.width
    if path.name == "png16_gray.png":
        assert np.asarray(image).min() < 50


@pytest.mark.parametrize("paths", [AWKWARD_FILES] if AWKWARD_FILES else [])
def test_the_awkward_files_stay_within_memory(paths: list[Path]) -> None:
    assert max(peaks(paths).values()) < 1_500_000_000


def panorama(width: int = 2033, height: int = 561) -> Image.Image:
    """A strip whose columns grow lighter from left to right."""
    row = np.linspace(0, 255, width).astype(np.uint8)
    return Image.fromarray(np.tile(row, (height, 1))).convert("RGB")


def test_one_view_is_the_middle_half_of_a_panorama() -> None:
    view = cut_view(panorama(), "crop")
    assert view.size == (1016, 561)
    grey = np.asarray(view)[0, :, 0]
    assert grey[0] == pytest.approx(64, abs=1) and grey[-1] == pytest.approx(191, abs=1)


def test_a_panorama_narrower_than_a_view_stays_whole() -> None:
    assert cut_view(panorama(600), "crop").size == (600, 561)


def test_four_quarters_stand_in_reading_order() -> None:
    grid = np.asarray(cut_view(panorama(2034), "quad"))[:, :, 0]
    assert grid.shape == (1122, 1016)
    corners = [grid[0, 0], grid[0, 508], grid[561, 0], grid[561, 508]]
    assert corners == pytest.approx([0, 64, 127, 191], abs=1)


def test_a_strip_stays_as_it_is() -> None:
    assert cut_view(panorama(), "strip").size == (2033, 561)


@pytest.mark.parametrize("view", ["crop", "strip", "quad"])
def test_every_view_of_a_panorama_fits_the_policy(view: View) -> None:
    photo = prepare(save(panorama(), "JPEG"), DEFAULT, view)
    assert open_upright(photo.jpeg).size == photo.size
    assert fitted_size(*photo.size, DEFAULT) == photo.size
    if view == "crop":
        assert photo.size == (992, 576)


def bits_apart(one: bytes, other: bytes) -> int:
    return (perceptual_hash(one) ^ perceptual_hash(other)).bit_count()


def test_a_likeness_has_nearly_the_same_hash_and_another_scene_has_not() -> None:
    original = scene(1, (640, 480))
    for changed in (scene(1, (320, 240)), scene(1, (640, 480), quality=40)):
        assert bits_apart(original, changed) <= 20
    assert min(bits_apart(original, scene(seed)) for seed in range(2, 30)) > 60


MINI = Path(__file__).parents[1].parent / "shared" / "osv5m_mini"


@pytest.mark.parametrize("folder", [MINI] if MINI.is_dir() else [])
def test_the_default_hash_distance_takes_copies_and_no_other_photo(folder: Path) -> None:
    """Of all pairs of real photos; those of one walk may look alike."""
    limit = Contamination().max_hash_bits
    assert limit is not None
    photos, walks = {}, {}
    for split in ("test", "train"):
        rows = pl.read_csv(folder / f"{split}.csv", infer_schema=False)
        walks |= dict(rows.select("id", "sequence").iter_rows())
        for path in sorted((folder / "images" / split).glob("*.zip")):
            with zipfile.ZipFile(path) as file:
                photos |= {Path(name).stem: file.read(name) for name in file.namelist()}
    stored = {one: prepare(photo, DEFAULT) for one, photo in photos.items() if one in walks}
    hashes = {one: photo.phash for one, photo in stored.items()}
    pairs = [
        ((hashes[a] ^ hashes[b]).bit_count(), a, b)
        for a, b in combinations(sorted(hashes), 2)
        if walks[a] is None or walks[a] != walks[b]
    ]
    assert len(pairs) > 85_000
    assert min(pairs)[0] > limit + 20
    copies = []
    for one, photo in list(stored.items())[:80]:
        image = open_upright(photo.jpeg)
        half = image.resize((image.width // 2, image.height // 2))
        copies.append((hashes[one] ^ perceptual_hash(save(half, "JPEG", quality=50))).bit_count())
    assert max(copies) <= limit


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 4}])
def test_damage_shows_without_a_full_decoding(options: dict[str, object]) -> None:
    """A photo that is kept is decoded at a fraction of its size only; every cut is still found."""
    whole = io.BytesIO()
    Image.open(io.BytesIO(scene(3, (640, 480)))).save(whole, "JPEG", **options)
    data = whole.getvalue()
    assert prepare(data, DEFAULT).jpeg == data
    for share in (0.2, 0.5, 0.8, 0.95):
        cut = data[: int(share * len(data))]
        with pytest.raises(BadImageError):
            open_upright(cut)
        with pytest.raises(BadImageError):
            perceptual_hash(cut)
        with pytest.raises(BadImageError):
            prepare(cut, DEFAULT)
