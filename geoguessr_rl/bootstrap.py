"""How sure a figure over photos is: bootstrap intervals, differences, families of tests. No I/O."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
CONFIDENCE = 0.95
MANY = 20_000  # values, of which 10,000 resamples would take minutes and tell nothing more


# Under six pairs even a unanimous result is chance at 5 % (sign test: 2 / 2^5 > 0.05), while the
# bootstrap draws an interval that is too narrow.
MIN_PAIRS = 6

RESAMPLED_AT_ONCE = 2_000_000
"""Values that are resampled at once: 16 MB an array, however many photos and resamples."""

Floats = NDArray[np.float64]


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
    chunk = max(1, RESAMPLED_AT_ONCE // n)
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


def finite(value: float | np.floating[Any]) -> float | None:
    """Turns infinity into None: JSON has no infinity."""
    return float(value) if math.isfinite(value) else None
