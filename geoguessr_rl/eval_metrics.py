"""Predictions -> metrics. No I/O.

Nothing drops out of a mean because it looks bad: an answer that does not parse scores 0, names no
country, misses at every radius and lies infinitely far away. Only transport errors are left out,
since nobody answered, and they mark the metrics as incomplete.
"""

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from geoguessr_rl.bootstrap import RESAMPLES, Floats, finite, interval_of_mean
from geoguessr_rl.countries import parent_of
from geoguessr_rl.records import Completion, Outcome, Place, Prediction
from geoguessr_rl.reward import SCORE_VERSION, components, haversine_km

ACC_RADII_KM = (1, 25, 200, 750, 2500)  # street, city, region, country, continent
TAIL_RADII_KM = (2500, 5000)

# A heuristic, looked at only where there is no answer to score.
_REFUSAL = re.compile(
    r"\b(?:sorry|as an ai|(?:can ?not|can.?t|unable to|won.?t|will not) "
    r"(?:determine|identify|provide|assist|help|tell|say|answer|be))\b",
    re.IGNORECASE,
)

LEVELS = ("country", "region", "sub_region", "city")
"""What OSV-5M's protocol compares: names of the populated place nearest to the predicted point."""

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


def distance_km(row: Prediction) -> float:
    """Returns the great-circle distance of an answer to the truth; infinity without a place."""
    return math.inf if row.d_km is None else row.d_km


def _right_parent(row: Prediction) -> float:
    code = row.pred_country_iso2
    return float(code is not None and parent_of(code) == parent_of(row.country_iso2))


def _within(km: float) -> RowValue:
    return lambda row: float(distance_km(row) < km)


def _beyond(km: float) -> RowValue:
    return lambda row: float(distance_km(row) > km)


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
MEDIAN_KM = Metric("median_km", distance_km, lower_is_better=True, median=True)


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
    distances = [distance_km(row) for row in rows]
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
        "mean_km": finite(np.mean(distances)) if rows else None,
        "mean_km_answered": _mean(km for km in distances if math.isfinite(km)),
        "median_km": finite(np.median(distances)) if rows else None,
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
    places = answered_places(placed)
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


def answered_places(rows: Iterable[Prediction]) -> list[tuple[float, float]]:
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


def _token_percentile(rows: Sequence[Prediction], percent: float) -> int | None:
    """Returns the least length that this share of the completions does not exceed."""
    if not rows:
        return None
    return int(np.percentile([row.tokens for row in rows], percent, method="inverted_cdf"))


def _recommended_cap(p95: int | None) -> int | None:
    """Returns p95 with a quarter on top, as the next multiple of 16, at least 32."""
    return None if p95 is None else max(32, math.ceil(p95 * 1.25 / 16) * 16)


def by_photo(rows: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    """Groups rows by photo, in the order of ids."""
    photos: dict[str, list[Prediction]] = defaultdict(list)
    for row in rows:
        photos[row.id].append(row)
    return dict(sorted(photos.items()))
