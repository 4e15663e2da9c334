"""Evaluate: a model's answers on a frozen split -> `predictions.jsonl` and `metrics.json`.

Every figure is computed from the rows that stand in the file. Comparing two runs is the report's
work.
"""

from collections.abc import Mapping
from typing import Any

from geoguessr_rl import artifacts, data
from geoguessr_rl.backends.predictions import (
    check_trained_alike,
    find_adapter,
    generate,
    identity,
    sampling_of,
)
from geoguessr_rl.config import EvalConfig
from geoguessr_rl.eval_metrics import compute_metrics
from geoguessr_rl.records import Prediction


def run(config: EvalConfig) -> dict[str, Any]:
    """Evaluates one model on one split and returns its metrics.

    Raises:
        UserError: The split, model or adapter is missing or unfit, the folder holds another run,
            or another process writes it.
    """
    split = data.load_split(config.data_dir, config.split, limit=config.limit)
    sampling = sampling_of(config.generation, 1)
    if config.lora is not None:
        lora = find_adapter(config.lora)
        check_trained_alike(lora, config.prompt.style, split.image_policy)
        config = config.model_copy(update={"lora": lora})
    out = config.output_dir / config.run_name / config.split
    with artifacts.run_lock(out):
        described = identity(
            split, config.generation, config.model, config.prompt, config.lora, sampling
        )
        artifacts.claim(
            out / artifacts.IDENTITY,
            described,
            holds_work=artifacts.holds_rows(out / artifacts.PREDICTIONS),
        )
        artifacts.write_json(out / artifacts.RESOLVED_CONFIG, config)
        rows = generate(
            out / artifacts.PREDICTIONS,
            split.photos,
            config.generation,
            config.model,
            config.prompt,
            sampling,
            lora=config.lora,
            allow_base_mismatch=config.allow_base_mismatch,
        )
        metrics = {
            "run_name": config.run_name,
            **compute_metrics(rows, split.country_share),
            "run": described,
            "allow_base_mismatch": config.allow_base_mismatch,
        }
        longer = artifacts.read_rows(out / artifacts.PREDICTIONS, Prediction)[len(rows) :]
        if longer and (out / artifacts.METRICS).is_file():
            print(f"{out / artifacts.METRICS} keeps the figures of the longer run")
        else:
            artifacts.write_json(out / artifacts.METRICS, metrics)
    return metrics


def summary_line(metrics: Mapping[str, Any]) -> str:
    """Returns the one line that a run prints at its end; a figure of nothing reads `none`."""

    def text(key: str, spec: str) -> str:
        return "none" if metrics[key] is None else format(metrics[key], spec)

    return (
        f"{metrics['run_name']} on {metrics['run']['split']}: n {metrics['n']}, "
        f"GeoScore {text('mean_geoscore', '.0f')}, country {text('country_acc', '.1%')}, "
        f"format {text('format_rate', '.1%')}, median {text('median_km', '.0f')} km; recommended "
        f"max_completion_length {text('recommended_max_completion_length', 'd')}"
    )
