"""What a reward shape would make of answers that exist already: arithmetic only.

GRPO learns from the differences within a group of answers to one photo. For each shape and each set
of weights these functions say how many groups would have none, how large they are, which answer
would be best, and over which distances the curve is too flat to pull. No answer is parsed again:
the parts of a scored row recombine to the reward of any shape. What is better for a country or a
distance is not asked here: that is what the weights say.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoguessr_rl.bootstrap import interval_of_mean
from geoguessr_rl.records import Prediction
from geoguessr_rl.reward import (
    BROAD_SCALE_KM,
    DEFAULT_SHAPE,
    GEOGUESSR_SCALE_KM,
    RewardShape,
    distance_reward,
)

Floats = NDArray[np.float64]

# Rewards that differ by less are one reward: TRL calls a deviation up to 1e-8 zero.
SAME_REWARD = 1e-8
# The curve is flat where coming half as near gains less than this much of the distance reward.
FLAT_GAIN = 0.02
FARTHEST_KM = 20_000.0  # half around the Earth
PUBLISHED = RewardShape(scales_km=(GEOGUESSR_SCALE_KM, BROAD_SCALE_KM))


@dataclass(frozen=True, slots=True)
class Curve:
    """A distance reward at one point of the run.

    Attributes:
        name: As tables show it.
        shape: Its weights do not matter here.
        progress: Share of the run that is done, which only `curriculum` looks at.
    """

    name: str
    shape: RewardShape
    progress: float = 0.0

    def at(self, d_km: float) -> float:
        """Returns the distance reward at a distance in km."""
        return distance_reward(d_km, self.shape, self.progress)


CURVES = (
    Curve("two_scale", DEFAULT_SHAPE),
    Curve("two_scale, 1492.7 and 5000", PUBLISHED),
    Curve("geoscore", RewardShape(name="geoscore")),
    Curve("three_scale", RewardShape(name="three_scale")),
    Curve("piecewise", RewardShape(name="piecewise")),
    Curve("curriculum, start", RewardShape(name="curriculum"), 0.0),
    Curve("curriculum, half", RewardShape(name="curriculum"), 0.5),
    Curve("curriculum, end", RewardShape(name="curriculum"), 1.0),
)

Weights = tuple[float, float, float]  # of format, country and distance
WEIGHTS: dict[str, Weights] = {
    "default": (0.1, 0.3, 0.6),
    "country 0.40": (0.1, 0.4, 0.5),
    "no country": (0.1, 0.0, 0.9),
}


def weights_of(shape: RewardShape) -> Weights:
    """Returns a shape's weights of format, country and distance."""
    return shape.format_weight, shape.country_weight, shape.dist_weight


def with_own(chosen: RewardShape) -> tuple[list[Curve], dict[str, Weights]]:
    """Returns all curves and weight sets, with those of a config where they are others."""
    own = replace(chosen, format_weight=0.1, country_weight=0.3, dist_weight=0.6)
    curves, weights = list(CURVES), dict(WEIGHTS)
    if own not in [curve.shape for curve in curves]:
        stages = (("start", 0.0), ("half", 0.5), ("end", 1.0))
        curves += (
            [Curve(f"your curriculum, {name}", own, progress) for name, progress in stages]
            if own.name == "curriculum"
            else [Curve(f"your {own.name}", own)]
        )
    if weights_of(chosen) not in weights.values():
        weights["your own"] = weights_of(chosen)
    return curves, weights


@dataclass(frozen=True, slots=True)
class Answers:
    """The parts of scored answers, one row a photo and one column a sample.

    Attributes:
        format: 1 where there is an answer.
        country: 1 where its country is right.
        d_km: Distance; NaN without an answer.
    """

    format: Floats
    country: Floats
    d_km: Floats

    @property
    def distances(self) -> Floats:
        """Those of all answers, one after the other."""
        return self.d_km[~np.isnan(self.d_km)]


def answers_of(groups: Mapping[str, Sequence[Prediction]]) -> Answers:
    """Returns the parts of each photo's rows; every photo must have as many."""

    def table(name: str) -> Floats:
        return np.array([[getattr(row, name) for row in rows] for rows in groups.values()], float)

    return Answers(table("format"), table("country"), table("d_km"))


def distance_rewards(answers: Answers, curve: Curve) -> Floats:
    """Returns each answer's distance reward; 0 without an answer."""
    rewards = np.zeros(answers.d_km.shape)
    rewards[~np.isnan(answers.d_km)] = [curve.at(d_km) for d_km in answers.distances]
    return rewards


def totals(answers: Answers, dist: Floats, weights: Weights) -> Floats:
    """Returns each answer's reward as `reward.components` adds it up."""
    of_format, of_country, of_dist = weights
    total = of_format + of_country * answers.country + of_dist * dist
    return answers.format * total / (of_format + of_country + of_dist)


def zero_spread(rewards: Floats, group: int) -> Floats:
    """Returns for each photo how likely `group` answers all earn the same, from the K at hand.

    Up to K answers are drawn from the K without putting back, which expects the true share. More
    are drawn with putting back: a photo whose K answers earn the same then always counts, though
    another answer might have differed, so that the mean over photos is an upper end.
    """
    n, k = rewards.shape
    values = np.round(rewards / SAME_REWARD)
    # How many of the K earn what each one earns; each reward's chance is shared by its owners.
    equal = (values[:, :, None] == values[:, None, :]).sum(axis=2)
    if group <= k:
        chance = np.array([math.comb(count, group) / math.comb(k, group) for count in range(k + 1)])
    else:
        chance = (np.arange(k + 1) / k) ** group
    return np.asarray((chance[equal] / equal).sum(axis=1), float).reshape(n)


def spreads(rewards: Floats) -> Floats:
    """Returns each group's sample deviation: what TRL divides a group's advantages by."""
    return np.asarray(rewards.std(axis=1, ddof=1), float)


def best_changes(rewards: Floats, reference: Floats) -> Floats:
    """Returns 1 for each group in which no best answer is one of the reference's best."""

    def best(values: Floats) -> NDArray[np.bool_]:
        return np.asarray(values >= values.max(axis=1, keepdims=True) - SAME_REWARD)

    return (~(best(rewards) & best(reference)).any(axis=1)).astype(float)


def is_flat(curve: Curve, d_km: float) -> bool:
    """Whether an answer that comes half as near gains less than `FLAT_GAIN`."""
    return curve.at(d_km / 2) - curve.at(d_km) < FLAT_GAIN


def flat_ranges(curve: Curve, grid: Sequence[float]) -> list[tuple[float, float]]:
    """Returns the stretches of a grid of distances over which the curve is flat, ends included."""
    ranges: list[tuple[float, float]] = []
    before = False
    for d_km in grid:
        flat = is_flat(curve, d_km)
        if flat:
            ranges.append((ranges.pop()[0] if before else d_km, d_km))
        before = flat
    return ranges


@dataclass(frozen=True, slots=True)
class Figures:
    """What one curve with one set of weights makes of the answers; one value a photo.

    Attributes:
        zero: See `zero_spread`, for groups of the size that training uses.
        zero_seen: The same for the groups of K at hand, where it is 0 or 1.
        spread: See `spreads`.
        changed: See `best_changes`, against the default shape with its own weights.
    """

    zero: Floats
    zero_seen: Floats
    spread: Floats
    changed: Floats

    def means(self) -> dict[str, float]:
        """Returns the mean of each over the photos."""
        return {name: float(getattr(self, name).mean()) for name in self.__slots__}


def measure(
    answers: Answers, curves: Sequence[Curve], weights: Mapping[str, Weights], group: int
) -> dict[str, dict[str, Figures]]:
    """Returns the figures of every curve under every set of weights: first the set, then the curve.

    Args:
        answers: What the base model answered.
        curves: See `with_own`.
        weights: See `with_own`.
        group: Answers a photo in training.
    """
    dist = {curve.name: distance_rewards(answers, curve) for curve in curves}
    default = distance_rewards(answers, Curve("default", DEFAULT_SHAPE))
    reference = totals(answers, default, weights_of(DEFAULT_SHAPE))
    found: dict[str, dict[str, Figures]] = {}
    for name, one in weights.items():
        rewards = {curve: totals(answers, values, one) for curve, values in dist.items()}
        found[name] = {
            curve: Figures(
                zero=zero_spread(values, group),
                zero_seen=zero_spread(values, values.shape[1]),
                spread=spreads(values),
                changed=best_changes(values, reference),
            )
            for curve, values in rewards.items()
        }
    return found


# What a recommendation goes by, in this order: figure, its name, 1 where lower is better, else -1.
CRITERIA = (("zero", "zero-spread share", 1), ("spread", "mean spread", -1))


def recommend(found: Mapping[str, Figures], candidates: Sequence[str]) -> tuple[str, str]:
    """Returns the curve that gives the most to learn from, and why in words.

    The rule: the lowest zero-spread share, then the largest mean spread. Curves that chance alone
    may part from the best stay in: the 95 % interval of their difference over photos holds 0.

    Args:
        found: Figures by curve, under one set of weights.
        candidates: The curves to choose among; the first one is kept while it stays in.
    """
    kept, left = candidates[0], list(candidates)
    for name, words, sign in CRITERIA:
        values = {curve: sign * getattr(found[curve], name) for curve in left}
        best = min(left, key=lambda curve: float(values[curve].mean()))
        left = [curve for curve in left if not _parted(values[curve] - values[best])]
        if kept not in left:
            means = [float(getattr(found[curve], name).mean()) for curve in (best, kept)]
            what = "lowest" if sign > 0 else "largest"
            return best, f"the {what} {words}, {means[0]:.3f} against {means[1]:.3f} with {kept}"
    return kept, "nothing that another shape betters by more than chance"


def _parted(differences: Floats) -> bool:
    """Whether a mean difference over photos is more than chance."""
    if not differences.any():  # most pairs of curves leave the same groups without spread
        return False
    ends = interval_of_mean(differences)
    return ends is not None and (ends[0] > 0 or ends[1] < 0)


def histogram(distances: Floats, edges: Sequence[float]) -> list[int]:
    """Returns how many distances lie between two edges; nearer or farther ones at the ends."""
    counts, _ = np.histogram(np.clip(distances, edges[0], edges[-1]), edges)
    return [int(count) for count in counts]


def plain(found: Mapping[str, Mapping[str, Figures]]) -> dict[str, Any]:
    """Returns the means as JSON holds them."""
    return {
        weights: {curve: figures.means() for curve, figures in curves.items()}
        for weights, curves in found.items()
    }
