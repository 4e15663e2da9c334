"""The arithmetic of steps, money and memory, against figures worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geoguessr_rl import budget

STEP = {"micro_batch": 8, "accumulation": 4, "generations": 8, "generation_batch": 64}


def test_twenty_seconds_and_eight_hours_give_1440_steps() -> None:
    assert budget.recommended_max_steps(20, 8) == 1440
    lines = budget.step_lines(
        seconds_per_step=20, budget_hours=8, max_steps=1200, rows=4000, **STEP
    )
    assert "recommended max_steps = 1440" in lines
    assert "an epoch of 4000 photos = 1000 steps; 1200 steps = 1.20 epochs" in lines


def test_the_step_arithmetic_needs_no_dataset() -> None:
    lines = budget.step_lines(
        seconds_per_step=20, budget_hours=8, max_steps=1200, rows=None, **STEP
    )
    assert "recommended max_steps = 1440" in lines
    assert not any("epoch" in line for line in lines)


def test_a_run_over_the_budget_is_said_so() -> None:
    lines = budget.step_lines(seconds_per_step=40, budget_hours=8, max_steps=1200, rows=3, **STEP)
    assert lines[-2:] == [
        "recommended max_steps = 720",
        "max_steps 1200 does not fit the budget",
    ]


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e3))
def test_the_recommended_steps_fit_and_one_more_does_not(seconds: float, hours: float) -> None:
    steps = budget.recommended_max_steps(seconds, hours)
    assert budget.run_hours(steps, seconds) <= hours * (1 + 1e-6) + 1e-9
    assert budget.run_hours(steps + 1, seconds) > hours * (1 - 1e-6) - 1e-9


def test_a_whole_quotient_survives_rounding() -> None:
    assert 1.5 * 3600 / 21.6 < 250  # what a plain floor would cut to 249
    assert budget.recommended_max_steps(21.6, 1.5) == 250


@pytest.mark.parametrize("bad", [0, -1, math.inf, math.nan])
def test_a_senseless_time_or_budget_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="seconds_per_step"):
        budget.recommended_max_steps(bad, 8)
    with pytest.raises(ValueError, match="budget_hours"):
        budget.recommended_max_steps(20, bad)


def test_the_plan_adds_up() -> None:
    hours = sum(budget.PLAN_HOURS.values())
    assert hours == 12
    assert budget.run_dollars(hours) == pytest.approx(16.7, abs=0.05)
    assert budget.run_dollars(hours, volume_weeks=1) == pytest.approx(18.3, abs=0.05)
    total = budget.run_dollars(hours, volume_weeks=1, contingency=budget.CONTINGENCY)
    assert total == pytest.approx(29, abs=0.5)


def test_a_step_is_four_prompts_of_eight_completions() -> None:
    assert budget.completions_per_step(8, 4) == 32
    assert budget.completions_per_step(4, 8) == 32  # the remedy for backward: the same step
    assert budget.prompts_per_batch(32, 8) == 4


def test_six_generations_do_not_divide_the_batch() -> None:
    with pytest.raises(ValueError, match=r"6 does not divide .* 64 .* 2, 4, 8"):
        budget.prompts_per_batch(64, 6)
    with pytest.raises(ValueError, match="no multiple"):
        budget.steps_per_epoch(1000, 32, 8, generation_batch=48)


def test_an_epoch_drops_the_last_incomplete_generation_batch() -> None:
    assert budget.steps_per_epoch(4007, 32, 8, generation_batch=64) == 1000
    assert budget.steps_per_epoch(4007, 32, 8) == 1001


def test_memory_of_the_default_run_fits_and_adds_up() -> None:
    parts = budget.memory_gib(4_440_000_000, 66_000_000)
    assert sum(parts.values()) == pytest.approx(budget.GPU_GIB)
    assert parts["trainer weights"] == pytest.approx(8.27, abs=0.01)
    assert min(parts.values()) > 0
    assert budget.memory_gib(30_000_000_000, 66_000_000)["vllm kv cache"] < 0


def test_a_cached_token_of_the_4b_model_takes_144_kib() -> None:
    # 36 layers, 8 heads of 128 for keys and values: 2 x 36 x 8 x 128 x 2 bytes.
    assert budget.kv_cache_gib(1, layers=36, kv_heads=8, head_dim=128) * 2**20 == 144
