"""Prepare: OSV-5M's CSV and zips -> photos at the image policy's size, parquet and manifests.

Evaluation is drawn first and train is cleared of whatever lies near it, so that no photo, walk or
place is both learned and measured. A photo that does not decode is replaced by the next one of its
country, and everything that was left out is counted in `summary.json`.
"""

import hashlib
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import polars as pl
from tqdm import tqdm

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import DataConfig, ImagePolicy
from geoguessr_rl.images import BadImageError, prepare, visual_tokens
from geoguessr_rl.records import PHOTO_SCHEMA

SUMMARY = "summary.json"

MAX_PHOTO_BYTES = 100_000_000
"""A larger zip entry is not read at all: a few megabytes of zip can unpack to any size."""


@dataclass
class Written:
    """The photos of one split as they were stored, in the split's order."""

    ids: list[str]
    sha256: dict[str, str]
    sizes: dict[str, tuple[int, int]]
    bad: dict[str, str]


def read_member(member: data.Member, archives: dict[Path, zipfile.ZipFile]) -> bytes:
    """Reads one photo's bytes out of its zip; raises BadImageError when the entry is damaged."""
    if member.archive not in archives:
        archives[member.archive] = zipfile.ZipFile(member.archive)
    archive = archives[member.archive]
    if archive.getinfo(member.name).file_size > MAX_PHOTO_BYTES:
        raise BadImageError("too large a zip entry")
    try:
        return archive.read(member.name)
    except data.ZIP_ERRORS as error:
        raise BadImageError(f"damaged zip entry: {error}") from None


def write_photos(
    drawn: Sequence[str],
    spares: Mapping[str, list[str]],
    country_of: Mapping[str, str],
    members: Mapping[str, data.Member],
    folder: Path,
    policy: ImagePolicy,
    limit: int | None,
) -> Written:
    """Stores the drawn photos, each one that fails replaced by the next spare of its country."""
    written = Written([], {}, {}, {})
    queues = {country: iter(ids) for country, ids in spares.items()}
    archives: dict[Path, zipfile.ZipFile] = {}
    for first in tqdm(drawn[:limit], desc=folder.name, unit="photo", mininterval=1):
        identifier: str | None = first
        while identifier is not None:
            try:
                stored, size = prepare(read_member(members[identifier], archives), policy)
            except BadImageError as error:
                written.bad[identifier] = str(error)
                identifier = next(queues[country_of[first]], None)
                continue
            artifacts.write_bytes(folder / f"{identifier}.jpg", stored)
            written.ids.append(identifier)
            written.sha256[identifier] = hashlib.sha256(stored).hexdigest()
            written.sizes[identifier] = size
            break
    for archive in archives.values():
        archive.close()
    if drawn and not written.ids:
        zips = ", ".join(map(str, archives))
        raise UserError(f"0 of {len(written.bad)} photos in {zips} can be decoded; download again")
    return written


def photo_table(rows: pl.DataFrame, ids: Sequence[str], folder: str) -> pl.DataFrame:
    """Returns the parquet table of a split: its rows in the order of `ids`."""
    order = pl.DataFrame({"id": list(ids)}, schema={"id": pl.String})
    paths = (pl.lit(f"{folder}/") + pl.col("id") + ".jpg").alias("image_path")
    joined = order.join(rows, on="id", how="left", maintain_order="left").with_columns(paths)
    return joined.select(pl.col(name).cast(kind) for name, kind in PHOTO_SCHEMA.items())


Joined = tuple[data.Labels, dict[str, data.Member], dict[str, Any]]
"""A CSV's usable rows, the photos in the zips, and the counts of both for the summary."""


def load_labels(config: DataConfig, split: Literal["train", "test"]) -> Joined:
    """Joins the CSV of one OSV-5M split with its zips; raises UserError when nothing matches."""
    table, zips = data.locate(config.source, split)
    members, ignored = data.list_members(zips)
    labels = data.read_labels(table, members)
    if labels.rows.is_empty():
        if labels.total == 0:
            raise UserError(f"{table} has 0 rows; download again")
        matched = labels.total - labels.dropped["no_id"] - labels.dropped["no_photo"]
        raise UserError(
            f"{matched} of {len(members)} photos matched a row of {table}, and 0 are usable; check "
            f"that {', '.join(map(str, zips))} belong to it"
        )
    unlabelled = len(members.keys() - set(labels.rows["id"]))
    counts = {
        "csv_rows": labels.total,
        "zip_photos": len(members),
        "zip_entries_ignored": ignored,
        "photos_without_usable_row": unlabelled,
        "rows_dropped": labels.dropped,
        "labels_repaired": labels.repaired,
        "rows_usable": labels.rows.height,
    }
    return labels, members, counts


def describe(name: str, table: pl.DataFrame, sizes: Mapping[str, tuple[int, int]]) -> list[str]:
    """Returns the lines that prepare prints about one split."""
    countries = Counter(table["country_iso2"].to_list())
    top = ", ".join(f"{code} {count}" for code, count in countries.most_common(10))
    lines = [f"{name}: {table.height} rows, {len(countries)} countries; largest: {top}"]
    widths = Counter(width // 128 * 128 for width, _ in sizes.values())
    peak = max(widths.values(), default=1)
    for width, count in sorted(widths.items()):
        bar = "█" * max(1, round(30 * count / peak))
        lines.append(f"  width {width:4d}–{width + 127:4d}  {count:6d}  {bar}")
    tokens = [visual_tokens(size) for size in sizes.values()]
    if tokens:
        lines.append(f"  visual tokens a photo: {min(tokens)} to {max(tokens)}")
    return lines


def run(config: DataConfig) -> dict[str, Any]:
    """Prepares every split and returns the summary, which is also written to `summary.json`.

    With `limit`, only that many evaluation photos are written and train is not touched.

    Raises:
        UserError: A source file is missing, damaged or does not belong to the others.
    """
    out = config.output_dir
    with artifacts.run_lock(out):
        labels, members, counts = load_labels(config, "test")
        # Read before anything is written, so that a cut train zip costs no minutes.
        train = load_labels(config, "train") if config.limit is None else None
        # Splits that were made under other rules would survive beside the new ones.
        identity = config.model_dump(mode="json", exclude={"output_dir", "limit"})
        prepared = any(out.glob("*.manifest.json"))
        artifacts.claim(out / artifacts.IDENTITY, identity, holds_work=prepared)
        shares = labels.rows["country_iso2"].value_counts(sort=True)
        total = labels.rows.height
        share = {code: count / total for code, count in sorted(shares.iter_rows())}
        drawn, spares = data.draw_rounds(
            labels.rows, size=config.eval.size, rounds=config.eval.rounds, seed=config.seed
        )
        country_of = dict(labels.rows.select("id", "country_iso2").iter_rows())
        written = write_photos(
            drawn, spares, country_of, members, out / "images/test", config.image, config.limit
        )
        evaluation = photo_table(labels.rows, written.ids, "images/test")
        summary: dict[str, Any] = {"test": {**counts, "photos_damaged": written.bad}, "splits": {}}

        def publish(
            name: str, role: data.Role, table: pl.DataFrame, photos: Written, **extra: Any
        ) -> None:
            artifacts.write_parquet(out / f"{name}.parquet", table)
            manifest = data.build_manifest(
                name,
                role,
                table,
                photos.sha256,
                image_policy=config.image.model_dump(),
                source=str(config.source.root or config.source.repo),
                **extra,
            )
            artifacts.write_json(data.manifest_path(out, name), manifest)
            kept = {Path(path).stem for path in table["image_path"]}
            sizes = {key: size for key, size in photos.sizes.items() if key in kept}
            summary["splits"][name] = {
                "rows": table.height,
                "countries": table["country_iso2"].n_unique(),
                "fingerprint": manifest["fingerprint"],
            }
            print("\n".join(describe(name, table, sizes)), flush=True)

        publish("eval_osv", "evaluation", evaluation, written, country_share=share)
        quick = evaluation.head(config.eval.quick)
        publish("eval_quick", "evaluation", quick, written, country_share=share)
        if train is not None:
            summary["train"] = prepare_train(config, train, evaluation, publish)
        artifacts.write_json(out / SUMMARY, summary)
        artifacts.write_json(out / artifacts.RESOLVED_CONFIG, config)
    return summary


def prepare_train(
    config: DataConfig, train: Joined, evaluation: pl.DataFrame, publish: Any
) -> dict[str, Any]:
    """Prepares `train_pool`: rows apart from evaluation, capped by country."""
    labels, members, counts = train
    stems = pl.col("image_path").str.extract(r"([^/]+)\.jpg$").alias("id")
    apart, dropped = data.keep_apart(
        labels.rows, evaluation.with_columns(stems), min_km=config.contamination.min_km
    )
    drawn, spares = data.draw_capped(apart, cap=config.train.cap, seed=config.seed)
    country_of = dict(apart.select("id", "country_iso2").iter_rows())
    folder = config.output_dir / "images/train"
    written = write_photos(drawn, spares, country_of, members, folder, config.image, None)
    publish("train_pool", "train", photo_table(apart, written.ids, "images/train"), written)
    return {
        **counts,
        "contamination_dropped": dropped,
        "over_cap": apart.height - len(drawn),
        "photos_damaged": written.bad,
    }
