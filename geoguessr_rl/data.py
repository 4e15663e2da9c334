"""Which photos are learned and which are measured: draws, caps, contamination, frozen splits.

Selection works on labels alone, so that only the chosen photos are ever decoded. `sources.py` reads
the labels, `phases/prepare.py` writes the chosen photos, and the splits that it writes are read
back here.
"""

import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from scipy.spatial import cKDTree

from geoguessr_rl.artifacts import UserError, fingerprint, read_json, seed_for
from geoguessr_rl.config import TrainPool
from geoguessr_rl.prompt import PromptStyle, build_messages
from geoguessr_rl.records import OPTIONAL_COLUMNS, PHOTO_SCHEMA, Photo, Place
from geoguessr_rl.reward import EARTH_RADIUS_KM

Role = Literal["train", "evaluation"]

DENSITY_BINS = 100
DENSITY_POWER = 0.75
"""OSV-5M's authors draw a photo with weight 1 / n^0.75, n the photos in its cell of a grid of
100 × 100 over latitude and longitude (https://arxiv.org/abs/2404.18873)."""

MANIFEST_KEYS = {
    "split", "role", "dataset", "rows", "image", "fingerprint", "photos", "publishable",
}  # fmt: skip
PREPARE_REMEDY = "run scripts/prepare_data.py first"


@dataclass(frozen=True)
class Split:
    """A prepared split, as every later phase reads it."""

    name: str
    role: Role
    photos: list[Photo]
    fingerprint: str
    image_policy: dict[str, Any]
    country_share: dict[str, float]
    publishable: bool

    def places(self) -> dict[str, Place]:
        """Returns each photo's administrative names, by its id."""
        return {
            photo.id: Place(photo.country_iso2, photo.region, photo.sub_region, photo.city)
            for photo in self.photos
        }


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


def density_weights(latitude: np.ndarray, longitude: np.ndarray) -> np.ndarray:
    """Returns each photo's weight by the density around it, shape (n,); see `DENSITY_POWER`."""
    bins = [
        np.clip((values - low) * DENSITY_BINS / span, 0, DENSITY_BINS - 1).astype(int)
        for values, low, span in ((latitude, -90, 180), (longitude, -180, 360))
    ]
    _, cell, photos = np.unique(
        bins[0] * DENSITY_BINS + bins[1], return_inverse=True, return_counts=True
    )
    return photos[cell] ** -DENSITY_POWER


def _rank_weighted(rows: pl.DataFrame, weights: np.ndarray, seed: int) -> list[str]:
    """Returns every id in the order of a draw without replacement, by weight.

    Each id races with an exponential clock of its weight, seeded by the id itself, so that neither
    the order of the rows nor the machine matters. (Efraimidis and Spirakis, 2006.)
    """

    def uniform(identifier: str) -> float:
        digest = hashlib.sha256(f"{seed}:{identifier}".encode()).digest()
        return (int.from_bytes(digest[:6], "big") + 0.5) / 2**48

    clock = {
        identifier: -math.log(uniform(identifier)) / weight
        for identifier, weight in zip(rows["id"], weights, strict=True)
    }
    return sorted(clock, key=lambda identifier: (clock[identifier], identifier))


def draw_train(
    rows: pl.DataFrame, rules: TrainPool, *, seed: int
) -> tuple[list[str], dict[str, list[str]]]:
    """Draws train ids.

    Args:
        rows: Candidates with `id`, `country_iso2`, `latitude`, `longitude`.
        rules: How to draw, see `TrainPool`.
        seed: Decides every order.

    Returns:
        The drawn ids, shuffled, and each country's ids that were not drawn, in the order in which
        they stand in for a photo that turns out unfit.
    """
    if rules.sampling == "cap":
        order = [(country, ids, rules.cap) for country, ids in _by_country(rows, seed).items()]
        drawn = [identifier for _, ids, cap in order for identifier in ids[:cap]]
        spares = {country: ids[cap:] for country, ids, cap in order}
    else:
        rows = rows.sort("id")
        points = rows["latitude"].to_numpy(), rows["longitude"].to_numpy()
        weights = (
            density_weights(*points)
            if rules.sampling == "inverse_density"
            else np.ones(rows.height)
        )
        ranked = _rank_weighted(rows, weights, seed)
        drawn = ranked[: rules.size]
        country_of = dict(rows.select("id", "country_iso2").iter_rows())
        spares = {country: [] for country in sorted(set(country_of.values()))}
        for identifier in ranked[rules.size :]:
            spares[country_of[identifier]].append(identifier)
    random.Random(seed).shuffle(drawn)
    return drawn, spares


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


def nearest_hash(hashes: Sequence[int], others: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns each perceptual hash's distance to its nearest among others, and which one that is.

    Args:
        hashes: Of 256 bits.
        others: At least one.

    Returns:
        Bits that differ, and positions in `others`, one a hash.
    """

    def words(values: Sequence[int]) -> np.ndarray:
        text = b"".join(value.to_bytes(32, "big") for value in values)
        return np.frombuffer(text, dtype=np.uint64).reshape(-1, 4)

    table = words(others)
    bits, nearest = [], []
    for row in words(hashes):
        distance = np.bitwise_count(table ^ row).sum(axis=1)
        nearest.append(int(distance.argmin()))
        bits.append(int(distance[nearest[-1]]))
    return bits, nearest


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
    dataset: Mapping[str, Any],
    country_share: Mapping[str, float] | None = None,
    publishable: bool = True,
) -> dict[str, Any]:
    """Returns what a split is: ids with the hashes of their bytes, its role and fingerprint.

    Args:
        split: Its name.
        role: Whether it may be trained on.
        frame: Its rows, `PHOTO_SCHEMA`.
        sha256: Of the stored bytes, by id.
        image_policy: The sizes of its photos.
        dataset: Where it comes from: `repo`, `revision` and `files`, and how it was cut.
        country_share: Each country's share in the full test set.
        publishable: Whether its pictures may leave the machine.
    """
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
    ranked = [{**row, "position": position} for position, row in enumerate(rows)]
    ranked.sort(key=lambda row: row["id"])
    return {
        "split": split,
        "role": role,
        "publishable": publishable,
        "dataset": dict(dataset),
        "code_version": version("geoguessr-rl"),
        "rows": len(ranked),
        "image": dict(image_policy),
        "country_share": dict(country_share or {}),
        "fingerprint": identity,
        "photos": ranked,
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
        frame = pl.read_parquet(path, glob=False)
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
            **{name: row.get(name) for name in ("creator", "region", "sub_region", "city")},
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
        manifest["publishable"],
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
