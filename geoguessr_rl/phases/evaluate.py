"""Evaluate: a model's answers on a frozen split -> `predictions.jsonl` and `metrics.json`.

The work is `backends/evaluation.py`'s; here stands what a run says at its end.
"""

from collections.abc import Mapping
from typing import Any

from geoguessr_rl.backends.evaluation import evaluate
from geoguessr_rl.config import EvalConfig

NAMED = 5  # missing photos that a line names


def run(config: EvalConfig) -> dict[str, Any]:
    """Evaluates one model on one split and returns its metrics; see `evaluation.evaluate`."""
    return evaluate(config)


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


def closing_lines(metrics: Mapping[str, Any]) -> list[str]:
    """Returns what a run says beside its summary: K samples, cost, and what is missing."""
    lines = []
    if metrics["of_k"]:
        of_k = {
            name: f"{figures['mean_geoscore']['value']:.0f} "
            f"({figures['mean_geoscore']['interval'][0]:.0f} to "
            f"{figures['mean_geoscore']['interval'][1]:.0f})"
            for name, figures in metrics["of_k"].items()
        }
        k = metrics["samples"]
        lines.append(", ".join(f"{name}-of-{k} GeoScore {text}" for name, text in of_k.items()))
    if used := metrics["usage"]:
        cost = "" if used["dollars"] is None else f", {used['dollars']:.2f} dollars"
        lines.append(
            f"{used['prompt_tokens']:,} prompt and {used['completion_tokens']:,} completion "
            f"tokens{cost}"
        )
    if missing := metrics["missing"]:
        named = ", ".join(missing[:NAMED]) + (" ..." if len(missing) > NAMED else "")
        lines.append(
            f"incomplete: {len(missing)} photos have no answer ({named}); run the same command "
            "again, which asks for these alone"
        )
    return lines
