"""Prepare: OSV-5M's CSV and zips -> photos at the image policy's size, parquet and manifests.

Evaluation is drawn first and train is cleared of whatever lies near it or looks like it, so that no
photo, walk or place is both learned and measured. A photo that is unfit is replaced by the next one
of its country, and everything that was left out is counted in `summary.json`. It is long because
what is drawn, stored and counted depends on the order in which these steps come.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import polars as pl

from geoguessr_rl import artifacts, data, hub, sources
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import ray_engine
from geoguessr_rl.config import DataConfig, ImagePolicy, Screen
from geoguessr_rl.countries import name_of
from geoguessr_rl.images import visual_tokens
from geoguessr_rl.photos import LEDGER, Outcomes, Stored, Task, in_parallel, store, tidy
from geoguessr_rl.records import PHOTO_SCHEMA
from geoguessr_rl.screen import active_reasons, require_reader

STORED_GROWTH = 1.5
"""Disk that stored photos may take, over their bytes in the zip: quality 95 costs more."""
RAY_BLOCK = 128
"""Photos that a Ray worker handles at a time: each task of Ray has a price of its own."""

NAMED_IDS = 20  # ids that a message lists before it says how many more there are

Kind = Literal["test", "train", "pano"]


@dataclass(frozen=True)
class Candidates:
    """What a source offers: its usable rows, and the counts of the rest for the summary."""

    kind: Kind
    labels: sources.Labels
    counts: dict[str, Any]

    @property
    def rows(self) -> pl.DataFrame:
        """The usable rows, see `sources.Labels`."""
        return self.labels.rows


@dataclass(frozen=True)
class Filled:
    """The photos of a draw: those that were stored, in order, and those that were unfit."""

    photos: dict[str, Stored]
    unfit: dict[str, Stored]


Examine = Callable[[Sequence[str]], Mapping[str, Stored]]


def load_osv5m(config: DataConfig, split: Literal["train", "test"]) -> Candidates:
    """Joins the CSV of one OSV-5M split with its zips; raises UserError when nothing matches."""
    table, zips = sources.locate(config.source, split)
    members, ignored = sources.list_members(zips)
    labels = sources.read_labels(table, members)
    if labels.rows.is_empty():
        if labels.total == 0:
            raise UserError(f"{table} has 0 rows; download again")
        matched = labels.total - labels.dropped["no_id"] - labels.dropped["no_photo"]
        raise UserError(
            f"{matched} of {members.height} photos matched a row of {table}, and 0 are usable; "
            f"check that {', '.join(map(str, zips))} belong to it"
        )
    counts = {"zip_photos": members.height, "zip_entries_ignored": ignored}
    return _count(split, labels, counts)


def load_pano(config: DataConfig) -> Candidates:
    """Reads the labels of the pano set; raises UserError when none is usable."""
    files = sources.locate_pano(config.pano)
    labels = sources.read_pano(files)
    if labels.rows.is_empty():
        raise UserError(f"0 of {labels.total} rows in {files[0].parent} are usable; check them")
    return _count("pano", labels, {"zip_photos": labels.total, "zip_entries_ignored": {}})


def _count(kind: Kind, labels: sources.Labels, counts: dict[str, Any]) -> Candidates:
    """Adds what every source counts."""
    countries = labels.rows["country_iso2"].value_counts()
    return Candidates(
        kind,
        labels,
        {
            "csv_rows": labels.total,
            **counts,
            "photos_without_usable_row": counts["zip_photos"] - labels.rows.height,
            "labels_repaired": labels.repaired,
            "countries_before": dict(sorted(countries.iter_rows())),
        },
    )


def fill(
    drawn: Sequence[str],
    spares: Mapping[str, list[str]],
    country_of: Mapping[str, str],
    examine: Examine,
) -> Filled:
    """Stores the drawn photos, each one that is unfit replaced by the next spare of its country.

    Photos are examined many at a time, and the outcome is as if one after the other: a shorter
    draw gives a prefix.
    """
    found: dict[str, Stored] = {}
    wanted = list(drawn)
    while wanted:
        found |= examine(wanted)
        # A country uses up one spare for each unfit photo, that of a spare included.
        unfit = Counter(country_of[key] for key, row in found.items() if row.reason is not None)
        needed = chain.from_iterable(spares[code][:count] for code, count in unfit.items())
        wanted = [identifier for identifier in needed if identifier not in found]
    queues = {country: iter(ids) for country, ids in spares.items()}
    photos = {}
    for first in drawn:
        for identifier in chain([first], queues[country_of[first]]):
            if found[identifier].reason is None:
                photos[identifier] = found[identifier]
                break
    return Filled(photos, {key: row for key, row in found.items() if row.reason is not None})


def examiner(config: DataConfig, candidates: Candidates) -> Examine:
    """Returns the function that reads, screens and stores photos of one source by id."""
    rows = {row["id"]: row for row in candidates.rows.iter_rows(named=True)}

    def task(identifier: str) -> Task:
        row = rows[identifier]
        places = [name_of(row["country_iso2"]), row["region"], row["sub_region"], row["city"]]
        return Task(
            f"images/{candidates.kind}/{identifier}.jpg",
            **{key: row[key] for key in ("archive", "entry", "offset", "version")},
            places=tuple(place for place in places if place),
        )

    def examine(ids: Sequence[str]) -> dict[str, Stored]:
        out = config.output_dir
        size = sum(rows[identifier]["size"] for identifier in ids)
        hub.require_space(out, int(STORED_GROWTH * size), f"{len(ids)} photos")
        tasks = [task(identifier) for identifier in ids]
        found = store(
            tasks,
            out,
            config.image,
            view=config.pano.view if candidates.kind == "pano" else "strip",
            rules=config.screen,
            parallel=(
                partial(on_ray, config)
                if config.engine == "ray"
                else partial(in_parallel, workers=config.workers)
            ),
            name=candidates.kind,
        )
        return {one: found[task.path] for one, task in zip(ids, tasks, strict=True)}

    return examine


def on_ray(
    config: DataConfig, work: Callable[[Sequence[Task]], Outcomes], tasks: Sequence[Task]
) -> Iterator[Outcomes]:
    """Yields `work` of each block of tasks from the workers of a Ray cluster, as they finish.

    A photo that kills its worker is `damaged`, as one that raises an error.
    """

    def lost(task: Task) -> Outcomes:
        detail = f"killed the worker that read it, {ray_engine.TRIES} times"
        return [(Stored(task.path, task.version, "damaged", detail), b"")]

    start, blocks = partial(ray_engine.ready, work), artifacts.blocks(tasks, RAY_BLOCK)
    for _, outcomes in ray_engine.map_blocks(start, blocks, lost, config.ray):
        yield outcomes


def reject_likenesses(
    examine: Examine, measured: Mapping[str, Stored], max_bits: int | None
) -> Examine:
    """Wraps `examine` so that a photo that looks like an evaluation photo counts as unfit."""
    if max_bits is None or not measured:
        return examine
    names = list(measured)
    hashes = [int(row.phash, 16) for row in measured.values()]

    def stricter(ids: Sequence[str]) -> dict[str, Stored]:
        found = dict(examine(ids))
        fit = [one for one in ids if found[one].reason is None]
        bits, nearest = data.nearest_hash([int(found[one].phash, 16) for one in fit], hashes)
        for one, distance, position in zip(fit, bits, nearest, strict=True):
            if distance <= max_bits:
                detail = f"like {names[position]}, {distance} of 256 bits differ"
                found[one] = replace(found[one], reason="near_duplicate", detail=detail)
        return found

    return stricter


def photo_table(rows: pl.DataFrame, ids: Sequence[str], folder: str) -> pl.DataFrame:
    """Returns the parquet table of a split: its rows in the order of `ids`."""
    order = pl.DataFrame({"id": list(ids)}, schema={"id": pl.String})
    paths = (pl.lit(f"{folder}/") + pl.col("id") + ".jpg").alias("image_path")
    joined = order.join(rows, on="id", how="left", maintain_order="left").with_columns(paths)
    return joined.select(pl.col(name).cast(kind) for name, kind in PHOTO_SCHEMA.items())


def account(
    config: DataConfig,
    candidates: Candidates,
    filled: Filled,
    contamination: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns the summary of one source, in which every row of its table is accounted for."""
    reasons = ["damaged", *active_reasons(config.screen)]
    if contamination is not None and config.contamination.max_hash_bits is not None:
        reasons.insert(1, "near_duplicate")
    contamination = contamination or {}
    unfit = Counter(row.reason for row in filled.unfit.values())
    left = candidates.rows.height - sum(contamination.values())
    dropped = {
        **candidates.labels.dropped,
        **contamination,
        "not_drawn": left - len(filled.photos) - len(filled.unfit),
        **{reason: unfit[reason] for reason in reasons},
    }
    return {
        **candidates.counts,
        "dropped": dropped,
        "rows_selected": len(filled.photos),
        "rejected": {
            identifier: f"{row.reason}: {row.detail}"
            for identifier, row in sorted(filled.unfit.items())
        },
    }


def describe(name: str, table: pl.DataFrame, sizes: Counter[tuple[int, int]]) -> list[str]:
    """Returns the lines that prepare prints about one split."""
    countries = Counter(table["country_iso2"].to_list())
    top = ", ".join(f"{code} {count}" for code, count in countries.most_common(10))
    lines = [f"{name}: {table.height} rows, {len(countries)} countries; largest: {top}"]
    widths: Counter[int] = Counter()
    for (width, _), count in sizes.items():
        widths[width // 128 * 128] += count
    peak = max(widths.values(), default=1)
    for width, count in sorted(widths.items()):
        bar = "█" * max(1, round(30 * count / peak))
        lines.append(f"  width {width:4d}–{width + 127:4d}  {count:6d}  {bar}")
    tokens = [visual_tokens(size) for size in sizes]
    if tokens:
        lines.append(f"  visual tokens a photo: {min(tokens)} to {max(tokens)}")
    return lines


def build_split(
    config: DataConfig,
    candidates: Candidates,
    photos: Mapping[str, Stored],
    name: str,
    *,
    rows: int | None = None,
    country_share: Mapping[str, float] | None = None,
) -> tuple[dict[str, Any], pl.DataFrame]:
    """Returns a split's manifest and its parquet table: the first `rows` of the photos."""
    table = photo_table(candidates.rows, [*photos][:rows], f"images/{candidates.kind}")
    manifest = data.build_manifest(
        name,
        "train" if candidates.kind == "train" else "evaluation",
        table,
        {identifier: row.sha256 for identifier, row in photos.items()},
        image_policy=config.image.model_dump(),
        dataset=dataset_of(config, candidates.kind),
        country_share=country_share,
        publishable=candidates.kind != "pano",
    )
    return manifest, table


def publish(
    out: Path, manifest: dict[str, Any], table: pl.DataFrame, photos: Mapping[str, Stored]
) -> dict[str, Any]:
    """Writes a split's parquet and manifest, prints it, and returns its part of the summary."""
    name = manifest["split"]
    artifacts.write_parquet(out / f"{name}.parquet", table)
    artifacts.write_json(data.manifest_path(out, name), manifest)
    stored = [photos[Path(path).stem] for path in table["image_path"]]
    sizes = Counter((row.width, row.height) for row in stored)
    print("\n".join(describe(name, table, sizes)), flush=True)
    return {
        "role": manifest["role"],
        "rows": table.height,
        "countries": table["country_iso2"].n_unique(),
        "fingerprint": manifest["fingerprint"],
        "sizes": {f"{width}x{height}": count for (width, height), count in sorted(sizes.items())},
    }


def has_pano(config: DataConfig) -> bool:
    """Whether there is a pano set to prepare."""
    return config.pano.size > 0 and (config.pano.root is not None or config.source.root is None)


def pin(config: DataConfig) -> DataConfig:
    """Returns the config with Hub revisions as commits: those with which the folder was begun."""
    path = config.output_dir / artifacts.IDENTITY
    begun = artifacts.read_json(path, remedy="delete the folder") if path.exists() else {}

    def commit(section: str, root: Path | None, repo: str, revision: str) -> str:
        if root is not None or re.fullmatch(r"[0-9a-f]{40}", revision):
            return revision
        known = begun.get(section, {})
        if known.get("repo") == repo and known.get("root") is None:
            return str(known["revision"])
        return hub.resolve(repo, revision)

    updates: dict[str, Any] = {}
    for section in ("source", "pano") if has_pano(config) else ("source",):
        part = getattr(config, section)
        revision = commit(section, part.root, part.repo, part.revision)
        updates[section] = part.model_copy(update={"revision": revision})
    return config.model_copy(update=updates)


def dataset_of(config: DataConfig, kind: Kind) -> dict[str, Any]:
    """Returns what a manifest says of its origin."""
    if kind == "pano":
        pano = config.pano
        origin = (None, None) if pano.root else (pano.repo, pano.revision)
        return {"repo": origin[0], "revision": origin[1], "files": None, "view": pano.view}
    source = config.source
    origin = (None, None) if source.root else (source.repo, source.revision)
    files = sources.osv5m_names(source, kind)
    return {"repo": origin[0], "revision": origin[1], "files": files}


def refuse_shorter(config: DataConfig) -> None:
    """Raises UserError when a limit would cut what the folder holds already."""
    path = config.output_dir / artifacts.SUMMARY
    if config.limit is None or not path.exists():
        return
    summary = artifacts.read_json(path, remedy="delete it and run again")
    rows = summary["splits"]["eval_osv"]["rows"]
    if "train" in summary or rows > config.limit:
        raise UserError(
            f"{config.output_dir} holds {rows} evaluation photos already, and --limit "
            f"{config.limit} would cut them; leave it out, or choose another --output_dir"
        )


def claim(config: DataConfig, identity: Mapping[str, Any]) -> None:
    """Writes what the folder is: splits made under other rules would survive beside the new."""
    out = config.output_dir
    path = out / artifacts.IDENTITY
    before = path.read_bytes() if path.exists() else None
    artifacts.claim(path, identity, holds_work=any(out.glob("*.manifest.json")))
    if path.read_bytes() != before:  # what an attempt under other rules has stored is void
        (out / LEDGER).unlink(missing_ok=True)


def identify(config: DataConfig) -> dict[str, Any]:
    """Returns everything that must be equal for two runs to write the same files."""
    free = {"output_dir", "limit", "workers", "engine", "ray"}
    identity = config.model_dump(mode="json", exclude=free)
    if config.source.root is not None:
        identity["source"]["root"] = str(config.source.root.resolve())
    return identity


def store_draw(
    candidates: Candidates, drawn: Sequence[str], spares: Mapping[str, list[str]], examine: Examine
) -> Filled:
    """Stores a draw; raises UserError when every photo of it turns out unfit."""
    country_of = dict(candidates.rows.select("id", "country_iso2").iter_rows())
    filled = fill(drawn, spares, country_of, examine)
    if drawn and not filled.photos:
        archives = ", ".join(sorted(set(candidates.rows["archive"])))
        first = next(iter(filled.unfit.values()))
        raise UserError(
            f"0 of {len(filled.unfit)} photos in {archives} can be used (the first: "
            f"{first.reason}, {first.detail}); download again"
        )
    return filled


def prepare_evaluation(
    config: DataConfig, candidates: Candidates, size: int, cuts: Mapping[str, int | None]
) -> tuple[Filled, dict[str, Any]]:
    """Draws and stores one evaluation set.

    Args:
        config: The rules.
        candidates: Where to draw from.
        size: Photos wanted.
        cuts: The splits to write, each with its number of rows.

    Returns:
        The photos, and the splits' part of the summary.
    """
    drawn, spares = data.draw_rounds(
        candidates.rows, size=size, rounds=config.eval.rounds, seed=config.seed
    )
    examine = examiner(config, candidates)
    filled = store_draw(candidates, drawn[: config.limit], spares, examine)
    counts, total = candidates.counts["countries_before"], candidates.rows.height
    share = {code: count / total for code, count in counts.items()}
    entries = {}
    for name, rows in cuts.items():
        split = build_split(config, candidates, filled.photos, name, rows=rows, country_share=share)
        entries[name] = publish(config.output_dir, *split, filled.photos)
    return filled, entries


def prepare_train(
    config: DataConfig,
    train: Candidates,
    evaluation: pl.DataFrame,
    measured: Mapping[str, Stored],
) -> tuple[Filled, dict[str, Any], dict[str, Any]]:
    """Prepares `train_pool`, apart from evaluation, and capped or drawn.

    Args:
        config: The rules.
        train: Where to draw from.
        evaluation: The rows of all evaluation photos.
        measured: How they were stored.

    Returns:
        The photos, the source's part of the summary, and the split's.
    """
    rules = config.contamination
    apart, contamination = data.keep_apart(train.rows, evaluation, min_km=rules.min_km)
    drawn, spares = data.draw_train(apart, config.train, seed=config.seed)
    examine = reject_likenesses(examiner(config, train), measured, rules.max_hash_bits)
    filled = store_draw(train, drawn, spares, examine)
    split = build_split(config, train, filled.photos, "train_pool")
    entry = publish(config.output_dir, *split, filled.photos)
    return filled, account(config, train, filled, contamination), entry


def run(config: DataConfig) -> dict[str, Any]:
    """Prepares every split and returns the summary, which is also written to `summary.json`.

    With `limit`, only that many evaluation photos are written; train and the pano set are not
    touched.

    Raises:
        UserError: A source file is missing, damaged or does not belong to the others.
    """
    out = config.output_dir
    with artifacts.run_lock(out), ray_engine.session(config.engine, config.ray):
        if config.screen.text:
            require_reader()
        refuse_shorter(config)
        config = pin(config)
        whole = config.limit is None
        sources.fetch(
            config.source,
            config.pano if whole and has_pano(config) else None,
            ["test", "train"] if whole else ["test"],
        )
        # Read before anything is written, so that a cut train zip costs no minutes.
        test = load_osv5m(config, "test")
        train = load_osv5m(config, "train") if whole else None
        pano = load_pano(config) if whole and has_pano(config) else None
        claim(config, identify(config))

        cuts = {"eval_osv": None, "eval_quick": config.eval.quick}
        filled, splits = prepare_evaluation(config, test, config.eval.size, cuts)
        summary: dict[str, Any] = {"splits": splits, "test": account(config, test, filled)}
        evaluation = [test.rows.filter(pl.col("id").is_in([*filled.photos]))]
        measured = dict(filled.photos)
        if pano is not None:
            filled, entries = prepare_evaluation(
                config, pano, config.pano.size, {"eval_pano": None}
            )
            splits |= entries
            summary["pano"] = account(config, pano, filled)
            evaluation.append(pano.rows.filter(pl.col("id").is_in([*filled.photos])))
            measured |= filled.photos
        elif whole and config.pano.size:
            print("eval_pano: left out, since source.root is a folder and pano.root is not set")
        keep = {row.path for row in measured.values()}
        if train is not None:
            filled, summary["train"], splits["train_pool"] = prepare_train(
                config, train, pl.concat(evaluation), measured
            )
            keep |= {row.path for row in filled.photos.values()}
        tidy(out, keep)
        artifacts.write_json(out / artifacts.SUMMARY, summary)
        artifacts.write_json(out / artifacts.RESOLVED_CONFIG, config)
    return summary


def rebuild(config: DataConfig, path: Path) -> dict[str, Any]:
    """Rebuilds exactly the split that a manifest describes, and returns its part of a summary.

    Args:
        config: Where the source is and where the split goes. What is drawn, and at which size
            photos are stored, comes from the manifest.
        path: A `<split>.manifest.json`.

    Raises:
        UserError: The folder holds something else, or photos are missing or came out otherwise;
            the message names them.
    """
    wanted = data.read_manifest(path)
    out, dataset = config.output_dir, wanted["dataset"]
    policy = ImagePolicy(**wanted["image"])
    config = config.model_copy(update={"image": policy, "screen": Screen(), "limit": None})
    kind: Kind = "pano" if dataset["files"] is None else dataset["files"][0].removesuffix(".csv")
    section = "pano" if kind == "pano" else "source"
    changes = {key: dataset[key] for key in ("repo", "revision", "view") if dataset.get(key)}
    if kind != "pano":
        zips = [int(Path(name).stem) for name in dataset["files"][1:]]
        changes[kind] = zips
    config = config.model_copy(
        update={section: getattr(config, section).model_copy(update=changes)}
    )
    if getattr(config, section).root is None and dataset["repo"] is None:
        raise UserError(f"{path} was made from a folder; name yours with --source or pano.root")
    identity = {"rebuilt": True, "image": wanted["image"], "view": config.pano.view}
    with artifacts.run_lock(out), ray_engine.session(config.engine, config.ray):
        claim(config, identity)
        there = data.manifest_path(out, wanted["split"])
        if there.exists() and data.read_manifest(there)["fingerprint"] != wanted["fingerprint"]:
            raise UserError(f"{out} holds another {wanted['split']}; choose another --output_dir")
        candidates = load_pano(config) if kind == "pano" else load_osv5m(config, kind)
        rows = sorted(wanted["photos"], key=lambda row: row["position"])
        ids = [row["id"] for row in rows]
        origin = config.pano.root if kind == "pano" else config.source.root
        where = str(origin or f"{dataset['repo']} at {dataset['revision']}")
        refuse_ids(set(ids) - set(candidates.rows["id"]), f"cannot be found in {where}")
        photos = examiner(config, candidates)(ids)
        refuse_ids({one for one in ids if photos[one].reason}, f"cannot be decoded from {where}")
        manifest, table = build_split(
            config, candidates, photos, wanted["split"], country_share=wanted["country_share"]
        )
        manifest["dataset"] = dataset
        if manifest["fingerprint"] != wanted["fingerprint"]:
            fresh = {row["id"]: row for row in manifest["photos"]}
            other = {row["id"] for row in rows if fresh[row["id"]] != row}
            refuse_ids(
                other,
                f"differ from {path}: another source, or another image library than that of "
                f"geoguessr-rl {wanted['code_version']}'s lock",
            )
            raise UserError(f"{path} does not have the fingerprint of its own rows; copy it again")
        return publish(out, manifest, table, photos)


def refuse_ids(ids: set[str], why: str) -> None:
    """Raises UserError that names photos, if there are any."""
    if ids:
        named = ", ".join(sorted(ids)[:NAMED_IDS])
        more = f" and {len(ids) - NAMED_IDS} more" if len(ids) > NAMED_IDS else ""
        raise UserError(f"{len(ids)} photos {why}: {named}{more}")
