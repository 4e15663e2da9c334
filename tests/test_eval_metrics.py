"""Metrics that hide nothing, and comparisons that do not overstate."""

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geoguessr_rl import eval_metrics
from geoguessr_rl.eval_metrics import (
    Interval,
    compute_metrics,
    largest_changes,
    make_prediction,
    paired_bootstrap,
    paired_comparison,
    verdict,
)
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import Completion, FinishReason, Prediction
from geoguessr_rl.reward import SCORE_VERSION, components

PARIS = (48.8566, 2.3522)


def says(country: str, lat: float, lon: float) -> str:
    return format_completion(country, lat, lon, style="direct")


RIGHT = says("France", *PARIS)
MARSEILLE = says("France", 43.2965, 5.3698)  # 661 km away
SYDNEY = says("Australia", -33.87, 151.21)
NOTHING = "I see a road."


def prediction(
    text: str,
    id: str = "1",
    *,
    sample: int = 0,
    tokens: int = 40,
    finish_reason: FinishReason = "stop",
    truth: tuple[float, float, str] = (*PARIS, "FR"),
) -> Prediction:
    return make_prediction(id, sample, *truth, Completion(text, tokens, finish_reason))


def run(*texts: str, **options: Any) -> list[Prediction]:
    return [prediction(text, f"{i:03}", **options) for i, text in enumerate(texts)]


def as_json(value: object) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


# --- One prediction


def test_a_prediction_holds_the_truth_the_text_and_the_scores() -> None:
    row = prediction(MARSEILLE)
    scores = components(MARSEILLE, *PARIS, "FR")
    assert (row.format, row.country, row.dist, row.total, row.d_km, row.geoscore) == scores[:6]
    assert (row.latitude, row.longitude, row.country_iso2) == (*PARIS, "FR")
    assert (row.pred_country, row.pred_country_iso2) == ("France", "FR")
    assert (row.pred_latitude, row.pred_longitude) == (43.2965, 5.3698)
    assert row.completion == MARSEILLE


@pytest.mark.parametrize(
    ("text", "finish_reason", "outcome"),
    [
        (RIGHT, "stop", "answered"),
        (RIGHT, "length", "answered"),
        (NOTHING, "stop", "unparseable"),
        (NOTHING, "length", "truncated"),
        ("", "error", "error"),
        (f"<html>{RIGHT}</html>", "error", "error"),  # a proxy's page is nobody's answer
    ],
)
def test_the_outcome_of_a_completion(text: str, finish_reason: FinishReason, outcome: str) -> None:
    row = prediction(text, finish_reason=finish_reason)
    assert row.outcome == outcome
    assert (row.d_km is not None) == (outcome == "answered")


# --- A run's metrics


def test_known_metrics_of_four_rows() -> None:
    rows = run(RIGHT, MARSEILLE, SYDNEY, NOTHING)
    metrics = as_json(compute_metrics(rows, None))
    assert metrics["n"] == 4
    assert metrics["format_rate"] == 0.75
    assert metrics["country_acc"] == 0.5
    assert metrics["mean_geoscore"] == pytest.approx(sum(row.geoscore for row in rows) / 4)
    assert metrics["acc_at_km"] == {"1": 0.25, "25": 0.25, "200": 0.25, "750": 0.5, "2500": 0.5}
    assert metrics["share_over_km"] == {"2500": 0.5, "5000": 0.5}
    assert metrics["zero_share"] == 0.25
    assert metrics["pred_country_top10"] == [["FR", 2], ["AU", 1]]
    assert metrics["complete"] is True
    assert metrics["score_version"] == SCORE_VERSION
    assert metrics["mean_geoscore_weighted"] is metrics["best_of_k"] is None


def test_no_answer_at_all_gives_zeros_nulls_and_valid_json() -> None:
    metrics = as_json(compute_metrics(run(NOTHING, NOTHING), {"FR": 1.0}))
    assert metrics["format_rate"] == metrics["country_acc"] == metrics["mean_geoscore"] == 0
    assert metrics["median_km"] is None
    assert set(metrics["acc_at_km"].values()) == {0}
    assert set(metrics["share_over_km"].values()) == {1}
    assert metrics["zero_share"] == 1


def test_a_run_of_nothing_is_valid_json() -> None:
    metrics = as_json(compute_metrics([], {"FR": 1.0}))
    assert metrics["n"] == 0
    assert metrics["mean_geoscore"] is metrics["median_km"] is metrics["zero_share"] is None
    assert metrics["recommended_max_completion_length"] is None


def test_what_does_not_parse_stays_in_the_means() -> None:
    rows = run(RIGHT, RIGHT, NOTHING)
    assert compute_metrics(rows, None)["mean_geoscore"] == pytest.approx(5000 * 2 / 3)
    # Without the rule, as several public scorers do it, the same run would look perfect.
    assert compute_metrics([r for r in rows if r.format], None)["mean_geoscore"] == 5000


def test_transport_errors_are_left_out_and_mark_the_run() -> None:
    rows = [*run(RIGHT, MARSEILLE), prediction("<html>", "x", finish_reason="error", tokens=9999)]
    metrics = as_json(compute_metrics(rows, None))
    assert metrics["complete"] is False
    assert metrics["n"] == 2
    assert metrics["outcomes"] == {"answered": 2, "unparseable": 0, "truncated": 0, "error": 1}
    clean = as_json(compute_metrics(rows[:2], None))
    differing = {key for key in metrics if metrics[key] != clean[key]}
    assert differing == {"complete", "outcomes"}


@pytest.mark.parametrize(
    ("texts", "null"),
    [
        ([RIGHT, MARSEILLE, NOTHING], False),  # a third misses
        ([RIGHT, NOTHING, NOTHING], True),  # over half
        ([RIGHT, NOTHING], True),  # exactly half: the middle lies half at infinity
    ],
)
def test_the_median_counts_misses_as_infinitely_far(texts: list[str], null: bool) -> None:
    median = compute_metrics(run(*texts), None)["median_km"]
    assert median is None if null else median == pytest.approx(661, abs=1)


def test_a_radius_is_strict() -> None:
    at_25_km = prediction(says("France", *PARIS))
    at_25_km = Prediction(**{**asdict(at_25_km), "d_km": 25.0})
    assert compute_metrics([at_25_km], None)["acc_at_km"]["25"] == 0
    at_2500_km = Prediction(**{**asdict(at_25_km), "d_km": 2500.0})
    assert compute_metrics([at_2500_km], None)["share_over_km"]["2500"] == 0


def test_territories_count_as_their_parent_beside_the_strict_figure() -> None:
    rows = [
        prediction(says("United States", 18.2, -66.5), "a", truth=(18.2, -66.5, "PR")),
        prediction(says("Réunion", -21.1, 55.5), "b", truth=(*PARIS, "FR")),
        prediction(says("Atlantis", 0, 0), "c"),
        prediction(says("Spain", 40, -4), "d"),
    ]
    metrics = compute_metrics(rows, None)
    assert metrics["country_acc"] == 0
    assert metrics["country_acc_parent"] == 0.5


def test_the_weighted_mean_follows_each_countrys_share() -> None:
    peru = (-12.0, -77.0, "PE")
    rows = [
        prediction(RIGHT, "a"),
        prediction(NOTHING, "b"),  # France: 2500 on average
        prediction(says("Peru", *peru[:2]), "c", truth=peru),  # Peru: 5000
    ]
    weights = {"FR": 0.6, "PE": 0.2, "US": 0.2}  # a country that was not drawn does not count
    expected = (0.6 * 2500 + 0.2 * 5000) / 0.8
    assert compute_metrics(rows, weights)["mean_geoscore_weighted"] == pytest.approx(expected)
    assert compute_metrics(rows, {"US": 1.0})["mean_geoscore_weighted"] is None


@pytest.mark.parametrize(("p95", "cap"), [(1, 32), (26, 48), (102, 128), (103, 144), (512, 640)])
def test_the_recommended_cap_leaves_a_quarter_over_the_measured_p95(p95: int, cap: int) -> None:
    rows = run(RIGHT, RIGHT, tokens=p95)
    assert compute_metrics(rows, None)["recommended_max_completion_length"] == cap


def test_lengths_truncations_and_refusals_are_counted() -> None:
    rows = [prediction(RIGHT, str(i), tokens=i) for i in range(1, 101)]
    assert compute_metrics(rows, None)["completion_tokens"] == {"p50": 50, "p95": 95, "max": 100}
    rows = [
        prediction(RIGHT, "a", finish_reason="length"),
        prediction(NOTHING, "b", finish_reason="length"),
        prediction("I'm sorry, I can’t identify this place.", "c"),  # noqa: RUF001
        prediction(f"Sorry. {RIGHT}", "d"),  # said sorry, and answered
    ]
    metrics = compute_metrics(rows, None)
    assert metrics["truncated_share"] == 0.5
    assert metrics["outcomes"]["truncated"] == 1
    assert metrics["refusal_rate"] == 0.25


def test_only_the_ten_most_named_countries_are_listed_in_a_fixed_order() -> None:
    names = ["Fiji", "Atlantis", "Peru", "Chile", "Cuba", "Iran", "Iraq", "Mali", "Togo", "Oman"]
    rows = run(*(says(name, 0, 0) for name in [*names, "Chad", "Laos", "Laos"]))
    top = compute_metrics(rows, None)["pred_country_top10"]
    assert top[0] == ["LA", 2]
    assert top[1:] == sorted(top[1:])
    assert len(top) == 10
    assert ["Atlantis", 1] in top
    assert top == compute_metrics(rows[::-1], None)["pred_country_top10"]


def test_mean_of_k_and_best_of_k_are_separate_figures() -> None:
    rows = [prediction(RIGHT, sample=0), prediction(NOTHING, sample=1)]
    metrics = as_json(compute_metrics(rows, None))
    assert metrics["samples"] == 2
    assert metrics["mean_geoscore"] == 2500
    assert metrics["best_of_k"] == {"mean_geoscore": 5000, "country_acc": 1}


# --- The bootstrap


def test_the_interval_of_a_known_case_is_that_of_the_normal_theory() -> None:
    rng = np.random.default_rng(7)
    before = rng.normal(0, 1, 400)
    after = before + rng.normal(0.5, 1, 400)
    interval = paired_bootstrap(before, after)
    difference = after - before
    half_width = 1.96 * difference.std(ddof=1) / math.sqrt(400)
    assert interval.difference == pytest.approx(difference.mean())
    assert interval.low == pytest.approx(difference.mean() - half_width, abs=0.01)
    assert interval.high == pytest.approx(difference.mean() + half_width, abs=0.01)
    assert interval.better + interval.worse == 400


@pytest.mark.parametrize("statistic", ["mean", "median"])
def test_a_95_percent_interval_covers_the_truth_about_that_often(statistic: Any) -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        before = rng.normal(0, 1, 40)
        after = before * 0 + rng.normal(0.3, 1, 40)
        interval = paired_bootstrap(before, after, resamples=300, statistic=statistic)
        covered += interval.low <= 0.3 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_pairing_cancels_how_hard_a_photo_is() -> None:
    hard = np.random.default_rng(3).uniform(0, 5000, 100)
    paired = paired_bootstrap(hard, hard + 10)
    shuffled = paired_bootstrap(hard, np.roll(hard + 10, 1))
    assert verdict(paired, 100) == "better"
    assert verdict(shuffled, 100).startswith("not distinguishable")


def test_the_same_seed_gives_the_same_interval_and_chunks_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(5)
    before, after = rng.normal(size=(2, 50))
    first = paired_bootstrap(before, after)
    assert first == paired_bootstrap(before, after)
    assert first != paired_bootstrap(before, after, seed=1)
    monkeypatch.setattr(eval_metrics, "_RESAMPLED_VALUES_AT_ONCE", 333)
    assert first == paired_bootstrap(before, after)


VALUES = st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 5000)), min_size=1, max_size=30)


@given(VALUES, st.sampled_from(["mean", "median"]))
def test_a_swap_of_the_runs_turns_the_sign(values: list, statistic: Any) -> None:
    before, after = np.array(values).T
    there = paired_bootstrap(before, after, resamples=200, statistic=statistic)
    back = paired_bootstrap(after, before, resamples=200, statistic=statistic)
    assert there.difference == pytest.approx(-back.difference)
    assert (there.better, there.worse, there.ties) == (back.worse, back.better, back.ties)
    assert there.low <= there.high
    assert there.better + there.worse + there.ties == len(values)


def test_all_ties_are_no_difference() -> None:
    interval = paired_bootstrap([5.0] * 20, [5.0] * 20)
    assert interval == Interval(0, 0, 0, better=0, worse=0, ties=20)
    assert verdict(interval, 20) == "not distinguishable at n = 20"


def test_one_photo_decides_nothing() -> None:
    interval = paired_bootstrap([0.0], [5000.0])
    assert (interval.low, interval.high) == (5000, 5000)  # the bootstrap of one knows no spread
    assert verdict(interval, 1) == "not distinguishable at n = 1"
    assert verdict(interval, eval_metrics.MIN_PAIRS) == "better"  # what MIN_PAIRS holds back


def test_a_falling_distance_is_the_better_one() -> None:
    before, after = np.arange(100.0, 120.0), np.arange(50.0, 70.0)
    interval = paired_bootstrap(before, after, statistic="median", lower_is_better=True)
    assert (interval.difference, interval.better, interval.worse) == (-50, 20, 0)
    assert verdict(interval, 20, lower_is_better=True) == "better"
    assert verdict(interval, 20) == "worse"


def test_a_median_copes_with_infinite_distances() -> None:
    inf = math.inf
    finite = paired_bootstrap([inf] * 10, [5.0] * 10, statistic="median", lower_is_better=True)
    assert (finite.difference, finite.low, finite.high) == (-inf, -inf, -inf)
    assert verdict(finite, 10, lower_is_better=True) == "better"
    both = paired_bootstrap([inf] * 10, [inf] * 10, statistic="median")
    assert (both.difference, both.low, both.high, both.ties) == (0, 0, 0, 10)


@pytest.mark.parametrize(
    ("before", "after"),
    [([1.0], [1.0, 2.0]), ([], []), ([[1.0]], [[1.0]]), ([math.nan], [1.0]), ([math.inf], [1.0])],
)
def test_values_that_cannot_be_paired_are_refused(before: list, after: list) -> None:
    with pytest.raises(ValueError):
        paired_bootstrap(before, after)


# --- Two runs


def test_a_comparison_has_a_row_for_every_headline_metric() -> None:
    before, after = run(*[NOTHING, MARSEILLE] * 5), run(*[MARSEILLE, RIGHT] * 5)
    rows = {row.metric: row for row in paired_comparison(before, after[::-1])}
    assert list(rows) == [
        "mean_geoscore",
        "country_acc",
        "country_acc_parent",
        "format_rate",
        *(f"acc_at_km.{km}" for km in (1, 25, 200, 750, 2500)),
        "median_km",
    ]
    as_json([asdict(row) for row in rows.values()])
    for name, row in rows.items():
        key, _, radius = name.partition(".")
        for side, predictions in (("before", before), ("after", after)):
            figure = compute_metrics(predictions, None)[key]
            assert getattr(row, side) == (figure[radius] if radius else figure)
    assert rows["mean_geoscore"].verdict == "better"
    assert (rows["mean_geoscore"].better, rows["mean_geoscore"].n) == (10, 10)
    assert rows["acc_at_km.1"].ties == 5
    assert rows["median_km"].before is None
    assert (rows["median_km"].better, rows["median_km"].worse) == (10, 0)


def test_a_comparison_with_itself_finds_nothing() -> None:
    rows = run(RIGHT, MARSEILLE, SYDNEY, NOTHING)
    for row in paired_comparison(rows, rows):
        assert row.ties == 4
        assert row.verdict == "not distinguishable at n = 4"


def test_the_order_of_rows_changes_no_interval() -> None:
    before, after = run(RIGHT, MARSEILLE, SYDNEY, NOTHING), run(SYDNEY, RIGHT, NOTHING, RIGHT)
    assert paired_comparison(before[::-1], after) == paired_comparison(before, after[::-1])


def test_k_samples_count_as_one_photo() -> None:
    before = [prediction(NOTHING, str(i), sample=k) for i in range(8) for k in range(2)]
    after = [prediction((RIGHT, NOTHING)[k], str(i), sample=k) for i in range(8) for k in range(2)]
    score = paired_comparison(before, after)[0]
    assert (score.n, score.difference, score.better) == (8, 2500, 8)


def test_runs_over_other_photos_samples_or_with_errors_are_not_compared() -> None:
    rows = run(RIGHT, RIGHT, RIGHT)
    with pytest.raises(ValueError, match=r"^2 photos .* '001'"):
        paired_comparison(rows, rows[:1])
    with pytest.raises(ValueError, match="number of samples"):
        paired_comparison(rows, [*rows, rows[0]])
    with pytest.raises(ValueError, match="no photos"):
        paired_comparison([], [])
    failed = [*rows[:2], prediction("", "002", finish_reason="error")]
    with pytest.raises(ValueError, match="second run is incomplete: 1 rows"):
        paired_comparison(rows, failed)


def test_the_largest_gains_and_losses_name_their_photos() -> None:
    before = run(NOTHING, MARSEILLE, RIGHT, RIGHT, SYDNEY)
    after = run(RIGHT, RIGHT, NOTHING, RIGHT, SYDNEY)
    gains, losses = largest_changes(before, after)
    assert [photo for photo, _ in gains] == ["000", "001"]
    assert gains[0][1] == 5000
    assert losses == [("002", -5000)]
    assert largest_changes(before, after, k=1) == (gains[:1], losses)
