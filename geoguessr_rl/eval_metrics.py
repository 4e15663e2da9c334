"""Predictions -> metrics, and two runs compared photo by photo. No I/O.

Nothing drops out of a mean because it looks bad: an answer that does not parse scores 0, names no
country, misses at every radius and lies infinitely far away. Only transport errors are left out,
since nobody answered, and they mark the metrics as incomplete. Whether two runs may be compared at
all (same sampling, same image policy) is the caller's question.
"""

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geoguessr_rl.countries import parent_of
from geoguessr_rl.records import Completion, Outcome, Place, Prediction
from geoguessr_rl.reward import SCORE_VERSION, components, haversine_km

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

LEVELS = ("country", "region", "sub_region", "city")
"""What OSV-5M's protocol compares: names of the populated place nearest to the predicted point."""

RESAMPLES = 10_000
CONFIDENCE = 0.95
MANY = 20_000  # values, of which 10,000 resamples would take minutes and tell nothing more

Floats = NDArray[np.float64]
RowValue = Callable[[Prediction], float | None]
Hits = Mapping[tuple[str, int], Mapping[str, float | None]]
"""By (photo id, sample): for each of `LEVELS` and `country_parent` 1, 0, or None without a label;
see `place_hits`."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that is a mean (or the median) of one value a row.

    Attributes:
        key: Its key in `metrics.json`, with a dot where it is nested: `acc_at_km.25`.
        value: A row's value; None leaves the row out.
        lower_is_better: Whether a falling figure is the better one.
        median: Whether it is a median; values may then be infinite.
    """

    key: str
    value: RowValue
    lower_is_better: bool = False
    median: bool = False


def _d_km(row: Prediction) -> float:
    return math.inf if row.d_km is None else row.d_km


def _right_parent(row: Prediction) -> float:
    code = row.pred_country_iso2
    return float(code is not None and parent_of(code) == parent_of(row.country_iso2))


def _within(km: float) -> RowValue:
    return lambda row: float(_d_km(row) < km)


def _beyond(km: float) -> RowValue:
    return lambda row: float(_d_km(row) > km)


def _is_refusal(row: Prediction) -> float:
    refuses = row.finish_reason == "refusal" or _REFUSAL.search(row.completion) is not None
    return float(row.format == 0 and refuses)


SCORES = (
    Metric("mean_geoscore", lambda row: row.geoscore),
    Metric("country_acc", lambda row: row.country),
    Metric("country_acc_parent", _right_parent),
)
RATES = (
    *(Metric(f"acc_at_km.{km}", _within(km)) for km in ACC_RADII_KM),
    *(Metric(f"share_over_km.{km}", _beyond(km), lower_is_better=True) for km in TAIL_RADII_KM),
    Metric("format_rate", lambda row: row.format),
    Metric("zero_share", lambda row: float(row.total == 0), lower_is_better=True),
    Metric(
        "truncated_share", lambda row: float(row.finish_reason == "length"), lower_is_better=True
    ),
    Metric("refusal_rate", _is_refusal, lower_is_better=True),
)
MEDIAN_KM = Metric("median_km", _d_km, lower_is_better=True, median=True)


def coordinate_metrics(hits: Hits) -> list[Metric]:
    """Returns the metrics that go by the predicted point and not by the answer's text."""

    def of(level: str) -> RowValue:
        return lambda row: hits[row.id, row.sample][level]

    return [
        Metric("country_acc_coords", of("country")),
        Metric("country_acc_coords_parent", of("country_parent")),
        *(Metric(f"{level}_acc", of(level)) for level in LEVELS[1:]),
    ]


def weighted_geoscore(rows: Sequence[Prediction], share: Mapping[str, float]) -> Metric | None:
    """Returns the mean GeoScore that counts each country by its share; absent ones do not count.

    It is the mean over photos of GeoScore times a weight that depends on the country alone.

    Args:
        rows: The rows that it will be applied to.
        share: Each country's share of the full test set.

    Returns:
        The metric, or None when no row's country has a share.
    """
    counts = Counter(row.country_iso2 for row in rows)
    total = math.fsum(share.get(code, 0.0) for code in counts)
    if not total:
        return None
    n = len(rows)
    weights = {code: n * share.get(code, 0.0) / total / count for code, count in counts.items()}
    return Metric("mean_geoscore_weighted", lambda row: weights[row.country_iso2] * row.geoscore)


def place_hits(true: Place, guess: Place | None) -> dict[str, float | None]:
    """Compares two places by OSV-5M's official protocol.

    A name counts with those above it: Springfield in another state is a miss. A level without a
    label is left out.

    Args:
        true: The label.
        guess: The populated place nearest to the predicted point; None without a point.
    """
    hits: dict[str, float | None] = {}
    labels = (true.country_iso2, true.region, true.sub_region, true.city)
    names = guess and (guess.country_iso2, guess.region, guess.sub_region, guess.city)
    for depth, level in enumerate(LEVELS, start=1):
        if not labels[depth - 1]:
            hits[level] = None
            continue
        # A missing name in between is one that neither has.
        above = [[name or "" for name in side[:depth]] for side in (labels, names) if side]
        hits[level] = float(len(above) == 2 and above[0] == above[1])
    code = guess.country_iso2 if guess else None
    same = code is not None and parent_of(code) == parent_of(true.country_iso2)
    return hits | {"country_parent": float(same)}


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
        prompt_tokens=completion.prompt_tokens,
    )


def compute_metrics(
    predictions: Sequence[Prediction],
    country_weights: Mapping[str, float] | None,
    hits: Hits | None = None,
    *,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """Summarizes a run in figures that are valid JSON.

    Args:
        predictions: All rows of the run, in any order, K rows a photo.
        country_weights: Each country's share of the full test set, for `mean_geoscore_weighted`:
            the plain mean is balanced by country and differs from published figures.
        hits: Which administrative names the predicted points meet, where that was looked up.
        resamples: For the intervals.

    Returns:
        Rates and shares in [0, 1], distances in km, GeoScores in [0, 5000]; None for a figure of
        nothing. `n` counts scored rows, `samples` is K. Transport errors appear in `outcomes`
        alone, and `complete` says that there are none. `mean_km` and `median_km` are None where
        they are infinite: when one answer, and when half of them, miss; `mean_km_answered` is the
        mean of those that name a place. `of_k` is None where K is 1, and else gives the mean of
        each photo's rows, the best of them, and the one nearest to the others. `intervals` hold
        95 % bootstrap intervals over photos. `truncated_share` counts every completion that was
        cut off, with or without an answer.
    """
    rows = [row for row in predictions if row.outcome != "error"]
    outcomes = Counter(row.outcome for row in predictions)
    samples = max(Counter(row.id for row in predictions).values(), default=0)
    named = Counter(row.pred_country_iso2 or row.pred_country for row in rows if row.pred_country)
    top = sorted(((str(name), count) for name, count in named.items()), key=lambda x: (-x[1], x[0]))
    tokens = {f"p{q}": _token_percentile(rows, q) for q in (50, 95)}
    weighted = weighted_geoscore(rows, country_weights or {})
    distances = [_d_km(row) for row in rows]
    metrics: dict[str, Any] = {
        "n": len(rows),
        "samples": samples,
        "complete": not outcomes["error"],
        "score_version": SCORE_VERSION,
        **{metric.key: _mean(map(metric.value, rows)) for metric in SCORES},
        **{
            metric.key: _mean(map(metric.value, rows) if hits is not None else ())
            for metric in coordinate_metrics(hits or {})
        },
        "mean_geoscore_weighted": weighted and _mean(map(weighted.value, rows)),
        "of_k": _of_k(rows, resamples) if samples > 1 else None,
        "mean_km": _finite(np.mean(distances)) if rows else None,
        "mean_km_answered": _mean(km for km in distances if math.isfinite(km)),
        "median_km": _finite(np.median(distances)) if rows else None,
        "intervals": {
            metric.key: interval_of_mean(_photo_means(by_photo(rows), metric.value), resamples)
            for metric in SCORES[:2]
        },
    }
    for metric in RATES:
        key, _, radius = metric.key.partition(".")
        value = _mean(map(metric.value, rows))
        if radius:
            metrics.setdefault(key, {})[radius] = value
        else:
            metrics[key] = value
    return {
        **metrics,
        "outcomes": {name: outcomes[name] for name in get_args(Outcome)},
        "pred_country_top10": [list(item) for item in top[:10]],
        "completion_tokens": {**tokens, "max": max((row.tokens for row in rows), default=None)},
        "recommended_max_completion_length": _recommended_cap(tokens["p95"]),
    }


def look_up(metrics: Mapping[str, Any], key: str) -> Any:
    """Returns the figure of a `Metric.key` in what `compute_metrics` gives."""
    for part in key.split("."):
        metrics = metrics[part]
    return metrics


def _mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values that there are."""
    array = np.fromiter((value for value in values if value is not None), dtype=np.float64)
    return float(array.mean()) if array.size else None


def _finite(value: float | np.floating[Any]) -> float | None:
    """Turns infinity into None: JSON has no infinity."""
    return float(value) if math.isfinite(value) else None


def _photo_means(photos: Mapping[str, Sequence[Prediction]], value: RowValue) -> Floats:
    """Returns each photo's mean of a value over its rows, shape (photos,); NaN without any."""
    found = ([v for v in map(value, rows) if v is not None] for rows in photos.values())
    means = (sum(values) / len(values) if values else math.nan for values in found)
    return np.fromiter(means, dtype=np.float64)


def consensus(rows: Sequence[Prediction]) -> Prediction:
    """Returns the answer of one photo with the least summed great-circle distance to the others.

    An answer without a place has no say; of equals the first one counts. Without any place it is
    the first row.
    """
    placed = [row for row in rows if row.pred_latitude is not None]
    places = _places(placed)
    return placed[central(places)] if places else rows[0]


def central(places: Sequence[tuple[float, float]]) -> int:
    """Returns which (latitude, longitude) has the least summed great-circle distance to the others.

    Of equals it is the first.
    """
    far = [math.fsum(haversine_km(*here, *there) for there in places) for here in places]
    return far.index(min(far))


def spread_km(places: Sequence[tuple[float, float]]) -> float:
    """Returns the median great-circle distance between two of at least two places."""
    pairs = [haversine_km(*a, *b) for i, a in enumerate(places) for b in places[:i]]
    return statistics.median(pairs)


def _places(rows: Iterable[Prediction]) -> list[tuple[float, float]]:
    """Returns where the answers that give a place are."""
    return [
        (row.pred_latitude, row.pred_longitude)
        for row in rows
        if row.pred_latitude is not None and row.pred_longitude is not None
    ]


def _of_k(rows: Sequence[Prediction], resamples: int) -> dict[str, Any]:
    """Returns mean-of-K, best-of-K and consensus-of-K, each with its interval over photos."""
    photos = by_photo(rows)
    agreed = {key: [consensus(samples)] for key, samples in photos.items()}
    figures: dict[str, Any] = {}
    for metric in SCORES[:2]:
        best = [max(metric.value(row) or 0.0 for row in samples) for samples in photos.values()]
        for name, values in (
            ("mean", _photo_means(photos, metric.value)),
            ("best", np.array(best, dtype=np.float64)),
            ("consensus", _photo_means(agreed, metric.value)),
        ):
            figures.setdefault(name, {})[metric.key] = {
                "value": _mean(values),
                "interval": interval_of_mean(values, resamples),
            }
    return figures


def interval_of_mean(
    values: ArrayLike, resamples: int = RESAMPLES, *, seed: int = 0, confidence: float = CONFIDENCE
) -> list[float] | None:
    """Returns the percentile bootstrap interval of a mean; None without values.

    Beyond `MANY` values it is that of the normal distribution, to which the bootstrap of a mean
    has converged.

    Args:
        values: One a photo, shape (n,).
        resamples: Bootstrap resamples.
        seed: The same seed gives the same interval.
        confidence: Share of the resamples that the interval holds.
    """
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        return None
    if array.size > MANY:
        half = statistics.NormalDist().inv_cdf((1 + confidence) / 2) * array.std()
        half /= math.sqrt(array.size)
        return [float(array.mean() - half), float(array.mean() + half)]
    zeros = np.zeros_like(array)
    interval = paired_bootstrap(zeros, array, resamples=resamples, seed=seed, confidence=confidence)
    return [interval.low, interval.high]


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
        p: Two-sided bootstrap p-value of no difference: twice the smaller share of resamples on
            one side of zero, zero included, one resample counted on top.
        better: Photos on which `after` is better.
        worse: Photos on which it is worse.
        ties: Photos on which both are equal.
    """

    difference: float
    low: float
    high: float
    p: float
    better: int
    worse: int
    ties: int


def paired_bootstrap(
    before: ArrayLike,
    after: ArrayLike,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
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
    tails = [round((1 - confidence) / 2, 12), round((1 + confidence) / 2, 12)]
    # Order statistics, no interpolation: that of two infinities is NaN.
    low, high = np.quantile(resampled, tails, method="inverted_cdf")
    rose, fell = int((after > before).sum()), int((after < before).sum())
    sides = [int((resampled <= 0).sum()), int((resampled >= 0).sum())]
    return Interval(
        difference=float(_difference(before, after, np.arange(n), statistic)),
        low=float(low),
        high=float(high),
        p=min(1.0, 2 * (1 + min(sides)) / (1 + resamples)),
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


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusts the p-values of a family of tests, so that chance finds one in 5 % of families.

    The step-down procedure of Holm (1979): the smallest counts m times, the next m - 1 times, and
    none less than one before it.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def verdict(difference: float, p: float, n: int, *, lower_is_better: bool = False) -> str:
    """Says in words what a difference over n photos allows to say.

    Args:
        difference: After minus before.
        p: The p-value, adjusted where it is one of a family.
        n: Photos.
        lower_is_better: Whether a falling figure is the better one.
    """
    if n < MIN_PAIRS or p > 1 - CONFIDENCE or difference == 0:
        return f"not distinguishable at n = {n}"
    return "better" if (difference < 0) == lower_is_better else "worse"


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
        _finite(summary(values[:, 0])),
        _finite(summary(values[:, 1])),
        _finite(interval.difference),
        _finite(interval.low),
        _finite(interval.high),
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


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether the spread of a photo's K answers tells how far off their consensus is.

    Attributes:
        spread: Median great-circle distance between two answers in km, one a photo.
        error: Distance of the `consensus` to the truth in km, of the same photos.
        left_out: Photos of which fewer than two answers give a place.
        correlation: Spearman's rank correlation of both; None under `MIN_PAIRS` photos, or where
            one of them does not vary, as are the intervals.
        interval: Its 95 % bootstrap interval over photos.
        shuffled: Where 95 % of the correlations lie when the spreads change photos at random.
    """

    spread: list[float]
    error: list[float]
    left_out: int
    correlation: float | None
    interval: tuple[float, float] | None
    shuffled: tuple[float, float] | None


def agreement(
    rows: Sequence[Prediction], *, resamples: int = RESAMPLES, seed: int = 0
) -> Agreement:
    """Holds the spread of each photo's answers against the error of their consensus.

    Args:
        rows: All rows of a run, two or more a photo.
        resamples: Of the bootstrap, and as many shuffles.
        seed: The same seed gives the same intervals.
    """
    spread, error, photos = [], [], by_photo(rows)
    for samples in photos.values():
        places = _places(samples)
        if len(places) > 1:
            spread.append(spread_km(places))
            error.append(_d_km(consensus(samples)))
    n, left_out = len(spread), len(photos) - len(spread)
    if n < MIN_PAIRS or min(len({*spread}), len({*error})) < 2:
        return Agreement(spread, error, left_out, None, None, None)
    rng = np.random.default_rng(seed)
    once = np.ones((1, n))
    x, y = (_midranks(np.array(values), once) for values in (spread, error))
    resampled, shuffled = np.empty(resamples), np.empty(resamples)
    chunk = max(1, _RESAMPLED_VALUES_AT_ONCE // n)
    for start in range(0, resamples, chunk):
        here = slice(start, min(start + chunk, resamples))
        size = here.stop - start
        weights = rng.multinomial(n, np.full(n, 1 / n), size=size).astype(np.float64)
        here_x, here_y = (_midranks(np.array(values), weights) for values in (spread, error))
        resampled[here] = _correlation(here_x, here_y, weights)
        mixed = rng.permuted(np.repeat(x, size, axis=0), axis=1)
        shuffled[here] = _correlation(mixed, y, once)
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(resampled, tails, method="inverted_cdf")
    below, above = np.quantile(shuffled, tails, method="inverted_cdf")
    return Agreement(
        spread,
        error,
        left_out,
        float(_correlation(x, y, once)[0]),
        (float(low), float(high)),
        (float(below), float(above)),
    )


def _midranks(values: Floats, weights: Floats) -> Floats:
    """Returns the ranks of values of which each counts `weights` times, shape (r, n) like these.

    Equal values share the mean of their ranks, as in `scipy.stats.rankdata`.
    """
    _, first, place = np.unique(np.sort(values), return_index=True, return_inverse=True)
    order = np.argsort(values, kind="stable")
    counts = np.add.reduceat(weights[:, order], first, axis=1)
    ranks = np.empty_like(weights)
    ranks[:, order] = (np.cumsum(counts, axis=1) - counts / 2 + 0.5)[:, place]
    return ranks


def _correlation(x: Floats, y: Floats, weights: Floats) -> Floats:
    """Returns Pearson's correlation of each row, weighted; 0 where one side does not vary."""
    n = weights.sum(axis=1, keepdims=True)
    dx, dy = (side - (weights * side).sum(axis=1, keepdims=True) / n for side in (x, y))
    squares = (weights * dx**2).sum(axis=1) * (weights * dy**2).sum(axis=1)
    products = (weights * dx * dy).sum(axis=1)
    return np.divide(products, np.sqrt(squares), out=np.zeros_like(products), where=squares > 0)
