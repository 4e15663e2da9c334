"""What an answer is worth: known distances, known scores, and the promises of every shape."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geoguessr_rl import reward
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.reward import (
    DEFAULT_SHAPE,
    NO_ANSWER,
    SHAPE_NAMES,
    Components,
    RewardShape,
    completion_text,
    components,
    distance_reward,
    geoscore,
    haversine_km,
    reward_functions,
)

PARIS, LONDON = (48.8566, 2.3522), (51.5074, -0.1278)
HALF_EARTH_KM = 20_015.1


def answer(country: str = "France", lat: float = PARIS[0], lon: float = PARIS[1]) -> str:
    return format_completion(country, lat, lon, clues="plates", style="think")


# --- Distance and GeoScore


@pytest.mark.parametrize(
    ("start", "end", "km"),
    [
        (PARIS, LONDON, 343.6),
        ((40.7128, -74.0060), (34.0522, -118.2437), 3936),  # New York, Los Angeles
        ((-33.8688, 151.2093), (35.6762, 139.6503), 7824),  # Sydney, Tokyo
    ],
)
def test_distances_between_cities(
    start: tuple[float, float], end: tuple[float, float], km: float
) -> None:
    assert haversine_km(*start, *end) == pytest.approx(km, rel=0.005)


def test_the_antimeridian_is_no_wall() -> None:
    assert haversine_km(0, 179.9, 0, -179.9) == pytest.approx(22.24, abs=0.005)


@pytest.mark.parametrize(
    ("points", "km"),
    [
        ((0, 0, 0, 180), HALF_EARTH_KM),
        ((90, 0, -90, 0), HALF_EARTH_KM),
        ((45, 30, -45, -150), HALF_EARTH_KM),
        ((66.2, -136.1, -66.2, 43.9), HALF_EARTH_KM),  # the haversine rounds to above 1
        ((90, 0, 90, 123), 0),  # one pole has every longitude
        ((12.3, -180, 12.3, 180), 0),
        ((48.8, 2.3, 48.8, 2.3), 0),
    ],
)
def test_antipodes_poles_and_identical_points(
    points: tuple[float, float, float, float], km: float
) -> None:
    assert haversine_km(*points) == pytest.approx(km, abs=0.05)


LATITUDES, LONGITUDES = st.floats(-90, 90), st.floats(-180, 180)


@given(LATITUDES, LONGITUDES, LATITUDES, LONGITUDES)
def test_any_distance_is_finite_and_the_same_both_ways(
    lat1: float, lon1: float, lat2: float, lon2: float
) -> None:
    km = haversine_km(lat1, lon1, lat2, lon2)
    assert 0 <= km <= HALF_EARTH_KM + 0.1
    assert km == pytest.approx(haversine_km(lat2, lon2, lat1, lon1), abs=1e-6)


def test_geoscore_at_known_distances() -> None:
    assert geoscore(0) == 5000
    assert geoscore(1492.7) == pytest.approx(1839.4, abs=0.05)
    assert geoscore(HALF_EARTH_KM) > 0


def test_the_default_curve_is_the_documented_one() -> None:
    for km in (0.0, 1.0, 250.0, 1492.7, HALF_EARTH_KM):
        expected = 0.5 * math.exp(-km / 1492.7) + 0.5 * math.exp(-km / 250)
        assert distance_reward(km) == pytest.approx(expected, rel=1e-12)


def test_score_and_default_reward_fall_strictly() -> None:
    kilometres = [0, 0.001, 1, 10, 100, 1000, 5000, 10_000, 20_000]
    for curve in (geoscore, distance_reward):
        values = [curve(km) for km in kilometres]
        assert all(a > b for a, b in itertools.pairwise(values))


# --- Components


def test_a_perfect_answer_scores_exactly_one() -> None:
    scores = components(answer(), *PARIS, "FR")
    assert scores[:6] == (1.0, 1.0, 1.0, 1.0, 0.0, 5000.0)


def test_no_answer_scores_exactly_zero() -> None:
    assert components("no idea", *PARIS, "FR") == NO_ANSWER
    assert Components(0, 0, 0, 0, None, 0, None) == NO_ANSWER


def test_the_right_country_in_the_wrong_place_scores_in_the_middle() -> None:
    marseille = components(answer(lat=43.2965, lon=5.3698), *PARIS, "FR")
    assert marseille.country == 1
    assert 0.40 < marseille.total < 0.70


def test_an_unknown_country_scores_format_and_distance_only() -> None:
    scores = components(answer("Atlantis"), *PARIS, "FR")
    assert (scores.format, scores.country, scores.dist) == (1, 0, 1)
    assert scores.total == pytest.approx(0.7)


def test_the_total_is_the_documented_sum() -> None:
    scores = components(answer("Germany", 50.0, 8.0), *PARIS, "FR")
    assert scores.total == pytest.approx(0.10 + 0.60 * scores.dist)
    assert scores.dist == distance_reward(scores.d_km or 0)


def test_labels_are_compared_strictly() -> None:
    assert components(answer("Puerto Rico"), *PARIS, "US").country == 0
    assert components(answer("Puerto Rico"), *PARIS, "PR").country == 1


@pytest.mark.parametrize(
    "truth",
    [
        (None, 2.0, "FR"),
        (math.nan, 2.0, "FR"),
        (90.5, 2.0, "FR"),
        (91.0, 2.0, "FR"),
        (48.0, 180.5, "FR"),
        (48.0, math.inf, "FR"),
        (48.0, 2.0, None),
        (48.0, 2.0, ""),
    ],
)
@pytest.mark.parametrize("text", [answer(), "no answer"])
def test_a_missing_truth_raises_whatever_the_answer(text: str, truth: tuple) -> None:
    with pytest.raises((TypeError, ValueError)):
        components(text, *truth)


@pytest.mark.parametrize("truth", [(90.0, 0.0), (-90.0, 0.0), (0.0, 180.0), (0.0, -180.0)])
def test_the_ends_of_the_earth_are_places(truth: tuple[float, float]) -> None:
    assert components(answer(), *truth, "FR").format == 1


def test_weights_sum_to_1_up_to_rounding() -> None:
    RewardShape(format_weight=0.1 + 1e-9, country_weight=0.3, dist_weight=0.6)
    with pytest.raises(ValueError, match="their sum 1"):
        RewardShape(format_weight=0.1005, country_weight=0.3, dist_weight=0.6)


# --- Every form of a completion


@pytest.mark.parametrize(
    "completion",
    [
        answer(),
        [{"role": "assistant", "content": answer()}],
        [{"role": "assistant", "content": [{"type": "text", "text": answer()}]}],
        [{"type": "text", "text": answer()}],
        [{"type": "image", "image": object()}, {"type": "text", "text": answer()}],
        [{"type": "text", "text": answer()[:20]}, {"type": "text", "text": answer()[20:]}],
    ],
    ids=["text", "message", "message of parts", "part", "image and part", "split parts"],
)
def test_text_messages_and_parts_score_the_same(completion: reward.CompletionLike) -> None:
    assert completion_text(completion) == answer()
    assert components(completion, *LONDON, "GB") == components(answer(), *LONDON, "GB")


def test_a_message_without_content_is_an_empty_text() -> None:
    assert completion_text([{"role": "assistant", "content": None}]) == ""
    assert completion_text([]) == ""


@pytest.mark.parametrize("wrong", [None, 5, ["text"], [None]])
def test_another_type_of_completion_is_our_bug_and_raises(wrong: object) -> None:
    with pytest.raises(TypeError):
        completion_text(wrong)  # type: ignore[arg-type]


# --- Shapes


def normalized(values: list[float]) -> tuple[float, ...]:
    return tuple(value / math.fsum(values) for value in values)


POSITIVE = st.floats(1e-3, 1e6)
SCALES = st.floats(1e-6, 1e9)


@st.composite
def shapes(draw: st.DrawFn) -> RewardShape:
    name = draw(st.sampled_from(SHAPE_NAMES))
    form, country, dist = normalized(
        [draw(st.floats(1e-6, 1)), draw(st.floats(0, 1)), draw(st.floats(0, 1))]
    )
    parameters: dict = {}
    if name in ("two_scale", "three_scale") and draw(st.booleans()):
        size = 2 if name == "two_scale" else 3
        parameters["scales_km"] = tuple(draw(SCALES) for _ in range(size))
        parameters["scale_weights"] = normalized([draw(POSITIVE) for _ in range(size)])
    if name == "curriculum":
        parameters["scales_km"] = tuple(sorted((draw(SCALES), draw(SCALES)), reverse=True))
    if name == "piecewise":
        km = sorted(draw(st.sets(st.floats(1e-3, 3e4), min_size=1, max_size=5)))
        rewards = draw(st.lists(st.floats(0, 1), min_size=len(km), max_size=len(km)))
        parameters["knots"] = ((0, 1), *zip(km, sorted(rewards, reverse=True), strict=True))
    return RewardShape(
        name, format_weight=form, country_weight=country, dist_weight=dist, **parameters
    )


@given(shapes(), st.floats(0, 1))
def test_a_perfect_answer_is_exactly_one_for_every_shape(
    shape: RewardShape, progress: float
) -> None:
    scores = components(answer(), *PARIS, "FR", shape, progress)
    assert scores.dist == scores.total == 1.0


def test_weights_that_sum_to_one_only_roughly_still_make_a_perfect_answer_one() -> None:
    shape = RewardShape(
        "three_scale",
        scale_weights=(0.3333333,) * 3,
        format_weight=0.3333333,
        country_weight=0.3333333,
        dist_weight=0.3333333,
    )
    scores = components(answer(), *PARIS, "FR", shape)
    assert scores.dist == scores.total == 1.0


@given(shapes(), st.floats(0, 1), LATITUDES, LONGITUDES, st.sampled_from(["France", "Peru", "x"]))
def test_any_guess_beats_no_guess_and_no_reward_leaves_the_unit_interval(
    shape: RewardShape, progress: float, lat: float, lon: float, country: str
) -> None:
    scores = components(answer(country, lat, lon), *PARIS, "FR", shape, progress)
    assert NO_ANSWER.total < scores.total <= 1
    assert 0 <= scores.dist <= 1


@given(shapes(), st.floats(0, 1), st.lists(st.floats(0, 20_100), min_size=2, max_size=8))
def test_no_shape_rewards_a_longer_way(
    shape: RewardShape, progress: float, kilometres: list[float]
) -> None:
    rewards = [distance_reward(km, shape, progress) for km in sorted(kilometres)]
    assert all(far <= near + 1e-12 for near, far in itertools.pairwise(rewards))


def test_known_points_of_the_other_shapes() -> None:
    piecewise = RewardShape("piecewise")
    rewards = [distance_reward(km, piecewise) for km in (0, 375, 750, 3000, 20_000, 20_015)]
    assert rewards == pytest.approx([1, 0.75, 0.5, 0.2, 0, 0])
    assert distance_reward(1492.7, RewardShape("geoscore")) == pytest.approx(math.exp(-1))
    broad = RewardShape("two_scale", scales_km=(1492.7, 5000))
    assert distance_reward(12_000, broad) > 10 * distance_reward(12_000)
    three = RewardShape("three_scale", scale_weights=(0.2, 0.5, 0.3))
    expected = 0.2 * math.exp(-4) + 0.5 * math.exp(-1000 / 1492.7) + 0.3 * math.exp(-0.2)
    assert distance_reward(1000, three) == pytest.approx(expected)


def test_a_curriculum_shrinks_from_the_first_to_the_last_scale() -> None:
    shape = RewardShape("curriculum")
    assert distance_reward(300, shape) == distance_reward(300, shape, 0.0)
    assert distance_reward(300, shape, -0.005) == distance_reward(300, shape, 0.0)
    assert distance_reward(300, shape, 1.005) == distance_reward(300, shape, 1.0)
    assert components(answer(), 48.0, 2.0, "FR", shape) == components(
        answer(), 48.0, 2.0, "FR", shape, 0.0
    )
    assert distance_reward(2000, shape, 0.0) == pytest.approx(math.exp(-1))
    assert distance_reward(25, shape, 1.0) == pytest.approx(math.exp(-1))
    rewards = [distance_reward(500, shape, step / 10) for step in range(11)]
    assert rewards == sorted(rewards, reverse=True)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"name": "linear"}, "two_scale, geoscore, three_scale, piecewise, curriculum"),
        ({"scales_km": (1492.7,)}, "2 finite positive scales"),
        ({"scales_km": (1492.7, 0)}, "2 finite positive scales"),
        ({"scales_km": (1492.7, math.inf)}, "2 finite positive scales"),
        ({"scales_km": (1492.7, math.nan)}, "2 finite positive scales"),
        ({"scale_weights": (0.5, 0.6)}, "sum 1"),
        ({"scale_weights": (1.0, 0.0)}, "2 positive weights"),
        ({"scale_weights": (1.0,)}, "2 positive weights"),
        ({"knots": ((0, 1), (1, 0))}, "takes scales_km and scale_weights, not knots"),
        ({"name": "geoscore", "scales_km": (1, 2)}, "takes nothing, not scales_km"),
        ({"name": "curriculum", "scales_km": (25, 2000)}, "larger scale first"),
        ({"name": "piecewise", "knots": ((0, 1),)}, "two or more"),
        ({"name": "piecewise", "knots": ((0, 0.9), (1, 0))}, r"\(0, 1\) first"),
        ({"name": "piecewise", "knots": ((0, 1), (5, 0.5), (5, 0.2))}, "rising km"),
        ({"name": "piecewise", "knots": ((0, 1), (5, 0.2), (9, 0.3))}, "never rise"),
        ({"name": "piecewise", "knots": ((0, 1), (5, -0.1))}, r"\[0, 1\]"),
        ({"name": "piecewise", "knots": ((0, 1), (math.inf, 0))}, "finite"),
        ({"name": "piecewise", "knots": ((0, 1), (5, math.nan))}, r"\[0, 1\]"),
        ({"format_weight": 0.0, "country_weight": 0.4}, "beats no guess"),
        ({"country_weight": -0.1, "dist_weight": 1.0}, "none negative"),
        ({"country_weight": 0.4}, "sum 1"),
        ({"country_weight": math.nan}, "sum 1"),
        ({"dist_weight": math.inf}, "sum 1"),
    ],
)
def test_a_bad_shape_names_the_valid_values(parameters: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardShape(**parameters)


def test_a_worthless_format_would_let_a_far_guess_tie_with_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reward, "_check_component_weights", lambda *weights: None)
    shape = RewardShape("piecewise", format_weight=0.0, country_weight=0.4)
    assert components(answer("Fiji", -PARIS[0], PARIS[1] - 180), *PARIS, "FR", shape).total == 0


@given(shapes())
def test_a_shape_survives_a_copy_and_lists_in_place_of_tuples(shape: RewardShape) -> None:
    assert replace(shape) == shape
    lists = {name: json.loads(json.dumps(getattr(shape, name))) for name in ("scales_km", "knots")}
    assert replace(shape, **lists) == shape
    assert hash(shape) == hash(replace(shape))


# --- TRL's functions

BATCH = {
    "completions": [answer(), answer("Peru", -12.0, -77.0), "no answer", answer("Atlantis")],
    "latitude": [PARIS[0]] * 4,
    "longitude": [PARIS[1]] * 4,
    "country_iso2": ["FR"] * 4,
}


def test_trl_gets_the_total_first_and_one_curve_a_component() -> None:
    names = [function.__name__ for function in reward_functions()]
    assert names == ["reward_total", "reward_format", "reward_country", "reward_dist"]


def test_the_functions_agree_with_components_and_ignore_other_columns() -> None:
    expected = [components(text, *PARIS, "FR") for text in BATCH["completions"]]
    for function in reward_functions():
        component = function.__name__.removeprefix("reward_")
        rewards = function(**BATCH, prompts=["p"] * 4, image=[object()] * 4)
        assert rewards == [getattr(scores, component) for scores in expected]


def test_the_total_logs_what_a_run_is_watched_by() -> None:
    logged: dict[str, list[Any]] = {}
    ids = ["a", "b", "c", "d"]
    total, *others = reward_functions()
    total(**BATCH, id=ids, log_extra=logged.__setitem__)
    for function in others:  # the total alone logs, or every row would stand there four times
        function(**BATCH, id=ids, log_extra=lambda name, values: pytest.fail(f"{name} again"))
    scores = [components(text, *PARIS, "FR") for text in BATCH["completions"]]
    said = ["" if s.answer is None else s.answer.country_iso2 or s.answer.country for s in scores]
    assert logged["id"] == ids and logged["country"] == said
    far = [math.nan if score.d_km is None else score.d_km for score in scores]
    assert logged["d_km"] == pytest.approx(far, nan_ok=True)


def test_a_curriculum_logs_its_scale() -> None:
    total = reward_functions(RewardShape("curriculum", scales_km=(1600.0, 100.0)))[0]
    for step, scale in ((0, 1600.0), (5, 400.0), (10, 100.0)):
        logged: dict[str, float] = {}
        state = SimpleNamespace(global_step=step, max_steps=10)
        total(**BATCH, trainer_state=state, log_metric=logged.__setitem__)
        assert logged["reward_scale_km"] == pytest.approx(scale)
    logged = {}
    reward_functions()[0](**BATCH, log_metric=logged.__setitem__)
    assert "reward_scale_km" not in logged


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that have been parsed so far."""
    texts: list[str] = []
    parse = reward.parse_answer
    monkeypatch.setattr(reward, "parse_answer", lambda text: texts.append(text) or parse(text))
    return texts


def test_a_completion_is_parsed_once_for_all_four(parsed: list[str]) -> None:
    functions = reward_functions()
    messages = [[{"role": "assistant", "content": text}] for text in BATCH["completions"]]
    for function in functions:
        function(**{**BATCH, "completions": messages})
    assert parsed == BATCH["completions"]


def test_a_new_truth_or_a_changed_batch_is_scored_anew(parsed: list[str]) -> None:
    total, country = reward_functions()[0], reward_functions()[2]
    batch = {key: list(column) for key, column in BATCH.items()}
    assert country(**batch)[0] == 1
    batch["country_iso2"][0] = "GB"  # in place: the same list, another truth
    assert country(**batch)[0] == 0
    batch["completions"][0] = "no answer"
    assert total(**batch)[0] == 0


def test_the_mean_geoscore_is_logged_once_a_batch() -> None:
    logged: list[tuple[str, float]] = []
    for function in reward_functions(RewardShape("piecewise")):
        function(**BATCH, log_metric=lambda name, value: logged.append((name, value)))
    scores = [components(text, *PARIS, "FR").geoscore for text in BATCH["completions"]]
    assert logged == [("geoscore", pytest.approx(sum(scores) / 4))]


def test_a_curriculum_reads_its_progress_from_the_trainer(parsed: list[str]) -> None:
    shape = RewardShape("curriculum")
    functions = reward_functions(shape)
    for step in (0, 600, 1200):
        state = SimpleNamespace(global_step=step, max_steps=1200)
        rewards = [function(**BATCH, trainer_state=state) for function in functions]
        scores = [components(t, *PARIS, "FR", shape, step / 1200) for t in BATCH["completions"]]
        assert rewards[0] == [row.total for row in scores]
        assert rewards[3] == [row.dist for row in scores]
    with pytest.raises(AttributeError):  # it would stay at its first scale, and nobody would know
        functions[0](**BATCH)


@pytest.mark.parametrize("column", ["latitude", "longitude", "country_iso2"])
def test_a_missing_truth_ends_the_run(column: str) -> None:
    for function in reward_functions():
        with pytest.raises((TypeError, ValueError)):
            function(**{**BATCH, column: [None] * 4})
        with pytest.raises(ValueError):
            function(**{**BATCH, column: BATCH[column][:3]})
        with pytest.raises(TypeError):
            function(**{key: value for key, value in BATCH.items() if key != column})


def test_reported_numbers_use_the_documented_constants() -> None:
    assert (reward.EARTH_RADIUS_KM, reward.GEOGUESSR_SCALE_KM) == (6371.0088, 1492.7)
    assert (reward.FINE_SCALE_KM, reward.GEOSCORE_MAX) == (250.0, 5000.0)
    assert (reward.W_FORMAT, reward.W_COUNTRY, reward.W_DIST) == (0.10, 0.30, 0.60)
    assert RewardShape("two_scale", scales_km=(1492.7, 250.0)) == DEFAULT_SHAPE
