"""Prepare against hostile files: each is counted or refused in one sentence, within 2 GB.

Rows of shared/cases/behaviour.md, from the folder to the exit code or `summary.json`. What is not
here is shown by test_prepare.py:

- csv, Namibia, `NMB` and lost labels: test_namibia_survives_parquet_json_lines_and_resume
- csv, other null labels, one id twice: test_every_kind_of_bad_row_is_counted_in_the_summary
- csv, one sequence or 300 m apart: test_train_rows_near_evaluation_go_and_are_counted
- zip, cut short, HTML, Git LFS: test_a_broken_zip_ends_the_run_before_anything_is_written
- zip, checksum, truncated, 0 bytes, text: test_a_damaged_photo_is_named_counted_and_replaced_...
- zip, `../`, absolute, a link: test_a_zip_cannot_write_outside_the_output_folder
- zip, no id in common: test_a_csv_that_belongs_to_other_zips_matches_nothing
"""

import bz2
import io
import itertools
import json
import os
import shutil
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from conftest import SMALL, csv_text, make_jpeg, make_rows, photo_entries, scene, write_zip
from hypothesis import event, given, settings
from hypothesis import strategies as st
from PIL import Image
from test_images import SIZE, STORED_AS, assert_upright, png, save, upright, with_orientation
from test_prepare import assert_counts_add_up, ids_of

from geoguessr_rl import data, data_card, sources
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import (
    Contamination,
    DataConfig,
    EvalDraw,
    ImagePolicy,
    Pano,
    Source,
    TrainPool,
)
from geoguessr_rl.embedded import OSV5M_COLUMNS
from geoguessr_rl.images import MAX_PREPARED_PIXELS, open_upright
from geoguessr_rl.phases import prepare, verify

AWKWARD = Path(__file__).parents[1].parent / "shared" / "awkward_files"
AWKWARD_FILES = sorted(p for p in AWKWARD.glob("*") if p.suffix != ".md")
REFUSED = ("giant", "png_65536", "truncated.", "truncated_header")  # the others are whole photos
ON_THEIR_SIDE = ("exif_rot90.jpg", "webp exif rotated.webp", "gps_zero_zero.jpg")
TWO_GB = 2_000_000_000
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))  # more of each property, to hunt

OsvFolder = Callable[..., Path]
MakeConfig = Callable[..., DataConfig]
Script = Callable[..., Any]


def flags(root: Path, out: Path, *, limit: int | None = 99, **keys: Any) -> list[object]:
    """The command line that prepares a small folder, by default its test photos alone."""
    settings = {"source.train": [0], "image": SMALL.model_dump(), **keys}
    sets = [part for item in settings.items() for part in ("--set", "=".join(map(str, item)))]
    limits = [] if limit is None else ["--limit", limit]
    return ["--source", root, "--output_dir", out, *limits, *sets]


def assert_refused(ended: Any, out: Path, *says: str) -> None:
    """The script ended with one sentence, and left no split behind."""
    assert ended.code == 2
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1, ended.err
    assert len(ended.err) < 1000
    assert all(part in ended.err for part in says), ended.err
    assert not list(out.rglob("*.parquet")) and not list(out.rglob("*.partial"))


# CSV


ORDERS = [["row", *OSV5M_COLUMNS[::-1]], ["none", *sorted(OSV5M_COLUMNS), "row"]]


@pytest.mark.parametrize("order", ORDERS, ids=["reversed", "sorted"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_columns_in_any_order_reach_the_split_by_name(
    order: list[str], bom: str, end: str, osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    rows = make_rows(["NA", "FR"])
    for row in rows:
        row.update({"cell": "(0, 8)", "city": "Île, d'Yeu", "sub-region": "S", "row": "7"})
        row.update(region="R", sequence="q", creator_username='"c"')
    table = bom + csv_text(rows, order).replace("\n", end)
    root = osv_folder(table.encode(), test_zip=photo_entries(rows))
    config = data_config(root, limit=9)
    summary = prepare.run(config)
    assert_counts_add_up(summary)
    split = pl.read_parquet(config.output_dir / "eval_osv.parquet").sort("image_path")
    for row, found in zip(rows, split.iter_rows(named=True), strict=True):
        assert found == {
            "image_path": f"images/test/{row['id']}.jpg",
            "latitude": row["latitude"],
            "longitude": row["longitude"],
            "country_iso2": row["country"],
            "region": "R",
            "city": "Île, d'Yeu",
            "sequence": "q",
            "sub_region": "S",
            "creator": '"c"',
        }


def test_text_after_200_numbers_in_a_column_is_read_as_text(
    osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    rows = make_rows(["FR"] * 300)
    for n, row in enumerate(rows):
        row.update(quadtree_10_5000=n, sequence=n, city="Paris" if n == 250 else n)
    rows[250].update(quadtree_10_5000="none", sequence="abc")
    entries = [(f"00/{row['id']}.jpg", make_jpeg(n)) for n, row in enumerate(rows[245:255])]
    config = data_config(osv_folder(rows, test_zip=entries), limit=99)
    summary = prepare.run(config)
    assert_counts_add_up(summary)
    split = pl.read_parquet(config.output_dir / "eval_osv.parquet")
    assert split.height == 10
    kept = split.filter(pl.col("image_path").str.ends_with("/251.jpg")).row(0, named=True)
    assert (kept["sequence"], kept["city"]) == ("abc", "Paris")


HEADER = "id,latitude,longitude,country\n"
BAD_TABLES = {
    "a float id": (HEADER + "1,1,2,FR\n3859149887465501.0,1,2,FR\n", ["row 3", "'id'", "501.0"]),
    "a text coordinate": (HEADER + "1,1,2,FR\n" * 250 + "2,1,east,FR\n", ["row 252", "'east'"]),
    "semicolons": (HEADER.replace(",", ";") + "1;1;2;FR\n", ["'id'", "id;latitude;longitude"]),
    "Latin-1": ((HEADER + "1,1,2,Besançon\n").encode("latin-1"), ["UTF-8", "download again"]),
    "an empty file": ("", ["is empty", "'id'"]),
    "a header only": (HEADER, ["has 0 rows"]),
    "a missing column": (HEADER.replace("longitude", "lng"), ["'longitude'", "id,latitude,lng"]),
    "zero bytes": (bytes(99), ["'id'", "its first line is"]),
    "half a gzip": (b"\x1f\x8b\x08\x00abc", ["download again"]),
    "half a Zstandard": (b"\x28\xb5\x2f\xfdabc", ["download again"]),
    "two columns of one name": ("id,id_duplicated_0,id\n", ["download again"]),
    "a line break in the header": ('id,"lati\ntude",longitude,country\n', ["'latitude'"]),
    "a megabyte in a cell": (HEADER + f"1,{'x' * 1_000_000},2,FR\n", ["row 2", "'latitude'"]),
    "a quote that stays open": (HEADER + '1,1,2,"FR\n2,1,2,FR\n', ["download again"]),
}


@pytest.mark.parametrize("split", ["test", "train"])
@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_table_that_cannot_be_used_ends_the_script_in_one_sentence(
    name: str, split: str, osv_folder: OsvFolder, script: Script, tmp_path: Path
) -> None:
    content, says = BAD_TABLES[name]
    table = content if isinstance(content, bytes) else content.encode()
    rows = make_rows(["FR", "DE"])
    tables = {"test": rows, "train": rows, split: table}
    archive = {f"{split}_zip": photo_entries(rows)}
    root = osv_folder(tables["test"], train=tables["train"], **archive)
    out = tmp_path / "data"
    ended = script("prepare_data.py", *flags(root, out, limit=None))
    assert_refused(ended, out, str(root / f"{split}.csv"), *says)
    assert not (out / "images").exists()


def test_rows_without_a_usable_place_are_never_trained_on(
    osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    train = make_rows(["BR"] * 6, prefix="t")
    for n, row in enumerate(train):
        row.update(latitude=10 + n, longitude=100.0)
    train[0]["latitude"], train[1]["longitude"] = 91, ""
    train[2].update(latitude=0, longitude=0)
    train[3]["id"] = train[4]["id"]
    config = data_config(osv_folder(make_rows(["FR"]), train=train))
    summary = prepare.run(config)
    assert_counts_add_up(summary)
    counts = {reason: n for reason, n in summary["train"]["dropped"].items() if n}
    assert counts == {"duplicate_id": 1, "bad_coordinates": 2, "null_island": 1}
    assert sorted(ids_of(config.output_dir, "train_pool")) == ["t5", "t6"]


def test_a_folder_may_have_any_name(osv_folder: OsvFolder, script: Script, tmp_path: Path) -> None:
    root = osv_folder(make_rows(["FR", "DE"]), root=tmp_path / "osv [1] * é?{a,b}")
    ended = script("prepare_data.py", *flags(root, tmp_path / "data [2] *?", limit=2))
    assert ended.code == 0, ended.err


def test_a_train_pool_that_is_empty_is_written_and_counted(
    osv_folder: OsvFolder, script: Script, tmp_path: Path
) -> None:
    rows = make_rows(["FR", "DE"])
    root = osv_folder(rows, train=[{**row, "id": f"t{row['id']}"} for row in rows])
    ended = script("prepare_data.py", *flags(root, tmp_path / "data", limit=None))
    assert "Traceback" not in ended.err
    if ended.code == 0:
        summary = json.loads((tmp_path / "data/summary.json").read_text())
        assert_counts_add_up(summary)
        assert summary["train"]["dropped"]["within_min_km"] == 2
    else:
        assert ended.code == 2 and ended.err.startswith("error: ")


# Zips


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entries_are_joined_by_stem_and_junk_is_counted(
    osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    rows = make_rows(["FR"] * 5)
    names = ["00\\1.jpg", "2.JPG", "a/b/3.jpeg", "4.jpg", "00/4.jpg", "4.jpg", "00/5.Jpg"]
    junk = ["__MACOSX/00/._1.jpg", "__MACOSX/1.jpg", ".DS_Store", "00/.DS_Store", "00/._2.jpg"]
    others = ["readme.txt", "00/1", "00/1.jpg ", "00/1.jpg.", "00/1 2.jpg", f"{'n' * 300}.jpg"]
    entries = [(name, make_jpeg(n)) for n, name in enumerate([*names, *junk, *others])]
    config = data_config(osv_folder(rows, test_zip=entries), limit=9)
    summary = prepare.run(config)
    assert_counts_add_up(summary)
    assert sorted(ids_of(config.output_dir, "eval_osv")) == list("12345")
    assert summary["test"]["zip_photos"] == 5
    assert summary["test"]["zip_entries_ignored"] == {
        "junk_entry": 5,
        "not_a_photo_entry": 6,
        "duplicate_entry": 2,
    }


@pytest.mark.parametrize("length", [240, 300, 60_000])
def test_an_id_that_is_too_long_for_a_file_s_name_is_counted(
    length: int, osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    rows = make_rows(["FR", "DE"])
    rows[0]["id"] = "n" * length
    summary = prepare.run(data_config(osv_folder(rows), limit=9))
    assert_counts_add_up(summary)
    assert summary["test"]["rows_selected"] == 1


DIRECTORY, LOCAL = b"PK\x01\x02", b"PK\x03\x04"


def change(content: bytes, record: bytes, number: int, offset: int, value: int, size: int) -> bytes:
    """Sets a field of the n-th record of a zip; beyond the last record nothing."""
    where = -1
    for _ in range(number + 1):
        where = content.find(record, where + 1)
        if where < 0:
            return content
    low = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
    return content[: where + offset] + low + content[where + offset + size :]


def with_size(size: int, entries: list[Any]) -> bytes:
    """A zip whose first entry claims another size when unpacked, in a zip64 field."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for n, (name, content) in enumerate(entries):
            info = zipfile.ZipInfo(name)
            info.extra = b"" if n else struct.pack("<HHQ", 1, 8, size)
            file.writestr(info, content)
    return change(out.getvalue(), DIRECTORY, 0, 24, 0xFFFFFFFF, 4)


def bad_lzma() -> bytes:
    """A zip whose first entry names LZMA properties that do not exist."""
    packed, *others = photo_entries(make_rows(["FR"] * 3))
    whole = bytearray(zip_bytes([packed], (zipfile.ZIP_LZMA,)))
    start = 30 + len(packed[0]) + 4  # after a version and a length
    whole[start : start + 5] = b"\xff" * 5
    out = io.BytesIO(whole)
    with zipfile.ZipFile(out, "a") as file:
        for name, content in others:
            file.writestr(name, content)
    return out.getvalue()


BAD_FIRST_ENTRIES = {
    "encrypted": lambda whole: change(change(whole, DIRECTORY, 0, 8, 1, 2), LOCAL, 0, 6, 1, 2),
    "an unknown compression": lambda whole: change(whole, DIRECTORY, 0, 10, 98, 2),
    "LZMA that is none": lambda whole: change(whole, DIRECTORY, 0, 10, 14, 2),
    "LZMA that is damaged": lambda _: bad_lzma(),
    "bzip2 that is none": lambda whole: change(whole, DIRECTORY, 0, 10, 12, 2),
    "deflate that is none": lambda whole: change(whole, DIRECTORY, 0, 10, 8, 2),
    "an offset past the end": lambda whole: change(whole, DIRECTORY, 0, 42, 0xFFFFFFFE, 4),
    "an offset in the middle": lambda whole: change(whole, DIRECTORY, 0, 42, 50, 4),
    "another name before the photo": lambda whole: change(whole, LOCAL, 0, 31, 65, 1),
    "a long name before the photo": lambda whole: change(whole, LOCAL, 0, 26, 2000, 2),
    **{
        f"a claim of 2^{bits} - 1 bytes": lambda _, bits=bits: with_size(
            2**bits - 1, photo_entries(make_rows(["FR"] * 3))
        )
        for bits in (40, 62, 63, 64)
    },
}


@pytest.mark.parametrize("name", BAD_FIRST_ENTRIES)
def test_a_false_entry_is_counted_and_the_run_goes_on(
    name: str, osv_folder: OsvFolder, data_config: MakeConfig, tmp_path: Path
) -> None:
    rows = make_rows(["FR"] * 3)
    write_zip(tmp_path / "whole.zip", photo_entries(rows))
    content = BAD_FIRST_ENTRIES[name]((tmp_path / "whole.zip").read_bytes())
    config = data_config(osv_folder(rows, test_zip=content), limit=9)
    summary = prepare.run(config)
    assert_counts_add_up(summary)
    assert list(summary["test"]["rejected"]) == ["1"]
    assert len(summary["test"]["rejected"]["1"]) < 300
    assert summary["test"]["dropped"]["damaged"] == 1
    assert sorted(ids_of(config.output_dir, "eval_osv")) == ["2", "3"]


# Images


def grey_ramp() -> bytes:
    return save(Image.linear_gradient("L").resize(SIZE).convert("I;16"), "PNG")


def odd_photos() -> dict[str, bytes]:
    """The upright picture of test_images.py in every form, by the entry's name."""
    black = [Image.new("RGB", SIZE)]
    clear = upright().convert("RGBA")
    clear.putpixel((0, 0), (0, 0, 0, 0))
    photos = {f"exif{n}.jpg": with_orientation(n) for n in STORED_AS}
    return photos | {
        "heic.heic": save(upright(), "HEIF"),
        "avif.avif": with_orientation(6, "AVIF"),
        "webp.webp": with_orientation(6, "WEBP"),
        "cmyk.jpg": save(upright().convert("CMYK"), "JPEG", quality=95),
        "palette.png": save(clear.quantize(16), "PNG"),
        "mpo.JPG": save(upright(), "MPO", save_all=True, append_images=black),
        "gif.gif": save(upright(), "GIF", save_all=True, append_images=black),
    }


def test_every_kind_of_photo_is_stored_upright(
    osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    photos = odd_photos()
    rows = make_rows(["FR"] * (len(photos) + 1))
    for row, name in zip(rows, [*photos, "grey.png"], strict=True):
        row["id"] = Path(name).stem
    entries = [(f"00/{name}", content) for name, content in photos.items()]
    root = osv_folder(rows, test_zip=[*entries, ("00/grey.png", grey_ramp())])
    config = data_config(root, limit=99)
    summary = prepare.run(config)
    assert_counts_add_up(summary)
    assert not summary["test"]["rejected"]
    for name in photos:
        stored = (config.output_dir / f"images/test/{Path(name).stem}.jpg").read_bytes()
        image = Image.open(io.BytesIO(stored))
        assert (image.format, image.mode) == ("JPEG", "RGB") and not image.getexif()
        assert_upright(image, tolerance=60)
    assert Image.open(config.output_dir / "images/test/grey.jpg").mode == "RGB"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pictures_of_impossible_sizes_are_counted_and_skipped(
    osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    rows = make_rows(["FR"] * 5)
    sizes = [(20000, 14000), (65536, 65536), (10001, 10001)]
    pictures = [png(*size, depth=1, kind=0) for size in sizes]
    pictures += [save(Image.new("RGB", (2048, 1)), "PNG"), make_jpeg(1)]
    entries = [(f"00/{n}.png", picture) for n, picture in enumerate(pictures, start=1)]
    summary = prepare.run(data_config(osv_folder(rows, test_zip=entries), limit=9))
    assert_counts_add_up(summary)
    assert list(summary["test"]["rejected"]) == list("1234")
    assert all("too large" in summary["test"]["rejected"][one] for one in "123")
    assert "too thin" in summary["test"]["rejected"]["4"]


# Memory


def peak_of_each(process: Any) -> dict[str, int]:
    """Waits for a process; the peak in bytes of itself and of each process that it started."""
    peaks: dict[str, int] = {}
    while process.poll() is None:
        found = [str(process.pid)]
        for pid in found:  # grows while it is read
            try:
                tasks = Path(f"/proc/{pid}/task").glob("*/children")
                found += [child for task in tasks for child in task.read_text().split()]
                text = Path(f"/proc/{pid}/status").read_text(errors="replace")
                status = dict(line.split(":", 1) for line in text.splitlines())
                peak = int(status["VmHWM"].split()[0]) * 1024
            except (OSError, KeyError):  # it has ended
                continue
            peaks[pid] = max(peak, peaks.get(pid, 0))
        time.sleep(0.02)
    return peaks


def webp(width: int, height: int) -> bytes:
    """A lossless WebP of one colour, of any size, in a few bytes."""
    small = bytearray(save(Image.new("RGBA", (16, 16), (1, 2, 3, 4)), "WEBP", lossless=True))
    where = small.index(b"VP8L") + 9
    bits = int.from_bytes(small[where : where + 4], "little") >> 28 << 28
    small[where : where + 4] = (bits | (height - 1) << 14 | width - 1).to_bytes(4, "little")
    return bytes(small)


def clear_png(width: int, height: int) -> bytes:
    """A transparent PNG of any size, made without its pixels."""

    def chunk(tag: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(tag + content))
        return struct.pack(">I", len(content)) + tag + content + checksum

    press, row = zlib.compressobj(1), bytes(1 + 4 * width)
    body = b"".join([*(press.compress(row) for _ in range(height)), press.flush()])
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def false_entries(path: Path, entries: list[tuple[str, int, bytes]]) -> None:
    """Appends entries of (name, compression, compressed bytes) that claim to unpack to 1000."""
    with zipfile.ZipFile(path, "a") as file:
        for name, method, packed in entries:
            info = zipfile.ZipInfo(name)
            file.writestr(info, packed)
            info.compress_type, info.file_size = method, 1000


def zeros_deflated(size: int) -> bytes:
    """Zeros that inflate to a size, made in no time: one flushed piece again and again."""
    press, piece = zlib.compressobj(9, zlib.DEFLATED, -15), 1 << 20
    press.compress(bytes(piece)), press.flush(zlib.Z_FULL_FLUSH)
    again = press.compress(bytes(piece)) + press.flush(zlib.Z_FULL_FLUSH)
    return again * (size // piece) + press.flush()


def zeros_bz2(size: int) -> bytes:
    press, piece = bz2.BZ2Compressor(), bytes(1 << 24)
    return b"".join([*(press.compress(piece) for _ in range(size >> 24)), press.flush()])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_no_entry_of_a_zip_takes_two_gigabytes(
    osv_folder: OsvFolder, start_script: Script, tmp_path: Path
) -> None:
    side = int(MAX_PREPARED_PIXELS**0.5) - 1
    rows = make_rows(["FR"] * 6)
    entries = [
        ("00/1.webp", webp(side, side)),
        ("00/2.png", clear_png(side, side)),
        ("00/3.webp", webp(16383, 16383)),
        ("00/4.jpg", make_jpeg(4)),
    ]
    root = osv_folder(rows, test_zip=entries)
    false = [
        ("00/5.jpg", zipfile.ZIP_DEFLATED, zeros_deflated(5 * 2**29)),
        ("00/6.jpg", zipfile.ZIP_BZIP2, zeros_bz2(9 * 2**27)),
    ]
    false_entries(root / "images/test/00.zip", false)
    process = start_script("prepare_data.py", *flags(root, tmp_path / "data", workers=1))
    peaks = peak_of_each(process)
    out, err = process.communicate()
    assert process.returncode == 0 and "Traceback" not in err, err
    assert max(peaks.values()) < TWO_GB, (peaks, out)
    summary = json.loads((tmp_path / "data/summary.json").read_text())
    assert_counts_add_up(summary)
    assert set(summary["test"]["rejected"]) == {"3", "5", "6"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("files", [AWKWARD_FILES] if AWKWARD_FILES else [])
def test_the_awkward_files_are_stored_or_counted_by_two_workers_within_memory(
    files: list[Path], osv_folder: OsvFolder, start_script: Script, tmp_path: Path
) -> None:
    scenes = 110  # with the files more than `photos.FEW`, so that workers start
    rows = make_rows(["FR"] * (len(files) + scenes))
    for n, row in enumerate(rows):
        row["id"] = f"awkward{n}" if n < len(files) else f"scene{n}"
    photos = [(f"00/awkward{n}{file.suffix}", file.read_bytes()) for n, file in enumerate(files)]
    photos += [(f"00/{row['id']}.jpg", scene(n)) for n, row in enumerate(rows[len(files) :])]
    root = osv_folder(rows, test_zip=photos)
    before = footprint(tmp_path)
    out = tmp_path / "data"
    process = start_script("prepare_data.py", *flags(root, out, limit=999, workers=2))
    peaks = peak_of_each(process)
    printed, err = process.communicate()
    assert process.returncode == 0 and "Traceback" not in err, err
    assert len(peaks) >= 3, "no worker was seen"
    assert sum(peaks.values()) < TWO_GB  # though pages that processes share count more than once
    assert footprint(tmp_path, out) == before
    assert not any(path.is_symlink() for path in out.rglob("*"))

    summary = json.loads((out / "summary.json").read_text())
    assert_counts_add_up(summary)
    names = {f"awkward{n}": file.name for n, file in enumerate(files)}
    rejected = {names.get(one, one): why for one, why in summary["test"]["rejected"].items()}
    assert set(rejected) == {name for name in names.values() if name.startswith(REFUSED)}
    assert all(why.startswith("damaged: ") for why in rejected.values())
    stored = ids_of(out, "eval_osv")
    assert len(stored) == len(rows) - len(rejected) == summary["test"]["rows_selected"]
    for one in stored:
        with Image.open(out / f"images/test/{one}.jpg") as image:
            image.load()
            assert (image.format, image.mode) == ("JPEG", "RGB") and not image.getexif()
            if names.get(one) in ON_THEIR_SIDE:
                assert image.height > image.width
    assert f"eval_osv: {len(stored)} rows" in printed


# Fuzz


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sync", lambda: None)
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Makes a folder for each example, in the depth of a folder that `..` would leave."""
    base = tmp_path_factory.mktemp("fuzz")
    (numbers := itertools.count())
    return (base / "a" / "b" / str(n) for n in numbers)


def footprint(folder: Path, *without: Path) -> dict[str, tuple[int, int]]:
    """Every file under a folder, by size and time of change."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and not any(other in path.parents for other in without)
    }


def assert_prepared_or_refused(config: DataConfig, base: Path) -> dict[str, Any] | None:
    """Prepares a folder; the outcome is whole splits that add up, or one sentence.

    Args:
        config: What to prepare.
        base: A folder around all of it, of which only the output may change.
    """
    out = config.output_dir
    before = footprint(base, out)
    summary = None
    try:
        summary = prepare.run(config)
    except UserError as refused:
        message = str(refused)
        assert "\n" not in message and 0 < len(message) < 1000
    assert footprint(base, out) == before
    assert not list(out.rglob("*.partial")) and not any(p.is_symlink() for p in out.rglob("*"))
    names = {path.stem for path in out.glob("*.parquet")}
    assert summary is None or names == set(summary["splits"])
    shown = set()
    for name in names:
        split = data.load_split(out, name)
        shown |= {photo.path for photo in split.photos}
        for photo in split.photos:
            assert open_upright(photo.path).mode == "RGB"
            assert -90 <= photo.latitude <= 90 and -180 <= photo.longitude <= 180
    if summary is not None:
        assert_counts_add_up(summary)
        assert json.loads((out / "summary.json").read_text()) == summary
        assert {path for path in (out / "images").rglob("*") if path.is_file()} == shown
        verify.run(config)
        data_card.write(out)
    event("refused" if summary is None else "prepared")
    return summary


def small_config(place: Path, **keys: Any) -> DataConfig:
    values: dict[str, Any] = {
        "source": Source(root=place / "osv", train=[0], test=[0]),
        "output_dir": place / "data",
        "image": ImagePolicy(long_edge=128, min_pixels=1024),
        "eval": EvalDraw(size=4, quick=2, rounds=2),
        "train": TrainPool(cap=2),
        "contamination": Contamination(max_hash_bits=None),
        "workers": 1,
    }
    return DataConfig(**{**values, **keys})


def write_folder(place: Path, split: str, table: bytes, archive: bytes) -> None:
    """Writes one split in the OSV-5M layout, and a good one of the other name."""
    for name in ("test", "train"):
        good = make_rows(["MN", "NA"], prefix=name)
        content, photos = table, archive
        if name != split:
            for row in good:  # on other meridians than the fuzzed rows
                row["longitude"] = 99.5 if name == "test" else 77.5
            content, photos = csv_text(good).encode(), zip_bytes(photo_entries(good))
        path = place / "osv" / "images" / name / "00.zip"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photos)
        (place / "osv" / f"{name}.csv").write_bytes(content)


def zip_bytes(entries: list[Any], compressions: tuple[int, ...] = (zipfile.ZIP_STORED,)) -> bytes:
    """A zip of entries, compressed in turn in each of some ways."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for n, (name, content) in enumerate(entries):
            file.writestr(name, content, compressions[n % len(compressions)])
    return out.getvalue()


JPEGS = [make_jpeg(n) for n in range(4)]
IDS = ["1", "2", "3", "0012", "a-B_c", "t1"]
ODD_IDS = ["x y", "d.jpg", "../up", "a/b", "é", "n" * 300, "", "NA", "null", " 1", "1 ", "\u202e1"]
WEIRD = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def mostly(usual: list[str], odd: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """One of the usual cells, and now and then an odd one."""
    return st.integers(0, 11).flatmap(lambda n: odd if n == 0 else st.sampled_from(usual))


LONG = st.sampled_from(["x" * 5000, '"' * 3, "a,b", "line\nbreak", "\r", "\0", "(0, 8)", "='1'"])
CELLS: dict[str, st.SearchStrategy[str]] = {
    "id": mostly(IDS, st.sampled_from(ODD_IDS)),
    "latitude": mostly(
        ["48.5", "-22.5", "0", "", "1e1", " 12.25 ", "-90"],
        st.sampled_from(["91", "nan", "-inf", "1e999", "-0.0", "+5", "0x10"]),
    ),
    "longitude": mostly(["2.25", "0", "", "180", "-180"], st.sampled_from(["181", "nan", "1e-9"])),
    "country": mostly(["NA", "NMB", "", "FR", "de", "XK"], LONG | WEIRD),
    "city": mostly(["", "Windhoek", "Paris"], LONG | WEIRD),
    "sequence": mostly(["", "s1", "s2"], LONG | WEIRD),
}
REST = mostly(["", "7"], LONG | WEIRD)


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """A CSV in OSV-5M's manner, with shuffled or lost columns and damaged bytes."""
    columns = draw(st.permutations(OSV5M_COLUMNS))
    if draw(st.integers(0, 4)) == 0:
        lost = draw(st.sets(st.sampled_from(OSV5M_COLUMNS), max_size=3))
        odd = st.sampled_from(["row", "none", "", "id", "latitude", "sub_region", "creator", "ID"])
        columns = [name for name in columns if name not in lost] + draw(st.lists(odd, max_size=3))
    rows = [
        [draw(CELLS.get(name, REST)) for name in columns] for _ in range(draw(st.integers(0, 7)))
    ]
    quoting = draw(st.sampled_from(["as needed", "as needed", "always", "never"]))

    def cell(text: str) -> str:
        needs = any(char in text for char in ',"\n\r')
        if quoting == "always" or (needs and quoting == "as needed"):
            return '"' + text.replace('"', '""') + '"'
        return text

    end = draw(st.sampled_from(["\n", "\n", "\r\n", "\r"]))
    separator = draw(st.sampled_from([*[","] * 15, ";", "\t"]))
    text = end.join(separator.join(map(cell, row)) for row in [columns, *rows])
    encoding = draw(st.sampled_from([*["utf-8"] * 6, "utf-8-sig", "utf-16", "latin-1"]))
    content = text.encode(encoding, "replace") + draw(st.sampled_from([b"", end.encode()]))
    return damaged(draw, content, 8)


def damaged(draw: st.DrawFn, content: bytes, seldom: int) -> bytes:
    """Flips some bytes, or cuts the end or a piece off, once in a while."""
    kind = draw(st.integers(0, seldom))
    size = len(content)
    if kind > 2 or not size:
        return content
    if kind == 0:
        return content[: draw(st.integers(0, size))]
    if kind == 1:
        start = draw(st.integers(0, size))
        return content[:start] + content[start + draw(st.integers(1, 64)) :]
    changed = bytearray(content)
    for where in draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4)):
        changed[where] = draw(st.integers(0, 255))
    return bytes(changed)


@settings(max_examples=EXAMPLES or 60, deadline=None)
@given(table=tables(), split=st.sampled_from(["test", "train"]))
def test_any_table_is_prepared_and_counted_or_refused(
    places: Iterator[Path], table: bytes, split: str
) -> None:
    place = next(places)
    archive = zip_bytes([(f"00/{one}.jpg", JPEGS[n % 4]) for n, one in enumerate(IDS)])
    write_folder(place, split, table, archive)
    assert_prepared_or_refused(small_config(place), place.parents[2])
    shutil.rmtree(place)


NAMES = [
    "00/{}.jpg", "00/{}.jpg", "00/{}.jpg", "{}.JPG", "00\\{}.jpeg", "a/b/{}.png", "{}.mpo",
    "../{}.jpg", "../../../../{}.jpg", "/{}.jpg", "/tmp/{}.jpg", "C:\\{}.jpg", "\\\\host\\{}.jpg",
    "__MACOSX/00/._{}.jpg", ".DS_Store", "{}.txt", "{}.jpg ", "{}.jpg.", "{}.jpg/", "{}", "",
    "00/{}.jpg\0.txt", "é/{}.jpg", "\u202e{}.jpg", "00/é{}.jpg", "00/nnn{}" + "n" * 300 + ".jpg",
    "./{}.jpg", "//{}.jpg", "{}.jpg/{}.jpg", "con/{}.jpg", "~/{}.jpg", "$HOME/{}.jpg", "-{}.jpg",
]  # fmt: skip
NESTED = zip_bytes([("00/1.jpg", JPEGS[0])])
CONTENTS = [
    *JPEGS, *JPEGS, JPEGS[0][:-200], JPEGS[1][:40], b"", b"text", NESTED, make_jpeg(0, (900, 8)),
    save(upright(), "PNG"), save(upright(), "GIF"), save(upright(), "WEBP"), with_orientation(6),
    png(65536, 65536, depth=1, kind=0), JPEGS[2] + b"tail", scene(1),
]  # fmt: skip
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
DIRECTORY_FIELDS = {  # offset -> bytes
    6: 2, 8: 2, 10: 2, 16: 4, 20: 4, 24: 4, 28: 2, 30: 2, 32: 2, 34: 2, 38: 4, 42: 4, 46: 1,
}  # fmt: skip
LOCAL_FIELDS = {4: 2, 6: 2, 8: 2, 14: 4, 18: 4, 22: 4, 26: 2, 28: 2, 30: 1}
VALUES = st.sampled_from([0, 1, 8, 9, 12, 14, 0x41, 0x800, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFFFE])


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """A zip with odd names, odd contents and false records."""
    entries = []
    for n, one in enumerate(IDS):
        for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 2]))):
            name = "00/{}.jpg" if draw(st.booleans()) else draw(st.sampled_from(NAMES))
            content = draw(st.sampled_from(CONTENTS))
            if content and draw(st.integers(0, 5)) == 0:
                content = damaged(draw, content, 2)
            info = zipfile.ZipInfo(name.replace("{}", one) or "x")
            info.filename = name.replace("{}", one) or "x"  # past a zero byte as well
            if draw(st.integers(0, 7)) == 0:
                numbers = draw(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3))
                body = b"".join(struct.pack("<Q", number) for number in numbers)
                info.extra = struct.pack("<HH", 1, len(body)) + body
            info.compress_type = draw(st.sampled_from([0, 0, *METHODS]))
            entries.append((info, content, n))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for info, content, _ in entries:
            file.writestr(info, content)
    whole = out.getvalue()
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 5]))):
        record, fields = draw(
            st.sampled_from([(DIRECTORY, DIRECTORY_FIELDS), (LOCAL, LOCAL_FIELDS)])
        )
        offset = draw(st.sampled_from(sorted(fields)))
        value = draw(VALUES | st.integers(0, 2**32 - 1))
        whole = change(whole, record, draw(st.integers(0, 6)), offset, value, fields[offset])
    return damaged(draw, whole, 6)


@pytest.mark.filterwarnings("ignore:Duplicate name", "ignore::PIL.Image.DecompressionBombWarning")
@settings(max_examples=EXAMPLES or 60, deadline=None)
@given(archive=archives(), split=st.sampled_from(["test", "train"]))
def test_any_zip_is_prepared_and_counted_or_refused(
    places: Iterator[Path], archive: bytes, split: str
) -> None:
    place = next(places)
    rows = make_rows(["NA", "FR", "DE"] * 2)
    for row, one in zip(rows, IDS, strict=True):
        row["id"] = one
    write_folder(place, split, csv_text(rows).encode(), archive)
    summary = assert_prepared_or_refused(small_config(place), place.parents[2])
    if summary is not None:
        assert summary[split]["csv_rows"] == len(IDS)
    shutil.rmtree(place)


def some(usual: list[Any], odd: list[Any]) -> st.SearchStrategy[list[Any]]:
    """Three cells of a column: nearly always usual ones, else all odd."""
    cells = st.lists(st.sampled_from([*usual, None]), min_size=3, max_size=3)
    return st.integers(0, 7).flatmap(
        lambda n: st.sampled_from(odd).map(lambda one: [one] * 3) if n == 0 else cells
    )


NUMBERS = some([1.5, 48.0, 90.0, -91.0, float("nan"), 0.0], [True, b"1", [1.0], {"a": 1.0}])
TEXTS = some(["1.5", "north", "", "-181", "179.9"], [True, b"1", [1.0], None])
COUNTRIES = some(["NA", "FR", "", "NMB", "France"], [1, b"FR", ["FR"], {"a": "FR"}, 1.5, None])
PICTURES = [*CONTENTS, b"\0" * 100]
BYTES = some(PICTURES, ["text", 1, [1], 1.5, {"path": "x"}, {"bytes": "text"}, {"bytes": None}])
STRUCTS = some(
    [{"bytes": one, "path": "/etc/passwd"} for one in PICTURES], [{"bytes": 1}, {"path": 1}]
)


@st.composite
def panoramas(draw: st.DrawFn) -> bytes:
    """A parquet file in the pano set's manner."""
    columns = {
        "latitude": draw(NUMBERS | TEXTS),
        "longitude": draw(NUMBERS | TEXTS),
        "country_iso_alpha2": draw(COUNTRIES),
        "image": draw(STRUCTS | BYTES),
        "address": ["Secret street"] * 3,
    }
    if draw(st.integers(0, 9)) == 0:
        columns.pop(draw(st.sampled_from(sorted(columns))))
    frame = pl.DataFrame(columns, strict=False).head(draw(st.sampled_from([0, 1, 3, 3, 3, 3])))
    out = io.BytesIO()
    frame.write_parquet(
        out,
        compression=draw(st.sampled_from(["zstd", "uncompressed", "snappy"])),
        row_group_size=draw(st.sampled_from([1, 2, 9])),
    )
    return damaged(draw, out.getvalue(), 5)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@settings(max_examples=EXAMPLES or 60, deadline=None)
@given(files=st.lists(panoramas(), min_size=1, max_size=2), view=st.sampled_from(["crop", "quad"]))
def test_any_pano_set_is_prepared_and_counted_or_refused(
    places: Iterator[Path], files: list[bytes], view: str
) -> None:
    place = next(places)
    rows = make_rows(["FR"])
    write_folder(place, "test", csv_text(rows).encode(), zip_bytes(photo_entries(rows)))
    (place / "pano").mkdir()
    for n, content in enumerate(files):
        (place / "pano" / f"{n}.parquet").write_bytes(content)
    config = small_config(place, pano=Pano(root=place / "pano", size=3, view=view))
    assert_prepared_or_refused(config, place.parents[2])
    for path in config.output_dir.rglob("*"):
        assert not path.is_file() or b"Secret" not in path.read_bytes()
    shutil.rmtree(place)


def test_one_wrong_byte_in_a_pano_file_is_no_panic(tmp_path: Path) -> None:
    """Polars panics on some, which is no Exception."""
    place = {"latitude": [1.0, 2.0, 3.0], "longitude": [1.0, 2.0, 3.0]}
    frame = pl.DataFrame({"image": [b"x" * 50] * 3, **place, "country_iso_alpha2": ["FR"] * 3})
    path = tmp_path / "a.parquet"
    frame.write_parquet(path, compression="uncompressed")
    whole = path.read_bytes()
    for where in range(330, 380):
        for value in (0, 0x7E, 0xFF):
            path.write_bytes(whole[:where] + bytes([value]) + whole[where + 1 :])
            try:
                sources.read_pano([path])
            except UserError as refused:
                assert "\n" not in str(refused)
