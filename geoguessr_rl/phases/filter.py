"""Filter: the base model's own answers -> the photos that GRPO can learn from.

A photo whose group of completions all score alike has no advantage and teaches nothing. Set A holds
the photos on which the base is torn; set B a sample of the rest, so that what it knows stays
practised. Completions are cached, so that a new threshold generates nothing.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import ray_engine
from geoguessr_rl.backends.predictions import (
    check_trained_alike,
    find_adapter,
    generate,
    holds_work,
    identity,
    sampling_of,
)
from geoguessr_rl.config import FilterConfig
from geoguessr_rl.records import Photo, Prediction

OUTPUT_SPLIT = "train_learnable"
STATS = "filter_stats.json"


def choose(photos: Sequence[Photo], *, rows: int, cap: int) -> list[Photo]:
    """Returns the first photos of the pool, at most `cap` a country and `rows` in all."""
    chosen: list[Photo] = []
    counts: Counter[str] = Counter()
    for photo in photos:
        if counts[photo.country_iso2] < cap and len(chosen) < rows:
            counts[photo.country_iso2] += 1
            chosen.append(photo)
    return chosen


def group_stats(rows: Sequence[Prediction]) -> dict[str, dict[str, float]]:
    """Returns each photo's mean reward, population deviation and country hits, by id."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for row in rows:
        groups[row.id].append(row)
    return {
        identifier: {
            "mean_reward": float(np.mean([row.total for row in group])),
            "std_reward": float(np.std([row.total for row in group])),
            "country_hits": sum(int(row.country) for row in group),
        }
        for identifier, group in groups.items()
    }


def learnable(stats: dict[str, dict[str, float]], *, n: int, min_std: float) -> list[str]:
    """Returns set A: ids on which the completions disagree in country or in reward."""
    return [
        identifier
        for identifier, photo in stats.items()
        if 0 < photo["country_hits"] < n or photo["std_reward"] > min_std
    ]


def run(config: FilterConfig) -> dict[str, Any]:
    """Filters the train pool into `train_learnable` and returns the statistics.

    Raises:
        UserError: The pool is missing, holds evaluation photos, or nothing in it is learnable.
    """
    if config.generation.temperature == 0:
        raise UserError("generation.temperature is 0, so all completions of a group are equal")
    pool = data.load_split(config.data_dir, "train_pool", limit=config.limit)
    data.require_train_role(pool, config.data_dir)
    photos = choose(pool.photos, rows=config.rows, cap=config.cap)
    sampling = sampling_of(config.generation, config.completions)
    if config.lora is not None:
        lora = find_adapter(config.lora)
        check_trained_alike(lora, config.prompt.style, pool.image_policy, config.model.name)
        config = config.model_copy(update={"lora": lora})
    out = config.output_dir
    with artifacts.run_lock(out), ray_engine.session(config.engine, config.ray):
        described = {**identity(pool, config, sampling), "cap": config.cap}
        artifacts.claim(out / artifacts.IDENTITY, described, holds_work=holds_work(out))
        artifacts.write_json(out / artifacts.RESOLVED_CONFIG, config)
        rows = generate(
            out / artifacts.PREDICTIONS,
            photos,
            config.generation,
            config.model,
            config.prompt,
            sampling,
            data_dir=config.data_dir,
            lora=config.lora,
            ray=config.ray if config.engine == "ray" else None,
        )
        if missing := len(photos) * sampling.n - sum(row.outcome != "error" for row in rows):
            raise UserError(
                f"{missing} completions did not arrive; run the same command again, which asks for "
                "these alone"
            )
        stats = group_stats(rows)
        min_std, set_a = _torn(stats, config)
        rng = random.Random(config.seed)
        rest = sorted(stats.keys() - set(set_a))
        set_b = rng.sample(rest, round(config.rest_share * len(rest)))
        kept = sorted([*set_a, *set_b])
        rng.shuffle(kept)
        _publish(config.data_dir, pool, kept, stats)
        left = set(kept)
        countries = Counter(photo.country_iso2 for photo in photos if photo.id in left)
        summary = {
            "photos": len(photos),
            "completions_a_photo": config.completions,
            "min_std": min_std,
            "set_a": len(set_a),
            "set_b": len(set_b),
            "rows": len(kept),
            "countries": len(countries),
            "countries_top10": countries.most_common(10),
            "base_mean_reward": float(np.mean([row.total for row in rows])),
            "base_country_acc": float(np.mean([row.country for row in rows])),
            "zero_spread_share": float(np.mean([s["std_reward"] == 0 for s in stats.values()])),
        }
        artifacts.write_json(out / STATS, summary)
    return summary


def _torn(stats: dict[str, dict[str, float]], config: FilterConfig) -> tuple[float, list[str]]:
    """Returns set A and the threshold that it took; a lower one where too few photos deviate."""
    min_std = config.min_std
    set_a = learnable(stats, n=config.completions, min_std=min_std)
    if len(set_a) < config.min_rows:
        min_std = config.fallback_std
        print(
            f"only {len(set_a)} photos deviate by more than {config.min_std}; "
            f"the threshold drops to {min_std}"
        )
        set_a = learnable(stats, n=config.completions, min_std=min_std)
    if not set_a:
        raise UserError(
            f"the base answers all {len(stats)} photos alike, so nothing is learnable; check "
            f"the completions in {config.output_dir / artifacts.PREDICTIONS}"
        )
    return min_std, set_a


def _publish(
    data_dir: Path, pool: data.Split, kept: Sequence[str], stats: dict[str, dict[str, float]]
) -> None:
    """Writes the split that training reads, with its manifest."""
    frame = pl.read_parquet(data_dir / f"{pool.name}.parquet", glob=False)
    stem = pl.col("image_path").str.extract(r"([^/]+)\.[^./]+$").alias("id")
    schema = {"id": pl.String, "mean_reward": pl.Float64, "std_reward": pl.Float64}
    order = pl.DataFrame(
        [{"id": identifier, **stats[identifier]} for identifier in kept],
        schema={**schema, "country_hits": pl.Int64},
    )
    table = order.join(frame.with_columns(stem), on="id", how="left", maintain_order="left").select(
        *frame.columns, "mean_reward", "std_reward", "country_hits"
    )
    manifest = data.read_manifest(data.manifest_path(data_dir, pool.name))
    sha256 = {row["id"]: row["sha256"] for row in manifest["photos"]}
    artifacts.write_parquet(data_dir / f"{OUTPUT_SPLIT}.parquet", table)
    built = data.build_manifest(
        OUTPUT_SPLIT,
        "train",
        table,
        sha256,
        image_policy=pool.image_policy,
        dataset=manifest["dataset"],
        publishable=manifest["publishable"],
    )
    artifacts.write_json(data.manifest_path(data_dir, OUTPUT_SPLIT), built)
