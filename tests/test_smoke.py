"""The smoke test's verdict on hand-made logs, and the script itself on the tiny model."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_base import warm_up

from geoguessr_rl import artifacts
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.phases import smoke

ROOT = Path(__file__).parents[1]


def make_log(every: int = 1, steps: int = 20, **changes: Any) -> list[dict[str, Any]]:
    """The log of a healthy training that generates every so many steps."""
    log: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        # A step that generates takes three times as long.
        entry: dict[str, Any] = {"step": step, "seconds": 10.0 if (step - 1) % every else 30.0}
        entry["grad_norm"] = 7.5 if step == 3 else 0.25
        if (step - 1) % every == 0:
            entry |= {smoke.FORMAT: 0.9, smoke.ZERO_SPREAD: 0.3, "reward": 0.4}
            entry |= {"completions/max_length": 200.0, "completions/clipped_ratio": 0.0}
            entry |= {key: value(step) for key, value in changes.items()}
        log.append(entry)
    return [*log, {"step": steps, "train_runtime": 1.0}]


@pytest.mark.parametrize(("every", "seconds", "steps"), [(1, 30, 960), (2, 20, 1440)])
def test_an_even_number_of_steps_is_timed(
    every: int, seconds: float, steps: int, tmp_path: Path, script: Callable[..., Any]
) -> None:
    artifacts.write_json(tmp_path / artifacts.TRAINING_LOG, make_log(every))
    assert smoke.seconds_a_step(make_log(every)) == seconds
    ended = script("smoke_verdict.py", tmp_path)
    assert ended.code == 0
    assert f"{seconds:.1f} s a step over steps 5 to 20, {20 // every} of 20 steps" in ended.out
    assert f"budget 8 h: recommended max_steps = {steps}" in ended.out
    assert ended.out.endswith("smoke test passed\n")


@pytest.mark.parametrize(
    ("every", "hours", "steps"), [(1, 1, 120), (2, 1.005, 180), (4, 8.01, 1920)]
)
def test_what_fits_is_whole_generations(every: int, hours: float, steps: int) -> None:
    log = make_log(every)
    assert smoke.fitting_steps(log, smoke.seconds_a_step(log), hours) == steps


def test_the_peaks_stand_in_the_output(tmp_path: Path) -> None:
    log = make_log(2, **{"completions/clipped_ratio": lambda step: 0.3 if step == 7 else 0.1})
    artifacts.write_json(tmp_path / artifacts.TRAINING_LOG, log)
    lines, faults = smoke.run(tmp_path, 8)
    assert faults == []
    assert (
        "peaks: completion 200 tokens, cut off 30%, gradient norm 7.5 at step 3, 30.0 s" in lines[2]
    )


@pytest.mark.parametrize("hours", ["0", "-1", "nan"])
def test_a_budget_that_is_not_positive_is_one_sentence(
    hours: str, tmp_path: Path, script: Callable[..., Any]
) -> None:
    artifacts.write_json(tmp_path / artifacts.TRAINING_LOG, make_log())
    ended = script("smoke_verdict.py", tmp_path, f"--budget_hours={hours}")
    assert ended.code == 2 and "budget_hours" in ended.err and len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("every", [1, 2])
def test_one_broken_step_after_the_tenth_fails(
    every: int, tmp_path: Path, script: Callable[..., Any]
) -> None:
    early = make_log(every, **{smoke.FORMAT: lambda step: 0.1 if step <= 10 else 0.5})
    assert smoke.faults(early) == []
    late = make_log(every, **{smoke.FORMAT: lambda step: 0.4 if step == 15 else 0.9})
    artifacts.write_json(tmp_path / artifacts.TRAINING_LOG, late)
    ended = script("smoke_verdict.py", tmp_path)
    assert ended.code == 1
    assert "FAILED: only 40% of the completions of step 15 hold an answer" in ended.out
    assert "smoke test passed" not in ended.out


def test_groups_without_spread_fail() -> None:
    (fault,) = smoke.faults(make_log(**{smoke.ZERO_SPREAD: lambda step: 0.9}))
    assert "90% of the groups have no spread" in fault


def test_without_a_late_rollout_nothing_is_judged() -> None:
    (fault,) = smoke.faults(make_log(every=20))
    assert "no step after the 10th generated" in fault


def test_too_short_or_no_training_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"runbook/smoke_test\.sh"):
        smoke.run(tmp_path, 8)
    artifacts.write_json(tmp_path / artifacts.TRAINING_LOG, make_log(steps=12))
    with pytest.raises(UserError, match="logged 8 of the steps 5 to 20"):
        smoke.run(tmp_path, 8)


def smoke_test(
    world: Path, model: Path, out: Path, *flags: str
) -> "subprocess.CompletedProcess[str]":
    """Runs the script from another folder, with the given folder relative to it."""
    command = [
        "bash", str(ROOT / "runbook/smoke_test.sh"),
        "--config", str(ROOT / "configs/embedded/grpo.yaml"), "--data_dir", str(world / "data"),
        "--model", str(model), "--output_dir", out.name,
        "--set", "trainer.per_device_train_batch_size=16", *flags,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, cwd=out.parent)


def test_the_script_checks_trains_and_passes(world: Path, tmp_path: Path) -> None:
    out, direct = tmp_path / "smoke test", ("--set", "prompt.style=direct")
    base = warm_up(world)
    # Every second step generates, as in the plan.
    plan = ("--set", "trainer.generation_batch_size=32", "--budget_hours", "0.5")
    ended = smoke_test(world, base, out, *direct, *plan)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    printed = ended.stdout.splitlines()
    assert any(line.startswith("ready to train: ") for line in printed)
    assert "s a step over steps 5 to 20, 10 of 20 steps generate" in printed[-5]
    assert int(printed[-2].removeprefix("budget 0.5 h: recommended max_steps = ")) % 2 == 0
    assert printed[-1] == "smoke test passed"
    assert not list(out.glob("checkpoint-*"))


def test_the_script_fails_on_a_prompt_that_lost_its_text(world: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(warm_up(world), broken)
    template = broken / "chat_template.jinja"
    before = template.read_text()
    template.write_text(before.replace("{{- block.text -}}", ""))
    assert template.read_text() != before
    ended = smoke_test(
        world, broken, tmp_path / "out", "--skip_preflight", "--set", "prompt.style=direct",
        "--set", "trainer.learning_rate=1e-5",  # as the plan's: 20 steps do not mend it
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr[-2000:]
    assert "completions of step 11 hold an answer: read samples.html" in ended.stdout
    assert ended.stdout.rstrip().splitlines()[-1].startswith("FAILED: only ")


@pytest.mark.slow
def test_the_script_fails_on_a_model_that_does_not_answer(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "smoke test"
    ended = smoke_test(world, world / "tiny", out, "--skip_preflight")
    assert ended.returncode == 1, ended.stderr[-2000:]
    assert "FAILED: only 0% of the completions of step 11 hold an answer" in ended.stdout
    assert "recommended max_steps" in ended.stdout
    assert not list(out.glob("checkpoint-*"))


def test_an_unknown_option_of_the_script_is_refused() -> None:
    command = ["bash", str(ROOT / "runbook/smoke_test.sh"), "--steps", "3"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2 and "unknown option --steps" in ended.stderr
