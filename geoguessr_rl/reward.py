"""What an answer is worth: distance, GeoScore, reward, and the functions that TRL calls.

`components` is the one scoring path. GRPO rollouts, the filter, evaluation and the demo all score
with it; only rollouts pass another shape than the default. Bad text from the model scores zero; bad
truth from us raises, because a bug that scores zero looks like a model that cannot learn.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

from geoguessr_rl.parsing import ParsedAnswer, parse_answer

SCORE_VERSION = "1"
"""Version of the scoring rules: raise it when any score of any completion changes."""

EARTH_RADIUS_KM = 6371.0088  # the mean radius R1 of the WGS 84 ellipsoid (IUGG)
GEOGUESSR_SCALE_KM = 1492.7  # GeoGuessr's world map
GEOSCORE_MAX = 5000.0
FINE_SCALE_KM = 250.0  # keeps a slope within a country, where GeoScore is nearly flat
BROAD_SCALE_KM = 5000.0  # keeps a slope on the wrong continent

W_FORMAT = 0.10
W_COUNTRY = 0.30
W_DIST = 0.60

ShapeName = Literal["two_scale", "geoscore", "three_scale", "piecewise", "curriculum"]
SHAPE_NAMES: tuple[ShapeName, ...] = get_args(ShapeName)

# The parameters that each shape takes, with their defaults.
_DEFAULTS: dict[ShapeName, dict[str, tuple[Any, ...]]] = {
    "two_scale": {
        "scales_km": (GEOGUESSR_SCALE_KM, FINE_SCALE_KM),
        "scale_weights": (0.5, 0.5),
    },
    "geoscore": {},
    "three_scale": {
        "scales_km": (FINE_SCALE_KM, GEOGUESSR_SCALE_KM, BROAD_SCALE_KM),
        "scale_weights": (1 / 3, 1 / 3, 1 / 3),
    },
    "piecewise": {"knots": ((0.0, 1.0), (750.0, 0.5), (3000.0, 0.2), (20_000.0, 0.0))},
    "curriculum": {"scales_km": (2000.0, 25.0)},  # at the first and at the last step
}

# A chat message, or one part of a message's content.
CompletionLike = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RewardShape:
    """How distance becomes reward, and how much each component counts.

    Every accepted shape gives exactly 1 to a perfect answer, never rises with distance, and gives
    any valid guess more than no guess, because `format_weight` is positive.

    Attributes:
        name: `two_scale` and `three_scale` average exponentials, `geoscore` is one alone,
            `piecewise` joins knots by straight lines, `curriculum` is one exponential whose scale
            shrinks over the run by a constant factor a step.
        scales_km: The exponentials' scales; for `curriculum` the first and the last one. Empty
            means the shape's defaults.
        scale_weights: One weight a scale, for `two_scale` and `three_scale`. Empty means equal.
        knots: Points (km, reward) for `piecewise`. Empty means the default.
        format_weight: Weight of an answer that parses.
        country_weight: Weight of the right country.
        dist_weight: Weight of the distance reward.

    Raises:
        ValueError: A value that the shape does not take. The message names the valid ones.
    """

    name: ShapeName = "two_scale"
    scales_km: tuple[float, ...] = ()
    scale_weights: tuple[float, ...] = ()
    knots: tuple[tuple[float, float], ...] = ()
    format_weight: float = W_FORMAT
    country_weight: float = W_COUNTRY
    dist_weight: float = W_DIST

    def __post_init__(self) -> None:
        """Fills in the shape's defaults, then checks every value."""
        if self.name not in SHAPE_NAMES:
            raise ValueError(f"reward shape {self.name!r}: name one of {', '.join(SHAPE_NAMES)}")
        defaults = _DEFAULTS[self.name]
        for field in ("scales_km", "scale_weights", "knots"):
            given = getattr(self, field)
            if given and field not in defaults:
                raise ValueError(
                    f"reward shape {self.name!r} takes {' and '.join(defaults) or 'nothing'}, "
                    f"not {field}"
                )
            # Tuples all the way down: a YAML file gives lists.
            value = tuple(tuple(v) if field == "knots" else v for v in given)
            object.__setattr__(self, field, value or defaults.get(field, ()))
        if "scales_km" in defaults:
            _check_scales(self.name, self.scales_km)
        if "scale_weights" in defaults:
            _check_scale_weights(self.scales_km, self.scale_weights)
        if "knots" in defaults:
            _check_knots(self.knots)
        _check_component_weights(self.format_weight, self.country_weight, self.dist_weight)


def _check_scales(name: ShapeName, scales: Sequence[float]) -> None:
    default = _DEFAULTS[name]["scales_km"]
    if len(scales) != len(default) or not all(0 < scale < math.inf for scale in scales):
        raise ValueError(
            f"scales_km {list(scales)}: {name} takes {len(default)} finite positive scales, "
            f"for example {list(default)}"
        )
    if name == "curriculum" and scales[0] < scales[1]:
        raise ValueError(f"scales_km {list(scales)}: a curriculum takes the larger scale first")


def _check_scale_weights(scales: Sequence[float], weights: Sequence[float]) -> None:
    if len(weights) != len(scales) or not all(w > 0 for w in weights) or not _sum_to_1(weights):
        raise ValueError(
            f"scale_weights {list(weights)}: give {len(scales)} positive weights with sum 1"
        )


def _check_knots(knots: Sequence[tuple[float, float]]) -> None:
    if not (
        len(knots) > 1
        and knots[0] == (0, 1)
        and all(
            km1 < km2 < math.inf and 0 <= reward2 <= reward1
            for (km1, reward1), (km2, reward2) in pairwise(knots)
        )
    ):
        raise ValueError(
            f"knots {[list(knot) for knot in knots]}: give two or more (km, reward), (0, 1) first, "
            "with finite rising km and rewards in [0, 1] that never rise"
        )


def _check_component_weights(*weights: float) -> None:
    if not (weights[0] > 0 and all(w >= 0 for w in weights) and _sum_to_1(weights)):
        raise ValueError(
            f"weights of format, country and dist {list(weights)}: give a positive one for format, "
            "so that any valid guess beats no guess, none negative, and their sum 1"
        )


def _sum_to_1(weights: Sequence[float]) -> bool:
    return math.isclose(math.fsum(weights), 1.0, abs_tol=1e-6)


DEFAULT_SHAPE = RewardShape()
"""The shape of every reported number."""


class Components(NamedTuple):
    """The scores of one completion.

    Attributes:
        format: 1.0 where the completion holds an answer, else 0.0.
        country: 1.0 where the answer's country is the photo's, else 0.0.
        dist: The distance reward in [0, 1].
        total: The weighted mean of the three in [0, 1]: what GRPO maximizes.
        d_km: Great-circle distance; None without an answer.
        geoscore: GeoScore in [0, 5000]; 0 without an answer.
        answer: What was scored, so that nobody parses twice.
    """

    format: float
    country: float
    dist: float
    total: float
    d_km: float | None
    geoscore: float
    answer: ParsedAnswer | None


NO_ANSWER = Components(0.0, 0.0, 0.0, 0.0, None, 0.0, None)


def haversine_km(lat1: float, lon1: float, lat2: float, lon2: float) -> float:
    """Returns the great-circle distance between two points in decimal degrees, in km.

    The haversine formula on a sphere of `EARTH_RADIUS_KM`: within about 0.5 % of the ellipsoid.
    """
    phi1, phi2 = math.radians(lat1), math.radians(lat2)
    half_dlat = (phi2 - phi1) / 2
    half_dlon = math.radians(lon2 - lon1) / 2
    h = math.sin(half_dlat) ** 2 + math.cos(phi1) * math.cos(phi2) * math.sin(half_dlon) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(min(1.0, math.sqrt(h)))  # h can round to above 1


def geoscore(d_km: float) -> float:
    """Returns GeoGuessr's world-map score in (0, 5000] for a distance in km.

    5000 exp(-d / 1492.7): PIGEON (Haas et al., CVPR 2024) and OSV-5M (Astruc et al., CVPR 2024).
    """
    return GEOSCORE_MAX * math.exp(-d_km / GEOGUESSR_SCALE_KM)


def distance_reward(
    d_km: float, shape: RewardShape = DEFAULT_SHAPE, progress: float = 0.0
) -> float:
    """Returns the distance reward in [0, 1]: 1 at 0 km, and never rising with distance.

    Args:
        d_km: Distance in km, not negative.
        shape: The curve. The default is 0.5 exp(-d / 1492.7) + 0.5 exp(-d / 250).
        progress: Share of the run that is done, in [0, 1]; only `curriculum` looks at it.
    """
    if shape.name == "geoscore":
        return math.exp(-d_km / GEOGUESSR_SCALE_KM)
    if shape.name == "piecewise":
        return _interpolate(d_km, shape.knots)
    if shape.name == "curriculum":
        return math.exp(-d_km / curriculum_scale_km(shape, progress))
    # Divided by the weights' own sum, so that rounding cannot move a perfect answer off 1.
    terms = zip(shape.scale_weights, shape.scales_km, strict=True)
    return sum(w * math.exp(-d_km / scale) for w, scale in terms) / sum(shape.scale_weights)


def curriculum_scale_km(shape: RewardShape, progress: float) -> float:
    """Returns a curriculum's scale in km; see `distance_reward` for the progress."""
    first, last = shape.scales_km
    done = min(1.0, max(0.0, progress))
    return first ** (1 - done) * last**done


def _interpolate(d_km: float, knots: Sequence[tuple[float, float]]) -> float:
    """Reads the line through the knots; beyond the last knot its reward holds."""
    for (km1, reward1), (km2, reward2) in pairwise(knots):
        if d_km <= km2:
            share = (d_km - km1) / (km2 - km1)
            return reward1 * (1 - share) + reward2 * share
    return knots[-1][1]


def completion_text(completion: CompletionLike) -> str:
    """Returns the text of a plain string, a list of messages, or a list of content parts.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(completion, str):
        return completion
    return "".join(_part_text(part) for part in completion)


def _part_text(part: Mapping[str, Any]) -> str:
    if not isinstance(part, Mapping):
        raise TypeError(f"a completion is text, messages or parts, not a list of {type(part)}")
    if "content" in part:  # a message; an API writes null where the model said nothing
        return completion_text(part["content"] or "")
    return part.get("text") or ""  # other parts, such as images, hold no text


def components(
    completion: CompletionLike,
    latitude: float,
    longitude: float,
    country_iso2: str,
    shape: RewardShape = DEFAULT_SHAPE,
    progress: float = 0.0,
) -> Components:
    """Scores one completion against the photo's true place.

    Args:
        completion: See `completion_text`.
        latitude: True latitude in decimal degrees.
        longitude: True longitude in decimal degrees.
        country_iso2: True country, alpha-2.
        shape: The reward's shape; reported numbers use the default.
        progress: See `distance_reward`.

    Raises:
        ValueError: The truth is out of range, NaN or empty.
        TypeError: The truth is None.
    """
    if not (abs(latitude) <= 90 and abs(longitude) <= 180 and country_iso2):
        raise ValueError(f"no true place: {latitude=}, {longitude=}, {country_iso2=}")
    answer = parse_answer(completion_text(completion))
    if answer is None:
        return NO_ANSWER
    d_km = haversine_km(answer.lat, answer.lon, latitude, longitude)
    country = float(answer.country_iso2 == country_iso2)
    dist = distance_reward(d_km, shape, progress)
    weights = shape.format_weight, shape.country_weight, shape.dist_weight
    total = weights[0] + weights[1] * country + weights[2] * dist
    # The weights' sum as above: 1 up to rounding, and exactly what a perfect answer has earned.
    total /= weights[0] + weights[1] + weights[2]
    return Components(1.0, country, dist, total, d_km, geoscore(d_km), answer)


def _said(answer: ParsedAnswer | None) -> str:
    """Returns the answered country's code, or the name where it has none; empty without answer."""
    return "" if answer is None else answer.country_iso2 or answer.country


RewardFunction = Callable[..., list[float]]


def reward_functions(shape: RewardShape = DEFAULT_SHAPE) -> list[RewardFunction]:
    """Builds the four functions for TRL: the total first, then one a component.

    With `reward_weights: [1.0, 0.0, 0.0, 0.0]` TRL trains on the total and draws a curve for each,
    named after the function. TRL calls all four with one batch; it is scored once. The total also
    logs the batch's mean GeoScore, the scale of a curriculum, and for each completion the photo's
    id, the answered country and the distance in km (NaN without an answer).

    Args:
        shape: The rollouts' shape. `curriculum` reads the progress from TRL's trainer state.

    Returns:
        `reward_total`, `reward_format`, `reward_country` and `reward_dist`. Each takes TRL's
        keyword arguments, where the columns hold one value a completion, returns one reward a
        completion, and raises as `components` does.
    """

    @lru_cache(maxsize=1)  # keyed by the batch's content, so that no stale score comes back
    def score(rows: tuple[tuple[str, float, float, str], ...], progress: float) -> list[Components]:
        return [components(*row, shape, progress) for row in rows]

    def build(component: str) -> RewardFunction:
        def reward(
            completions: Sequence[CompletionLike],
            latitude: Sequence[float],
            longitude: Sequence[float],
            country_iso2: Sequence[str],
            trainer_state: Any = None,
            log_metric: Callable[[str, float], None] | None = None,
            log_extra: Callable[[str, list[Any]], None] | None = None,
            **columns: Any,
        ) -> list[float]:
            texts = map(completion_text, completions)
            rows = tuple(zip(texts, latitude, longitude, country_iso2, strict=True))
            progress = 0.0
            if shape.name == "curriculum":  # raises without a state: the scale would never shrink
                progress = trainer_state.global_step / trainer_state.max_steps
            scores = score(rows, progress)
            if component == "total" and log_metric is not None:
                log_metric("geoscore", fmean(row.geoscore for row in scores))
                if shape.name == "curriculum":
                    log_metric("reward_scale_km", curriculum_scale_km(shape, progress))
            if component == "total" and log_extra is not None:
                log_extra("id", list(columns["id"]))
                log_extra("country", [_said(row.answer) for row in scores])
                log_extra("d_km", [math.nan if r.d_km is None else r.d_km for r in scores])
            return [getattr(row, component) for row in scores]

        reward.__name__ = f"reward_{component}"
        return reward

    return [build(component) for component in ("total", "format", "country", "dist")]
