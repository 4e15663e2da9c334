"""OSV-5M as tables: locate, check, join, draw, cap, and keep train away from evaluation.

Selection works on CSV rows and zip directories alone, so that only the chosen photos are ever
decoded. Every row that is left out is counted under a reason. Reading and writing the chosen
photos is `phases/prepare.py`'s work; the splits that it writes are read back here.
"""

import random
import re
import struct
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import polars as pl
from scipy.spatial import cKDTree

from geoguessr_rl.artifacts import UserError, fingerprint, read_json, seed_for
from geoguessr_rl.config import Source
from geoguessr_rl.countries import label_iso2
from geoguessr_rl.images import SUFFIXES
from geoguessr_rl.prompt import PromptStyle, build_messages
from geoguessr_rl.records import OPTIONAL_COLUMNS, PHOTO_SCHEMA, Photo
from geoguessr_rl.reward import EARTH_RADIUS_KM

Role = Literal["train", "evaluation"]

REQUIRED_COLUMNS = ("id", "latitude", "longitude", "country")
CSV_COLUMNS = {  # OSV-5M's name -> ours
    "region": "region",
    "sub-region": "sub_region",
    "city": "city",
    "sequence": "sequence",
    "creator_username": "creator",
}
SAFE_ID = re.compile(r"[A-Za-z0-9_-]+")
FLOAT_ID = r"^\d+(\.\d*|(\.\d+)?[eE][+-]?\d+)$"
# What zipfile raises on damaged archives and entries.
ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, NotImplementedError,
    RuntimeError, ValueError, LookupError,
)  # fmt: skip
MANIFEST_KEYS = {"split", "role", "source", "rows", "image", "fingerprint", "photos"}
PREPARE_REMEDY = "run scripts/prepare_data.py first"


@dataclass(frozen=True)
class Member:
    """One photo inside a zip."""

    archive: Path
    name: str


@dataclass(frozen=True)
class Labels:
    """The usable rows of a CSV, and why the others are not.

    Attributes:
        rows: Columns of `PHOTO_SCHEMA` less `image_path`, plus `id`; sorted by id.
        total: Rows in the file.
        dropped: Rows by reason; `rows.height + sum(dropped.values()) == total`.
        repaired: Labels that were mended, by what was mended.
    """

    rows: pl.DataFrame
    total: int
    dropped: dict[str, int]
    repaired: dict[str, int]


@dataclass(frozen=True)
class Split:
    """A prepared split, as every later phase reads it."""

    name: str
    role: Role
    photos: list[Photo]
    fingerprint: str
    image_policy: dict[str, Any]
    country_share: dict[str, float]


def locate(source: Source, split: Literal["train", "test"]) -> tuple[Path, list[Path]]:
    """Returns the CSV and the zips of one OSV-5M split.

    Raises:
        UserError: `source.root` is not set, or a file is missing there.
    """
    if source.root is None:
        raise UserError(
            "source.root is not set; give the folder that holds OSV-5M's test.csv and images/ "
            "with --source or in configs/data.yaml"
        )
    wanted = source.train if split == "train" else source.test
    table = source.root / f"{split}.csv"
    archives = [source.root / "images" / split / f"{number:02d}.zip" for number in wanted]
    for path in [table, *archives]:
        if not path.is_file():
            raise UserError(f"{path} does not exist; check source.root and source.{split}")
    return table, archives


def list_members(archives: Sequence[Path]) -> tuple[dict[str, Member], dict[str, int]]:
    """Maps each photo's id to its place in the zips.

    Args:
        archives: Zip files; the first that holds an id wins.

    Returns:
        The members by id (the stem of the entry's basename), and entries left out by reason.

    Raises:
        UserError: A file is not a whole zip.
    """
    members: dict[str, Member] = {}
    ignored: Counter[str] = Counter()
    for archive in archives:
        try:
            with zipfile.ZipFile(archive) as file:
                entries = [info for info in file.infolist() if not info.is_dir()]
            if any(info.header_offset < 0 for info in entries):
                raise zipfile.BadZipFile("a piece is missing before the directory")
        except ZIP_ERRORS:
            raise UserError(
                f"{archive} ({archive.stat().st_size} bytes) is not a whole zip; download again"
            ) from None
        for info in sorted(entries, key=lambda info: info.filename):
            path = PurePosixPath(info.filename.replace("\\", "/"))
            if "__MACOSX" in path.parts or path.name.startswith("."):
                ignored["junk_entry"] += 1
            elif path.suffix.lower() not in SUFFIXES or not SAFE_ID.fullmatch(path.stem):
                ignored["not_a_photo_entry"] += 1
            elif path.stem in members:
                ignored["duplicate_entry"] += 1
            else:
                members[path.stem] = Member(archive, info.filename)
    return members, dict(ignored)


def _read_text_columns(path: Path) -> pl.DataFrame:
    """Reads the needed columns of a CSV by name, all as text."""
    needed = [*REQUIRED_COLUMNS, *CSV_COLUMNS]
    try:
        lazy = pl.scan_csv(path, infer_schema=False)
        found = lazy.collect_schema().names()
        missing = [name for name in REQUIRED_COLUMNS if name not in found]
        if missing:
            raise UserError(
                f"{path} has no column {missing[0]!r}; its first line is {','.join(found)[:200]}"
            )
        frame = lazy.select(name for name in needed if name in found).collect()
    except pl.exceptions.NoDataError:
        raise UserError(f"{path} is empty: no column 'id' was found; download again") from None
    except pl.exceptions.ComputeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is no well-formed UTF-8 CSV ({reason}); download again") from None
    return frame.with_columns(
        pl.lit(None, dtype=pl.String).alias(name) for name in needed if name not in found
    )


def _refuse_rows(path: Path, frame: pl.DataFrame, column: str, bad: pl.Expr, why: str) -> None:
    """Raises UserError that names file, row and column of the first bad cell."""
    rows = frame.with_row_index("row", offset=2).filter(bad)
    if rows.height:
        first = rows.row(0, named=True)
        raise UserError(f"{path}, row {first['row']}, column {column!r}: {first[column]!r} {why}")


def read_labels(path: Path, ids: Collection[str]) -> Labels:
    """Reads the rows of a CSV that have a photo, and counts the others by reason.

    Args:
        path: `train.csv` or `test.csv`.
        ids: Ids of the photos at hand.

    Raises:
        UserError: The file is not such a CSV, an id was written as a float, or a coordinate is
            text.
    """
    frame = _read_text_columns(path)
    total = frame.height
    _refuse_rows(
        path, frame, "id", pl.col("id").str.contains(FLOAT_ID), "is a float; ids must be text"
    )
    for column in ("latitude", "longitude"):
        number = pl.col(column).str.strip_chars().cast(pl.Float64, strict=False)
        text = number.is_null() & (pl.col(column).str.strip_chars() != "")
        _refuse_rows(path, frame, column, text, "is not a number")
        frame = frame.with_columns(number)

    dropped: dict[str, int] = {}

    def keep(reason: str, condition: pl.Expr) -> None:
        nonlocal frame
        kept = frame.filter(condition.fill_null(False))
        dropped[reason] = frame.height - kept.height
        frame = kept

    keep("no_id", pl.col("id").is_not_null())
    keep("no_photo", pl.col("id").is_in(list(ids)))
    keep("duplicate_id", pl.col("id").is_first_distinct())
    in_range = pl.col("latitude").is_between(-90, 90) & pl.col("longitude").is_between(-180, 180)
    keep("bad_coordinates", in_range)
    keep("null_island", (pl.col("latitude") != 0) | (pl.col("longitude") != 0))
    raw = frame["country"]
    codes = [label_iso2(*pair) for pair in zip(raw, frame["city"], strict=True)]
    mended = sum(code == "NA" != label for code, label in zip(codes, raw, strict=True))
    frame = frame.with_columns(pl.Series("country_iso2", codes, dtype=pl.String))
    keep("no_country", pl.col("country_iso2").is_not_null())
    rows = frame.rename(CSV_COLUMNS).select("id", *list(PHOTO_SCHEMA)[1:]).sort("id")
    return Labels(rows, total, dropped, {"namibia": mended})


def _by_country(rows: pl.DataFrame, seed: int) -> dict[str, list[str]]:
    """Returns each country's ids in a seeded order that other countries do not influence."""
    groups: dict[str, list[str]] = defaultdict(list)
    for identifier, country in rows.select("id", "country_iso2").sort("id").iter_rows():
        groups[country].append(identifier)
    for country, ids in groups.items():
        random.Random(seed_for(seed, country)).shuffle(ids)
    return dict(sorted(groups.items()))


def draw_rounds(
    rows: pl.DataFrame, *, size: int, rounds: int, seed: int
) -> tuple[list[str], dict[str, list[str]]]:
    """Draws evaluation ids round by round: one of every country a round, in a seeded order.

    Args:
        rows: Candidates with `id` and `country_iso2`.
        size: Ids wanted.
        rounds: Rounds at most; what is then missing is drawn at random.
        seed: Decides every order.

    Returns:
        The drawn ids, shuffled so that any prefix is a fair sample, and each country's ids that
        were not drawn, in the order in which they stand in for a photo that turns out damaged.
    """
    groups = _by_country(rows, seed)
    rng = random.Random(seed)
    drawn: list[str] = []
    for number in range(rounds):
        for country in rng.sample(list(groups), len(groups)):
            if number < len(groups[country]) and len(drawn) < size:
                drawn.append(groups[country][number])
    taken = set(drawn)
    rest = [identifier for ids in groups.values() for identifier in ids if identifier not in taken]
    drawn += rng.sample(rest, min(max(size - len(drawn), 0), len(rest)))
    taken = set(drawn)
    rng.shuffle(drawn)
    return drawn, {
        country: [identifier for identifier in ids if identifier not in taken]
        for country, ids in groups.items()
    }


def draw_capped(
    rows: pl.DataFrame, *, cap: int, seed: int
) -> tuple[list[str], dict[str, list[str]]]:
    """Draws at most `cap` ids a country; returns them shuffled, and each country's spares."""
    groups = _by_country(rows, seed)
    drawn = [identifier for ids in groups.values() for identifier in ids[:cap]]
    random.Random(seed).shuffle(drawn)
    return drawn, {country: ids[cap:] for country, ids in groups.items()}


def unit_vectors(latitude: np.ndarray, longitude: np.ndarray) -> np.ndarray:
    """Returns points on the unit sphere, shape (n, 3), from decimal degrees, shape (n,)."""
    lat, lon = np.radians(latitude), np.radians(longitude)
    return np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)


def keep_apart(
    train: pl.DataFrame, evaluation: pl.DataFrame, *, min_km: float
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Drops train rows that share a photo, a sequence or a place with an evaluation row.

    Args:
        train: Candidates with `id`, `sequence`, `latitude`, `longitude`.
        evaluation: The same columns.
        min_km: Great-circle distance up to which two photos count as one place.

    Returns:
        The train rows that remain, and the dropped ones by reason. A null or empty sequence
        matches nothing.
    """
    sequences = evaluation["sequence"].drop_nulls()
    sequences = sequences.filter(sequences.str.strip_chars() != "")
    near = np.zeros(train.height, dtype=bool)
    if train.height and evaluation.height:
        chord = 2 * np.sin(min(min_km / EARTH_RADIUS_KM, np.pi) / 2)
        points = [
            unit_vectors(frame["latitude"].to_numpy(), frame["longitude"].to_numpy())
            for frame in (evaluation, train)
        ]
        distance, _ = cKDTree(points[0]).query(points[1], distance_upper_bound=chord * (1 + 1e-12))
        near = np.isfinite(distance)
    reason = (
        pl.when(pl.col("id").is_in(evaluation["id"].implode()))
        .then(pl.lit("same_photo"))
        .when(pl.col("sequence").is_in(sequences.implode()))
        .then(pl.lit("same_sequence"))
        .when(pl.Series("near", near))
        .then(pl.lit("within_min_km"))
    )
    marked = train.with_columns(reason.alias("reason"))
    counts = Counter(marked["reason"].drop_nulls().to_list())
    dropped = {name: counts[name] for name in ("same_photo", "same_sequence", "within_min_km")}
    return marked.filter(pl.col("reason").is_null()).drop("reason"), dropped


def manifest_path(data_dir: Path, split: str) -> Path:
    """Returns where a split's manifest stands."""
    return data_dir / f"{split}.manifest.json"


def build_manifest(
    split: str,
    role: Role,
    frame: pl.DataFrame,
    sha256: Mapping[str, str],
    *,
    image_policy: Mapping[str, Any],
    source: str,
    country_share: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Returns what a split is: ids with the hashes of their bytes, its role and fingerprint."""
    rows = [
        {
            "id": Path(row["image_path"]).stem,
            "latitude": row["latitude"],
            "longitude": row["longitude"],
            "country_iso2": row["country_iso2"],
            "sha256": sha256[Path(row["image_path"]).stem],
        }
        for row in frame.iter_rows(named=True)
    ]
    identity = fingerprint(rows)  # in the split's order, which decides blocks and training
    rows.sort(key=lambda row: row["id"])
    return {
        "split": split,
        "role": role,
        "source": source,
        "rows": len(rows),
        "image": dict(image_policy),
        "country_share": dict(country_share or {}),
        "fingerprint": identity,
        "photos": rows,
    }


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads a manifest; raises UserError when it is missing, damaged or of an older version."""
    manifest = read_json(path, remedy=PREPARE_REMEDY)
    if not isinstance(manifest, dict) or not manifest.keys() >= MANIFEST_KEYS:
        raise UserError(f"{path} is no manifest of this version; {PREPARE_REMEDY}")
    return manifest


def load_split(data_dir: Path, split: str, *, limit: int | None = None) -> Split:
    """Reads a prepared split; a limit is a prefix of its fixed order.

    Raises:
        UserError: The split, its manifest or one of its columns is missing.
    """
    path = data_dir / f"{split}.parquet"
    if not path.is_file():
        names = sorted(file.stem for file in data_dir.glob("*.parquet"))
        there = f"it holds {', '.join(names)}" if names else PREPARE_REMEDY
        raise UserError(f"{data_dir} has no split {split!r}; {there}")
    manifest = read_manifest(manifest_path(data_dir, split))
    try:
        frame = pl.read_parquet(path)
    except pl.exceptions.PolarsError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is no whole parquet file ({reason}); {PREPARE_REMEDY}") from None
    missing = [
        name for name in PHOTO_SCHEMA if name not in frame.columns and name not in OPTIONAL_COLUMNS
    ]
    if missing:
        raise UserError(f"{path} has no column {missing[0]!r}; {PREPARE_REMEDY}")
    if frame.height != manifest["rows"]:
        raise UserError(
            f"{path} has {frame.height} rows and its manifest {manifest['rows']}; {PREPARE_REMEDY}"
        )
    ids = sorted(Path(name).stem for name in frame["image_path"])
    if ids != [row["id"] for row in manifest["photos"]]:
        raise UserError(f"{path} holds other photos than its manifest; {PREPARE_REMEDY}")
    photos = [
        Photo(
            id=Path(row["image_path"]).stem,
            path=data_dir / row["image_path"],
            latitude=row["latitude"],
            longitude=row["longitude"],
            country_iso2=row["country_iso2"],
            creator=row.get("creator"),
        )
        for row in frame.head(limit if limit is not None else frame.height).iter_rows(named=True)
    ]
    return Split(
        split,
        manifest["role"],
        photos,
        manifest["fingerprint"],
        manifest["image"],
        manifest["country_share"],
    )


def require_train_role(split: Split, data_dir: Path) -> None:
    """Raises UserError when a split may not be trained on, or shares a photo with one."""
    if split.role != "train":
        raise UserError(
            f"split {split.name!r} in {data_dir} is for {split.role}; train on train_pool or "
            "train_learnable"
        )
    ids = {photo.id for photo in split.photos}
    for path in sorted(data_dir.glob("*.manifest.json")):
        manifest = read_manifest(path)
        shared = ids & {row["id"] for row in manifest["photos"]}
        if manifest["role"] == "evaluation" and shared:
            raise UserError(
                f"split {split.name!r} shares {len(shared)} photos with {manifest['split']!r}, "
                f"{min(shared)} among them; {PREPARE_REMEDY}"
            )


def lay_out(photos: Sequence[Photo], rows: int, seed: int) -> list[Photo]:
    """Returns the photos of a whole run: a fresh seeded permutation each epoch, cut at `rows`.

    A longer run begins with the same photos, so that raising `max_steps` extends it.
    """

    def epochs() -> Iterator[list[Photo]]:
        for epoch in count():
            order = list(photos)
            random.Random(f"{seed}:{epoch}").shuffle(order)
            yield order

    return list(islice(chain.from_iterable(epochs()), rows))


def training_columns(photos: Sequence[Photo], style: PromptStyle) -> dict[str, list[Any]]:
    """Returns the columns that TRL and the reward functions read, one entry a photo.

    `image` holds file paths; the caller casts them to images. `id` lets a log name its photo.
    """
    messages = build_messages(style)
    return {
        "prompt": [messages for _ in photos],
        "image": [str(photo.path) for photo in photos],
        "latitude": [photo.latitude for photo in photos],
        "longitude": [photo.longitude for photo in photos],
        "country_iso2": [photo.country_iso2 for photo in photos],
        "id": [photo.id for photo in photos],
    }
