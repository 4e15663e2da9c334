"""Ablation: training runs that differ in a few settings -> what each gained over their one base.

The base and the last checkpoint of each run are measured with one engine on the same photos; what
is there already is not measured again. Figures of the training itself come from its log. The
published figures of another agent stand below the table for orientation, and are compared with
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from geoguessr_rl import artifacts
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends.evaluation import evaluate, require_adapters, shared_engine
from geoguessr_rl.bootstrap import Interval, holm, paired_bootstrap, verdict
from geoguessr_rl.config import EvalConfig
from geoguessr_rl.eval_metrics import RowValue, by_photo
from geoguessr_rl.runs import Run, load_runs
from geoguessr_rl.tables import columns, number

RESULT = "ablation.json"
BASE = "base"
HEAD = (
    "run", "scale_rewards", "beta", "prompts", "steps", "reward gain", "95 % interval",
    "GeoScore gain", "95 % interval", "spread", "peak norm", "verdict",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Published:
    """One run of somebody else's ablation, whose rewards have another scale."""

    run: str
    gain: float
    median_spread: float
    peak_grad_norm: float


PUBLISHED = (
    Published("run1", +0.162, 0.016, 11.25),
    Published("run2", +0.033, 0.193, 0.16),
    Published("run3", +0.072, 0.078, 6.77),
)
PUBLISHED_SOURCE = (
    "Published by FineEnvs, of an agent that acts over several turns, with other rewards and one "
    "seed each: for orientation only, not comparable with the figures above"
)


@dataclass(frozen=True, slots=True)
class Training:
    """What one training run was and what its log says.

    Attributes:
        run: The folder's name.
        adapter: The last checkpoint.
        scale_rewards: See `GRPOConfig`, like `beta`.
        beta: Weight of the KL term.
        prompts: Different photos that an optimizer step learns from.
        steps: Optimizer steps.
        median_spread: Median over the generating steps of the mean deviation of the reward within
            a group, in the run's own reward shape.
        peak_grad_norm: The largest gradient norm before clipping.
    """

    run: str
    adapter: Path
    scale_rewards: str
    beta: float
    prompts: int
    steps: int
    median_spread: float
    peak_grad_norm: float


@dataclass(frozen=True, slots=True)
class Arm:
    """One training run beside the base; the gains are paired over photos."""

    training: Training
    reward: Interval
    geoscore: Interval
    verdict: str


def read_training(folder: Path) -> Training:
    """Reads what a finished training run was, and its log.

    Raises:
        UserError: It is missing, has no checkpoint, or stopped before its last step.
    """
    from trl import GRPOConfig

    remedy = "run the same command again, which continues it"
    config = artifacts.read_json(folder / artifacts.RESOLVED_CONFIG, remedy=remedy)["trainer"]
    identity = artifacts.read_json(folder / artifacts.IDENTITY, remedy=remedy)
    checkpoints = artifacts.complete_checkpoints(folder)
    steps = artifacts.checkpoint_step(checkpoints[-1]) if checkpoints else 0
    if steps < config["max_steps"]:
        raise UserError(f"{folder} stopped at step {steps} of {config['max_steps']}; {remedy}")

    def setting(key: str) -> Any:
        return config.get(key, getattr(GRPOConfig, key))

    log = artifacts.read_training_log(folder)
    return Training(
        run=folder.name,
        adapter=checkpoints[-1],
        scale_rewards=str(setting("scale_rewards")),
        beta=setting("beta"),
        prompts=identity["completions_a_step"] // setting("num_generations"),
        steps=steps,
        median_spread=median(step["group_std"] for step in log if "group_std" in step),
        peak_grad_norm=max(step["grad_norm"] for step in log if "grad_norm" in step),
    )


def gain(base: Run, other: Run, value: RowValue) -> Interval:
    """Returns what a value gained over the base, photo by photo."""
    before, after = (
        [fmean(value(row) or 0.0 for row in rows) for rows in by_photo(run.rows).values()]
        for run in (base, other)
    )
    return paired_bootstrap(before, after)


def compare(trainings: Sequence[Training], base: Run, others: Sequence[Run]) -> list[Arm]:
    """Holds each run against the base; the verdicts, on reward, are adjusted as one family."""
    rewards = [gain(base, run, lambda row: row.total) for run in others]
    adjusted = holm([reward.p for reward in rewards])
    photos = len(by_photo(base.rows))
    return [
        Arm(
            training,
            reward,
            gain(base, run, lambda row: row.geoscore),
            verdict(reward.difference, p, photos),
        )
        for training, run, reward, p in zip(trainings, others, rewards, adjusted, strict=True)
    ]


def measure(config: EvalConfig, adapters: Sequence[Path | None]) -> list[Path]:
    """Evaluates the base (None) and adapters with one engine, and returns the runs' folders.

    Raises:
        UserError: See `evaluate`, or a run lacks answers.
    """
    using = shared_engine(config, [lora for lora in adapters if lora is not None])
    folders = []
    for lora in adapters:
        # The step belongs to the name, so that a run that is trained on is measured anew.
        name = f"{lora.parent.name}-step-{artifacts.checkpoint_step(lora)}" if lora else BASE
        one = config.model_copy(update={"run_name": name, "lora": lora})
        if not evaluate(one, using(lora))["complete"]:
            raise UserError(f"{name} is incomplete; run the same command again")
        folders.append(config.output_dir / name / config.split)
    return folders


def run(config: EvalConfig, folders: Sequence[Path], out: Path) -> list[str]:
    """Measures what is not measured yet, writes `ablation.json`, and returns the table's lines.

    Args:
        config: The base model, split and sampling. Runs go to `base` and `<training>-step-N`.
        folders: Training runs from that base.
        out: Where `ablation.json` goes.

    Raises:
        UserError: A training run is not finished, or measurements are not comparable.
    """
    require_adapters(config)
    trainings = [read_training(folder) for folder in folders]
    measured = measure(config, [None, *(training.adapter for training in trainings)])
    (base, *others), split = load_runs(measured)
    arms = compare(trainings, base, others)
    photos = len(by_photo(base.rows))
    record = {
        "split": split.name,
        "photos": photos,
        "runs": arms,
        "published": {"source": PUBLISHED_SOURCE, "runs": PUBLISHED},
    }
    artifacts.write_json(out / RESULT, record)
    return [
        *table(arms),
        f"gains over the base on {split.name}, {photos} photos: mean reward in the default shape, "
        "and GeoScore, each with its paired 95 % interval",
        "the verdict is on reward; its p-values are adjusted as one family (Holm)",
        "an interval covers the choice of photos and not that of the seed: train again with "
        "another trainer.seed before you believe that two runs differ",
        "",
        f"{PUBLISHED_SOURCE}.",
        *published_table(),
    ]


def signed(value: float) -> str:
    """Writes a difference of rewards, with a real minus."""
    return f"{value + 0.0:+.3f}".replace("-", "−")


def table(arms: Sequence[Arm]) -> list[str]:
    """Returns the runs in lines of text."""
    rows: list[tuple[str, ...]] = [HEAD]
    for arm in arms:
        training, reward = arm.training, arm.reward
        low, mean, high = (
            number(x, "score", signed=True)
            for x in (arm.geoscore.low, arm.geoscore.difference, arm.geoscore.high)
        )
        rows.append(
            (
                training.run,
                training.scale_rewards,
                f"{training.beta:g}",
                str(training.prompts),
                str(training.steps),
                signed(reward.difference),
                f"{signed(reward.low)} to {signed(reward.high)}",
                mean,
                f"{low} to {high}",
                f"{training.median_spread:.3f}",
                f"{training.peak_grad_norm:.2f}",
                arm.verdict,
            )
        )
    return columns(rows)


def published_table() -> list[str]:
    """Returns the published figures in lines of text."""
    rows = [("run", "reward gain", "spread", "peak norm")]
    rows += [
        (one.run, signed(one.gain), f"{one.median_spread:.3f}", f"{one.peak_grad_norm:.2f}")
        for one in PUBLISHED
    ]
    return columns(rows)
