"""Two runs over the same photos, compared photo by photo. No I/O.

Whether two runs may be compared at all (same sampling, same image policy) is decided in `runs.py`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from geoguessr_rl.bootstrap import (
    RESAMPLES,
    Floats,
    Interval,
    finite,
    holm,
    paired_bootstrap,
    verdict,
)
from geoguessr_rl.eval_metrics import (
    MEDIAN_KM,
    RATES,
    SCORES,
    Hits,
    Metric,
    by_photo,
    coordinate_metrics,
    weighted_geoscore,
)
from geoguessr_rl.records import Prediction


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of two runs over the same photos; a row of the report's table.

    Attributes:
        metric: The key in `metrics.json`, see `Metric`.
        before: The first run's figure, None where infinite.
        after: The second run's figure, None where infinite.
        difference: See `Interval`; None where infinite, as are `low` and `high`.
        low: See `Interval`.
        high: See `Interval`.
        p: See `Interval`, adjusted for the family of all metrics that were compared (`holm`).
        better: See `Interval`.
        worse: See `Interval`.
        ties: See `Interval`.
        n: Photos.
        verdict: See `verdict`.
    """

    metric: str
    before: float | None
    after: float | None
    difference: float | None
    low: float | None
    high: float | None
    p: float
    better: int
    worse: int
    ties: int
    n: int
    verdict: str


def paired_comparison(
    before: Sequence[Prediction],
    after: Sequence[Prediction],
    *,
    country_weights: Mapping[str, float] | None = None,
    hits: tuple[Hits, Hits] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Comparison]:
    """Compares two runs photo by photo in every headline metric, as one family of tests.

    With K rows a photo each photo counts with its mean (for `median_km` its median) of K. A photo
    without a label is left out of that level.

    Args:
        before: All rows of the first run.
        after: All rows of the second run, in any order.
        country_weights: See `compute_metrics`; without it there is no weighted figure.
        hits: Of both runs, see `compute_metrics`; without them there is no figure by coordinates.
        resamples: See `paired_bootstrap`, like `seed`.
        seed: See there.

    Raises:
        ValueError: The photos or K differ, there are none, or a run holds transport errors.
    """
    pairs = _aligned(before, after)
    weighted = weighted_geoscore(before, country_weights or {})
    shared = [*SCORES, *([weighted] if weighted else []), MEDIAN_KM, *RATES]
    sides = [coordinate_metrics(side) for side in hits or ()]
    metrics = [(metric, metric) for metric in shared] + [
        (old, new) for old, new in zip(*sides, strict=True)
    ]
    found: list[tuple[Metric, Interval, Floats]] = []
    for old, new in metrics:
        values = np.array(
            [
                [_photo_value(rows, metric) for rows, metric in zip(pair, (old, new), strict=True)]
                for pair in pairs
            ]
        )
        values = values[~np.isnan(values).any(axis=1)]
        if not len(values):
            continue
        interval = paired_bootstrap(
            *values.T,
            resamples=resamples,
            seed=seed,
            statistic="median" if old.median else "mean",
            lower_is_better=old.lower_is_better,
        )
        found.append((old, interval, values))
    adjusted = holm([interval.p for _, interval, _ in found])
    return [
        _comparison(metric, interval, values, p)
        for (metric, interval, values), p in zip(found, adjusted, strict=True)
    ]


def _photo_value(rows: Sequence[Prediction], metric: Metric) -> float:
    """Returns one photo's value; NaN without a label."""
    values = [value for value in map(metric.value, rows) if value is not None]
    if not values:
        return math.nan
    return float(np.median(values) if metric.median else np.mean(values))


def _comparison(metric: Metric, interval: Interval, values: Floats, p: float) -> Comparison:
    """Writes an interval as a row of the table."""
    summary = np.median if metric.median else np.mean
    n = len(values)
    return Comparison(
        metric.key,
        finite(summary(values[:, 0])),
        finite(summary(values[:, 1])),
        finite(interval.difference),
        finite(interval.low),
        finite(interval.high),
        p,
        interval.better,
        interval.worse,
        interval.ties,
        n,
        verdict(interval.difference, p, n, lower_is_better=metric.lower_is_better),
    )


@dataclass(frozen=True, slots=True)
class GroupChange:
    """How the mean GeoScore of one country or continent changed; intervals are not adjusted.

    Attributes:
        name: The group.
        n: Photos.
        before: Mean GeoScore of the first run.
        after: Mean GeoScore of the second run.
        difference: After minus before.
        low: Lower end of the 95 % interval; with few photos it is too narrow.
        high: Upper end.
    """

    name: str
    n: int
    before: float
    after: float
    difference: float
    low: float
    high: float


def changes_by_group(
    before: Sequence[Prediction],
    after: Sequence[Prediction],
    group_of: Callable[[str], str],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[GroupChange]:
    """Compares the mean GeoScore of groups of countries, what fell most first.

    Args:
        before: All rows of the first run.
        after: All rows of the second run.
        group_of: The group of a country code.
        resamples: See `paired_bootstrap`, like `seed`.
        seed: See there.

    Raises:
        ValueError: As `paired_comparison`.
    """
    groups: dict[str, list[list[float]]] = defaultdict(list)
    for pair in _aligned(before, after):
        means = [float(np.mean([row.geoscore for row in rows])) for rows in pair]
        groups[group_of(pair[0][0].country_iso2)].append(means)
    changes = []
    for name, scores in groups.items():
        old, new = np.array(scores, dtype=np.float64).T
        interval = paired_bootstrap(old, new, resamples=resamples, seed=seed)
        changes.append(
            GroupChange(
                name,
                len(scores),
                float(old.mean()),
                float(new.mean()),
                interval.difference,
                interval.low,
                interval.high,
            )
        )
    return sorted(changes, key=lambda change: (change.difference, change.name))


def largest_changes(
    before: Sequence[Prediction], after: Sequence[Prediction], k: int = 5
) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """Finds the photos on which GeoScore moved most.

    Returns:
        Up to k gains, greatest first, and up to k losses, greatest first, as (photo id, GeoScore
        after minus before). A photo that did not move is in neither.

    Raises:
        ValueError: As `paired_comparison`.
    """
    changes = [
        (old[0].id, float(np.mean([r.geoscore for r in new]) - np.mean([r.geoscore for r in old])))
        for old, new in _aligned(before, after)
    ]
    gains = sorted((c for c in changes if c[1] > 0), key=lambda change: -change[1])
    losses = sorted((c for c in changes if c[1] < 0), key=lambda change: change[1])
    return gains[:k], losses[:k]


def _aligned(
    before: Sequence[Prediction], after: Sequence[Prediction]
) -> list[tuple[list[Prediction], list[Prediction]]]:
    """Pairs the rows of both runs by photo, in the order of ids."""
    for name, rows in (("first", before), ("second", after)):
        if errors := sum(row.outcome == "error" for row in rows):
            raise ValueError(f"the {name} run is incomplete: {errors} rows are transport errors")
    old, new = by_photo(before), by_photo(after)
    if differing := old.keys() ^ new.keys():
        raise ValueError(
            f"{len(differing)} photos are in one of the two runs only, such as {min(differing)!r}"
        )
    if not old:
        raise ValueError("there are no photos to compare")
    if len({len(rows) for rows in [*old.values(), *new.values()]}) > 1:
        raise ValueError("the photos do not all have the same number of samples in both runs")
    return [(old[photo], new[photo]) for photo in sorted(old)]
