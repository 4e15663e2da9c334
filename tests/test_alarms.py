"""Each alarm goes off on its fault, stays silent beside it, and advises to evaluate first."""

from collections import Counter
from typing import Any

import pytest

from geoguessr_rl import alarms
from geoguessr_rl.alarms import Rollout

HEALTHY = {
    "rewards/reward_format/mean": 0.98,
    "frac_reward_zero_std": 0.2,
    "entropy": 0.5,
    "sampling/sampling_logp_difference/mean": 0.02,
}


def rollouts(
    count: int = 10,
    answered: dict[str, int] | None = None,
    photos: dict[str, int] | None = None,
    **changes: Any,
) -> list[Rollout]:
    """A run's history, healthy but for some figures."""
    figures = {**HEALTHY, **{key.replace("__", "/"): value for key, value in changes.items()}}
    return [
        Rollout(
            step,
            figures,
            Counter(answered or {"FR": 3, "KE": 3, "US": 2}),
            Counter(photos or {"FR": 3, "KE": 3, "US": 2}),
        )
        for step in range(count)
    ]


def names(history: list[Rollout]) -> list[str]:
    return [alarm.name for alarm in alarms.check(history)]


def test_a_healthy_run_is_silent() -> None:
    assert names(rollouts(30)) == []


@pytest.mark.parametrize(
    ("fault", "name", "words"),
    [
        ({"rewards__reward_format__mean": 0.3}, "format_collapse", "only 30% of the last"),
        ({"frac_reward_zero_std": 0.9}, "zero_spread", "90% of the groups have no spread"),
        (
            {"sampling__sampling_logp_difference__mean": 0.4},
            "drift",
            "sampler and trainer are 0.40 nats a token apart",
        ),
        (
            {"answered": {"BR": 5, "KE": 3}},
            "one_country",
            "62% of the last answers name Brazil, and 0% of the photos are from there",
        ),
        ({"answered": {"Atlantis": 8}}, "one_country", "100% of the last answers name Atlantis"),
    ],
)
def test_each_fault_is_said_in_words(fault: dict[str, Any], name: str, words: str) -> None:
    (alarm,) = alarms.check([*rollouts(), *rollouts(alarms.WINDOW, **fault)])
    assert alarm.name == name
    assert words in str(alarm)
    assert "first evaluate the last checkpoint, since runs that look alarming have" in str(alarm)


def test_entropy_collapses_against_where_the_run_began() -> None:
    fallen = rollouts(5, entropy=0.04)
    (alarm,) = alarms.check([*rollouts(), *fallen])
    assert alarm.name == "entropy_collapse"
    assert "from 0.500 to 0.040 nats" in str(alarm)
    assert names([*rollouts(10, entropy=0.05), *fallen]) == []


@pytest.mark.parametrize(
    "edge",
    [
        {"rewards__reward_format__mean": alarms.MIN_FORMAT},
        {"frac_reward_zero_std": alarms.MAX_ZERO_SPREAD},
        {"entropy": alarms.MIN_ENTROPY_SHARE * 0.5},
        {"sampling__sampling_logp_difference__mean": alarms.MAX_LOGP_GAP},
        {"answered": {"FR": 4, "KE": 4}},
        # Most answers name France, and so do most photos.
        {"answered": {"FR": 7, "KE": 1}, "photos": {"FR": 4, "KE": 4}},
    ],
)
def test_the_edge_of_each_bound_is_silent(edge: dict[str, Any]) -> None:
    assert names([*rollouts(), *rollouts(alarms.WINDOW, **edge)]) == []


def test_steps_whose_completions_were_all_masked_are_no_entropy_collapse() -> None:
    assert names([*rollouts(), *rollouts(alarms.WINDOW, entropy=0.0)]) == []


def test_one_bad_rollout_is_noise() -> None:
    bad = {"rewards__reward_format__mean": 0.0, "entropy": 0.0}
    assert names([*rollouts(20), *rollouts(1, **bad)]) == []


def test_a_young_run_may_still_look_for_the_format() -> None:
    fault = {"rewards__reward_format__mean": 0.1}
    assert names(rollouts(alarms.SETTLED - 1, **fault)) == []
    assert names(rollouts(alarms.SETTLED, **fault)) == ["format_collapse"]


def test_a_run_of_a_few_rollouts_is_not_judged() -> None:
    fault = {"frac_reward_zero_std": 1.0}
    assert names(rollouts(alarms.WINDOW - 1, **fault)) == []
    assert names(rollouts(alarms.WINDOW, **fault)) == ["zero_spread"]


def test_figures_that_a_run_does_not_have_are_no_alarm() -> None:
    bare = [Rollout(step, {}, Counter(), Counter()) for step in range(20)]
    assert alarms.check(bare) == []
