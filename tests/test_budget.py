"""The arithmetic of steps, money and memory, against figures worked out by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geoguessr_rl import budget
from geoguessr_rl.budget import GPUS, Gpu, ModelShape, RunShape

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


# A model and a run so small that every term can be worked out by hand.
TOY = ModelShape(
    parameters=1000, vision_parameters=100, trained_parameters=50, layers=3, hidden=8, mlp=20,
    heads=4, kv_heads=2, head_dim=4, vocabulary=30, tied=True, adapted_inputs=60,
)  # fmt: skip
TOY_RUN = RunShape(
    micro_batch=2, accumulation=4, processes=1, generations=4, generation_batch=16,
    prompt_tokens=10, visual_tokens=6, completion_tokens=5, max_model_length=15,
)  # fmt: skip
# Qwen3-VL-4B with the plan's adapter, and the run of configs/grpo.yaml.
QWEN = ModelShape(
    parameters=4_437_815_808, vision_parameters=415_347_712, trained_parameters=66_060_288,
    layers=36, hidden=2560, mlp=9728, heads=32, kv_heads=8, head_dim=128, vocabulary=151_936,
    tied=True, adapted_inputs=5 * 2560 + 4096 + 9728,
)  # fmt: skip
RUN = RunShape(
    micro_batch=8, accumulation=4, processes=1, generations=8, generation_batch=64,
    prompt_tokens=964, visual_tokens=784, completion_tokens=512,
)  # fmt: skip
A100 = budget.GPUS["A100-80"]


def test_the_parameters_of_layers_and_head_are_what_remains() -> None:
    # The head is 30 x 8 = 240; tied, it is the embedding too: 1000 - 100 - 240 = 660.
    assert TOY.head_parameters == 240
    assert TOY.layer_parameters == 660
    assert replace(TOY, tied=False).layer_parameters == 420


def test_a_cached_token_takes_144_kib_in_the_4b_model() -> None:
    # 36 layers, 8 heads of 128 for keys and for values: 2 x 36 x 8 x 128 x 2 bytes.
    assert budget.kv_bytes_a_token(QWEN) == 144 * 1024
    # 2 x 3 x 2 x 4 x 2 bytes, and twice as many in float32.
    assert budget.kv_bytes_a_token(TOY) == 96
    assert budget.kv_bytes_a_token(TOY, 4) == 192


def test_the_inside_of_a_layer_by_hand() -> None:
    # Queries are 16 wide, keys 8. In float32: two norms of 8, and 16 + 8: 4 x 40 = 160 bytes.
    # In bf16: 2 x (16 + 8) for attention, 3 x 20 for the MLP, 60 adapted inputs: 2 x 168 = 336.
    assert budget.layer_bytes_a_token(TOY) == 160 + 336
    # The 4B model: 4 x (5120 + 5120) + 2 x (10,240 + 29,184 + 26,624) = 40,960 + 132,096.
    assert budget.layer_bytes_a_token(QWEN) == 173_056


def test_activations_are_one_hidden_state_a_layer_with_checkpointing() -> None:
    # 2 completions of 15 tokens, 3 layers: 90 x 8 x 2 bytes, or 90 x 496 without.
    assert budget.activation_bytes(TOY, TOY_RUN) == 1440
    plain = replace(TOY_RUN, gradient_checkpointing=False)
    assert budget.activation_bytes(TOY, plain) == 90 * 496


def test_logits_are_a_tile_and_never_the_whole() -> None:
    # 10 completion tokens x 30 words x 2 bytes, and a float32 gradient of 10 x 8.
    assert budget.logit_bytes(TOY, TOY_RUN) == 600 + 320
    # 4096 tokens x 32,768 words x 2 bytes = 0.25 GiB, and 4096 x 2560 x 4 bytes = 40 MiB. All
    # logits in float32 would be 4096 x 151,936 x 4 bytes = 2.3 GiB.
    assert budget.logit_bytes(QWEN, RUN) == 2**28 + 40 * 2**20
    longer = replace(RUN, completion_tokens=5120)  # ten times the tokens, the same tile
    assert budget.logit_bytes(QWEN, longer) == 2**28 + 400 * 2**20


def test_the_memory_of_the_default_run_by_hand() -> None:
    plan = budget.memory_plan(QWEN, RUN, A100)
    gib = {
        "trainer weights": 8.266,  # 4,437,815,808 x 2 bytes
        "adapter and optimizer": 0.984,  # 66,060,288 x 16 bytes
        # 8 x 1476 = 11,808 tokens: x 36 x 5120 bytes = 2.027, and x 2 x 173,056 bytes = 3.806.
        "activations": 5.833,
        "logits": 0.289,
        "trainer overhead": 2.0,
        "engine weights": 8.266,
        "engine kv cache": 16.954,  # 0.35 x 79.2 - 8.266 - 2.5
        "engine overhead": 2.5,
        "remaining": 34.108,  # 79.2 less all of these
    }
    assert plan == pytest.approx(gib, abs=0.001)
    assert list(plan)[-1] == "remaining"
    assert sum(plan.values()) == pytest.approx(A100.memory_gib)


def test_the_kv_cache_holds_so_many_completions() -> None:
    # 16.954 GiB = 123,452 tokens of 144 KiB = 83 completions of 1476: all 64 run at once.
    assert budget.completions_at_once(QWEN, RUN, A100) == 64
    wider = replace(RUN, generation_batch=128)
    assert budget.completions_at_once(QWEN, wider, A100) == 83
    # On 39.4 GiB: 13.79 - 10.766 = 3.024 GiB = 22,021 tokens = 14 completions. They take turns.
    small = budget.GPUS["A100-40"]
    assert budget.completions_at_once(QWEN, RUN, small) == 14
    assert budget.memory_plan(QWEN, RUN, small)["remaining"] > 0


def test_a_share_too_small_for_one_sequence_does_not_fit() -> None:
    # The engine needs 8.266 + 2.5 + 4096 x 144 KiB = 0.5625: 11.33 of 79.2 GiB, a share of 0.143.
    assert budget.memory_plan(QWEN, replace(RUN, vllm_share=0.15), A100)["remaining"] > 0
    lacking = budget.memory_plan(QWEN, replace(RUN, vllm_share=0.14), A100)["remaining"]
    assert lacking == pytest.approx(0.14 * 79.2 - 11.329, abs=0.001)


def test_a_sleeping_engine_is_not_there_together_with_activations() -> None:
    awake, asleep = (
        budget.memory_plan(QWEN, replace(RUN, sleep=sleep), A100) for sleep in (False, True)
    )
    # Asleep, the larger of the engine's 27.72 and the 6.122 of activations and logits counts.
    assert asleep["remaining"] - awake["remaining"] == pytest.approx(6.122, abs=0.001)


def test_without_vllm_the_trainer_holds_the_cache_of_its_own_generation() -> None:
    plan = budget.memory_plan(QWEN, replace(RUN, vllm_share=None), A100)
    assert plan["engine weights"] == plan["engine overhead"] == 0
    # 64 x 1476 tokens x 144 KiB = 12.973 GiB, more than activations and logits.
    assert plan["engine kv cache"] == pytest.approx(12.973, abs=0.001)
    assert plan["remaining"] == pytest.approx(79.2 - 8.266 - 0.984 - 2 - 12.973, abs=0.002)


def test_each_part_of_a_step_by_hand() -> None:
    gpu = Gpu(
        "toy",
        1,
        bf16_tflops=1e-6 / budget.MATMUL_EFFICIENCY,  # 10^6 operations a second
        bandwidth_gb_s=1e-3 / budget.BANDWIDTH_EFFICIENCY,
        dollars_per_hour=1,
    )  # 10^6 bytes
    run = replace(TOY_RUN, vllm_share=0.99, scoring_passes=2)
    # The GPU of 1 GiB has no room for the overhead, so the cache holds one completion of 15 tokens
    # and the 16 completions of a generation take 16 turns, for 2 steps of 2 x 4 completions.
    assert budget.completions_at_once(TOY, run, gpu) == 1
    parts = budget.step_plan(TOY, run, gpu)
    # Text of n tokens: 2 x 660 n + 2 x 3 x 16 n^2. 15 tokens: 19,800 + 21,600 = 41,400; 10 tokens:
    # 13,200 + 9600 = 22,800. Head: 2 x 240 x 5 = 2400. Vision: 2 x 100 x 6 x 4 = 4800.
    # A pass writes and reads 2 x 15 x 3 x 496 = 44,640 bytes. Forward: 48,600 operations.
    forward = 0.0486 + 0.04464
    # Backward computes the text twice and the head twice: 87,600; three times the bytes.
    backward = 0.0876 + 3 * 0.04464
    assert parts["scoring passes"] == pytest.approx(2 * 8 * forward)
    assert parts["forward and backward"] == pytest.approx(8 * (forward + backward))
    # A decoded token reads 900 weights of 2 bytes and 12.5 cached tokens of 96 bytes: 3000 bytes,
    # longer than its 1800 operations; with the fixed 2 ms it takes 5 ms. 16 turns x 5 tokens / 2.
    assert parts["decode"] == pytest.approx(16 * 5 * 0.005 / 2)
    # The 16 completions have 4 prompts: 22,800 + 4800 operations each, every second step.
    assert parts["prefill"] == pytest.approx(4 * 0.0276 / 2)
    # 1000 weights x 16 bytes, and a second, every second step.
    assert parts["weight sync"] == pytest.approx((0.016 + 1) / 2)
    assert parts["other"] == 1


def test_a_step_without_checkpointing_saves_one_forward_pass_of_the_layers() -> None:
    full, plain = (
        budget.step_plan(QWEN, replace(RUN, gradient_checkpointing=on), A100)
        for on in (True, False)
    )
    saved = full["forward and backward"] - plain["forward and backward"]
    # 32 completions x (1476 tokens x 2 x 3.63e9 + attention) at 45 % of 312e12, and their traffic.
    assert saved == pytest.approx(2.47 + 0.06 + 0.43, abs=0.15)


def test_predictions_are_near_the_plans_estimates() -> None:
    # The plan: 15 to 25 s a step on an A100, an H100 about 1.7 times as fast.
    a100 = sum(budget.step_plan(QWEN, RUN, A100).values())
    h100 = sum(budget.step_plan(QWEN, RUN, budget.GPUS["H100"]).values())
    assert 15 < a100 < 25
    assert a100 / h100 == pytest.approx(budget.H100_SPEEDUP, rel=0.15)


def test_only_the_l4_is_too_small_for_the_default_run() -> None:
    left = {name: budget.memory_plan(QWEN, RUN, gpu)["remaining"] for name, gpu in GPUS.items()}
    assert [name for name, gib in left.items() if gib < 0] == ["L4"]
    assert budget.remedy(QWEN, RUN, budget.GPUS["L4"]) is None


def test_out_of_memory_in_backward_is_remedied_by_a_smaller_micro_batch() -> None:
    run = replace(RUN, gradient_checkpointing=False)
    assert budget.memory_plan(QWEN, run, A100)["remaining"] < 0
    other = budget.remedy(QWEN, run, A100)
    assert other is not None
    assert budget.changes(run, other) == "micro-batch 4 x accumulation 8"
    assert budget.changes(run, run) == "no change"


def test_a_share_that_leaves_the_trainer_too_little_is_lowered() -> None:
    run = replace(RUN, vllm_share=0.95)
    other = budget.remedy(QWEN, run, A100)
    assert other is not None and other.vllm_share is not None and other.vllm_share < 0.9
    assert budget.memory_plan(QWEN, other, A100)["remaining"] >= 0


SIZES = st.integers(1, 4096)
RUNS = st.builds(
    RunShape,
    micro_batch=st.sampled_from([1, 2, 4, 8]), accumulation=st.sampled_from([1, 2, 4]),
    processes=st.just(1), generations=st.just(8), generation_batch=st.sampled_from([32, 64, 128]),
    prompt_tokens=st.integers(100, 2000), visual_tokens=st.integers(1, 100),
    completion_tokens=SIZES, gradient_checkpointing=st.booleans(), scoring_passes=st.integers(0, 2),
    vllm_share=st.sampled_from([None, 0.25, 0.35, 0.6]), sleep=st.booleans(),
)  # fmt: skip


@given(RUNS, SIZES)
def test_more_tokens_never_take_less_memory_or_time(run: RunShape, more: int) -> None:
    longer = replace(run, completion_tokens=run.completion_tokens + more)
    before, after = (budget.memory_plan(QWEN, one, A100) for one in (run, longer))
    assert after["remaining"] <= before["remaining"]
    assert all(after[use] >= before[use] for use in before if use != "remaining")
    seconds = [sum(budget.step_plan(QWEN, one, A100).values()) for one in (run, longer)]
    assert seconds[0] < seconds[1]


@given(RUNS, st.sampled_from(sorted(budget.GPUS)))
def test_a_remedy_fits_and_learns_from_the_same_batches(run: RunShape, name: str) -> None:
    gpu = budget.GPUS[name]
    other = budget.remedy(QWEN, run, gpu)
    if budget.memory_plan(QWEN, run, gpu)["remaining"] >= 0:
        assert other is not None
    if other is not None:
        assert budget.memory_plan(QWEN, other, gpu)["remaining"] >= 0
        assert other.micro_batch * other.accumulation == run.micro_batch * run.accumulation
        assert other.generated == run.generated


@given(RUNS)
def test_a_faster_gpu_is_never_slower(run: RunShape) -> None:
    faster = replace(A100, bf16_tflops=2 * A100.bf16_tflops, bandwidth_gb_s=3000)
    parts, other = (budget.step_plan(QWEN, run, gpu) for gpu in (A100, faster))
    assert all(other[part] <= parts[part] for part in parts)


def test_the_assumptions_say_that_nothing_was_measured() -> None:
    text = " ".join(budget.assumptions())
    assert "nothing was measured on a GPU" in text
    assert f"{budget.MATMUL_EFFICIENCY:.0%}" in text
