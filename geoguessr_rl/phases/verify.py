"""Verify: prepared splits that exist -> every rule checked again, from the files alone.

Nothing is taken on trust: photos are read and hashed again, distances measured again, labels and
fingerprints recomputed. It changes no file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
from tqdm import tqdm

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import DataConfig, ImagePolicy
from geoguessr_rl.countries import CODES
from geoguessr_rl.images import fitted_size
from geoguessr_rl.photos import Stored, in_parallel, measure_files

NAMED = 5  # photos that one problem names


@dataclass(frozen=True)
class Checked:
    """A split as it lies on disk."""

    split: data.Split
    manifest: dict[str, Any]
    table: pl.DataFrame  # with an `id`
    stored: dict[str, Stored]


def read(data_dir: Path, name: str, workers: int | None) -> Checked:
    """Reads a split and measures every photo of it again."""
    split = data.load_split(data_dir, name)
    files = [(photo.id, photo.path) for photo in split.photos]
    stored: dict[str, Stored] = {}
    with tqdm(total=len(files), desc=name, unit="photo", mininterval=1) as bar:
        for block in in_parallel(measure_files, files, workers):
            stored |= {row.path: row for row in block}
            bar.update(len(block))
    table = pl.read_parquet(data_dir / f"{name}.parquet", glob=False).with_columns(
        pl.Series("id", [photo.id for photo in split.photos])
    )
    return Checked(split, data.read_manifest(data.manifest_path(data_dir, name)), table, stored)


def name_some(ids: Sequence[str]) -> str:
    """Returns how many photos there are and the names of the first."""
    more = "" if len(ids) <= NAMED else " …"
    return f"{len(ids)} photos: {', '.join(sorted(ids)[:NAMED])}{more}"


def check_alone(checked: Checked) -> list[str]:
    """Returns what is wrong with a split by itself."""
    split, manifest, stored = checked.split, checked.manifest, checked.stored
    policy = ImagePolicy(**manifest["image"])
    promised = {row["id"]: row["sha256"] for row in manifest["photos"]}

    def fits(row: Stored) -> bool:
        return fitted_size(row.width, row.height, policy) == (row.width, row.height)

    def placed(photo: Any) -> bool:
        return -90 <= photo.latitude <= 90 and -180 <= photo.longitude <= 180

    unread = [key for key, row in stored.items() if row.reason is not None]
    whole = {key: row for key, row in stored.items() if row.reason is None}
    findings = {
        "missing or damaged": unread,
        "bytes differ from the manifest": [k for k, r in whole.items() if r.sha256 != promised[k]],
        "size breaks the image policy": [key for key, row in whole.items() if not fits(row)],
        "no place on Earth": [photo.id for photo in split.photos if not placed(photo)],
        "no such country code": [p.id for p in split.photos if p.country_iso2 not in CODES],
    }
    problems = [f"{split.name}: {what}: {name_some(ids)}" for what, ids in findings.items() if ids]
    again = data.build_manifest(
        split.name, split.role, checked.table, promised, image_policy={}, dataset={}
    )
    if again["fingerprint"] != split.fingerprint:
        problems.append(f"{split.name}: labels or order differ from the manifest's fingerprint")
    if split.role != ("evaluation" if split.name.startswith("eval_") else "train"):
        problems.append(f"{split.name}: has the role {split.role}")
    return problems


def check_apart(train: Checked, evaluation: Checked, config: DataConfig) -> list[str]:
    """Returns what a train and an evaluation split share."""
    rules = config.contamination
    pair = f"{train.split.name} and {evaluation.split.name}"
    _, shared = data.keep_apart(train.table, evaluation.table, min_km=rules.min_km)
    problems = [f"{pair}: {reason}: {count} photos" for reason, count in shared.items() if count]
    sides = [
        [(key, int(row.phash, 16)) for key, row in side.stored.items() if row.reason is None]
        for side in (train, evaluation)
    ]
    if rules.max_hash_bits is not None and all(sides):
        hashes, others = ([value for _, value in side] for side in sides)
        bits, nearest = data.nearest_hash(hashes, others)
        for (key, _), distance, position in zip(sides[0], bits, nearest, strict=True):
            if distance <= rules.max_hash_bits:
                problems.append(
                    f"{pair}: near_duplicate: {key} and {sides[1][position][0]}, "
                    f"{distance} of 256 bits differ"
                )
    return problems


def run(config: DataConfig) -> str:
    """Checks every split of the data folder, and returns one line that says what was checked.

    Raises:
        UserError: There is no split, or one breaks a rule; the problems are printed before.
    """
    out = config.output_dir
    with artifacts.run_lock(out):
        names = sorted(
            path.name.removesuffix(".manifest.json") for path in out.glob("*.manifest.json")
        )
        if not names:
            raise UserError(f"{out} holds no split; {data.PREPARE_REMEDY}")
        splits = [read(out, name, config.workers) for name in names]
    problems = [problem for checked in splits for problem in check_alone(checked)]
    train = [checked for checked in splits if checked.split.role == "train"]
    evaluation = [checked for checked in splits if checked.split.role == "evaluation"]
    for pair in product(train, evaluation):
        problems += check_apart(*pair, config)
    if problems:
        print("\n".join(problems), flush=True)
        raise UserError(
            f"{out} breaks {len(problems)} rules; delete what is wrong and {data.PREPARE_REMEDY}"
        )
    photos = sum(len(checked.stored) for checked in splits)
    return (
        f"verified {len(splits)} splits with {photos} photos: bytes, sizes, labels, fingerprints, "
        f"and {len(train) * len(evaluation)} pairs of train and evaluation apart"
    )
