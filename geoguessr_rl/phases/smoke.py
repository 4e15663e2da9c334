"""Smoke test: the log of a short training -> seconds a step, the steps that fit, and a verdict.

`runbook/smoke_test.sh` makes the log: the pre-flight, then 20 real steps. Rollout figures stand on
the steps that generate alone, every second one in the plan, so they are read there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from geoguessr_rl import artifacts, budget
from geoguessr_rl.alarms import MAX_ZERO_SPREAD, MIN_FORMAT
from geoguessr_rl.artifacts import UserError

TIMED = range(5, 21)  # steps: an even number of them, and the first ones warm up
SETTLED = 10  # steps after which the model has found the answer format
FORMAT, ZERO_SPREAD = "rewards/reward_format/mean", "frac_reward_zero_std"


def seconds_a_step(log: Sequence[Mapping[str, Any]]) -> float:
    """Returns the mean wall time of the timed steps.

    Raises:
        UserError: The training was too short.
    """
    times = [entry["seconds"] for entry in log if entry["step"] in TIMED and "seconds" in entry]
    if len(times) < len(TIMED):
        raise UserError(
            f"the training logged {len(times)} of the steps {TIMED[0]} to {TIMED[-1]}; run "
            f"{TIMED[-1]} steps with trainer.logging_steps 1"
        )
    return fmean(times)


def fitting_steps(log: Sequence[Mapping[str, Any]], seconds: float, budget_hours: float) -> int:
    """Returns the steps that fit the budget, in whole generations: training refuses others.

    Raises:
        UserError: The budget is not a positive number of hours.
    """
    try:
        steps = budget.recommended_max_steps(seconds, budget_hours)
    except ValueError as error:
        raise UserError(str(error)) from None
    generating = [entry["step"] for entry in log if FORMAT in entry]
    every = generating[1] - generating[0] if len(generating) > 1 else 1
    return steps - steps % every


def faults(log: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what speaks against a long run, in sentences."""
    rollouts = [entry for entry in log if FORMAT in entry]
    found = []
    settled = [entry for entry in rollouts if entry["step"] > SETTLED]
    if not settled:
        found.append(f"no step after the {SETTLED}th generated, so nothing can be judged")
    if broken := [entry for entry in settled if entry[FORMAT] < MIN_FORMAT]:
        found.append(
            f"only {broken[0][FORMAT]:.0%} of the completions of step {broken[0]['step']} hold an "
            "answer: read samples.html beside the log, and look for a thinking block that the "
            "template opens, an ignored tag, or answers that were cut"
        )
    if rollouts and (share := fmean(entry[ZERO_SPREAD] for entry in rollouts)) > MAX_ZERO_SPREAD:
        found.append(
            f"{share:.0%} of the groups have no spread in reward, and teach nothing: filter the "
            "photos, or compare the shapes in scripts/reward_lab.py"
        )
    return found


def run(training: Path, budget_hours: float) -> tuple[list[str], list[str]]:
    """Returns the lines to print and the faults, none of which may be there.

    Args:
        training: The folder of a run that `scripts/train_grpo.py` finished.
        budget_hours: Hours that the long run may take.

    Raises:
        UserError: There is no log, or it is too short, or the budget is not positive.
    """
    log = artifacts.read_json(
        training / artifacts.TRAINING_LOG, remedy="run bash runbook/smoke_test.sh"
    )
    seconds = seconds_a_step(log)
    steps = [entry for entry in log if "seconds" in entry]  # the last entry sums up the run
    rollouts = [entry for entry in log if FORMAT in entry]
    slowest = max(steps, key=lambda entry: entry["seconds"])
    steepest = max(steps, key=lambda entry: entry["grad_norm"])
    lines = [
        f"{seconds:.1f} s a step over steps {TIMED[0]} to {TIMED[-1]}, {len(rollouts)} of "
        f"{len(steps)} steps generate",
        f"reward {rollouts[0]['reward']:.3f} to {rollouts[-1]['reward']:.3f}, format "
        f"{rollouts[-1][FORMAT]:.0%}, groups without spread "
        f"{fmean(entry[ZERO_SPREAD] for entry in rollouts):.0%}",
        f"peaks: completion {max(entry['completions/max_length'] for entry in rollouts):.0f} tokens"
        f", cut off {max(entry['completions/clipped_ratio'] for entry in rollouts):.0%}, gradient "
        f"norm {steepest['grad_norm']:.3g} at step {steepest['step']}, {slowest['seconds']:.1f} s "
        f"at step {slowest['step']}",
        f"budget {budget_hours:g} h: recommended max_steps = "
        f"{fitting_steps(log, seconds, budget_hours)}",
    ]
    return lines, faults(log)
