"""Predictions -> metrics, and two runs compared photo by photo. No I/O.

Nothing drops out of a mean because it looks bad: an answer that does not parse scores 0, names no
country, misses at every radius and lies infinitely far away. Only transport errors are left out,
since nobody answered, and they mark the metrics as incomplete. Whether two runs may be compared at
all (same sampling, same image policy) is the caller's question.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geoguessr_rl.countries import parent_of
from geoguessr_rl.records import Completion, Outcome, Prediction
from geoguessr_rl.reward import SCORE_VERSION, components

ACC_RADII_KM = (1, 25, 200, 750, 2500)  # street, city, region, country, continent
TAIL_RADII_KM = (2500, 5000)

# Under six pairs even a unanimous result is chance at 5 % (sign test: 2 / 2^5 > 0.05), while the
# bootstrap draws an interval that is too narrow.
MIN_PAIRS = 6

_RESAMPLED_VALUES_AT_ONCE = 2_000_000  # 16 MB an array, however many photos and resamples

# A heuristic, looked at only where there is no answer to score.
_REFUSAL = re.compile(
    r"\b(?:sorry|as an ai|(?:can ?not|can.?t|unable to|won.?t|will not) "
    r"(?:determine|identify|provide|assist|help|tell|say|answer|be))\b",
    re.IGNORECASE,
)

Floats = NDArray[np.float64]
RowValue = Callable[[Prediction], float]


def _d_km(row: Prediction) -> float:
    return math.inf if row.d_km is None else row.d_km


def _right_parent(row: Prediction) -> float:
    code = row.pred_country_iso2
    return float(code is not None and parent_of(code) == parent_of(row.country_iso2))


def _within(km: float) -> RowValue:
    return lambda row: float(_d_km(row) < km)


# The metrics that are a mean over rows; every one of them is better when higher.
_MEANS: dict[str, RowValue] = {
    "mean_geoscore": lambda row: row.geoscore,
    "country_acc": lambda row: row.country,
    "country_acc_parent": _right_parent,
    "format_rate": lambda row: row.format,
}
_WITHIN = {str(km): _within(km) for km in ACC_RADII_KM}


def make_prediction(
    id: str,
    sample: int,
    latitude: float,
    longitude: float,
    country_iso2: str,
    completion: Completion,
) -> Prediction:
    """Scores one completion of one photo with the default shape.

    Args:
        id: The photo's id.
        sample: Which of the photo's completions this is, from 0.
        latitude: True latitude in decimal degrees.
        longitude: True longitude in decimal degrees.
        country_iso2: True country, alpha-2.
        completion: What the model wrote. After a transport error its text is not looked at.

    Raises:
        ValueError: The truth is missing, see `reward.components`.
    """
    failed = completion.finish_reason == "error"
    scores = components("" if failed else completion.text, latitude, longitude, country_iso2)
    answer = scores.answer
    outcome: Outcome
    if failed:
        outcome = "error"
    elif answer is not None:
        outcome = "answered"
    else:
        outcome = "truncated" if completion.finish_reason == "length" else "unparseable"
    return Prediction(
        id=id,
        sample=sample,
        latitude=latitude,
        longitude=longitude,
        country_iso2=country_iso2,
        completion=completion.text,
        tokens=completion.tokens,
        finish_reason=completion.finish_reason,
        outcome=outcome,
        pred_country=answer.country if answer else None,
        pred_country_iso2=answer.country_iso2 if answer else None,
        pred_latitude=answer.lat if answer else None,
        pred_longitude=answer.lon if answer else None,
        d_km=scores.d_km,
        geoscore=scores.geoscore,
        format=scores.format,
        country=scores.country,
        dist=scores.dist,
        total=scores.total,
    )


def compute_metrics(
    predictions: Sequence[Prediction], country_weights: Mapping[str, float] | None
) -> dict[str, Any]:
    """Summarizes a run in figures that are valid JSON.

    Args:
        predictions: All rows of the run, in any order, K rows a photo.
        country_weights: Each country's share of the full test set, for `mean_geoscore_weighted`:
            the plain mean is balanced by country and differs from published figures.

    Returns:
        Rates and shares in [0, 1], distances in km, GeoScores in [0, 5000]; None for a figure of
        nothing. `n` counts scored rows, `samples` is K. Transport errors appear in `outcomes`
        alone, and `complete` says that there are none. `median_km` is None where it is infinite:
        at least half miss. `best_of_k` takes each photo's best row, and is None where K is 1.
        `truncated_share` counts every completion that was cut off, with or without an answer.
    """
    rows = [row for row in predictions if row.outcome != "error"]
    outcomes = Counter(row.outcome for row in predictions)
    samples = max(Counter(row.id for row in predictions).values(), default=0)
    named = Counter(row.pred_country_iso2 or row.pred_country for row in rows if row.pred_country)
    top = sorted(((str(name), count) for name, count in named.items()), key=lambda x: (-x[1], x[0]))
    tokens = {f"p{q}": _token_percentile(rows, q) for q in (50, 95)}
    return {
        "n": len(rows),
        "samples": samples,
        "complete": not outcomes["error"],
        "score_version": SCORE_VERSION,
        **{name: _mean(map(value, rows)) for name, value in _MEANS.items()},
        "mean_geoscore_weighted": _weighted_geoscore(rows, country_weights),
        "best_of_k": _best_of_k(rows) if samples > 1 else None,
        "median_km": _finite(np.median([_d_km(row) for row in rows])) if rows else None,
        "acc_at_km": {km: _mean(map(value, rows)) for km, value in _WITHIN.items()},
        "share_over_km": {str(km): _mean(_d_km(row) > km for row in rows) for km in TAIL_RADII_KM},
        "zero_share": _mean(row.total == 0 for row in rows),
        "truncated_share": _mean(row.finish_reason == "length" for row in rows),
        "refusal_rate": _mean(map(_is_refusal, rows)),
        "outcomes": {name: outcomes[name] for name in get_args(Outcome)},
        "pred_country_top10": [list(item) for item in top[:10]],
        "completion_tokens": {**tokens, "max": max((row.tokens for row in rows), default=None)},
        "recommended_max_completion_length": _recommended_cap(tokens["p95"]),
    }


def _mean(values: Iterable[float]) -> float | None:
    array = np.fromiter(values, dtype=np.float64)
    return float(array.mean()) if array.size else None


def _finite(value: float | np.floating[Any]) -> float | None:
    """Turns infinity into None: JSON has no infinity."""
    return float(value) if math.isfinite(value) else None


def _weighted_geoscore(
    rows: Sequence[Prediction], country_weights: Mapping[str, float] | None
) -> float | None:
    """Averages the countries' mean GeoScores by their shares; absent countries do not count."""
    scores: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        scores[row.country_iso2].append(row.geoscore)
    shares = {code: (country_weights or {}).get(code, 0.0) for code in scores}
    total = math.fsum(shares.values())
    if not total:
        return None
    return math.fsum(share * float(np.mean(scores[code])) for code, share in shares.items()) / total


def _best_of_k(rows: Sequence[Prediction]) -> dict[str, float | None]:
    photos = by_photo(rows).values()
    return {
        name: _mean(max(map(_MEANS[name], photo)) for photo in photos)
        for name in ("mean_geoscore", "country_acc")
    }


def _is_refusal(row: Prediction) -> bool:
    return row.format == 0 and _REFUSAL.search(row.completion) is not None


def _token_percentile(rows: Sequence[Prediction], percent: float) -> int | None:
    """Returns the least length that this share of the completions does not exceed."""
    if not rows:
        return None
    return int(np.percentile([row.tokens for row in rows], percent, method="inverted_cdf"))


def _recommended_cap(p95: int | None) -> int | None:
    """Returns p95 with a quarter on top, as the next multiple of 16, at least 32."""
    return None if p95 is None else max(32, math.ceil(p95 * 1.25 / 16) * 16)


@dataclass(frozen=True, slots=True)
class Interval:
    """A paired difference, after minus before, with its bootstrap interval.

    Attributes:
        difference: In the metric's own unit. The three figures can be infinite for a median.
        low: Lower end of the interval.
        high: Upper end of the interval.
        better: Photos on which `after` is better.
        worse: Photos on which it is worse.
        ties: Photos on which both are equal.
    """

    difference: float
    low: float
    high: float
    better: int
    worse: int
    ties: int


def paired_bootstrap(
    before: ArrayLike,
    after: ArrayLike,
    *,
    resamples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
    statistic: Literal["mean", "median"] = "mean",
    lower_is_better: bool = False,
) -> Interval:
    """Estimates how sure the difference of two runs over the same photos is.

    The percentile bootstrap (Efron and Tibshirani 1993, chapter 13) over photos: both runs of a
    photo are drawn together, which cancels how hard the photo is. Memory is bounded.

    Args:
        before: One value a photo, shape (n,).
        after: The other run's values of the same photos in the same order, shape (n,).
        resamples: Bootstrap resamples.
        seed: The same seed gives the same interval.
        confidence: Share of the resamples that the interval holds.
        statistic: What is compared. For a median the values may be infinite.
        lower_is_better: Whether a falling value is the better one; only the counts look at it.

    Raises:
        ValueError: The shapes differ, there is no photo, or a value is NaN, or infinite in a mean.
    """
    before, after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if before.shape != after.shape or before.ndim != 1 or not before.size:
        raise ValueError(f"paired values need one equal shape (n,): {before.shape}, {after.shape}")
    values = np.stack([before, after])
    if np.isnan(values).any() or (statistic == "mean" and np.isinf(values).any()):
        raise ValueError(f"a {statistic} of values that are not finite")

    rng = np.random.default_rng(seed)
    n = before.size
    resampled = np.empty(resamples)
    chunk = max(1, _RESAMPLED_VALUES_AT_ONCE // n)
    for start in range(0, resamples, chunk):
        indices = rng.integers(n, size=(min(chunk, resamples - start), n))
        resampled[start : start + chunk] = _difference(before, after, indices, statistic)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    # Order statistics, no interpolation: that of two infinities is NaN.
    low, high = np.quantile(resampled, tails, method="inverted_cdf")
    rose, fell = int((after > before).sum()), int((after < before).sum())
    return Interval(
        difference=float(_difference(before, after, np.arange(n), statistic)),
        low=float(low),
        high=float(high),
        better=fell if lower_is_better else rose,
        worse=rose if lower_is_better else fell,
        ties=n - rose - fell,
    )


def _difference(
    before: Floats, after: Floats, indices: NDArray[np.int64], statistic: Literal["mean", "median"]
) -> Floats:
    """Returns after minus before over the last axis of the indices."""
    if statistic == "mean":
        return (after - before)[indices].mean(axis=-1)
    old, new = np.median(before[indices], axis=-1), np.median(after[indices], axis=-1)
    with np.errstate(invalid="ignore"):  # two infinite medians are equally bad
        return np.where(old == new, 0.0, new - old)


def verdict(interval: Interval, n: int, *, lower_is_better: bool = False) -> str:
    """Says in words what an interval over n photos allows to say."""
    low, high = interval.low, interval.high
    if lower_is_better:
        low, high = -high, -low
    if n >= MIN_PAIRS and low > 0:
        return "better"
    if n >= MIN_PAIRS and high < 0:
        return "worse"
    return f"not distinguishable at n = {n}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of two runs over the same photos; a row of the report's table.

    Attributes:
        metric: The key in `metrics.json`, with a dot where it is nested: `acc_at_km.25`.
        before: The first run's figure, None where infinite.
        after: The second run's figure, None where infinite.
        difference: See `Interval`; None where infinite, as are `low` and `high`.
        low: See `Interval`.
        high: See `Interval`.
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
    better: int
    worse: int
    ties: int
    n: int
    verdict: str


def paired_comparison(
    before: Sequence[Prediction],
    after: Sequence[Prediction],
    *,
    resamples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
) -> list[Comparison]:
    """Compares two runs photo by photo in every headline metric.

    With K rows a photo each photo counts with its mean (for `median_km` its median) of K.

    Args:
        before: All rows of the first run.
        after: All rows of the second run, in any order.
        resamples: See `paired_bootstrap`, like `seed` and `confidence`.
        seed: See there.
        confidence: See there.

    Raises:
        ValueError: The photos or K differ, there are none, or a run holds transport errors.
    """
    pairs = _aligned(before, after)
    n = len(pairs)

    def compare(metric: str, old: Floats, new: Floats, *, median: bool = False) -> Comparison:
        statistic: Literal["mean", "median"] = "median" if median else "mean"
        interval = paired_bootstrap(
            old,
            new,
            resamples=resamples,
            seed=seed,
            confidence=confidence,
            statistic=statistic,
            lower_is_better=median,
        )
        summary = np.median if median else np.mean
        return Comparison(
            metric,
            _finite(summary(old)),
            _finite(summary(new)),
            _finite(interval.difference),
            _finite(interval.low),
            _finite(interval.high),
            interval.better,
            interval.worse,
            interval.ties,
            n,
            verdict(interval, n, lower_is_better=median),
        )

    def photo_means(value: RowValue) -> tuple[Floats, Floats]:
        means = np.array([[np.mean([*map(value, rows)]) for rows in pair] for pair in pairs])
        return means[:, 0], means[:, 1]

    means = _MEANS | {f"acc_at_km.{km}": value for km, value in _WITHIN.items()}
    medians = np.array([[np.median([*map(_d_km, rows)]) for rows in pair] for pair in pairs])
    return [
        *(compare(metric, *photo_means(value)) for metric, value in means.items()),
        compare("median_km", medians[:, 0], medians[:, 1], median=True),
    ]


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


def by_photo(rows: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    """Groups rows by photo, in the order of ids."""
    photos: dict[str, list[Prediction]] = defaultdict(list)
    for row in rows:
        photos[row.id].append(row)
    return dict(sorted(photos.items()))


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
