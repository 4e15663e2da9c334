"""Whether the spread of a photo's K answers tells how far off their consensus is. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from geoguessr_rl.bootstrap import CONFIDENCE, MIN_PAIRS, RESAMPLED_AT_ONCE, RESAMPLES, Floats
from geoguessr_rl.eval_metrics import answered_places, by_photo, consensus, distance_km, spread_km
from geoguessr_rl.records import Prediction


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
        places = answered_places(samples)
        if len(places) > 1:
            spread.append(spread_km(places))
            error.append(distance_km(consensus(samples)))
    n, left_out = len(spread), len(photos) - len(spread)
    if n < MIN_PAIRS or min(len({*spread}), len({*error})) < 2:
        return Agreement(spread, error, left_out, None, None, None)
    rng = np.random.default_rng(seed)
    once = np.ones((1, n))
    x, y = (_midranks(np.array(values), once) for values in (spread, error))
    resampled, shuffled = np.empty(resamples), np.empty(resamples)
    chunk = max(1, RESAMPLED_AT_ONCE // n)
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
