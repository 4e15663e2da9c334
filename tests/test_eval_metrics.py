"""Metrics that hide nothing, and comparisons that do not overstate."""

import json
import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geoguessr_rl import bootstrap, eval_metrics
from geoguessr_rl.bootstrap import Interval, holm, interval_of_mean, paired_bootstrap, verdict
from geoguessr_rl.comparison import changes_by_group, largest_changes, paired_comparison
from geoguessr_rl.eval_metrics import (
    compute_metrics,
    consensus,
    look_up,
    make_prediction,
    place_hits,
)
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import Completion, FinishReason, Place, Prediction
from geoguessr_rl.reward import SCORE_VERSION, components, haversine_km

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
    assert metrics["mean_geoscore_weighted"] is metrics["of_k"] is None


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
    figures = {name: columns["mean_geoscore"] for name, columns in metrics["of_k"].items()}
    assert figures == {
        "mean": {"value": 2500, "interval": [2500, 2500]},
        "best": {"value": 5000, "interval": [5000, 5000]},
        "consensus": {"value": 5000, "interval": [5000, 5000]},
    }


# --- The bootstrap


def judge(interval: Interval, n: int, **options: bool) -> str:
    return verdict(interval.difference, interval.p, n, **options)


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
    assert judge(paired, 100) == "better"
    assert judge(shuffled, 100).startswith("not distinguishable")


def test_the_same_seed_gives_the_same_interval_and_chunks_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(5)
    before, after = rng.normal(size=(2, 50))
    first = paired_bootstrap(before, after)
    assert first == paired_bootstrap(before, after)
    assert first != paired_bootstrap(before, after, seed=1)
    monkeypatch.setattr(bootstrap, "RESAMPLED_AT_ONCE", 333)
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
    assert interval == Interval(0, 0, 0, p=1, better=0, worse=0, ties=20)
    assert judge(interval, 20) == "not distinguishable at n = 20"


def test_one_photo_decides_nothing() -> None:
    interval = paired_bootstrap([0.0], [5000.0])
    assert (interval.low, interval.high) == (5000, 5000)  # the bootstrap of one knows no spread
    assert judge(interval, 1) == "not distinguishable at n = 1"
    assert judge(interval, bootstrap.MIN_PAIRS) == "better"  # what MIN_PAIRS holds back


def test_a_falling_distance_is_the_better_one() -> None:
    before, after = np.arange(100.0, 120.0), np.arange(50.0, 70.0)
    interval = paired_bootstrap(before, after, statistic="median", lower_is_better=True)
    assert (interval.difference, interval.better, interval.worse) == (-50, 20, 0)
    assert judge(interval, 20, lower_is_better=True) == "better"
    assert judge(interval, 20) == "worse"


def test_a_median_copes_with_infinite_distances() -> None:
    inf = math.inf
    finite = paired_bootstrap([inf] * 10, [5.0] * 10, statistic="median", lower_is_better=True)
    assert (finite.difference, finite.low, finite.high) == (-inf, -inf, -inf)
    assert judge(finite, 10, lower_is_better=True) == "better"
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
        "median_km",
        *(f"acc_at_km.{km}" for km in (1, 25, 200, 750, 2500)),
        *(f"share_over_km.{km}" for km in (2500, 5000)),
        "format_rate",
        "zero_share",
        "truncated_share",
        "refusal_rate",
    ]
    as_json([asdict(row) for row in rows.values()])
    for name, row in rows.items():
        for side, predictions in (("before", before), ("after", after)):
            assert getattr(row, side) == look_up(compute_metrics(predictions, None), name)
    assert rows["mean_geoscore"].verdict == rows["zero_share"].verdict == "better"
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


def slow_interval(values: list[float], resamples: int, seed: int) -> list[float]:
    """The percentile bootstrap as a loop over resamples, with the order statistics spelled out."""
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(resamples):
        drawn = [values[i] for i in rng.integers(len(values), size=len(values))]
        means.append(math.fsum(drawn) / len(drawn))
    means.sort()
    return [means[math.ceil(tail * resamples) - 1] for tail in (0.025, 0.975)]


def test_every_interval_is_that_of_a_slow_reference() -> None:
    rng = np.random.default_rng(2)
    texts = [RIGHT, MARSEILLE, SYDNEY, NOTHING]
    before = run(*[texts[i] for i in rng.integers(4, size=40)])
    after = run(*[texts[i] for i in rng.integers(4, size=40)])
    metrics = {m.key: m for m in (*eval_metrics.SCORES, *eval_metrics.RATES)}
    for row in paired_comparison(before, after, resamples=400, seed=3):
        if row.metric == "median_km":
            continue
        value = metrics[row.metric].value
        difference = [value(new) - value(old) for old, new in zip(before, after, strict=True)]
        reference = slow_interval(difference, 400, 3)
        assert [row.low, row.high] == pytest.approx(reference, abs=1e-9), row.metric
    intervals = compute_metrics(before, None, resamples=400)["intervals"]
    for key, interval in intervals.items():
        values = [metrics[key].value(row) for row in before]
        assert interval == pytest.approx(slow_interval(values, 400, 0), abs=1e-9)


def test_a_median_s_interval_is_that_of_a_slow_reference() -> None:
    rng = np.random.default_rng(8)
    before, after = rng.exponential(500, (2, 31))
    interval = paired_bootstrap(before, after, resamples=200, seed=4, statistic="median")
    again = np.random.default_rng(4)
    differences = []
    for _ in range(200):
        drawn = again.integers(31, size=31)
        differences.append(sorted(after[drawn])[15] - sorted(before[drawn])[15])
    differences.sort()
    assert [interval.low, interval.high] == pytest.approx([differences[4], differences[194]])


def test_a_p_value_counts_the_resamples_beyond_zero() -> None:
    far = paired_bootstrap(np.zeros(50), np.arange(50) + 1.0, resamples=999)
    assert far.p == pytest.approx(2 / 1000)
    rng = np.random.default_rng(0)
    p_values = [
        paired_bootstrap(*rng.normal(size=(2, 60)), resamples=400).p for _ in range(200)
    ]  # no difference in truth: uniform
    assert 0.01 <= np.mean([p <= 0.05 for p in p_values]) <= 0.11
    assert np.mean([p <= 0.5 for p in p_values]) == pytest.approx(0.5, abs=0.12)


def test_holm_adjusts_a_family() -> None:
    # Worked by hand: 0.01 x 4; 0.02 x 3; 0.03 x 2; 0.04 x 1, none below the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.001]) == [0.001] and holm([]) == []


def test_a_family_of_metrics_is_corrected_and_without_it_chance_gets_through() -> None:
    """Five photos of forty improved: alone that looks like more than it is in the family."""
    texts = [RIGHT] * 14 + [MARSEILLE] * 26
    before, after = run(*texts), run(*([RIGHT] * 19 + texts[19:]))
    rows = {row.metric: row for row in paired_comparison(before, after)}
    alone = paired_bootstrap(*_indicator(before, after))
    assert alone.p < 0.05 and judge(alone, 40) == "better"
    assert rows["acc_at_km.25"].p > 0.05
    assert rows["acc_at_km.25"].verdict == "not distinguishable at n = 40"
    assert rows["acc_at_km.25"].low > 0  # the interval is the plain one


def _indicator(before: list, after: list) -> tuple[list[float], list[float]]:
    def near(rows: list) -> list[float]:
        return [float(row.d_km is not None and row.d_km < 25) for row in rows]

    return near(before), near(after)


def at(latitude: float, longitude: float) -> str:
    return format_completion("France", latitude, longitude, style="direct")


def test_consensus_is_the_answer_nearest_to_the_others() -> None:
    texts = [at(48, 2), at(-33, 151), at(49, 3), at(48.5, 2.5), NOTHING]
    rows = [prediction(text, sample=k) for k, text in enumerate(texts)]
    assert consensus(rows).sample == 3
    assert consensus(rows[::-1]).sample == 3
    assert consensus(rows[:1]).sample == 0
    assert consensus([rows[4], rows[4]]).sample == 4  # nobody names a place
    assert consensus([rows[4], rows[1]]).sample == 1  # an answer without a place has no say


@given(
    st.lists(
        st.tuples(st.floats(-89, 89), st.floats(-179, 179)).map(lambda p: at(*p)),
        min_size=1,
        max_size=6,
    )
)
def test_consensus_is_that_of_a_slow_reference(texts: list[str]) -> None:
    rows = [prediction(text, sample=k) for k, text in enumerate(texts)]
    sums = [
        sum(
            haversine_km(a.pred_latitude, a.pred_longitude, b.pred_latitude, b.pred_longitude)
            for b in rows
        )
        for a in rows
    ]
    assert sums[consensus(rows).sample] == pytest.approx(min(sums))


def test_consensus_of_k_can_beat_the_mean_and_lose_to_the_best() -> None:
    texts = [RIGHT, RIGHT, SYDNEY]
    rows = [prediction(texts[k], str(i), sample=k) for i in range(5) for k in range(3)]
    columns = {k: v["country_acc"]["value"] for k, v in compute_metrics(rows, None)["of_k"].items()}
    assert columns == {"mean": pytest.approx(2 / 3), "best": 1, "consensus": 1}


ZURICH = Place("CH", "Zurich", "Bezirk Zuerich", "Zurich")
ORDINO = Place("AD", "Ordino", None, "Ordino")


@pytest.mark.parametrize(
    ("true", "guess", "hits"),
    [
        (ZURICH, ZURICH, (1, 1, 1, 1)),
        (ZURICH, Place("CH", "Zurich", "Bezirk Meilen", "Zurich"), (1, 1, 0, 0)),
        (ZURICH, Place("CH", "Bern", "Bezirk Zuerich", "Zurich"), (1, 0, 0, 0)),
        (ZURICH, Place("DE", "Zurich", "Bezirk Zuerich", "Zurich"), (0, 0, 0, 0)),
        (ZURICH, None, (0, 0, 0, 0)),
        (ORDINO, replace(ORDINO, sub_region=""), (1, 1, None, 1)),
        (ORDINO, replace(ORDINO, sub_region="x"), (1, 1, None, 0)),
        (Place("AD", None, None, None), Place("AD", "Canillo"), (1, None, None, None)),
        (Place("AD"), None, (0, None, None, None)),
    ],
)  # fmt: skip
def test_a_name_counts_with_those_above_it_and_only_with_a_label(
    true: Place, guess: Place | None, hits: tuple
) -> None:
    found = place_hits(true, guess)
    assert tuple(found[level] for level in eval_metrics.LEVELS) == hits


def test_a_territory_counts_as_its_parent_under_the_other_policy() -> None:
    found = place_hits(Place("US", "Florida"), Place("PR", "Aguada"))
    assert (found["country"], found["country_parent"]) == (0, 1)


def test_figures_by_coordinates_leave_out_rows_without_a_label() -> None:
    rows = run(RIGHT, RIGHT, SYDNEY, NOTHING)
    places = [(ZURICH, ZURICH), (Place("CH"), ZURICH), (ZURICH, Place("AU")), (ZURICH, None)]
    hits = {(row.id, row.sample): place_hits(*pair) for row, pair in zip(rows, places, strict=True)}
    metrics = as_json(compute_metrics(rows, None, hits))
    assert metrics["country_acc_coords"] == metrics["country_acc_coords_parent"] == 0.5
    assert metrics["region_acc"] == metrics["city_acc"] == pytest.approx(1 / 3)
    assert compute_metrics(rows, None)["country_acc_coords"] is None
    found = {row.metric: row for row in paired_comparison(rows, rows, hits=(hits, hits))}
    assert (found["country_acc_coords"].n, found["region_acc"].n) == (4, 3)


def test_groups_that_fell_most_come_first() -> None:
    codes = ["FR"] * 8 + ["DE"] * 8 + ["JP"] * 4
    before = [
        replace(row, country_iso2=c) for row, c in zip(run(*[RIGHT] * 20), codes, strict=True)
    ]
    texts = [RIGHT] * 8 + [SYDNEY] * 8 + [MARSEILLE] * 4
    after = [replace(row, country_iso2=c) for row, c in zip(run(*texts), codes, strict=True)]
    changes = changes_by_group(before, after, lambda code: code)
    assert [(change.name, change.n) for change in changes] == [("DE", 8), ("JP", 4), ("FR", 8)]
    assert changes[0].low <= changes[0].difference <= changes[0].high < 0
    (whole,) = changes_by_group(before, after, lambda code: "all")
    assert whole.n == 20 and whole.difference == pytest.approx(
        np.mean([new.geoscore - old.geoscore for old, new in zip(before, after, strict=True)])
    )


def test_of_many_values_the_interval_is_the_normal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).exponential(1000, 3000)
    bootstrap = interval_of_mean(values)
    monkeypatch.setattr("geoguessr_rl.bootstrap.MANY", 2999)
    normal = interval_of_mean(values)
    width = bootstrap[1] - bootstrap[0]
    assert normal != bootstrap
    assert normal == pytest.approx(bootstrap, abs=0.05 * width)
