"""OSV-5M and the pano set as they come: locate, list, join by id, and read one photo's bytes.

Only CSV columns, zip directories and parquet labels are read here, so that rows can be chosen
before a photo is touched. Every row that is left out is counted under a reason. Nothing is ever
unpacked to a path that an archive names.
"""

import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Literal

import polars as pl

from geoguessr_rl import hub
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import Pano, Source
from geoguessr_rl.countries import label_iso2
from geoguessr_rl.images import SUFFIXES, BadImageError
from geoguessr_rl.records import PHOTO_SCHEMA

REQUIRED_COLUMNS = ("id", "latitude", "longitude", "country")
CSV_COLUMNS = {  # OSV-5M's name -> ours
    "region": "region",
    "sub-region": "sub_region",
    "city": "city",
    "sequence": "sequence",
    "creator_username": "creator",
}
PART_OF = re.compile(r"-\d{5}-of-(\d{5})\.parquet$")
SAFE_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")  # a file name's length, with room for suffixes
FLOAT_ID = r"^\d+(\.\d*|(\.\d+)?[eE][+-]?\d+)$"
COORDINATES = ("latitude", "longitude")
PANO_COLUMNS = ("latitude", "longitude", "country_iso_alpha2")

MAX_PHOTO_BYTES = 100_000_000
"""A larger zip entry is not read at all: a few megabytes of zip can unpack to any size."""

# What zipfile raises on damaged archives and entries.
ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, NotImplementedError,
    RuntimeError, ValueError, LookupError,
)  # fmt: skip

# What polars raises on damaged tables; the panic is no Exception.
TABLE_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)

MEMBER_SCHEMA = {
    "id": pl.String(),
    "archive": pl.String(),  # the zip's or parquet's path
    "entry": pl.String(),  # the name in the zip, or the row's number in the parquet
    "offset": pl.Int64(),  # where it lies there: reading in this order does not jump
    "size": pl.Int64(),  # bytes when unpacked; 0 where unknown
    "version": pl.String(),  # changes with the photo's bytes
}


@dataclass(frozen=True)
class Labels:
    """The usable rows of a table, and why the others are not.

    Attributes:
        rows: Columns of `PHOTO_SCHEMA` less `image_path`, and of `MEMBER_SCHEMA`; sorted by id.
        total: Rows in the file.
        dropped: Rows by reason; `rows.height + sum(dropped.values()) == total`.
        repaired: Labels that were mended, by what was mended.
    """

    rows: pl.DataFrame
    total: int
    dropped: dict[str, int]
    repaired: dict[str, int]


def osv5m_names(source: Source, split: Literal["train", "test"]) -> list[str]:
    """Returns the names of the CSV and the zips of one OSV-5M split, in the dataset's layout."""
    wanted = source.train if split == "train" else source.test
    return [f"{split}.csv", *(f"images/{split}/{number:02d}.zip" for number in wanted)]


def locate(source: Source, split: Literal["train", "test"]) -> tuple[Path, list[Path]]:
    """Returns the CSV and the zips of one OSV-5M split, downloaded when `source.root` is not set.

    Raises:
        UserError: A file is missing, or cannot be downloaded.
    """
    names = osv5m_names(source, split)
    if source.root is None:
        table, *archives = hub.download(source.repo, source.revision, names)
        return table, archives
    table, *archives = [source.root / name for name in names]
    for path in [table, *archives]:
        if not path.is_file():
            raise UserError(f"{path} does not exist; check source.root and source.{split}")
    return table, archives


def locate_pano(pano: Pano) -> list[Path]:
    """Returns the parquet files of the pano set, downloaded when `pano.root` is not set.

    Raises:
        UserError: There are none, or not all of them, or they cannot be downloaded.
    """
    if pano.root is None:
        files = hub.download(pano.repo, pano.revision, pano_names(pano))
    else:
        files = sorted(pano.root.rglob("*.parquet"))
    where = pano.root or pano.repo
    if not files:
        raise UserError(f"{where} holds no parquet files; check pano.root")
    if (of := PART_OF.search(files[0].name)) and int(of[1]) != len(files):
        raise UserError(f"{where} holds {len(files)} of {int(of[1])} parquet files; download again")
    return files


def pano_names(pano: Pano) -> list[str]:
    """Returns the names of the pano set's files on the Hub."""
    return hub.list_files(pano.repo, pano.revision, ".parquet")


def fetch(source: Source, pano: Pano | None, splits: Sequence[Literal["train", "test"]]) -> None:
    """Downloads whatever of a run's files comes from the Hub and is not in its cache.

    The space for all of them is checked before the first byte.

    Args:
        source: Where OSV-5M comes from.
        pano: Where the pano set comes from; None when it is not wanted.
        splits: The splits of OSV-5M that are wanted.

    Raises:
        UserError: See `hub.download`.
    """
    wanted: list[tuple[str, str, list[str]]] = []
    if source.root is None:
        names = [name for split in splits for name in osv5m_names(source, split)]
        wanted.append((source.repo, source.revision, names))
    if pano is not None and pano.root is None:
        wanted.append((pano.repo, pano.revision, pano_names(pano)))
    needed = sum(hub.missing_bytes(*files) for files in wanted)
    hub.require_space(hub.cache_folder(), needed, "the dataset's files")
    for files in wanted:
        hub.download(*files)


def list_members(archives: Sequence[Path]) -> tuple[pl.DataFrame, dict[str, int]]:
    """Lists the photos in zips.

    Args:
        archives: Zip files; the first that holds an id wins.

    Returns:
        A row a photo (`MEMBER_SCHEMA`; the id is the stem of the entry's basename), and entries
        left out by reason.

    Raises:
        UserError: A file is not a whole zip.
    """
    rows: list[tuple[str, str, str, int, int, str]] = []
    seen: set[str] = set()
    ignored: Counter[str] = Counter()
    for archive in archives:
        length = archive.stat().st_size
        try:
            with zipfile.ZipFile(archive) as file:
                entries = [info for info in file.infolist() if not info.is_dir()]
            if any(info.header_offset < 0 for info in entries):
                raise zipfile.BadZipFile("a piece is missing before the directory")
        except ZIP_ERRORS:
            raise UserError(
                f"{archive} ({length} bytes) is not a whole zip; download again"
            ) from None
        for info in sorted(entries, key=lambda info: info.filename):
            path = PurePosixPath(info.filename.replace("\\", "/"))
            if "__MACOSX" in path.parts or path.name.startswith("."):
                ignored["junk_entry"] += 1
            elif path.suffix.lower() not in SUFFIXES or not SAFE_ID.fullmatch(path.stem):
                ignored["not_a_photo_entry"] += 1
            elif path.stem in seen:
                ignored["duplicate_entry"] += 1
            else:
                seen.add(path.stem)
                version = f"{info.CRC:08x}-{info.file_size}"
                # A directory can claim any number; what is not read takes no room.
                size = info.file_size if info.file_size <= MAX_PHOTO_BYTES else 0
                place = (info.filename, min(info.header_offset, length), size)
                rows.append((path.stem, str(archive), *place, version))
    return pl.DataFrame(rows, schema=MEMBER_SCHEMA, orient="row"), dict(ignored)


def _reason(error: BaseException) -> str:
    """Returns the beginning of an error's first line, which may quote what a file holds."""
    return str(error).partition("\n")[0][:200]


def _number(column: str) -> pl.Expr:
    """Returns a text column as numbers, null where it is none."""
    return pl.col(column).str.strip_chars().cast(pl.Float64, strict=False)


def _is_no_number(column: str) -> pl.Expr:
    """Whether a cell holds text that is no number; an empty one does not."""
    return _number(column).is_null() & (pl.col(column).str.strip_chars() != "")


def _join(path: Path, members: pl.DataFrame) -> tuple[pl.DataFrame, int, int]:
    """Reads the CSV rows whose id is at hand, all as text, in the file's order.

    The rest of a table of gigabytes only passes through: it is counted and never held.

    Returns:
        The rows with their line number as `row`, the rows in the file, and those without an id.
    """
    needed = [*REQUIRED_COLUMNS, *CSV_COLUMNS]
    try:
        lazy = pl.scan_csv(path, infer_schema=False, glob=False)
        found = lazy.collect_schema().names()
        missing = [name for name in REQUIRED_COLUMNS if name not in found]
        if missing:
            raise UserError(
                f"{path} has no column {missing[0]!r}; its first line is "
                + " ".join(",".join(found).split())[:200]
            )
        # Numbered after the choice, since the file may have a column of any name.
        lazy = lazy.select(name for name in needed if name in found).with_row_index("row", 2)
        # Refused anywhere in the file, since they tell of columns that shifted or digits lost.
        wrong = {
            "id": (pl.col("id").str.contains(FLOAT_ID), "is a float; ids must be text"),
            **{name: (_is_no_number(name), "is not a number") for name in COORDINATES},
        }
        counts = lazy.select(
            pl.len().alias("row"),
            pl.col("id").is_null().sum().alias("none"),
            *(condition.sum().alias(name) for name, (condition, _) in wrong.items()),
        )
        total, without_id, *found_wrong = counts.collect().row(0)
        for count, (name, (condition, why)) in zip(found_wrong, wrong.items(), strict=True):
            if count:
                row, cell = lazy.filter(condition).select("row", name).head(1).collect().row(0)
                raise UserError(f"{path}, row {row}, column {name!r}: {cell[:100]!r} {why}")
        frame = lazy.join(members.lazy().select("id"), on="id", how="semi").collect()
    except pl.exceptions.NoDataError:
        raise UserError(f"{path} is empty: no column 'id' was found; download again") from None
    except TABLE_ERRORS as error:
        raise UserError(
            f"{path} is no well-formed UTF-8 CSV ({_reason(error)}); download again"
        ) from None
    absent = [pl.lit(None, dtype=pl.String).alias(name) for name in needed if name not in found]
    return frame.sort("row").with_columns(absent), total, without_id


def _usable(
    frame: pl.DataFrame, total: int, dropped: dict[str, int], members: pl.DataFrame
) -> Labels:
    """Keeps the rows with a place and a country, joined with their photo, and counts the others.

    Args:
        frame: Columns of `PHOTO_SCHEMA` less `image_path` and `country_iso2`, plus `id`, `country`.
        total: Rows that the table held.
        dropped: What was left out before.
        members: The photos at hand.
    """

    def keep(reason: str, condition: pl.Expr) -> None:
        nonlocal frame
        kept = frame.filter(condition.fill_null(False))
        dropped[reason] = frame.height - kept.height
        frame = kept

    keep("duplicate_id", pl.col("id").is_first_distinct())
    in_range = pl.col("latitude").is_between(-90, 90) & pl.col("longitude").is_between(-180, 180)
    keep("bad_coordinates", in_range)
    keep("null_island", (pl.col("latitude") != 0) | (pl.col("longitude") != 0))
    raw = frame["country"]
    codes = [label_iso2(*pair) for pair in zip(raw, frame["city"], strict=True)]
    mended = sum(code == "NA" != label for code, label in zip(codes, raw, strict=True))
    frame = frame.with_columns(pl.Series("country_iso2", codes, dtype=pl.String))
    keep("no_country", pl.col("country_iso2").is_not_null())
    columns = ["id", *list(PHOTO_SCHEMA)[1:], *list(MEMBER_SCHEMA)[1:]]
    rows = frame.join(members, on="id", how="inner").select(columns).sort("id")
    return Labels(rows, total, dropped, {"namibia": mended})


def read_labels(path: Path, members: pl.DataFrame) -> Labels:
    """Reads the rows of a CSV that have a photo, and counts the others by reason.

    Args:
        path: `train.csv` or `test.csv`.
        members: The photos at hand, `MEMBER_SCHEMA`.

    Raises:
        UserError: The file is not such a CSV, an id was written as a float, or a coordinate is
            text.
    """
    frame, total, without_id = _join(path, members)
    frame = frame.with_columns(_number(name) for name in COORDINATES)
    dropped = {"no_id": without_id, "no_photo": total - without_id - frame.height}
    return _usable(frame.rename(CSV_COLUMNS), total, dropped, members)


def _check_pano(file: Path, schema: Mapping[str, pl.DataType]) -> None:
    """Raises UserError when a column holds what cannot be a number, a code or a picture."""
    for name in COORDINATES:
        if not (schema[name].is_numeric() or schema[name] in (pl.String, pl.Null)):
            raise UserError(f"{file}, column {name!r} holds {schema[name]}, not numbers or text")
    country, image = schema["country_iso_alpha2"], schema["image"]
    if country not in (pl.String, pl.Categorical, pl.Null):
        raise UserError(f"{file}, column 'country_iso_alpha2' holds {country}, not text")
    picture = dict(image).get("bytes") if isinstance(image, pl.Struct) else image
    if picture not in (pl.Binary, pl.Null):
        raise UserError(f"{file}, column 'image' holds {image}, not the bytes of pictures")


def read_pano(files: Sequence[Path]) -> Labels:
    """Reads the labels of the pano set; a photo's id is its row's number.

    The column `address`, which holds the answer, is never read, and neither is a picture's own
    name.

    Raises:
        UserError: A file is no such parquet.
    """
    frames = []
    for file in files:
        try:
            schema = pl.read_parquet_schema(file)
            missing = [name for name in (*PANO_COLUMNS, "image") if name not in schema]
            if missing:
                raise UserError(f"{file} has no column {missing[0]!r}; it holds {[*schema]}")
            _check_pano(file, schema)
            frame = pl.scan_parquet(file, glob=False).select(PANO_COLUMNS).collect()
        except TABLE_ERRORS as error:
            raise UserError(
                f"{file} is no whole parquet file ({_reason(error)}); download again"
            ) from None
        frames.append(
            frame.with_row_index("offset").select(
                pl.col("latitude", "longitude").cast(pl.Float64, strict=False),
                pl.col("country_iso_alpha2").cast(pl.String).alias("country"),
                pl.col("offset").cast(pl.Int64),
                pl.lit(str(file)).alias("archive"),
                pl.lit(f"{file.name}-{file.stat().st_size}").alias("version"),
            )
        )
    absent = [pl.lit(None, dtype=pl.String).alias(name) for name in CSV_COLUMNS.values()]
    number = pl.int_range(pl.len()).cast(pl.String).str.zfill(6)
    frame = pl.concat(frames).with_columns(
        *absent,
        (pl.lit("pano") + number).alias("id"),
        pl.col("offset").cast(pl.String).alias("entry"),
        pl.lit(0, dtype=pl.Int64).alias("size"),
    )
    members = frame.select(pl.col(name).cast(kind) for name, kind in MEMBER_SCHEMA.items())
    return _usable(frame.drop(list(MEMBER_SCHEMA)[1:]), frame.height, {}, members)


@lru_cache(maxsize=2)
def _open_zip(archive: str, changed_ns: int) -> zipfile.ZipFile:
    """Opens a zip once: the directory of one with 50,000 photos takes half a second to read."""
    return zipfile.ZipFile(archive)


def read_photo(archive: str, entry: str) -> bytes:
    """Reads one photo's bytes out of its zip or parquet file.

    Raises:
        BadImageError: The entry is damaged, or larger than `MAX_PHOTO_BYTES`.
    """
    if archive.endswith(".parquet"):
        try:
            lazy = pl.scan_parquet(archive, glob=False).slice(int(entry), 1).select("image")
            column = lazy.collect()["image"]
        except TABLE_ERRORS as error:
            raise BadImageError(f"damaged parquet row: {_reason(error)}") from None
        picture = column.struct.field("bytes") if isinstance(column.dtype, pl.Struct) else column
        return picture[0] or b""
    try:
        file = _open_zip(archive, Path(archive).stat().st_mtime_ns)
        info = file.getinfo(entry)
        if info.file_size > MAX_PHOTO_BYTES:
            raise BadImageError("too large a zip entry")
        # bzip2 and LZMA unpack a block whole, whatever size the entry claims.
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadImageError(f"zip compression {info.compress_type}")
        with file.open(info) as stream:
            return stream.read(info.file_size)  # an entry can unpack to more than it claims
    except ZIP_ERRORS as error:
        raise BadImageError(f"damaged zip entry: {_reason(error)}") from None
