"""Checkpoints: every whole checkpoint of a training run on one split, with one engine for all.

The base is loaded once and the adapters are changed under it. The outcome is a table over steps,
`checkpoints.json` for the report's curve, and the step after which training bought nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from geoguessr_rl import artifacts
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends.evaluation import evaluate, require_adapters, shared_engine
from geoguessr_rl.backends.predictions import find_adapter
from geoguessr_rl.bootstrap import paired_bootstrap
from geoguessr_rl.config import EvalConfig
from geoguessr_rl.eval_metrics import by_photo
from geoguessr_rl.records import Prediction
from geoguessr_rl.tables import columns, number


@dataclass(frozen=True, slots=True)
class Point:
    """One checkpoint's figures; `step` 0 is the base. See `eval_metrics.compute_metrics`."""

    step: int
    mean_geoscore: float
    low: float
    high: float
    country_acc: float
    format_rate: float
    zero_share: float
    tokens_p50: int


def plateau(scores: Sequence[Sequence[float]]) -> int:
    """Returns the position of the first checkpoint that no later one beats by its interval.

    Args:
        scores: GeoScores of each checkpoint in the order of steps, the same photos in each.
    """
    for here, values in enumerate(scores):
        later = (paired_bootstrap(values, other) for other in scores[here + 1 :])
        if all(interval.low <= 0 for interval in later):
            return here
    return len(scores) - 1


def advice(points: Sequence[Point], best: int) -> str:
    """Returns the sentence about the plateau."""
    last, stop = points[-1].step, points[best].step
    if stop == last:
        return f"no plateau: step {last} is better than every one before by more than its interval"
    return (
        f"plateau at step {stop}: no later checkpoint is better by more than its interval; to stop "
        f"there would have saved {last - stop} of {last} steps ({(last - stop) / last:.0%})"
    )


def run(config: EvalConfig, training: Path) -> list[str]:
    """Evaluates the base and every checkpoint, and returns the table's lines.

    Args:
        config: The base model, split and sampling. Each run goes to `<run_name>-step-N`.
        training: The training run's folder; `checkpoints.json` is written there.

    Raises:
        UserError: There is no whole checkpoint, or the backend cannot change adapters.
    """
    require_adapters(config)
    adapters = [find_adapter(path) for path in artifacts.complete_checkpoints(training)]
    if not adapters:
        raise UserError(f"{training} holds no whole checkpoint; give a training run's folder")

    using = shared_engine(config, adapters)
    points, scores = [], []
    for lora in [None, *adapters]:
        step = 0 if lora is None else artifacts.checkpoint_step(lora)
        name = f"{config.run_name}-step-{step}"
        one = config.model_copy(update={"run_name": name, "lora": lora})
        metrics = evaluate(one, using(lora))
        if not metrics["complete"]:
            raise UserError(f"{name} is incomplete; run the same command again")
        folder = config.output_dir / name / config.split
        rows = artifacts.read_rows(folder / artifacts.PREDICTIONS, Prediction)
        photos = by_photo(rows[: metrics["n"]])
        scores.append([float(np.mean([row.geoscore for row in k])) for k in photos.values()])
        low, high = metrics["intervals"]["mean_geoscore"]
        named = ("mean_geoscore", "country_acc", "format_rate", "zero_share")
        figures = {key: metrics[key] for key in named}
        tokens = metrics["completion_tokens"]["p50"]
        points.append(Point(step, low=low, high=high, tokens_p50=tokens, **figures))
    best = plateau(scores)
    record = {
        "split": config.split,
        "photos": len(scores[0]),
        "plateau_step": points[best].step,
        "points": [asdict(point) for point in points],
    }
    artifacts.write_json(training / artifacts.CHECKPOINTS, record)
    return [*table(points), advice(points, best)]


def table(points: Sequence[Point]) -> list[str]:
    """Returns the figures over steps in lines of text."""
    head = ("step", "GeoScore", "95 % interval", "country %", "format %", "zero %", "tokens p50")
    rows = [
        (
            str(point.step),
            number(point.mean_geoscore, "score"),
            f"{number(point.low, 'score')} to {number(point.high, 'score')}",
            *(number(x, "share") for x in (point.country_acc, point.format_rate, point.zero_share)),
            str(point.tokens_p50),
        )
        for point in points
    ]
    return columns([head, *rows])
